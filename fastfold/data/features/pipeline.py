"""The features of one target: what the network gets in each recycling iteration.

:func:`featurize` is the way in from chains and alignments; :func:`sampler_from_raw` and
:func:`sampler_from_merged` start from features that AlphaFold's own data pipelines made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastfold.data.features import coevolution, merging, monomer, multimer
from fastfold.data.features.assembly import (
    Features,
    chain_alignments,
    joined_features,
    monomer_features,
    multimer_features,
)
from fastfold.errors import ConfigError, InputError

if TYPE_CHECKING:
    from fastfold.data.msa.msa import ChainMsas
    from fastfold.data.targets import Chain


class FeatureSampler:
    """One target's features; the alignment rows are drawn anew for each recycling iteration.

    Everything random comes from ``np.random.default_rng([seed, cycle, ensemble])``: one iteration's
    features do not depend on which others were asked for before.

    Args:
        static: Features that all iterations share.
        draw: Makes an iteration's own features from a random generator.
        seed: Not negative.
        is_multimer: Whether the features are those of the multimer networks.
        resample: Whether each iteration draws its own rows (all official presets do) or repeats the first
            one's.
        chain_order: Per chain of the features, its place in the order in which the chains were given.

    Attributes:
        static: Features that do not change between iterations (types in the modules that make them:
            :func:`fastfold.data.features.monomer.prepare`, :func:`fastfold.data.features.multimer.prepare`).
        num_residues: Number of residues of all chains together.
        is_multimer: As given.
        chain_order: As given. The features group the copies of each entity; if there are several chains, a
            chain's residues are those whose ``asym_id`` is its place in this tuple, counted from one.
    """

    def __init__(
        self,
        static: Features,
        draw: Callable[[np.random.Generator], Features],
        *,
        seed: int,
        is_multimer: bool,
        resample: bool = True,
        chain_order: tuple[int, ...] = (0,),
    ) -> None:
        if seed < 0:
            raise ConfigError(f"the seed must not be negative, got {seed}")
        self.static = static
        self.num_residues = len(static["aatype"])
        self.is_multimer = is_multimer
        self.chain_order = chain_order
        self._draw, self._seed, self._resample = draw, seed, resample

    def sample(self, cycle: int, ensemble: int = 0) -> Features:
        """The features of one recycling iteration, without leading axes.

        Args:
            cycle: Recycling iteration, from zero.
            ensemble: Number of the ensemble's member within the iteration, from zero.

        Returns:
            The static features and ``msa_feat``, ``msa_mask``, ``true_msa``, ``bert_mask``, ``extra_msa``,
            ``extra_msa_mask``, ``extra_has_deletion``, ``extra_deletion_value``; for monomer networks also
            ``msa_row_mask`` and ``extra_msa_row_mask``.
        """
        rng = np.random.default_rng([self._seed, cycle if self._resample else 0, ensemble])
        return {**self.static, **self._draw(rng)}

    def stack(self, num_cycles: int, num_ensemble: int = 1) -> Features:
        """All iterations at once, each feature with a leading axis of ``num_cycles * num_ensemble``.

        The members of one iteration's ensemble stand together, as in AlphaFold's monomer batch.
        """
        samples = [self.sample(c, e) for c in range(num_cycles) for e in range(num_ensemble)]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def featurize(
    chains: Sequence[Chain],
    alignments: Sequence[ChainMsas],
    config: Any,
    *,
    seed: int = 0,
    templates: Sequence[Mapping[str, Any] | None] | None = None,
    join: bool = False,
) -> FeatureSampler:
    """Features of a target, a chain or a complex, as the network of this config takes them.

    Args:
        chains: Its chains.
        alignments: Per chain, the alignments to use as they are (in this order, for example UniRef90, BFD,
            MGnify) and those whose rows are paired across different chains by species (UniProt), or line by
            line if they came as lines (``Msa.as_is``). Either may be empty.
        config: Config tree of the network, with the official names.
        seed: All randomness follows from it; not negative.
        templates: Per chain, raw template features (see
            :func:`fastfold.data.features.raw.template_features`) or None.
        join: Fold a complex with a monomer network too, as one chain whose residue index jumps between the chains
            (:mod:`fastfold.data.features.joining`). The static features then have ``asym_id``.

    Returns:
        The target's :class:`FeatureSampler`.

    Raises:
        ConfigError: A complex for a monomer network without ``join``, or with templates, or a negative seed.
        InputError: No chain, or alignments or templates that don't belong to the chains.
    """
    if not chains:
        raise InputError("a target needs at least one chain")
    templates = templates or [None] * len(chains)
    if not len(chains) == len(alignments) == len(templates):
        raise InputError(
            f"{len(chains)} chains, but alignments for {len(alignments)} and templates for {len(templates)}"
        )
    if config.model.global_config.multimer_mode:
        merged = multimer_features(chains, alignments, templates)
        order = merging.chain_order([chain.sequence for chain in chains])
        return _multimer_sampler(merged, config, seed=seed, chain_order=order)
    if len(chains) == 1:
        raw = monomer_features(chains[0], alignments[0][0], templates[0])
        return sampler_from_raw(raw, config, seed=seed)
    if not join:
        raise ConfigError(
            f"this target is a complex of {len(chains)} chains, but the weights are of a monomer network; use "
            "weights of a multimer network (model_1_multimer_v3 and the like), or fold its chains separately"
        )
    if any(templates):
        raise ConfigError(
            "a monomer network takes no templates of a complex; use weights of a multimer network"
        )
    return _joined_sampler(chains, alignments, config, seed=seed)


def _joined_sampler(
    chains: Sequence[Chain], alignments: Sequence[ChainMsas], config: Any, *, seed: int
) -> FeatureSampler:
    """Features of a complex for a monomer network."""
    order = merging.chain_order([chain.sequence for chain in chains])
    raw = joined_features(chains, alignments)
    if coevolution.is_input(config):
        raw |= coevolution.of_chains(chain_alignments(chains, alignments))
    return sampler_from_raw(raw, config, seed=seed, chain_order=order)


def sampler_from_raw(
    raw: Mapping[str, np.ndarray], config: Any, *, seed: int = 0, chain_order: tuple[int, ...] = (0,)
) -> FeatureSampler:
    """Features for a monomer network from the raw features of AlphaFold's data pipeline.

    Args:
        raw: What :mod:`fastfold.data.features.raw` makes; with ``asym_id`` of several chains, joined.
        config: Config tree of a monomer network.
        seed: Not negative.
        chain_order: See :class:`FeatureSampler`.

    Raises:
        InputError: A raw feature is missing or malformed.
        ConfigError: The seed is negative.
    """
    static, alignment = monomer.prepare(raw, config)
    if "asym_id" in raw:
        static["asym_id"] = np.asarray(raw["asym_id"], np.int32)
    return FeatureSampler(
        static,
        lambda rng: monomer.cycle_features(alignment, monomer.draw_rows(rng, alignment, config)),
        seed=seed,
        is_multimer=False,
        resample=config.data.common.resample_msa_in_recycling,
        chain_order=chain_order,
    )


def sampler_from_merged(
    merged: Mapping[str, np.ndarray], config: Any, *, seed: int = 0, deterministic: bool = False
) -> FeatureSampler:
    """Features for a multimer network from the merged features of AlphaFold-Multimer's data pipeline.

    Args:
        merged: See :func:`fastfold.data.features.merging.merge_chains`.
        config: Config tree of a multimer network.
        seed: Not negative.
        deterministic: Take the rows in the order given, the first as cluster centres and the next as extra
            MSA, and mask nothing, in every iteration.

    Raises:
        InputError: A merged feature is missing or malformed.
        ConfigError: The seed is negative.
    """
    number = len(np.unique(merged["asym_id"])) if "asym_id" in merged else 0
    return _multimer_sampler(
        merged, config, seed=seed, chain_order=tuple(range(number)), deterministic=deterministic
    )


def _multimer_sampler(
    merged: Mapping[str, np.ndarray],
    config: Any,
    *,
    seed: int,
    chain_order: tuple[int, ...],
    deterministic: bool = False,
) -> FeatureSampler:
    static, alignment = multimer.prepare(merged, config)
    if not deterministic:
        alignment = multimer.drop_padding(alignment)

    def draw(rng: np.random.Generator) -> Features:
        if deterministic:
            rows = multimer.rows_in_order(alignment, config)
        else:
            rows = multimer.draw_rows(rng, alignment, config)
        return multimer.cycle_features(alignment, rows)

    return FeatureSampler(
        static,
        draw,
        seed=seed,
        is_multimer=True,
        resample=config.model.resample_msa_in_recycling,
        chain_order=chain_order,
    )
