"""Searching for alignments on behalf of a command, with progress for a person."""

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
"""Where to search: places one after the other, or what makes whole alignments as ColabFold does."""

ALIGNMENTS = "alignments"
"""Folder within the results where the alignments lie that were searched for on the way to them."""


def search_targets(
    targets: Sequence[Target],
    engines: Engines,
    out: Path,
    *,
    quiet: bool = False,
    needed_alone: bool = False,
) -> SearchSummary:
    """Search for the chains of targets, and show how it goes.

    Args:
        targets: The targets.
        engines: Where to search.
        out: Folder for the alignments.
        quiet: Show nothing but that sequences leave the machine.
        needed_alone: Leave out what a fold does not use: targets that came with alignments, and UniProt for those that
            have no two different chains to pair.

    Raises:
        FastFoldError: A place cannot be searched, or a result not be written.
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
