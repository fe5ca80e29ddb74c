"""Training loop: samples, clipped gradients, optimisation steps, logging and checkpoints."""

from __future__ import annotations

import copy
import math
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.data.loading.loader import SampleLoader, merge_states
from fastfold.data.training.sample import COPIES, FEATURES, LABELS
from fastfold.errors import FastFoldError
from fastfold.evoformer.losses import alphafold_loss
from fastfold.kernels.cpu.products import exact_products
from fastfold.parallel import DistributedContext, Parallel
from fastfold.parallel.turns import take_turn
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.lddt import lddt
from fastfold.training.build import Placement
from fastfold.training.checkpoint.checkpoints import Checkpoints
from fastfold.training.checkpoint.contents import Json
from fastfold.training.config import TrainConfig
from fastfold.training.lifecycle.process import Interrupts
from fastfold.training.lifecycle.settings_history import settings_of
from fastfold.training.logging.profiling import FlopCounter, StepProfiler, flop_rates
from fastfold.training.optim.ema import ExponentialMovingAverage
from fastfold.training.optim.grad_accumulation import SampleGradients
from fastfold.training.optim.optimizers import make_optimizer, make_schedule
from fastfold.training.step_outcome import (
    BusyTimer,
    Numbers,
    PendingStep,
    RunProgress,
    StepOutcome,
    StepSamples,
)
from fastfold.training.validation import exchange_chains
from fastfold.utils.device import reads_are_free, upload


class TrainingStopped(FastFoldError):
    """Error of a run with too many consecutive steps without finite numbers."""


@dataclass
class Hooks:
    """Callbacks of the loop, called on all processes unless stated otherwise."""

    log: Callable[[int, Numbers], None]  #: ``(step, numbers)``, on the first process
    #: ``(step, [(draw number, name), ...])``, this process's samples before their use
    consumed: Callable[[int, list[tuple[int, str]]], None]
    #: ``(step)``, runs a validation, unless an earlier start of the run did; None without entries to validate on
    validate: Callable[[int], None] | None
    report: Callable[[str], None]  #: ``(sentence)``, a message for the user


class Trainer:
    """Trainer of one network on the samples of a loader.

    ``parallel`` is the network on this process's device, and ``tree`` its configuration. The loader has samples of
    :func:`fastfold.data.training.sample.training_sample`, or for a multimer network of
    :func:`fastfold.data.training.sample.complex_sample`; every process has its own share. Checkpoints record
    the settings of ``config``.

    Example:
        >>> from pathlib import Path
        >>> import fastfold
        >>> import torch
        >>> from fastfold.parallel import ParallelPlan, init_distributed
        >>> from fastfold.training import Trainer
        >>> from fastfold.training.build import parallel_network, plain_network
        >>> from fastfold.training.checkpoint.checkpoints import Checkpoints
        >>> from fastfold.training.compose import compose_config, network_config
        >>> from fastfold.training.data import entry_reader, make_loader
        >>> from fastfold.training.optim.ema import ExponentialMovingAverage
        >>> from fastfold.training.sets.source import open_source
        >>> from fastfold.training.trainer import Hooks
        >>> _ = Path("1abc.pdb").write_text(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).to_pdb())
        >>> settings = ["data.directory=1abc.pdb", "trainer.out=run", "trainer.steps=1", "data.workers=0"]
        >>> config = compose_config(["+preset=overfit", *settings])
        >>> tree, steps = network_config(config.model), []
        >>> hooks = Hooks(lambda step, numbers: steps.append(step), lambda *_: None, lambda step: None, print)
        >>> with init_distributed(ParallelPlan(), torch.device("cpu")) as context:
        ...     parallel = parallel_network(plain_network(config, tree), config, context)
        ...     source, reader = open_source(config.data, 0, complexes=False), entry_reader(config.data)
        ...     with make_loader(source, reader, config.data, tree, 0, context, []) as loader:
        ...         checkpoints = Checkpoints("run/checkpoints", context, keep_last=1, report=print)
        ...         ema = ExponentialMovingAverage(parallel.module)
        ...         kept = {"checkpoints": checkpoints, "ema": ema}
        ...         Trainer(parallel, tree, config, loader, context, hooks=hooks, **kept).run()
        >>> steps
        [1]
    """

    def __init__(
        self,
        parallel: Parallel,
        tree: ConfigDict,
        config: TrainConfig,
        loader: SampleLoader,
        context: DistributedContext,
        *,
        checkpoints: Checkpoints,
        ema: ExponentialMovingAverage,
        hooks: Hooks,
    ) -> None:
        optim = config.optim
        self.parallel, self.tree, self.config, self.loader = parallel, tree, config, loader
        self.model = parallel.module
        self.context, self.checkpoints, self.ema, self.hooks = context, checkpoints, ema, hooks
        self.progress = RunProgress()
        self._early_tree = copy.deepcopy(tree)
        self._early_tree.model.heads.predicted_aligned_error.weight = 0.0
        self._schedule = make_schedule(optim)
        self._optimizer = parallel.optimizer(lambda named: make_optimizer(optim, named))
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        # Checkpoints always have the same tensors, also before the first step.
        self._optimizer.initialize()
        self.placement = Placement(self.model, self._optimizer, config.memory, context)
        ema.reach = self.placement.params_on_host
        self._gradients = SampleGradients(parallel.gradients, optim.clip)
        self._busy = BusyTimer(context.device)
        self._flops = FlopCounter(enabled=not config.trainer.compile)
        self._profiler = StepProfiler(
            Path(config.trainer.out) / "profile",
            config.trainer.profile_steps if context.is_rank_zero else 0,
            hooks.report,
        )
        self._interrupts = Interrupts(quiet=not context.is_rank_zero)
        self._stop: signal.Signals | None = None  # signal of some process
        self._misses_validation = False  # because of the signal
        # To keep a GPU busy, the host reads a step's outcome while the device computes the next step.
        self._overlaps_steps = not reads_are_free(context.device) and config.memory.policy is None
        self._pending: PendingStep | None = None
        self._pending_ended = 0.0
        self._keys: list[str] | None = None
        self._settings = settings_of(config)

    # ---- the loop --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train for the configured number of steps; save and return early on SIGTERM, SIGUSR1, SIGHUP or Ctrl-C.

        Raises:
            TrainingStopped: Too many consecutive steps were skipped.
        """
        trainer = self.config.trainer
        with self._interrupts, self._profiler:
            self.model.train()
            if self.progress.step:
                self._validate()
            while self.progress.step < trainer.steps:
                self._step(time.perf_counter())
                step = self.progress.step
                last = step == trainer.steps
                saves = step % trainer.checkpoint_every == 0
                if not self._overlaps_steps or self._validates or saves or last:
                    self._finish_pending()
                self._profiler.step(step)
                self.checkpoints.poll()
                # Validate before saving, so that a run that resumes from the checkpoint does not miss the validation.
                self._validate()
                if self._stop:
                    self._finish_pending()
                if saves or last or self._stop:
                    self.save()
                if self._stop:
                    self.hooks.report(
                        f"stopped by {self._stop.name} after step {step}; run the same command again to resume"
                    )
                    break
        self.checkpoints.wait()

    @property
    def stopped_by(self) -> signal.Signals | None:
        """Signal that ended the run before its last step or the validation after it, or None."""
        is_complete = self.progress.step >= self.config.trainer.steps and not self._misses_validation
        return None if is_complete else self._stop

    @property
    def _validates(self) -> bool:
        """True if the last finished step ends with a validation."""
        trainer, step = self.config.trainer, self.progress.step
        return self.hooks.validate is not None and (
            step % trainer.validate_every == 0 or step >= trainer.steps
        )

    def _validate(self) -> None:
        """Run the validation of the last finished step if it has one.

        After a signal, which may leave seconds, the next start runs it.
        """
        self._misses_validation = self._validates and self._stop is not None
        if self._validates and self._stop is None:
            assert self.hooks.validate is not None
            with self.placement.running():
                self.hooks.validate(self.progress.step)
            self.model.train()

    def _step(self, started: float) -> None:
        """Run one optimisation step over this process's samples; :meth:`_finish_pending` reads its outcome."""
        take_turn("a training step")
        progress, batch = self.progress, self.config.optim.batch_size
        step, trainer, device = progress.step, self.config.trainer, self.context.device
        recycles = num_recycles(trainer.seed, step, self.config.data.max_recycles)
        tree = self.tree if step >= trainer.aligned_error_after else self._early_tree
        samples = StepSamples(batch)
        waited = self.loader.waited_s
        self._busy.start()
        for _ in range(self.context.dp_rank, batch, self.context.dp_size):
            draw = next(self.loader)
            self.hooks.consumed(step, [(sample.number, sample.id) for sample in self.loader.take_consumed()])
            torch.manual_seed(sample_seed(trainer.seed, draw.number))
            residues = len(draw.sample[f"{LABELS}aatype"])
            flops = self._flops.sample(draw.sample, residues, recycles)
            # The faster exact library on a CPU; a GPU keeps the process's setting.
            products = exact_products(device) if device.type == "cpu" else nullcontext()
            with self.placement.running(), flops, products:
                numbers = self._sample(draw.sample, recycles, tree)
            with self.placement.params_on_host():
                numbers["gradient_norm"] = self._gradients.add_sample()
            samples.add(draw.id, numbers, residues)
        self._busy.stop()
        samples.busy_s = self._busy.seconds
        samples.waited_s = self.loader.waited_s - waited
        samples.flops, samples.counted = self._flops.take()
        samples.signal = self._interrupts.received or 0
        if self._keys is None:
            gathered = self.context.gather(list(samples.means))
            self._keys = list(dict.fromkeys(key for keys in gathered for key in keys))
        known = {"recycles": float(recycles), "lr": self._schedule.lr(step + 1)}
        outcome = StepOutcome(samples, self._keys, self.context, known)
        # The last step must end before this one's optimizer step.
        self._finish_pending()
        progress.step += 1
        progress.samples += batch
        self._pending = pending = PendingStep(outcome, progress.step, progress.samples, started)
        if self._overlaps_steps:
            pending.revert_counters = self._update(outcome, outcome.ok)
            outcome.start_copy()
            return
        _, _, finite = outcome.read()
        if finite:
            self._update(outcome, None)
        else:
            with self.placement.params_on_host():
                self._gradients.discard()

    def _update(self, outcome: StepOutcome, ok: Tensor | None) -> Callable[[], None]:
        """Step optimizer and average unless ``ok`` is false on the device; return a function that reverts counters."""
        with self.placement.params_on_host():
            norm = self._gradients.finish(self.config.optim.batch_size)
        outcome.add("mean_gradient_norm", norm)
        rate = self._schedule.lr(self.progress.step) / self.config.optim.lr
        for group, own in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = own * rate
        revert_optimizer = self.placement.step(ok)
        self.ema.update(ok)

        def revert_counters() -> None:
            revert_optimizer()
            self.ema.forget_update()

        return revert_counters

    def _finish_pending(self) -> None:
        """Commit the pending step, or roll it back if a sample was not finite; then log it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        numbers, received, finite = pending.outcome.read()
        self._stop = signal.Signals(received) if received else self._stop
        if finite:
            pending.commit(self.progress)
        else:
            numbers.pop("mean_gradient_norm", None)
            self._roll_back(pending)
        # Overlapping steps count from the end of the previous one.
        now, started = time.perf_counter(), max(pending.started, self._pending_ended)
        seconds, self._pending_ended = now - started, now
        numbers |= flop_rates(numbers.pop("flops"), numbers.pop("counted"), seconds, self.context.size)
        self.progress.seconds += seconds
        trainer = self.config.trainer
        is_logged = pending.step % trainer.log_every == 0 or pending.step == trainer.steps
        if is_logged and self.context.is_rank_zero:
            progress = self.progress
            rest = {"samples": pending.samples, "skipped": progress.skipped, "seconds": progress.seconds}
            self.hooks.log(pending.step, numbers | {key: float(value) for key, value in rest.items()})

    def _sample(self, sample: Mapping[str, np.ndarray], recycles: int, tree: ConfigDict) -> dict[str, Tensor]:
        """Run forward and backward of one sample; return scalars on the device, and leave gradients in ``grad``.

        The losses have the weights of ``tree``.
        """
        device = self.context.device
        features, labels, copies = (
            {key.removeprefix(p): upload(x, device) for key, x in sample.items() if key.startswith(p)}
            for p in (FEATURES, LABELS, COPIES)
        )
        result = self.model(features, recycles)
        # A multimer network may stop before the last requested iteration.
        batch = {key: x[result["num_recycles"]] for key, x in features.items()} | labels
        ca = result["structure_module"]["final_atom_positions"][..., rc.atom_order["CA"], :]
        batch = exchange_chains(ca, batch, copies)
        loss, parts = alphafold_loss(result, batch, tree)
        # A manager moves gradients to the host while the backward pass runs.
        reduction = self._gradients.overlapped() if self.config.memory.policy is None else nullcontext()
        # Longer crops weigh more (supplement, section 1.9). Gradients are summed over all processes, and the dap
        # processes of a sample each have its loss.
        with reduction:
            (loss * math.sqrt(len(batch["aatype"])) / self.context.mesh.plan.dap).backward()
        structure = parts["structure_module"]
        numbers = {"loss": loss} | {name: part["loss"] for name, part in parts.items()}
        named = ("fape", "sidechain_fape", "chain_center_of_mass", "smooth_lddt", "ca_trace")
        numbers |= {key: structure[key] for key in named if key in structure}
        return {name: x.detach() for name, x in numbers.items()} | {"lddt_ca": ca_lddt(result, batch)}

    def _roll_back(self, pending: PendingStep) -> None:
        """Roll back and report a step that all processes skipped because of samples that were not finite."""
        progress = self.progress
        of_all = self.context.gather(pending.outcome.samples.bad_names())
        names = list(dict.fromkeys(name for of_one in of_all for name in of_one))
        pending.rollback(progress, names)
        self.hooks.report(f"step {pending.step} skipped: loss or gradient not finite in {', '.join(names)}")
        if progress.bad_in_a_row >= self.config.trainer.max_bad_steps:
            self.checkpoints.wait()
            raise TrainingStopped(
                f"{progress.bad_in_a_row} consecutive steps without a finite loss or gradient, the last in {names[0]}; "
                f"the last good checkpoint is {self.checkpoints.last or 'none'}. Lower optim.lr, or check the "
                "samples named"
            )

    # ---- state -----------------------------------------------------------------------------------------

    def save(self) -> None:
        """Start writing a checkpoint of the state for the next step."""
        take_turn("a checkpoint")
        loaders = self.context.leaders(self.context.gather(self.loader.state_dict()))
        state = {"progress": vars(self.progress), "loaders": loaders, "ema": self.ema.counters()}
        state["settings"] = self._settings
        with self.placement.params_on_host():
            self.checkpoints.save(self.progress.step, self._tensors(), state)

    def restore(self, resume: str, *, check: Callable[[Json], None] = lambda state: None) -> str | None:
        """Restore the state of the checkpoint that ``resume`` means, if there is one; return its folder or URL.

        ``check`` is called with its state before its tensors are read.

        Raises:
            ConfigError: The named checkpoint is damaged, or belongs to another network.
        """
        path = self.checkpoints.find(resume)
        if path is None:
            return None
        check(self.checkpoints.state(path))
        with self.placement.params_on_host():
            tensors = self._tensors()
            state = self.checkpoints.load(path, tensors)
            self._load_tensors(tensors)
        progress = state["progress"]
        progress["bad_samples"] = [(int(step), name) for step, name in progress["bad_samples"]]
        self.progress = RunProgress(**progress)
        self.ema.load_counters(state["ema"])
        loaders = state["loaders"]
        same = len(loaders) == self.context.dp_size
        self.loader.load_state_dict(loaders[self.context.dp_rank] if same else merge_states(loaders))
        return path

    def _tensors(self) -> dict[str, Tensor]:
        """Return parameters, their average and the optimizer's state by name (a collective).

        Names and shapes are those of a run on one process, under any plan; each process has slices.
        """
        tensors = {f"model.{name}": x for name, x in self.parallel.sharded_state_dict().items()}
        tensors |= {f"ema.{name}": x for name, x in self.parallel.sharded(self.ema.tensors()).items()}
        for name, state in self._optimizer.sharded_state_dict()["state"].items():
            tensors |= {f"{self.config.optim.name}.{name}.{key}": x for key, x in state.items()}
        return tensors

    def _load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        def below(kind: str) -> dict[str, Tensor]:
            return {name[len(kind) + 1 :]: x for name, x in tensors.items() if name.startswith(f"{kind}.")}

        self.parallel.load_state_dict(below("model"))
        average = self.ema.tensors()
        for name, x in self.parallel.shard(below("ema")).items():
            average[name].copy_(x)
        states: dict[str, dict[str, Tensor]] = {}
        for path, x in below(self.config.optim.name).items():
            name, _, key = path.rpartition(".")
            states.setdefault(name, {})[key] = x
        # Rates and other options are those of the settings, which the step's schedule scales.
        self._optimizer.load_state_dict({"state": states, "param_groups": []})


def num_recycles(seed: int, step: int, most: int) -> int:
    """Draw the recycling iterations of a step evenly from 0 to ``most``, equal on all processes (section 1.10)."""
    return int(np.random.default_rng([seed, step, 1]).integers(most + 1))


def sample_seed(seed: int, number: int) -> int:
    """Return the seed of PyTorch's random numbers (dropout) for a draw, equal on every process."""
    return int(np.random.default_rng([seed, number, 2]).integers(2**62))


def ca_lddt(result: dict[str, Any], batch: dict[str, Tensor]) -> Tensor:
    """Return the lDDT-CA of a prediction, 0 to 1, a scalar."""
    ca = rc.atom_order["CA"]
    with torch.no_grad():
        predicted = result["structure_module"]["final_atom_positions"][..., ca, :]
        true, mask = batch["all_atom_positions"][..., ca, :], batch["all_atom_mask"][..., ca]
        return lddt(predicted.float(), true, mask, per_residue=False).reshape(())
