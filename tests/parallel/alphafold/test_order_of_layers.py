"""Schedules of blocks on shards run the layers in the order of the plain block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fastfold.evoformer.config import model_config
from fastfold.evoformer.evoformer import EvoformerBlock, EvoformerStack, TemplatePairStack
from fastfold.parallel.alphafold import axial_parallel, grid_parallel, training_block
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.fake_run import fake_mesh

SIZE, C_M, C_Z = 8, 16, 8
SHARDS = [ParallelPlan(dap=2), ParallelPlan(dap=4, dap_mode="grid")]
READ_MSA = {"msa_row_attention", "msa_column_attention", "msa_transition", "outer_product_mean"}
READ_PAIR = {"msa_row_attention", "outer_product_mean", "pair_transition"} | {
    f"triangle_{name}"
    for name in (
        "multiplication_outgoing",
        "multiplication_incoming",
        "attention_starting",
        "attention_ending",
    )
}


class _Order(TorchDispatchMode):
    """Record the layers of a block in the order in which operators first read their output projections."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.names: list[str] = []
        self._layers = {
            parameter.untyped_storage()._cdata: name.split(".")[0]
            for name, parameter in block.named_parameters()
            if name.endswith("output.weight")
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_iter((args, kwargs)):
            name = self._layers.get(x.untyped_storage()._cdata) if isinstance(x, Tensor) else None
            if name is not None and name not in self.names:
                self.names.append(name)
        return func(*args, **(kwargs or {}))


def _order(stack: nn.Module, *inputs: Tensor) -> list[str]:
    with _Order(stack.blocks[0]) as order:
        stack(*inputs)
    assert len(order.names) == len(list(stack.blocks[0].children()))
    return order.names


def _inputs(ranks: int) -> tuple[Tensor, ...]:
    own, whole = SIZE // ranks, torch.ones(SIZE, SIZE)
    msa, pair = torch.randn(own, SIZE, C_M), torch.randn(own, SIZE, C_Z)
    return msa.requires_grad_(), pair.requires_grad_(), whole, whole


def _sharded(stack: nn.Module, mesh: ParallelMesh) -> nn.Module:
    return grid_parallel(stack, mesh) if mesh.plan.dap_mode == "grid" else axial_parallel(stack, mesh)


@pytest.mark.parametrize("outer_product_first", [False, True])
@pytest.mark.parametrize("training", ["sums", "channels", "terms", ""])
@pytest.mark.parametrize("plan", SHARDS, ids=str)
def test_evoformer_blocks_on_shards_keep_the_order_of_layers(
    plan: ParallelPlan, training: str, outer_product_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer follows those whose results it reads; layers of the MSA may follow or precede others of the pair."""
    config = model_config("model_1").model.embeddings_and_evoformer.evoformer
    config.outer_product_mean.first = outer_product_first
    monkeypatch.setattr(training_block, "_choose_training_contraction", lambda *_: training)
    with torch.set_grad_enabled(bool(training)):
        plain = _order(EvoformerStack([EvoformerBlock(config, C_M, C_Z)]), *_inputs(1))
        with fake_mesh(plan) as mesh:
            stack = _sharded(EvoformerStack([EvoformerBlock(config, C_M, C_Z)]), mesh)
            found = _order(stack, *_inputs(plan.dap))
    assert plain[1 if outer_product_first else 0] == "msa_row_attention"
    for readers in (READ_MSA, READ_PAIR):
        assert [name for name in found if name in readers] == [name for name in plain if name in readers]


@pytest.mark.parametrize("attention_first", [False, True])
@pytest.mark.parametrize("plan", SHARDS, ids=str)
def test_template_blocks_on_shards_keep_the_order_of_layers(
    plan: ParallelPlan, attention_first: bool
) -> None:
    config = model_config("model_1").model.embeddings_and_evoformer.template.template_pair_stack
    config.num_block = 1

    def stack() -> TemplatePairStack:
        return TemplatePairStack(config, 64, attention_first=attention_first, zero_init=True)

    def inputs(ranks: int) -> tuple[Tensor, Tensor]:
        return torch.randn(SIZE // ranks, SIZE, 64), torch.ones(SIZE, SIZE)

    plain = _order(stack(), *inputs(1))
    assert plain[0] == f"triangle_{'attention_starting' if attention_first else 'multiplication_outgoing'}"
    with fake_mesh(plan) as mesh:
        assert _order(_sharded(stack(), mesh), *inputs(plan.dap)) == plain
