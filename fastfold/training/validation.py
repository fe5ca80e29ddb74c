"""Validation: fold known chains and complexes, and compare them with their experimental structures.

Labels of equal chains are exchanged to fit the prediction, in training too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.data.features.pipeline import FeatureSampler, sampler_from_merged, sampler_from_raw
from fastfold.data.features.raw import msa_features, sequence_features, template_features
from fastfold.data.features.transforms import pseudo_beta
from fastfold.data.loading.loader import retry_io
from fastfold.data.msa.msa import Msa
from fastfold.data.training.entry import Entry, EntryData
from fastfold.data.training.labels import structure_labels
from fastfold.data.training.sample import copies_of_residues, in_feature_order, merged_features
from fastfold.errors import InputError
from fastfold.evoformer.confidence import plddt
from fastfold.evoformer.config import is_multimer
from fastfold.evoformer.execution import rows_of
from fastfold.evoformer.losses.permutation import permute_labels, split_chains
from fastfold.evoformer.model import AlphaFold
from fastfold.parallel import DistributedContext
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.contacts import DistogramScore, score_distogram
from fastfold.protein.metrics.lddt import lddt
from fastfold.protein.metrics.tm_score import tm_score
from fastfold.protein.structure import ChainStructure
from fastfold.training.data import EntryReader

DEEP_ROWS = 200  #: Minimum number of rows of a deep alignment, from which coevolution can be seen

_CA = rc.atom_order["CA"]


@dataclass(frozen=True)
class ChainScore:
    """Scores of one folded chain or complex."""

    id: str  #: Name of the chain or complex
    residues: int  #: Length of all chains together
    lddt_ca: float  #: lDDT-CA, 0 to 1
    tm_score: float  #: TM-score of alpha carbons, normalised by the residues that the experiment resolved
    mean_plddt: float  #: Mean predicted lDDT, 0 to 1
    true: np.ndarray  #: lDDT-CA per resolved residue, 0 to 1
    predicted: np.ndarray  #: Predicted lDDT per resolved residue, 0 to 1
    #: Number of different rows of the alignment besides the query; None for a complex
    depth: int | None = None
    #: Scores of its distogram; None for a complex, and for a network without one
    distogram: DistogramScore | None = None
    positions: Tensor | None = None  #: Predicted atom37 positions ``[N, 37, 3]`` in Å
    atom_mask: Tensor | None = None  #: ``[N, 37]``, 1 for atoms that the prediction has

    def figures(self) -> dict[str, float]:
        """Return the scores by their names in logs."""
        figures = {"lddt_ca": self.lddt_ca, "tm_score": self.tm_score, "plddt": self.mean_plddt}
        if self.distogram is not None:
            figures |= {f"distogram_ce_{band}": x for band, x in self.distogram.cross_entropy.items()}
            if self.distogram.contacts is not None:
                figures["precision_l5"] = self.distogram.contacts.l5
                figures["precision_l2"] = self.distogram.contacts.l2
        return figures


DEPTHS: dict[str, Callable[[int], bool]] = {
    "deep": lambda depth: depth >= DEEP_ROWS,
    "msa": lambda depth: depth > 0,
    "single": lambda depth: depth == 0,
}
"""Groups of chains by the depth of their alignments: deep ones, any alignment, and only the sequence."""


def mean_figures(scores: Sequence[ChainScore]) -> dict[str, float]:
    """Return the means of :meth:`ChainScore.figures`, each over the chains with that score.

    Returns:
        ``valid_<figure>`` over all chains, and ``valid_<figure>_<group>`` over the chains of a group of
        :data:`DEPTHS`, for groups with chains.
    """
    groups = {"": list(scores)}
    for name, belongs in DEPTHS.items():
        groups[f"_{name}"] = [s for s in scores if s.depth is not None and belongs(s.depth)]
    means = {}
    for suffix, members in groups.items():
        rows = [score.figures() for score in members]
        for figure in dict.fromkeys(figure for row in rows for figure in row):
            means[f"valid_{figure}{suffix}"] = float(np.mean([row[figure] for row in rows if figure in row]))
    return means


Templates = Mapping[str, Mapping[str, np.ndarray]]  #: Raw template features by sequence


def score_entries(
    model: AlphaFold,
    entries: Sequence[Entry],
    reader: EntryReader,
    tree: ConfigDict,
    recycles: int,
    context: DistributedContext,
) -> tuple[list[ChainScore], list[str]]:
    """Fold a share of the entries on each process; return all scores by name (a collective).

    The second list has the reasons of entries that cannot be read.
    """
    own: list[ChainScore] = []
    failed: list[str] = []

    def read(entry: Entry) -> tuple[EntryData, Templates]:
        data = reader(entry)
        candidates = reader.candidates(entry, data)
        return data, {sequence: chosen.best() for sequence, chosen in candidates.items()}

    for entry in entries[context.dp_rank :: context.dp_size]:
        try:
            data, templates = retry_io(partial(read, entry))
        except (InputError, OSError) as error:
            failed.append(f"{entry.id}: {error}")
            continue
        own.append(score_entry(model, entry.id, data, tree, recycles, templates=templates))
    gathered = context.leaders(context.gather((own, failed)))
    scores = sorted((score for part, _ in gathered for score in part), key=lambda score: score.id)
    return scores, [reason for _, part in gathered for reason in part]


def score_entry(
    model: AlphaFold,
    name: str,
    data: EntryData,
    tree: ConfigDict,
    recycles: int,
    *,
    templates: Templates | None = None,
) -> ChainScore:
    """Fold a chain or a complex and compare it with its structure; equal chains are permuted to fit best."""
    if not is_multimer(tree):
        return score_chain(model, name, data.chain, data.alignments, tree, recycles, templates=templates)
    chains, alignments = in_feature_order(data.chains, data.msas)
    merged = merged_features(chains, alignments, templates=templates)
    folded = _fold(model, sampler_from_merged(merged, tree, seed=0), recycles)
    positions = np.concatenate([chain.positions for chain in chains])
    mask = np.concatenate([chain.mask for chain in chains])
    copies = copies_of_residues(merged, positions, mask, np.arange(len(mask)))
    if copies:
        exchanged = exchanged_atoms(
            folded.positions[:, _CA],
            torch.as_tensor(merged["asym_id"]),
            torch.as_tensor(merged["entity_id"]),
            {key: torch.as_tensor(x) for key, x in copies.items()},
        )
        positions, mask = exchanged["all_atom_positions"].numpy(), exchanged["all_atom_mask"].numpy()
    return _score(name, folded, positions[:, _CA], mask[:, _CA])


def score_chain(
    model: AlphaFold,
    name: str,
    chain: ChainStructure,
    alignments: Sequence[Msa],
    tree: ConfigDict,
    recycles: int,
    *,
    templates: Templates | None = None,
) -> ChainScore:
    """Fold a chain with a monomer network and compare it with its structure."""
    raw = sequence_features(chain.sequence) | msa_features(alignments, chain.sequence)
    raw |= template_features((templates or {}).get(chain.sequence, {}), len(chain))
    raw["residue_index"] = chain.residue_index
    folded = _fold(model, sampler_from_raw(raw, tree, seed=0), recycles)
    score = _score(name, folded, chain.positions[:, _CA], chain.mask[:, _CA])
    depth = int(raw["num_alignments"][0]) - 1
    if folded.distogram is None:
        return replace(score, depth=depth)
    logits = rows_of(folded.distogram["logits"], slice(0, len(chain))).float().cpu().numpy()
    edges = folded.distogram["bin_edges"].float().cpu().numpy()
    return replace(score, depth=depth, distogram=score_distogram(logits, edges, *resolved_beta(chain)))


def resolved_beta(chain: ChainStructure) -> tuple[np.ndarray, np.ndarray]:
    """Return Cβ positions ``[N, 3]`` in Å, Cα for glycine, and their mask ``[N]``."""
    return pseudo_beta(rc.sequence_to_aatype(chain.sequence), chain.positions, chain.mask)


class _Fold(NamedTuple):
    """Parts of a prediction that are compared, on the CPU."""

    positions: Tensor  #: ``[N, 37, 3]`` in Å
    atom_mask: Tensor  #: ``[N, 37]``
    lddt: Tensor  #: Predicted lDDT ``[N]``, 0 to 1
    distogram: dict[str, Any] | None  #: Output of the head


def _fold(model: AlphaFold, sampler: FeatureSampler, recycles: int) -> _Fold:
    device = model.single_projection.weight.device
    # Without gradients operators run in pieces and in place, which a compiler takes apart.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        result = model(
            lambda cycle, member: {
                key: torch.as_tensor(x, device=device) for key, x in sampler.sample(cycle, member).items()
            },
            recycles,
        )
        return _Fold(
            positions=result["structure_module"]["final_atom_positions"].float().cpu(),
            atom_mask=result["structure_module"]["final_atom_mask"].float().cpu(),
            lddt=plddt(result["predicted_lddt"]["logits"].float()).cpu() / 100,
            distogram=result.get("distogram"),
        )


def _score(name: str, folded: _Fold, positions: np.ndarray, observed: np.ndarray) -> ChainScore:
    """Compare CA positions with the experiment's, ``positions [N, 3]`` in Å with mask ``observed [N]``.

    Predicted positions that are not finite count as wrong.
    """
    predicted, estimate = folded.positions[:, _CA], folded.lddt
    reference, mask = torch.as_tensor(positions), torch.as_tensor(observed)
    resolved = mask > 0
    finite = predicted.isfinite().all(-1)
    return ChainScore(
        id=name,
        residues=len(mask),
        lddt_ca=float(lddt(predicted, reference, mask, per_residue=False)),
        tm_score=tm_score(predicted, reference, mask * finite, reference_length=int(resolved.sum())),
        mean_plddt=float(estimate.mean()),
        true=lddt(predicted, reference, mask)[resolved].numpy(),
        predicted=estimate[resolved].numpy(),
        positions=folded.positions,
        atom_mask=folded.atom_mask,
    )


def exchange_chains(
    predicted_ca: Tensor, batch: Mapping[str, Tensor], copies: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the batch with the labels of a sample's equal chains exchanged to fit the prediction best.

    See Evans et al. 2021, section 7.3. ``predicted_ca [n, 3]`` in Å is detached from the graph. The batch has the
    sample's features of one iteration and its labels; ``copies`` are the atoms of the sample's other copies
    (:func:`fastfold.data.training.sample.complex_sample`), and may be empty.
    """
    if not copies:
        return dict(batch)
    exchanged = exchanged_atoms(predicted_ca, batch["asym_id"], batch["entity_id"], copies)
    if all(torch.equal(exchanged[name], batch[name]) for name in exchanged):
        return dict(batch)
    labels = structure_labels(
        batch["aatype"].cpu().numpy(),
        exchanged["all_atom_positions"].cpu().numpy(),
        exchanged["all_atom_mask"].cpu().numpy(),
        resolution=float(batch["resolution"]),
    )
    device = predicted_ca.device
    return dict(batch) | {name: torch.as_tensor(x, device=device) for name, x in labels.items()}


def exchanged_atoms(
    predicted_ca: Tensor, asym_id: Tensor, entity_id: Tensor, copies: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return ``all_atom_positions [n, 37, 3]`` (Å) and ``all_atom_mask [n, 37]`` of the chains that fit best.

    ``asym_id [n]`` is the chain of each residue, and ``entity_id [n]`` equal for chains of one sequence. For the others
    see :func:`exchange_chains`; ``copies`` is not empty.
    """
    names = ("all_atom_positions", "all_atom_mask", "asym_id", "entity_id", "residue_index")
    whole = {name: copies[name] for name in names}
    chains = split_chains(whole, copies["asym_id"])
    return permute_labels(predicted_ca.detach(), asym_id, entity_id, copies["residue"], chains)
