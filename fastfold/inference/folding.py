"""Fold one target with one network: features in, :class:`~fastfold.inference.output.prediction.Prediction` out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfold.data.features.pipeline import FeatureSampler
from fastfold.data.targets import Chain
from fastfold.errors import OutputError
from fastfold.evoformer.config import ensemble_size
from fastfold.evoformer.execution import ExecutionPolicy, set_policy
from fastfold.evoformer.heads import plddt, predicted_aligned_error, predicted_tm_score
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.malloc_trim import trimmed_heap
from fastfold.inference.output.prediction import Prediction
from fastfold.inference.planning.planner import FOLDING_POLICY, FoldPlan

OnCycle = Callable[[int, dict[str, Any]], None]
LARGEST_PAE = 5000
"""Residues of the longest targets whose aligned errors are kept where nobody has decided: 100 MB, and as a file too."""
RunNetwork = Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]
"""Something with the arguments and results of :func:`run_network`."""


def fold(
    model: AlphaFold,
    sampler: FeatureSampler,
    chains: Sequence[Chain],
    *,
    name: str,
    model_name: str,
    seed: int,
    num_recycles: int | None = None,
    on_cycle: OnCycle | None = None,
    run: RunNetwork | None = None,
    plan: FoldPlan | None = None,
    pae: bool = True,
) -> Prediction:
    """Run the network on a target's features: in place, without dropout and gradients.

    Args:
        model: The network, on its device and in its precision.
        sampler: The target's features.
        chains: Its chains in the order of the input.
        name: Name of the target.
        model_name: Name of the network, for files and scores.
        seed: What ``sampler`` draws from, for the record.
        num_recycles: Extra passes; by default the configuration's.
        on_cycle: See :meth:`fastfold.evoformer.model.AlphaFold.forward`.
        run: Runs the network; :func:`run_network` by default.
        plan: How to run it, for :func:`run_network`; by default with :data:`FOLDING_POLICY`.
        pae: Whether the prediction has aligned errors of all pairs; without, nothing of that size is ever there.

    Raises:
        OutputError: The network produced numbers that are not finite.
    """

    def features(cycle: int, member: int) -> Mapping[str, Tensor]:
        return {key: torch.from_numpy(np.asarray(v)) for key, v in sampler.sample(cycle, member).items()}

    is_complex = model.multimer and len(chains) > 1
    if run is None:
        run = partial(run_network, plan=plan, pae=pae)
    result, arrays = run(model, features, num_recycles, on_cycle, is_complex)
    if not pae:
        for key in ("pae", "max_pae"):
            arrays.pop(key, None)
    structure = result["structure_module"]
    arrays["atom_positions"] = structure["final_atom_positions"]
    order = _input_order(sampler)
    values = {key: value.detach().float().cpu().numpy() for key, value in arrays.items()}
    if not all(np.isfinite(value).all() for value in values.values()):
        raise OutputError(
            f"{name}: the network produced numbers that are not finite; try --precision fp32 and check the weights"
        )
    errors = values.get("pae")
    return Prediction(
        name=name,
        sequences=tuple(chain.sequence for chain in chains),
        model_name=model_name,
        seed=seed,
        num_recycles=result["num_recycles"],
        aatype=sampler.static["aatype"][order],
        residue_index=np.concatenate([np.arange(len(chain.sequence)) for chain in chains]),
        chain_index=np.repeat(np.arange(len(chains)), [len(chain.sequence) for chain in chains]),
        atom_positions=values["atom_positions"][order],
        atom_mask=structure["final_atom_mask"].cpu().numpy()[order],
        plddt=values["plddt"][order],
        pae=None if errors is None else _ordered(errors, order),
        max_pae=float(values["max_pae"]) if "max_pae" in values else None,
        ptm=float(values["ptm"]) if "ptm" in values else None,
        iptm=float(values["iptm"]) if "iptm" in values else None,
    )


def run_network(
    model: AlphaFold,
    features: Callable[[int, int], Mapping[str, Tensor]],
    num_recycles: int | None,
    on_cycle: OnCycle | None,
    is_complex: bool,
    plan: FoldPlan | None = None,
    pae: bool = True,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The network's result, and ``plddt [N]``, ``pae [N, N]``, ``max_pae``, ``ptm`` and ``iptm`` as it has them.

    Confidences of pairs are computed in blocks of rows; of these, ``pae`` alone is kept whole.

    Args:
        model: The network.
        features: Gives those of a cycle and an ensemble member.
        num_recycles: Extra passes; by default the configuration's.
        on_cycle: See :meth:`fastfold.evoformer.model.AlphaFold.forward`.
        is_complex: Whether there are interfaces to score.
        plan: How to run it; by default with :data:`FOLDING_POLICY`.
        pae: Whether to keep ``pae``.
    """
    num_ensemble = ensemble_size(model.config)
    if plan is None:
        set_policy(model, FOLDING_POLICY)
    else:
        plan.apply(model)
    training = model.training
    try:
        with torch.inference_mode(), trimmed_heap(model):
            result = model.eval()(features, num_recycles, num_ensemble=num_ensemble, on_cycle=on_cycle)
            return result, _confidences(result, is_complex, pae)
    finally:
        model.train(training)
        set_policy(model, ExecutionPolicy())  # lets go of what the plan holds of the host's memory


def _confidences(result: dict[str, Any], is_complex: bool, pae: bool) -> dict[str, Tensor]:
    found = {"plddt": plddt(result["predicted_lddt"]["logits"])}
    head = result.get("predicted_aligned_error")
    if head is not None:
        logits, breaks = head["logits"], head["breaks"]
        if pae:
            found["pae"], found["max_pae"] = predicted_aligned_error(logits, breaks)
        found["ptm"] = predicted_tm_score(logits, breaks)
        if is_complex:
            found["iptm"] = predicted_tm_score(logits, breaks, asym_id=head["asym_id"])
    return found


def _ordered(errors: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Rows and columns in an order; the array itself where they are in it already."""
    return errors if np.array_equal(order, np.arange(len(order))) else errors[np.ix_(order, order)]


def keeps_pae(residues: int, wanted: bool | None) -> bool:
    """Whether a target's aligned errors are kept; where nobody has decided, up to :data:`LARGEST_PAE` residues."""
    return residues <= LARGEST_PAE if wanted is None else wanted


def _input_order(sampler: FeatureSampler) -> np.ndarray:
    """Indices ``[N]`` that put the features' residues into the order of the input's chains."""
    if not sampler.is_multimer:
        return np.arange(sampler.num_residues)
    asym_id = sampler.static["asym_id"]
    place = {chain: k + 1 for k, chain in enumerate(sampler.chain_order)}
    return np.concatenate([np.flatnonzero(asym_id == place[chain]) for chain in sorted(place)])
