"""What fails for a moment is read again; what is broken is not."""

from __future__ import annotations

import time

import pytest

from fastfold.data.loading.loader import retry_io
from fastfold.errors import InputError


class Fails:
    """Raises errors one after the other, then returns how often it was called."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.calls


def test_temporary_failures_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    away = InputError("cannot be read: Input/output error", temporary=True)
    assert retry_io(Fails(away, OSError("stale"))) == 3
    assert waited == [1.0, 4.0]
    assert retry_io(Fails()) == 1
    forever = Fails(*[away] * 9)
    with pytest.raises(InputError, match="Input/output"):
        retry_io(forever)
    assert forever.calls == 3


def test_a_broken_file_is_not_read_again() -> None:
    broken = Fails(InputError("is not valid JSON"))
    with pytest.raises(InputError, match="JSON"):
        retry_io(broken)
    assert broken.calls == 1
