"""Optimisation of a designed sequence: from logits to residues in stages, then mutations.

The stages, their schedules and defaults are those of ColabDesign's ``design_3stage`` and ``design_semigreedy``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.evoformer.inputs import RESIDUES, Relaxation, decode_sequence, encode_sequence
from fastfold.products.design.agreement import given_agreement
from fastfold.products.design.config import DesignConfig
from fastfold.products.design.evaluate import Evaluation, Evaluator
from fastfold.products.design.tasks.losses import check_losses
from fastfold.products.design.tasks.task import DesignTask
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.interface.geometry import touching_residues
from fastfold.protein.metrics.secondary_structure import STRAND, assign_secondary_structure

_BETAS, _EPS = (0.9, 0.999), 1e-8

_SCREENED = 0.9  #: Share of the softmax at the end of the screening steps
_STRANDS = 0.15  #: Share of strands from which a binder gets more passes
_CLASH, _FEWEST, _FINAL_PLDDT = 2.5, 3, 70.0
"""Distance of CA atoms that clash in Å, residues that a binder needs at its target, and its pLDDT; all BindCraft's."""


@dataclass(frozen=True)
class DesignStep:
    """One step of the schedule, whose stage is ``screen``, ``soft``, ``temperature``, ``hard`` or ``mutate``.

    The network sees the relaxation, and ``rate`` is a factor of the learning rate.
    """

    stage: str
    relaxation: Relaxation
    rate: float
    recycles: int
    dropout: bool
    all_networks: bool


def schedule(config: DesignConfig, *, has_strands: bool = False) -> list[DesignStep]:
    """Return the steps of an optimisation in order; with strands, more passes after the screening steps."""
    steps, recycles, dropout = [], config.recycles, config.dropout
    for i in range(config.screen_steps):
        share = _SCREENED * (i + 1) / config.screen_steps
        steps.append(DesignStep("screen", Relaxation(soft=share), 1.0, recycles, dropout, False))
    if has_strands and config.strand_recycles is not None:
        recycles = config.strand_recycles
    for i in range(config.soft_steps):
        share = (i + 1) / config.soft_steps
        extra = round(recycles * share) if config.ramp_recycles else recycles
        steps.append(DesignStep("soft", Relaxation(soft=share), 1.0, extra, dropout, False))
    for i in range(config.temperature_steps):
        rest = 1.0 - (i + 1) / config.temperature_steps
        temperature = 1e-2 + (1.0 - 1e-2) * rest**2
        relaxation = Relaxation(soft=1.0, temperature=temperature)
        steps.append(DesignStep("temperature", relaxation, temperature, recycles, dropout, False))
    hard = Relaxation(soft=1.0, hard=1.0, temperature=1e-2)
    every = config.all_networks
    steps += [DesignStep("hard", hard, 1e-2, recycles, False, every)] * config.hard_steps
    return steps + [DesignStep("mutate", hard, 0.0, recycles, False, every)] * config.mutation_steps


@dataclass
class DesignState:
    """Everything that an optimisation resumes from."""

    parameters: Tensor  #: ``[P, 20]`` float32
    moments: Tensor  #: First and second moments of Adam, ``[2, P, 20]``; zeros for SGD
    #: Parameters of the best residues so far, ``[P, 20]``; those of the last step if there are none
    best: Tensor
    plddt: np.ndarray  #: pLDDT ``[N]`` of the last step, 0 to 100
    #: Atoms ``[N, 37, 3]`` in Å of the best residues, or of the last step if there are none
    positions: np.ndarray
    step: int = 0  #: Number of finished steps
    best_loss: float = math.inf  #: Loss of the best residues; infinite if no step has used residues
    best_violation: float = math.inf  #: Residues and charges of them that are outside the limits of the chain
    log: list[dict[str, Any]] = field(default_factory=list)  #: A row of figures for each step
    #: Logits ``[P, 20]`` of the last step from logits to softmax; empty before it
    profile: Tensor = field(default_factory=lambda: torch.zeros(0))
    #: CA atoms of the last network pass of each step, ``[steps, N, 3]`` in Å
    trace: list[np.ndarray] = field(default_factory=list)


def check_start(task: DesignTask, config: DesignConfig) -> None:
    """Raise ConfigError if a loss selects no residues, or the start is ``wildtype`` without a given structure."""
    check_losses(task, {**task.weights, **config.weights})
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
        # Residues of unknown types start without a preference.
        x = np.eye(RESIDUES + 1, RESIDUES)[task.reference.aatype[places].numpy()]
    parameters, count = torch.from_numpy(x).float(), len(task.source)
    return DesignState(
        parameters=parameters,
        moments=torch.zeros(2, *shape),
        best=parameters,
        plddt=np.full(count, 50.0, np.float32),
        positions=np.zeros((count, 37, 3), np.float32),
    )


def optimize(
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
            evaluation = _mutate(evaluator, config, step, state, rng, networks)
        else:
            evaluation = evaluator(
                state.parameters,
                step.relaxation,
                networks=networks,
                recycles=step.recycles,
                seed=int(rng.integers(2**31)),
                dropout=step.dropout,
            )
            assert evaluation.gradient is not None
            if step.stage == "hard":
                _keep_best(evaluator, state, evaluation, state.parameters)
            if step.stage == "soft":
                state.profile = evaluation.logits
            _descend(state, evaluation.gradient.cpu().float(), config, step.rate)
        _record(evaluator.task, state, step, evaluation)
        if step.stage == "screen" and state.step == config.screen_steps:
            state.log[-1]["strands"] = strand_share(evaluator.task, evaluation)
        if on_step is not None:
            on_step(state)
    if config.check_binder and not state.log[-1].get("given_up"):
        problem = binder_problem(evaluator.task, state)
        if problem is not None:
            state.log[-1] |= {"given_up": True, "reason": problem}
    return state


def _remaining(config: DesignConfig, state: DesignState) -> Iterator[DesignStep]:
    while True:
        steps = schedule(config, has_strands=any(row.get("strands", 0.0) > _STRANDS for row in state.log))
        if state.step >= len(steps):
            return
        before = steps[state.step - 1].stage if state.step else ""
        # Screened designs have been judged, as in BindCraft.
        is_judged = state.step > 0 and steps[state.step].stage != before
        is_judged &= not (before == "soft" and config.screen_steps > 0)
        if is_judged and _best_plddt(state, before) < config.give_up_below:
            state.log[-1]["given_up"] = True
            return
        yield steps[state.step]


def _best_plddt(state: DesignState, *stages: str) -> float:
    """Return the pLDDT of the designed chain in the step with the lowest loss of some stages, or of all."""
    rows = [row for row in state.log if row["stage"] in stages] or state.log
    return float(min(rows, key=lambda row: row["loss"])["designed_plddt"])


def strand_share(task: DesignTask, evaluation: Evaluation) -> float:
    """Return the share of a task's designed chain in strands, 0 to 1."""
    letters = "".join(task.letters(decode_sequence(evaluation.logits)))
    aatype = rc.sequence_to_aatype(letters)
    mask = rc.restype_atom37_mask[aatype]
    structure = assign_secondary_structure(evaluation.positions, mask, aatype, task.chain)
    return sum(structure[i] == STRAND for i in task.designed_chain) / len(task.designed_chain)


def binder_problem(task: DesignTask, state: DesignState) -> str | None:
    """Return why a finished binder is not worth a fold, by BindCraft's rules; None if it is."""
    ca = state.positions[:, rc.atom_order["CA"]].astype(np.float64)
    apart = np.linalg.norm(ca[:, None] - ca[None], axis=-1)
    joined = (task.chain[:, None] == task.chain) & (abs(task.place[:, None] - task.place) <= 1)
    clashes = int(((apart < _CLASH) & ~joined).sum()) // 2
    if clashes:
        return f"{clashes} pairs of CA atoms within {_CLASH:g} Å"
    if (plddt := _best_plddt(state, "hard", "mutate")) < _FINAL_PLDDT:
        return f"pLDDT {plddt:.1f} below {_FINAL_PLDDT:g}"
    binder = task.in_designed
    if not binder.all():
        mask = (np.abs(state.positions).sum(-1) > 0).astype(np.float64)
        near = int(touching_residues(state.positions, mask, binder).sum())
        if near < _FEWEST:
            return f"{near} residues at the target, fewer than {_FEWEST}"
    return None


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


def _keep_best(evaluator: Evaluator, state: DesignState, evaluation: Evaluation, parameters: Tensor) -> None:
    violation = evaluator.violation(parameters)
    if (violation, evaluation.loss) < (state.best_violation, state.best_loss):
        state.best_violation, state.best_loss, state.best = violation, evaluation.loss, parameters.clone()
        state.positions = evaluation.positions


def _mutate(
    evaluator: Evaluator,
    config: DesignConfig,
    step: DesignStep,
    state: DesignState,
    rng: np.random.Generator,
    networks: Sequence[int],
) -> Evaluation:
    """Take the best of several mutations of the last residues, also if its loss is higher, as ColabDesign does.

    Positions are drawn by one minus pLDDT (Anishchenko et al., 2021), residues evenly or by the profile among those
    that are allowed and keep the limits of the chain. Without an allowed mutation, the sequence stays.
    """
    start = encode_sequence(state.log[-1]["sequence"]) if state.log else state.parameters
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
    share = math.ceil(len(residues) * config.tries_percent / 100.0)
    for _ in range(share or config.tries):
        place = int(rng.choice(len(residues), p=doubt / doubt.sum()))
        mutant = residues.copy()
        mutant[place] = int(rng.choice(RESIDUES, p=_odds(config, state, place, allowed[place])))
        parameters = torch.eye(RESIDUES)[torch.from_numpy(mutant)]
        evaluation = evaluator(
            parameters, step.relaxation, networks=networks, recycles=step.recycles, gradient=False
        )
        tried.append((evaluation, parameters))
    evaluation, state.parameters = min(tried, key=lambda one: one[0].loss)
    _keep_best(evaluator, state, evaluation, state.parameters)
    return evaluation


def _odds(config: DesignConfig, state: DesignState, place: int, allowed: np.ndarray) -> np.ndarray:
    """Return the probabilities ``[20]`` of a mutated residue, 0 where it is not allowed."""
    logits = state.profile[place].double().numpy() if config.profile_mutations else np.zeros(RESIDUES)
    odds = np.exp(np.where(allowed, logits - logits[allowed].max(), -np.inf))
    return odds / odds.sum()


def _record(task: DesignTask, state: DesignState, step: DesignStep, evaluation: Evaluation) -> None:
    state.step += 1
    state.plddt = evaluation.plddt
    if not math.isfinite(state.best_loss):
        state.positions = evaluation.positions
    state.trace.append(evaluation.positions[:, 1].astype(np.float32))
    sequence = decode_sequence(evaluation.logits)
    figures = given_agreement(task, evaluation.positions, "".join(task.letters(sequence)))
    plddt = {
        "mean_plddt": float(evaluation.plddt.mean()),
        "designed_plddt": float(evaluation.plddt[task.designed_chain].mean()),
    }
    about = {**plddt, **figures, "sequence": sequence}
    state.log.append(
        {"step": state.step, "stage": step.stage, "loss": evaluation.loss, **evaluation.losses, **about}
    )


def final_parameters(evaluator: Evaluator, state: DesignState) -> str:
    """Return the letters of the designed residues: the best that were evaluated, or the last ones."""
    parameters = state.best if math.isfinite(state.best_loss) else state.parameters
    return decode_sequence(evaluator.logits_of(parameters))
