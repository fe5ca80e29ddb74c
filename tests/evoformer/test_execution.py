"""Blocks and in-place updates change nothing but memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from fastfold import kernels
from fastfold.evoformer.evoformer import EvoformerBlock
from fastfold.evoformer.execution import (
    Block,
    CallSettings,
    ExecutionPolicy,
    PolicyModule,
    calling,
    set_policy,
)
from fastfold.kernels.ops.triangle_multiplication.passes import ContractionPlan
from tests.helpers.networks import oracle_config


def _block(global_column: bool = False, outer_first: bool = False) -> EvoformerBlock:
    config = oracle_config().model.embeddings_and_evoformer.evoformer
    config.outer_product_mean.first = outer_first
    torch.manual_seed(0)
    block = EvoformerBlock(config, 32, 24, global_column=global_column, zero_init=False).double().eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return block


def _module(policy: ExecutionPolicy) -> PolicyModule:
    module = PolicyModule()
    module.policy = policy
    return module


def _inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    msa, pair = torch.randn(7, 13, 32).double(), torch.randn(13, 13, 24).double()
    msa_mask, residues = (torch.rand(7, 13) > 0.2).double(), (torch.rand(13) > 0.2).double()
    return msa, pair, msa_mask, residues[:, None] * residues


@pytest.mark.parametrize("global_column", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("block_elements", [1, 1000, 10**9, None])
def test_blocks_and_in_place_equal_the_plain_pass(
    global_column: bool, inplace: bool, block_elements: int | None
) -> None:
    block = _block(global_column)
    with torch.no_grad():
        expected = block(*_inputs())
        set_policy(block, ExecutionPolicy(block_elements=block_elements, inplace=inplace))
        inputs = _inputs()
        found = block(*inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    # In place means in the input's memory, and not in place means that the input is left alone.
    for result, given, original in zip(found, inputs[:2], _inputs()[:2], strict=True):
        assert (result.data_ptr() == given.data_ptr()) == inplace
        assert torch.equal(given, original) != inplace


@pytest.mark.parametrize("block_elements", [1, 500])
def test_blocks_give_the_same_gradients(block_elements: int) -> None:
    def gradients(policy: ExecutionPolicy) -> list[torch.Tensor]:
        block = _block()
        set_policy(block, policy)
        msa, pair, *masks = _inputs()
        leaves = [msa.requires_grad_(), pair.requires_grad_(), *block.parameters()]
        out_msa, out_pair = block(msa, pair, *masks)
        weight = torch.linspace(-1, 1, 24).double()
        loss = out_msa.square().sum() + (out_pair * weight).square().sum()
        return list(torch.autograd.grad(loss, leaves))

    plain = gradients(ExecutionPolicy())
    blocked = gradients(ExecutionPolicy(block_elements=block_elements, inplace=True))
    for a, b in zip(blocked, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("elements", [None, 2 * 3 * 4])
@pytest.mark.parametrize("mode", ["gradients", "in place", "new memory"])
def test_a_branch_of_columns_sees_them_as_rows(elements: int | None, mode: str) -> None:
    """Each block is transposed with its dropout; the result has the caller's layout, and its memory if in place."""
    x = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.manual_seed(0))
    dropout = torch.tensor([0.0, 2.0, 1.0]).double().view(3, 1, 1)
    expected, shapes = x + dropout * x.cumsum(0), []

    def sum_along_rows(block: Block) -> Tensor:
        shapes.append((*block.x.shape, block.rows))
        return block.add(block.x.cumsum(-2))

    policy = ExecutionPolicy(block_elements=elements, inplace=mode == "in place")
    with torch.set_grad_enabled(mode == "gradients"):
        found = _module(policy).apply_residual(x, sum_along_rows, dim=-2, dropout=dropout, columns=True)
    assert torch.equal(found, expected)
    assert found.is_contiguous()
    assert (found is x) == (mode == "in place")
    blocks = [slice(0, 5)] if elements is None else [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert shapes == [(rows.stop - rows.start, 3, 4, rows) for rows in blocks]


@pytest.mark.parametrize("block_elements", [None, 12])
@pytest.mark.parametrize(("dim", "columns"), [(-3, False), (-3, True), (-2, True)])
def test_blocks_hold_their_part_of_the_mask(dim: int, columns: bool, block_elements: int | None) -> None:
    x, shown = torch.randn(2, 4, 6, 1), list[int]()

    def check(block: Block) -> Tensor:
        assert block.mask is not None
        assert torch.equal(block.mask, block.x.squeeze(-1))
        shown.append(block.mask.shape[-1 if (dim == -2) != columns else -2])
        return block.x

    _module(ExecutionPolicy(block_elements=block_elements)).apply_residual(
        x, check, dim=dim, mask=x.squeeze(-1), columns=columns
    )
    assert shown == ([x.shape[dim]] if block_elements is None else [1] * x.shape[dim])


@pytest.mark.parametrize("block_elements", [None, 12])
@pytest.mark.parametrize("columns", [False, True])
def test_blocks_carry_the_policy_of_their_module(columns: bool, block_elements: int | None) -> None:
    policy = ExecutionPolicy(block_elements=block_elements)
    blocks: list[Block] = []
    _module(policy).apply_residual(
        torch.zeros(4, 6, 2), lambda block: blocks.append(block) or block.x, dim=-3, columns=columns
    )
    assert len(blocks) == (1 if block_elements is None else 4)
    assert all(block.policy is policy for block in blocks)


def test_a_triangle_multiplication_reads_the_plan_of_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    block = EvoformerBlock(oracle_config().model.embeddings_and_evoformer.evoformer, 16, 8)
    layer, plan, plans = block.triangle_multiplication_outgoing, ContractionPlan(channels=3), []
    layer.policy = ExecutionPolicy(contraction=plan)
    monkeypatch.setattr(kernels, "triangle_multiplication", lambda x, *_, plan, **__: plans.append(plan) or x)
    layer(torch.zeros(4, 4, 8), torch.ones(4, 4))
    assert plans == [plan]


def test_dropout_is_drawn_in_training_alone() -> None:
    """By the settings of the call, else by the mode of the layer's dropout."""
    layer, pair = _block().pair_transition, _inputs()[1]
    drawn: list[Tensor] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            drawn.append(x)
            return torch.zeros(1, dtype=x.dtype)

    def update(dropout: nn.Module) -> Tensor:
        return layer.apply_residual(pair, lambda block: block.add(block.x), dim=-3, dropout=dropout)

    for training, call, expected in (
        (True, None, True),
        (False, None, False),
        (True, CallSettings(training=False), False),
        (False, CallSettings(training=True), True),
    ):
        drawn.clear()
        with torch.no_grad(), nullcontext() if call is None else calling(call):
            found = update(Watched().train(training))
        assert [x is pair for x in drawn] == [True] * expected
        assert torch.equal(found, pair if expected else 2 * pair)


def test_the_two_orders_of_the_outer_product_differ() -> None:
    """The multimer network updates the pair before the MSA."""
    last, first = (_block(outer_first=order)(*_inputs()) for order in (False, True))
    assert not torch.allclose(last[0], first[0])
    # Only with the outer product first does the pair see the MSA as it came in.
    msa, pair, *masks = _inputs()
    expected = _block(outer_first=True).outer_product_mean(msa, pair, masks[0])
    torch.testing.assert_close(_block().outer_product_mean(msa, pair, masks[0]), expected)


def test_masked_residues_do_not_reach_the_others() -> None:
    """Garbage behind the masks changes no valid position."""
    block = _block()
    msa, pair, msa_mask, pair_mask = _inputs()
    keep = pair_mask.diagonal() > 0
    msa_mask = msa_mask * keep
    garbage_msa = torch.where(msa_mask[..., None] > 0, msa, torch.full_like(msa, 7.0))
    garbage_pair = torch.where(pair_mask[..., None] > 0, pair, torch.full_like(pair, -5.0))
    expected = block(msa, pair, msa_mask, pair_mask)[1][keep][:, keep]
    found = block(garbage_msa, garbage_pair, msa_mask, pair_mask)[1][keep][:, keep]
    # Row attention of a masked row's own keys aside, valid pairs see valid pairs only.
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_batch_dimensions_are_independent() -> None:
    block = _block()
    one = _inputs()
    batch = [torch.stack([x, x.flip(0)]) if x.dim() == 3 else torch.stack([x, x]) for x in one]
    together = block(*batch)
    for i in range(2):
        alone = block(*[x[i] for x in batch])
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("residual", [False, True])
def test_recomputed_blocks_keep_their_inputs_alone(residual: bool) -> None:
    x = torch.randn(8, 3, 4, dtype=torch.float64, generator=torch.manual_seed(0)).requires_grad_()

    def squash(rows: Tensor) -> Tensor:
        return rows.exp().tanh().sin()

    def run(policy: ExecutionPolicy) -> tuple[Tensor, Tensor, int]:
        saved: list[int] = []

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            found = (
                _module(policy).apply_residual(x, lambda block: block.add(squash(block.x)), dim=0)
                if residual
                else policy.map(x, lambda rows, _: squash(rows), dim=0)
            )
        return found, torch.autograd.grad(found.square().sum(), x)[0], sum(saved)

    plain, recomputed = (
        run(ExecutionPolicy(block_elements=24, recompute=recompute)) for recompute in (False, True)
    )
    assert torch.equal(plain[0], recomputed[0])
    assert torch.equal(plain[1], recomputed[1])
    assert recomputed[2] <= x.numel() < 3 * x.numel() <= plain[2]


@pytest.mark.slow
def test_a_compiled_layer_has_the_settings_of_each_call() -> None:
    """The compiler cannot trace context variables: it must not take the settings of its first call for all."""
    layer, (_, pair, _, mask) = _block().triangle_attention_starting, _inputs()
    assert layer is not None
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    plain = layer(pair, mask)
    assert torch.equal(compiled(pair, mask), plain)
    compiled = torch.compile(layer, backend="eager")
    dropped = []
    for called in (layer, compiled):
        with calling(CallSettings(training=True, generator=torch.Generator().manual_seed(0))):
            dropped.append(called(pair, mask))
    assert torch.equal(*dropped)
    assert not torch.equal(dropped[0], plain)
    assert torch.equal(compiled(pair, mask), plain)
