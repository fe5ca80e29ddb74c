"""The record that ships with the package is what this installation folds, and a wrong number is seen."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.inference.verify import RECORD, records, shipped, verify
from tests.helpers.command_line import CommandLine
from tests.helpers.command_line import cli as cli


def test_verify_without_a_folder_repeats_the_shipped_record(cli: CommandLine) -> None:
    done = cli.run("verify", "--device", "cpu")
    assert done.code == 0, done.out + done.err
    lines = done.out.splitlines()
    assert any(line.startswith("structure_module/final_atom_positions") for line in lines)
    assert lines[-1] == "6 of 6 outputs agree with the record of this release"


def test_an_installation_that_folds_otherwise_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with np.load(RECORD) as archive:
        folded = {name: archive[name] for name in archive.files}
    folded["structure_module/final_atom_positions"] += np.float32(0.02)
    monkeypatch.setattr(shipped, "fold_record", lambda device: folded)
    failed = [found.name for found in verify(RECORD) if not found.passed]
    assert failed == ["structure_module/final_atom_positions"]


def test_the_record_is_small() -> None:
    assert records.RECORD.stat().st_size < 300_000
