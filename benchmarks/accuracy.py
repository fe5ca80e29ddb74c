"""Accuracy of a network on chains of known structure; every figure has a baseline.

Usage: python benchmarks/accuracy.py WEIGHTS DATA [--split valid] [--chains 50 | --hashed 38 68 | --names 1igd,1ctf]
                                     [--single-sequence] [--relax] [--prior-chains 400] [--plot PNG] [--json OUT]

DATA is a folder as for ``fastfold train``. Chains are taken evenly over the split, or with ``--hashed`` in the order of
their names' SHA-256, among those of 40 to 200 residues. Each is folded with the network's own number of recycles.
Prints tables in Markdown, by the depth of the alignments:

* lDDT-CA and TM-score, and those of a bundle of helices and of one straight helix, equal for every protein;
* figures that a collapsed structure cannot pass: radius of gyration over the true one, CA neighbours within 3.8 Å,
  clashing atoms, and *own minus other*: lDDT-CA less that of predictions for longer chains, cut to the same length;
* figures of the backbone and of side chains next to those of the experiments: phi above 0, alpha and beta, omega, C-N
  bonds, CA distances, and rings with a bond through them; with ``--relax`` also after relaxation, on one thread;
* calibration of pLDDT: its bias, and its correlation with the true lDDT-CA over residues;
* cross-entropy of the distogram by separation in the sequence, and that of a prior that knows only the separation,
  counted in chains of the training split;
* precision of the contacts with the highest probability, of the nearest pairs in the coordinates, of those with the
  highest coevolution in the alignment alone
  (:mod:`fastfold.data.features.coevolution`), and of a random choice.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastfold.cli.process import prepare_environment

prepare_environment()  # as the command line does, before PyTorch is loaded

import numpy as np  # noqa: E402
import torch  # noqa: E402
from accuracy_tables import Measured, summarize, tables  # noqa: E402
from no_skill import SeparationPrior, helix_bundle, straight_helix  # noqa: E402
from torch import Tensor  # noqa: E402

import fastfold  # noqa: E402
from fastfold.data.features.coevolution import analyze  # noqa: E402
from fastfold.data.features.raw import msa_features  # noqa: E402
from fastfold.data.features.transforms import pseudo_beta, to_restype_order  # noqa: E402
from fastfold.data.msa.msa import Msa  # noqa: E402
from fastfold.data.training.dataset import WHOLE_SPLIT, open_dataset  # noqa: E402
from fastfold.data.training.entry import Entry, read_entry, select_chain  # noqa: E402
from fastfold.errors import FastFoldError  # noqa: E402
from fastfold.inference.config import PRECISIONS  # noqa: E402
from fastfold.inference.relax import RelaxConfig, relax  # noqa: E402
from fastfold.protein import residue_constants as rc  # noqa: E402
from fastfold.protein.geometry import follows  # noqa: E402
from fastfold.protein.io.read import read_structure  # noqa: E402
from fastfold.protein.metrics.backbone import backbone_figures, measure_backbone  # noqa: E402
from fastfold.protein.metrics.compactness import near_neighbors, radius_of_gyration  # noqa: E402
from fastfold.protein.metrics.contacts import (  # noqa: E402
    CONTACT_SEPARATION,
    LONG_RANGE,
    ContactPrecision,
    contact_precision,
    distogram_cross_entropy,
)
from fastfold.protein.metrics.lddt import count_clashes, lddt  # noqa: E402
from fastfold.protein.metrics.tm_score import tm_score  # noqa: E402
from fastfold.protein.protein import Protein  # noqa: E402
from fastfold.protein.side_chains import pierced_rings  # noqa: E402
from fastfold.protein.structure import ChainStructure  # noqa: E402
from fastfold.training.report.plots import calibrate, calibration_png  # noqa: E402
from fastfold.training.validation import ChainScore, resolved_beta, score_chain  # noqa: E402

HASHED_LENGTHS = range(40, 201)  #: Residues of chains that are chosen by hash


def spread(entries: Sequence[Entry], chains: int) -> list[Entry]:
    """Choose ``chains`` entries, spread evenly over all; return all of them for 0."""
    count = min(chains or len(entries), len(entries))
    return [entries[i * len(entries) // count] for i in range(count)]


def hashed(entries: Sequence[Entry], first: int, end: int) -> list[Entry]:
    """Choose entries of :data:`HASHED_LENGTHS` from number ``first`` to before ``end``, by their names' SHA-256."""
    ordered = sorted(entries, key=lambda entry: hashlib.sha256(entry.id.encode()).hexdigest())
    fitting = (entry for entry in ordered if len(read_entry(entry).chain) in HASHED_LENGTHS)
    return list(itertools.islice(fitting, first, end))


def separation_prior(entries: Sequence[Entry], heads: Any) -> SeparationPrior:
    """Count the prior in these chains' structures, with the bins of a network's distogram."""
    c = heads.distogram
    structures = (resolved_beta(select_chain(read_structure(entry.structure), entry)) for entry in entries)
    return SeparationPrior.from_structures(
        structures, np.linspace(c.first_break, c.last_break, c.num_bins - 1)
    )


def coevolution(chain: ChainStructure, alignments: Sequence[Msa]) -> np.ndarray | None:
    """Return scores ``[N, N]`` of the pairs of residues by their coevolution; None without an alignment."""
    msa = msa_features(alignments, chain.sequence)["msa"]
    return analyze(to_restype_order(msa)).scores


def measure(
    score: ChainScore, chain: ChainStructure, prior: SeparationPrior, couplings: np.ndarray | None = None
) -> Measured:
    """Compute all figures of a folded chain, and those of the baselines.

    Args:
        score: Score of the network's fold.
        chain: Known structure of the chain.
        prior: Distances by separation.
        couplings: Scores ``[N, N]`` of pairs in the network's input; a higher one promises a contact.
    """
    ca = rc.atom_order["CA"]
    reference, mask = torch.as_tensor(chain.positions[:, ca]), torch.as_tensor(chain.mask[:, ca])
    figures = score.figures()
    for name, points in (("bundle", helix_bundle(len(chain))), ("helix", straight_helix(len(chain)))):
        guess = torch.from_numpy(points)
        figures[f"lddt_ca_{name}"] = float(lddt(guess, reference, mask, per_residue=False))
        figures[f"tm_score_{name}"] = tm_score(guess, reference, mask)
    figures |= geometry(score, chain) | backbone(score, chain)
    if score.distogram is None:
        return Measured(score, figures)
    beta, resolved = resolved_beta(chain)
    by_band = distogram_cross_entropy(prior.logits(len(chain)), prior.edges, beta, resolved)
    figures |= {f"distogram_ce_{band}_prior": x for band, x in by_band.items()}
    found = {"": score.distogram.contacts, "_long": score.distogram.long_range}
    others = {"_input": couplings, "_structure": _nearness(score, chain)}
    for suffix, separation in (("", CONTACT_SEPARATION), ("_long", LONG_RANGE)):
        precision = found[suffix]
        if precision is not None:
            figures |= _precision(precision, suffix) | {f"base_rate{suffix}": precision.base_rate}
        for name, scores in others.items():
            if scores is not None:
                precision = contact_precision(scores, beta, resolved, separation)
                figures |= _precision(precision, f"{suffix}{name}") if precision is not None else {}
    return Measured(score, figures)


def geometry(score: ChainScore, chain: ChainStructure) -> dict[str, float]:
    """Return the figures of a prediction that density alone cannot raise; none for a score without positions."""
    if score.positions is None or score.atom_mask is None:
        return {}
    ca = rc.atom_order["CA"]
    mask = torch.as_tensor(chain.mask[:, ca])
    predicted, true = score.positions[:, ca], torch.as_tensor(chain.positions[:, ca])
    ratio = float(radius_of_gyration(predicted, mask) / radius_of_gyration(true, mask))
    numbers = torch.as_tensor(chain.residue_index)
    clashes = count_clashes(score.positions, score.atom_mask, numbers, torch.zeros_like(numbers))
    return {
        "radius_ratio": ratio,
        "radius_sane": float(0.7 < ratio < 1.3),
        "near_neighbours": near_neighbors(predicted, mask),
        "near_neighbours_true": near_neighbors(true, mask),
        "clashes": clashes / len(chain),
    }


def backbone(score: ChainScore, chain: ChainStructure) -> dict[str, float]:
    """Return the figures of a prediction's atoms, and with the suffix ``_true`` those of the experiment."""
    if score.positions is None or score.atom_mask is None:
        return {}
    experiment = torch.as_tensor(chain.positions), torch.as_tensor(chain.mask)
    predicted = atom_figures(score.positions, score.atom_mask, chain)
    return predicted | {f"{name}_true": x for name, x in atom_figures(*experiment, chain).items()}


def atom_figures(positions: Tensor, mask: Tensor, chain: ChainStructure) -> dict[str, float]:
    """Return figures of backbone and rings of atoms ``[N, 37, 3]`` with their mask ``[N, 37]``."""
    numbers, aatype = torch.as_tensor(chain.residue_index), rc.sequence_to_aatype(chain.sequence)
    geometry = measure_backbone(positions, mask, numbers, torch.zeros_like(numbers))
    tied = follows(np.zeros(len(chain), np.int64), chain.residue_index)
    rings = pierced_rings(positions.numpy(), mask.numpy(), aatype, tied)
    return backbone_figures(geometry, torch.as_tensor(aatype)) | {"pierced": float(len(rings) > 0)}


def relaxed(score: ChainScore, chain: ChainStructure) -> dict[str, float]:
    """Relax a prediction; return whether it succeeds, and figures of its backbone with the suffix ``_relaxed``."""
    assert score.positions is not None
    assert score.atom_mask is not None
    protein = Protein(
        atom_positions=score.positions.numpy(),
        atom_mask=score.atom_mask.numpy(),
        aatype=rc.sequence_to_aatype(chain.sequence),
        residue_index=chain.residue_index,
        chain_index=np.zeros(len(chain), np.int64),
        b_factors=np.zeros((len(chain), rc.atom_type_num)),
    )
    try:
        result = relax(protein, RelaxConfig(platform="CPU", threads=1), continuous=True)
    except FastFoldError as error:
        print(f"{score.id}: {error}", flush=True)
        return {"relaxed": 0.0}
    if result.reason:
        print(f"{score.id}: not relaxed: {result.reason}", flush=True)
    atoms = torch.as_tensor(result.protein.atom_positions), torch.as_tensor(result.protein.atom_mask)
    figures = {f"{name}_relaxed": x for name, x in atom_figures(*atoms, chain).items()}
    return {"relaxed": float(result.relaxed)} | figures


def add_own_minus_other(measured: Sequence[Measured], chains: Sequence[ChainStructure]) -> None:
    """Add lDDT-CA less its mean over predictions for longer chains, cut to the chain's length.

    Args:
        measured: Figures of each chain; the longest chain gets none, because there is no longer one to compare.
        chains: Their structures.
    """
    ca = rc.atom_order["CA"]
    traces = [m.score.positions[:, ca] for m in measured if m.score.positions is not None]
    for number, (m, chain) in enumerate(zip(measured, chains, strict=True)):
        true, mask = torch.as_tensor(chain.positions[:, ca]), torch.as_tensor(chain.mask[:, ca])
        others = [x[: len(chain)] for i, x in enumerate(traces) if i != number and len(x) >= len(chain)]
        if others:
            other = statistics.fmean(float(lddt(x, true, mask, per_residue=False)) for x in others)
            m.figures["own_minus_other"] = m.figures["lddt_ca"] - other


def _nearness(score: ChainScore, chain: ChainStructure) -> np.ndarray | None:
    """Return negative distances ``[N, N]`` between predicted CB atoms, CA for glycine."""
    if score.positions is None or score.atom_mask is None:
        return None
    aatype = rc.sequence_to_aatype(chain.sequence)
    beta = torch.from_numpy(pseudo_beta(aatype, score.positions.numpy(), score.atom_mask.numpy())[0])
    return -torch.cdist(beta, beta).numpy()


def _precision(precision: ContactPrecision, suffix: str) -> dict[str, float]:
    return {f"precision_l5{suffix}": precision.l5, f"precision_l2{suffix}": precision.l2}


def main(arguments: Sequence[str] | None = None) -> None:
    """Fold the chains, compare them with the baselines, and print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights")
    parser.add_argument("data", type=Path)
    parser.add_argument("--split", default="valid")
    parser.add_argument("--chains", type=int, default=50, help="0: all (default: 50)")
    parser.add_argument(
        "--hashed",
        type=int,
        nargs=2,
        metavar=("FIRST", "END"),
        help="chains by number, in the order of hashes",
    )
    parser.add_argument("--names", type=lambda text: text.split(","), help="only chains whose names begin so")
    parser.add_argument("--single-sequence", action="store_true", help="leave the alignments out")
    parser.add_argument("--relax", action="store_true", help="relax the predictions too")
    parser.add_argument("--recycles", type=int, help="default: the network's own number")
    parser.add_argument(
        "--precision", default="fp32", choices=PRECISIONS, help="precision of the trunk (default fp32)"
    )
    parser.add_argument(
        "--prior-chains", type=int, default=400, help="training chains of the prior; 0: all (default: 400)"
    )
    parser.add_argument("--plot", type=Path, help="write the calibration of pLDDT as a picture")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(arguments)
    model = fastfold.load_model(options.weights, precision=options.precision)
    recycles = model.config.model.num_recycle if options.recycles is None else options.recycles
    entries: Sequence[Entry] = open_dataset(options.data, split=options.split).entries
    if options.names:
        entries = [e for e in entries if e.id.startswith(tuple(options.names))]
    elif options.hashed:
        entries = hashed(entries, *options.hashed)
    else:
        entries = spread(entries, options.chains)
    if not entries:
        parser.error("--names: no chain of the split begins with one of these names")
    trained = open_dataset(options.data, split=WHOLE_SPLIT).entries
    prior = separation_prior(spread(trained, options.prior_chains), model.config.model.heads)
    measured: list[Measured] = []
    chains: list[ChainStructure] = []
    for entry in entries:
        data = read_entry(entry)
        alignments = () if options.single_sequence else data.alignments
        score = score_chain(model, entry.id, data.chain, alignments, model.config, recycles)
        measured.append(measure(score, data.chain, prior, coevolution(data.chain, alignments)))
        if options.relax:
            measured[-1].figures.update(relaxed(score, data.chain))
        chains.append(data.chain)
        figures = measured[-1].figures
        print(
            f"{entry.id:<20} {score.residues:4d} residues {score.depth:4d} rows  lDDT-CA {score.lddt_ca:.3f} "
            f"(bundle {figures['lddt_ca_bundle']:.3f}, helix {figures['lddt_ca_helix']:.3f})  "
            f"TM-score {score.tm_score:.3f} "
            f"(bundle {figures['tm_score_bundle']:.3f}, helix {figures['tm_score_helix']:.3f})  "
            f"predicted lDDT {score.mean_plddt:.3f}  radius {figures['radius_ratio']:.2f} of the true one  "
            f"near neighbours {figures['near_neighbours']:.3f}",
            flush=True,
        )
    add_own_minus_other(measured, chains)
    groups = summarize(measured)
    print("\n" + tables(groups))
    if options.plot:
        predicted, true = (
            np.concatenate([getattr(m.score, key) for m in measured]) for key in ("predicted", "true")
        )
        options.plot.write_bytes(calibration_png(calibrate(predicted, true), title=f"{len(measured)} chains"))
    if options.json:
        rows = [
            {"id": m.score.id, "residues": m.score.residues, "depth": m.score.depth, **m.figures}
            for m in measured
        ]
        text = json.dumps({"groups": _finite(groups), "chains": _finite(rows)}, indent=1, allow_nan=False)
        options.json.write_text(text + "\n")


def _finite(x: Any) -> Any:
    """Replace numbers that JSON does not support by None."""
    if isinstance(x, dict):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


if __name__ == "__main__":
    main()
