"""Where Gemini's tests run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let Gemini choose the CPU also beside a GPU: budgets here are smaller than one block of CUDA's allocator."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("gpu") is None:
            patch.setattr(torch.cuda, "is_available", lambda: False)
        yield
