"""``fastfold design``: optimise sequences, resume them after a stop, and fold each again as any other target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fastfold.errors import ConfigError, InputError, spelled
from fastfold.inference.config import InferConfig
from fastfold.inference.distributed import DistributedFolder, distributed_folder
from fastfold.inference.models import Network, about_mini, check_divisible, requested_networks, suitable
from fastfold.inference.output.summary import score_table
from fastfold.inference.prepare import prepare
from fastfold.inference.progress import RunLog
from fastfold.inference.report import write_report
from fastfold.inference.report.discover import FoundPrediction
from fastfold.inference.report.interfaces import parse_condition
from fastfold.inference.report.products import DESIGNS, STATISTICS
from fastfold.inference.request import InferRequest
from fastfold.inference.runner import Summary, fold_all, open_log
from fastfold.products.design.config import DesignConfig, parse_contacts
from fastfold.products.design.optimize import check_start
from fastfold.products.design.results.campaign import Campaign, Trajectory, all_rows
from fastfold.products.design.results.design import Design
from fastfold.products.design.results.filters import Filter, read_filters
from fastfold.products.design.results.redesign import (
    CHANGES,
    Redesign,
    change_rows,
    change_text,
    program_designs,
)
from fastfold.products.design.results.refold import fold_designs
from fastfold.products.design.results.statistics import STATISTIC_COLUMNS, statistic_rows
from fastfold.products.design.results.table import COLUMNS, PASSED, design_rows, open_ring
from fastfold.products.design.saved import design_identity
from fastfold.products.design.tasks.task import DesignTask
from fastfold.products.design.trajectory import SequenceOptimizer
from fastfold.utils.atomic_files import prepare_output_directory, write_atomic
from fastfold.utils.device import choose_device
from fastfold.utils.hashing import input_hash
from fastfold.utils.lazy import old_arguments

SEQUENCES, TABLE, TRAJECTORIES = "designs.fasta", DESIGNS, "trajectories"
"""Files of a results folder that only designs have, and the folder of trajectories."""

_TRIAL = (
    "warning: a trial: mini sees several chains as one chain with a gap in the residue numbers, without the structure "
    "of given chains; it was not trained on complexes. Design binders and oligomers with `weights=multimer`"
)


@dataclass(frozen=True)
class DesignRequest:
    """Task, networks and settings of designs and of their folds.

    Example:
        >>> from pathlib import Path
        >>> from fastfold.products.design import DesignRequest, hallucination
        >>> DesignRequest(hallucination(60), Path("designs"), seeds=range(8)).weights
        ()
    """

    #: Residues to design, or a function that returns them for a seed
    task: DesignTask | Callable[[int], DesignTask]
    output: Path  #: Folder for the results
    weights: Sequence[Path] = ()  #: Weights files or names of networks to design with; empty for ``mini``
    config: DesignConfig = field(default_factory=DesignConfig)  #: Settings of the optimisation
    seeds: Sequence[int] = (0,)  #: One optimisation for each
    #: Networks that fold the designs, from their sequence and the templates of given chains; None for ``weights``
    predict: Sequence[Path] | None = None
    #: Settings of these folds, their seeds included, and device, memory and processes of both
    infer: InferConfig = field(default_factory=InferConfig)
    #: File of filters (:mod:`fastfold.products.design.results.filters`); None for none
    filters: Path | None = None
    redesign: Redesign | None = None  #: Another program, whose sequences are folded as well; None for none
    overwrite: bool = False  #: True to start again where the folder has designs with other settings
    #: Condition on columns of the table that designs have to meet, such as ``iptm>0.6 and rmsd<2``; None for none
    condition: str | None = None
    #: Number of sequences that pass the filters after which no seed is begun; None for all seeds
    until: int | None = None


@old_arguments(DesignRequest, {"where": "condition"})
def run_designs(request: DesignRequest, *, say: Callable[[str], None] = print) -> list[Design]:
    """Design a sequence with each seed, fold all of them again, and write tables and a page.

    With ``until``, designs are folded one by one. Several processes may share the folder.

    Args:
        request: Task, networks and settings.
        say: Called with lines about the progress.

    Returns:
        The designs in the order of the seeds, each followed by the other program's sequences. The list is empty on
        all but the first of several processes.

    Raises:
        ConfigError: Settings contradict the task or the networks, or the folder has designs with other settings.
        InputError: A structure or a file of filters cannot be used, another program failed, or memory was not enough.
        WriteError: A result cannot be written.

    Example:
        >>> from pathlib import Path
        >>> from fastfold.inference.config import InferConfig
        >>> from fastfold.products.design import DesignConfig, DesignRequest, hallucination, run_designs
        >>> steps, fold = DesignConfig(soft_steps=1, temperature_steps=0, hard_steps=0), InferConfig(num_recycles=0)
        >>> request = DesignRequest(hallucination(12), Path("designs"), config=steps, infer=fold)
        >>> (design,) = run_designs(request, say=lambda line: None)
        >>> [len(sequence) for sequence in design.sequences], Path("designs/designs.fasta").exists()
        ([12], True)
    """
    task, config, infer = request.task, request.config, request.infer
    device = choose_device(infer.device)
    condition, until = request.condition, request.until
    if condition is not None:
        parse_condition(condition, COLUMNS)  # refused before anything is computed
    has_filters = request.filters is not None or condition is not None
    if until is not None and (until < 1 or not has_filters or infer.ranks > 1):
        raise ConfigError(
            f"`until`: expected a number from 1 with `filters` or a condition, and one process a design, found "
            f"{until}; start the command several times to share the designs"
        )
    with distributed_folder(infer.ranks, device) as distributed:
        if distributed is not None and not distributed.context.is_rank_zero:
            distributed.worker_loop()
            return []
        contacts = {name: parse_contacts(name, getattr(config, name)) for name in ("con", "i_con")}

        def task_of(seed: int) -> DesignTask:
            made = (task(seed) if callable(task) else task).with_contacts(contacts)
            if not request.weights and made.templates is not None:
                made = made.without_templates
            check_start(made, config)
            return made

        first = task_of(request.seeds[0])
        networks = folding = requested_networks(request.weights)
        if request.predict is not None:  # networks that are open already are shared
            known = {network.path: network for network in networks}
            folding = [known.get(network.path, network) for network in requested_networks(request.predict)]
        if distributed is not None:
            check_divisible([*networks, *folding])
            device = distributed.context.device
        chosen: list[Filter] = []
        if request.filters is not None:
            folders = len(suitable(folding, first.target))
            relaxed = infer.relax == "all"
            chosen = read_filters(request.filters, first, networks=folders, is_relaxed=relaxed, say=say)
        run = _DesignRun(request, device, distributed, filters=chosen, shows=say)
        if not request.weights:
            run.say(about_mini(networks[0]))
            if first.target.is_complex:
                run.say(_TRIAL)
        # A task that does not depend on the seed is made once.
        tasks = task_of if callable(task) else (lambda seed: first)
        if until is None:
            return run.all_at_once([(seed, tasks(seed)) for seed in request.seeds], networks, folding)
        return run.campaign(tasks, networks, folding, until)


@dataclass
class _DesignRun:
    request: DesignRequest
    device: torch.device
    distributed: DistributedFolder | None
    filters: Sequence[Filter]
    shows: Callable[[str], None]
    log: RunLog = field(default_factory=RunLog)

    def say(self, line: str) -> None:
        line = spelled(line)
        self.log.append(line)
        self.shows(line)

    def all_at_once(
        self, tasks: Sequence[tuple[int, DesignTask]], networks: Sequence[Network], folding: Sequence[Network]
    ) -> list[Design]:
        """Return the designs of seeds and tasks, each with the other program's sequences, and fold them together."""
        optimizer = self._optimizer(networks, tasks[0][1], f"{len(tasks):,} designs")
        designs = [design for seed, one in tasks for design in self._trajectory(optimizer, one, seed)]
        if self.distributed is not None:
            self.distributed.rest()
        optimizer.leave()
        folded = [design for design in designs if not design.is_given_up]
        predictions = self._fold(folded, self.request.output / SEQUENCES, folding)
        rows = self._rows(designs, folding, predictions)
        ended = [_stage_given_up(design) for design in designs if not design.is_external]
        self._conclude(rows, ended, has_page=bool(folded))
        self.log.append(f"{len(designs)} designed")
        return designs

    def campaign(
        self,
        tasks: Callable[[int], DesignTask],
        networks: Sequence[Network],
        folding: Sequence[Network],
        until: int,
    ) -> list[Design]:
        """Return the designs that this process made until the folder has enough accepted ones."""
        first = tasks(self.request.seeds[0])
        optimizer = self._optimizer(networks, first, f"designs until {until:,} are accepted")
        # Processes on other devices share the campaign.
        infer = replace(
            self.request.infer,
            device="auto",
            memory_budget=None,
            host_memory=None,
            offload_dir=None,
            relax_platform="auto",
        )
        verdict = [repr(one) for one in (self.filters, self.request.condition, self.request.redesign, infer)]
        settings = input_hash(*verdict, [network.digest for network in folding])

        @cache
        def identity_of(seed: int) -> str:
            return f"{design_identity(tasks(seed), self.request.config, optimizer.digests)}-{seed}"

        campaign = Campaign(prepare_output_directory(self.request.output), settings, identity_of)
        trajectories = self.request.output / TRAJECTORIES
        designs: list[Design] = []
        accepted = campaign.accepted
        for seed in self.request.seeds:
            if accepted >= until:
                break
            task = tasks(seed)
            name = f"{task.name}_seed_{seed:03d}"
            with campaign.claimed(name) as is_own:
                if not is_own or campaign.find(name) is not None:
                    continue
                made = self._trajectory(optimizer, task, seed)
                folded = [design for design in made if not design.is_given_up]
                optimizer.leave()
                predictions = self._fold(folded, trajectories / f"{name}.fasta", folding)
                rows = self._rows(made, folding, predictions)
                campaign.add(Trajectory(name, identity_of(seed), settings, _stage_given_up(made[0]), rows))
                designs += made
            accepted = campaign.accepted
            self.say(f"{accepted:,} of {until:,} accepted, {name} with {_accepted(rows)}")
        with campaign.folder.locked():
            finished = campaign.trajectories()
            names = [trajectories / f"{one.name}.fasta" for one in finished if not one.ended]
            sequences = "".join(one.read_text() for one in names if one.exists())
            write_atomic(self.request.output / SEQUENCES, sequences)
            self._conclude(all_rows(finished), [one.ended for one in finished], has_page=bool(names))
        accepted = sum(one.accepted for one in finished)
        if accepted < until:
            self.say(
                f"{accepted:,} of {until:,} accepted after {len(finished):,} trajectories; the same command "
                "with a larger `num_designs` continues"
            )
        self.log.append(f"{len(designs)} designed")
        return designs

    def _trajectory(self, optimizer: SequenceOptimizer, task: DesignTask, seed: int) -> list[Design]:
        """Return the design of a seed, and the other program's sequences for it."""
        design = optimizer.design(task, seed, self.request.output / TRAJECTORIES)
        if self.request.redesign is None or design.is_given_up:
            return [design]
        limits = self.request.config.limits
        made = program_designs(design, self.request.redesign, self.request.output, limits, seed, self.say)
        return [design, *made]

    def _fold(
        self, designs: Sequence[Design], sequences: Path, networks: Sequence[Network]
    ) -> list[FoundPrediction]:
        """Write the sequences of designs, fold them, and return their predictions."""
        write_atomic(sequences, "".join(design.records for design in designs))

        def fold(request: InferRequest) -> Summary:
            return fold_all(prepare(request, self.device, networks), self.device, self.distributed)

        if not designs:
            return []
        folded = fold_designs(
            designs,
            sequences,
            networks,
            self.request.infer,
            output=self.request.output,
            overwrite=self.request.overwrite,
            run=fold,
        )
        for target, why in folded.failed:
            self.say(f"error: {target}: {why}")
        return folded.predictions

    def _rows(
        self, designs: Sequence[Design], networks: Sequence[Network], predictions: Sequence[FoundPrediction]
    ) -> list[dict[str, Any]]:
        """Return the rows of designs, with the substitutions of the other program."""
        rows = design_rows(
            designs, predictions, networks, self.filters, self.request.config.limits, self.request.condition
        )
        changes = {} if self.request.redesign is None else change_rows(designs, self.request.redesign)
        return [row | changes.get(row["name"], {}) for row in rows]

    def _conclude(self, rows: Sequence[dict[str, Any]], ended: Sequence[str], *, has_page: bool) -> None:
        """Write the tables and the page of rows, and of the stage after which each trajectory ended."""
        write_atomic(self.request.output / TABLE, score_table(COLUMNS, rows))
        statistics = score_table(STATISTIC_COLUMNS, statistic_rows(ended, rows))
        write_atomic(self.request.output / STATISTICS, statistics)
        if self.request.redesign is not None:
            write_atomic(self.request.output / CHANGES, change_text(rows))
        for row in rows:
            if (problem := open_ring(row)) is not None:
                self.say(f"{row['name']}: {problem}")
        if has_page:
            with suppress(InputError):  # nothing to show if all folds failed
                write_report(self.request.output, say=self.say)  # the page shows the table's verdicts
        if self.filters or self.request.condition is not None:
            self.say(f"{_accepted(rows)} of {len(rows)} designs pass the filters")

    def _optimizer(self, networks: Sequence[Network], first: DesignTask, what: str) -> SequenceOptimizer:
        """Load the networks, check that they can design the first task, and open the folders and the log."""
        optimizer = SequenceOptimizer(
            networks,
            self.request.config,
            self.request.infer,
            self.device,
            self.distributed,
            overwrite=self.request.overwrite,
            say=self.say,
        )
        optimizer.evaluator(first)
        prepare_output_directory(prepare_output_directory(self.request.output) / TRAJECTORIES)
        together = "" if self.distributed is None else f", {self.distributed.ranks} processes"
        open_log(self.log, self.request.output, f"{what} on {self.device}{together}")
        return optimizer


def _stage_given_up(design: Design) -> str:
    """Return the stage after which a design was given up; empty for one that is folded."""
    return str(design.state.log[-1]["stage"]) if design.is_given_up else ""


def _accepted(rows: Sequence[dict[str, Any]]) -> int:
    return sum(row["filters"] == PASSED for row in rows)
