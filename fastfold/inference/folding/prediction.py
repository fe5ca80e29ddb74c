"""Features that settings add to a target, and its prediction in the order of the input's residues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfold.data.features.assembly import CHAIN_GAP
from fastfold.data.features.pipeline import FeatureSampler
from fastfold.data.targets import Target, structure_chains
from fastfold.errors import ConfigError, InputError, OutputError
from fastfold.evoformer.config import ensemble_size, is_trained_on_complexes
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.config import InferConfig
from fastfold.inference.folding.drawn_ahead import DrawnAhead
from fastfold.inference.folding.network import (
    NetworkPasses,
    OnCycle,
    RunNetwork,
    network_results,
    run_network,
)
from fastfold.inference.network_settings import apply_settings, recycle_tolerance
from fastfold.inference.output.prediction import Prediction, Recycle
from fastfold.inference.output.recycle_state import RecycleState
from fastfold.inference.planning.cuda_graph import KeptGraph
from fastfold.inference.planning.planner import FoldPlan
from fastfold.protein.io.observed import INITIAL_GUESS, all_residues, read_observed
from fastfold.protein.io.read import log_warnings
from fastfold.protein.metrics.interface import ChainConfidence
from fastfold.protein.structure import ChainStructure, Structure


def add_settings(
    sampler: FeatureSampler, target: Target, *, cyclic: bool | str, guess: np.ndarray | None
) -> None:
    """Add the features of some settings, in the residue order of the features; errors are those of :func:`ring_chains`.

    They are ``ring_length [N]``, ``initial_positions [N, 37, 3]`` (Å), and ``residue_index [N]`` for chains with gaps
    or numbers of their own.
    """
    order = input_order(sampler)
    added = {}
    if cyclic:
        lengths = [len(chain.sequence) for chain in target.chains]
        rings = ring_chains(target, cyclic)
        sizes = [length if number in rings else 0 for number, length in enumerate(lengths)]
        added["ring_length"] = np.repeat(sizes, lengths).astype(np.int32)
    if guess is not None:
        added["initial_positions"] = guess
    if any(chain.regions or chain.indices for chain in target.chains):
        added["residue_index"] = _residue_index(sampler, target)
    for key, value in added.items():
        sampler.static[key] = np.empty_like(value)
        sampler.static[key][order] = value


def ring_chains(target: Target, cyclic: bool | str) -> set[int]:
    """Return the numbers of the chains that are rings: all, none, or those of names (``A,C``); or raise ConfigError."""
    names = [chain.id for chain in target.chains]
    if isinstance(cyclic, bool):
        return set(range(len(names))) if cyclic else set()
    chosen = [name.strip() for name in cyclic.split(",")]
    if missing := [name for name in chosen if name not in names]:
        raise ConfigError(f"{target.name}: `rings`: no chain {missing[0]!r}, only {', '.join(names)}")
    return {names.index(name) for name in chosen}


def check_rings(target: Target, cyclic: bool | str, *, is_joined: bool) -> None:
    """Raise ConfigError if a ring is a part of a protein, or lacks residues; or see :func:`ring_chains`.

    ``is_joined`` is True if a monomer network sees the chains as one, which limits the size of rings.
    """
    for chain in (target.chains[number] for number in sorted(ring_chains(target, cyclic))):
        if is_joined and len(chain.sequence) > CHAIN_GAP:
            raise ConfigError(
                f"{target.name}: `cyclic`: a monomer network joins the chains of a complex, which holds rings up to "
                f"{CHAIN_GAP} residues, and chain {chain.id} has {len(chain.sequence)}; use a multimer network"
            )
        if chain.regions or chain.has_gap:
            raise ConfigError(
                f"{target.name}: `cyclic` closes whole chains, and chain {chain.id} lacks residues; leave out one of "
                "them"
            )


def _residue_index(sampler: FeatureSampler, target: Target) -> np.ndarray:
    """Return ``[N]`` int32 residue indices of the chains, with a gap between chains that are joined."""
    indices = [chain.residue_index for chain in target.chains]
    if not sampler.is_multimer and target.is_complex:
        start = 0
        for number in sampler.chain_order:
            indices[number] = indices[number] - indices[number][0] + start
            start = int(indices[number][-1]) + 1 + CHAIN_GAP
    return np.concatenate(indices).astype(np.int32)


def initial_structure(source: Path | Structure, target: Target) -> tuple[np.ndarray, Target]:
    """Read the initial guess of a target, with or without the residues that it lacks.

    Returns:
        Initial atom positions ``[N, 37, 3]`` float32 in Å, in the target's order, 0 if missing, and the target with the
        residue index and the names of the structure, unless it has some of its own.

    Raises:
        InputError: The file cannot be read, has no backbone, or its chains have other sequences.
    """
    structure = read_observed(source, INITIAL_GUESS)
    wanted = [chain.sequence for chain in target.chains]
    pairs = zip(structure.chains, wanted, strict=False)
    whole = tuple(chain if chain.sequence == one else all_residues(chain) for chain, one in pairs)
    if len(structure.chains) != len(wanted) or [chain.sequence for chain in whole] != wanted:
        raise InputError(
            "expected the target's chains in the initial guess, with equal sequences in the same order; "
            f"{_first_difference(structure.chains, wanted)}",
            path=source.name if isinstance(source, Structure) else source,
            record=target.name,
        )
    known = [chain.positions * chain.mask[..., None] for chain in whole]
    positions = np.concatenate(known).astype(np.float32)
    if not any(chain.regions or chain.indices for chain in target.chains):
        log_warnings(structure.warnings, source)
        named = zip(target.chains, structure_chains(replace(structure, chains=whole)), strict=True)
        chains = tuple(
            replace(own, id=one.id, indices=one.indices, labels=one.labels, copy_of=one.copy_of)
            for own, one in named
        )
        target = replace(target, chains=chains)
    return positions, target


def _first_difference(chains: Sequence[ChainStructure], wanted: Sequence[str]) -> str:
    if [len(chain) for chain in chains] != [len(sequence) for sequence in wanted]:
        own, others = (", ".join(f"{len(one)} residues" for one in group) for group in (chains, wanted))
        return f"its chains: {own}; the target's: {others}"
    chain, sequence = next(pair for pair in zip(chains, wanted, strict=True) if pair[0].sequence != pair[1])
    place = next(i for i, letter in enumerate(sequence) if chain.sequence[i] != letter)
    residue = f"{chain.residue_names[place]} {chain.author_numbers[place]}".strip() or f"residue {place + 1}"
    difference = f"{residue} of its chain {chain.chain_id!r} is {chain.sequence[place]}"
    return f"{difference}, where the target has {sequence[place]}"


def input_order(sampler: FeatureSampler) -> np.ndarray:
    """Return indices ``[N]`` that put the features' residues into the order of the input's chains."""
    if len(sampler.chain_order) == 1:
        return np.arange(sampler.num_residues)
    asym_id = sampler.static["asym_id"]
    place = {chain: k + 1 for k, chain in enumerate(sampler.chain_order)}
    return np.concatenate([np.flatnonzero(asym_id == place[chain]) for chain in sorted(place)])


MAX_PAE_RESIDUES = 5000
"""Longest targets in residues whose aligned errors are kept by default; 100 MB in memory and on disk."""


class TargetFold:
    """Fold of one target by a network, in place and without gradients.

    The seed is that of the features, and of dropout. ``passes`` are the settings of the network's run, with a CUDA
    graph if there is one, and ``recycles`` the structures so far if they are kept.
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
        self.on_cycle, self._order = on_cycle, input_order(sampler)
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

    def run(
        self,
        plan: FoldPlan | None = None,
        *,
        run: RunNetwork = run_network,
        state: RecycleState | None = None,
    ) -> Prediction:
        """Run the network by a plan; other arguments are those of :func:`.run_network`, which ``run`` replaces.

        An OutputError tells that the results are not finite.
        """
        if state is not None:
            state.recycles = self.recycles
        result, arrays = run(self.model, self.source(), self.passes, self.watch, plan=plan, state=state)
        return self.prediction(result, arrays)

    def features(self, cycle: int, member: int) -> Mapping[str, Tensor]:
        """Return the features of one pass."""
        return {key: torch.from_numpy(np.asarray(v)) for key, v in self.sampler.sample(cycle, member).items()}

    def source(self) -> Callable[[int, int], Mapping[str, Tensor]]:
        """Return :meth:`features` for one run, drawn a pass ahead if the network is on a GPU."""
        if next(self.model.parameters()).device.type == "cpu":
            return self.features
        return DrawnAhead(
            self.features, cycles=self.passes.num_recycles + 1, members=self.passes.num_ensemble
        )

    def watch(self, cycle: int, results: dict[str, Any]) -> None:
        """Keep the structure of a pass if the settings say so, and report it.

        Before a descent on the distogram, the report has ``draft``, a function that returns the prediction so far.
        """
        if cycle == 0:
            self.recycles.clear()  # of a run that ran out of memory
        if self.config.save_recycles:
            arrays = (results[key].detach().float().cpu().numpy() for key in ("atom_positions", "plddt"))
            self.recycles.append(Recycle(*(array[self._order] for array in arrays)))
        if self.on_cycle is not None:
            if "result" in results:
                results = results | {"draft": partial(self._draft, results["result"])}
            self.on_cycle(cycle, results)

    def _draft(self, result: dict[str, Any]) -> Prediction:
        """Return the prediction before the descent on the distogram, which only moves atoms."""
        return self.prediction(*network_results(result, replace(self.passes, distogram=False)))

    def prediction(self, result: dict[str, Any], arrays: dict[str, Tensor]) -> Prediction:
        """Return the prediction from the results of :func:`.run_network`; errors are those of :meth:`run`."""
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
                f"{target.name}: the network's results are not finite; try `precision=fp32` and check the weights"
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
            name=target.shown_name,
            sequences=sequences,
            model_name=model.name,
            is_multimer=model.multimer,
            cif_pae=config.cif_pae,
            seed=self.seed,
            num_recycles=result["num_recycles"],
            aatype=sampler.static["aatype"][order],
            residue_index=np.concatenate([chain.residue_index for chain in target.chains]),
            names=target.names,
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


def _representations(tensors: Mapping[str, Tensor], order: np.ndarray) -> dict[str, np.ndarray]:
    """Return ``single [N, c_s]``, ``pair [N, N, c_z]`` and ``structure_module [N, c]`` as float32, in input order."""
    plain = {
        key: tensors[key].detach().float().cpu().numpy() for key in ("single", "pair", "structure_module")
    }
    return {key: _ordered(value, order) if key == "pair" else value[order] for key, value in plain.items()}


def _of_chains(values: Mapping[str, np.ndarray], sampler: FeatureSampler) -> ChainConfidence | None:
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
