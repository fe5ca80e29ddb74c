"""Fold one target: :func:`predict_target`, behind the command line and Python alike, and its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfold.data.features.pipeline import FeatureSampler, featurize
from fastfold.data.msa.find import ChainMsas
from fastfold.data.targets import Target
from fastfold.errors import OutputError
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
from fastfold.inference.output.prediction import Prediction
from fastfold.inference.planning.fit import fit_target
from fastfold.inference.planning.planner import FOLDING_POLICY, FoldPlan
from fastfold.protein.metrics.interface import ChainConfidence

OnCycle = Callable[[int, dict[str, Any]], None]
MAX_PAE_RESIDUES = 5000
"""Residues of the longest targets whose aligned errors are kept where nobody has decided: 100 MB, and as a file too."""
RunNetwork = Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]
"""Something with the arguments and results of :func:`run_network`."""
Watch = Callable[[AlphaFold], AbstractContextManager[OnCycle | None]]
"""Gives the context in which a network folds, with what is called after each pass."""


def predict_target(
    target: Target,
    models: Sequence[AlphaFold],
    alignments: Sequence[ChainMsas],
    config: InferConfig,
    *,
    device: torch.device,
    templates: Sequence[Mapping[str, np.ndarray] | None] | None = None,
    watch: Watch = lambda model: nullcontext(),
    say: Callable[[str], None],
    run: RunNetwork | None = None,
) -> list[Prediction]:
    """Fold a target by some networks, in three steps.

    1. Plan the fold by each network; the target is refused before any work if one of them cannot hold it.
    2. For each network, make the features and run it by its plan; in smaller pieces if memory ends anyway.
    3. Rank.

    Args:
        target: The target.
        models: The networks, in the precision to fold in; each is on ``device`` while it folds, and then again where
            it was.
        alignments: Per chain.
        config: How to fold.
        device: Where to fold.
        templates: Per chain, raw features (:func:`fastfold.data.features.raw.template_features`) or None; None for
            no templates at all.
        watch: Gives the context in which a network folds, with what is called after each pass (see
            :meth:`fastfold.evoformer.model.AlphaFold.forward`).
        say: Told of every smaller plan.
        run: Runs the networks on several processes, which nobody plans for; by default :func:`run_network` does here.

    Returns:
        A prediction of each network, best first.

    Raises:
        InputError: Alignments or templates cannot be used, or the target does not fit into memory.
        ConfigError: A complex was given to a monomer network, or settings contradict.
        OutputError: A network's numbers are not finite.
    """
    rows = sum(len(msa.sequences) for chain in alignments for group in chain for msa in group)
    shown = max((len(one["template_aatype"]) for one in templates or () if one is not None), default=0)
    fit = partial(fit_target, name=target.name, rows=rows, templates=shown)
    fits = [
        None if run is not None else fit(model, device, target.num_residues, config.budget)
        for model in models
    ]
    predictions = []
    for model, fitting in zip(models, fits, strict=True):
        with watch(model) as on_cycle, _moved(model, device):
            sampler = featurize(
                target.chains, alignments, model.config, seed=config.seed, templates=templates
            )
            by = partial(fold, model, sampler, target, config, on_cycle=on_cycle, run=run)
            predictions.append(by() if fitting is None else fitting.run(by, say))
    return sorted(predictions, key=lambda prediction: prediction.ranking_confidence, reverse=True)


@contextmanager
def _moved(model: AlphaFold, device: torch.device) -> Iterator[None]:
    """Have a network on a device, and afterwards where it was."""
    home = next(model.parameters()).device
    if home == device:
        yield
        return
    try:
        model.to(device)
        yield
    finally:
        model.to(home)


def fold(
    model: AlphaFold,
    sampler: FeatureSampler,
    target: Target,
    config: InferConfig,
    plan: FoldPlan | None = None,
    *,
    on_cycle: OnCycle | None = None,
    run: RunNetwork | None = None,
) -> Prediction:
    """Run the network on a target's features: in place, without dropout and gradients.

    Args:
        model: The network, on its device and in its precision.
        sampler: The target's features.
        target: The target.
        config: How to fold; without aligned errors of all pairs, nothing of that size is ever there.
        plan: How to run the network, for :func:`run_network`; by default with :data:`FOLDING_POLICY`.
        on_cycle: See :meth:`fastfold.evoformer.model.AlphaFold.forward`.
        run: Runs the network; :func:`run_network` by default.

    Raises:
        OutputError: The network produced numbers that are not finite.
    """

    def features(cycle: int, member: int) -> Mapping[str, Tensor]:
        return {key: torch.from_numpy(np.asarray(v)) for key, v in sampler.sample(cycle, member).items()}

    is_complex, pae = model.multimer and target.is_complex, keeps_pae(target.num_residues, config.pae)
    if run is None:
        run = partial(run_network, plan=plan, pae=pae)
    result, arrays = run(model, features, config.num_recycles, on_cycle, is_complex)
    if not pae:
        for key in ("pae", "max_pae"):
            arrays.pop(key, None)
    structure = result["structure_module"]
    arrays["atom_positions"] = structure["final_atom_positions"]
    order = _input_order(sampler)
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
        seed=config.seed,
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
        chain_confidence=_of_chains(values, sampler),
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

    Of a complex there are also the scores of its chains, see
    :func:`fastfold.evoformer.confidence.chains.chain_confidence`. Confidences of pairs are computed in blocks of rows;
    of these, ``pae`` alone is kept whole.

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
    distogram = model.heads["distogram"]
    if is_complex and isinstance(distogram, DistogramHead) and distogram.has_columns:
        # For actifpTM, in blocks of rows; where columns are elsewhere the logits would have to be there whole.
        model.policy = replace(model.policy, heads=(*(model.policy.heads or ()), "distogram"))
    training = model.training
    try:
        with torch.inference_mode(), trim_malloc(model):
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
    if not sampler.is_multimer:
        return np.arange(sampler.num_residues)
    asym_id = sampler.static["asym_id"]
    place = {chain: k + 1 for k, chain in enumerate(sampler.chain_order)}
    return np.concatenate([np.flatnonzero(asym_id == place[chain]) for chain in sorted(place)])
