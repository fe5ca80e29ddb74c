"""Hashes of inputs and of files are the same in every process, and different for what differs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastfold.utils.hashing import file_digest, input_hash

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), VALUES, max_size=6), st.randoms())
def test_the_order_of_settings_does_not_change_their_hash(values, random):
    keys = list(values)
    random.shuffle(keys)
    assert input_hash({key: values[key] for key in keys}) == input_hash(values)


def test_different_inputs_have_different_hashes():
    values = [
        None, "", 0, 0.0, False, "0", b"", b"0", [], {}, [[]], [None], "None", {"a": None}, ["a", None],
        Path("a"), "a", b"a", {"a"}, ["a"], np.zeros(2), np.zeros(2, np.float32), np.zeros((2, 1)), [0.0, 0.0],
        ["ab", "c"], ["a", "bc"],
    ]  # fmt: skip
    assert len({input_hash(value) for value in values}) == len(values)
    assert input_hash("a", "b") != input_hash("ab")


def test_equal_inputs_in_other_types_have_the_same_hash():
    @dataclasses.dataclass
    class Settings:
        seed: int

    assert input_hash((1, 2)) == input_hash([1, 2])
    assert input_hash(np.float64(0.5), np.int32(3)) == input_hash(0.5, 3)
    assert input_hash(Settings(3)) == input_hash({"seed": 3})
    assert input_hash({"b", "a", "c"}) == input_hash({"c", "a", "b"})
    assert input_hash(np.arange(6).reshape(2, 3).T) == input_hash(np.arange(6).reshape(2, 3).T.copy())
    assert input_hash(np.arange(3, dtype=">i4")) == input_hash(np.arange(3, dtype="<i4"))


def test_hashes_stay_the_same_from_version_to_version():
    """Finished targets of an earlier version are recognised; a new value here makes users fold them again."""
    value = {
        "seed": 0,
        "recycles": 3,
        "tolerance": 0.5,
        "names": ["é", None, True],
        "msa": np.arange(4, dtype="i1"),
    }
    assert input_hash(value) == "e98e3ceb1c9b50ee41f907412de7c52fb78266e422088cd924ae9e39420f79de"


@pytest.mark.parametrize("value", [object(), {1: 2}, np.array([object()]), len, 1j])
def test_values_without_a_stable_form_are_refused(value):
    with pytest.raises(TypeError, match="input_hash"):
        input_hash(value)


def test_file_digest_is_sha256(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert file_digest(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
