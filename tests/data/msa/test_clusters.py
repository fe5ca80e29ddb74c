"""Clusters of alignment rows, against recorded runs of AF_Cluster."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fastfold.data.msa.find import read_msa
from fastfold.data.msa.msa import Msa
from fastfold.data.msa.sampling import cluster_rows, join_alignments
from fastfold.errors import ConfigError
from tests.helpers.networks import folder

RECORD = folder("samples")


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_radius_and_clusters_are_those_of_af_cluster(seed: str):
    pytest.importorskip("sklearn")
    msa = join_alignments([read_msa(RECORD / "alignment.a3m")], unique=False)
    found = cluster_rows(msa, np.random.RandomState(int(seed)))
    wanted = json.loads((RECORD / "record.json").read_text())["af_cluster"][seed]
    names = [[int(msa.descriptions[row].removeprefix("row_")) for row in rows] for rows in found.rows]
    assert found.eps == wanted["eps"]
    assert names == wanted["clusters"]


def test_too_few_rows_have_no_clusters():
    pytest.importorskip("sklearn")
    msa = Msa(("MKT", "MKA"), np.zeros((2, 3), np.int32), ("query", "row"))
    assert cluster_rows(msa, np.random.default_rng(0)).rows == []


def test_rows_with_too_many_gaps_are_counted():
    pytest.importorskip("sklearn")
    rows = ["MKTA", "-KTA", "--TA", "---A", "----"]
    msa = Msa(tuple(rows), np.zeros((5, 4), np.int32), tuple(rows))
    found = cluster_rows(msa, np.random.default_rng(0))
    assert (found.rows, found.left_out) == ([], 4)
    msa = Msa(("MKTAQ", "-KTAQ"), np.zeros((2, 5), np.int32), ("query", "a fifth of gaps"))
    assert cluster_rows(msa, np.random.default_rng(0)).left_out == 0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fastfold.utils.packages.importlib.util.find_spec", lambda name: None)
    msa = Msa(("MKT", "MKA"), np.zeros((2, 3), np.int32), ("query", "row"))
    with pytest.raises(ConfigError, match="sample='clusters' needs the package scikit-learn"):
        cluster_rows(msa, np.random.default_rng(0))
