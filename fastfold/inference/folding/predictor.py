"""Fold one target: :class:`TargetPredictor`, behind the command line and Python alike, and its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fastfold.data.features.pipeline import FeatureSampler, featurize
from fastfold.data.msa.find import ChainMsas
from fastfold.data.targets import Target
from fastfold.errors import ConfigError, InputError, OutputError
from fastfold.evoformer.confidence import (
    chain_confidence,
    plddt,
    predicted_aligned_error,
    predicted_tm_score,
)
from fastfold.evoformer.config import ensemble_size
from fastfold.evoformer.execution import ExecutionPolicy, set_policy
from fastfold.evoformer.heads import DistogramHead
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.config import InferConfig
from fastfold.inference.malloc_trim import trim_malloc
from fastfold.inference.network_settings import apply_settings, recycle_tolerance
from fastfold.inference.output.prediction import Prediction, Recycle
from fastfold.inference.output.recycle_state import RecycleState
from fastfold.inference.planning.available_memory import FoldMemory
from fastfold.inference.planning.cuda_graph import KeptGraph, check_cuda_graphs
from fastfold.inference.planning.fit import Fit, fit_target
from fastfold.inference.planning.planner import FOLDING_POLICY, FoldPlan
from fastfold.inference.target_templates import TargetTemplates, takes_templates
from fastfold.kernels.common.cpu_products import exact_products
from fastfold.protein.io.read import read_structure
from fastfold.protein.metrics.interface import ChainConfidence

OnCycle = Callable[[int, dict[str, Any]], None]
MAX_PAE_RESIDUES = 5000
"""Residues of the longest targets whose aligned errors are kept where nobody has decided: 100 MB, and as a file too."""
RunNetwork = Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]
"""Something with the arguments and results of :func:`run_network`."""


class DistributedRun(Protocol):
    """Several processes that fold one target together."""

    @property
    def ranks(self) -> int:
        """How many they are."""

    def memory(self, *, host_memory: int | None, offload_dir: Path | None) -> FoldMemory:
        """The least that one of them has; arguments as of :meth:`FoldMemory.here`."""

    @property
    def run(self) -> RunNetwork:
        """Runs a network on all of them."""


@dataclass(frozen=True)
class NetworkPasses:
    """What a network is told for one prediction, beside the features.

    Attributes:
        num_recycles: Extra passes.
        num_ensemble: Feature samples per pass.
        recycle_tolerance: See :meth:`fastfold.evoformer.model.AlphaFold.forward`.
        is_complex: Whether there are interfaces to score.
        pae: Whether to keep aligned errors of all pairs.
        dropout_seed: Seed of dropout, which stays on; None for no dropout.
        cuda_graph: Where there is the CUDA graph that passes are replayed from; None for no graph.
    """

    num_recycles: int
    num_ensemble: int = 1
    recycle_tolerance: float = 0.0
    is_complex: bool = False
    pae: bool = True
    dropout_seed: int | None = None
    cuda_graph: KeptGraph | None = None


class TargetPredictor:
    """Folds one target, behind the command line and Python alike.

    Making one plans the fold by each network, so that the target is refused before any work if one of them cannot hold
    it; :meth:`predict` then makes the features and runs a network by its plan, in smaller pieces if memory ends anyway.

    Args:
        target: The target.
        models: The networks, in the precision to fold in; each is on ``device`` while it folds, and then again where it
            was, but for a single one with CUDA graphs, which reads it where it is.
        alignments: Per chain.
        config: How to fold.
        device: Where to fold.
        templates: Those of its chains, for the networks that take them; None for no templates at all.
        say: Told of every smaller plan.
        distributed: Runs the networks on several processes; by default :func:`run_network` does here.
        graph: With CUDA graphs: that of the targets before; by default there were none.

    Raises:
        InputError: The initial guess cannot be used, or the target does not fit into memory.
        ConfigError: Settings contradict a network or the device, or templates are given and no network takes them.
    """

    def __init__(
        self,
        target: Target,
        models: Sequence[AlphaFold],
        alignments: Sequence[ChainMsas],
        config: InferConfig,
        *,
        device: torch.device,
        templates: TargetTemplates | None = None,
        say: Callable[[str], None],
        distributed: DistributedRun | None = None,
        graph: KeptGraph | None = None,
    ) -> None:
        check_cuda_graphs(config.cuda_graphs, device)
        self._graph = (graph or KeptGraph()) if config.cuda_graphs else None
        self._stays = self._graph is not None and len(models) == 1
        if self._graph is not None:
            self._graph.keep_for(target.num_residues)
        self.target, self.alignments, self.config, self.templates = target, alignments, config, templates
        self.device, self._say = device, say
        self._run = run_network if distributed is None else distributed.run
        rows = sum(len(msa.sequences) for chain in alignments for group in chain for msa in group)
        shown = 0 if templates is None else templates.number
        if shown and not any(takes_templates(model.config, target) for model in models):
            names = ", ".join(model.name for model in models)
            raise ConfigError(
                f"{target.name}: templates are given, but {names} takes none{' of a complex' * target.is_complex}; "
                "leave them out, or fold with model_1, model_2 (single chains) or a multimer network"
            )
        self._guess: np.ndarray | None = None
        if config.initial_guess is not None:
            self._guess = initial_positions(config.initial_guess, target)
        if config.cyclic and target.is_complex and not all(model.multimer for model in models):
            raise ConfigError(
                f"{target.name}: rings in a complex need a multimer network: a monomer network takes its chains as one"
            )
        self._configs = {id(model): apply_settings(config, model.config) for model in models}
        # What is replayed without the host cannot move anything to its memory.
        host = 0 if config.cuda_graphs else config.host_bytes
        where: dict[str, Any] = {"host_memory": host, "offload_dir": config.offload_dir}
        memory = FoldMemory.here(device, **where) if distributed is None else distributed.memory(**where)
        fit = partial(
            fit_target,
            name=target.name,
            rows=rows,
            templates=shown,
            memory=memory,
            offload_dir=config.offload_dir,
            ranks=1 if distributed is None else distributed.ranks,
            cuda_graph=config.cuda_graphs,
        )
        self._fits: dict[int, Fit] = {
            id(model): fit(model, device, target.num_residues, config.budget, config=self._configs[id(model)])
            for model in models
        }

    def num_recycles(self, model: AlphaFold) -> int:
        """How often one of the networks recycles, at most."""
        return int(self._configs[id(model)].model.num_recycle)

    def predict(
        self,
        model: AlphaFold,
        seed: int,
        on_cycle: OnCycle | None = None,
        *,
        state: RecycleState | None = None,
    ) -> Prediction:
        """Fold by one of the networks with a seed.

        Args:
            model: The network.
            seed: Seed of everything random.
            on_cycle: See :meth:`fastfold.evoformer.model.AlphaFold.forward`.
            state: Where the state after each pass is kept; None for nowhere.

        Raises:
            InputError: Alignments or templates cannot be used, or memory ended under the smallest plan.
            OutputError: The network's numbers are not finite.
        """
        target, config, templates = self.target, self.config, self.templates
        if templates is not None and not takes_templates(model.config, target):
            templates = None
        with _moved(model, self.device, stays=self._stays):
            sampler = featurize(
                target.chains,
                self.alignments,
                self._configs[id(model)],
                seed=seed,
                templates=None if templates is None else templates.features,
                join=target.is_complex and not model.multimer,
            )
            _add_settings(sampler, target, cyclic=config.cyclic, guess=self._guess)
            by = partial(fold, model, sampler, target, config, seed=seed, on_cycle=on_cycle, run=self._run)
            if self._graph is not None:
                by = partial(by, graph=self._graph)
            if state is not None:
                by = partial(by, state=state)
            prediction = self._fits[id(model)].run(by, self._say)
        report = None if templates is None or not templates.report else templates.report
        return replace(prediction, templates=report)


@contextmanager
def _moved(model: AlphaFold, device: torch.device, *, stays: bool) -> Iterator[None]:
    """Have a network on a device, and afterwards where it was, unless it stays."""
    home = next(model.parameters()).device
    if home == device:
        yield
        return
    try:
        model.to(device)
        yield
    finally:
        if not stays:
            model.to(home)


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
    """Run the network on a target's features: in place and without gradients.

    Args:
        model: The network, on its device and in its precision.
        sampler: The target's features.
        target: The target.
        config: How to fold; without aligned errors of all pairs, nothing of that size is ever there.
        plan: How to run the network, for :func:`run_network`; by default with :data:`FOLDING_POLICY`.
        seed: Seed of the features, and of dropout.
        on_cycle: See :meth:`fastfold.evoformer.model.AlphaFold.forward`.
        run: Runs the network; :func:`run_network` by default.
        state: See :meth:`TargetPredictor.predict`.
        graph: See :class:`NetworkPasses`.

    Raises:
        OutputError: The network produced numbers that are not finite.
    """

    def features(cycle: int, member: int) -> Mapping[str, Tensor]:
        return {key: torch.from_numpy(np.asarray(v)) for key, v in sampler.sample(cycle, member).items()}

    order = _input_order(sampler)
    recycles: list[Recycle] = []
    if state is not None:
        state.recycles = recycles

    def watch(cycle: int, found: dict[str, Any]) -> None:
        if cycle == 0:
            recycles.clear()  # of a run that memory ended
        if config.save_recycles:
            kept = (found[key].detach().float().cpu().numpy()[order] for key in ("atom_positions", "plddt"))
            recycles.append(Recycle(*kept))
        if on_cycle is not None:
            on_cycle(cycle, found)

    applied = apply_settings(config, model.config)
    passes = NetworkPasses(
        num_recycles=applied.model.num_recycle,
        num_ensemble=ensemble_size(applied),
        recycle_tolerance=recycle_tolerance(applied),
        is_complex=target.is_complex,
        pae=keeps_pae(target.num_residues, config.pae),
        dropout_seed=seed if config.dropout else None,
        cuda_graph=graph,
    )
    result, arrays = (run or run_network)(
        model, features, passes, watch, plan=plan, **({} if state is None else {"state": state})
    )
    if not passes.pae:
        for key in ("pae", "max_pae"):
            arrays.pop(key, None)
    structure = result["structure_module"]
    arrays["atom_positions"] = structure["final_atom_positions"]
    values = {key: value.detach().float().cpu().numpy() for key, value in arrays.items()}
    if not all(np.isfinite(value).all() for value in values.values()):
        raise OutputError(
            f"{target.name}: the network produced numbers that are not finite; try --precision fp32 and check the "
            "weights"
        )
    errors = values.get("pae")
    sequences = tuple(chain.sequence for chain in target.chains)
    lengths = [len(sequence) for sequence in sequences]
    return Prediction(
        name=target.name,
        sequences=sequences,
        model_name=model.name,
        seed=seed,
        num_recycles=result["num_recycles"],
        aatype=sampler.static["aatype"][order],
        residue_index=np.concatenate([np.arange(length) for length in lengths]),
        chain_index=np.repeat(np.arange(len(lengths)), lengths),
        atom_positions=values["atom_positions"][order],
        atom_mask=structure["final_atom_mask"].cpu().numpy()[order],
        plddt=values["plddt"][order],
        pae=None if errors is None else _ordered(errors, order),
        max_pae=float(values["max_pae"]) if "max_pae" in values else None,
        ptm=float(values["ptm"]) if "ptm" in values else None,
        iptm=float(values["iptm"]) if "iptm" in values else None,
        representations=_representations(result["representations"], order)
        if config.save_representations
        else None,
        recycles=tuple(recycles),
        chain_confidence=_of_chains(values, sampler),
    )


def run_network(
    model: AlphaFold,
    features: Callable[[int, int], Mapping[str, Tensor]],
    passes: NetworkPasses,
    on_cycle: OnCycle | None,
    *,
    plan: FoldPlan | None = None,
    state: RecycleState | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The network's result, and ``plddt [N]``, ``pae [N, N]``, ``max_pae``, ``ptm`` and ``iptm`` as it has them.

    Of a complex there are also the scores of its chains, see
    :func:`fastfold.evoformer.confidence.chains.chain_confidence`. Confidences of pairs are computed in blocks of rows;
    of these, ``pae`` alone is kept whole.

    Args:
        model: The network.
        features: Gives those of a cycle and an ensemble member.
        passes: What the network is told.
        on_cycle: See :meth:`fastfold.evoformer.model.AlphaFold.forward`.
        plan: How to run it; by default with :data:`FOLDING_POLICY`.
        state: See :meth:`TargetPredictor.predict`.
    """
    if plan is None:
        set_policy(model, FOLDING_POLICY)
    else:
        plan.apply(model)
    distogram, heads = model.heads["distogram"], model.policy.heads
    if (
        passes.is_complex
        and heads is not None
        and isinstance(distogram, DistogramHead)
        and distogram.has_columns
    ):
        # For actifpTM, in blocks of rows; where columns are elsewhere the logits would have to be there whole.
        model.policy = replace(model.policy, heads=(*heads, "distogram"))
    training = model.training
    model.eval()
    try:
        device = next(model.parameters()).device
        with (
            torch.inference_mode(),
            exact_products(device),
            trim_malloc(model),
            _dropout(model, passes.dropout_seed),
        ):
            result = model(
                features,
                passes.num_recycles,
                num_ensemble=passes.num_ensemble,
                recycle_tolerance=passes.recycle_tolerance,
                on_cycle=on_cycle,
                state=state,
                run_pass=None if passes.cuda_graph is None else passes.cuda_graph.of(model),
            )
            return result, _confidences(result, passes.is_complex, passes.pae)
    finally:
        model.train(training)
        set_policy(model, ExecutionPolicy())  # lets go of what the plan holds of the host's memory


@contextmanager
def _dropout(model: AlphaFold, seed: int | None) -> Iterator[None]:
    """Dropout as in training, by a seed, which nothing else follows; None for none."""
    if seed is None:
        yield
        return
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        model.train()
        yield


def _representations(found: Mapping[str, Tensor], order: np.ndarray) -> dict[str, np.ndarray]:
    """``single [N, c_s]``, ``pair [N, N, c_z]`` and ``structure_module [N, c]`` as float32, in the input's order."""
    plain = {key: found[key].detach().float().cpu().numpy() for key in ("single", "pair", "structure_module")}
    return {key: _ordered(value, order) if key == "pair" else value[order] for key, value in plain.items()}


def _add_settings(sampler: FeatureSampler, target: Target, *, cyclic: bool, guess: np.ndarray | None) -> None:
    """Add the features that some settings stand for, in the order of the features' own residues.

    ``ring_length [N]`` for rings, ``initial_positions [N, 37, 3]`` (Å) for an initial guess.
    """
    order = _input_order(sampler)
    added = {}
    if cyclic:
        lengths = [len(chain.sequence) for chain in target.chains]
        added["ring_length"] = np.repeat(lengths, lengths).astype(np.int32)
    if guess is not None:
        added["initial_positions"] = guess
    for key, value in added.items():
        sampler.static[key] = np.empty_like(value)
        sampler.static[key][order] = value


def initial_positions(path: Path, target: Target) -> np.ndarray:
    """Atoms to start from, of the chains of a structure file in the target's order.

    Args:
        path: PDB or mmCIF file.
        target: The target, whose sequences the file's chains have.

    Returns:
        ``[N, 37, 3]`` float32 in Å; zeros where an atom is not resolved, as AlphaFold has it before the first pass.

    Raises:
        InputError: The file cannot be read, or its chains have other sequences.
    """
    chains = read_structure(path).chains
    given = [chain.sequence for chain in chains]
    wanted = [chain.sequence for chain in target.chains]
    if given != wanted:
        shown = ", ".join(f"{len(sequence)} residues" for sequence in given) or "none"
        raise InputError(
            f"the initial guess must have the target's chains, with the same sequences in the same order; its chains: "
            f"{shown}; the target's: {', '.join(f'{len(sequence)} residues' for sequence in wanted)}",
            path=path,
            record=target.name,
        )
    positions = [chain.positions * chain.mask[..., None] for chain in chains]
    return np.concatenate(positions).astype(np.float32)


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
            distances = result.get("distogram", {})
            found |= chain_confidence(
                logits,
                breaks,
                head["asym_id"],
                distogram=distances.get("logits"),
                bin_edges=distances.get("bin_edges"),
            )
    return found


def _of_chains(values: Mapping[str, np.ndarray], sampler: FeatureSampler) -> ChainConfidence | None:
    """Confidences of chains in the order of the input, of those in the order of the features."""
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
    """Rows and columns in an order; the array itself where they are in it already."""
    return errors if np.array_equal(order, np.arange(len(order))) else errors[np.ix_(order, order)]


def keeps_pae(residues: int, wanted: bool | None) -> bool:
    """Whether a target's aligned errors are kept; where nobody has decided, up to :data:`MAX_PAE_RESIDUES` residues."""
    return residues <= MAX_PAE_RESIDUES if wanted is None else wanted


def _input_order(sampler: FeatureSampler) -> np.ndarray:
    """Indices ``[N]`` that put the features' residues into the order of the input's chains."""
    if len(sampler.chain_order) == 1:
        return np.arange(sampler.num_residues)
    asym_id = sampler.static["asym_id"]
    place = {chain: k + 1 for k, chain in enumerate(sampler.chain_order)}
    return np.concatenate([np.flatnonzero(asym_id == place[chain]) for chain in sorted(place)])
