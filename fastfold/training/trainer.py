"""The training loop: samples in, clipped gradients, one optimisation step, numbers out."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfold.data.loading.loader import SampleLoader, merge_states
from fastfold.data.training.complex_sample import COPIES
from fastfold.data.training.sample import FEATURES, LABELS
from fastfold.errors import FastFoldError
from fastfold.evoformer.losses import alphafold_loss
from fastfold.parallel import DistributedContext, Parallel
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.lddt import lddt
from fastfold.training.chain_permutation import exchange_chains
from fastfold.training.checkpoint.checkpoints import Checkpoints
from fastfold.training.checkpoint.manifest import Json
from fastfold.training.config import TrainConfig
from fastfold.training.lifecycle.interrupts import Interrupts
from fastfold.training.lifecycle.settings_history import settings_of
from fastfold.training.logging.flops import FlopCounter, flop_rates
from fastfold.training.logging.profiler import StepProfiler
from fastfold.training.offload import place
from fastfold.training.optim.ema import ExponentialMovingAverage
from fastfold.training.optim.grad_accumulation import SampleGradients
from fastfold.training.optim.lr_schedule import AlphaFoldSchedule
from fastfold.training.optim.optimizers import make_optimizer

Numbers = dict[str, float]


class TrainingStopped(FastFoldError):
    """Training cannot go on: too many steps in a row without finite numbers."""


@dataclass
class Progress:
    """What a run has done so far; kept in its checkpoints.

    Attributes:
        step: Optimisation steps done, skipped ones included.
        samples: Samples consumed.
        skipped: Steps skipped because a loss or gradient was not finite.
        bad_in_a_row: Steps skipped since the last one that was not.
        seconds: Time spent in all sessions of the run.
        bad_samples: Names of the samples in which it happened, with the step.
    """

    step: int = 0
    samples: int = 0
    skipped: int = 0
    bad_in_a_row: int = 0
    seconds: float = 0.0
    bad_samples: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class _Share:
    """What one process has to say of its samples of a step; ``means`` are its parts of the batch's means, ``signal`` is
    what told it to stop, 0 for nothing; ``flops`` are those of ``counted`` residues."""

    signal: int
    means: Numbers = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    residues: int = 0
    waited_s: float = 0.0
    flops: float = 0.0
    counted: int = 0


@dataclass
class Hooks:
    """What the loop calls; each on all processes unless it says otherwise.

    Attributes:
        log: ``(step, numbers)``, on the first process.
        consumed: ``(step, [(draw number, name), ...])``, this process's samples, before they are used.
        validate: ``(step)``; runs a validation.
        report: One sentence for a person.
    """

    log: Callable[[int, Numbers], None]
    consumed: Callable[[int, list[tuple[int, str]]], None]
    validate: Callable[[int], None]
    report: Callable[[str], None]


class Trainer:
    """Trains one network on the samples of a loader.

    Args:
        parallel: The network under the run's plan, on this process's device.
        tree: Its configuration tree.
        config: The run's configuration.
        loader: Samples of :func:`fastfold.data.training.sample.training_sample`, or for a multimer network of
            :func:`fastfold.data.training.complex_sample.complex_sample`; every process has its own share.
        context: The run's processes.
        checkpoints: Where to save.
        ema: The average of the network's weights.
        hooks: What to tell.
    """

    def __init__(
        self,
        parallel: Parallel,
        tree: Any,
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
        self.progress = Progress()
        self._schedule = AlphaFoldSchedule(
            optim.lr,
            warmup_steps=optim.warmup_steps,
            decay_after=optim.decay_after,
            decay_factor=optim.decay_factor,
            total_steps=optim.cosine_steps,
            final_fraction=optim.final_fraction,
        )
        self._optimizer = parallel.optimizer(lambda named: make_optimizer(optim, named))
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        # So checkpoints always have the same tensors.
        self._optimizer.initialise()
        self.placement = place(self.model, self._optimizer, config.memory, context)
        ema.reach = self.placement.params_on_host
        self._gradients = SampleGradients(parallel.gradients, optim.clip)
        self._flops = FlopCounter(enabled=not config.trainer.compile)
        self._profiler = StepProfiler(
            Path(config.trainer.out) / "profile",
            config.trainer.profile_steps if context.is_rank_zero else 0,
            hooks.report,
        )
        self._interrupts = Interrupts(quiet=not context.is_rank_zero)
        self._stop: signal.Signals | None = None  # what told some process to stop

    # ---- the loop --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until the configured number of steps; on SIGTERM, SIGUSR1 and Ctrl-C save and return early.

        Raises:
            TrainingStopped: Too many steps in a row had no finite numbers.
        """
        trainer = self.config.trainer
        with self._interrupts, self._profiler:
            self.model.train()
            while self.progress.step < trainer.steps:
                started = time.perf_counter()
                numbers = self._step()
                seconds = time.perf_counter() - started
                numbers |= flop_rates(
                    numbers.pop("flops"), numbers.pop("counted"), seconds, self.context.size
                )
                self.progress.seconds += seconds
                step = self.progress.step
                self._profiler.step(step)
                self.checkpoints.poll()
                if step % trainer.log_every == 0 or step == trainer.steps:
                    self._log(numbers)
                last = step == trainer.steps
                # Before the checkpoint: what a run that was killed continues from has been validated.
                if (step % trainer.validate_every == 0 or last) and not self._stop:
                    with self.placement.running():
                        self.hooks.validate(step)
                    self.model.train()
                if step % trainer.checkpoint_every == 0 or last or self._stop:
                    self.save()
                if self._stop:
                    self.hooks.report(
                        f"stopped by {self._stop.name} after step {step}; the same command continues"
                    )
                    break
        self.checkpoints.wait()

    @property
    def stopped_by(self) -> signal.Signals | None:
        """The signal that ended the run before its last step, if one did."""
        return self._stop if self.progress.step < self.config.trainer.steps else None

    def _step(self) -> Numbers:
        """One optimisation step over the samples of this process's share."""
        step, batch = self.progress.step, self.config.optim.batch_size
        recycles = num_recycles(self.config.trainer.seed, step, self.config.data.max_recycles)
        share = _Share(signal=self._interrupts.received or 0)
        waited = self.loader.waited_s
        for _ in range(self.context.dp_rank, batch, self.context.dp_size):
            draw = next(self.loader)
            self.hooks.consumed(step, [(taken.number, taken.id) for taken in self.loader.take_consumed()])
            torch.manual_seed(sample_seed(self.config.trainer.seed, draw.number))
            residues = len(draw.sample[f"{LABELS}aatype"])
            with self.placement.running(), self._flops.sample(draw.sample, residues, recycles):
                numbers = self._sample(draw.sample, recycles)
            with self.placement.params_on_host():
                numbers["gradient_norm"] = self._gradients.add_sample()
            share.residues += residues
            if not all(math.isfinite(numbers[key]) for key in ("loss", "gradient_norm")):
                share.bad.append(draw.id)
            for key, value in numbers.items():
                share.means[key] = share.means.get(key, 0.0) + value / batch
        share.waited_s = self.loader.waited_s - waited
        share.flops, share.counted = self._flops.take()
        shares = self.context.gather(share)
        self.progress.step += 1
        self.progress.samples += batch
        received = max(share.signal for share in shares)
        self._stop = signal.Signals(received) if received else None
        names = list(dict.fromkeys(name for share in shares for name in share.bad))
        flops = sum(share.flops for share in shares)
        counted = sum(share.counted for share in shares) / sum(share.residues for share in shares)
        # What processes that work on one sample have to say counts once.
        shares = self.context.leaders(shares)
        total = {key: sum(share.means.get(key, 0.0) for share in shares) for key in share.means}
        total |= {
            "residues": float(sum(share.residues for share in shares)),
            "waited_s": max(share.waited_s for share in shares),
            "recycles": float(recycles),
            "flops": flops,
            "counted": counted,
            "lr": self._schedule.lr(self.progress.step),
        }
        if names:
            self._skip(names)
        else:
            self.progress.bad_in_a_row = 0
            with self.placement.params_on_host():
                total["mean_gradient_norm"] = self._gradients.finish(batch)
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * total["lr"] / self.config.optim.lr
            self.placement.step()
            self.ema.update()
        return total

    def _sample(self, sample: Mapping[str, np.ndarray], recycles: int) -> Numbers:
        """Forward and backward of one sample; leaves the gradients in the parameters."""
        device = self.context.device
        features, labels, copies = (
            {
                key.removeprefix(p): torch.as_tensor(x, device=device)
                for key, x in sample.items()
                if key.startswith(p)
            }
            for p in (FEATURES, LABELS, COPIES)
        )
        result = self.model(features, recycles)
        # A multimer network may have stopped before the last iteration that was asked for.
        batch = {key: x[result["num_recycles"]] for key, x in features.items()} | labels
        ca = result["structure_module"]["final_atom_positions"][..., rc.atom_order["CA"], :]
        batch = exchange_chains(ca, batch, copies)
        loss, parts = alphafold_loss(result, batch, self.tree)
        # Longer crops weigh more (supplement, section 1.9). Gradients are those of the sum of all processes' losses,
        # of which those that work on this sample together each have one.
        (loss * math.sqrt(len(batch["aatype"])) / self.context.mesh.plan.dap).backward()
        structure = parts["structure_module"]
        numbers = {"loss": loss} | {name: part["loss"] for name, part in parts.items()}
        named = ("fape", "sidechain_fape", "chain_center_of_mass")
        numbers |= {key: structure[key] for key in named if key in structure}
        return {name: float(x.detach()) for name, x in numbers.items()} | {"lddt_ca": ca_lddt(result, batch)}

    def _skip(self, names: list[str]) -> None:
        """Leave out a step on all processes because of samples whose numbers are not finite."""
        progress = self.progress
        with self.placement.params_on_host():
            self._gradients.discard()
        progress.skipped += 1
        progress.bad_in_a_row += 1
        progress.bad_samples += [(progress.step, name) for name in names]
        self.hooks.report(f"step {progress.step} skipped: loss or gradient not finite in {', '.join(names)}")
        if progress.bad_in_a_row >= self.config.trainer.max_bad_steps:
            self.checkpoints.wait()
            raise TrainingStopped(
                f"{progress.bad_in_a_row} steps in a row had no finite loss or gradient, the last in {names[0]}; "
                f"the last good checkpoint is {self.checkpoints.last or 'none'}. Lower optim.lr, or look at the "
                "samples named"
            )

    def _log(self, numbers: Numbers) -> None:
        if self.context.is_rank_zero:
            progress = self.progress
            rest = {"samples": progress.samples, "skipped": progress.skipped, "seconds": progress.seconds}
            self.hooks.log(progress.step, numbers | {key: float(value) for key, value in rest.items()})

    # ---- state -----------------------------------------------------------------------------------------

    def save(self) -> None:
        """Start writing a checkpoint of everything that the next step depends on."""
        loaders = self.context.leaders(self.context.gather(self.loader.state_dict()))
        state = {"progress": vars(self.progress), "loaders": loaders, "ema": self.ema.counters()}
        state["settings"] = settings_of(self.config)
        with self.placement.params_on_host():
            self.checkpoints.save(self.progress.step, self._tensors(), state)

    def restore(self, resume: str, *, check: Callable[[Json], None] = lambda state: None) -> str | None:
        """Continue from a checkpoint, if there is one to continue from.

        Args:
            resume: As ``trainer.resume``.
            check: Called with a checkpoint's state before the checkpoint is read.

        Returns:
            Its folder or URL, or None.

        Raises:
            ConfigError: The checkpoint named is damaged, or belongs to another network.
        """
        path = self.checkpoints.find(resume)
        if path is None:
            return None
        check(self.checkpoints.state(path))
        with self.placement.params_on_host():
            tensors = self._tensors()
            state = self.checkpoints.load(path, tensors)
            self._take(tensors)
        progress = state["progress"]
        progress["bad_samples"] = [(int(step), name) for step, name in progress["bad_samples"]]
        self.progress = Progress(**progress)
        self.ema.load_counters(state["ema"])
        loaders = state["loaders"]
        same = len(loaders) == self.context.dp_size
        self.loader.load_state_dict(loaders[self.context.dp_rank] if same else merge_states(loaders))
        return path

    def _tensors(self) -> dict[str, Tensor]:
        """Everything large that changes, by name: parameters, their average, the optimizer's state (a collective).

        They are those of a run on one process, whatever the plan, of which each process has slices.
        """
        tensors = {f"model.{name}": x for name, x in self.parallel.sharded_state_dict().items()}
        tensors |= {f"ema.{name}": x for name, x in self.parallel.sharded(self.ema.tensors()).items()}
        for name, state in self._optimizer.sharded_state_dict().items():
            tensors |= {f"{self.config.optim.name}.{name}.{key}": x for key, x in state.items()}
        return tensors

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        """Undoes :meth:`_tensors`."""

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
        self._optimizer.load_state_dict(states)


def num_recycles(seed: int, step: int, most: int) -> int:
    """Recycling iterations of a step, drawn evenly from 0 to ``most``: the same on all processes (section 1.10)."""
    return int(np.random.default_rng([seed, step, 1]).integers(most + 1))


def sample_seed(seed: int, number: int) -> int:
    """Seed of PyTorch's random numbers (dropout) for a draw, wherever it is computed."""
    return int(np.random.default_rng([seed, number, 2]).integers(2**62))


def ca_lddt(result: dict[str, Any], batch: dict[str, Tensor]) -> float:
    """lDDT-CA of a prediction, 0 to 1."""
    ca = rc.atom_order["CA"]
    with torch.no_grad():
        predicted = result["structure_module"]["final_atom_positions"][..., ca, :]
        score = lddt(
            predicted.float(),
            batch["all_atom_positions"][..., ca, :],
            batch["all_atom_mask"][..., ca],
            per_residue=False,
        )
    return float(score)
