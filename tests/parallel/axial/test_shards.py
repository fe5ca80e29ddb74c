"""Cut axes in general: products over a cut axis, joined rows, and ranks that do not agree."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.kernels.common.layout import padded_width
from fastfold.parallel.axial import matmul
from fastfold.parallel.axial import shards as axial
from fastfold.parallel.axial.matmul import choose_contraction
from fastfold.parallel.axial.shards import AxialShards, ShardRows, _weighted_sum, check_alike, checksum
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from tests.helpers.spawn_ranks import launch
from tests.helpers.thread_ranks import on_one_line
from tests.parallel.alphafold.axial_cases import difference

CHANNELS, A, B, K = 5, 7, 4, 3


def _products(ranks: int) -> list[float]:
    """Differences of products, and gradients of both factors, in blocks of one, two and all channels."""
    shards = AxialShards(ParallelMesh(ParallelPlan(dap=ranks)).group("dap"))
    torch.manual_seed(0)
    left, right = (torch.randn(2, CHANNELS, size, K, dtype=torch.float64) for size in (A, B))
    weight = torch.randn(2, CHANNELS, A, B, dtype=torch.float64)
    whole = [x.clone().requires_grad_() for x in (left, right)]
    expected = whole[0] @ whole[1].mT
    (expected * weight).sum().backward()
    found = []
    for dim, way, channels in product((-2, -1), ("terms", "channels"), (1, 2, CHANNELS)):
        own = [shards.take(x, -1).clone().requires_grad_() for x in (left, right)]
        ours = shards.contract(*own, dim, K, way=way, block_elements=2 * channels * A * B)
        (ours * shards.take(weight, dim)).sum().backward()
        found.append(difference(ours.detach(), shards.take(expected.detach(), dim), expected))
        found += [
            difference(x.grad, shards.take(y.grad, -1), y.grad) for x, y in zip(own, whole, strict=True)
        ]
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_product_over_a_cut_axis_equals_the_whole_one(ranks: int) -> None:
    """Either way, whatever the number of blocks, for uneven and (4 ranks) empty shards, in both results' cuts."""
    for found in launch(_products, ranks, ranks):
        assert len(found) == 36
        assert max(found) < 1e-14


@pytest.mark.parametrize(("way", "free"), [("terms", False), ("channels", False), ("channels", True)])
def test_products_of_padded_matrices_are_the_same(
    way: str, free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: whole matrices have multiples of 8 rows and columns, and the rest of them is zero."""
    widths = []
    monkeypatch.setattr(matmul, "_width", lambda x, n: widths.append(n) or padded_width(n))
    a, b, k = (5, 5, 8) if free else (5, 11, 6)
    torch.manual_seed(0)
    left, right = (torch.randn(CHANNELS, size, k, dtype=torch.float64) for size in (a, b))
    weight = torch.randn(CHANNELS, a, b, dtype=torch.float64)
    whole = [x.clone().requires_grad_() for x in (left, right)]
    expected = whole[0] @ whole[1].mT
    (expected * weight).sum().backward()

    def run(group: Group) -> list[float]:
        shards, cut = AxialShards(group), -2 if free else -1
        own = [shards.take(x, cut).clone().requires_grad_() for x in (left, right)]
        ours = shards.contract(*own, -2, a if free else k, free=free, way=way, block_elements=2 * a * b)
        assert ours.shape == shards.take(expected, -2).shape
        (ours * shards.take(weight, -2)).sum().backward()
        grads = [
            difference(x.grad, shards.take(y.grad, cut), y.grad) for x, y in zip(own, whole, strict=True)
        ]
        return [difference(ours.detach(), shards.take(expected.detach(), -2), expected), *grads]

    for ranks in (2, 3):
        assert max(error for rank in on_one_line(ranks, run) for error in rank) < 1e-14
    assert widths


def test_contractions_take_the_way_that_sends_less_and_refuse_unknown_ones() -> None:
    square = (256, 256, 256, 128)
    assert [choose_contraction("auto", *square, ranks) for ranks in (2, 3, 4, 128, 129)] == [
        "terms",
        "terms",
        "channels",
        "channels",
        "terms",
    ]
    # A long contracted axis makes large factors of a small product.
    assert choose_contraction("auto", 8, 8, 1024, 128, 64) == "terms"
    with pytest.raises(ValueError, match="contraction: expected one of auto, terms, channels, found 'rows'"):
        choose_contraction("rows", *square, 4)


def _switches(ranks: int) -> list[bool]:
    """From rows to columns and back over the memory of the first, in blocks of channels."""
    axial._BLOCK = 1
    shards = AxialShards(ParallelMesh(ParallelPlan(dap=ranks)).group("dap"))
    found = []
    for lengths in ((A, A), (A, B), (B, A)):
        whole = torch.arange(2.0 * lengths[0] * lengths[1] * CHANNELS).view(2, *lengths, CHANNELS)
        rows = shards.take(whole, -3).clone()
        how = {} if lengths == (A, A) else {"blocks": 2}  # the second is larger or smaller than one
        columns = shards.reshard_into(rows, rows, cut=-2, join=-3, length=lengths[0], **how)
        found.append(torch.equal(columns, shards.take(whole, -2)))
        # Nothing new where there is room.
        found.append((columns.data_ptr() == rows.data_ptr()) == (columns.numel() <= rows.numel()))
        back = shards.reshard_into(columns, rows, cut=-3, join=-2, length=lengths[1])
        found += [torch.equal(back, shards.take(whole, -3)), back.data_ptr() == rows.data_ptr()]
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_switch_in_place_takes_the_memory_of_what_it_moves(ranks: int) -> None:
    """Shards of any lengths, of which those along the other axis are larger or smaller."""
    for found in launch(_switches, ranks, ranks):
        assert len(found) == 12
        assert all(found), found


def _joined() -> Tensor:
    rows = ShardRows(ParallelMesh(ParallelPlan(dap=2)).group("dap"), [1, 2])
    return rows.join(torch.arange(3.0)[rows.own, None])


def test_rows_are_joined() -> None:
    for rows in launch(_joined, 2):
        assert torch.equal(rows, torch.arange(3.0)[:, None])


def _disagreement() -> str:
    group = ParallelMesh(ParallelPlan(dap=2)).group("dap")
    check_alike({"number of residues": 7}, group, torch.device("cpu"))
    try:
        check_alike({"number of residues": 7, "depth": 5 + group.rank}, group, torch.device("cpu"))
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_different_things_are_refused() -> None:
    for message in launch(_disagreement, 2):
        assert message == "the ranks of one dap group need the same inputs, but their depth differs: [5, 6]"


def test_a_checksum_tells_any_change_of_tensors() -> None:
    tensors = {
        "floats": torch.randn(3, 4),
        "doubles": torch.randn(2).double(),
        "halves": torch.randn(5).bfloat16(),
        "flags": torch.tensor([True, False]),
        "whole": torch.arange(6).reshape(2, 3),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
        "single": torch.zeros(1, 23)[:, :1],
    }
    found = checksum(tensors)
    assert found == checksum(dict(reversed(tensors.items())))
    assert found == checksum(tensors | {"floats": tensors["floats"].mT.contiguous().mT})
    others = [
        tensors | {"floats": tensors["floats"].flip(0)},
        tensors | {"floats": tensors["floats"] + 1e-6},
        tensors | {"flags": torch.tensor([False, True])},
        tensors | {"whole": tensors["whole"].int()},
        tensors | {"whole": tensors["whole"].reshape(3, 2)},
        tensors | {"none": torch.zeros(0, 5)},
        {"other" if name == "floats" else name: x for name, x in tensors.items()},
    ]
    assert len({found, *map(checksum, others)}) == len(others) + 1


def test_sums_on_a_device_tell_bytes_that_changed_places() -> None:
    block = torch.tensor([3, 255, 0, 7], dtype=torch.uint8)
    assert int(_weighted_sum(block)) == 3 + 2 * 255 + 4 * 7
    assert int(_weighted_sum(block.flip(0))) != int(_weighted_sum(block))
