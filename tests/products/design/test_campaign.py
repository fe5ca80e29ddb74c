"""Campaigns: designs until enough are accepted, shared by processes, and statistics of trajectories."""

from __future__ import annotations

import csv
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock

from fastfold.errors import ConfigError
from fastfold.inference.config import InferConfig
from fastfold.inference.output.summary import score_table
from fastfold.products.design import DesignConfig, DesignRequest, hallucination, run_designs
from fastfold.products.design import run as run_module
from fastfold.products.design.optimize import DesignState
from fastfold.products.design.results.campaign import Campaign, Trajectory, all_rows
from fastfold.products.design.results.design import Design
from fastfold.products.design.results.refold import FoldedDesigns
from fastfold.products.design.results.statistics import STATISTIC_COLUMNS, statistic_rows
from fastfold.products.design.results.table import PASSED, failed_filters
from fastfold.products.design.tasks.task import DesignTask
from fastfold.products.design.trajectory import SequenceOptimizer

STEPS = DesignConfig(soft_steps=1, temperature_steps=0, hard_steps=0)


def row(name: str, filters: str, plddt: float = 50.0, folds: int = 1) -> dict[str, object]:
    return {"name": name, "filters": filters, "plddt": str(plddt), "folds": folds}


def test_records_are_shared_and_belong_to_their_settings(tmp_path: Path) -> None:
    campaign, other = (Campaign(tmp_path, "s", lambda seed: f"x-{seed}") for _ in range(2))
    campaign.add(
        Trajectory("a", "x-0", "s", "", [row("a", PASSED, 40.0), row("a_mpnn_1", "Average_pLDDT 0.5 < 0.8")])
    )
    campaign.add(Trajectory("b", "x-1", "s", "soft", [row("b", "", folds=0)]))
    assert other.find("a") == campaign.trajectories()[0]
    assert other.find("c") is None
    assert other.accepted == 1
    other.add(Trajectory("c", "x-2", "s", "", [row("c", PASSED, 60.0)]))
    assert campaign.accepted == 2
    assert [one["name"] for one in all_rows(campaign.trajectories())] == ["c", "b", "a", "a_mpnn_1"]
    (tmp_path / ".fastfold" / "designs" / "d.json").write_text('{"name": "d"}')
    campaign.add(Trajectory("e", "of an earlier version", "s", "", []))
    assert len(campaign.trajectories()) == 3
    for settings, identity in (("t", "x"), ("s", "y")):
        changed = Campaign(tmp_path, settings, f"{identity}-{{}}".format)
        assert (changed.find("a"), changed.accepted) == (None, 0)


def test_a_trajectory_of_another_process_is_left_alone(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, "s", str)
    with FileLock(tmp_path / ".fastfold" / "a.lock"), campaign.claimed("a") as is_own:
        assert not is_own
    with campaign.claimed("a") as is_own:
        assert is_own
    assert not (tmp_path / ".fastfold" / "a.lock").exists()


def test_statistics_count_trajectories_sequences_and_filters() -> None:
    failed = "Average_pLDDT 0.5 < 0.8; target 2: 2_i_pAE 0.6 > 0.35; not iptm>0.6"
    assert failed_filters(failed) == {"Average_pLDDT", "2_i_pAE", "not iptm>0.6"}
    rows = [
        row("a", PASSED),
        row("a_mpnn_1", failed),
        row("b", "Average_pLDDT 0.5 < 0.8"),
        row("c", "", 0, 0),
    ]
    counted = {
        (one["kind"], one["name"]): (one["count"], one["of"])
        for one in statistic_rows(["", "", "soft"], rows)
    }
    assert counted == {
        ("trajectory", "finished"): (3, 3),
        ("trajectory", "given up after soft"): (1, 3),
        ("trajectory", "folded"): (2, 3),
        ("sequence", "folded"): (3, 3),
        ("sequence", "accepted"): (1, 3),
        ("filter", "Average_pLDDT"): (1, 3),
        ("filter", "2_i_pAE"): (2, 3),
        ("filter", "not iptm>0.6"): (2, 3),
    }
    assert (
        score_table(STATISTIC_COLUMNS, statistic_rows([], [])).splitlines()[0]
        == "kind\tname\tcount\tof\tshare"
    )


class _Designer:
    """Designs of chosen sequences, of which those of seed 1 are given up after the soft stage."""

    digests = ("digest",)

    def __init__(self, *_: object, say: object, **__: object) -> None:
        self.seeds: list[int] = []

    def evaluator(self, task: DesignTask) -> None: ...

    def leave(self) -> None: ...

    def design(self, task: DesignTask, seed: int, folder: Path) -> Design:
        empty, log = torch.zeros(0), [{"stage": "soft", "given_up": seed == 1}]
        state = DesignState(empty, empty, empty, np.zeros(0), np.zeros(0), step=1, log=log)
        return Design(f"{task.name}_seed_{seed:03d}", task, "ACDEFGHIKL"[seed] * 10, state)


@pytest.mark.parametrize(
    ("until", "busy", "designed", "accepted"),
    [(2, None, 4, 2), (3, 2, 6, 2), (9, None, 6, 3), (1, None, 3, 1)],
)
def test_a_campaign_ends_with_enough_accepted_designs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    until: int,
    busy: int | None,
    designed: int,
    accepted: int,
) -> None:
    """Seeds 2, 3 and 5 pass, seed 1 is given up, and another process may work on one."""
    passing = {2, 3, 5}
    folded: list[list[str]] = []

    def rows(designs: list[Design], *_: object) -> list[dict[str, object]]:
        seeds = [int(one.name[-3:]) for one in designs]
        verdicts = [PASSED if seed in passing else "plddt 1 < 2" for seed in seeds]
        return [
            row(one.name, verdict, seed) for one, verdict, seed in zip(designs, verdicts, seeds, strict=True)
        ]

    def fold(designs: list[Design], *_: object, **__: object) -> FoldedDesigns:
        folded.append([one.name for one in designs])
        failed = [(designs[0].name, "it failed")] if designs[0].name.endswith("4") else []
        return FoldedDesigns([], failed)

    monkeypatch.setattr(run_module, "SequenceOptimizer", _Designer)
    monkeypatch.setattr(run_module, "fold_designs", fold)
    monkeypatch.setattr(run_module, "design_rows", rows)
    monkeypatch.setattr(run_module, "write_report", lambda *_, **__: None)
    lines: list[str] = []
    request = DesignRequest(
        hallucination(10), tmp_path, config=STEPS, seeds=range(6), condition="plddt>0", until=until
    )
    names = [f"hallucinate_seed_{seed:03d}" for seed in range(6)]
    (tmp_path / ".fastfold").mkdir()
    with FileLock(tmp_path / ".fastfold" / f"{names[busy or 0]}.lock") if busy else nullcontext():
        made = run_designs(request, say=lines.append)
    own = [name for seed, name in enumerate(names[:designed]) if seed != busy]
    assert [one.name for one in made] == own
    assert folded == [[name] for name in own if name != names[1]]
    assert (tmp_path / "designs.fasta").read_text() == "".join(
        f">{name}\n{'ACDEFGHIKL'[names.index(name)] * 10}\n" for name in own if name != names[1]
    )
    with (tmp_path / run_module.TABLE).open(newline="") as file:
        table = list(csv.DictReader(file, delimiter="\t"))
    assert {one["name"] for one in table} == set(own)
    assert sum(one["filters"] == PASSED for one in table) == accepted
    told = "\n".join(lines)
    assert f"{accepted} of {len(own)} designs pass the filters" in told
    assert f"{min(accepted, 1)} of {until} accepted, {names[2]} with 1" in told or busy == 2
    assert ("hallucinate_seed_004: it failed" in told) == (names[4] in own)
    assert (f"{accepted} of {until} accepted after {len(own)} trajectories" in told) == (accepted < until)
    with (tmp_path / "statistics.tsv").open(newline="") as file:
        counts = {one["name"]: one["count"] for one in csv.DictReader(file, delimiter="\t")}
    assert (counts["given up after soft"], counts["finished"]) == ("1", str(len(own)))
    # A process on another device, with other memory, counts the same trajectories.
    other = replace(request, infer=InferConfig(device="cpu", memory_budget="8GiB", host_memory="1GiB"))
    again = run_designs(other, say=lambda line: None)
    assert [one.name for one in again] == ([names[2]] if busy and accepted < until else [])
    # Trajectories of another design do not count.
    rings = run_designs(replace(request, task=hallucination(10, cyclic=True), until=1), say=lambda line: None)
    assert [one.name for one in rings] == names[:3]


@pytest.mark.long
def test_designs_are_made_until_enough_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    design = SequenceOptimizer.design

    def counted(self: SequenceOptimizer, task: object, seed: int, folder: Path) -> object:
        made.append(seed)
        return design(self, task, seed, folder)  # type: ignore[arg-type]

    monkeypatch.setattr(SequenceOptimizer, "design", counted)
    lines: list[str] = []

    def run(until: int, condition: str = "plddt>0", seeds: int = 5) -> list[str]:
        request = DesignRequest(
            hallucination(10), tmp_path, config=STEPS, infer=InferConfig(num_recycles=0), seeds=range(seeds),
            condition=condition, until=until,
        )  # fmt: skip
        return [one.name for one in run_designs(request, say=lines.append)]

    def table(name: str) -> list[dict[str, str]]:
        with (tmp_path / name).open(newline="") as file:
            return list(csv.DictReader(file, delimiter="\t"))

    with monkeypatch.context() as patched:
        reads: list[Campaign] = []
        trajectories = Campaign.trajectories

        def recorded(self: Campaign) -> list[Trajectory]:
            reads.append(self)
            return trajectories(self)

        patched.setattr(Campaign, "trajectories", recorded)
        assert run(2) == ["hallucinate_seed_000", "hallucinate_seed_001"]
        assert len(reads) == 4, "records are read at the start, once for each trajectory, and for the tables"
    assert run(2) == []
    with FileLock(tmp_path / ".fastfold" / "hallucinate_seed_002.lock"):
        assert run(3) == ["hallucinate_seed_003"]
    assert made == [0, 1, 3]
    rows = table(run_module.TABLE)
    assert {one["name"] for one in rows} == {f"hallucinate_seed_00{seed}" for seed in (0, 1, 3)}
    assert all(one["filters"] == PASSED for one in rows)
    assert (tmp_path / "designs.fasta").read_text().count(">") == 3
    assert (tmp_path / "report.html").exists()
    best = max(float(one["plddt"]) for one in rows)
    run(1, condition=f"plddt>{best}", seeds=4)
    counted_rows = {(one["kind"], one["name"]): one["count"] for one in table("statistics.tsv")}
    assert counted_rows["trajectory", "finished"] == "4"
    assert counted_rows["sequence", "accepted"] in ("0", "1")
    assert int(counted_rows["filter", f"not plddt>{best}"]) == int(counted_rows["sequence", "accepted"])
    if counted_rows["sequence", "accepted"] == "0":
        assert "0 of 1 accepted after 4 trajectories" in lines[-1]


def test_a_campaign_needs_filters(tmp_path: Path) -> None:
    for settings in ({"until": 2}, {"until": 0, "condition": "plddt>0"}):
        request = DesignRequest(hallucination(10), tmp_path, **settings)  # type: ignore[arg-type]
        with pytest.raises(
            ConfigError, match="until=: expected a number from 1 with filters= or a condition"
        ):
            run_designs(request, say=lambda line: None)
