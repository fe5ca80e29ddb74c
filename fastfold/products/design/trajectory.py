"""Trajectories of designs: optimise a sequence, resume it after a stop, and write its files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from fastfold.errors import InputError
from fastfold.inference.config import InferConfig
from fastfold.inference.distributed import DistributedFolder
from fastfold.inference.error_messages import is_out_of_memory
from fastfold.inference.models import Network
from fastfold.inference.output.plots import trajectory_png
from fastfold.products.design.config import DesignConfig
from fastfold.products.design.evaluate import Evaluator
from fastfold.products.design.joint import SharedEvaluator, plan_design, planned_evaluator, recycled_bytes
from fastfold.products.design.optimize import DesignState, final_parameters, first_state, optimize, schedule
from fastfold.products.design.results.design import Design
from fastfold.products.design.saved import design_identity, film_pdb, load_state, save_state
from fastfold.products.design.tasks.task import DesignTask
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.utils.atomic_files import write_atomic

_SAVE_STEPS, _SAVE_SECONDS = 10, 60.0
"""Steps after which the state of a design is saved and shown; earlier if they take longer."""


class SequenceOptimizer:
    """Networks of a run on its device, which optimise a design after the other.

    Args:
        networks: The networks.
        config: Settings of the optimisation.
        infer: Memory and precision.
        device: Device of the networks.
        distributed: Processes that share each design; None for one.
        overwrite: True to start again where a saved state has other settings.
        say: Called with lines about the progress.
    """

    def __init__(
        self,
        networks: Sequence[Network],
        config: DesignConfig,
        infer: InferConfig,
        device: torch.device,
        distributed: DistributedFolder | None,
        *,
        overwrite: bool,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.infer, self.device, self.distributed = config, infer, device, distributed
        self.overwrite, self.say = overwrite, say
        self.models = [network.load(infer.precision or "fp32") for network in networks]
        self.digests = [network.digest for network in networks]
        self._evaluator: Evaluator | None = None

    def evaluator(self, task: DesignTask) -> Evaluator:
        """Return the evaluator of a task; networks move to the device."""
        for model in self.models:
            model.to(self.device)
        if self._evaluator is None or self._evaluator.task is not task:
            kept = recycled_bytes(self.config, len(task.source), self.models[0])
            plans = [
                plan_design(one, self.models, self.infer, self.say, self.distributed, kept=kept)
                for one in task.complexes
            ]
            if self.distributed is None:
                self._evaluator = planned_evaluator(task, self.config, plans, self.models)
            else:
                self._evaluator = SharedEvaluator(task, self.config, plans, self.models, self.distributed)
        return self._evaluator

    def design(self, task: DesignTask, seed: int, folder: Path) -> Design:
        """Optimise one sequence from its last saved state, and write its trajectory into a folder.

        Raises:
            ConfigError: The folder has a design with other settings.
            InputError: The memory was not enough.
            WriteError: A file cannot be written.
        """
        evaluator = self.evaluator(task)
        identity = f"{design_identity(task, self.config, self.digests)}-{seed}"
        path = folder / f"{task.name}_seed_{seed:03d}"

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
            optimize(evaluator, self.config, seed, state, keep)
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

    def leave(self) -> None:
        """Move the networks off the device; they fold one after the other."""
        for model in self.models:
            model.to("cpu")
