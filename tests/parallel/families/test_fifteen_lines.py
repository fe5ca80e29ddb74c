"""Programs of 15 lines train GPT-2 and Llama of transformers as one process does, under every kind of parallelism."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.conftest import REPOSITORY
from tests.helpers.spawn_ranks import launch

PROGRAMS = REPOSITORY / "examples" / "fifteen_lines"
STEPS = 3
CASES: dict[str, tuple[str, ...]] = {
    **{f"zero {stage}": ("data_parallel.py", str(stage)) for stage in range(4)},
    "tp": ("tensor_parallel.py",),
    "pp": ("pipeline.py",),
    "sp": ("sequence_parallel.py",),
    "gemini": ("gemini.py",),
}


def _make_model(name: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(PROGRAMS / name)))
    return model


def _train(name: str, *, is_shifted: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Return weights and losses of PyTorch alone; the labels are shifted by transformers or before."""
    model = _make_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    tokens, losses = torch.arange(64).view(4, 16), []
    for _ in range(STEPS):
        logits = model(input_ids=tokens).logits.float()
        targets = (tokens + 1) if is_shifted else tokens[:, 1:]
        loss = nn.functional.cross_entropy(logits[:, : targets.shape[1]].flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.state_dict(), losses


def _run(program: str, *options: str) -> Mapping[str, Any]:
    """Return the variables of a program that starts its own process group."""
    sys.argv = [program, *options]
    torch.manual_seed(0)
    return runpy.run_path(str(PROGRAMS / program))


def _state(values: Mapping[str, Any]) -> Mapping[str, Tensor]:
    pipeline, manager = values.get("pipeline"), values.get("manager")
    if manager is not None:
        found: Mapping[str, Tensor] = manager.state_dict()["model"]
        return found
    parallel = values["parallel"] if pipeline is None else pipeline.parallel
    state: Mapping[str, Tensor] = parallel.state_dict()
    return state


def _differences(name: str, folder: str) -> dict[str, tuple[float, float]]:
    """Largest differences of weights and of the last step's loss from those of PyTorch alone, by case."""
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": "2", "HF_HUB_OFFLINE": "1"}
    dist.destroy_process_group()
    torch.set_default_dtype(torch.float64)
    expected = {is_shifted: _train(name, is_shifted=is_shifted) for is_shifted in (False, True)}
    assert expected[False][1][-1] < expected[False][1][0] - 0.1
    found, started = {}, dist.init_process_group
    for case, (program, *options) in CASES.items():

        def start(backend: str, case: str = case) -> None:
            store = dist.FileStore(f"{folder}/{case}", 2)
            started(backend, rank=int(os.environ["RANK"]), world_size=2, store=store)

        dist.init_process_group = start
        values = _run(program, str(PROGRAMS / name), *options)
        weights, losses = expected[case == "sp"]
        state = _state(values)
        assert state.keys() == weights.keys()
        apart = max(float((state[key].cpu() - x).abs().max()) for key, x in weights.items())
        own = torch.tensor([_own_loss(values)])
        dist.all_reduce(own)
        found[case] = apart, abs(float(own) - losses[-1])
        dist.destroy_process_group()
    return found


def _own_loss(values: Mapping[str, Any]) -> float:
    """This rank's part of the mean loss."""
    if "losses" in values:
        return float(sum(x.item() for x in values["losses"]))
    return float(values["loss"].item()) / 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_programs_train_as_one_process_does(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for found in launch(_differences, 2, name, str(tmp_path), timeout=300):
        assert found.keys() == CASES.keys()
        for case, (weights, loss) in found.items():
            # transformers computes the loss in float32.
            assert weights < 1e-6, case
            assert loss < 1e-5, case


def test_programs_have_fifteen_lines() -> None:
    programs = sorted(PROGRAMS.glob("*.py"))
    assert {path.name for path in programs} == {program for program, *_ in CASES.values()}
    for path in programs:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        assert lines[0].startswith('"""torchrun'), path
        assert len(lines) - 1 <= 15, path
