"""Reduced precision: the operators of the trunk really work in it, and nothing behind the trunk does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fastfold.evoformer.config import model_config
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import autocast_trunk
from fastfold.parallel.alphafold.workload import dummy_features, one_block_config


class _Operators(TorchDispatchMode):
    """Dtypes of the first tensor of every call of our own operators, and whether structure is made yet."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fastfold":
            first = next(x for x in tree_iter(args) if isinstance(x, Tensor))
            self.found.append((func._schema.name.removeprefix("fastfold::"), first.dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["model_1", "model_1_multimer_v3"])
def test_every_large_operator_of_the_trunk_gets_bfloat16(name: str) -> None:
    """One float32 term in an embedder would make a whole representation float32, and all its operators slow."""
    config = one_block_config(model_config(name))
    network = AlphaFold(config).train()
    autocast_trunk(network, "cpu")
    with _Operators() as operators:
        result = network(dummy_features(config, 6, 3, 4), 0)
    large = {"gated_attention", "transition", "triangle_multiplication", "outer_product_mean", "pair_bias"}
    assert large <= {name for name, _ in operators.found}
    assert {dtype for name, dtype in operators.found if name in large} == {torch.bfloat16}
    positions = result["structure_module"]["final_atom_positions"]
    assert positions.dtype == torch.float32
