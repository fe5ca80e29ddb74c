"""``fastfold design``: optimise sequences, resume them after a stop, and fold each again as any other target."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from fastfold.errors import InputError
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.config import InferConfig
from fastfold.inference.distributed import DistributedFolder, distributed_folder
from fastfold.inference.error_messages import is_out_of_memory
from fastfold.inference.models import Network, about_mini, check_divisible, requested_networks, suitable
from fastfold.inference.output.plots import trajectory_png
from fastfold.inference.prepare import prepare
from fastfold.inference.progress import RunLog
from fastfold.inference.report import write_report
from fastfold.inference.report.interfaces import parse_condition
from fastfold.inference.request import InferRequest
from fastfold.inference.runner import Summary, fold_all, open_log
from fastfold.products.design.config import DesignConfig, parse_contacts
from fastfold.products.design.evaluate import Evaluator
from fastfold.products.design.joint import SharedEvaluator, plan_design, planned_evaluator, recycled_bytes
from fastfold.products.design.optimise import (
    DesignState,
    check_start,
    final_parameters,
    first_state,
    optimise,
    schedule,
)
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
from fastfold.products.design.results.table import (
    COLUMNS,
    PASSED,
    design_rows,
    open_ring,
    table_text,
)
from fastfold.products.design.saved import design_identity, film_pdb, load_state, save_state
from fastfold.products.design.tasks.task import DesignTask
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.utils.atomic_files import prepare_output_directory, write_atomic
from fastfold.utils.device import choose_device

SEQUENCES, TABLE, TRAJECTORIES = "designs.fasta", "designs.tsv", "trajectories"
"""Files of a results folder that only designs have, and the folder of trajectories."""

_TRIAL = (
    "warning: a trial: mini sees several chains as one chain with a gap in the residue numbers, without the structure "
    "of given chains; it was not trained on complexes. Design binders and oligomers with --weights multimer"
)
_SAVE_STEPS, _SAVE_SECONDS = 10, 60.0
"""Steps after which the state of a design is saved and shown; earlier if they take longer."""


@dataclass(frozen=True)
class DesignRequest:
    """Task, networks and settings of designs and of their folds.

    Example:
        >>> from pathlib import Path
        >>> from fastfold.products.design import DesignRequest, hallucination
        >>> DesignRequest(hallucination(60), Path("designs"), seeds=range(8)).weights
        ()
    """

    task: (
        DesignTask | Callable[[int], DesignTask]
    )  #: Residues to design, or a function that returns them for a seed
    output: Path  #: Folder for the results
    weights: Sequence[Path] = ()  #: Weights files or names of networks to design with; empty for ``mini``
    config: DesignConfig = field(default_factory=DesignConfig)  #: Settings of the optimisation
    seeds: Sequence[int] = (0,)  #: One optimisation for each
    #: Networks that fold the designs, from their sequence and the templates of given chains; None for ``weights``
    predict: Sequence[Path] | None = None
    #: Settings of these folds, their seeds included, and device, memory and processes of both
    infer: InferConfig = field(default_factory=InferConfig)
    filters: Path | None = (
        None  #: File of filters (:mod:`fastfold.products.design.results.filters`); None for none
    )
    redesign: Redesign | None = None  #: Another program, whose sequences are folded as well; None for none
    overwrite: bool = False  #: True to start again where the folder has designs with other settings
    condition: str | None = None  #: Condition on the table's columns that designs have to meet; None for none


def run_designs(request: DesignRequest, *, say: Callable[[str], None] = print) -> list[Design]:
    """Design a sequence with each seed, fold all of them again, and write tables and a page.

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
    if request.condition is not None:
        parse_condition(request.condition, COLUMNS)  # refused before anything is computed
    with distributed_folder(infer.ranks, device) as distributed:
        if distributed is not None and not distributed.context.is_rank_zero:
            distributed.worker_loop()
            return []
        contacts = {name: parse_contacts(name, getattr(config, name)) for name in ("con", "i_con")}
        tasks = [(task(seed) if callable(task) else task).with_contacts(contacts) for seed in request.seeds]
        networks = folding = requested_networks(request.weights)
        if request.predict is not None:  # networks that are open already are shared
            known = {network.path: network for network in networks}
            folding = [known.get(network.path, network) for network in requested_networks(request.predict)]
        if distributed is not None:
            check_divisible([*networks, *folding])
            device = distributed.context.device
        chosen: list[Filter] = []
        if request.filters is not None:
            folders = len(suitable(folding, tasks[0].target))
            relaxed = infer.relax == "all"
            chosen = read_filters(request.filters, tasks[0], networks=folders, is_relaxed=relaxed, say=say)
        if not request.weights and tasks[0].templates is not None:
            tasks = [one.without_templates for one in tasks]
        for one in tasks:
            check_start(one, config)
        run = _DesignRun(request.output, config, infer, device, distributed, request.overwrite, say)
        if not request.weights:
            run.say(about_mini(networks[0]))
            if tasks[0].target.is_complex:
                run.say(_TRIAL)
        designs = run.design_all(tasks, request.seeds, networks, request.redesign)
        del networks  # those that do not fold are freed
        return run.finish(designs, folding, chosen, request.condition)


@dataclass
class _DesignRun:
    output: Path
    config: DesignConfig
    infer: InferConfig
    device: torch.device
    distributed: DistributedFolder | None
    overwrite: bool
    shows: Callable[[str], None]
    log: RunLog = field(default_factory=RunLog)

    def say(self, line: str) -> None:
        self.log.append(line)
        self.shows(line)

    def design_all(
        self,
        tasks: Sequence[DesignTask],
        seeds: Sequence[int],
        networks: Sequence[Network],
        redesign: Redesign | None,
    ) -> list[Design]:
        """Return the designs, each with the other program's sequences; the networks leave the device."""
        models = [network.load(self.infer.precision or "fp32").to(self.device) for network in networks]
        digests = [network.digest for network in networks]
        evaluator = self._evaluator(tasks[0], models)
        folder = prepare_output_directory(prepare_output_directory(self.output) / TRAJECTORIES)
        together = "" if self.distributed is None else f", {self.distributed.ranks} processes"
        open_log(self.log, self.output, f"{len(tasks):,} designs on {self.device}{together}")
        designs = []
        for seed, one in zip(seeds, tasks, strict=True):
            if one is not evaluator.task:
                evaluator = self._evaluator(one, models)
            identity = f"{design_identity(one, self.config, digests)}-{seed}"
            path = folder / f"{one.name}_seed_{seed:03d}"
            design = self._design(evaluator, seed, path, identity)
            designs.append(design)
            if redesign is not None and not design.is_given_up:
                designs += program_designs(design, redesign, self.output, self.config.limits, seed, self.say)
        if redesign is not None:
            write_atomic(self.output / CHANGES, change_text(change_rows(designs, redesign)))
        if self.distributed is not None:
            self.distributed.rest()
        for model in models:  # they fold one after the other
            model.to("cpu")
        return designs

    def finish(
        self, designs: list[Design], networks: Sequence[Network], filters: Sequence[Filter], where: str | None
    ) -> list[Design]:
        """Fold designs again, and write their table and the page; return the designs."""
        folded = [design for design in designs if not design.is_given_up]
        sequences = self.output / SEQUENCES
        write_atomic(sequences, "".join(design.records for design in folded))
        if folded:

            def fold(request: InferRequest) -> Summary:
                return fold_all(prepare(request, self.device, networks), self.device, self.distributed)

            for target, why in fold_designs(
                folded, sequences, networks, self.infer, overwrite=self.overwrite, run=fold
            ):
                self.say(f"error: {target}: {why}")
        rows = design_rows(designs, self.output, networks, filters, self.config.limits, where)
        write_atomic(self.output / TABLE, table_text(rows))
        for row in rows:
            if (problem := open_ring(row)) is not None:
                self.say(f"{row['name']}: {problem}")
        if folded:
            with suppress(InputError):  # nothing to show if all folds failed
                write_report(self.output, say=self.say)  # the page shows the table's verdicts
        if filters or where is not None:
            self.say(
                f"{sum(row['filters'] == PASSED for row in rows)} of {len(rows)} designs pass the filters"
            )
        self.log.append(f"{len(designs)} designed")
        return designs

    def _evaluator(self, task: DesignTask, models: Sequence[AlphaFold]) -> Evaluator:
        kept = recycled_bytes(self.config, len(task.source), models[0])
        plans = [
            plan_design(one, models, self.infer, self.say, self.distributed, kept=kept)
            for one in task.complexes
        ]
        if self.distributed is None:
            return planned_evaluator(task, self.config, plans, models)
        return SharedEvaluator(task, self.config, plans, models, self.distributed)

    def _design(self, evaluator: Evaluator, seed: int, path: Path, identity: str) -> Design:
        """Optimise one sequence from its last saved state, and write its trajectory."""

        def file(ending: str) -> Path:
            return path.with_name(path.name + ending)

        saved = file(".safetensors")
        if (state := load_state(saved, identity, overwrite=self.overwrite)) is None:
            state = first_state(evaluator, self.config, seed)
        elif state.step:
            self.say(f"{path.name}: continues after step {state.step}")
        total, saved_at = len(schedule(self.config)), time.monotonic()

        def keep(current: DesignState) -> None:
            nonlocal saved_at
            is_due = current.step % _SAVE_STEPS == 0 or time.monotonic() - saved_at > _SAVE_SECONDS
            if is_due or current.step == total:
                row = current.log[-1]
                save_state(saved, current, identity)
                self.say(
                    f"{path.name}: step {current.step} of {total} ({row['stage']}), loss {row['loss']:.3f}, "
                    f"pLDDT {row['mean_plddt']:.1f}"
                )
                saved_at = time.monotonic()

        try:
            optimise(evaluator, self.config, seed, state, keep)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise InputError(
                f"{path.name}: the memory was not enough for a gradient of {len(evaluator.task.source)} residues; use "
                "fewer, `precision=bf16`, or a device with more memory"
            ) from error
        save_state(saved, state, identity)
        design = Design(path.name, evaluator.task, final_parameters(evaluator, state), state)
        names, about = evaluator.task.target.names, evaluator.task.residue_columns
        write_atomic(file(".jsonl"), "".join(f"{json.dumps(row | about)}\n" for row in state.log))
        write_atomic(file(".pdb"), film_pdb(np.stack(state.trace), evaluator.task.chain, names))
        write_atomic(file("_design.pdb"), to_pdb(design.structure, names=names))
        if find_spec("matplotlib") is not None:
            series = ([row[key] for row in state.log] for key in ("loss", "mean_plddt", "stage"))
            write_atomic(file(".png"), trajectory_png(*series, title=path.name))
        if design.is_given_up:
            why = state.log[-1].get("reason", f"pLDDT {state.log[-1]['designed_plddt']:.1f}")
            self.say(f"{path.name}: given up after step {state.step}: {why}")
        return design
