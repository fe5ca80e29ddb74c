"""What a checkpoint says of itself comes back, or is refused."""

from __future__ import annotations

import pytest

from fastfold.training.checkpoint.manifest import FileRecord, Manifest, ManifestError

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
        (b'{"format": 3, "step": 1, "files": {}, "state": {}}', "format 3, this version reads 1 and 2"),
    ],
)
def test_what_is_no_manifest_is_refused(text: bytes, problem: str):
    with pytest.raises(ManifestError, match=problem):
        Manifest.from_json(text)
