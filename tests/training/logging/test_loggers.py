"""Loggers: what is written can be read, resuming leaves no step twice, and failures do not spread."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from fastfold.errors import InputError, OutputError
from fastfold.training.logging import loggers
from fastfold.training.logging.loggers import (
    CsvLogger,
    JsonLinesLogger,
    Logger,
    LoggerGroup,
    TensorBoardLogger,
    read_json_lines,
)
from fastfold.training.logging.tensorboard import (
    crc32c,
    read_steps,
    record,
    scalar_event,
    text_event,
    version_event,
)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def tensorboard_steps(directory: Path) -> list[int]:
    """Steps of all entries, the files' own first records left out."""
    steps = []
    for path in sorted(directory.iterdir()):
        found = list(read_steps(path.read_bytes()))
        assert found[-1] == (path.stat().st_size, -1), "the file ends in a damaged record"
        steps += [step for _, step in found[:-1] if step]
    return steps


def steps_of(kind: str, path: Path) -> list[int]:
    if kind == "jsonl":
        return [entry["step"] for entry in read_json_lines(path)]
    return [int(row["step"]) for row in table(path)] if kind == "csv" else tensorboard_steps(path)


def make(kind: str, path: Path) -> Logger:
    makers: dict[str, Any] = {"jsonl": JsonLinesLogger, "csv": CsvLogger, "tensorboard": TensorBoardLogger}
    return makers[kind](path)


KINDS = pytest.mark.parametrize("kind", ["jsonl", "csv", "tensorboard"])


@KINDS
def test_resumed_curves_have_no_step_twice(kind, tmp_path):
    """Also where the killed run left its last entry half written."""
    path = tmp_path / kind
    first = make(kind, path)
    first.resume_from(1)
    for step in range(1, 8):
        first.log(step, {"loss": 1.0 / step})
    file = path if path.is_file() else next(path.iterdir())
    with file.open("ab") as torn:
        torn.write(file.read_bytes()[-9:-2])
    second = make(kind, path)
    second.resume_from(5)
    for step in range(5, 10):
        second.log(step, {"loss": 2.0, "lddt": 0.5})
    second.close()
    assert steps_of(kind, path) == list(range(1, 10))


@KINDS
def test_new_run_in_an_old_folder_starts_empty(kind, tmp_path):
    path = tmp_path / kind
    old = make(kind, path)
    old.log(1, {"loss": 1.0})
    old.log(2, {"loss": 1.0})
    new = make(kind, path)
    new.resume_from(1)
    new.log(1, {"other": 2.0})
    assert steps_of(kind, path) == [1]
    if kind == "csv":
        assert list(table(path)[0]) == ["step", "other"]


@KINDS
def test_entries_can_be_read_before_the_run_ends(kind, tmp_path):
    logger = make(kind, tmp_path / kind)
    logger.log(3, {"loss": 1.0})
    assert steps_of(kind, tmp_path / kind) == [3]


@KINDS
def test_names_that_entries_use_themselves_are_refused(kind, tmp_path):
    with pytest.raises(ValueError, match="'step'"):
        make(kind, tmp_path / kind).log(1, {"step": 1.0})


@KINDS
def test_full_disk_is_an_output_error_that_names_the_file(kind, tmp_path, monkeypatch):
    """And leaves the file as it was: the next entry is whole again."""
    path = tmp_path / kind
    logger = make(kind, path)
    logger.log(1, {"loss": 1.0})
    real = open

    class Full:
        """A file on a disk with room for five bytes."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: bytes) -> int:
            return self.file.write(data[:5])

    monkeypatch.setattr(loggers, "open", lambda *a, **k: Full(real(*a, **k)), raising=False)
    with pytest.raises(OutputError, match=kind):
        logger.log(2, {"loss": 1.0})
    monkeypatch.undo()
    logger.log(3, {"loss": 1.0})
    assert steps_of(kind, path) == [1, 3]


def test_json_lines_hold_numbers_and_events(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logger = JsonLinesLogger(path)
    logger.log(10, {"loss": 0.5, "valid/lddt_ca": 0.25})
    logger.event(11, "step 11 skipped:\nloss of ü")
    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert {k: first[k] for k in ("step", "loss", "valid/lddt_ca")} == {
        "step": 10,
        "loss": 0.5,
        "valid/lddt_ca": 0.25,
    }
    assert (second["step"], second["event"]) == (11, "step 11 skipped:\nloss of ü")
    assert read_json_lines(path) == [first, second]


def test_json_lines_are_json_without_numbers_too(tmp_path):
    """NaN is not JSON."""
    path = tmp_path / "metrics.jsonl"
    JsonLinesLogger(path).log(1, {"a": math.nan, "b": math.inf, "c": 1.0})
    entry = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert [entry[key] for key in "abc"] == [None, None, 1.0]


def test_json_lines_that_are_damaged_in_the_middle_name_the_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n[1]\n{"step": 2}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl:2"):
        read_json_lines(path)


def test_csv_grows_columns_and_keeps_rows(tmp_path):
    path = tmp_path / "metrics.csv"
    logger = CsvLogger(path)
    logger.log(1, {"loss": 1.0})
    logger.log(2, {"lddt, all": 0.5})
    logger.event(2, "nothing")
    again = CsvLogger(path)
    again.log(3, {"loss": 0.1})
    assert table(path) == [
        {"step": "1", "loss": "1.0", "lddt, all": ""},
        {"step": "2", "loss": "", "lddt, all": "0.5"},
        {"step": "3", "loss": "0.1", "lddt, all": ""},
    ]


def test_csv_has_a_new_column_all_at_once(tmp_path, monkeypatch):
    """A run killed while the header is rewritten leaves the old table."""
    path = tmp_path / "metrics.csv"
    logger = CsvLogger(path)
    logger.log(1, {"loss": 1.0})
    before = path.read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        logger.log(2, {"lddt": 1.0})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.csv"]


def test_csv_has_a_new_column_although_it_could_not_be_written_at_first(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    logger = CsvLogger(path)
    logger.log(1, {"loss": 1.0})
    with monkeypatch.context() as full:
        full.setattr("fastfold.training.logging.loggers.write_atomic", _disk_is_full)
        with pytest.raises(OSError, match="full"):
            logger.log(2, {"loss": 0.5, "lddt": 0.1})
    logger.log(3, {"loss": 0.2, "lddt": 0.3})
    assert table(path) == [
        {"step": "1", "loss": "1.0", "lddt": ""},
        {"step": "3", "loss": "0.2", "lddt": "0.3"},
    ]


def _disk_is_full(*_: object) -> None:
    raise OSError("the disk is full")


def test_event_file_equals_tensorboards_own_byte_by_byte():
    """Recorded from ``tensorboard`` 2.21 (``RecordWriter`` and its protocol buffers)."""
    expected = (
        "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c"
        "2100000000000000017becf609000000000000044010ac022a130a110a0a747261696e2f6c6f7373150000803e3cc9cac5"
    )
    got = record(version_event(1.5)) + record(scalar_event(2.5, 300, {"train/loss": 0.25}))
    assert got.hex() == expected


def test_text_event_holds_the_summary_that_pytorch_writes():
    """Recorded from ``torch.utils.tensorboard.summary.text("event", "skipped")``."""
    summary = (
        "0a310a126576656e742f746578745f73756d6d617279"
        "421108071204120208014207736b69707065644a080a060a0474657874"
    )
    got = text_event(2.5, 1, "event/text_summary", "skipped")
    assert got == b"\x09" + struct.pack("<d", 2.5) + b"\x10\x01\x2a\x33" + bytes.fromhex(summary)


def test_checksum_is_crc32c():
    assert crc32c(b"123456789") == 0xE3069283


def test_event_files_steps_are_read_up_to_the_damage():
    records = [record(scalar_event(0.0, step, {"a": 1.0})) for step in (1, 127, 128, 1 << 40)]
    offsets = [sum(map(len, records[:i])) for i in range(5)]
    whole = b"".join(records)
    assert list(read_steps(whole)) == list(zip(offsets, [1, 127, 128, 1 << 40, -1], strict=True))
    damaged = bytearray(whole)
    damaged[offsets[2] + 14] ^= 1
    assert list(read_steps(bytes(damaged))) == [(0, 1), (offsets[1], 127), (offsets[2], -1)]


def test_numbers_beyond_float32_are_infinite_in_tensorboard():
    assert struct.pack("<f", -math.inf) in scalar_event(0.0, 1, {"a": -1e300})


class Broken:
    """A logger whose disk is full."""

    def _fail(self, *_: object) -> None:
        raise OutputError("cannot write 'x'")

    log = event = resume_from = close = _fail


def test_failing_logger_is_reported_once_and_stops_no_other(tmp_path):
    reports: list[str] = []
    group = LoggerGroup([Broken(), JsonLinesLogger(tmp_path / "m.jsonl")], reports.append)
    for step in (1, 2, 3):
        group.log(step, {"loss": 1.0})
    group.event(3, "text")
    group.close()
    assert len(read_json_lines(tmp_path / "m.jsonl")) == 4
    assert len(reports) == 1
    assert "cannot write 'x'" in reports[0]


def test_mistakes_of_the_program_are_not_swallowed(tmp_path):
    group = LoggerGroup([JsonLinesLogger(tmp_path / "m.jsonl")], pytest.fail)
    with pytest.raises(ValueError, match="'time'"):
        group.log(1, {"time": 1.0})


def test_unwritable_folder_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=os.strerror(errno.ENOTDIR)):
        JsonLinesLogger(tmp_path / "file" / "m.jsonl").resume_from(1)
