"""Every protocol with the small network that ships."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fastfold.inference.config import InferConfig
from fastfold.products.design import (
    DesignConfig,
    DesignRequest,
    binder,
    fixed_backbone,
    hallucination,
    partial,
    run_designs,
)

STEPS = DesignConfig(soft_steps=1, temperature_steps=1, hard_steps=1, mutation_steps=1, tries=1)


def test_a_design_that_is_given_up_is_listed_with_its_reason_and_not_folded(tmp_path: Path) -> None:
    steps = DesignConfig(soft_steps=1, temperature_steps=1, hard_steps=1, give_up_below=100.0)
    lines: list[str] = []
    (design,) = run_designs(DesignRequest(hallucination(10), tmp_path, config=steps), say=lines.append)
    (row,) = csv.DictReader((tmp_path / "designs.tsv").read_text().splitlines(), delimiter="\t")
    assert design.is_given_up
    assert (
        lines[-1]
        == f"{design.name}: given up after step 1: pLDDT {design.state.log[-1]['designed_plddt']:.1f}"
    )
    assert (row["folds"], row["note"]) == ("0", "given up after step 1")
    assert (tmp_path / "designs.fasta").read_text() == ""
    assert not (tmp_path / "report.html").exists()


@pytest.mark.long
@pytest.mark.parametrize("protocol", ["oligomer", "fixbb", "partial", "binder"])
def test_mini_runs_a_protocol(protocol: str, tmp_path: Path, backbone: Path) -> None:
    task = {
        "oligomer": lambda: hallucination(10, copies=2),
        "fixbb": lambda: fixed_backbone(backbone, chain="A"),
        "partial": lambda: partial(backbone, "A3-7", chain="A"),
        "binder": lambda: binder(backbone, 10, chains=["A"], hotspots="A4"),
    }[protocol]()
    lines: list[str] = []
    request = DesignRequest(task, tmp_path / "out", config=STEPS, infer=InferConfig(num_recycles=0))
    (design,) = run_designs(request, say=lines.append)
    is_complex = protocol in ("oligomer", "binder")
    assert sum(line.startswith("warning: a trial: mini sees several chains") for line in lines) == is_complex
    assert design.state.step == 4
    assert "".join(design.sequences[:1]).isalpha()
    assert (tmp_path / "out" / "report.html").exists()
    assert design.task.flexible == ("free" if protocol == "binder" else "none")
