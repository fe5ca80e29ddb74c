"""Write the predictions of a target with their settings into a results folder."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
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
from fastfold.data.templates.whole.given import GivenStructure
from fastfold.inference.config import InferConfig
from fastfold.inference.embed.compute import Embedding, embedding_bytes
from fastfold.inference.embed.config import EmbedConfig
from fastfold.inference.ensemble.samples import Sample
from fastfold.inference.models import Network
from fastfold.inference.network_settings import numeric_settings
from fastfold.inference.output.json_files import lines_json
from fastfold.inference.output.plots import confidence_png, coverage_png
from fastfold.inference.output.prediction import Prediction, multimer_confidence, prediction_title
from fastfold.inference.output.results_folder import PredictionRecord, TargetResults
from fastfold.inference.output.written_scores import (
    MAX_SCORES_BYTES,
    read_pae,
    read_scores,
    residue_numbers,
)
from fastfold.inference.target_templates import TargetTemplates
from fastfold.protein.labels import residue_ranges
from fastfold.utils.hashing import file_digest, input_hash
from fastfold.utils.text_files import read_json_object

CLASH_PENALTY = 100.0  #: Penalty on the ranking score of a prediction whose chains clash, as in AlphaFold 3


def target_digest(target: Target, alignments: Sequence[ChainMsas], config: InferConfig) -> str:
    """Hash the inputs that all predictions of a target share: chains, alignments and further files."""
    chains: list[tuple[Any, ...]] = [(chain.id, chain.sequence, chain.letters) for chain in target.chains]
    if target.is_cut:
        chains += [chain.regions for chain in target.chains]
    rows = [
        [[(m.sequences, m.deletions, m.descriptions, m.as_is) for m in group] for group in pair]
        for pair in alignments
    ]
    files = [
        None if path is None else file_digest(path) for path in (config.initial_guess, config.restraints)
    ]
    given = target.given
    if given is not None:
        chains.append((given.use, given.shows_targets, file_digest(given.path)))
    # Without restraints the hash is that of results from before there were any.
    return input_hash(chains, rows, *(files if files[1] else files[:1]))


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
    sample: Sample | None = None,
) -> dict[str, Any]:
    """Return settings, versions and ``input_hash``, in JSON's types.

    ``input_hash`` is the hash of everything that the results depend on, with the ``digest`` of :func:`target_digest`.
    The device is only recorded, because results of other devices are equivalent. ``templates`` are those that the
    network uses, if any.
    """
    chains = {chain.id: chain.sequence for chain in target.chains}
    weights = {"model": network.name, "file": network.path.name, "sha256": network.digest}
    settings = {"seed": seed, **numeric_settings(config, network.info.config)}
    if sample is not None:
        settings["sample"] = sample.record
    if config.embed is not None:
        settings["embed"] = {"layer": config.embed.layer, "arrays": config.embed.names}
        settings["embed"] |= {"mean": config.embed.mean, "dtype": config.embed.dtype}
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
        **({} if target.given is None else {"given_structure": _given(target.given)}),
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


def _given(given: GivenStructure) -> dict[str, Any]:
    return {"file": given.path.name, "use": given.use, "shows_targets": given.shows_targets}


def _template_names(templates: TargetTemplates) -> dict[str, list[str]]:
    return {chain["chain"]: [one["name"] for one in chain["used"]] for chain in templates.report}


def _template_input(templates: TargetTemplates | None) -> list[Any]:
    """Return the template arrays of the network, which its results depend on; empty without templates."""
    if templates is None or not templates.number:
        return []
    names = (*TEMPLATE_LAYOUT, "template_frame")
    return [
        [
            None if one is None else {name: one[name] for name in names if name in one}
            for one in templates.features
        ]
    ]


def ranking_scores(by: str, scores: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the numbers that rank a target's predictions; a missing score ranks last.

    ``by`` is one of :data:`fastfold.inference.config.RankBy`, and each prediction has ``plddt``, ``ptm``, ``iptm`` and
    ``has_clash``.
    """
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
    found: Prediction | Embedding,
    scores: Mapping[str, Any],
    config: InferConfig,
    *,
    files: Mapping[str, str | bytes],
) -> PredictionRecord:
    """Add a prediction or an embedding to a target's results, and rank them.

    The record is that of :func:`run_record`, ``scores`` are further listed ones (``seconds`` and ``peak_memory``), and
    ``files`` contents by the ending of their names, without the settings and the arrays of an embedding.

    Raises:
        OutputError: A file cannot be written; earlier files are unchanged.
    """
    if isinstance(found, Embedding):
        embed, key = config.embed or EmbedConfig(), found.key
        files = {embed.ending: embedding_bytes(found.arrays, found.about, embed.file_format), **files}
    else:
        key = found.file_key(results.parent.style)
    settings = {"_config.json": lines_json(dict(record) | {"name": results.stem})}
    listed = {**listed_scores(found), **scores}
    ranking = partial(ranking_scores, config.rank)
    return results.add(record["input_hash"], key, {**files, **settings}, listed, ranking)


def listed_scores(prediction: Prediction | Embedding) -> dict[str, Any]:
    """Return the scores by which results are ranked and listed, in JSON's types."""
    if isinstance(prediction, Embedding):
        return {
            "model": prediction.model_name,
            "seed": prediction.seed,
            "sample": prediction.sample_label,
            "length": sum(map(len, prediction.sequences)),
            "sequence": ":".join(prediction.sequences),
        }

    def plain(value: float | None) -> float | None:
        return None if value is None else float(value)

    return {
        "model": prediction.model_name,
        "seed": prediction.seed,
        **({} if prediction.sample is None else {"sample": prediction.sample_label}),
        "length": len(prediction.aatype),
        "plddt": prediction.mean_plddt,
        "ptm": plain(prediction.ptm),
        "iptm": plain(prediction.iptm),
        "ipsae_max": plain(prediction.interface_scores["ipsae_max"]),
        "clashes": prediction.interface_scores["clashes"],
        "has_clash": prediction.interface_scores["has_clash"],
    }


def draw_plot(results: TargetResults, record: PredictionRecord) -> bytes:
    """Draw the plot of a written prediction from its files, as PNG.

    An InputError tells that a file of the prediction is damaged.
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


def draw_missing_coverage(results: TargetResults, name: str, *, again: bool = False) -> bool:
    """Draw the plot of a target's coverage from its file; return True if one was written.

    ``again`` draws an existing plot again.

    Raises:
        InputError: The file of the coverage is damaged.
        WriteError: The plot cannot be written.
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
    found = alignment_coverage(alignments, lengths=[len(chain.sequence) for chain in target.chains])
    if target.is_cut:
        found["residue_ranges"] = [residue_ranges(np.array(chain.numbers)) for chain in target.chains]
    return found
