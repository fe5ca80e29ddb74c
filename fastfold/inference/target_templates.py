"""Templates of a target, as features for networks and as lines and records for users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from fastfold.data.features.assembly import share_frames
from fastfold.data.features.raw import TEMPLATE_LAYOUT
from fastfold.data.msa.find import ChainMsas, find_template_hits
from fastfold.data.targets import Target
from fastfold.data.templates.options import TemplateOptions
from fastfold.data.templates.select import ChainTemplates
from fastfold.data.templates.source import TemplateFinder, parts_of
from fastfold.errors import ConfigError
from fastfold.evoformer.config import is_multimer
from fastfold.inference.models import Network
from fastfold.protein.io.read import is_structure

Features = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class TargetTemplates:
    """Templates of a target's chains."""

    #: Per chain, raw features (:func:`fastfold.data.features.raw.template_features`) or None
    features: tuple[Features | None, ...]
    report: tuple[dict[str, Any], ...] = ()  #: Per chain, found, used and left-out templates, in JSON's types
    lines: tuple[str, ...] = ()  #: Report in words, a line for each sequence

    def cut(self, target: Target) -> TargetTemplates:
        """Return the templates of a target's parts, from those of its whole chains."""
        cut = []
        for chain, one in zip(target.chains, self.features, strict=True):
            if one is not None and chain.regions:
                columns = np.array(chain.numbers) - 1
                axes = {name: shape.index("N") for name, shape in TEMPLATE_LAYOUT.items() if "N" in shape}
                one = {**one, **{name: np.take(one[name], columns, axis) for name, axis in axes.items()}}
            cut.append(one)
        return replace(self, features=tuple(cut))

    @property
    def is_in_one_frame(self) -> bool:
        """True if every template spans all chains of the target."""
        return share_frames(self.features)

    @property
    def number(self) -> int:
        """Largest number of templates of a chain."""
        return max((len(one.get("template_aatype", ())) for one in self.features if one), default=0)


def takes_templates(config: ConfigDict, target: Target, *, are_whole: bool = False) -> bool:
    """Return True if a network uses templates of a target; monomer networks use those that span all its chains."""
    enabled = bool(config.model.embeddings_and_evoformer.template.enabled)
    return enabled and (is_multimer(config) or not target.is_complex or are_whole)


def find_templates(
    finder: TemplateFinder | None,
    target: Target,
    alignments: Sequence[ChainMsas],
    networks: Sequence[Network],
    msa_dir: Path | None,
) -> TargetTemplates | None:
    """Find a target's templates for the networks that use them, and unused hits in ``msa_dir``, or raise InputError.

    Alignments and templates are those of whole chains. The result has only lines if no templates are used; None without
    either.
    """
    if target.scored_structure is not None and (own := target.scored_structure.templates()) is not None:
        return given_features(target, own)
    if target.templates is not None and finder is None:
        return _own_templates(target, target.templates, networks)
    are_whole = finder is not None and bool(finder.complexes) and not finder.options.has_single_chains
    takers = [n for n in networks if takes_templates(n.info.config, target, are_whole=are_whole)]
    nothing: tuple[None, ...] = (None,) * len(target.chains)
    unused = _unused_hits(finder, target.uncut, msa_dir) if takers else []
    if target.templates is not None:
        kept = "; those with 'force' are kept to" if target.has_forced_templates else ""
        unused.append(f"the templates of the input are not used, but those of the command{kept}")
    if finder is None:
        return TargetTemplates(nothing, lines=tuple(unused)) if unused else None
    if not takers:
        names = ", ".join(network.name for network in networks)
        kind = " for a complex" if target.is_complex else ""
        line = f"without templates, which these networks do not use{kind}: {names}"
        return TargetTemplates(nothing, lines=(line,))
    templates = finder.find(target, alignments, msa_dir)
    others = [network.name for network in networks if network not in takers]
    notes = [f"without templates, which these networks do not use: {', '.join(others)}"] if others else []
    return _found_templates(target, templates, [*unused, *notes])


def _unused_hits(finder: TemplateFinder | None, target: Target, msa_dir: Path | None) -> list[str]:
    """Return a line about unused hits among the target's alignments."""
    if msa_dir is None or target.has_all_alignments:
        return []
    if finder is not None and finder.options.mmcif_dir is not None:
        return []
    if not (files := find_template_hits(msa_dir, target)):
        return []
    names = ", ".join(dict.fromkeys(str(paths[0]) for paths in files.values()))
    return [
        f"unused hits of a template search: {names}; `TemplateOptions.mmcif_dir=DIR`, a folder of the PDB's mmCIF "
        "files, makes them templates"
    ]


def _own_templates(
    target: Target, features: Sequence[Features | None], networks: Sequence[Network]
) -> TargetTemplates:
    """Return the templates of a target's input, with a line about them and networks that use none."""
    templates = given_features(target, features)
    names = {one["chain"]: [used["name"] for used in one["used"]] for one in templates.report}
    lines = [f"templates of chain {chain}: {', '.join(own)}" for chain, own in names.items() if own]
    others = [n.name for n in networks if not takes_templates(n.info.config, target)]
    if others:
        kind = " for a complex" if target.is_complex else ""
        lines.append(f"without templates, which these networks do not use{kind}: {', '.join(others)}")
    return replace(templates, lines=tuple(lines))


def given_features(target: Target, features: Sequence[Features | None]) -> TargetTemplates:
    """Return templates from given features, per chain."""
    report = []
    for chain, one in zip(target.chains, features, strict=False):
        one = one or {}
        number = len(one.get("template_aatype", ()))
        names: Any = one.get("template_domain_names", ())
        if len(names) != number:
            names = [f"template_{i + 1}" for i in range(number)]
        texts = (name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in names)
        used = [{"name": text} for text in texts]
        report.append(
            {"chain": chain.id, "sources": ["given features"], "found": number, "used": used, "left_out": []}
        )
    return TargetTemplates(tuple(features), tuple(report))


def read_templates(target: Target, alignments: Sequence[ChainMsas], templates: Any) -> TargetTemplates | None:
    """Read the templates given in Python, or raise ConfigError or InputError.

    They are None, files or folders for all chains, features of the only chain, a list of one of these per chain, or
    :class:`~fastfold.data.templates.options.TemplateOptions`. In place of a file, any structure of
    :func:`~fastfold.protein.io.read.read_structure`.
    """
    if templates is None:
        return None
    if isinstance(templates, TemplateOptions):
        if templates.mmcif_dir is not None or templates.server:
            raise ConfigError(
                "templates: in Python, TemplateOptions has files: structures, complexes and chains"
            )
        per_target = TemplateFinder(templates).find(target, alignments)
    elif _is_files(templates):
        per_target = _of_files(templates).find(target, alignments)
    else:
        per_chain = [templates] if isinstance(templates, Mapping) else templates
        if not isinstance(per_chain, (list, tuple)):
            raise ConfigError(f"templates must be files or features, found {type(templates).__name__}")
        if not any(map(_is_files, per_chain)):
            if wrong := [one for one in per_chain if one is not None and not isinstance(one, Mapping)]:
                raise ConfigError(f"templates must be files or features, found {type(wrong[0]).__name__}")
            return given_features(target, per_chain)
        per_target = _of_each_chain(target, alignments, per_chain)
    return _found_templates(target, per_target)


def _of_each_chain(
    target: Target, alignments: Sequence[ChainMsas], per_chain: Sequence[Any]
) -> list[ChainTemplates]:
    """Return the templates of each chain from its files, None for none."""
    if not all(one is None or _is_files(one) for one in per_chain):
        raise ConfigError("templates: give files for all chains, or features for all chains, not both")
    if len(per_chain) != len(target.chains):
        raise ConfigError(
            f"{len(target.chains)} chains, but templates for {len(per_chain)}: give one list of files per chain, "
            "with None for a chain without templates"
        )
    return [
        ChainTemplates() if one is None else _of_files(one).find(target, alignments)[i]
        for i, one in enumerate(per_chain)
    ]


def _is_files(source: Any) -> bool:
    if isinstance(source, (list, tuple)):
        return bool(source) and all(map(is_structure, source))
    return is_structure(source)


def _of_files(source: Any) -> TemplateFinder:
    structures = tuple(source) if isinstance(source, (list, tuple)) else (source,)
    return TemplateFinder(TemplateOptions(structures=structures))


def _found_templates(
    target: Target, templates: Sequence[ChainTemplates], notes: Sequence[str] = ()
) -> TargetTemplates:
    groups: dict[tuple[str, str], list[str]] = {}
    for chain, chosen in zip(target.chains, templates, strict=True):
        groups.setdefault((chain.sequence, chosen.describe()), []).append(chain.id)
    lines = [f"templates{_of_chains(target, ids)}: {text}" for (_, text), ids in groups.items()]
    report = [
        {"chain": chain.id, **chosen.report(parts_of(chain))}
        for chain, chosen in zip(target.chains, templates, strict=True)
    ]
    features = tuple(one.features() or None for one in templates)
    return TargetTemplates(features, tuple(report), (*lines, *notes))


def _of_chains(target: Target, ids: Sequence[str]) -> str:
    return f" of chain{'s' if ids[1:] else ''} {', '.join(ids)}" if target.is_complex else ""
