"""What a run writes of a target: predictions with their settings into a results folder, by what they depend on."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastfold._version import __version__
from fastfold.data.features.raw import TEMPLATE_LAYOUT
from fastfold.data.msa.coverage import alignment_coverage
from fastfold.data.msa.find import ChainMsas
from fastfold.data.targets import Target
from fastfold.inference.config import InferConfig
from fastfold.inference.models import Network
from fastfold.inference.network_settings import numeric_settings
from fastfold.inference.output.file_names import COLABFOLD_SCORES, prediction_key
from fastfold.inference.output.json_files import lines_json
from fastfold.inference.output.plots import confidence_png, coverage_png
from fastfold.inference.output.prediction import Prediction, multimer_confidence, prediction_title
from fastfold.inference.output.results_folder import PredictionRecord, TargetResults
from fastfold.inference.output.written_scores import read_pae, read_scores, residue_numbers
from fastfold.inference.target_templates import TargetTemplates
from fastfold.protein.labels import residue_ranges
from fastfold.utils.hashing import file_digest, input_hash

CLASH_PENALTY = 100.0
"""Subtracted from the score by which a prediction is ranked if its chains clash, as AlphaFold 3 does."""


def target_digest(target: Target, alignments: Sequence[ChainMsas], config: InferConfig) -> str:
    """The hash of what all predictions of a target depend on: chains, alignments and initial guess.

    Args:
        target: The target.
        alignments: Its alignments, all rows of which are read.
        config: How it is folded.
    """
    chains: list[tuple[Any, ...]] = [(chain.id, chain.sequence, chain.letters) for chain in target.chains]
    if target.is_cut:
        chains += [chain.regions for chain in target.chains]
    rows = [
        [[(m.sequences, m.deletions, m.descriptions, m.as_is) for m in group] for group in pair]
        for pair in alignments
    ]
    guess = None if config.initial_guess is None else file_digest(config.initial_guess)
    return input_hash(chains, rows, guess)


def run_record(
    target: Target,
    alignments: Sequence[ChainMsas],
    network: Network,
    seed: int,
    config: InferConfig,
    *,
    digest: str,
    device: str,
    templates: TargetTemplates | None = None,
) -> dict[str, Any]:
    """Settings, versions and ``input_hash``, the hash of everything that the numbers depend on, in JSON's types.

    Args:
        target: The target.
        alignments: Its alignments.
        network: The network that folds it.
        seed: The seed.
        config: How it is folded.
        digest: See :func:`target_digest`.
        device: Where it is folded; for the record only, a result from another device is as good.
        templates: Those that the network is shown, None if it takes none.
    """
    chains = {chain.id: chain.sequence for chain in target.chains}
    weights = {"model": network.name, "file": network.path.name, "sha256": network.digest}
    settings = {"seed": seed, **numeric_settings(config, network.info.config)}
    return {
        "schema_version": 2,
        "name": target.name,
        "source": Path(target.source).name,
        "record": target.record,
        "chains": chains,
        **({"chain_names": {chain.id: chain.record for chain in target.chains}} if target.is_complex else {}),
        **({"residue_ranges": {chain.id: chain.regions for chain in target.chains}} if target.is_cut else {}),
        "alignment_rows": [[sum(len(m.sequences) for m in group) for group in pair] for pair in alignments],
        **({} if templates is None else {"templates": _template_names(templates)}),
        "weights": weights,
        "settings": settings,
        "device": device,
        "versions": {
            "fastfold": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "input_hash": input_hash(digest, weights, settings, __version__, *_template_input(templates)),
    }


def _template_names(templates: TargetTemplates) -> dict[str, list[str]]:
    """Names of the templates of each chain."""
    return {chain["chain"]: [one["name"] for one in chain["used"]] for chain in templates.report}


def _template_input(templates: TargetTemplates | None) -> list[Any]:
    """What the numbers depend on of templates: the arrays that the network is shown; nothing without any."""
    if templates is None or not templates.number:
        return []
    return [
        [None if one is None else {name: one[name] for name in TEMPLATE_LAYOUT} for one in templates.features]
    ]


@dataclass(frozen=True)
class Wanted:
    """Which files a prediction shall have beyond its structure, scores and settings.

    Attributes:
        plots: The picture.
        pae: Aligned errors of all pairs.
        representations: The representations.
        recycles: The structure after each pass.
        distogram: Probabilities of distances.
        colabfold: ColabFold's scores file.
    """

    plots: bool
    pae: bool
    representations: bool
    recycles: bool
    distogram: bool = False
    colabfold: bool = False

    def missing(self, record: PredictionRecord) -> set[str]:
        """Endings of the files that a finished prediction does not have and shall have."""
        asked = {
            ".cif": True,
            "_scores.json": True,
            "_config.json": True,
            ".png": self.plots,
            "_pae.json": self.pae,
        }
        asked |= {"_representations.npz": self.representations, "_r0.pdb": self.recycles}
        asked["_distogram.npz"] = self.distogram
        asked[COLABFOLD_SCORES] = self.colabfold
        return {ending for ending, wanted in asked.items() if wanted and ending not in record.files}


def ranking_scores(by: str, scores: Sequence[Mapping[str, Any]]) -> list[float]:
    """The numbers by which a target's predictions are ranked; one that has no such score comes last.

    Args:
        by: See :data:`fastfold.inference.config.RankBy`.
        scores: Of each prediction: ``plddt``, ``ptm``, ``iptm`` and ``has_clash``.
    """
    if by == "auto":
        by = "plddt" if any(one.get("iptm") is None for one in scores) else "multimer"

    def number(one: Mapping[str, Any]) -> float:
        if by == "multimer" and None not in (one.get("iptm"), one.get("ptm")):
            return multimer_confidence(float(one["ptm"]), float(one["iptm"]))
        return -math.inf if one.get(by) is None else float(one[by])

    return [number(one) - CLASH_PENALTY * (one.get("has_clash") is True) for one in scores]


def stops(config: InferConfig, scores: Mapping[str, Any], target: Target) -> bool:
    """Whether a prediction is so good that no other is made of its target (``stop_at_score``)."""
    if config.stop_at_score is None:
        return False
    (score,) = ranking_scores("multimer" if target.is_complex else "plddt", [scores])
    return (100 * score if target.is_complex else score) >= config.stop_at_score


def write_prediction(
    results: TargetResults,
    record: Mapping[str, Any],
    prediction: Prediction,
    scores: Mapping[str, Any],
    config: InferConfig,
    *,
    more: Mapping[str, str | bytes],
) -> PredictionRecord:
    """Add a prediction with its files to a target's results, and rank them.

    Args:
        results: The target's.
        record: See :func:`run_record`.
        prediction: What was predicted.
        scores: What it is listed by beyond its own scores: ``seconds`` and ``peak_memory``.
        config: How it was folded.
        more: Further files by ending.

    Raises:
        OutputError: It cannot be written; what was there still is.
    """
    output_format = results.parent.output_format
    files = {**prediction.files(plots=config.plots, output_format=output_format), **more}
    files["_config.json"] = lines_json(dict(record) | {"name": results.stem})
    return results.add(
        record["input_hash"],
        prediction_key(prediction.model_name, prediction.seed, output_format),
        files,
        {**listed_scores(prediction), **scores},
        partial(ranking_scores, config.rank),
    )


def listed_scores(prediction: Prediction) -> dict[str, Any]:
    """What predictions are ranked and listed by, in JSON's types."""

    def plain(value: float | None) -> float | None:
        return None if value is None else float(value)

    return {
        "model": prediction.model_name,
        "seed": prediction.seed,
        "length": len(prediction.aatype),
        "plddt": prediction.mean_plddt,
        "ptm": plain(prediction.ptm),
        "iptm": plain(prediction.iptm),
        "ipsae_max": plain(prediction.interface_scores["ipsae_max"]),
        "clashes": prediction.interface_scores["clashes"],
        "has_clash": prediction.interface_scores["has_clash"],
    }


def draw_plot(results: TargetResults, record: PredictionRecord) -> bytes:
    """The picture of a prediction that was written without one, from its files.

    Returns:
        A PNG file.

    Raises:
        InputError: A file of the prediction is damaged.
    """
    scores = read_scores(results.path(record, "_scores.json"))
    pae = max_pae = None
    if "_pae.json" in record.files:
        pae, max_pae = read_pae(results.path(record, "_pae.json"), len(scores["plddt"]))
    lengths = [len(sequence) for sequence in scores["sequences"]]
    chains = np.repeat(np.arange(len(lengths)), lengths)
    title = prediction_title(results.stem, scores["model"])
    return confidence_png(
        np.array(scores["plddt"]),
        chains,
        numbers=residue_numbers(scores),
        pae=pae,
        max_pae=max_pae,
        title=title,
        ptm=scores["ptm"],
        iptm=scores["iptm"],
    )


def coverage_files(alignments: Sequence[ChainMsas], target: Target, *, plots: bool) -> dict[str, str | bytes]:
    """How the alignments cover a target, as files by ending; none for a target without an alignment.

    Args:
        alignments: Per chain.
        target: The target.
        plots: Whether to draw it.
    """
    if not any(msa.sequences for chain in alignments for group in chain for msa in group):
        return {}
    found = alignment_coverage(alignments, lengths=[len(chain.sequence) for chain in target.chains])
    if target.is_cut:
        found["residue_ranges"] = [residue_ranges(np.array(chain.numbers)) for chain in target.chains]
    files: dict[str, str | bytes] = {"_coverage.json": lines_json(found)}
    if plots:
        files["_coverage.png"] = coverage_png(found, title=f"Alignments of {target.name[:100]}")
    return files
