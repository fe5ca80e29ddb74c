"""Superposition, TM-score and GDT against the program of their authors and against hand-computed cases."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastfold.errors import ConfigError, InputError
from fastfold.protein.metrics.lddt import drmsd, lddt
from fastfold.protein.metrics.tm_score import (
    GDT_HA_CUTOFFS,
    gdt,
    gdt_shares,
    rmsd,
    superpose,
    tm_score,
    tm_score_scale,
)


def _trace(n: int) -> np.ndarray:
    """An invented chain of helices and turns: 3.8 Å or so between neighbours, the same on every machine."""
    i = np.arange(n, dtype=float)
    step = np.stack([np.cos(1.75 * i), np.sin(1.75 * i), 0.45 + 0 * i], -1) * 3.0
    axis = np.sign(np.sin(i / 7.0))[:, None]
    drift = np.stack([0.6 * np.sin(i / 5.0), 0.6 * np.cos(i / 9.0), 0 * i], -1)
    return np.cumsum(step * np.array([1.0, 1.0, 0.0]) + step * axis * np.array([0, 0, 1.0]) + drift, 0)


def _case(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prediction, reference and mask: positions with three decimals, as a file has them."""
    n = {"bent": 120, "noisy": 90, "drifting": 180, "unrelated": 75, "short": 12, "gaps": 150}[name]
    reference = _trace(n)
    i = np.arange(n, dtype=float)
    noise = np.stack([np.sin(12.9 * i**1.3), np.sin(78.2 * i**1.2), np.sin(37.7 * i**1.1)], -1)
    mask = np.ones(n)
    if name == "bent":
        turn = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
        predicted = np.where(
            (i < 70)[:, None], reference, (reference - reference[70]) @ turn.T + reference[70]
        )
        predicted = predicted + 0.3 * noise
    elif name == "unrelated":
        predicted = 15.0 * np.stack([np.cos(i), np.sin(0.37 * i), np.cos(0.11 * i)], -1)
    elif name == "drifting":
        predicted = reference + np.cumsum(noise, 0) * 0.8
    else:
        predicted = reference + noise * {"noisy": 3.0, "short": 1.5, "gaps": 2.0}[name]
    if name == "gaps":
        mask[20:31] = mask[97:] = 0.0
    return torch.from_numpy(predicted.round(3)), torch.from_numpy(reference.round(3)), torch.from_numpy(mask)


CASES = ("bent", "noisy", "drifting", "unrelated", "short", "gaps")


def _write(path: Path, points: torch.Tensor, mask: torch.Tensor) -> Path:
    lines = [
        f"ATOM  {i + 1:5d}  CA  ALA A{i + 1:4d}    {x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00           C"
        for i, (x, y, z) in enumerate(points.tolist())
        if mask[i]
    ]
    path.write_text("\n".join([*lines, "END", ""]))
    return path


def _program(
    folder: Path, predicted: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor
) -> list[float]:
    """TM-score, GDT-TS, GDT-HA and RMSD as the TM-score program prints them."""
    model = _write(folder / "model.pdb", predicted, mask)
    native = _write(folder / "native.pdb", reference, torch.ones(len(mask)))
    printed = subprocess.run(
        ["TMscore", str(model), str(native)], capture_output=True, text=True, check=True
    ).stdout
    names = ("TM-score", "GDT-TS-score", "GDT-HA-score", "RMSD of  the common residues")
    found = [re.search(rf"^{name}\s*=\s*([\d.]+)", printed, re.MULTILINE) for name in names]
    return [float(match.group(1)) for match in found if match]


def _ours(predicted: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> list[float]:
    n = len(mask)
    return [
        tm_score(predicted, reference, mask, reference_length=n),
        gdt(predicted, reference, mask, reference_length=n),
        gdt(predicted, reference, mask, cutoffs=GDT_HA_CUTOFFS, reference_length=n),
        rmsd(predicted, reference, mask).item(),
    ]


PRINTED = {
    "bent": [0.6504, 0.6625, 0.6042, 5.838],
    "noisy": [0.5164, 0.5028, 0.2583, 3.523],
    "drifting": [0.4498, 0.3917, 0.2083, 6.718],
    "unrelated": [0.0691, 0.07, 0.05, 19.563],
    "short": [0.2198, 0.8333, 0.625, 1.456],
    "gaps": [0.4578, 0.3567, 0.2183, 2.339],
}
"""What the TM-score program (Debian's tm-align 20190822) prints for each case."""


@pytest.mark.parametrize("name", CASES)
def test_scores_that_the_program_printed(name: str) -> None:
    """TM-score and RMSD to the printed digits; GDT never worse, as more superpositions are tried."""
    theirs, ours = PRINTED[name], _ours(*_case(name))
    assert ours[0] == pytest.approx(theirs[0], abs=1e-4)
    assert ours[3] == pytest.approx(theirs[3], abs=1e-3)
    for found, printed in zip(ours[1:3], theirs[1:3], strict=True):
        assert printed - 1e-4 < found < printed + 0.07


@pytest.mark.parametrize("name", CASES)
def test_recorded_numbers_are_the_programs(name: str, tmp_path: Path) -> None:
    if shutil.which("TMscore") is None:
        pytest.skip("needs the program TMscore (Debian: apt-get install tm-align)")
    assert _program(tmp_path, *_case(name)) == pytest.approx(PRINTED[name], abs=1.1e-4)


def test_scale_of_the_tm_score() -> None:
    """Zhang & Skolnick 2004, equation 5; short chains keep 0.5 Å."""
    assert tm_score_scale(100) == pytest.approx(1.24 * 85 ** (1 / 3) - 1.8)
    assert tm_score_scale(15) == tm_score_scale(1) == tm_score_scale(18) == 0.5


def test_one_residue_far_away() -> None:
    """All but one of 20 residues fit exactly: both scores are 19/20 up to what the last one adds."""
    reference = torch.from_numpy(_trace(20))
    predicted = reference.clone()
    predicted[-1] += 1000.0
    assert tm_score(predicted, reference, torch.ones(20)) == pytest.approx(0.95, abs=1e-5)
    assert gdt(predicted, reference, torch.ones(20)) == pytest.approx(0.95)
    assert tm_score(reference, reference, torch.ones(20), reference_length=40) == pytest.approx(0.5)
    assert gdt(reference, reference, torch.ones(20), reference_length=40) == pytest.approx(0.5)


def test_gdt_counts_each_cutoff() -> None:
    """Two of 200 residues are off by more than two cutoffs each, so that no motion saves them as well."""
    reference = torch.zeros(200, 3).double()
    reference[:, 0] = 3.8 * torch.arange(200)
    reference[:, 1] = 5.0 * torch.sin(torch.arange(200.0))
    predicted = reference.clone()
    predicted[[50, 150], 2] += torch.tensor([3.0, 9.0]).double()
    shares = gdt_shares(predicted, reference, torch.ones(200), (1.0, 4.0, 10.0))
    assert [round(200 * share) for share in shares] == [198, 199, 200]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_few_residues(count: int) -> None:
    """Nothing in common scores nothing, and one to three residues are no special case."""
    reference = torch.from_numpy(_trace(10))
    mask = (torch.arange(10) < count).double()
    predicted = reference.flip(1) * 1.0
    for score in (tm_score(predicted, reference, mask), gdt(reference, reference, mask)):
        assert 0.0 <= score <= 1.0
        assert (score > 0) == (count > 0)
    assert rmsd(reference + 1.0, reference, mask).item() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("score", [tm_score, gdt, rmsd])
def test_positions_that_are_not_finite_are_refused_unless_masked(
    score: Callable[[Tensor, Tensor, Tensor], Tensor | float], wrong: float
) -> None:
    reference = 3.8 * torch.eye(3).repeat(10, 1).cumsum(0)
    moved, mask = reference.clone() + 1.0, torch.ones(30)
    expected = score(moved[1:], reference[1:], mask[1:])
    moved[0, 1] = wrong
    for pair in ((moved, reference), (reference, moved)):
        with pytest.raises(InputError, match="a position is not finite"):
            score(*pair, mask)
    mask[0] = 0.0
    assert float(score(moved, reference, mask)) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("score", [tm_score, gdt, rmsd, lddt, drmsd])
def test_points_that_do_not_belong_together_are_refused(
    score: Callable[[Tensor, Tensor, Tensor], Tensor | float],
) -> None:
    """Some of them would be broadcast, and give a number."""
    points, mask = torch.randn(10, 3), torch.ones(10)
    for wrong in (
        (points, points[:1], mask),
        (points, points[:9], mask),
        (points, points, mask[:1]),
        (points, points, torch.ones(10, 10)),
        (points[:, :2], points[:, :2], mask),
        (torch.randn(10, 37, 3), torch.randn(10, 37, 3), mask),
    ):
        with pytest.raises(InputError, match=r"expected points \[\*, N, 3\] of both structures and a mask"):
            score(*wrong)
    with pytest.raises(InputError, match="expected tensors of points, points and a mask, found ndarray"):
        score(points.numpy(), points, mask)  # type: ignore[arg-type]


@pytest.mark.parametrize("score", [tm_score, gdt])
def test_structures_are_scored_one_by_one(score: Callable[..., float]) -> None:
    points = torch.randn(2, 10, 3)
    with pytest.raises(InputError, match="expected one structure"):
        score(points, points, torch.ones(2, 10))
    with pytest.raises(ConfigError, match="reference_length must be a whole number"):
        score(points[0], points[0], torch.ones(10), reference_length=10.5)


def test_gdt_needs_a_cutoff() -> None:
    points = torch.randn(10, 3)
    with pytest.raises(InputError, match="at least one cutoff"):
        gdt(points, points, torch.ones(10), cutoffs=())


@pytest.mark.parametrize("score", [tm_score, gdt])
def test_a_reference_shorter_than_its_mask_is_refused(score: Callable[..., float]) -> None:
    points = torch.randn(30, 3)
    with pytest.raises(InputError, match="a reference of 29 residues has 30 in the mask"):
        score(points, points, torch.ones(30), reference_length=29)


def test_superposition_of_a_mirror_image_is_no_reflection() -> None:
    points = torch.randn(2, 30, 3, generator=torch.Generator().manual_seed(0)).double()
    motion = superpose(points * torch.tensor([1.0, 1.0, -1.0]).double(), points, torch.ones(2, 30).double())
    torch.testing.assert_close(torch.linalg.det(motion.rotation), torch.ones(2).double())
    assert (rmsd(points * -1.0, points, torch.ones(2, 30)) > 0.5).all()


def test_superposition_sees_only_weighted_points() -> None:
    """Points of weight 0 do not matter, and no perturbation of the found motion fits better."""
    generator = torch.Generator().manual_seed(0)
    moving, fixed = (torch.randn(12, 3, generator=generator).double() for _ in range(2))
    weights = torch.rand(12, generator=generator).double()
    weights[7] = 0.0
    motion = superpose(moving, fixed, weights)
    other = moving.clone()
    other[7] += 100.0
    torch.testing.assert_close(superpose(other, fixed, weights).rotation, motion.rotation)

    def misfit(rotation: torch.Tensor, translation: torch.Tensor) -> float:
        return (weights * (moving @ rotation.mT + translation - fixed).square().sum(-1)).sum().item()

    best = misfit(motion.rotation, motion.translation)
    for _ in range(30):
        skew = 0.02 * torch.randn(3, 3, generator=generator).double()
        turned = torch.linalg.matrix_exp(skew - skew.mT) @ motion.rotation
        shift = 0.02 * torch.randn(3, generator=generator).double()
        assert misfit(turned, motion.translation + shift) > best


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(3, 60))
def test_rigid_motion_changes_no_score(seed: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.from_numpy(_trace(n))
    predicted = reference + torch.randn(n, 3, generator=generator).double()
    turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator).double())
    moved = predicted @ (turn * torch.linalg.det(turn)).mT + 30.0
    mask = torch.ones(n)
    assert tm_score(moved, reference, mask) == pytest.approx(tm_score(predicted, reference, mask), abs=1e-9)
    assert rmsd(moved, reference, mask).item() == pytest.approx(rmsd(predicted, reference, mask).item())
    exact = reference @ (turn * torch.linalg.det(turn)).mT - 10.0
    assert tm_score(exact, reference, mask) == pytest.approx(1.0)
    assert gdt(exact, reference, mask) == 1.0


def test_a_tm_score_takes_little_time() -> None:
    """250 residues with a middling score; about 40 ms on one core, and the limit leaves room for a slow one."""
    reference = torch.from_numpy(_trace(250))
    predicted = reference + 4.0 * torch.randn(250, 3, generator=torch.Generator().manual_seed(0)).double()
    seconds = []
    for _ in range(3):
        start = time.process_time()
        tm_score(predicted, reference, torch.ones(250))
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.2
