"""Search for alignments on behalf of a command, with progress lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fastfold.data.msa.find import count_rows
from fastfold.data.search.colabfold.mmseqs import MmseqsSource, all_of_folder
from fastfold.data.search.colabfold.msa_server import MsaServer, TicketServer
from fastfold.data.search.colabfold.source import ColabFoldSource, search_colabfold
from fastfold.data.search.database import PAIRING
from fastfold.data.search.engine import SearchEngine, SearchPlan
from fastfold.data.search.needs import find_needs
from fastfold.data.search.settings import ColabFoldModes, SearchSources
from fastfold.data.targets import Target
from fastfold.errors import InputError, TargetError
from fastfold.inference.progress import Progress, print_line
from fastfold.inference.request import InferRequest, RunOptions
from fastfold.utils.atomic_files import prepare_output_directory
from fastfold.utils.packages import require_package

if TYPE_CHECKING:
    from fastfold.inference.prepare import InferJob

Engines = Sequence[SearchEngine] | ColabFoldSource
"""Search engines: databases in order, or one engine that returns whole alignments, such as ColabFold's."""


def alignment_engines(options: RunOptions) -> Engines:
    """Open the sources of alignments of a run, or raise ConfigError or InputError; none if it searches nothing."""
    sources = options.sources
    if not sources.wanted:
        return ()
    if not sources.is_by_colabfold:
        return database_engines(sources)
    modes = ColabFoldModes(
        pair_mode=options.pair_mode,
        pair_strategy=sources.pair_strategy or ColabFoldModes.pair_strategy,
        templates=options.templates.server,
    )
    if sources.server is None:
        folder = Path(sources.databases[0])
        modes = replace(modes, msa_mode=sources.msa_mode or all_of_folder(folder))
        return MmseqsSource(folder, modes=modes, threads=sources.num_workers, gpu=sources.gpu)
    secrets = sources.access.headers(sources.server)
    if secrets and sources.server.startswith("http://"):
        print_line("warning: `SearchSources.server` begins with http://: credentials are sent unencrypted")
    say = (lambda line: None) if options.quiet else print_line
    modes = replace(modes, msa_mode=sources.msa_mode or ColabFoldModes.msa_mode)
    return MsaServer(TicketServer(sources.server, secrets=secrets, say=say), modes=modes, say=say)


def database_engines(sources: SearchSources) -> list[SearchEngine]:
    """Open the databases on this machine, or raise ConfigError or InputError."""
    require_package("pyhmmer", "a search of FASTA files (`SearchSources.databases`)")
    from fastfold.data.search.local import local_engines

    return local_engines(sources)


@dataclass(frozen=True)
class AlignmentSearch:
    """Search for the alignments of targets, which reports its progress."""

    engines: Engines  #: Search engines
    out: Path  #: Folder for the alignments
    quiet: bool = False  #: Report only that sequences leave the machine

    @classmethod
    def of(cls, request: InferRequest) -> AlignmentSearch:
        """Open the sources of a request; errors are those of :func:`alignment_engines`."""
        return cls(alignment_engines(request.options), request.msa_dir, request.options.quiet)

    def run(
        self, targets: Sequence[Target], *, needed_alone: bool = True
    ) -> tuple[list[Target], list[InputError]]:
        """Search for the chains of targets; return them, and errors of the others, or raise FastFoldError.

        Chains with an alignment in the folder are not searched for, and a line names their files. ``needed_alone``
        also leaves out targets with alignments of their own, and UniProt without chains to pair.
        """
        prepare_output_directory(self.out)
        usable: list[Target] = []
        errors: list[InputError] = []
        for target in targets:
            try:
                line = self.line(target, needed_alone=needed_alone)
            except InputError as error:
                errors.append(TargetError(target.name, error))
                continue
            usable.append(target)
            if line and not self.quiet:
                print_line(line)
        if isinstance(self.engines, Sequence):
            self.search_databases(usable, needed_alone=needed_alone)
            return usable, errors
        wanted = [target for target in usable if not (needed_alone and target.has_all_alignments)]
        failures = search_colabfold(wanted, self.engines, self.out, say=print_line)
        failed = {id(target) for target, _ in failures}
        complete = [target for target in usable if id(target) not in failed]
        return complete, [*errors, *(error for _, error in failures)]

    def line(self, target: Target, *, needed_alone: bool = True, check: bool = True) -> str:
        """Return a line about the alignments that a target has, empty without any.

        Raises:
            InputError: An alignment cannot be used, with ``check``.
        """
        if needed_alone and target.has_all_alignments:
            return (
                f"{target.name}: uses the alignment in {target.source}; not searched" if target.source else ""
            )
        engines = self.engines
        by_colabfold = not isinstance(engines, Sequence)
        needs = find_needs(self.out, target, by_colabfold=by_colabfold)
        if check:
            needs.check()
        if isinstance(engines, Sequence):
            has_pairing = needs.is_paired and bool(needs.pairs) and any(e.name == PAIRING for e in engines)
        else:
            has_pairing = needs.has_pairing(engines.modes.pair_mode)
        return needs.line(has_pairing=has_pairing)

    def search_databases(self, targets: Sequence[Target], *, needed_alone: bool = True) -> None:
        """Search databases on this machine for the chains of targets, and put the results into the folder."""
        engines = self.engines
        assert isinstance(engines, Sequence)

        def skip(engine: SearchEngine, target: Target) -> bool:
            if not needed_alone:
                return False
            kinds = len({chain.sequence for chain in target.chains})
            return target.has_all_alignments or (engine.name == PAIRING and kinds == 1)

        plan = SearchPlan(targets, engines, self.out, skip=skip)
        interval_s = 0.5 if sys.stderr.isatty() else 10.0
        with Progress(plan.cost, quiet=self.quiet) as progress:
            plan.run(say=progress.line, on_step=progress.step, interval_s=interval_s)


def search(job: InferJob) -> InferJob:
    """Search for the alignments of a job's targets, if it says where; errors as :meth:`AlignmentSearch.run`."""
    request = job.request
    if request.options.sources.wanted and job.targets:
        targets, unfound = AlignmentSearch.of(request).run(job.targets)
        request = replace(request, options=replace(request.options, msa_dir=request.msa_dir))
        job = replace(job, request=request, targets=targets, errors=[*job.errors, *unfound])
    if request.options.sort == "depth":
        job.targets.sort(key=lambda target: count_rows(request.options.msa_dir, target))
    return job
