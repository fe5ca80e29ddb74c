"""What cannot be folded is refused before it waits, with the message of the fold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.config import MINI
from fastfold.inference.config import InferConfig
from fastfold.inference.models import open_networks
from fastfold.inference.request import InferRequest
from fastfold.products.serve.admission import Admission
from fastfold.products.serve.request import JobRequest
from fastfold.utils.units import GIB


@pytest.fixture(scope="module")
def admission() -> Admission:
    return Admission(open_networks([Path(MINI)]), request(), memory=GIB)


def request(weights: Sequence[Path] = (), **config: Any) -> InferRequest:
    return InferRequest((), Path(), weights, InferConfig(device="cpu", **config))


def check(admission: Admission, folder: Path, sequence: str, **more: Any) -> None:
    job = JobRequest("sequence", sequence, **more)
    job.write(folder)
    admission.check(job, job.target(), folder)


def test_a_target_that_does_not_fit_is_refused_with_the_plans_message(admission: Admission, tmp_path: Path):
    check(admission, tmp_path, "M" * 100)
    with pytest.raises(
        InputError, match=r"20,000 residues would need about .* enough for about [\d,]+ residues"
    ):
        check(admission, tmp_path, "M" * 20_000)
    budget = replace(admission, request=request(memory_budget=GIB // 4))
    with pytest.raises(InputError, match=r"a memory budget of 0\.25 GiB is too small for 3,000 residues"):
        check(budget, tmp_path, "M" * 3000)
    with pytest.raises(InputError, match="this server folds at most 50"):
        check(replace(admission, max_residues=50), tmp_path, "M" * 51)
    check(replace(admission, memory=None), tmp_path, "M" * 20_000)


def test_settings_and_inputs_that_contradict_the_networks_are_refused(admission: Admission, tmp_path: Path):
    with pytest.raises(ConfigError, match="num_recycles must be from 0 to 1000"):
        check(admission, tmp_path, "MKV", settings={"num_recycles": 2000})
    with pytest.raises(ConfigError, match="cluster profiles can be disabled for multimer networks only"):
        check(admission, tmp_path, "MKV", settings={"use_cluster_profile": False})
    with pytest.raises(
        InputError, match="complex of 2 chains, but this server folds single chains only"
    ) as refused:
        check(admission, tmp_path, "MKV:MKV")
    assert "weights" not in str(refused.value)  # which a user of the server cannot give
    chosen = replace(admission, request=request([Path(MINI)]))
    check(chosen, tmp_path, "MKV:MKV", settings={"cyclic": True})
    with pytest.raises(ConfigError, match="holds rings up to 200 residues, and chain A has 201"):
        check(chosen, tmp_path, f"{'M' * 201}:MKV", settings={"cyclic": True})
    with pytest.raises(ConfigError, match="mini does not use any"):
        check(admission, tmp_path, "MKV", templates={"1abc": "data_1ABC"})
