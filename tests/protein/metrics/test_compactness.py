"""Size and density of CA traces are their definitions, and unresolved residues do not count."""

from __future__ import annotations

import pytest
import torch

from fastfold.protein.metrics.compactness import near_neighbors, radius_of_gyration


def test_the_radius_is_the_root_mean_square_distance_from_the_centre() -> None:
    points = torch.tensor([[0.0, 0, 0], [3.0, 0, 0], [0.0, 3, 0], [99.0, 9, 9]]).double()
    mask = torch.tensor([1.0, 1, 1, 0]).double()
    # Centre (1, 1, 0): squared distances 2, 5 and 5.
    assert float(radius_of_gyration(points, mask)) == pytest.approx(2.0)
    assert float(radius_of_gyration(points + 50, mask)) == pytest.approx(2.0)
    assert radius_of_gyration(points.expand(2, 4, 3), mask).shape == (2,)
    assert float(radius_of_gyration(points, 0 * mask)) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_radius_of_a_long_chain_in_half_precision(dtype: torch.dtype) -> None:
    points = (30 * torch.randn(400, 3, generator=torch.Generator().manual_seed(0))).to(dtype)
    mask = torch.arange(400) % 4 != 0
    exact = radius_of_gyration(points.double(), mask)
    points[~mask] = torch.nan
    torch.testing.assert_close(radius_of_gyration(points, mask).double(), exact, rtol=1e-6, atol=0.0)


def test_neighbours_count_beyond_two_residues_in_the_chain_only() -> None:
    straight = torch.arange(5.0)[:, None] * torch.tensor([3.8, 0, 0])
    assert near_neighbors(straight, torch.ones(5)) == 0.0
    bent = straight.clone()
    bent[4] = bent[1] + torch.tensor([0.0, 3.0, 0])
    assert near_neighbors(bent, torch.ones(5)) == pytest.approx(2 / 5)
    bent[4] = bent[2] + torch.tensor([0.0, 3.0, 0])
    assert near_neighbors(bent, torch.ones(5)) == 0.0


def test_unresolved_residues_have_no_neighbours() -> None:
    points, mask = torch.zeros(6, 3), torch.tensor([1.0, 1, 1, 1, 0, 0])
    assert near_neighbors(points, mask) == pytest.approx(2 / 4)
    assert near_neighbors(points, torch.zeros(6)) == 0.0
