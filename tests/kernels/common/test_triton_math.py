"""Parts of kernels that depend on the version of Triton."""

from __future__ import annotations

import pytest
import torch

from fastfold.kernels.common.triton_math import compiles_assembly


def test_assembly_is_for_versions_that_compile_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of gradients do not compile with it before 3.9, which PyTorch 2.11 and 2.12 do not have."""
    versions = ("3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.10.0+git1234", "4.0.0")
    assert [compiles_assembly(version) for version in versions] == [False] * 3 + [True] * 3
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not compiles_assembly("3.9.0")
