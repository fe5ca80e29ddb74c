"""Optimisation of a designed sequence: from logits to residues in stages, then mutations.

The stages, their schedules and defaults are those of ColabDesign's ``design_3stage`` and ``design_semigreedy``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.evoformer.inputs import RESIDUES, Relaxation, decode_sequence
from fastfold.inference.design.evaluate import Evaluation, Evaluator, RecycleMode
from fastfold.inference.design.limits import Limits, parse_shares
from fastfold.inference.design.task import DesignTask

Optimizer = Literal["sgd", "adam"]
Start = Literal["gumbel", "random", "wildtype"]

_BETAS, _EPS = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class DesignConfig:
    """Settings of an optimisation.

    Raises:
        ConfigError: A value is out of range.
    """

    soft_steps: int = 300  #: Steps from logits to their softmax
    temperature_steps: int = 100  #: Steps in which the softmax sharpens
    hard_steps: int = 10  #: Steps on the most likely residues
    mutation_steps: int = 0  #: Rounds of mutations, each the best of ``tries``
    tries: int = 10  #: Mutations that a round compares
    optimizer: Optimizer = "sgd"  #: ``sgd`` or ``adam``, on gradients of unit length per residue
    learning_rate: float = 0.1  #: Step length
    recycles: int = 0  #: Extra passes of the network
    recycle_mode: RecycleMode = "last"  #: Passes whose gradient counts
    dropout: bool = True  #: True for dropout before the steps on residues
    #: Networks drawn for a step; None for all. Steps on residues and mutations use all.
    networks: int | None = 1
    #: First parameters: Gumbel noise, small noise, or the residues of the given structure
    start: Start = "gumbel"
    #: Weights of losses that differ from the protocol's
    weights: Mapping[str, float] = field(default_factory=dict)
    forbid: str = ""  #: Residues never used, such as ``CM``
    #: Limits of the designed chain's composition, such as ``KE<=0.3,W>=0.02``. They are a loss ``composition``, a rule
    #: for mutations, and the first criterion of the best residues.
    composition: str = ""
    #: Smallest and largest net charge of the designed chain at pH 7, used alike; None for any
    charge: tuple[float, float] | None = None
    #: Mean pLDDT (0 to 100) at the end of a stage below which the rest is left out
    give_up_below: float = 0.0

    def __post_init__(self) -> None:
        counts = ("soft_steps", "temperature_steps", "hard_steps", "mutation_steps", "recycles")
        for name, least in (*((count, 0) for count in counts), ("tries", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected a number from {least}, found {getattr(self, name)}")
        if not sum(getattr(self, name) for name in counts[:4]):
            raise ConfigError("a design needs at least one step")
        _ = self.limits
        if not 0 <= self.give_up_below <= 100:
            raise ConfigError(f"give_up_below: expected a number from 0 to 100, found {self.give_up_below}")
        if not self.learning_rate > 0:
            raise ConfigError(f"learning_rate: expected a positive number, found {self.learning_rate}")
        for name, kinds in (("optimizer", Optimizer), ("start", Start), ("recycle_mode", RecycleMode)):
            if getattr(self, name) not in get_args(kinds):
                raise ConfigError(
                    f"{name}: expected {', '.join(get_args(kinds))}, found {getattr(self, name)!r}"
                )

    @property
    def limits(self) -> Limits:
        """Limits of the designed chain."""
        return Limits(parse_shares(self.composition), self.charge)


@dataclass(frozen=True)
class Step:
    """One step of the schedule, whose stage is ``soft``, ``temperature``, ``hard`` or ``mutate``.

    The network sees the relaxation, and ``rate`` is a factor of the learning rate.
    """

    stage: str
    relaxation: Relaxation
    rate: float
    recycles: int
    dropout: bool
    all_networks: bool


def schedule(config: DesignConfig) -> list[Step]:
    """Return the steps of an optimisation in order."""
    steps = []
    for i in range(config.soft_steps):
        share = (i + 1) / config.soft_steps
        recycles = round(config.recycles * share)
        steps.append(Step("soft", Relaxation(soft=share), 1.0, recycles, config.dropout, False))
    for i in range(config.temperature_steps):
        rest = 1.0 - (i + 1) / config.temperature_steps
        temperature = 1e-2 + (1.0 - 1e-2) * rest**2
        relaxation = Relaxation(soft=1.0, temperature=temperature)
        steps.append(Step("temperature", relaxation, temperature, config.recycles, config.dropout, False))
    hard = Relaxation(soft=1.0, hard=1.0, temperature=1e-2)
    steps += [Step("hard", hard, 1e-2, config.recycles, False, True)] * config.hard_steps
    return steps + [Step("mutate", hard, 0.0, config.recycles, False, True)] * config.mutation_steps


@dataclass
class DesignState:
    """Everything that an optimisation resumes from."""

    parameters: Tensor  #: ``[P, 20]`` float32
    step: int  #: Number of finished steps
    moments: Tensor  #: First and second moments of Adam, ``[2, P, 20]``; zeros for SGD
    #: Parameters of the best residues so far, ``[P, 20]``; those of the last step if there are none
    best: Tensor
    best_loss: float  #: Their loss; infinite if no step has used residues
    best_violation: float  #: Residues and charges of them that are outside the limits of the chain
    plddt: np.ndarray  #: pLDDT ``[N]`` of the last step, 0 to 100
    #: Atoms ``[N, 37, 3]`` in Å of the best residues, or of the last step if there are none
    positions: np.ndarray
    log: list[dict[str, Any]]  #: A row of figures for each step
    trace: list[np.ndarray]  #: CA atoms of the last network pass of each step, ``[steps, N, 3]`` in Å


def check_start(task: DesignTask, config: DesignConfig) -> None:
    """Raise ConfigError if the start is ``wildtype`` and the task has no given structure."""
    if config.start == "wildtype" and task.reference is None:
        raise ConfigError(f"start=wildtype: {task.name} has no given residues to start from")


def first_state(evaluator: Evaluator, config: DesignConfig, seed: int) -> DesignState:
    """Return the state before the first step; errors as those of :func:`check_start`."""
    check_start(evaluator.task, config)
    task = evaluator.task
    rng = np.random.default_rng([seed, 0])
    shape = (task.num_parameters, RESIDUES)
    x = 0.01 * rng.normal(size=shape)
    if config.start == "gumbel":
        x = x + rng.gumbel(size=shape) / Relaxation().alpha
    if config.start == "wildtype":
        assert task.reference is not None
        places = [int(np.flatnonzero(task.source == row)[0]) for row in range(task.num_parameters)]
        x = np.eye(RESIDUES)[task.reference.aatype[places].numpy()]
    parameters = torch.from_numpy(x).float()
    count = len(task.source)
    return DesignState(
        parameters,
        0,
        torch.zeros(2, *shape),
        parameters,
        math.inf,
        math.inf,
        np.full(count, 50.0, np.float32),
        np.zeros((count, 37, 3), np.float32),
        [],
        [],
    )


def optimise(
    evaluator: Evaluator,
    config: DesignConfig,
    seed: int,
    state: DesignState,
    on_step: Callable[[DesignState], None] | None = None,
) -> DesignState:
    """Run the steps that are left, and return the state, which is changed.

    Every step draws its random numbers from the seed and its number, so that a resumed optimisation equals one that
    ran through. ``on_step`` is called after each step.
    """
    for step in _remaining(config, state):
        rng = np.random.default_rng([seed, state.step + 1])
        networks = _draw(rng, len(evaluator.models), None if step.all_networks else config.networks)
        if step.stage == "mutate":
            found = _mutate(evaluator, config, step, state, rng)
        else:
            found = evaluator(
                state.parameters,
                step.relaxation,
                networks=networks,
                recycles=step.recycles,
                seed=int(rng.integers(2**31)),
                dropout=step.dropout,
            )
            assert found.gradient is not None
            if step.stage == "hard":
                _keep_best(evaluator, state, found, state.parameters)
            _descend(state, found.gradient.cpu().float(), config, step.rate)
        _record(state, step, found)
        if on_step is not None:
            on_step(state)
    return state


def _remaining(config: DesignConfig, state: DesignState) -> Iterator[Step]:
    steps = schedule(config)
    while state.step < len(steps):
        is_new_stage = state.step > 0 and steps[state.step].stage != steps[state.step - 1].stage
        if is_new_stage and float(np.mean(state.plddt)) < config.give_up_below:
            state.log[-1]["given_up"] = True
            return
        yield steps[state.step]


def _draw(rng: np.random.Generator, total: int, count: int | None) -> list[int]:
    """Draw the numbers of the networks of a step."""
    if count is None or count >= total:
        return list(range(total))
    return sorted(rng.choice(total, count, replace=False).tolist())


def _descend(state: DesignState, gradient: Tensor, config: DesignConfig, rate: float) -> None:
    """Take a step along the gradient, whose length is scaled to the square root of the number of residues."""
    squared = gradient.square().sum(-1)
    length = math.sqrt(int((squared > 0).sum())) / (float(squared.sum()) ** 0.5 + 1e-7)
    update = gradient * length
    if config.optimizer == "adam":
        count = state.step + 1
        first = _BETAS[0] * state.moments[0] + (1 - _BETAS[0]) * update
        second = _BETAS[1] * state.moments[1] + (1 - _BETAS[1]) * update.square()
        state.moments = torch.stack([first, second])
        update = (first / (1 - _BETAS[0] ** count)) / ((second / (1 - _BETAS[1] ** count)).sqrt() + _EPS)
    state.parameters = state.parameters - config.learning_rate * rate * update


def _keep_best(evaluator: Evaluator, state: DesignState, found: Evaluation, parameters: Tensor) -> None:
    violation = evaluator.violation(parameters)
    if (violation, found.loss) < (state.best_violation, state.best_loss):
        state.best_violation, state.best_loss, state.best = violation, found.loss, parameters.clone()
        state.positions = found.positions


def _mutate(
    evaluator: Evaluator, config: DesignConfig, step: Step, state: DesignState, rng: np.random.Generator
) -> Evaluation:
    """Take the best of several mutations, at residues that the network is least sure of.

    Positions are drawn by one minus pLDDT (Anishchenko et al., 2021), residues evenly among those that are allowed
    and keep the limits of the chain. Without an allowed mutation, the sequence stays.
    """
    start = state.best if math.isfinite(state.best_loss) else state.parameters
    residues = evaluator.logits_of(start).argmax(-1).numpy()
    source = evaluator.task.source
    rows = np.arange(len(residues))
    doubt = np.array([1.0 - state.plddt[source == row].mean() / 100.0 for row in rows]).clip(1e-3)
    # Residue types [P, 20] that each designed residue may change to.
    allowed = evaluator.limits.mutations(evaluator.designed(start))[residues] & evaluator.allowed
    allowed[rows, residues] = False
    if not allowed.any():
        allowed[rows, residues] = True
    doubt = doubt * allowed.any(1)
    tried: list[tuple[Evaluation, Tensor]] = []
    for _ in range(config.tries):
        place = int(rng.choice(len(residues), p=doubt / doubt.sum()))
        mutant = residues.copy()
        mutant[place] = int(rng.choice(np.flatnonzero(allowed[place])))
        parameters = torch.eye(RESIDUES)[torch.from_numpy(mutant)]
        found = evaluator(parameters, step.relaxation, recycles=step.recycles, gradient=False)
        tried.append((found, parameters))
    found, state.parameters = min(tried, key=lambda one: one[0].loss)
    _keep_best(evaluator, state, found, state.parameters)
    return found


def _record(state: DesignState, step: Step, found: Evaluation) -> None:
    state.step += 1
    state.plddt = found.plddt
    if not math.isfinite(state.best_loss):
        state.positions = found.positions
    state.trace.append(found.positions[:, 1].astype(np.float32))
    row: dict[str, Any] = {"step": state.step, "stage": step.stage, "loss": found.loss, **found.losses}
    row |= {"mean_plddt": float(found.plddt.mean()), "sequence": decode_sequence(found.logits)}
    state.log.append(row)


def final_parameters(evaluator: Evaluator, state: DesignState) -> str:
    """Return the letters of the designed residues: the best that were evaluated, or the last ones."""
    parameters = state.best if math.isfinite(state.best_loss) else state.parameters
    return decode_sequence(evaluator.logits_of(parameters))
