"""``fastfold ensemble``: files, the page, and a missing package."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from fastfold.cli import main
from fastfold.errors import ConfigError
from fastfold.products.ensemble.command import run_ensemble


@pytest.mark.long
def test_the_page_has_the_ensemble(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("sklearn")
    from tests.products.ensemble.conftest import save_two_states

    folder = save_two_states(tmp_path)
    assert main(["ensemble", str(folder), "--no-plots", "--clusters", "3"]) == 0
    out = capsys.readouterr().out
    assert "helices: 7 samples, 3 clusters" in out
    assert f"wrote {folder / 'report.html'}" in out
    assert '"ensembles": [{"target": "helices"' in (folder / "report.html").read_text()
    assert not list(folder.glob("*_ensemble_*.png"))


def test_a_missing_package_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fastfold.utils.packages.importlib.util.find_spec", lambda name: None)
    assert main(["ensemble", str(tmp_path)]) == 2
    assert "fastfold ensemble needs the package scikit-learn" in capsys.readouterr().err
    settings = {"target": None, "reference": [], "similarity": 0.8, "clusters": None, "min_plddt": 0.0}
    with pytest.raises(ConfigError, match="scikit-learn"):
        run_ensemble(argparse.Namespace(directory=tmp_path, no_plots=True, **settings))
