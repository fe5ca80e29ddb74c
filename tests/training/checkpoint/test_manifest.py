"""What a checkpoint says of itself comes back, or is refused."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from fastfold.training.checkpoint.contents import FileRecord, Manifest, ManifestError

FILES = {"a.safetensors": FileRecord(12, "0" * 64)}


def test_it_comes_back():
    state = {"progress": {"step": 3, "seconds": 0.1, "bad_samples": [(1, "x")]}, "loaders": [{"next": 7}]}
    read = Manifest.from_json(Manifest(3, FILES, state).to_json())
    assert (read.step, read.files) == (3, FILES)
    assert read.state == {**state, "progress": {"step": 3, "seconds": 0.1, "bad_samples": [[1, "x"]]}}


def test_no_flipped_bit_is_missed():
    text = Manifest(3, FILES, {"seconds": 0.25, "name": "x"}).to_json()
    for at in range(len(text)):
        for bit in range(8):
            flipped = text[:at] + bytes([text[at] ^ (1 << bit)]) + text[at + 1 :]
            try:
                read = Manifest.from_json(flipped)
            except ManifestError:
                continue
            # White space may change, and letters of a number such as 1e5.
            assert read == Manifest(3, FILES, {"seconds": 0.25, "name": "x"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "cannot be read"),
        (b"[]", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b'{"format": 1, "step": 1, "files": {"a": "?"}, "state": {}}', "cannot be read"),
        (b'{"format": 2, "step": 1, "files": {}, "state": {}}', "was changed"),
        (b'{"format": 3, "step": 1, "files": {}, "state": {}}', "expected format 1 or 2, found 3"),
    ],
)
def test_what_is_no_manifest_is_refused(text: bytes, problem: str):
    with pytest.raises(ManifestError, match=problem):
        Manifest.from_json(text)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "a\\b", ".", "..", "", "a\n", "ä"])
def test_a_name_that_leaves_the_folder_is_refused(name: str):
    with pytest.raises(ManifestError, match="names the file"):
        Manifest.from_json(Manifest(3, {name: FileRecord(1, "0" * 64)}, {}).to_json())


def _refused(number: int) -> int:
    """Read mutated manifests and return how many were refused."""
    rng, refused = random.Random(0), 0
    pieces = ["../", "/", "1e999", "Infinity", "-1", "[" * 2000, "9" * 5000, "\\ud800", "null", '"', "}"]
    for _ in range(number):
        text = '{"format": 1, "step": 3, "files": {"a.safetensors": 12, "b": 7}, "state": {"seconds": 0.5}}'
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(pieces) + text[at + rng.choice((0, 1, 1, 5)) :]
        begin = time.monotonic()
        try:
            names = Manifest.from_json(text.encode()).files
        except ManifestError:
            refused += 1
        else:
            assert all(Path("/checkpoint", name).resolve().parent == Path("/checkpoint") for name in names)
        assert time.monotonic() - begin < 5
    return refused


def test_mutated_manifests_are_read_or_refused():
    assert 50 < _refused(300) < 300


@pytest.mark.slow
def test_ten_thousand_mutated_manifests_are_read_or_refused():
    assert 1000 < _refused(10_000) < 10_000
