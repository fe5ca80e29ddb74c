"""Predictions of a target to make: one per network, seed and sample, each with its record and its files."""

from __future__ import annotations

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
from fastfold.data.msa.find import ChainMsas
from fastfold.data.targets import Target
from fastfold.inference.config import FolderFormat, InferConfig
from fastfold.inference.folding.prediction import keeps_pae
from fastfold.inference.models import Network
from fastfold.inference.network_settings import numeric_settings
from fastfold.inference.output.file_names import COLABFOLD_SCORES
from fastfold.inference.sampling.samples import Sample, draw_samples
from fastfold.inference.target_templates import TargetTemplates, takes_templates
from fastfold.utils.hashing import file_digest, input_hash


@dataclass(frozen=True)
class PredictionJob:
    """Prediction to make, with its :func:`run_record`."""

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
    alignment_files: Mapping[str, Sequence[str]] | None = None,
) -> list[PredictionJob]:
    """Return the predictions of a target to make, all of a network together.

    ``alignment_files`` are the names of the files of each chain's alignments, by chain, for the record.
    """
    samples = {seed: draw_samples(config.sample, target, alignments, seed) for seed in config.seeds}
    digest = target_digest(target, alignments, config)
    record = partial(
        run_record,
        target,
        alignments,
        config=config,
        digest=digest,
        device=str(device),
        alignment_files=alignment_files,
    )
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


def target_digest(target: Target, alignments: Sequence[ChainMsas], config: InferConfig) -> str:
    """Hash the inputs that all predictions of a target share: chains, alignments and further files."""
    chains: list[tuple[Any, ...]] = [(chain.id, chain.sequence, chain.letters) for chain in target.chains]
    if target.is_cut:
        chains += [chain.regions for chain in target.chains]
    if any(chain.indices for chain in target.chains):
        chains += [(chain.indices, chain.labels) for chain in target.chains]
    if any(chain.copy_of for chain in target.chains):
        chains += [(chain.copy_of,) for chain in target.chains]
    rows = [
        [[(m.sequences, m.deletions, m.descriptions, m.as_is) for m in group] for group in pair]
        for pair in alignments
    ]
    files = [path and file_digest(path) for path in (config.initial_guess, config.restraints)]
    if (structure := target.scored_structure) is not None:
        chains.append((structure.use, structure.shows_targets, file_digest(structure.path)))
    if target.has_forced_templates:
        forced = [[(t.threshold, t.positions, t.mask) for t in chain] for chain in target.forced_templates]
        chains.append(tuple(forced))
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
    alignment_files: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Return settings, versions and ``input_hash`` of everything that the results depend on, in JSON's types.

    The hash includes the ``digest`` of :func:`target_digest`. The device is only recorded, because results of other
    devices are equivalent, and so are ``alignment_files``. ``templates`` are those that the network uses, if any.
    """
    chains = {chain.id: chain.sequence for chain in target.chains}
    # Parts that were asked for, not residues that a structure lacks.
    parts = {chain.id: () if chain.indices else chain.regions for chain in target.chains}
    weights = {"model": network.name, "file": network.path.name, "sha256": network.digest}
    settings = {"seed": seed, **numeric_settings(config, network.info.config)}
    if sample is not None:
        settings["sample"] = sample.record
    if config.embed is not None:
        settings["embed"] = {"layer": config.embed.layer, "arrays": config.embed.names}
        settings["embed"] |= {"mean": config.embed.mean, "dtype": config.embed.dtype}
    more: dict[str, Any] = {}
    read: list[Any] = []  # arrays of templates, on which the results depend
    if templates is not None:
        more["templates"] = {one["chain"]: [used["name"] for used in one["used"]] for one in templates.report}
        if templates.number:
            names = (*TEMPLATE_LAYOUT, "template_frame")
            read.append(
                [
                    None if one is None else {name: one[name] for name in names if name in one}
                    for one in templates.features
                ]
            )
    if (structure := target.scored_structure) is not None:
        shown = {"use": structure.use, "shows_targets": structure.shows_targets}
        more["given_structure"] = {"file": structure.path.name, **shown}
    return {
        "schema_version": 2,
        "name": target.name,
        "source": Path(target.source).name,
        "record": target.record,
        "chains": chains,
        **({"chain_names": {chain.id: chain.record for chain in target.chains}} if target.is_complex else {}),
        **({"residue_ranges": parts} if any(parts.values()) else {}),
        "alignment_rows": [[sum(len(m.sequences) for m in group) for group in pair] for pair in alignments],
        **({} if alignment_files is None else {"alignment_files": alignment_files}),
        **more,
        "weights": weights | {"is_multimer": network.info.multimer},
        "settings": settings,
        "device": device,
        "versions": {
            "fastfold": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "input_hash": input_hash(digest, weights, settings, __version__, *read),
    }
