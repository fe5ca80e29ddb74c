"""Layers that ``layers="auto"`` finds in a model, and the parts of them that ranks get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelPlan
from fastfold.parallel.families.own_heads import OwnHeads, SummedGradients
from fastfold.parallel.families.tensor_layers import _cut_scores, _cut_table, _CutLinear, find_cuts
from fastfold.parallel.planner.fake_run import fake_mesh

FIRST, SECOND = _CutLinear("first"), _CutLinear("second")


def _module(plan: dict[str, str] | None = None, **parts: Any) -> nn.Module:
    """Return a module with attributes, and a ``tp_plan`` if there is one."""
    module = nn.Module()
    for name, part in parts.items():
        setattr(module, name, part)
    if plan is not None:
        module.tp_plan = plan  # type: ignore[assignment]
    return module


def _attention(**sizes: int) -> nn.Module:
    layers = {name: nn.Linear(12, 12 if name == "q" else 6) for name in ("q", "k", "v")}
    return _module(**sizes, **layers, o=nn.Linear(12, 9), norm=nn.LayerNorm(3))


def _found(model: nn.Module, tied: tuple[tuple[str, ...], ...] = ()) -> dict[str, Any]:
    return dict(find_cuts(model, ParallelPlan(tp=2), "auto", tied))


def test_styles_of_a_plan_are_those_of_its_layers() -> None:
    """Attention with a ``head_dim`` is cut by whole heads, of which keys have two of three channels."""
    block = _module(
        attention=_attention(head_dim=3), up=nn.Linear(4, 8), down=nn.Linear(8, 4), both=nn.Linear(4, 16)
    )
    plan = {
        **{f"blocks.*.attention.{name}": "colwise" for name in "qkv"},
        "blocks.*.attention.o": "rowwise",
        "blocks.*.attention.norm": "replicated_with_grad_allreduce",
        "blocks.*.up": "colwise",
        "blocks.*.both": "packed_colwise",
        "blocks.*.down": "rowwise",
        "words": "embedding_rowwise",
        "head": "colwise_gather_output",
        "absent.*": "colwise",
    }
    inner = _module(plan, blocks=nn.ModuleList([block]), words=nn.Embedding(5, 4), head=nn.Linear(4, 5))
    inner.blocks[0].up.tp_plan = {"": "no style"}  # type: ignore[union-attr, index, assignment]
    heads = OwnHeads(2, {"q": 1, "k": 1, "v": 1}, ("o",), ("norm",))
    expected = {
        "blocks.0.attention": heads,
        "blocks.0.up": FIRST,
        "blocks.0.both": _CutLinear("first", 2),
        "blocks.0.down": SECOND,
        "words": _cut_table,
        "head": _cut_scores,
    }
    assert _found(inner) == expected
    outer = _module(model=inner, other=_module({"lone": "rowwise"}, lone=nn.Linear(2, 2)))
    assert _found(outer) == {f"model.{path}": cut for path, cut in expected.items()} | {"other.lone": SECOND}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"x": "sequence"}, "x is Linear of style sequence in the tp_plan"),
        ({"norm": "colwise"}, "norm is LayerNorm of style colwise in the tp_plan"),
        ({"scale": "colwise"}, "scale of the tp_plan is a parameter outside of a layer"),
        (
            {"a.q": "colwise"},
            "Module has layers of colwise in the tp_plan, expected colwise and rowwise ones",
        ),
        ({"a.o": "rowwise"}, "Module has layers of rowwise in the tp_plan"),
        (
            {"a.q": "colwise", "a.k": "packed_colwise", "a.o": "rowwise"},
            "Module has layers of colwise, packed_colwise, rowwise in the tp_plan",
        ),
        ({"b.q": "colwise", "b.o": "rowwise"}, r"has layers of \[12, 12\] channels for heads of 13"),
        (
            {"c.q": "colwise", "c.k": "colwise", "c.o": "rowwise"},
            r"layers of \[12, 7, 12\] channels for heads of 1",
        ),
    ],
)
def test_plans_without_a_counterpart_are_refused(plan: dict[str, str], message: str) -> None:
    parts = {"a": _attention(head_dim=3), "b": _attention(head_dim=13), "c": _attention(head_dim=1)}
    parts["c"].k = nn.Linear(12, 7)
    model = _module(plan, x=nn.Linear(2, 2), norm=nn.LayerNorm(2), scale=nn.Parameter(torch.ones(2)), **parts)
    with pytest.raises(ConfigError, match=message):
        _found(model)


def test_a_style_may_be_that_of_a_whole_layer() -> None:
    found = _found(_module({"norm": "replicated_with_grad_allreduce"}, norm=nn.LayerNorm(2)))
    assert found == {"norm": SummedGradients}


class Conv1D(nn.Module):
    """Layer with a transposed weight, as of transformers."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf, self.weight, self.bias = outputs, nn.Parameter(torch.ones(inputs, outputs)), None


@pytest.mark.parametrize("name", ["num_heads", "n_heads", "n_head", "num_attention_heads"])
def test_attention_and_pairs_are_found_by_their_features(name: str) -> None:
    """Sizes are attributes with the number of all channels, but not those of a head."""
    whole = {key: nn.Linear(8, 12) for key in "qkv"}
    sizes = {
        name: 4,
        "embed_dim": 12,
        "head_dim": 12,
        "hidden_size": 12,
        "all_head_size": 12,
        "width": 12,
        "in_dim": 8,
    }
    model = _module(
        attention=_module(**whole, o=nn.Linear(12, 8), **sizes),
        joint=_module(qkv=Conv1D(36, 8), o=Conv1D(8, 12), n_head=3),
        plain_joint=_module(qkv=nn.Linear(8, 36), o=nn.Linear(12, 8), n_head=3),
        transposed=_module(q=Conv1D(12, 8), k=Conv1D(12, 8), v=Conv1D(12, 8), o=Conv1D(8, 12), n_head=3),
        mlp=_module(up=nn.Linear(4, 8), act=nn.GELU(), down=nn.Linear(8, 4)),
        uneven=_module(up=nn.Linear(4, 8), down=nn.Linear(8, 5)),
        three=_module(a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4)),
        lone=_module(a=nn.Linear(4, 4)),
        odd=_module(q=nn.Linear(8, 12), k=nn.Linear(8, 12), v=nn.Linear(8, 12), o=nn.Linear(12, 8), n_head=5),
        grouped=_module(
            q=nn.Linear(8, 12), k=nn.Linear(8, 6), v=nn.Linear(8, 12), o=nn.Linear(12, 8), n_head=3
        ),
    )
    assert _found(model) == {
        "attention": OwnHeads(
            4, {"q": 1, "k": 1, "v": 1}, ("o",), sizes=(name, "embed_dim", "hidden_size", "all_head_size")
        ),
        "joint": OwnHeads(3, {"qkv": 3}, ("o",), sizes=("n_head",)),
        "transposed": OwnHeads(3, {"q": 1, "k": 1, "v": 1}, ("o",), sizes=("n_head",)),
        "mlp.up": FIRST,
        "mlp.down": SECOND,
    }


def test_tied_tables_are_cut_alike_and_other_models_are_refused() -> None:
    model = _module(
        mlp=_module(up=nn.Linear(4, 8), down=nn.Linear(8, 4)), words=nn.Embedding(6, 4), head=nn.Linear(4, 6)
    )
    model.head.weight = model.words.weight  # type: ignore[union-attr]
    tied = (("words.weight", "head.weight"),)
    pair = {"mlp.up": FIRST, "mlp.down": SECOND}
    assert _found(model, tied) == pair | {"words": _cut_table, "head": _cut_scores}
    assert _found(model) == pair
    assert _found(model, (("mlp.up.weight", "head.weight"),)) == pair
    with pytest.raises(ConfigError, match="has no tp_plan, no attention with a number of heads"):
        _found(_module(a=nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match='layers="auto" finds the layers of tp_mode 1d, found 2d'):
        find_cuts(model, ParallelPlan(tp=4, tp_mode="2d"), "auto", ())
    assert find_cuts(model, ParallelPlan(), "auto", ()) == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_get_their_rows_of_joint_layers_and_gathered_scores(rank: int) -> None:
    """Of two joint layers each is cut: rows 0 and 1 of four, and 4 and 5, belong to the first rank."""
    plain = nn.Linear(3, 8)
    with fake_mesh(ParallelPlan(tp=2), rank) as mesh:
        one: Any = _CutLinear("first", 2)(plain, mesh)
        rows = [2 * rank, 2 * rank + 1, 4 + 2 * rank, 5 + 2 * rank]
        assert torch.equal(one.weight, plain.weight[rows])
        half: Any = FIRST(plain, mesh)
        assert torch.equal(half.weight, plain.weight[4 * rank : 4 * rank + 4])
        second: Any = SECOND(plain, mesh)
        assert torch.equal(second.weight, plain.weight[:, [[0, 1], [2]][rank]])
        assert torch.equal(second.bias, plain.bias)
        assert half(torch.ones(2, 3)).shape == (2, 4)
        assert _cut_scores(plain, mesh)(torch.ones(2, 3)).shape == (2, 8)
