"""What cannot be folded is refused before it waits, with the message of the fold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.config import MINI
from fastfold.inference.config import InferConfig
from fastfold.inference.models import open_networks
from fastfold.inference.request import InferRequest
from fastfold.products.serve import admission as module
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
    check(replace(admission, max_residues=50), tmp_path, "M" * 50)
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


@pytest.mark.parametrize("relax", ["none", "best"])
@pytest.mark.parametrize("budget", [None, 3 * GIB])
@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize(
    ("sequence", "multimers", "joined"),
    [
        ("MKV", (False,), False),
        ("MKV:MK", (False,), True),
        ("MKV:MK", (True, False), True),
        ("MKV:MK", (True, True), False),
    ],
)
def test_a_job_is_planned_as_each_of_its_networks_folds_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    relax: Any,
    budget: int | None,
    shows: bool,
    sequence: str,
    multimers: tuple[bool, ...],
    joined: bool,
) -> None:
    """Parameters are bytes, rows those of the alignment, and templates those that a network takes."""
    networks: Any = [
        SimpleNamespace(name=str(k), info=SimpleNamespace(config=f"c{k}", multimer=one, parameters=10 + k))
        for k, one in enumerate(multimers)
    ]
    calls: dict[str, list[Any]] = {name: [] for name in ("installed", "rings", "planner", "fit", "plan")}
    for name, function in {
        "limit_networks": lambda networks, number: networks,
        "suitable": lambda networks, target: networks,
        "check_settings": lambda config, networks: None,
        "check_takers": lambda templates, networks: None,
        "check_installed": lambda: calls["installed"].append(1),
        "check_rings": lambda target, rings, *, is_joined: calls["rings"].append(is_joined),
        "open_templates": lambda templates: templates if shows else None,
        "apply_settings": lambda config, network: f"applied {network}",
        "takes_templates": lambda network, target: network == "c0",
        "Planner": lambda *arguments, **more: (
            calls["planner"].append((*arguments, more)) or len(calls["planner"])
        ),
        "check_fit": lambda *arguments, **more: calls["fit"].append(arguments),
        "plan_target": lambda *arguments, **more: calls["plan"].append(arguments),
    }.items():
        monkeypatch.setattr(module, name, function)
    own = request([Path("w")], relax=relax, memory_budget=budget, cuda_graphs=True, precision="bf16")
    admission = Admission(networks, own, "cuda", memory=8 * GIB, host_memory=5)
    check(admission, tmp_path, sequence)
    residues = len(sequence.replace(":", ""))
    shown = own.options.templates.max_templates if shows else 0
    more = [
        {
            "host_memory": 5,
            "parameters": (10 + k) * 2,
            "cuda_graph": True,
            "rows": 0,
            "templates": 0 if k else shown,
        }
        for k in range(len(networks))
    ]
    assert calls["planner"] == [(f"applied c{k}", 2, "cuda", one) for k, one in enumerate(more)]
    assert calls["fit"] == [(k, residues, budget, 8 * GIB) for k in range(1, len(networks) + 1)]
    assert calls["plan"] == ([(k, residues, budget) for k in range(1, len(networks) + 1)] if budget else [])
    assert calls["installed"] == [1] * (relax != "none")
    assert calls["rings"] == [joined]


def test_rows_of_a_job_are_those_of_all_its_alignments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(module, "Planner", lambda *_, rows, **more: seen.append(rows))
    monkeypatch.setattr(module, "check_fit", lambda *_, **more: None)
    admission = Admission(open_networks([Path(MINI)]), request(), memory=GIB)
    job = JobRequest("a3m", ">q\nMKV\n>r\nMRV\n>s\nM-V\n")
    job.write(tmp_path)
    admission.check(job, job.target(), tmp_path)
    check(admission, tmp_path, "MKV")
    assert seen == [3, 0]
