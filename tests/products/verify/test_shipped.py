"""The record that ships with the package is what this installation folds, and a wrong number is seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastfold.evoformer.precision import about_missing_units
from fastfold.products.verify import RECORD, records, verify
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
    monkeypatch.setattr(records, "fold_record", lambda device, precision: folded)
    failed = [found.name for found in verify(RECORD) if not found.passed]
    assert failed == ["structure_module/final_atom_positions"]


@pytest.mark.parametrize("precision", ["bf16", "bf16-products"])
def test_a_precision_is_asked_for_and_judged_by_its_own_tolerance(cli: CommandLine, precision: str) -> None:
    done = cli.run("verify", "--device", "cpu", "--precision", precision)
    *warnings, first = done.out.partition(f" on cpu in {precision}\n")[0].splitlines()
    warning = about_missing_units(precision, torch.device("cpu"))
    assert (warnings, first) == ([warning] if warning else [], str(RECORD))
    lines = done.out.splitlines()[len(warnings) :]
    assert lines[-1] == "6 of 6 outputs agree with the record of this release"
    errors = [float(line.split()[1]) for line in lines[2:-1]]
    # Float32 is within 1e-4, also where products lack units.
    assert max(errors) < 1e-4 if warning and precision != "bf16" else max(errors) > 1e-3


def test_a_precision_that_a_device_lacks_is_refused(cli: CommandLine) -> None:
    done = cli.run("verify", "--device", "cpu", "--precision", "fp8")
    assert done.code == 2


def test_the_record_is_small() -> None:
    assert records.RECORD.stat().st_size < 300_000
