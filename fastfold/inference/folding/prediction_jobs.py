"""Predictions of a target to make: one per network, seed and sample, each with its record and its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fastfold.data.msa.find import ChainMsas
from fastfold.data.targets import Target
from fastfold.inference.config import FolderFormat, InferConfig
from fastfold.inference.ensemble.samples import Sample, draw_samples
from fastfold.inference.folding.prediction import keeps_pae
from fastfold.inference.models import Network
from fastfold.inference.output.file_names import COLABFOLD_SCORES
from fastfold.inference.output.writer import run_record, target_digest
from fastfold.inference.target_templates import TargetTemplates, takes_templates


@dataclass(frozen=True)
class PredictionJob:
    """Prediction to make, with its :func:`fastfold.inference.output.writer.run_record`."""

    network: Network
    seed: int
    sample: Sample | None
    record: dict[str, Any]

    @property
    def label(self) -> str:
        """Seed and sample in messages."""
        return f"seed {self.seed}" + ("" if self.sample is None else f" {self.sample.label}")

    @property
    def id(self) -> str:
        """Identifier of the prediction in the results folder."""
        return str(self.record["input_hash"])

    def wanted(self, target: Target, config: InferConfig, output_format: FolderFormat) -> set[str]:
        """Return the endings of the requested files of the prediction."""
        if config.embed is not None:
            return {config.embed.ending, "_config.json"}
        heads = self.network.info.config.model.heads
        optional = {
            ".png": config.plots,
            "_pae.json": keeps_pae(target.num_residues, config.pae) and heads.predicted_aligned_error.weight,
            "_representations.npz": config.save_representations,
            "_r0.pdb": config.save_recycles,
            "_distogram.npz": config.save_distogram,
            COLABFOLD_SCORES: output_format == "colabfold",
        }
        chosen = {ending for ending, is_wanted in optional.items() if is_wanted}
        return {".cif", "_scores.json", "_config.json"} | chosen


def prediction_jobs(
    target: Target,
    alignments: Sequence[ChainMsas],
    *,
    networks: Sequence[Network],
    templates: TargetTemplates | None,
    config: InferConfig,
    device: torch.device,
) -> list[PredictionJob]:
    """Return the predictions of a target to make, all of a network together."""
    samples = {seed: draw_samples(config.sample, target, alignments, seed) for seed in config.seeds}
    digest = target_digest(target, alignments, config)
    record = partial(run_record, target, alignments, config=config, digest=digest, device=str(device))
    are_whole = templates is not None and templates.is_in_one_frame
    jobs = []
    for network in networks:
        takes = takes_templates(network.info.config, target, are_whole=are_whole)
        by_network = partial(record, network=network, templates=templates if takes else None)
        jobs += [
            PredictionJob(network, seed, sample, by_network(seed=seed, sample=sample))
            for seed, drawn in samples.items()
            for sample in drawn
        ]
    return jobs
