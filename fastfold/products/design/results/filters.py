"""Filters of designs in a file, with the names and the form of BindCraft's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfold.errors import InputError
from fastfold.inference.output.score_files import is_number
from fastfold.products.design.agreement import BACKBONE, MOTIF, RING, given_figures
from fastfold.products.design.results.folds import (
    ALONE,
    BOUND,
    INTERFACE,
    RELAXED,
    SINGLE,
    Figures,
    mean_figure,
)
from fastfold.products.design.tasks.task import DesignTask
from fastfold.utils.foreign_text import parse_yaml, read_settings_text, shown

_MAX_BYTES = 2**20
_BY_RESIDUE = "InterfaceAAs"
_NAME = re.compile(r"(Average|[1-9]\d?)_(Off_)?(.+)")
_PROTOCOL = {**dict.fromkeys(BACKBONE, "fixbb"), **dict.fromkeys(MOTIF, "partial")}
_KNOWN = (*SINGLE, *INTERFACE, *BOUND, *ALONE, *_PROTOCOL, *RING)
_ROSETTA = ("Binder_Energy_Score", "PackStat", "dG", "dG/dSASA")
"""BindCraft's figures that are computed by Rosetta's energy function."""
_SPELLINGS = {"HotspotRMSD": "Hotspot_RMSD"}  #: Names of BindCraft's default file, and those of its tables
FROM_DESIGN = ("RMSD", "Hotspot_RMSD")
"""Figures that compare with the design, which has the first target alone."""


@dataclass(frozen=True)
class Filter:
    """Threshold of a figure of a design's folds (:func:`fastfold.products.design.results.folds.fold_figures`).

    ``network`` is a number from 1 in the order in which they fold, None for the mean over all folds. A value equal to
    the threshold passes. ``is_off`` filters the folds with an off-target.
    """

    figure: str
    network: int | None
    threshold: float
    higher: bool
    is_off: bool = False

    @property
    def name(self) -> str:
        """Name in the file."""
        off = "Off_" if self.is_off else ""
        return f"{'Average' if self.network is None else self.network}_{off}{self.figure}"

    @property
    def is_alone(self) -> bool:
        """True if the figure is that of a binder folded alone."""
        return self.figure in ALONE

    def failure(self, folds: Mapping[str, Sequence[Figures]]) -> str:
        """Return why a design fails, in words; empty if it passes.

        ``folds`` has the figures of its folds, by network in their order. A design without the figure fails.
        """
        chosen = list(folds.values())
        if self.network is not None:
            chosen = chosen[self.network - 1 : self.network]
        if (value := mean_figure([one for group in chosen for one in group], self.figure)) is None:
            return f"{self.name} is missing"
        passes = value >= self.threshold if self.higher else value <= self.threshold
        return "" if passes else f"{self.name} {value:.3g} {'<' if self.higher else '>'} {self.threshold:g}"


def read_filters(
    path: Path, task: DesignTask, *, networks: int, is_relaxed: bool = False, say: Callable[[str], None]
) -> list[Filter]:
    """Read filters from YAML or JSON, ``NAME: {threshold: NUMBER, higher: true}``, or raise InputError.

    Names are ``Average_`` or the number of a network, and a figure: ``Average_pLDDT``, ``2_i_pAE``. ``Off_`` before a
    figure filters the folds with off-targets (``Average_Off_i_pTM``). ``InterfaceAAs`` has a threshold per residue
    type. Filters whose threshold is null are left out, so that files of BindCraft can be used.

    Args:
        path: The file.
        task: Task of the designs.
        networks: Number of networks that fold the designs; filters of further ones are left out, as in BindCraft.
        is_relaxed: True if all folds are relaxed.
        say: Called with a line that names the filters that are left out.
    """
    content = parse_yaml(read_settings_text(path, limit=_MAX_BYTES), path)
    if not isinstance(content, Mapping) or not content:
        raise InputError(
            "expected filters such as 'Average_pLDDT: {threshold: 0.8, higher: true}'", path=path
        )
    filters, unknown, energies, further = [], [], [], []
    for name, value in _entries(content):
        if isinstance(value, Mapping) and "threshold" in value and value["threshold"] is None:
            continue
        match = _NAME.fullmatch(name)
        figure = "" if match is None else _SPELLINGS.get(match[3], match[3])
        if match is not None and figure in _ROSETTA:
            energies.append(name)
            continue
        if match is None or figure not in (INTERFACE if match[2] else _KNOWN):
            unknown.append(name)
            continue
        threshold, higher = _values(name, value, path)
        number = None if match[1] == "Average" else int(match[1])
        if number is not None and number > networks:
            further.append(name)
            continue
        if match[2] and not task.avoided:
            raise InputError(f"{name} needs off-targets; leave it out", path=path)
        _check_figure(name, figure, task, path)
        if figure == RELAXED and not is_relaxed:
            raise InputError(f"{name} needs relaxed folds; give `relax=all`, or leave it out", path=path)
        filters.append(Filter(figure, number, threshold, higher, bool(match[2])))
    if unknown:
        known = [one for one in _KNOWN if not one.startswith(_BY_RESIDUE)]
        raise InputError(
            f"has unknown filters: {', '.join(unknown)}; remove them or set their threshold to null. Known, after "
            f"Average_ or the number of a network and _: {', '.join([*known, _BY_RESIDUE])}",
            path=path,
        )
    if energies:
        say(f"{path.name}: left out, because they need Rosetta's energies: {', '.join(energies)}")
    if further:
        folding = "1 network folds" if networks == 1 else f"{networks} networks fold"
        say(f"{path.name}: left out, because {folding} the designs: {', '.join(further)}")
    return filters


def _entries(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each filter; those per residue type have the type's letter in their name."""
    for name, value in content.items():
        if str(name).endswith(_BY_RESIDUE) and isinstance(value, Mapping):
            yield from ((f"{name}_{letter}", one) for letter, one in value.items())
        else:
            yield str(name), value


def _check_figure(name: str, figure: str, task: DesignTask, path: Path) -> None:
    """Raise InputError if designs of a task lack a figure."""
    if figure in (*BOUND, *ALONE) and task.bound_ca is None:
        raise InputError(f"{name} belongs to the protocol binder; leave it out", path=path)
    if figure in _PROTOCOL and figure not in given_figures(task):
        raise InputError(f"{name} belongs to the protocol {_PROTOCOL[figure]}; leave it out", path=path)
    if figure in RING and not task.cyclic:
        raise InputError(f"{name} needs rings (`cyclic`); leave it out", path=path)
    if figure in INTERFACE and len(task.target.chains) < 2:
        raise InputError(f"{name} needs designs of several chains; leave it out", path=path)


def _values(name: Any, value: Any, path: Path) -> tuple[float, bool]:
    if not isinstance(value, Mapping) or set(value) != {"threshold", "higher"}:
        raise InputError(f"{name}: expected threshold and higher, found {shown(value)}", path=path)
    threshold, higher = value["threshold"], value["higher"]
    if not is_number(threshold) or not isinstance(higher, bool):
        raise InputError(
            f"{name}: expected a number as threshold and true or false as higher, found {shown(dict(value))}",
            path=path,
        )
    return float(threshold), higher
