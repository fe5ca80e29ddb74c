"""Fit a bias of the input features until a predicted structure obeys restraints.

Works with any weights, because only the features of target and MSA change. Losses of pLDDT and of distances between
residues near in the sequence keep the rest of the prediction as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastfold.data.features.assembly import CHAIN_GAP
from fastfold.data.features.pipeline import FeatureSampler
from fastfold.errors import ConfigError
from fastfold.evoformer.confidence.restraint_evidence import LimitedPairs, limit_probabilities
from fastfold.evoformer.confidence.scores import plddt
from fastfold.evoformer.config import descent_settings
from fastfold.evoformer.losses.design import Outputs, plddt_loss
from fastfold.evoformer.losses.masked import PairLogits, at_columns, masked_mean
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.distributed import DistributedFolder
from fastfold.inference.folding.gradients import CHECKPOINTED, GradientRun, differentiable
from fastfold.inference.folding.prediction import input_order
from fastfold.inference.planning.fit import Fit
from fastfold.inference.planning.gradient_plan import (
    GradientPlan,
    GradientPlanner,
    gradient_run,
    plan_gradients,
)
from fastfold.inference.restraints.distances import (
    RestrainedAtoms,
    atom_reach,
    beta_limits,
    restraint_distances,
    smooth_minimum,
)
from fastfold.inference.restraints.report import Confidence, LeftOut, RestraintReport
from fastfold.inference.restraints.restraint import Restraint, grouped, satisfied
from fastfold.kernels.cpu.products import exact_products
from fastfold.parallel.comm.collectives import broadcast
from fastfold.parallel.distributed import DistributedContext

BIASED = ("msa_feat", "target_feat")  #: Features that get a bias

_RATE, _CONFIDENCE, _LOCAL, _SIZE = 0.03, 0.3, 2.0, 0.1
RECYCLES = 1  #: Passes without gradients before that of a step
PATIENCE = 5  #: Steps without a better one after which a fit ends
_NEAR = 8  #: Residues within this separation in the sequence keep their distances

_BETA_TOLERANCE = 3.0
"""Difference in Å between distances of CA and of CB, which the distogram has."""

_CHANNELS = 49 + 22  #: Channels of the features with a bias: of the MSA per row, of the target at most

_COPIES = 6
"""Float32 copies of these features: themselves, the bias, their sum, its gradient, and two moments of Adam."""

_SCALE = 10.0
_TRIAL = 0.25
_GROUP_TEMPERATURE = 0.05
"""Temperature of the smooth minimum over the losses of a group: that of 0.5 Å, by the scale."""


class Figures(NamedTuple):
    """Distance of each restraint in Å, ``[R]``, and mean pLDDT (0 to 100), by the passes of the fit."""

    distances: np.ndarray
    plddt: float


class FitResult(NamedTuple):
    """Result of a fit."""

    bias: dict[str, Tensor]  #: Bias of each feature of :data:`BIASED`, on the host
    before: Figures  #: Figures without the bias
    fitted: Figures  #: Figures with it
    steps: int  #: Steps of the fit
    left_out: tuple[LeftOut, ...] | None  #: Trials without each group; None if there were none
    probabilities: np.ndarray  #: See :class:`~fastfold.inference.restraints.report.RestraintReport`


@dataclass(frozen=True)
class RestrainedFeatures:
    """Features with the bias, the same in all passes, and the fit."""

    sampler: FeatureSampler
    restraints: tuple[Restraint, ...]
    fit: FitResult
    aatype: np.ndarray  #: Residue types ``[N]`` in the order of the target

    def report(self, positions: np.ndarray, mean_plddt: float) -> RestraintReport:
        """Return the report of a structure, from its atoms ``[N, 37, 3]`` in Å and its mean pLDDT."""
        fit = self.fit
        return RestraintReport(
            self.restraints,
            before=fit.before.distances[: len(self.restraints)],
            after=restraint_distances(self.restraints, positions, self.aatype),
            probabilities=fit.probabilities[: len(self.restraints)],
            plddt=mean_plddt,
            confidence=Confidence(fit.before.plddt, fit.fitted.plddt, fit.steps),
            left_out=fit.left_out,
        )


def _beta_tolerances(one: Restraint, first: int, second: int) -> tuple[float, float]:
    """Return by how many Å the distance of CB of two residue types may be under and over a restraint's."""
    if one.atoms == "any":  # CB is one of the atoms.
        reach = atom_reach("CB")
        return 0.0, float(reach[first] + reach[second])
    tolerance = _BETA_TOLERANCE if one.atoms == "CA" else 0.0
    return tolerance, tolerance


class _Loss:
    """Loss of the restraints, from tensors that are made once.

    Args:
        restraints: ``R`` restraints, with residues in the order of the target.
        order: Place ``[N]`` in the features of each residue of the target.
        aatype: Residue types ``[N]`` in the order of the features.
        like: Tensor with the dtype and device of the loss.
    """

    def __init__(self, restraints: Sequence[Restraint], order: Tensor, aatype: Tensor, like: Tensor) -> None:
        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, device=like.device, dtype=like.dtype)

        self._atoms = RestrainedAtoms(restraints, aatype, order)
        self.low = column([one.low for one in restraints])
        self.high = column([one.high for one in restraints])
        self.weight = column([one.weight for one in restraints])
        self._groups = [torch.tensor(group, device=like.device) for group in grouped(restraints)]
        first, second = self._atoms.first, self._atoms.second
        types = list(zip(restraints, aatype[first].tolist(), aatype[second].tolist(), strict=True))
        under, over = zip(*(_beta_tolerances(*one) for one in types), strict=True)
        self._expected = tuple(map(column, zip(*(beta_limits(*one) for one in types), strict=True)))
        self._beta_low, self._beta_high = self.low - column(under), self.high + column(over)
        # Restraints of a residue are columns of its row.
        used: Counter[int] = Counter()
        slots = []
        for row in first.tolist():
            slots.append(used[row])
            used[row] += 1
        self._slots = torch.tensor(slots, device=like.device)
        self._columns = torch.zeros(len(order), max(slots) + 1, dtype=torch.int64, device=like.device)
        self._columns[first, self._slots] = second

    def probabilities(self, outputs: Outputs, residue_index: Tensor) -> Tensor:
        """Return the probabilities ``[R, 2]`` of :func:`.limit_probabilities`, without gradients."""
        logits = outputs.distogram
        return limit_probabilities(
            logits.logits if isinstance(logits, PairLogits) else logits,
            outputs.lower_edges[1:],
            LimitedPairs(self._atoms.first, self._atoms.second, *self._expected),
            residue_index=residue_index,
            present=torch.ones_like(residue_index, dtype=torch.bool),
        )

    def distances(self, outputs: Outputs) -> Tensor:
        """Return the distance of each restraint's closest atoms in Å, ``[R]``."""
        return self._atoms.closest(outputs.atom14)

    def __call__(self, outputs: Outputs) -> Tensor:
        """Return the weighted mean over groups of the smooth minimum of their restraints' losses.

        Smooth distances are too strict by 0.53 Å at most, so that restraints without a loss hold.
        """
        under, over = self._atoms.smooth_bounds(outputs.atom14)
        outside = (self.low - under).relu() + (over - self.high).relu()
        # Bounded, so that a few impossible restraints do not decide.
        bounded = outside / (_SCALE * (1.0 + outside / (3.0 * _SCALE)))
        edges = outputs.lower_edges
        upper = torch.cat([edges[1:], edges.new_full((1,), torch.inf)])
        possible = (edges < self._beta_high[:, None]) & (upper > self._beta_low[:, None])
        logits = at_columns(outputs.distogram, self._columns)[self._atoms.first, self._slots]
        probability = (logits.softmax(-1) * possible).sum(-1)
        losses = bounded - torch.log(probability + 1e-6)
        best = torch.stack([smooth_minimum(losses[group], _GROUP_TEMPERATURE) for group in self._groups])
        weights = torch.stack([self.weight[group].max() for group in self._groups])
        return masked_mean(weights, best, 1)


class _Fit:
    """Bias of the features of a target, and steps of it towards restraints.

    All passes of the fold use the same rows of the alignment, because the bias belongs to them. Ranks that share the
    target take equal steps.
    """

    def __init__(
        self,
        model: AlphaFold,
        sampled: Mapping[str, Tensor],
        order: np.ndarray,
        restraints: Sequence[Restraint],
        of_templates: Sequence[Restraint],
        run: GradientRun,
    ) -> None:
        parameter = next(model.parameters())
        device, dtype = parameter.device, model.structure_module.initial.weight.dtype
        self._model, self._dtype, self._recording = model, dtype, run
        self._restraints, self._of_templates = restraints, of_templates
        self._features = features = {key: value.to(device) for key, value in sampled.items()}
        self.bias = {key: torch.zeros_like(features[key], dtype=dtype).requires_grad_() for key in BIASED}
        self.residues = len(order)
        self._everyone = torch.ones(self.residues, device=device, dtype=dtype)
        self._loss = partial(
            _Loss,
            order=torch.from_numpy(order).to(device),
            aatype=features["aatype"].long(),
            like=self._everyone,
        )
        self._all = self._loss([*restraints, *of_templates])
        self._neighbors, self._near = _near_residues(features)
        with torch.no_grad(), self._recorded():
            first = self._run()
            self._start = at_columns(first.distogram, self._neighbors).log_softmax(-1)
            self.first = self._figures(first)
            self._probabilities = self._agreed(self._all.probabilities(first, _numbered(features)))

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        recording = differentiable(self._model, self.residues, 0, False, self._recording)
        with recording, exact_products(self._everyone.device):
            yield

    def _run(self) -> Outputs:
        biased = {key: self._features[key].to(self._dtype) + value for key, value in self.bias.items()}
        features = self._features | biased
        result = self._model(lambda cycle, member: features, RECYCLES, recycle_tolerance=0.0)
        return Outputs.from_result(result)

    def _figures(self, outputs: Outputs) -> Figures:
        distances = self._agreed(self._all.distances(outputs))
        return Figures(distances, float(plddt(outputs.lddt.detach()).mean()))

    def _agreed(self, distances: Tensor) -> np.ndarray:
        """Return distances ``[R]`` in Å, those of the first rank, by which all ranks decide alike."""
        distances, group = distances.detach(), self._recording.group
        agreed = distances if group is None else broadcast(distances, 0, group)
        return agreed.cpu().numpy()

    def fit(self, steps: int, leave_one_out: bool) -> FitResult:
        done, best = self.descend(steps)
        left_out = None
        if leave_one_out:
            held = satisfied(self._restraints, best.distances[: len(self._restraints)])
            has_broken = held < len(grouped(self._restraints))
            left_out = tuple(self.contradictions(max(1, round(steps * _TRIAL)))) if has_broken else ()
        bias = {key: value.detach().cpu() for key, value in self.bias.items()}
        return FitResult(bias, self.first, best, done, left_out, self._probabilities)

    def descend(self, steps: int, left_out: Sequence[int] = ()) -> tuple[int, Figures]:
        """Take steps until all restraints hold but those left out, or until no step helps.

        The bias becomes that of the best step: most restraints hold, and then the loss is lowest.

        Returns:
            The number of steps, and the figures of the best one.
        """
        kept = [one for number, one in enumerate(self._restraints) if number not in left_out]
        kept += self._of_templates
        loss = self._loss(kept)
        best: tuple[float, float] = (-1.0, 0.0)
        best_figures, best_bias, best_step = self.first, self._copied(), 0
        optimizer = torch.optim.Adam(self.bias.values(), lr=_RATE)
        for done in range(steps + 1):
            with self._recorded(), torch.set_grad_enabled(done < steps):
                outputs = self._run()
                figures = self._figures(outputs)
                total = self._total(loss, outputs)
                held = satisfied(kept, self._agreed(loss.distances(outputs)))
                score = float(held), -float(self._agreed(total[None])[0])
                if score > best:
                    best, best_figures, best_bias, best_step = score, figures, self._copied(), done
                if held == len(grouped(kept)) or done == steps or done - best_step >= PATIENCE:
                    break
                gradients = torch.autograd.grad(total, list(self.bias.values()))
            for value, gradient in zip(self.bias.values(), gradients, strict=True):
                value.grad = self._recording.mean(gradient)
            optimizer.step()
        self._restore(best_bias)
        return done, best_figures

    def _total(self, loss: _Loss, outputs: Outputs) -> Tensor:
        changed = at_columns(outputs.distogram, self._neighbors).log_softmax(-1)
        changed = (self._start.exp() * (self._start - changed)).sum(-1)
        sizes = [value.square().sum() for value in self.bias.values()]
        return (
            loss(outputs)
            + _CONFIDENCE * plddt_loss(outputs, self._everyone)
            + _LOCAL * masked_mean(self._near, changed, 2)
            + _SIZE * torch.stack(sizes).sum() / self.residues
        )

    def _copied(self) -> dict[str, Tensor]:
        return {key: value.detach().clone() for key, value in self.bias.items()}

    def _restore(self, bias: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for key, value in self.bias.items():
                value.copy_(bias[key])

    def contradictions(self, steps: int) -> list[LeftOut]:
        """Leave out each group in turn, return what then holds, and restore the bias.

        Every trial takes further steps from the fitted bias. The groups that one contradicts hold in its trial, and not
        in one with the same number of steps and all groups.
        """
        groups = grouped(self._restraints)
        fitted = self._copied()

        def trial(left_out: Sequence[int]) -> tuple[list[list[int]], Figures]:
            """Return the groups that hold, and the figures."""
            _, figures = self.descend(steps, left_out)
            self._restore(fitted)
            holds = [satisfied([self._restraints[i] for i in one], figures.distances[one]) for one in groups]
            return list(compress(groups, holds)), figures

        base, with_all = trial(())
        left_out = []
        for group in groups if len(base) < len(groups) and len(groups) > 1 else ():
            held, figures = trial(group)
            contradicted = tuple(i for one in held if one not in base and one != group for i in one)
            gain = figures.plddt - with_all.plddt
            left_out.append(LeftOut(tuple(group), contradicted, figures.distances, gain))
        return left_out


def _numbered(features: Mapping[str, Tensor]) -> Tensor:
    """Return residue numbers ``[N]`` with a gap between chains."""
    index = features["residue_index"].long()
    return index if "asym_id" not in features else index + CHAIN_GAP * features["asym_id"].long()


def _near_residues(features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the residues ``[N, 2·8]`` before and after each one, and 1 for those that keep their distance."""
    index = features["residue_index"]
    chain = features.get("asym_id", torch.zeros_like(index))
    places = torch.arange(len(index), device=index.device)
    steps = torch.tensor([*range(-_NEAR, 0), *range(1, _NEAR + 1)], device=index.device)
    wanted = places[:, None] + steps
    columns = wanted.clamp(0, len(index) - 1)
    apart = (index[:, None] - index[columns]).abs()
    near = (wanted == columns) & (apart > 0) & (apart <= _NEAR) & (chain[:, None] == chain[columns])
    return columns, near.to(features["msa_feat"].dtype)


def fit_restraints(
    model: AlphaFold,
    sampler: FeatureSampler,
    restraints: Sequence[Restraint],
    *,
    steps: int,
    of_templates: Sequence[Restraint] = (),
    leave_one_out: bool = False,
    plan: GradientPlan | None = None,
    distributed: DistributedFolder | None = None,
) -> RestrainedFeatures:
    r"""Return features with a bias under which the prediction obeys the restraints.

    Adam ends when all restraints hold, or when none of the last :data:`PATIENCE` steps was better; the best one counts.
    Each runs one recycling pass without and one with gradients. No step is taken if all restraints hold without one.

    Args:
        model: The network, on its device.
        sampler: Features of the target.
        restraints: Restraints in the order of the target's chains.
        steps: Largest number of steps.
        of_templates: Further restraints, which are not reported and never left out.
        leave_one_out: True to leave out each group in turn with a quarter of the steps, if not all restraints hold.
        plan: Plan of the gradients; None for one without a memory limit.
        distributed: Processes that share each pass; None for one.

    Raises:
        ConfigError: The trunk computes in 8 bits, for which gradients are missing, or the network ends in a descent,
            which obeys restraints itself (:mod:`fastfold.inference.restraints.springs`).

    Example:
        >>> import fastfold
        >>> from fastfold.data.targets import Chain
        >>> from fastfold.inference.restraints import Restraint, fit_restraints
        >>> from fastfold.data.msa.msa import parse_a3m
        >>> model = fastfold.load_model("mini", device="cpu")
        >>> model.config.model.heads.structure_module.distogram_descent = None  # as of AlphaFold's networks
        >>> alignment = parse_a3m(">query\nMTYKLILNGK\n")
        >>> sampler = fastfold.featurize([Chain("A", "MTYKLILNGK")], [([alignment], [])], model.config)
        >>> biased = fit_restraints(model, sampler, [Restraint(1, 9, 0.0, 30.0)], steps=1)
        >>> [one.high for one in biased.restraints]
        [30.0]
    """
    if not next(model.parameters()).is_floating_point():
        raise ConfigError(f"{model.name}: restraints need gradients; 8 bits lack them, use `precision=fp32`")
    if descent_settings(model.config) is not None:
        raise ConfigError(f"{model.name}: its descent obeys restraints; fold with them instead of a fit")
    sampled = {key: torch.as_tensor(np.asarray(value)) for key, value in sampler.sample(0).items()}
    make = partial(_fit_on, sampled, input_order(sampler), restraints, of_templates, plan)
    if distributed is None:
        fit = make([model])(steps, leave_one_out)
    else:
        fit = distributed.together(make, [model])[1](steps, leave_one_out)
        distributed.forget()
    exact = model.structure_module.initial.weight.dtype
    biased = {key: (sampled[key].to(exact) + value).numpy() for key, value in fit.bias.items()}
    features = FeatureSampler(
        {key: value.numpy() for key, value in sampled.items()} | biased,
        lambda rng: {},
        seed=0,
        is_multimer=sampler.is_multimer,
        resample=False,
        chain_order=sampler.chain_order,
    )
    aatype = sampled["aatype"].numpy()[input_order(sampler)]
    return RestrainedFeatures(features, tuple(restraints), fit, aatype)


def _fit_on(
    sampled: Mapping[str, Tensor],
    order: np.ndarray,
    restraints: Sequence[Restraint],
    of_templates: Sequence[Restraint],
    plan: GradientPlan | None,
    models: Sequence[AlphaFold],
    context: DistributedContext | None = None,
) -> Callable[[int, bool], FitResult]:
    """Return the fit of a target by a network, on this process's part of it."""
    (model,) = models
    device = next(model.parameters()).device
    group = None if context is None else context.mesh.group("dap")
    run = gradient_run(plan, len(order), device, group, has_alignment=True)

    def fit(steps: int, leave_one_out: bool) -> FitResult:
        # All of it in the call, because a network is idle between calls.
        return _Fit(model, sampled, order, restraints, of_templates, run).fit(steps, leave_one_out)

    return fit


def plan_restraints(fit: Fit, *, is_limited: bool) -> GradientPlan | None:
    """Plan the gradients of a target's restraints by a network, or raise InputError, which names what makes them fit.

    Without a budget of the user (``is_limited``), gradients of a short target with few rows are not planned.
    """
    fold = fit.planner.fold(fit.residues)
    if fit.residues * max(fit.residues, fold.clusters, fold.extra) < CHECKPOINTED**2 and not is_limited:
        return None
    planner = GradientPlanner(
        fit.planner.config,
        fit.residues,
        "bf16" if fit.planner.element_size == 2 else "fp32",
        device=fit.planner.device,
        ranks=fit.planner.ranks,
        host_memory=fit.planner.host_memory if fit.planner.device == "cuda" else 0,
        msa=fold.clusters,
        extra_msa=fold.extra,
        templates=None if fold.templates else (),
        held=4 * _COPIES * _CHANNELS * fold.clusters * fit.residues,
    )
    return plan_gradients(planner, fit.budget, name=f"{fit.name}, steps towards restraints")
