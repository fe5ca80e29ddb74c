"""Tables of products in a folder of results: mutants and designs, by target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastfold.inference.output.summary import read_table
from fastfold.inference.report.discover import is_regular, numbers_of
from fastfold.protein.metrics.scores import SCORES

MUTATIONS = "mutations.tsv"  #: Table of mutants in a folder of results
DESIGNS = "designs.tsv"  #: Table of designs in a folder of results
STATISTICS = "statistics.tsv"  #: Table of the trajectories and filters of designs
TABLES = (
    *("summary.tsv", "interfaces.csv", MUTATIONS, "mutations.png"),
    *(DESIGNS, "designs.fasta", "mpnn.tsv", STATISTICS),
)
"""Files of a whole folder that the page offers."""

_OF_MUTANTS = tuple(one.name for one in SCORES if one.covers == "mutant")
_OF_DESIGNS = tuple(one.name for one in SCORES if one.covers == "design")
_LONGEST = 500


def product_columns(folder: Path) -> dict[str, dict[str, Any]]:
    """Return further columns of the page's list by target, from the tables of mutants and of designs.

    Mutants have ``mutation`` (``A24G``) and their differences; designs have ``order`` (their place in the table),
    ``sequence``, ``filters``, ``note`` and their figures. Foreign tables give nothing.
    """
    columns: dict[str, dict[str, Any]] = {}
    if is_regular(folder / MUTATIONS):
        for line in read_table(folder / MUTATIONS):
            if name := line.get("name"):
                texts = {"mutation": text[:_LONGEST]} if (text := line.get("mutations")) else {}
                columns[name] = {**texts, **numbers_of(line, _OF_MUTANTS)}
    if is_regular(folder / DESIGNS):
        for order, line in enumerate(read_table(folder / DESIGNS), 1):
            if name := line.get("name"):
                shown = ("sequence", "filters", "note")
                texts = {key: text[:_LONGEST] for key in shown if (text := line.get(key))}
                columns[name] = {"order": order, **texts, **numbers_of(line, _OF_DESIGNS)}
    return columns


def design_statistics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of :data:`STATISTICS` for the page: ``kind``, ``name``, ``count`` and ``of``."""
    if not is_regular(folder / STATISTICS):
        return []
    return [
        {**{key: line[key][:_LONGEST] for key in ("kind", "name")}, **numbers_of(line, ("count", "of"))}
        for line in read_table(folder / STATISTICS)
        if line.get("kind") and line.get("name")
    ]
