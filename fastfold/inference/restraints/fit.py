"""Fit a bias of the input features until a predicted structure obeys restraints.

Works with any weights, because only the features of target and MSA change. Losses of pLDDT and of distances between
residues near in the sequence keep the rest of the prediction as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastfold.data.features.pipeline import FeatureSampler
from fastfold.errors import ConfigError
from fastfold.evoformer.confidence.scores import plddt
from fastfold.evoformer.losses.design import Outputs, plddt_loss
from fastfold.evoformer.losses.masked import masked_mean
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.folding.features import input_order
from fastfold.inference.folding.gradients import GradientPolicy, GradientRun, differentiable
from fastfold.inference.restraints.file import Restraint
from fastfold.kernels.cpu.products import exact_products
from fastfold.protein import residue_constants as rc

BIASED = ("msa_feat", "target_feat")
"""Features that get a bias."""

_RATE, _CONFIDENCE, _LOCAL, _SIZE = 0.03, 0.3, 2.0, 0.1
_NEAR = 8
"""Residues within this separation in the sequence keep their distances."""

_BETA_TOLERANCE = 3.0
"""Difference in Å between distances of CA, which restraints limit, and of CB, which the distogram has."""

_SCALE = 10.0
_TRIAL = 0.25


class Figures(NamedTuple):
    """Figures of a prediction by the passes of the fit.

    Attributes:
        distances: CA distance of each restraint in Å, ``[R]``.
        plddt: Mean pLDDT, 0 to 100.
    """

    distances: np.ndarray
    plddt: float


class LeftOut(NamedTuple):
    """Trial without a group of restraints.

    Attributes:
        group: Numbers of its restraints.
        contradicts: Numbers of the restraints of groups that hold without it, and not with it.
        plddt: Gain of mean pLDDT without it.
    """

    group: tuple[int, ...]
    contradicts: tuple[int, ...]
    plddt: float


@dataclass(frozen=True)
class RestraintReport:
    """Restraints before and after the fit, for one network and seed.

    Attributes:
        restraints: The restraints.
        before: Figures without the bias.
        fitted: Figures with it, by the same passes.
        after: CA distance of each in Å in the final structure, ``[R]``.
        plddt: Mean pLDDT of the final structure, 0 to 100.
        steps: Steps of the fit.
        left_out: Trials without each group; None if there were none.
    """

    restraints: tuple[Restraint, ...]
    before: Figures
    fitted: Figures
    after: np.ndarray
    plddt: float
    steps: int
    left_out: tuple[LeftOut, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report in JSON's types."""
        rows: list[dict[str, Any]] = [
            {
                "line": one.line,
                "residues": [one.first + 1, one.second + 1],
                "min": one.low,
                "max": one.high if np.isfinite(one.high) else None,
                "group": one.group,
                "distance_before": round(float(before), 2),
                "distance": round(float(after), 2),
                "holds": bool(one.low <= after <= one.high),
            }
            for one, before, after in zip(self.restraints, self.before.distances, self.after, strict=True)
        ]
        for trial in self.left_out or ():
            for number in trial.group:
                lines = dict.fromkeys(self.restraints[i].line for i in trial.contradicts)
                rows[number] |= {"contradicts": list(lines), "plddt_gain_without": round(trial.plddt, 2)}
        return {
            "satisfied_before": satisfied(self.restraints, self.before.distances),
            "satisfied": satisfied(self.restraints, self.after),
            "total": len(grouped(self.restraints)),
            "plddt_before": round(self.before.plddt, 2),
            "plddt": round(self.plddt, 2),
            "confidence_paid": round(self.before.plddt - self.fitted.plddt, 2),
            "steps": self.steps,
            "leave_one_out": self.left_out is not None,
            "restraints": rows,
        }


@dataclass(frozen=True)
class RestrainedFeatures:
    """Features with the bias, and the figures of the fit.

    Attributes:
        sampler: Features, the same in all passes.
        restraints: The restraints.
        before: Figures without the bias.
        fitted: Figures with it.
        steps: Steps of the fit.
        left_out: Trials without each group; None if there were none.
    """

    sampler: FeatureSampler
    restraints: tuple[Restraint, ...]
    before: Figures
    fitted: Figures
    steps: int
    left_out: tuple[LeftOut, ...] | None = None

    def report(self, positions: np.ndarray, mean_plddt: float) -> RestraintReport:
        """Return the report of a structure, from its atoms ``[N, 37, 3]`` in Å and its mean pLDDT."""
        return RestraintReport(
            self.restraints,
            self.before,
            self.fitted,
            ca_distances(self.restraints, positions),
            mean_plddt,
            self.steps,
            self.left_out,
        )


def grouped(restraints: Sequence[Restraint]) -> list[list[int]]:
    """Return the numbers of restraints by group, in which one must hold; others are alone."""
    found: dict[Any, list[int]] = {}
    for number, one in enumerate(restraints):
        found.setdefault(one.group or number, []).append(number)
    return list(found.values())


def satisfied(restraints: Sequence[Restraint], distances: np.ndarray) -> int:
    """Return the number of groups in which a restraint holds at CA distances ``[R]`` in Å."""
    holds = [one.low <= distance <= one.high for one, distance in zip(restraints, distances, strict=True)]
    return sum(any(holds[i] for i in group) for group in grouped(restraints))


def ca_distances(restraints: Sequence[Restraint], positions: np.ndarray) -> np.ndarray:
    """Return the CA distance in Å of each restraint, ``[R]``, from atoms ``[N, 37, 3]`` in the order of the target."""
    ca = positions[:, rc.atom_order["CA"]]
    first, second = ([getattr(one, name) for one in restraints] for name in ("first", "second"))
    return np.linalg.norm(ca[first] - ca[second], axis=-1)


class _Loss:
    """Loss of the restraints, from tensors that are made once."""

    def __init__(self, restraints: Sequence[Restraint], order: Tensor, like: Tensor) -> None:
        def column(name: str) -> Tensor:
            return torch.tensor([getattr(one, name) for one in restraints], device=like.device)

        self.first, self.second = (order[column(name)] for name in ("first", "second"))
        self.low, self.high, self.weight = (column(name).to(like.dtype) for name in ("low", "high", "weight"))
        self._groups = [torch.tensor(group, device=like.device) for group in grouped(restraints)]

    def distances(self, outputs: Outputs) -> Tensor:
        """Return CA distances in Å, ``[R]``."""
        ca = outputs.positions[:, rc.atom_order["CA"]]
        return ((ca[self.first] - ca[self.second]).square().sum(-1) + 1e-6).sqrt()

    def __call__(self, outputs: Outputs) -> Tensor:
        """Return the weighted mean over groups of the loss of their best restraint."""
        distance = self.distances(outputs)
        outside = (self.low - distance).relu() + (distance - self.high).relu()
        # Bounded, so that a few impossible restraints do not decide.
        bounded = outside / (_SCALE * (1.0 + outside / (3.0 * _SCALE)))
        edges = outputs.lower_edges
        upper = torch.cat([edges[1:], edges.new_full((1,), torch.inf)])
        possible = (edges < self.high[:, None] + _BETA_TOLERANCE) & (
            upper > self.low[:, None] - _BETA_TOLERANCE
        )
        assert isinstance(outputs.distogram, Tensor)
        probability = (outputs.distogram[self.first, self.second].softmax(-1) * possible).sum(-1)
        losses = bounded - torch.log(probability + 1e-6)
        best = torch.stack([losses[group].min() for group in self._groups])
        weights = torch.stack([self.weight[group].max() for group in self._groups])
        return masked_mean(weights, best, 1)


class _Fit:
    """Bias of the features of a target, and steps of it towards restraints.

    All passes of the fold use the same rows of the alignment, because the bias belongs to them.
    """

    def __init__(self, model: AlphaFold, sampler: FeatureSampler, restraints: Sequence[Restraint]) -> None:
        parameter = next(model.parameters())
        device, dtype = parameter.device, model.structure_module.initial.weight.dtype
        self._model, self._sampler, self._restraints, self._dtype = model, sampler, restraints, dtype
        sampled = sampler.sample(0).items()
        self._sampled = {key: torch.as_tensor(np.asarray(value)) for key, value in sampled}
        self._features = features = {key: value.to(device) for key, value in self._sampled.items()}
        self.bias = {key: torch.zeros_like(features[key], dtype=dtype).requires_grad_() for key in BIASED}
        self._order = torch.from_numpy(input_order(sampler)).to(device)
        self.residues = len(self._order)
        self._everyone = torch.ones(self.residues, device=device, dtype=dtype)
        chain = features.get("asym_id", torch.zeros(self.residues, device=device))
        index = features["residue_index"]
        apart = (index[:, None] - index[None]).abs()
        near = (apart > 0) & (apart <= _NEAR) & (chain[:, None] == chain[None])
        self._near = near.to(dtype)
        with torch.no_grad():
            first = self._run()
        assert isinstance(first.distogram, Tensor)
        self._start = first.distogram.log_softmax(-1)
        self._loss = _Loss(restraints, self._order, self._start)
        self.first = self._figures(first)

    def _run(self) -> Outputs:
        given = self._features | {
            key: self._features[key].to(self._dtype) + value for key, value in self.bias.items()
        }
        return Outputs.from_result(self._model(lambda cycle, member: given, 1, recycle_tolerance=0.0))

    def _figures(self, outputs: Outputs) -> Figures:
        distances = self._loss.distances(outputs).detach().cpu().numpy()
        return Figures(distances, float(plddt(outputs.lddt.detach()).mean()))

    def figures(self) -> Figures:
        """Return the figures with the bias as it stands."""
        with torch.no_grad():
            return self._figures(self._run())

    def descend(self, steps: int, left_out: Sequence[int] = ()) -> int:
        """Take steps until all restraints hold or their number is reached; return the number taken.

        Args:
            steps: Largest number of steps.
            left_out: Numbers of restraints that do not count.
        """
        kept = [one for number, one in enumerate(self._restraints) if number not in left_out]
        loss = _Loss(kept, self._order, self._start)
        optimizer = torch.optim.Adam(self.bias.values(), lr=_RATE)
        for done in range(steps):
            outputs = self._run()
            distances = loss.distances(outputs).detach().cpu().numpy()
            if satisfied(kept, distances) == len(grouped(kept)) and done:
                return done
            assert isinstance(outputs.distogram, Tensor)
            changed = (self._start.exp() * (self._start - outputs.distogram.log_softmax(-1))).sum(-1)
            size = torch.stack([value.square().sum() for value in self.bias.values()]).sum() / self.residues
            total = (
                loss(outputs)
                + _CONFIDENCE * plddt_loss(outputs, self._everyone)
                + _LOCAL * masked_mean(self._near, changed, 2)
                + _SIZE * size
            )
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
        return steps

    def contradictions(self, steps: int) -> list[LeftOut]:
        """Leave out each group in turn, return what then holds, and restore the bias.

        Every trial takes further steps from the fitted bias. The groups that one contradicts hold in its trial, and not
        in one with the same number of steps and all groups.

        Args:
            steps: Largest number of steps of a trial.
        """
        groups = grouped(self._restraints)
        fitted = {key: value.detach().clone() for key, value in self.bias.items()}

        def trial(left_out: Sequence[int]) -> tuple[list[int], float]:
            with torch.no_grad():
                for key, value in self.bias.items():
                    value.copy_(fitted[key])
            self.descend(steps, left_out)
            found = self.figures()
            held = [
                number
                for number, group in enumerate(groups)
                if satisfied([self._restraints[i] for i in group], found.distances[group])
            ]
            return held, found.plddt

        base, confidence = trial(())
        found = []
        for group in groups if len(base) < len(groups) and len(groups) > 1 else ():
            held, mean = trial(group)
            now = [
                i for number in held if number not in base and groups[number] != group for i in groups[number]
            ]
            found.append(LeftOut(tuple(group), tuple(now), mean - confidence))
        with torch.no_grad():
            for key, value in self.bias.items():
                value.copy_(fitted[key])
        return found

    def sampler(self) -> FeatureSampler:
        """Return the features with the bias, the same in all passes."""
        biased = {
            key: (self._sampled[key].to(self._dtype) + self.bias[key].detach().cpu()).numpy()
            for key in BIASED
        }
        return FeatureSampler(
            {key: value.numpy() for key, value in self._sampled.items()} | biased,
            lambda rng: {},
            seed=0,
            is_multimer=self._sampler.is_multimer,
            resample=False,
            chain_order=self._sampler.chain_order,
        )


def fit_restraints(
    model: AlphaFold,
    sampler: FeatureSampler,
    restraints: Sequence[Restraint],
    *,
    steps: int,
    leave_one_out: bool = False,
) -> RestrainedFeatures:
    """Return features with a bias under which the prediction obeys the restraints.

    Adam takes steps until all restraints hold or their number is reached. Each runs one recycling pass without and one
    with gradients.

    Args:
        model: The network, on its device.
        sampler: Features of the target.
        restraints: Restraints in the order of the target's chains.
        steps: Largest number of steps.
        leave_one_out: True to leave out each group in turn with a quarter of the steps, if not all restraints hold.

    Raises:
        ConfigError: The trunk computes in 8 bits, for which gradients are missing.
    """
    if not next(model.parameters()).is_floating_point():
        raise ConfigError(f"{model.name}: restraints need gradients; 8 bits lack them, use --precision fp32")
    device = next(model.parameters()).device
    residues = len(input_order(sampler))
    recording = GradientRun(replace(GradientPolicy.of_length(residues), whole_logits=True))
    with differentiable(model, residues, 0, False, recording), exact_products(device):
        fit = _Fit(model, sampler, restraints)
        done = fit.descend(steps)
        last = fit.figures()
        left_out = None
        if leave_one_out:
            holds = satisfied(restraints, last.distances) == len(grouped(restraints))
            left_out = () if holds else tuple(fit.contradictions(max(1, round(steps * _TRIAL))))
    return RestrainedFeatures(fit.sampler(), tuple(restraints), fit.first, last, done, left_out)
