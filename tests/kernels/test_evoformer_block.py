"""A whole Evoformer block compiles into one graph, forward and backward, with the operators inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold.evoformer.config import model_config
from fastfold.evoformer.evoformer import EvoformerBlock
from fastfold.kernels.common.backend import VARIABLE, interpreted
from tests.helpers.grid_launches import launches_of
from tests.helpers.kernel_checks import DEVICE


def _block(global_column: bool) -> EvoformerBlock:
    torch.manual_seed(0)
    config = model_config("model_1").model.embeddings_and_evoformer.evoformer
    return EvoformerBlock(config, 16, 16, zero_init=False, global_column=global_column).to(DEVICE)


def _inputs() -> dict[str, Tensor]:
    inputs = {"msa": torch.randn(3, 5, 16), "pair": torch.randn(5, 5, 16)}
    inputs |= {"msa_mask": (torch.rand(3, 5) > 0.2).float(), "pair_mask": (torch.rand(5, 5) > 0.2).float()}
    return {k: x.to(DEVICE).requires_grad_(not k.endswith("mask")) for k, x in inputs.items()}


def _results(run: Any, block: EvoformerBlock, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Outputs, and gradients of all inputs and parameters; the same dropout every time."""
    torch.manual_seed(1)
    outputs = run(**inputs)
    leaves = [x for x in (*inputs.values(), *block.parameters()) if x.requires_grad]
    return [*outputs, *torch.autograd.grad([x.square().sum() for x in outputs], leaves)]


def _check_compiled(backend: str, global_column: bool) -> None:
    torch.compiler.reset()
    block, inputs = _block(global_column), _inputs()
    eager = _results(block, block, inputs)
    compiled = _results(torch.compile(block, fullgraph=True, backend=backend), block, inputs)
    assert all(x.norm() > 0 for x in eager)
    for found, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("global_column", [False, True])
def test_it_compiles_as_one_graph(global_column: bool) -> None:
    _check_compiled("aot_eager", global_column)


@pytest.mark.skipif(not interpreted(), reason="needs a process with Triton's interpreter")
@pytest.mark.parametrize("global_column", [False, True])
def test_nothing_on_the_host_waits_for_a_number(global_column: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward launch their kernels on tensors that hold none, which a captured graph needs."""
    monkeypatch.setenv(VARIABLE, "triton")

    def run() -> None:
        config = model_config("model_1").model.embeddings_and_evoformer.evoformer
        block = EvoformerBlock(config, 16, 16, zero_init=False, global_column=global_column)
        inputs = [torch.ones(shape).requires_grad_() for shape in ((3, 5, 16), (5, 5, 16))]
        outputs = block(*inputs, torch.ones(3, 5), torch.ones(5, 5))
        torch.autograd.grad([x.sum() for x in outputs], [*inputs, *block.parameters()])

    assert {"attention_forward_kernel", "triangle_output_backward_kernel"} <= {
        x.name for x in launches_of(run)
    }
    with pytest.raises(RuntimeError, match="meta"):
        launches_of(lambda: torch.ones(1).item())


@pytest.mark.slow
@pytest.mark.parametrize("global_column", [False, True])
def test_it_compiles_to_code_as_one_graph(global_column: bool) -> None:
    _check_compiled("inductor", global_column)


@pytest.mark.slow
def test_it_compiles_as_one_graph_around_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTFOLD_KERNELS", "triton")
    _check_compiled("aot_eager", False)


def test_the_graph_holds_the_operators_and_no_softmax_of_its_own() -> None:
    """What compiles are the operators: none of them was replaced by their definitions on the way."""
    torch.compiler.reset()
    called: list[str] = []

    def backend(graph: Any, example: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    block, inputs = _block(False), _inputs()
    torch.compile(block, fullgraph=True, backend=backend)(**inputs)
    names = {"gated_attention", "pair_bias", "outer_product_mean", "transition", "triangle_multiplication"}
    found = {name.split(".")[1] for name in called if name.startswith("fastfold.")}
    assert names <= found
    assert not any("softmax" in name or "matmul" in name for name in called)
