"""Targets of a screen, from all lists together."""

from __future__ import annotations

from pathlib import Path

from fastfold.data.queries.pairs import (
    Partner,
    all_against_all,
    baits_against_candidates,
    is_name_list,
    is_pair_table,
    read_complexes,
    read_pair_table,
    read_partners,
    read_proteins,
)
from fastfold.data.queries.read import read_targets
from fastfold.data.targets import FoundTarget, Target, unique_targets
from fastfold.errors import ConfigError, InputError
from fastfold.inference.workers.options import TargetLists


def screen_targets(
    lists: TargetLists, *, complex_: bool = False, allow_download: bool = False
) -> tuple[list[Target], list[InputError]]:
    """Read the targets of all lists, with unique names, and one error for each invalid record.

    A complex that several lists name by its partners, in any order, comes once.

    ``complex_`` joins all records of an input to one complex, except in tables of partners. A ConfigError tells that no
    table uses the proteins, an InputError that baits and candidates contradict each other.
    """
    errors: list[InputError] = []
    known: list[Target] | None = None
    if lists.proteins is not None:
        known, errors = read_proteins(lists.proteins)

    def partners(path: Path) -> list[Partner]:
        proteins, wrong = read_partners(path, known)
        errors.extend(wrong)
        return proteins

    tables = [path for path in lists.inputs if is_pair_table(path)]
    names = [path for path in lists.inputs if path not in tables and is_name_list(path)]
    files = [path for path in (lists.all_vs_all, lists.baits, *lists.candidates) if path is not None]
    if known is not None and not (tables or names or any(map(is_name_list, files))):
        raise ConfigError(
            "`proteins` belongs to a table of partners (columns chain_1, chain_2), or to a .txt file with names; none "
            "was given"
        )
    others = [path for path in lists.inputs if path not in tables and path not in names]
    targets, wrong = read_targets(others, complex_=complex_, allow_download=allow_download)
    errors += wrong
    for path in (*tables, *names):
        try:
            complexes, wrong = (read_pair_table if path in tables else read_complexes)(path, known)
        except InputError as error:
            errors.append(error)
            continue
        targets += complexes
        errors += wrong
    if lists.all_vs_all is not None:
        targets += all_against_all(partners(lists.all_vs_all), homodimers=lists.homodimers)
    if lists.baits is not None:
        targets += baits_against_candidates(partners(lists.baits), *map(partners, lists.candidates))
    first = {target.partners: target for target in reversed(targets)}
    # As if just read, to make their names unique together.
    read = [
        FoundTarget(target, target.source, None)
        for target in targets
        if not target.partners or first[target.partners] is target
    ]
    return unique_targets(read, errors), errors
