"""Which axis is cut in which step: blocks and stacks on shards without gradients, and how they are resharded."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastfold.errors import ConfigError
from fastfold.evoformer.config import model_config
from fastfold.evoformer.execution import ExecutionPolicy, PolicyModule
from fastfold.evoformer.model import AlphaFold
from fastfold.parallel.alphafold import axial_parallel, training_block
from fastfold.parallel.alphafold.axial_blocks import (
    AxialEvoformerBlock,
    AxialEvoformerStack,
    AxialTemplatePairStack,
    keep_gathered,
    refuse_missing_steps,
    reshard,
    works_in_place,
)
from fastfold.parallel.alphafold.regather import RegatheringLayer
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm.groups import Group
from tests.helpers.thread_ranks import on_one_line
from tests.parallel.alphafold.axial_cases import C_M, C_Z, CASES, difference, inputs_of, plain_module

RANKS = 3
VARIANTS = {
    "monomer block": AxialEvoformerBlock,
    "multimer block": AxialEvoformerBlock,
    "monomer stack": AxialEvoformerStack,
    "multimer stack": AxialEvoformerStack,
    "multimer template stack": AxialTemplatePairStack,
}


def parallel(module: nn.Module, group: Group) -> nn.Module:
    """The module on shards over a group."""
    return axial_parallel(module, SimpleNamespace(group=lambda name: group))  # type: ignore[arg-type]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_blocks_without_gradients_are_those_of_one_process(name: str, inplace: bool) -> None:
    """On three ranks, whose shards are of different lengths; in place the results take their inputs' memory."""
    case = CASES[name]
    inputs = inputs_of(case, ())
    with torch.no_grad():
        expected = case.call(plain_module(case).eval(), *(x.clone() for x in inputs))
    expected = expected if isinstance(expected, tuple) else (expected,)

    def run(group: Group) -> list[float]:
        shards, module = AxialShards(group), parallel(plain_module(case).eval(), group)
        assert type(module) is VARIANTS[name]
        for part in module.modules():
            if isinstance(part, PolicyModule):
                part.policy = ExecutionPolicy(inplace=inplace)
        own = [shards.take(x, cut).clone() if cut else x for x, cut in zip(inputs, case.cuts, strict=True)]
        with torch.no_grad():
            found = case.call(module, *own)
        found = found if isinstance(found, tuple) else (found,)
        return [
            difference(mine, shards.take(whole, cut), whole)
            for mine, whole, cut in zip(found, expected, case.results, strict=True)
        ]

    assert max(error for rank in on_one_line(RANKS, run) for error in rank) < 1e-12


@pytest.mark.parametrize("inplace", [False, True])
def test_a_pair_and_an_msa_go_from_one_cut_to_the_other_and_back(inplace: bool) -> None:
    pair, msa = torch.randn(7, 7, 4), torch.randn(5, 7, 4)
    policy = ExecutionPolicy(inplace=inplace, reshard_blocks=2)

    @torch.no_grad()
    def run(group: Group) -> None:
        shards = AxialShards(group)
        rows, sequences = shards.take(pair, 0).clone(), shards.take(msa, 0).clone()
        move = partial(reshard, shards, mask=torch.ones(7, 7), policy=policy)
        columns = move(rows, -2).wait()
        assert torch.equal(columns, shards.take(pair, 1))
        back = move(columns, -3).wait()
        assert torch.equal(back, shards.take(pair, 0))
        assert (back.data_ptr() == rows.data_ptr()) == inplace
        memory = torch.empty(20, 7, 4) if inplace else None
        move = partial(reshard, shards, mask=torch.ones(5, 7), policy=policy, memory=memory)
        residues = move(sequences, -2).wait()
        assert torch.equal(residues, shards.take(msa, 1))
        assert memory is None or residues.data_ptr() == memory.data_ptr()
        again = move(residues.clone(), -3).wait()
        assert torch.equal(again, shards.take(msa, 0))

    on_one_line(RANKS, run)


def test_memory_is_taken_only_without_gradients() -> None:
    assert not works_in_place(ExecutionPolicy(inplace=True))
    with torch.no_grad():
        assert works_in_place(ExecutionPolicy(inplace=True))
        assert not works_in_place(ExecutionPolicy())


def test_recomputed_blocks_keep_what_they_gather() -> None:
    def run(group: Group) -> list[bool]:
        module = parallel(plain_module(CASES["monomer stack"]), group)
        layers = [part for part in module.modules() if isinstance(part, RegatheringLayer)]
        assert len(layers) == 4 * len(module.blocks)  # row attention, outer product, both triangle attentions
        found = []
        for checkpointing in (True, False):
            module.checkpointing = checkpointing
            keep_gathered(module)
            found.append({layer.keeps_gathered for layer in layers} == {checkpointing})
        return found

    assert on_one_line(2, run) == [[True, True]] * 2


def test_an_empty_stack_gives_back_what_it_gets() -> None:
    stack = AxialEvoformerStack.__new__(AxialEvoformerStack)
    nn.Module.__init__(stack)
    stack.blocks = nn.ModuleList()
    given: tuple[Tensor, ...] = (torch.ones(1), torch.ones(2))
    assert all(a is b for a, b in zip(stack(*given, torch.ones(1), torch.ones(1)), given, strict=True))


def test_blocks_without_all_steps_are_refused() -> None:
    with torch.device("meta"):
        mini = AlphaFold(model_config("mini"))
    with pytest.raises(ConfigError, match="lack attention along an axis: use dap=1"):
        refuse_missing_steps(mini)
    refuse_missing_steps(plain_module(CASES["monomer stack"]))


@pytest.mark.parametrize("small", [0, 2**30])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["monomer block", "multimer block"])
def test_gradients_are_those_of_one_process_whatever_leaves_in_one_message(
    name: str, ranks: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With even shards, and two backward passes through the same graph."""
    monkeypatch.setattr(training_block, "SMALL_MESSAGE", small)
    torch.manual_seed(0)
    block = plain_module(CASES[name]).eval()
    inputs = [torch.randn(4, 8, C_M).double(), torch.randn(8, 8, C_Z).double()]
    masks = [(torch.rand(shape) > 0.2).double() for shape in ((4, 8), (8, 8))]
    weights = [torch.randn_like(x) for x in inputs]
    cuts = CASES[name].cuts[:2]
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = block(*leaves, *masks)
    torch.autograd.backward(expected, weights)

    def run(group: Group) -> list[float]:
        shards, own_block = AxialShards(group), parallel(plain_module(CASES[name]).eval(), group)
        own = [shards.take(x, cut).clone().requires_grad_() for x, cut in zip(inputs, cuts, strict=True)]
        found = own_block(*own, *masks)
        own_weights = [shards.take(w, cut) for w, cut in zip(weights, cuts, strict=True)]
        errors = [
            difference(mine, shards.take(whole, cut), whole)
            for mine, whole, cut in zip(found, expected, cuts, strict=True)
        ]
        for passes in (1, 2):
            torch.autograd.backward(found, own_weights, retain_graph=True)
            for mine, whole, cut in zip(own, leaves, cuts, strict=True):
                assert mine.grad is not None
                assert whole.grad is not None
                errors.append(difference(mine.grad / passes, shards.take(whole.grad, cut), whole.grad))
        return errors

    assert max(error for rank in on_one_line(ranks, run) for error in rank) < 1e-12


class _Begun(TorchDispatchMode):
    """Counts backward passes of attention that are begun before their gradient."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.fastfold.gated_attention_begin.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("used", [True, False])
def test_attention_of_an_msa_without_a_gradient_is_not_begun(used: bool) -> None:
    """The MSA of the last block of the extra stack is not used."""

    def run(group: Group) -> int:
        shards, block = AxialShards(group), parallel(plain_module(CASES["multimer block"]).eval(), group)
        cuts = CASES["multimer block"].cuts[:2]
        inputs = [torch.randn(4, 8, C_M).double(), torch.randn(8, 8, C_Z).double()]
        own = [shards.take(x, cut).clone().requires_grad_() for x, cut in zip(inputs, cuts, strict=True)]
        msa, pair = block(*own, torch.ones(4, 8).double(), torch.ones(8, 8).double())
        with _Begun() as begun:
            (pair.sum() + msa.sum() if used else pair.sum()).backward()
        return begun.count

    # Attention around starting nodes is begun in both.
    assert on_one_line(2, run)[0] == (2 if used else 1)
