"""Features of one target: the network's input in each recycling iteration.

:func:`featurize` starts from chains and alignments; :func:`sampler_from_raw` and :func:`sampler_from_merged` start from
features of AlphaFold's own data pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_collections import ConfigDict

from fastfold.data.features import coevolution, merging, monomer, multimer
from fastfold.data.features.assembly import (
    Features,
    chain_alignments,
    joined_features,
    monomer_features,
    multimer_features,
    share_frames,
)
from fastfold.data.msa.msa import Msa
from fastfold.data.targets import Chain
from fastfold.errors import ConfigError, InputError
from fastfold.utils.option_fields import check_kind, check_whole

if TYPE_CHECKING:
    from fastfold.data.msa.msa import ChainMsas

_LARGEST = 2**63 - 1


class FeatureSampler:
    """Features of one target, with alignment rows drawn for each recycling iteration.

    All random numbers come from ``np.random.default_rng([seed, cycle, ensemble])``, so an iteration's features do not
    depend on earlier requests.

    Args:
        static: Features that all iterations share (dtypes in :func:`fastfold.data.features.monomer.prepare` and
            :func:`fastfold.data.features.multimer.prepare`).
        draw: Computes an iteration's own features from a random generator.
        seed: Random seed, nonnegative.
        is_multimer: True for features of the multimer networks.
        resample: True if each iteration draws new rows (as in all official presets), False to repeat the first draw.
        chain_order: Per chain of the features, its index in the order of the input. The features group the copies of
            each entity; if there are several chains, a chain's residues are those whose ``asym_id`` is its place in
            this tuple, counted from one.

    Attributes:
        num_residues: Number of residues of all chains together.
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
        check_whole("seed", seed, 0, _LARGEST)
        self.static = static
        self.num_residues = len(static["aatype"])
        self.is_multimer = is_multimer
        self.chain_order = chain_order
        self._draw, self._seed, self._resample = draw, seed, resample

    def sample(self, cycle: int, ensemble: int = 0) -> Features:
        """Return the features of one recycling iteration and ensemble member, without leading axes.

        Returns:
            The static features and ``msa_feat``, ``msa_mask``, ``true_msa``, ``bert_mask``, ``extra_msa``,
            ``extra_msa_mask``, ``extra_has_deletion``, ``extra_deletion_value``; for monomer networks also
            ``msa_row_mask`` and ``extra_msa_row_mask``.
        """
        check_whole("cycle", cycle, 0, _LARGEST)
        check_whole("ensemble", ensemble, 0, _LARGEST)
        rng = np.random.default_rng([self._seed, cycle if self._resample else 0, ensemble])
        return {**self.static, **self._draw(rng)}

    def stack(self, num_cycles: int, num_ensemble: int = 1) -> Features:
        """Return all iterations, each feature with a leading axis of ``num_cycles * num_ensemble``.

        The ensemble members of one iteration are adjacent, as in AlphaFold's monomer batch.
        """
        check_whole("num_cycles", num_cycles, 1, _LARGEST)
        check_whole("num_ensemble", num_ensemble, 1, _LARGEST)
        samples = [self.sample(c, e) for c in range(num_cycles) for e in range(num_ensemble)]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def featurize(
    chains: Sequence[Chain],
    alignments: Sequence[ChainMsas],
    config: ConfigDict,
    *,
    seed: int = 0,
    templates: Sequence[Mapping[str, Any] | None] | None = None,
    join: bool = False,
) -> FeatureSampler:
    r"""Compute the features of a chain or complex for a network.

    Args:
        chains: Chains of the target.
        alignments: Per chain, the unpaired alignments (in this order, for example UniRef90, BFD, MGnify), and those
            whose rows are paired across different chains, by species (UniProt), or line by line if ``Msa.as_is``.
            Either may be empty.
        config: Configuration tree of the network, with the official names.
        seed: Random seed, nonnegative.
        templates: Per chain, raw template features (see :func:`fastfold.data.features.raw.template_features`) or None.
        join: Fold a complex with a monomer network, as one chain with gaps in the residue index
            (:mod:`fastfold.data.features.assembly`). The static features then have ``asym_id``.

    Raises:
        ConfigError: A complex for a monomer network without ``join``, or with templates of single chains, or an
            argument of the wrong type or value.
        InputError: Missing chains, or alignments or templates that do not belong to the chains.

    Example:
        >>> from fastfold import model_config
        >>> from fastfold.data import featurize, read_msa
        >>> from fastfold.data.targets import Chain
        >>> from pathlib import Path
        >>> _ = Path("query.a3m").write_text(">query\nMTYK\n>homolog\nM-YK\n")
        >>> chain, alignment = Chain("A", "MTYK"), read_msa("query.a3m")
        >>> sampler = featurize([chain], [([alignment], [])], model_config("model_1_ptm"))
        >>> sampler.sample(0)["aatype"].tolist()
        [12, 16, 18, 11]
    """
    check_kind("config", config, ConfigDict, "the configuration of a network, as of model_config")
    check_kind("chains", chains, (list, tuple), "a list of Chain")
    check_kind("alignments", alignments, (list, tuple), "a list with a pair for each chain")
    if not chains:
        raise InputError("a target needs at least one chain")
    templates = templates or [None] * len(chains)
    if not len(chains) == len(alignments) == len(templates):
        raise InputError(
            f"{len(chains)} chains, but alignments for {len(alignments)} and templates for {len(templates)}"
        )
    for chain, of_chain, template in zip(chains, alignments, templates, strict=True):
        check_kind("each of chains", chain, Chain, "a Chain")
        if not _is_pair(of_chain):
            raise ConfigError(
                f"alignments of chain {chain.id} must be two lists of Msa, unpaired and paired, such as ([msa], []), "
                f"found {type(of_chain).__name__}"
            )
        check_kind(f"templates of chain {chain.id}", template or {}, Mapping, "raw features or None")
    order = merging.chain_order([chain.entity for chain in chains])
    if config.model.global_config.multimer_mode:
        merged = multimer_features(chains, alignments, templates)
        return _multimer_sampler(merged, config, seed=seed, chain_order=order)
    if len(chains) == 1:
        raw = monomer_features(chains[0], alignments[0][0], templates[0])
        return sampler_from_raw(raw, config, seed=seed)
    if not join:
        raise ConfigError(
            f"this target is a complex of {len(chains)} chains, but the weights are of a monomer network; use "
            "weights of a multimer network (such as model_1_multimer_v3), or fold its chains separately"
        )
    if any(templates) and not share_frames(templates):
        raise ConfigError(
            "a monomer network does not use templates of single chains of a complex; use weights of a multimer network"
        )
    raw = joined_features(chains, alignments, templates)
    if coevolution.is_input(config):
        raw |= coevolution.of_chains(chain_alignments(chains, alignments))
    return sampler_from_raw(raw, config, seed=seed, chain_order=order)


def _is_pair(alignments: Any) -> bool:
    """Return True for two lists of alignments."""
    lists = (list, tuple)
    parts = alignments if isinstance(alignments, lists) and len(alignments) == 2 else [None]
    return all(isinstance(part, lists) and all(isinstance(one, Msa) for one in part) for part in parts)


def sampler_from_raw(
    raw: Mapping[str, np.ndarray], config: ConfigDict, *, seed: int = 0, chain_order: tuple[int, ...] = (0,)
) -> FeatureSampler:
    """Compute features for a monomer network from raw features of AlphaFold's data pipeline.

    These are features of :mod:`fastfold.data.features.raw`, with ``asym_id`` for joined chains; ``chain_order`` is that
    of :class:`FeatureSampler`.

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
    merged: Mapping[str, np.ndarray], config: ConfigDict, *, seed: int = 0, deterministic: bool = False
) -> FeatureSampler:
    """Compute features for a multimer network from merged features of AlphaFold-Multimer's data pipeline.

    These are features of :func:`fastfold.data.features.merging.merge_chains`. ``deterministic`` uses the first rows as
    cluster centres and the next as extra MSA, without masking, in every iteration.

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
    config: ConfigDict,
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
        return multimer.cycle_features(alignment, rows, config)

    return FeatureSampler(
        static,
        draw,
        seed=seed,
        is_multimer=True,
        resample=config.model.resample_msa_in_recycling,
        chain_order=chain_order,
    )
