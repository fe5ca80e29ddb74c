"""A failure is one message that names the target once and says what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from fastfold.data.targets import target_from_sequence
from fastfold.errors import ConfigError, InputError
from fastfold.inference.error_messages import debugging, internal_error, is_out_of_memory, reason

TARGET = target_from_sequence("MKV", "T1")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InputError("is empty", record="T1"), "record 'T1': is empty"),
        (InputError("T1 is a complex"), "T1 is a complex"),
        (ConfigError("T1: `cyclic` closes whole chains"), "T1: cyclic= closes"),
        (InputError("T10: is empty"), "T1: T10: is empty"),
        (InputError("is empty"), "T1: is empty"),
        (MemoryError(), "T1: out of memory for 3 residues"),
        (KeyError("x"), "T1: internal error, KeyError: 'x'. This is a bug"),
    ],
)
def test_the_target_is_named_once(error: Exception, said: str) -> None:
    assert reason(error, TARGET).startswith(said)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENAMETOOLONG, errno.ESTALE, errno.ENOSPC])
def test_a_path_that_the_system_refuses_is_no_internal_error(number: int) -> None:
    words = os.strerror(number)
    message = internal_error(OSError(number, words, Path("d") / "x.cif"))
    assert message == f"{Path('d') / 'x.cif'}: {words}; check the path, its permissions and its disk"
    assert len(internal_error(OSError(number, words, "x" * 5000))) < 400
    assert "internal error" in internal_error(OSError(number, words))
    assert "internal error" in internal_error(FileNotFoundError(errno.ENOENT, "No such file", "x"))


def test_an_error_without_words_has_its_type() -> None:
    assert internal_error(ValueError()).startswith("internal error, ValueError. This is a bug")
    assert "second" not in internal_error(ValueError("first\nsecond"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory"), True),
        (RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_missing_memory_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_tracebacks_are_shown_to_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("FASTFOLD_DEBUG", value)
        assert debugging() is expected
