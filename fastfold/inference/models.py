"""Networks of a run: weights files, their suitability for a target, and loading."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from fastfold.data.targets import Target, safe_stem
from fastfold.data.templates.options import TemplateOptions
from fastfold.errors import ConfigError, InputError, TargetError, WeightsError
from fastfold.evoformer.config import MINI, has_whole_blocks, is_multimer, is_trained_on_complexes
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import precision_of, set_precision
from fastfold.evoformer.weights.checkpoint import WeightsInfo, load_model, weights_info
from fastfold.evoformer.weights.published import weights_files
from fastfold.inference.config import InferConfig
from fastfold.inference.network_settings import apply_settings
from fastfold.utils.hashing import file_digest


class Network:
    """Weights file and, once it is loaded, its network; raises WeightsError if invalid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.info: WeightsInfo = weights_info(path)
        self._model: AlphaFold | None = None

    @cached_property
    def name(self) -> str:
        """Name of the network in file names."""
        return network_name(self.path)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, 64 hexadecimal digits."""
        return file_digest(self.path)

    @property
    def takes_templates(self) -> bool:
        """True if it uses templates."""
        return bool(self.info.config.model.embeddings_and_evoformer.template.enabled)

    def load(self, precision: str | None) -> AlphaFold:
        """Return the network in a precision of its trunk, float32 by default, or raise WeightsError for a damaged file.

        A network in float32 changes in place, because its parameters are those of the file; others are loaded again.
        """
        wanted = precision or "fp32"
        kept = "fp32" if self._model is None else precision_of(self._model)
        if self._model is None or kept not in (wanted, "fp32"):
            if self._model is not None:
                self.info = weights_info(self.path)  # the rounded network may be in use
            self._model, kept = load_model(self.path, model=self.info.model), "fp32"
            self._model.name = self.name
        return self._model if kept == wanted else set_precision(self._model, wanted)


def about_mini(network: Network) -> str:
    """Return a line for a run without weights of the user's choice."""
    chains = int(network.info.notes.get("trained_chains", "0"))
    return (
        f"no `weights` given: using the small network that ships with FastFold (mini, trained on {chains:,} protein "
        "chains). It does not replace AlphaFold's weights: download them with 'fastfold weights download monomer_ptm', "
        "for `weights=monomer_ptm` (complexes: multimer)"
    )


def open_networks(weights: Sequence[Path], *, skip: Callable[[str], None] | None = None) -> list[Network]:
    """Open the networks of weights files or published names, checked and not yet loaded.

    ``skip`` is called with errors of files to leave out; without it they are raised. A ConfigError tells that two
    networks have the same name, a WeightsError that a file is invalid, or that all are left out.
    """
    networks: dict[str, Network] = {}
    for path in itertools.chain.from_iterable(map(weights_files, weights)):
        try:
            network = Network(path)
        except WeightsError as error:
            if skip is None:
                raise
            skip(str(error))
            continue
        known = networks.setdefault(network.name, network)
        if known is not network:
            raise ConfigError(
                f"{known.path} and {path} would both be named {network.name!r} in the results: rename one of the files"
            )
    if not networks:
        raise WeightsError("no weights file is valid")
    return list(networks.values())


def limit_networks(networks: Sequence[Network], number: int | None) -> list[Network]:
    """Return the first networks of each kind, monomer and multimer; all without a number."""
    kept: list[Network] = []
    for network in networks:
        alike = sum(one.info.multimer == network.info.multimer for one in kept)
        if number is None or alike < number:
            kept.append(network)
    return kept


def requested_networks(
    weights: Sequence[Path], number: int | None = None, *, skip: Callable[[str], None] | None = None
) -> list[Network]:
    """Open the networks of a request as :func:`open_networks`; without weights, the small network that ships."""
    return limit_networks(open_networks(list(weights) or [Path(MINI)], skip=skip), number)


def network_name(path: Path) -> str:
    """Return the name of a weights file's network in results: the file name without ``params_`` and suffix."""
    return safe_stem(path.name.rsplit(".", 1)[0].removeprefix("params_"))


def suitable(networks: Sequence[Network], target: Target) -> list[Network]:
    """Return the networks of the target's kind, or all if none is of its kind.

    A monomer network folds a complex as one chain with gaps in the residue numbers.
    """
    return [network for network in networks if network.info.multimer == target.is_complex] or list(networks)


def untrained_networks(networks: Sequence[Network], targets: Sequence[Target]) -> list[str]:
    """Return the names of networks trained on single chains that would fold a complex."""
    used = [network for target in targets if target.is_complex for network in suitable(networks, target)]
    return list(dict.fromkeys(n.name for n in used if not is_trained_on_complexes(n.info.config)))


def refuse_complexes(targets: Sequence[Target]) -> tuple[list[Target], list[InputError]]:
    """Return single chains, and an error for each complex, of a run in which the user chose no network."""
    errors: list[InputError] = [
        TargetError(
            target.name,
            f"complex of {len(target.chains)} chains, but the default network was trained on single "
            "chains. Give `weights=multimer`, or `weights=mini` to see structures without interface scores",
        )
        for target in targets
        if target.is_complex
    ]
    return [target for target in targets if not target.is_complex], errors


def refuse_without_atoms(targets: Sequence[Target]) -> tuple[list[Target], list[InputError]]:
    """Return targets whose chains have known residues, and an error for each other target to fold."""
    suitable: list[Target] = []
    errors: list[InputError] = []
    for target in targets:
        unknown = [chain.id for chain in target.chains if set(chain.sequence) == {"X"}]
        if not unknown or target.scored_structure is not None:
            suitable.append(target)
            continue
        what = f"chain {unknown[0]}" if target.is_complex else "the sequence"
        errors.append(
            TargetError(
                target.name,
                f"{what} has only unknown residues (X), whose atoms cannot be predicted; give at least one of the "
                f"twenty amino acids{', or leave the chain out' * target.is_complex}",
            )
        )
    return suitable, errors


def refuse_untrained(networks: Sequence[Network], targets: Sequence[Target]) -> None:
    """Raise ConfigError if a network trained on single chains only would fold a complex."""
    if untrained := untrained_networks(networks, targets):
        raise ConfigError(
            f"cannot screen complexes with {untrained[0]}, which was trained on single chains only: its structures "
            "are not informative about partners. Give `weights=multimer`"
        )


def check_networks(networks: Sequence[Network], config: InferConfig, templates: TemplateOptions) -> None:
    """Raise ConfigError if the networks of a run contradict its settings or templates."""
    if config.ranks > 1:
        check_divisible(networks)
    if config.embed is not None:
        config.embed.check_networks({network.name: network.info.config for network in networks})
    check_settings(config, [network.info.config for network in networks])
    check_takers(templates, networks)


def check_divisible(networks: Sequence[Network]) -> None:
    """Raise ConfigError if a network's blocks cannot be divided, because they lack steps of AlphaFold's."""
    for network in networks:
        if not has_whole_blocks(network.info.config):
            raise ConfigError(
                f"`parallel` divides AlphaFold's blocks, and those of {network.name} lack attention along an axis; "
                "leave out `parallel`, or give `weights` of another network"
            )


def check_settings(config: InferConfig, networks: Iterable[Any]) -> None:
    """Raise ConfigError for a setting that changes none of the networks' configuration trees."""
    if not config.use_cluster_profile and not any(map(is_multimer, networks)):
        raise ConfigError(
            "cluster profiles can be disabled for multimer networks only, and monomer networks are given; leave out "
            "`InferConfig.use_cluster_profile`, or give `weights=multimer`"
        )


def check_takers(options: TemplateOptions, networks: Sequence[Network]) -> None:
    """Raise ConfigError if templates are requested and no network of a run uses any."""
    if options.wanted and not options.is_optional and not any(n.takes_templates for n in networks):
        names = ", ".join(network.name for network in networks)
        raise ConfigError(
            f"templates are given, but {names} {'do' if len(networks) > 1 else 'does'} not use any; of AlphaFold's "
            "networks model_1 and model_2 (with or without _ptm) and all multimer networks do. Give `weights` of one, "
            "or leave the templates out"
        )


def target_cost(target: Target, networks: Sequence[Network], config: InferConfig) -> float:
    """Estimate the work of a target: cubic in its length, plus a constant."""
    own = (apply_settings(config, network.info.config).model for network in suitable(networks, target))
    passes = sum(model.num_recycle + 1 for model in own) * len(target.seeds or config.seeds)
    if config.sample is not None:
        passes *= config.sample.number or 1
    n = target.num_residues
    return passes * float(n + 50) ** 2 * (n + 500)
