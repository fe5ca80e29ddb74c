"""Stages of a model's blocks, run one after another, are the model; other models are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.families.block_stages import block_stages


class _Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 4)

    def forward(self, hidden: Tensor, mask: Tensor) -> Any:
        made = hidden + self.layer(hidden).tanh() * mask
        return (made, None) if self.kind == "tuple" else made


class _Model(nn.Module):
    """Embedding, blocks within a container, and a head; ``output`` is the form of its result."""

    def __init__(self, blocks: int = 5, kind: str = "tensor", output: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.trunk, self.output = nn.Embedding(9, 4), nn.Module(), output
        self.trunk.positions, self.trunk.drop = nn.Embedding(7, 4), nn.Dropout(0.0)
        self.trunk.blocks = nn.ModuleList(_Block(kind) for _ in range(blocks))
        self.trunk.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 9)

    def forward(self, input_ids: Tensor) -> Any:
        ids = input_ids
        hidden = self.trunk.drop(self.words(ids) + self.trunk.positions(torch.arange(ids.shape[-1])))  # type: ignore[operator]
        mask = torch.full((ids.shape[-1], 1), 0.5)
        for block in self.trunk.blocks:  # type: ignore[union-attr]
            hidden = block(hidden, mask=mask)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        scores = self.head(self.trunk.norm(hidden))  # type: ignore[operator]
        if self.output == "tensor":
            return scores
        return (
            {"loss": scores.mean(), "logits": scores, "cache": None}
            if self.output == "both"
            else {"logits": scores}
        )


def _run(stages: list[nn.Module], ids: Tensor) -> Any:
    passed: Any = ids
    for stage in stages:
        passed = stage(passed)
    return passed


@pytest.mark.parametrize("kind", ["tensor", "tuple"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stages_in_turn_are_the_model(kind: str, count: int) -> None:
    """Each has its own blocks, and the first and the last what is called before and after them."""
    model, ids = _Model(kind=kind), torch.tensor([[1, 5, 2], [0, 8, 3]])
    stages = block_stages(model)(model, count)
    assert len(stages) == count
    torch.testing.assert_close(_run(stages, ids), model(ids), rtol=0, atol=0)
    assert torch.equal(_run(stages, ids), model(ids))  # nothing is left from the pass before
    names = {id(p): name for name, p in model.named_parameters()}
    held = [{names[id(p)].rpartition(".")[0] for p in stage.parameters()} for stage in stages]
    blocks = [sorted(name for name in one if ".blocks." in name) for one in held]
    assert [name for one in blocks for name in one] == [f"trunk.blocks.{i}.layer" for i in range(5)]
    others = [one - set(own) for one, own in zip(held, blocks, strict=True)]
    first, last = {"words", "trunk.positions"}, {"trunk.norm", "head"}
    assert others == [first | last] if count == 1 else [first, *[set()] * (count - 2), last]


@pytest.mark.parametrize("output", ["both", "one"])
def test_the_last_stage_returns_the_tensors_of_an_output(output: str) -> None:
    model, ids = _Model(output=output), torch.tensor([[1, 5, 2]])
    found, expected = _run(block_stages(model)(model, 2), ids), model(ids)
    if output == "one":
        assert torch.equal(found, expected["logits"])
        return
    assert torch.equal(found[0], expected["loss"])
    assert torch.equal(found[1], expected["logits"])
    assert len(found) == 2


def test_gradients_of_stages_are_those_of_the_model() -> None:
    model, ids = _Model(), torch.tensor([[1, 5, 2]])
    model(ids).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    _run(block_stages(model)(model, 3), ids).square().sum().backward()
    for found, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(found.grad, wanted)


class _Turned(nn.ModuleList):
    def __iter__(self) -> Any:
        return iter([*self._modules.values()][::-1])


class _Twice(nn.LayerNorm):
    """Norm that calls the embedding again."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.again[0](torch.ones(1, dtype=torch.int64))  # type: ignore[index, operator]


class _Pairs(_Block):
    def forward(self, hidden: Tensor, mask: Tensor) -> Any:
        return hidden, hidden


def _shared(model: _Model) -> None:
    model.trunk.norm = _Twice(4)
    model.trunk.norm.again = nn.ModuleList([model.words])


def _reversed(model: _Model) -> None:
    model.trunk.blocks = _Turned([*model.trunk.blocks])  # type: ignore[misc]


def _bare(model: _Model) -> None:
    model.trunk.scale = nn.Parameter(torch.ones(1))


def _pairs(model: _Model) -> None:
    model.trunk.blocks = nn.ModuleList([_Pairs("tensor"), _Pairs("tensor")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_shared, "words runs before the blocks trunk.blocks and after them"),
        (_reversed, "trunk.blocks are not called once each, in their order"),
        (_bare, "trunk.scale is outside of the modules around trunk.blocks"),
        (_pairs, "trunk.blocks.0 returns other than one tensor"),
    ],
)
def test_other_models_are_refused(change: Callable[[_Model], None], message: str) -> None:
    model = _Model()
    change(model)
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        block_stages(model)


def test_the_largest_outermost_list_has_the_blocks() -> None:
    """A list of one module, and lists within blocks, are none."""
    model = _Model()
    model.small = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    model.lone = nn.ModuleList([nn.Linear(50, 50)])
    for block in model.trunk.blocks:  # type: ignore[union-attr]
        block.inner = nn.ModuleList([nn.Linear(30, 30), nn.Linear(30, 30)])
    stages: Any = block_stages(model)
    assert stages.blocks == "trunk.blocks"
    with pytest.raises(ConfigError, match=r"Linear has no nn\.ModuleList of blocks"):
        block_stages(nn.Linear(2, 2))
