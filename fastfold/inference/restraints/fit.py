"""Fit a bias of the input features until a predicted structure obeys restraints.

Works with any weights, because only the features of target and MSA change. Losses of pLDDT and of distances between
residues near in the sequence keep the rest of the prediction as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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


@dataclass(frozen=True)
class RestraintReport:
    """Restraints before and after the fit, for one network and seed.

    Attributes:
        restraints: The restraints.
        before: CA distance of each in Å without the bias, ``[R]``.
        after: The same of the final structure.
        plddt_before: Mean pLDDT without the bias, 0 to 100.
        plddt_after: The same of the final structure.
        steps: Steps of the fit.
    """

    restraints: tuple[Restraint, ...]
    before: np.ndarray
    after: np.ndarray
    plddt_before: float
    plddt_after: float
    steps: int

    def to_json(self) -> dict[str, Any]:
        """Return the report in JSON's types."""
        rows = [
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
            for one, before, after in zip(self.restraints, self.before, self.after, strict=True)
        ]
        return {
            "satisfied_before": satisfied(self.restraints, self.before),
            "satisfied": satisfied(self.restraints, self.after),
            "total": len(grouped(self.restraints)),
            "plddt_before": round(self.plddt_before, 2),
            "plddt": round(self.plddt_after, 2),
            "steps": self.steps,
            "restraints": rows,
        }


@dataclass(frozen=True)
class RestrainedFeatures:
    """Features with the bias, and the figures before it.

    Attributes:
        sampler: Features, the same in all passes.
        restraints: The restraints.
        before: CA distance of each in Å without the bias, ``[R]``.
        plddt_before: Mean pLDDT without the bias, 0 to 100.
        steps: Steps of the fit.
    """

    sampler: FeatureSampler
    restraints: tuple[Restraint, ...]
    before: np.ndarray
    plddt_before: float
    steps: int

    def report(self, positions: np.ndarray, mean_plddt: float) -> RestraintReport:
        """Return the report of a structure, from its atoms ``[N, 37, 3]`` in Å and its mean pLDDT."""
        after = ca_distances(self.restraints, positions)
        return RestraintReport(self.restraints, self.before, after, self.plddt_before, mean_plddt, self.steps)


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


def fit_restraints(
    model: AlphaFold,
    sampler: FeatureSampler,
    restraints: Sequence[Restraint],
    *,
    steps: int,
) -> RestrainedFeatures:
    """Return features with a bias under which the prediction obeys the restraints.

    Adam takes steps until all restraints hold or their number is reached. Each runs one recycling pass without and one
    with gradients. All passes of the fold use the same rows of the alignment, because the bias belongs to them.

    Args:
        model: The network, on its device.
        sampler: Features of the target.
        restraints: Restraints in the order of the target's chains.
        steps: Largest number of steps.

    Raises:
        ConfigError: The trunk computes in 8 bits, for which gradients are missing.
    """
    parameter = next(model.parameters())
    if not parameter.is_floating_point():
        raise ConfigError(f"{model.name}: restraints need gradients; 8 bits lack them, use --precision fp32")
    device, dtype = parameter.device, model.structure_module.initial.weight.dtype
    sampled = {key: torch.as_tensor(np.asarray(value)) for key, value in sampler.sample(0).items()}
    features = {key: value.to(device) for key, value in sampled.items()}
    bias = {key: torch.zeros_like(features[key], dtype=dtype).requires_grad_() for key in BIASED}
    order = torch.from_numpy(input_order(sampler)).to(device)
    residues = len(order)
    everyone = torch.ones(residues, device=device, dtype=dtype)
    chain = features.get("asym_id", torch.zeros(residues, device=device))
    index = features["residue_index"]
    apart = (index[:, None] - index[None]).abs()
    near = ((apart > 0) & (apart <= _NEAR) & (chain[:, None] == chain[None])).to(dtype)

    def run() -> Outputs:
        given = features | {key: features[key].to(dtype) + value for key, value in bias.items()}
        return Outputs.from_result(model(lambda cycle, member: given, 1, recycle_tolerance=0.0))

    optimizer = torch.optim.Adam(bias.values(), lr=_RATE)
    done = 0
    recording = GradientRun(replace(GradientPolicy.of_length(residues), whole_logits=True))
    with differentiable(model, residues, 0, False, recording), exact_products(device):
        with torch.no_grad():
            first = run()
            assert isinstance(first.distogram, Tensor)
            start = first.distogram.log_softmax(-1)
        loss = _Loss(restraints, order, start)
        for done in range(1, steps + 1):
            outputs = run()
            assert isinstance(outputs.distogram, Tensor)
            distances = loss.distances(outputs).detach().cpu().numpy()
            held = satisfied(restraints, distances)
            if held == len(grouped(restraints)) and done > 1:
                done -= 1
                break
            changed = (start.exp() * (start - outputs.distogram.log_softmax(-1))).sum(-1)
            size = torch.stack([value.square().sum() for value in bias.values()]).sum() / residues
            total = (
                loss(outputs)
                + _CONFIDENCE * plddt_loss(outputs, everyone)
                + _LOCAL * masked_mean(near, changed, 2)
                + _SIZE * size
            )
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
    biased = {key: (sampled[key].to(dtype) + bias[key].detach().cpu()).numpy() for key in BIASED}
    fixed = {key: value.numpy() for key, value in sampled.items()} | biased
    features_of_all_passes = FeatureSampler(
        fixed,
        lambda rng: {},
        seed=0,
        is_multimer=sampler.is_multimer,
        resample=False,
        chain_order=sampler.chain_order,
    )
    return RestrainedFeatures(
        features_of_all_passes,
        tuple(restraints),
        loss.distances(first).cpu().numpy(),
        float(plddt(first.lddt).mean()),
        done,
    )
