"""Jobs of a request: notes, warnings, and the order of targets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastfold
from fastfold.data.targets import Target, target_from_sequence
from fastfold.data.templates.whole.given import GivenStructure
from fastfold.errors import ConfigError, FastFoldError, InputError
from fastfold.inference import prepare as prepare_module
from fastfold.inference.config import InferConfig
from fastfold.inference.embedding.config import EmbedConfig
from fastfold.inference.models import requested_networks
from fastfold.inference.prepare import WITHOUT_ALIGNMENT, choose_seeds, prepare, with_precision
from fastfold.inference.request import InferRequest, RunOptions

CPU = torch.device("cpu")
TARGETS = [
    target_from_sequence(text, name) for name, text in (("long", "MKVLA"), ("short", "MK"), ("both", "MKV:A"))
]


def _request(*targets: Target, **changes: Any) -> InferRequest:
    return InferRequest(lambda: (list(targets), []), Path("out"), **changes)


def test_notes_tell_what_was_chosen(tmp_path: Path) -> None:
    """The network that ships, missing alignments, and a precision if it was measured."""
    job = prepare(_request(TARGETS[0]), CPU)
    assert len(job.notes) == 2
    assert "using the small network that ships" in job.notes[0]
    assert job.notes[1] == WITHOUT_ALIGNMENT
    given = prepare(_request(TARGETS[0], weights=(Path("mini"),)), CPU)
    assert given.notes == [WITHOUT_ALIGNMENT]
    assert given.request.config.precision == "fp32"
    searched = RunOptions(msa_dir=tmp_path)
    assert prepare(_request(TARGETS[0], weights=(Path("mini"),), options=searched), CPU).notes == []
    chosen = prepare(_request(TARGETS[0], weights=(Path("mini"),), config=InferConfig(precision="auto")), CPU)
    assert chosen.notes[0] == WITHOUT_ALIGNMENT
    assert chosen.notes[1].startswith("precision ")


def test_targets_are_numbered_and_then_sorted_by_length() -> None:
    mini = requested_networks(())
    weights = (Path("mini"),)
    plain = prepare(_request(*TARGETS, weights=weights), CPU, mini)
    assert [one.name for one in plain.targets] == ["long", "short", "both"]
    by_length = prepare(_request(*TARGETS, weights=weights, options=RunOptions(sort="length")), CPU, mini)
    assert [one.name for one in by_length.targets] == ["short", "both", "long"]
    both = RunOptions(sort="length", name_prefix="p")
    numbered = prepare(_request(*TARGETS, weights=weights, options=both), CPU, mini)
    assert [(one.name, one.num_residues) for one in numbered.targets] == [("p_1", 2), ("p_2", 4), ("p_0", 5)]


def test_complexes_need_a_network_for_them() -> None:
    """Without chosen weights they are refused, with some they get a warning, and a screen refuses them."""
    job = prepare(_request(*TARGETS), CPU)
    assert [one.name for one in job.targets] == ["long", "short"]
    assert len(job.errors) == 1
    chosen = prepare(_request(*TARGETS, weights=(Path("mini"),)), CPU)
    (warning,) = chosen.warnings
    assert warning == "warning: mini was trained on single chains only: complexes get no interface scores"
    assert prepare(_request(TARGETS[0], weights=(Path("mini"),)), CPU).warnings == []
    with pytest.raises(ConfigError):
        prepare(_request(*TARGETS, weights=(Path("mini"),)), CPU, is_screen=True)


def test_chains_without_atoms_are_refused_before_a_fold() -> None:
    """Embeddings take them, and so do structures that are scored."""
    unknown = target_from_sequence("XBZX", "unknown")
    dimer = target_from_sequence("MK:XX:A", "dimer")
    scored = replace(dimer, scored_structure=GivenStructure(Path("dimer.pdb"), "template"))
    request = _request(TARGETS[0], unknown, dimer, scored, weights=(Path("mini"),))
    job = prepare(request, CPU)
    assert job.targets == [TARGETS[0], scored]
    assert [str(error) for error in job.errors] == [
        "unknown: the sequence has only unknown residues (X), whose atoms cannot be predicted; give at least one "
        "of the twenty amino acids",
        "dimer: chain B has only unknown residues (X), whose atoms cannot be predicted; give at least one of the "
        "twenty amino acids, or leave the chain out",
    ]
    embedded = prepare(replace(request, config=InferConfig(embed=EmbedConfig())), CPU)
    assert embedded.errors == []
    with pytest.raises(InputError, match="query: the sequence has only unknown residues"):
        fastfold.predict("XXXX", "mini")


def test_networks_that_cannot_be_read_are_left_out_with_a_warning(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes(b"nothing")
    request = _request(TARGETS[0], weights=(Path("mini"), damaged), options=RunOptions(skip_bad_weights=True))
    job = prepare(request, CPU)
    assert [network.name for network in job.networks] == ["mini"]
    (warning,) = job.warnings
    assert warning.startswith("warning: left out: ")
    assert "damaged.npz" in warning
    with pytest.raises(FastFoldError, match=r"damaged\.npz"):
        prepare(replace(request, options=RunOptions()), CPU)


@pytest.mark.parametrize(
    ("has_seeds", "seeds", "warns"), [(False, (0,), False), (True, (0,), True), (False, (5,), True)]
)
def test_seeds_of_an_input_give_way_to_those_of_a_request(
    has_seeds: bool, seeds: tuple[int, ...], warns: bool
) -> None:
    target = replace(TARGETS[0], seeds=(3, 4))
    found = choose_seeds(target, _request(target, has_seeds=has_seeds, config=InferConfig(seeds=seeds)))
    assert found.seeds == (() if warns else (3, 4))
    assert (len(found.warnings) - len(target.warnings) == 1) is warns
    assert choose_seeds(TARGETS[0], _request(has_seeds=True)) is TARGETS[0]


def test_precisions_of_devices_and_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []

    def choose(name: str, device: torch.device) -> tuple[str, str]:
        chosen.append(name)
        return ("bf16" if name == "auto" else name), "why"

    monkeypatch.setattr(prepare_module, "choose_precision", choose)

    def found(
        precision: str | None, device: str | None, parallel: str | None = None
    ) -> tuple[str | None, str]:
        config = InferConfig(precision=precision, parallel=parallel)  # type: ignore[arg-type]
        config, line = with_precision(config, None if device is None else torch.device(device))
        return config.precision, line

    assert found(None, "cuda") == ("bf16", "precision bf16: why")
    assert found(None, "cpu") == ("fp32", "")
    assert found("auto", "cpu") == ("bf16", "precision bf16: why")
    assert found("bf16", "cuda") == ("bf16", "")
    assert chosen == ["auto", "fp32", "auto", "bf16"]
    assert (found(None, None), found("bf16", None)) == (("fp32", ""), ("bf16", ""))
    with pytest.raises(ConfigError, match="the machines of a cluster may differ"):
        found("auto", None)
    with pytest.raises(ConfigError, match="several processes fold in fp32 or bf16, not in int8"):
        found("int8", "cpu", "dap=2")
    assert found("int8", "cpu", "dap=1") == ("int8", "")
