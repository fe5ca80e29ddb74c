"""Cut axes in general: products over a cut axis, joined rows, mean gradients, and ranks that do not agree."""

from __future__ import annotations

import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.parallel.axial import AxialShards, Rows, check_alike, mean_gradients
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from tests.parallel.axial_cases import difference
from tests.parallel.launch import launch

CHANNELS, A, B, K = 5, 7, 4, 3


def _products() -> list[float]:
    """Differences of products, and gradients of both factors, in blocks of one, two and all channels."""
    shards = AxialShards(ParallelMesh(ParallelPlan(dap=2)).group("dap"))
    torch.manual_seed(0)
    left, right = (torch.randn(2, CHANNELS, size, K, dtype=torch.float64) for size in (A, B))
    weight = torch.randn(2, CHANNELS, A, B, dtype=torch.float64)
    whole = [x.clone().requires_grad_() for x in (left, right)]
    expected = whole[0] @ whole[1].mT
    (expected * weight).sum().backward()
    found = []
    for dim in (-2, -1):
        for channels in (1, 2, CHANNELS):
            own = [shards.take(x, -1).clone().requires_grad_() for x in (left, right)]
            product = shards.contract(*own, dim, block_elements=2 * channels * A * B)
            (product * shards.take(weight, dim)).sum().backward()
            found.append(difference(product.detach(), shards.take(expected.detach(), dim)))
            found += [difference(x.grad, shards.take(y.grad, -1)) for x, y in zip(own, whole, strict=True)]
    return found


def test_a_product_over_a_cut_axis_equals_the_whole_one() -> None:
    """Whatever the number of blocks in which it is sent, for uneven shards, in both results' cuts."""
    for found in launch(_products, 2):
        assert len(found) == 18
        assert max(found) < 1e-14


def _means() -> list[Tensor | None]:
    group = ParallelMesh(ParallelPlan(dap=2)).group("dap")
    parameters = [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(1)]
    for number, parameter in enumerate(parameters[:2]):
        parameter.grad = torch.full_like(parameter, 4.0 * group.rank + number)
    mean_gradients(parameters, group)
    rows = Rows(group, [1, 2])
    part = torch.arange(3.0)[rows.own, None]
    return [*(p.grad for p in parameters), rows.join(part)]


def test_gradients_are_averaged_and_rows_joined() -> None:
    for first, second, none, rows in launch(_means, 2):
        assert torch.equal(first, torch.full((3,), 2.0))
        assert torch.equal(second, torch.full((2,), 3.0, dtype=torch.float64))
        assert none is None
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
        assert message == "the ranks of one dap group work on one thing, but their depth differs: [5, 6]"
