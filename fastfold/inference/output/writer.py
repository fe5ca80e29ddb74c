"""Write the predictions of a target with their settings into a results folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fastfold.data.msa.find import ChainMsas
from fastfold.data.msa.sampling import alignment_coverage
from fastfold.data.targets import Target
from fastfold.inference.config import InferConfig
from fastfold.inference.embedding.compute import Embedding, embedding_bytes
from fastfold.inference.embedding.config import EmbedConfig
from fastfold.inference.output.plots import confidence_png, coverage_png
from fastfold.inference.output.prediction import Prediction, multimer_confidence, prediction_title
from fastfold.inference.output.results_folder import PredictionRecord, TargetResults
from fastfold.inference.output.score_files import (
    MAX_SCORES_BYTES,
    lines_json,
    read_pae,
    read_scores,
    residue_numbers,
    scored_names,
)
from fastfold.protein.labels import residue_ranges, shifted_numbers
from fastfold.protein.metrics.scores import LARGEST_OF_PAIRS
from fastfold.protein.validation import LISTED_GEOMETRY
from fastfold.utils.foreign_text import read_json_object

CLASH_PENALTY = 100.0  #: Penalty on the ranking score of a prediction whose chains clash, as in AlphaFold 3


def ranking_scores(by: str, scores: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the numbers that rank predictions by their scores and one of :data:`.RankBy`; missing ones rank last."""
    if by == "auto":
        by = "plddt" if any(one.get("iptm") is None for one in scores) else "multimer"

    def number(one: Mapping[str, Any]) -> float:
        if by == "multimer" and None not in (one.get("iptm"), one.get("ptm")):
            return multimer_confidence(float(one["ptm"]), float(one["iptm"]))
        return -math.inf if one.get(by) is None else float(one[by])

    return [number(one) - CLASH_PENALTY * (one.get("has_clash") is True) for one in scores]


def stops(config: InferConfig, scores: Mapping[str, Any], target: Target) -> bool:
    """Return True if a prediction is good enough to stop (``stop_at_score``)."""
    if config.stop_at_score is None:
        return False
    (score,) = ranking_scores("multimer" if target.is_complex else "plddt", [scores])
    return (100 * score if target.is_complex else score) >= config.stop_at_score


def write_result(
    results: TargetResults,
    record: Mapping[str, Any],
    result: Prediction | Embedding,
    scores: Mapping[str, Any],
    config: InferConfig,
    *,
    files: Mapping[str, str | bytes],
) -> PredictionRecord:
    """Add a prediction or an embedding to a target's results, and rank them, or raise WriteError.

    The record is that of :func:`.run_record`, ``scores`` are further listed ones, and ``files`` contents by the ending
    of their names, without the settings and the arrays of an embedding.
    """
    if isinstance(result, Embedding):
        embed, key = config.embed or EmbedConfig(), result.key
        files = {embed.ending: embedding_bytes(result.arrays, result.about, embed.file_format), **files}
    else:
        key = result.file_key(results.parent.style)
    files = {**files, "_config.json": lines_json(dict(record) | {"name": results.stem})}
    listed = {**listed_scores(result), **scores}
    return results.add(record["input_hash"], key, files, listed, partial(ranking_scores, config.rank))


def listed_scores(prediction: Prediction | Embedding) -> dict[str, Any]:
    """Return the scores by which results are ranked and listed, in JSON's types."""
    about = {"name": prediction.name, "model": prediction.model_name, "seed": prediction.seed}
    if isinstance(prediction, Embedding):
        length, sequence = sum(map(len, prediction.sequences)), ":".join(prediction.sequences)
        return about | {"sample": prediction.sample_label, "length": length, "sequence": sequence}
    interfaces, geometry = prediction.interface_scores, prediction.structure_check.figures
    scores = {"ptm": prediction.ptm, "iptm": prediction.iptm}
    scores |= {name: interfaces[name] for name in LARGEST_OF_PAIRS}
    return about | {
        **({} if prediction.sample is None else {"sample": prediction.sample_label}),
        "length": len(prediction.aatype),
        "plddt": prediction.mean_plddt,
        **{key: None if value is None else float(value) for key, value in scores.items()},
        "clashes": interfaces["clashes"],
        "has_clash": interfaces["has_clash"],
        **{key: geometry[key] for key in LISTED_GEOMETRY},
        "geometry": prediction.structure_check.verdict,
    }


def draw_plot(results: TargetResults, record: PredictionRecord) -> bytes:
    """Draw the plot of a written prediction from its files, as PNG, or raise InputError for a damaged file."""
    scores = read_scores(results.path(record, "_scores.json"))
    pae = max_pae = None
    if "_pae.json" in record.files:
        pae, max_pae = read_pae(results.path(record, "_pae.json"), len(scores["plddt"]))
    lengths = [len(sequence) for sequence in scores["sequences"]]
    return confidence_png(
        np.array(scores["plddt"]),
        np.repeat(np.arange(len(lengths)), lengths),
        numbers=residue_numbers(scores),
        names=scored_names(scores),
        pae=pae,
        max_pae=max_pae,
        title=prediction_title(scores["name"], scores["model"]),
        ptm=scores["ptm"],
        iptm=scores["iptm"],
    )


def draw_missing_coverage(results: TargetResults, name: str, *, again: bool = False) -> bool:
    """Draw the plot of a target's coverage from its file, if it is missing or ``again``; return True if it was written.

    A damaged file raises InputError.
    """
    path, picture = results.shared("_coverage.json"), "_coverage.png"
    if not path.is_file() or (results.shared(picture).is_file() and not again):
        return False
    coverage = read_json_object(path, "the coverage of a target", limit=MAX_SCORES_BYTES)
    results.write_shared({picture: coverage_png(coverage, title=coverage_title(name))})
    return True


def coverage_title(name: str) -> str:
    """Return the title of the plot of a target's alignments."""
    return f"Alignments of {name[:100]}"


def find_coverage(alignments: Sequence[ChainMsas], target: Target) -> dict[str, Any] | None:
    """Return the coverage of a target by its alignments, in JSON's types; None without any."""
    if not any(msa.sequences for chain in alignments for group in chain for msa in group):
        return None
    coverage = alignment_coverage(alignments, lengths=[len(chain.sequence) for chain in target.chains])
    if any(chain.regions or chain.indices for chain in target.chains):
        numbers = [shifted_numbers(one.residue_index, one.residue_labels[0]) for one in target.chains]
        coverage["residue_ranges"] = list(map(residue_ranges, numbers))
        coverage["chain_ids"] = list(target.names.chain_ids)
    return coverage
