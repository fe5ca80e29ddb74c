"""How operands are laid out for kernels: whatever their strides, every row is where the layout says."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fastfold.kernels.common.layout import (
    MAX_AXES,
    batch_elements,
    batched,
    contiguous,
    innermost,
    padded,
    rows_of,
    strides,
)


def _numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


LAYOUTS = {
    "plain": [_numbers(2, 3, 4)],
    "one row": [_numbers(4)],
    "an axis of one": [_numbers(5, 1, 3, 4)],
    "a part": [_numbers(6, 8, 4)[1:5, 2:7]],
    "axes exchanged": [_numbers(6, 5, 4).transpose(0, 1)],
    "expanded": [_numbers(3, 1, 4).expand(3, 5, 4)],
    "channels apart": [_numbers(4, 3, 5).permute(1, 2, 0)],
    "channels apart and not allowed": [_numbers(4, 3, 5).permute(2, 1, 0)],
    "channels apart, four axes": [_numbers(4, 6, 3, 8, 10).movedim(2, -1)[::2, ::2, ::2, ::2]],
    "four axes that do not merge": [_numbers(4, 6, 8, 10, 3)[::2, ::2, ::2, ::2]],
    "together": [_numbers(3, 4, 5), _numbers(4, 3, 2).transpose(0, 1), _numbers(3, 1, 7).expand(3, 4, 7)],
    "together, five axes": [_numbers(2, 2, 2, 2, 2, 3), _numbers(2, 2, 2, 2, 2, 3).permute(4, 3, 2, 1, 0, 5)],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_where_sizes_and_strides_say(name: str) -> None:
    """A kernel takes row number r apart into (outer, middle, inner) and reads from there: done here by hand."""
    tensors = LAYOUTS[name]
    apart = () if "not allowed" in name or "apart" not in name else (0,)
    rows = rows_of(*tensors, channels_apart=apart)
    middle, inner = rows.sizes
    assert 1 <= rows.axes <= MAX_AXES
    assert rows.count == tensors[0].shape[:-1].numel()
    for place, (given, laid_out, steps) in enumerate(zip(tensors, rows.tensors, rows.strides, strict=True)):
        assert place in apart or laid_out.shape[-1] == 1 or laid_out.stride(-1) == 1
        assert not any(steps[: MAX_AXES - rows.axes])  # an axis that is not there is not walked
        memory = torch.as_strided(laid_out, (laid_out.untyped_storage().size() // 4,), (1,), 0)
        for number, row in enumerate(given.reshape(rows.count, -1)):
            index = (number // inner // middle, number // inner % middle, number % inner)
            start = laid_out.storage_offset() + sum(i * step for i, step in zip(index, steps, strict=True))
            for channel, value in enumerate(row):
                assert memory[start + channel * laid_out.stride(-1)] == value


@pytest.mark.parametrize(
    "name", ["plain", "a part", "axes exchanged", "expanded", "channels apart", "together"]
)
def test_what_can_be_walked_over_is_not_copied(name: str) -> None:
    tensors = LAYOUTS[name]
    rows = rows_of(*tensors, channels_apart=(0,) if name == "channels apart" else ())
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(tensors, rows.tensors, strict=True))


def test_batches_are_merged_or_walked() -> None:
    x = _numbers(2, 3, 4, 5, 6, 7)
    assert torch.equal(batched(x), x.reshape(6, 4, 5, 6, 7))
    assert batched(x).data_ptr() == x.data_ptr()
    assert batched(x[0, 0]).shape == (1, 4, 5, 6, 7)
    assert list(batch_elements(x)) == list(itertools.product(range(2), range(3), range(4)))
    assert list(batch_elements(x[0, 0, 0])) == [()]
    assert list(batch_elements(x[:, :0])) == list(batch_elements(x[..., :0])) == []


def test_copies_are_made_where_they_are_needed() -> None:
    x = _numbers(4, 6)
    assert innermost(x[:, 2:5]).data_ptr() == x[:, 2:5].data_ptr()
    assert innermost(x[:, ::2]).is_contiguous()
    assert innermost(x[:, ::6]).data_ptr() == x.data_ptr()  # one channel has no neighbour
    found = contiguous(x.t())
    assert found is not None
    assert found.is_contiguous()
    assert contiguous(None) is None
    assert (strides(x, 1), strides(x, 2), strides(None, 3)) == ((6,), (0, 6), (0, 0, 0))


def test_rows_are_padded_to_the_next_power_of_two() -> None:
    for size in range(1, 5000):
        found = padded(size)
        assert found >= max(16, size)
        assert found == 16 or found < 2 * size
        assert found.bit_count() == 1
