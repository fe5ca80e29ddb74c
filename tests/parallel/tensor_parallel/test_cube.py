"""The 3D matrix product on a cube of eight ranks, of which each holds an eighth of every tensor."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from fastfold.parallel.comm.groups import Group, shard_sizes
from fastfold.parallel.tensor_parallel.linear import CubeLinear, CubeLines, Linear3D
from tests.helpers.thread_ranks import on_a_grid, together

BATCH, INNER, IN, OUT = 9, 2, 6, 10


def test_parts_of_product_and_gradients_are_those_of_the_whole() -> None:
    """Rank (x, y, z) has slab x of the batch, inputs y and outputs z; slabs and blocks are cut again, unevenly."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, INNER, IN), (OUT, IN), (BATCH, INNER, OUT))
    whole, weight, grad = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    y = whole @ weight.T
    whole_grad, weight_grad = grad @ weight, torch.einsum("bno,bni->oi", grad, whole)

    def run(x: Group, y_line: Group, z: Group) -> list[float]:
        slab = x.shard(BATCH)
        batch = slab.stop - slab.start
        block = z.shard(OUT)
        rows, cuts = shard_sizes(batch, 2), shard_sizes(block.stop - block.start, 2)

        def inside(part: slice, group: Group) -> slice:
            own = group.shard(part.stop - part.start)
            return slice(part.start + own.start, part.start + own.stop)

        of_input = (inside(slab, z), slice(None), y_line.shard(IN))
        of_weight = (inside(block, x), y_line.shard(IN))
        of_output = (inside(slab, y_line), slice(None), block)
        own, part = whole[of_input].clone().requires_grad_(), weight[of_weight].clone().requires_grad_()
        found = CubeLinear.apply(own, part, rows, cuts, CubeLines(input=z, weight=x, output=y_line))
        found.backward(grad[of_output])
        pairs = ((found, y[of_output]), (own.grad, whole_grad[of_input]), (part.grad, weight_grad[of_weight]))
        return [float((a - b).detach().abs().max()) for a, b in pairs]  # type: ignore[operator]

    assert max(error for rank in on_a_grid((2, 2, 2), run) for error in rank) < 1e-12


def test_a_weight_is_cut_once_along_its_inputs_and_twice_along_its_outputs() -> None:
    layer, slab, line = object.__new__(Linear3D), SimpleNamespace(size=2), SimpleNamespace(size=2)
    nn.Module.__init__(layer)
    inputs, outputs = SimpleNamespace(rank=0), SimpleNamespace(rank=1)
    layer.before = SimpleNamespace(features=inputs, rows=[slab, line])  # type: ignore[assignment]
    layer.after = SimpleNamespace(features=outputs)  # type: ignore[assignment]
    layer.in_parts, layer.out_parts = SimpleNamespace(sizes=[3, 2]), SimpleNamespace(sizes=[6, 5])  # type: ignore[assignment]
    specs = layer._weight_specs()
    assert [(spec.dim, spec.group, list(spec.sizes)) for spec in specs] == [
        (1, inputs, [3, 2]),
        (0, outputs, [6, 5]),
        (0, slab, [3, 2]),
    ]


def test_a_rank_alone_multiplies_and_sends_nothing() -> None:
    alone = Group(None)
    x, weight = torch.randn(3, 4).double(), torch.randn(5, 4).double().requires_grad_()
    with alone.reporter.record() as log:
        found = CubeLinear.apply(x, weight, [3], [5], CubeLines(alone, alone, alone))
        found.sum().backward()
    assert torch.equal(found, x @ weight.T)
    torch.testing.assert_close(weight.grad, x.sum(0).expand(5, 4))
    assert log.entries == []
    assert together(1, lambda rank: rank) == [0]
