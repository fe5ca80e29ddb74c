"""Search for alignments on behalf of a command, with progress lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fastfold.data.search.colabfold.source import ColabFoldSource, has_alignment, search_colabfold
from fastfold.data.search.database import PAIRING
from fastfold.data.search.engine import SearchEngine
from fastfold.data.search.run import SearchPlan, SearchSummary
from fastfold.data.targets import Target
from fastfold.inference.progress import Progress

Engines = Sequence[SearchEngine] | ColabFoldSource
"""Search engines: databases in order, or one engine that returns whole alignments, such as ColabFold's."""


def search_targets(
    targets: Sequence[Target],
    engines: Engines,
    out: Path,
    *,
    quiet: bool = False,
    needed_alone: bool = False,
) -> SearchSummary:
    """Search for the chains of targets and report progress.

    Args:
        targets: Targets to search for.
        engines: Search engines.
        out: Folder for the alignments.
        quiet: Report only that sequences leave the machine.
        needed_alone: Skip searches that a fold does not use: targets with alignments, and UniProt for targets without
            two different chains to pair.

    Raises:
        FastFoldError: A database cannot be searched, or a result cannot be written.
    """
    if not isinstance(engines, Sequence):
        wanted = [target for target in targets if not (needed_alone and has_alignment(target.uncut, out))]
        return search_colabfold(wanted, engines, out, say=partial(print, file=sys.stderr, flush=True))

    def skip(engine: SearchEngine, target: Target) -> bool:
        if not needed_alone:
            return False
        kinds = len({chain.sequence for chain in target.uncut.chains})
        return target.alignments is not None or (engine.name == PAIRING and kinds == 1)

    plan = SearchPlan(targets, engines, out, skip=skip)
    interval_s = 0.5 if sys.stderr.isatty() else 10.0
    with Progress(plan.cost, quiet=quiet) as progress:
        return plan.run(say=progress.line, on_step=progress.step, interval_s=interval_s)
