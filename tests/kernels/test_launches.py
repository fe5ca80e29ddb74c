"""Launches as a GPU gets them: they bind, compile without spills, and have the blocks that ship."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from fastfold.kernels.aot import all_variants
from tests.conftest import REPOSITORY


@pytest.mark.parametrize(
    ("dtype", "architecture"),
    [
        pytest.param(torch.bfloat16, 90, marks=pytest.mark.slow),
        pytest.param(torch.float16, 80, marks=pytest.mark.slow),
        pytest.param(torch.float32, 90, marks=pytest.mark.slow),
        pytest.param(torch.float32, 100, marks=pytest.mark.slow),
    ],
)
def test_all_launches_of_evoformer_blocks_compile_without_spills(
    dtype: torch.dtype, architecture: int
) -> None:
    command = [sys.executable, "-m", "tests.kernels.dry_launches", str(dtype)[6:], str(architecture)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"FASTFOLD_KERNELS": "triton", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    launches = [json.loads(line) for line in result.stdout.splitlines()]
    variants = all_variants()
    assert {x["kernel"] for x in launches} == {s.kernel.__name__ for s in variants}
    for launch in launches:
        assert launch["spills"] == 0, launch
        assert any(
            s.kernel.__name__ == launch["kernel"]
            and s.blocks == launch["blocks"]
            and list(s.schedule) == launch["how"]
            and architecture in s.architectures
            for s in variants
        ), launch
