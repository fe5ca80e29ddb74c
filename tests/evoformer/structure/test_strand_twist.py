"""Strands turned to the left about the line between them have a positive twist, their mirror images a negative one."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fastfold.evoformer.config import descent_settings, model_config
from fastfold.evoformer.structure import distogram_descent
from fastfold.evoformer.structure.distogram_embedding import turned
from fastfold.evoformer.structure.distogram_potential import strand_twist
from tests.evoformer.structure.test_distogram_descent import CONFIG, beta, certain, helix, run

MIRROR = torch.tensor([1.0, 1.0, -1.0])
STRAND, LOOP = 9, 4


def sheet(degrees: float, parallel: bool) -> Tensor:
    """Return CA positions of three strands 4.8 Å apart, each turned against the one before, with loops."""
    along = 3.4 * (torch.arange(STRAND) - STRAND // 2)
    strands = []
    for number in range(3):
        angle = torch.deg2rad(torch.tensor(degrees * number))
        points = torch.stack(
            [torch.full((STRAND,), 4.8 * number), along * angle.cos(), along * angle.sin()], -1
        )
        strands.append(points if parallel or number % 2 == 0 else points.flip(0))
    parts = [strands[0]]
    for before, after in itertools.pairwise(strands):
        share = torch.linspace(0, 1, LOOP + 2)[1:-1, None]
        parts += [before[-1] + share * (after[0] - before[-1]), after]
    return torch.cat(parts)


@pytest.mark.parametrize("parallel", [False, True])
def test_the_twist_tells_a_sheet_from_its_mirror_image(parallel: bool):
    index = torch.arange(3 * STRAND + 2 * LOOP)
    left = strand_twist(sheet(-25.0, parallel), index)
    assert left > 1
    torch.testing.assert_close(strand_twist(sheet(-25.0, parallel) * MIRROR, index), -left)
    torch.testing.assert_close(strand_twist(sheet(25.0, parallel), index), -left)
    moved = (
        sheet(-25.0, parallel) @ torch.linalg.qr(torch.randn(3, 3, generator=torch.manual_seed(1)))[0] + 50.0
    )
    torch.testing.assert_close(strand_twist(moved, index).abs(), left, rtol=1e-3, atol=0)


def test_helices_flat_sheets_short_and_broken_chains_have_none():
    assert strand_twist(helix(40)[:, 4:], torch.arange(40)) == 0
    assert strand_twist(sheet(0.0, True), torch.arange(35)).abs() < 1e-3
    for length in (1, 2, 8, 9):
        assert strand_twist(helix(length)[:, 4:], torch.arange(length)) == 0
    # Residues of other chains do not belong to a strand.
    assert strand_twist(sheet(-25.0, False), 100 * torch.arange(35)) == 0


@pytest.mark.parametrize("degrees", [-25.0, 25.0])
def test_of_two_mirror_images_the_descent_takes_that_whose_strands_twist_to_the_left(
    degrees: float, monkeypatch: pytest.MonkeyPatch
):
    length = 3 * STRAND + 2 * LOOP
    pose = helix(length)
    target = turned(pose, sheet(degrees, False))
    images = [target, turned(pose, target[:, 4:] * MIRROR)]
    config = CONFIG.copy_and_resolve_references()
    config.steps, config.last_steps, config.backbone_steps, config.twist = 0, 0, 0, 1e6
    monkeypatch.setattr(distogram_descent, "mirror_images", lambda *_, **__: images)
    found = run(pose, certain(beta(target)), config=config)
    expected = images[0] if degrees < 0 else images[1]
    assert torch.equal(found, expected)
    config.twist = 0.0
    assert torch.equal(run(pose, certain(beta(target)), config=config), target)


def test_weights_from_before_a_setting_get_its_value_of_today():
    config = model_config("mini")
    settings = config.model.heads.structure_module.distogram_descent
    del settings.twist
    settings.steps = 7
    found = descent_settings(config)
    assert found is not None
    assert (found.twist, found.steps) == (CONFIG.twist, 7)
    assert descent_settings(model_config("model_1")) is None
