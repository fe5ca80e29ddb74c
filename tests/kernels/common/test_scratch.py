"""Positions of tensors in blocks, whatever their strides, and without copies; buffers that are used again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastfold.kernels.common.scratch import Scratch, gradient_positions, position_blocks, share_of
from fastfold.kernels.cpu.linear import add_product

X = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("x", "merged"),
    [
        (X, True),
        (X[..., 1:3], True),  # channels alone are cut
        (X[:, :, :1], False),  # an axis of one before which others do not touch
        (X[:, :1, :1], True),
        (X.transpose(0, 1), False),
        (X[:, 1:], False),
        (X.expand(2, 2, 3, 4, 5), False),
        (X[:0], True),
        (X[0, 0, 0], True),
    ],
)
def test_blocks_are_views_of_all_positions_in_order(x: Tensor, merged: bool) -> None:
    found = [block for (block,) in position_blocks(7, x)]
    count = x.shape[:-1].numel()
    assert (max((len(block) for block in found), default=0) == min(7, count)) or not merged
    assert torch.equal(torch.cat([x.new_zeros(0, x.shape[-1]), *found]), x.reshape(-1, x.shape[-1]))
    for block in found:
        assert block.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_errors_of_products_do_not_grow_with_the_number_of_blocks() -> None:
    """A library that adds each summand of so small a matrix to the total is off by 1e-5 here."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(400, 1024, channels, generator=generator) for channels in (2, 12))
    total, scratch = torch.zeros(2, 12), Scratch(dtype=torch.bfloat16)
    for b_a, b_b in zip(a, b, strict=True):
        add_product(total, b_a.t(), b_b, scratch, b_a)
    exact = (a.double().mT @ b.double()).sum(0)
    assert (total - exact).norm() < 2e-6 * exact.norm()


@pytest.mark.slow
def test_strided_positions_can_be_compiled() -> None:
    """Which axes merge is asked of the strides: a view that is tried and fails ends a compilation."""

    def total(x: Tensor) -> Tensor:
        return torch.stack([block.sum() for (block,) in position_blocks(7, x)]).sum()

    compiled = torch.compile(total, backend="eager")
    assert compiled(X.transpose(0, 1)) == X.sum()


@pytest.mark.parametrize("summands", [0, 1, 2, 31, 32, 33, 5_000])
def test_a_share_of_a_sum_is_no_larger_than_the_mean_and_loses_nothing(summands: int) -> None:
    share = share_of(summands, torch.float16)
    assert 0.5 < share * max(1, summands) <= 1.0
    assert torch.frexp(torch.tensor(share)).mantissa == 0.5
    assert share_of(summands, torch.bfloat16) == share_of(summands, torch.float32) == 1.0


def test_a_transposed_copy_is_the_transposed_matrix() -> None:
    """Of rows that lie far apart too, in buffers that other names don't share."""
    scratch = Scratch()
    wide = torch.arange(5 * 40.0).view(5, 40)
    for matrix in (wide, wide[:, 3:20], wide[:, ::2], wide.t()):
        kept = scratch.copy("kept", wide)
        found = scratch.transpose("transposed", matrix)
        assert torch.equal(found, matrix.t())
        assert found.is_contiguous()
        assert torch.equal(kept, wide)


def test_only_tensors_with_gaps_or_of_another_dtype_are_copied() -> None:
    scratch, x = Scratch(), torch.randn(3, 4)
    assert scratch.contiguous("x", x) is x
    for other in (x.T, x.double(), x[:, ::2]):
        copy = scratch.contiguous("x", other)
        assert copy.data_ptr() != other.data_ptr()
        assert copy.dtype == torch.float32
        assert copy.is_contiguous()
        assert torch.equal(copy, other.float())


@pytest.mark.parametrize(
    ("dtype", "channels", "positions", "expected"),
    [
        (torch.float32, 128, 4096, 1024),
        (torch.float32, 4096, 4096, 256),
        (torch.bfloat16, 1024, 4096, 4096),
        (torch.bfloat16, 1024, 4097, 2048),
        (torch.bfloat16, 4096, 4097, 512),
    ],
)
def test_few_positions_in_bfloat16_are_one_block_and_blocks_of_many_are_large(
    dtype: torch.dtype, channels: int, positions: int, expected: int
) -> None:
    assert gradient_positions(channels, positions, dtype) == expected
