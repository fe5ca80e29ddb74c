"""Calibration: numbers of cases that are known beforehand."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from fastfold.training.report.plots import _draw, calibrate, calibration_png


def test_honest_network_has_no_error():
    values = np.linspace(0, 1, 101)
    result = calibrate(values, values)
    assert result.residues == 101
    assert result.pearson == pytest.approx(1)
    assert result.error == pytest.approx(0, abs=1e-12)
    assert result.bias == pytest.approx(0, abs=1e-12)


def test_noise_around_an_honest_estimate_is_no_calibration_error():
    """The network is right on average, and the correlation says how well it tells residues apart."""
    rng = np.random.default_rng(0)
    predicted = rng.uniform(0.2, 0.8, 200_000)
    true = np.clip(predicted + rng.uniform(-0.2, 0.2, predicted.size), 0, 1)
    result = calibrate(predicted, true)
    assert result.error < 0.005
    assert 0.7 < result.pearson < 0.9


def test_numbers_by_hand():
    """Two bins: means 0.2 and 0.6 predicted against 0.1 and 0.8 true, three residues and one."""
    result = calibrate(np.array([0.1, 0.2, 0.3, 0.6]), np.array([0.0, 0.1, 0.2, 0.8]), bins=2)
    np.testing.assert_array_equal(result.counts, [3, 1])
    np.testing.assert_allclose(result.predicted, [0.2, 0.6])
    np.testing.assert_allclose(result.true, [0.1, 0.8])
    assert result.error == pytest.approx((3 * 0.1 + 1 * 0.2) / 4)
    assert result.bias == pytest.approx(1.2 / 4 - 1.1 / 4)
    x, y = np.array([0.1, 0.2, 0.3, 0.6]) - 0.3, np.array([0.0, 0.1, 0.2, 0.8]) - 0.275
    assert result.pearson == pytest.approx((x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum()))


def test_network_that_promises_too_much_has_a_positive_bias():
    result = calibrate(np.full(10, 0.9), np.full(10, 0.5))
    assert result.bias == pytest.approx(0.4)
    assert result.error == pytest.approx(0.4)
    assert math.isnan(result.pearson)


def test_ends_of_the_scale_have_bins():
    result = calibrate(np.array([0.0, 1.0]), np.array([0.0, 1.0]), bins=10)
    assert (result.counts[0], result.counts[-1], result.counts.sum()) == (1, 1, 2)


def test_no_residues_have_no_calibration():
    result = calibrate(np.array([]), np.array([]))
    assert result.residues == 0
    assert all(math.isnan(x) for x in (result.pearson, result.bias, result.error))


@pytest.mark.parametrize(
    ("predicted", "true"), [([0.5], [0.5, 0.5]), ([50.0], [0.5]), ([0.5], [-0.1]), ([math.nan], [0.5])]
)
def test_values_that_are_no_lddt_are_refused(predicted, true):
    with pytest.raises(ValueError, match=r"true values|0 to 1"):
        calibrate(np.array(predicted), np.array(true))


@pytest.mark.parametrize("residues", [0, 1, 500])
def test_picture_is_a_png_and_repeatable(residues):
    values = np.random.default_rng(0).uniform(0, 1, residues)
    result = calibrate(values, values**2)
    png = calibration_png(result, title="price: $5 and $6")
    assert png == calibration_png(result, title="price: $5 and $6")
    assert Image.open(io.BytesIO(png)).size == (780, 900)


def test_axes_have_whole_steps_and_plain_numbers():
    """A logarithmic axis over a few percent has no powers of ten."""
    figure = Figure()
    axis = figure.subplots()
    steps = np.arange(1, 13)
    _draw(axis, {"loss": (steps, np.linspace(0.925, 0.927, 12))}, logarithmic=True)
    figure.canvas.draw()
    assert axis.get_yscale() == "log"
    assert all(float(tick) == int(tick) for tick in axis.get_xticks())
    labels = [label.get_text() for label in axis.get_yticklabels() if label.get_text()]
    assert len(labels) >= 3
    assert all(0.9 < float(label) < 0.95 for label in labels)
