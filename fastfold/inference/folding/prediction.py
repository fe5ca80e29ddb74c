"""Compute a :class:`~fastfold.inference.output.prediction.Prediction` from the features of a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfold.data.features.pipeline import FeatureSampler
from fastfold.data.targets import Target
from fastfold.errors import OutputError
from fastfold.evoformer.config import ensemble_size, is_trained_on_complexes
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.config import InferConfig
from fastfold.inference.folding.features import input_order
from fastfold.inference.folding.network import NetworkPasses, OnCycle, RunNetwork, run_network
from fastfold.inference.network_settings import apply_settings, recycle_tolerance
from fastfold.inference.output.prediction import Prediction, Recycle
from fastfold.inference.output.recycle_state import RecycleState
from fastfold.inference.planning.cuda_graph import KeptGraph
from fastfold.inference.planning.planner import FoldPlan
from fastfold.protein.metrics.interface import ChainConfidence

MAX_PAE_RESIDUES = 5000
"""Longest targets in residues whose aligned errors are kept by default; 100 MB in memory and on disk."""


def fold(
    model: AlphaFold,
    sampler: FeatureSampler,
    target: Target,
    config: InferConfig,
    plan: FoldPlan | None = None,
    *,
    seed: int = 0,
    on_cycle: OnCycle | None = None,
    run: RunNetwork | None = None,
    state: RecycleState | None = None,
    graph: KeptGraph | None = None,
) -> Prediction:
    """Run the network on a target's features, in place and without gradients.

    Without aligned errors of all pairs, no array of that size is allocated. The seed is that of the features, and of
    dropout. Other arguments are those of :func:`~fastfold.inference.folding.network.run_network`, which ``run``
    replaces, and of :class:`~fastfold.inference.folding.network.NetworkPasses`.

    Raises:
        OutputError: The network's results are not finite.
    """
    one = TargetFold(model, sampler, target, config, seed, on_cycle, graph)
    if state is not None:
        state.recycles = one.recycles
    settings = {"plan": plan} if state is None else {"plan": plan, "state": state}
    result, arrays = (run or run_network)(model, one.features, one.passes, one.watch, **settings)
    return one.prediction(result, arrays)


class TargetFold:
    """Input of a network for one target, and the prediction from its results; arguments as those of :func:`fold`.

    Attributes:
        passes: Settings of the network's run.
        recycles: Structures of the passes so far, if the settings keep them.
    """

    def __init__(
        self,
        model: AlphaFold,
        sampler: FeatureSampler,
        target: Target,
        config: InferConfig,
        seed: int,
        on_cycle: OnCycle | None = None,
        graph: KeptGraph | None = None,
    ) -> None:
        self.model, self.sampler, self.target, self.config, self.seed = model, sampler, target, config, seed
        self._on_cycle, self._order = on_cycle, input_order(sampler)
        self.recycles: list[Recycle] = []
        applied = apply_settings(config, model.config)
        self.passes = NetworkPasses(
            num_recycles=applied.model.num_recycle,
            num_ensemble=ensemble_size(applied),
            recycle_tolerance=recycle_tolerance(applied),
            is_complex=target.is_complex,
            pae=keeps_pae(target.num_residues, config.pae),
            distogram=config.save_distogram,
            representations=config.save_representations,
            dropout_seed=seed if config.dropout else None,
            cuda_graph=graph,
        )

    def features(self, cycle: int, member: int) -> Mapping[str, Tensor]:
        """Return the features of one pass."""
        return {key: torch.from_numpy(np.asarray(v)) for key, v in self.sampler.sample(cycle, member).items()}

    def watch(self, cycle: int, found: dict[str, Any]) -> None:
        """Keep the structure of a pass if the settings say so, and report it."""
        if cycle == 0:
            self.recycles.clear()  # of a run that ran out of memory
        if self.config.save_recycles:
            arrays = (found[key].detach().float().cpu().numpy() for key in ("atom_positions", "plddt"))
            self.recycles.append(Recycle(*(array[self._order] for array in arrays)))
        if self._on_cycle is not None:
            self._on_cycle(cycle, found)

    def prediction(self, result: dict[str, Any], arrays: dict[str, Tensor]) -> Prediction:
        """Return the prediction from the results of :func:`.run_network`; errors are those of :func:`fold`."""
        model, sampler, target, config = self.model, self.sampler, self.target, self.config
        passes, order = self.passes, self._order
        if not passes.pae:
            for key in ("pae", "max_pae"):
                arrays.pop(key, None)
        structure = result["structure_module"]
        arrays["atom_positions"] = structure["final_atom_positions"]
        distogram = arrays.pop("distogram", None)
        values = {key: value.detach().float().cpu().numpy() for key, value in arrays.items()}
        if not all(np.isfinite(value).all() for value in values.values()):
            raise OutputError(
                f"{target.name}: the network's results are not finite; try --precision fp32 and check the weights"
            )
        scored = not target.is_complex or is_trained_on_complexes(model.config)
        errors = values.get("pae")
        sequences = tuple(chain.sequence for chain in target.chains)
        lengths = [len(sequence) for sequence in sequences]
        representations, distances = None, None
        if config.save_representations:
            representations = _representations(result["representations"], order)
        if distogram is not None:
            probabilities = _ordered(distogram.numpy(), order)
            distances = {"probabilities": probabilities, "bin_edges": values["distogram_edges"]}
        return Prediction(
            name=target.name,
            sequences=sequences,
            model_name=model.name,
            seed=self.seed,
            num_recycles=result["num_recycles"],
            aatype=sampler.static["aatype"][order],
            residue_index=np.concatenate([np.array(chain.numbers) - 1 for chain in target.chains]),
            chain_index=np.repeat(np.arange(len(lengths)), lengths),
            atom_positions=values["atom_positions"][order],
            atom_mask=structure["final_atom_mask"].cpu().numpy()[order],
            plddt=values["plddt"][order],
            pae=None if errors is None else _ordered(errors, order),
            max_pae=float(values["max_pae"]) if "max_pae" in values else None,
            ptm=float(values["ptm"]) if "ptm" in values else None,
            iptm=float(values["iptm"]) if scored and "iptm" in values else None,
            representations=representations,
            distogram=distances,
            recycles=tuple(self.recycles),
            chain_confidence=_of_chains(values, sampler) if scored else None,
            no_interface_scores=None if scored else f"{model.name} was trained on single chains only",
        )


def _representations(found: Mapping[str, Tensor], order: np.ndarray) -> dict[str, np.ndarray]:
    """Return ``single [N, c_s]``, ``pair [N, N, c_z]`` and ``structure_module [N, c]`` as float32, in input order."""
    plain = {key: found[key].detach().float().cpu().numpy() for key in ("single", "pair", "structure_module")}
    return {key: _ordered(value, order) if key == "pair" else value[order] for key, value in plain.items()}


def _of_chains(values: Mapping[str, np.ndarray], sampler: FeatureSampler) -> ChainConfidence | None:
    """Convert confidences of chains from the order of the features to that of the input."""
    if "chain_ptm" not in values:
        return None
    order = np.argsort(sampler.chain_order)
    actifptm = values.get("chain_pair_actifptm")
    return ChainConfidence(
        ptm=values["chain_ptm"][order],
        iptm=values["chain_pair_iptm"][np.ix_(order, order)],
        pair_actifptm=None if actifptm is None else actifptm[np.ix_(order, order)],
        actifptm=None if actifptm is None else float(values["actifptm"]),
    )


def _ordered(errors: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Reorder rows and columns; return the array itself if the order does not change."""
    return errors if np.array_equal(order, np.arange(len(order))) else errors[np.ix_(order, order)]


def keeps_pae(residues: int, wanted: bool | None) -> bool:
    """Return True if a target's aligned errors are kept; None means up to :data:`MAX_PAE_RESIDUES` residues."""
    return residues <= MAX_PAE_RESIDUES if wanted is None else wanted
