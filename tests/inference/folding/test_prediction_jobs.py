"""A target has a prediction per network, seed and sample, with the files that the settings ask for."""

from __future__ import annotations

import torch

from fastfold.data.targets import target_from_sequence
from fastfold.inference.config import InferConfig
from fastfold.inference.embedding.config import EmbedConfig
from fastfold.inference.folding.prediction_jobs import prediction_jobs
from fastfold.inference.models import requested_networks
from fastfold.inference.sampling.settings import Sampling

TARGET = target_from_sequence("MKVLAAGIT")


def test_each_seed_and_sample_of_a_network_is_a_prediction_of_its_own() -> None:
    config = InferConfig(seeds=(0, 3), sample=Sampling("dropout", number=2), plots=False)
    jobs = prediction_jobs(
        TARGET,
        [([], [])],
        networks=requested_networks([]),
        templates=None,
        config=config,
        device=torch.device("cpu"),
    )
    assert [job.seed for job in jobs] == [0, 0, 3, 3]
    assert len({job.id for job in jobs}) == 4
    assert all(job.label.startswith(f"seed {job.seed} ") for job in jobs)
    wanted = jobs[0].wanted(TARGET, config, "colabfold")
    assert wanted == {".cif", "_scores.json", "_config.json", "_pae.json", "_colabfold.json"}
    embedding = jobs[0].wanted(TARGET, InferConfig(embed=EmbedConfig()), "embeddings")
    assert embedding == {".safetensors", "_config.json"}
