"""Plan the gradients of restraint steps before a target is folded, within the memory of its device and host."""

from __future__ import annotations

from fastfold.inference.folding.gradients import CHECKPOINTED
from fastfold.inference.planning.fit import Fit
from fastfold.inference.planning.gradient_plan import GradientPlan, GradientPlanner, plan_gradients

_CHANNELS = 49 + 22  #: Channels of the features with a bias: of the MSA per row, of the target at most

_COPIES = 6
"""Float32 copies of these features: themselves, the bias, their sum, its gradient, and two moments of Adam."""


def plan_restraints(fit: Fit, *, is_limited: bool) -> GradientPlan | None:
    """Plan the gradients of a target's restraints by a network, or raise InputError, which names what makes them fit.

    Without a budget of the user (``is_limited``), gradients of a short target with few rows are not planned.
    """
    fold = fit.planner.fold(fit.residues, fit.rows, fit.templates)
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
