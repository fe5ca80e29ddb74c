"""Lines about a target for users: its inputs, its result, and its comparison with an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fastfold.data.msa.find import ChainMsas, unread_files
from fastfold.data.msa.other_files import READABLE
from fastfold.data.targets import Target
from fastfold.inference.config import InferConfig
from fastfold.inference.folding.prediction import keeps_pae
from fastfold.inference.models import Network
from fastfold.inference.output.results_folder import PredictionRecord
from fastfold.inference.progress import Progress

_SHOWN = 3  #: Number of files that are named


def _without_alignment(target: Target, index: int, msa_dir: Path) -> str:
    chain = target.chains[index]
    what = repr(chain.record or target.record)
    if target.is_complex and not chain.record:
        what = f"chain {chain.id}"
    elif chain.record_chain:
        what = f"chain {chain.record_chain} of {chain.record!r}"
    unread = [path.name for path in unread_files(msa_dir, target, chain)]
    not_read = f". Not read: {', '.join(unread[:_SHOWN])}; {READABLE}" if unread else ""
    return f"warning: {target.name}: no alignment of {what} in {msa_dir}; only its sequence is used{not_read}"


def announce(
    progress: Progress,
    target: Target,
    label: str,
    alignments: Sequence[ChainMsas],
    networks: Sequence[Network],
    config: InferConfig,
    *,
    msa_dir: Path | None,
) -> None:
    """Report the inputs of a target, named ``label``, its networks, and chains without an alignment in ``msa_dir``."""
    say, warn = progress.line, partial(progress.line, important=True)
    rows = [sum(len(msa.sequences) for group in pair for msa in group) for pair in alignments]
    for index, count in enumerate(rows):
        if msa_dir is not None and not target.has_alignment(index) and not count:
            warn(_without_alignment(target, index, msa_dir))
    evidence = f"{sum(rows):,} alignment rows" if any(rows) else "no alignment, from the sequence alone"
    is_fold = config.embed is None
    if is_fold and config.pae is None and not keeps_pae(target.num_residues, None):
        say(f"{label}: aligned errors of all pairs are left out of so long a target; `pae=yes` writes them")
    if target.is_complex and not all(network.info.multimer for network in networks):
        warn(
            f"warning: {target.name}: a monomer network folds this complex as one chain whose residue numbers "
            "jump by 200 between the chains; use `weights=multimer` for complexes ('fastfold weights download "
            "multimer' fetches it)"
        )
    names = ", ".join(network.name for network in networks)
    seeds = f", {len(config.seeds)} seeds" if len(config.seeds) > 1 else ""
    if target.seeds:
        noun = "seeds" if len(target.seeds) > 1 else "seed"
        seeds = f", {noun} {', '.join(map(str, target.seeds))} of the input"
    if config.sample is not None:
        seeds += f", samples by {config.sample.method}"
    say(f"{label}: {target.num_residues:,} residues, {evidence}, by {names}{seeds}")


def count_of(records: Sequence[PredictionRecord]) -> str:
    """Return the networks of some results, and their number if it differs, in words."""
    networks = list(dict.fromkeys(str(record.scores.get("model")) for record in records))
    more = f" ({len(records)} embeddings)" if len(records) > len(networks) else ""
    return f"{', '.join(networks)}{more}"


def conclusion(records: Sequence[PredictionRecord]) -> str:
    """Return the scores of the best prediction of a target in words, from all records, the best first."""
    best = records[0]
    shown = ", ".join(
        f"{name} {best.scores[key]:.{digits}f}"
        for name, key, digits in (("pLDDT", "plddt", 1), ("pTM", "ptm", 2), ("ipTM", "iptm", 2))
        if best.scores.get(key) is not None
    )
    if best.scores.get("has_clash") is True:
        shown += ", its chains overlap"
    count = f"{len(records)} prediction{'s' if len(records) > 1 else ''}"
    return f"{shown} by {best.key}, best of {count}"


def report_geometry(progress: Progress, label: str, records: Sequence[PredictionRecord]) -> None:
    """Warn if the best structure of a target, as predicted, is not that of a protein."""
    geometry = records[0].scores.get("geometry", "ok")
    if geometry != "ok":
        progress.line(
            f"warning: {label}: the structure of {records[0].key} is not physical: {geometry}", important=True
        )
