"""Scores of the chains of a complex come from its own logits, in the order of the input, in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastfold
from fastfold.evoformer.confidence import predicted_tm_score
from fastfold.evoformer.execution import LazyRows
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.folding import network
from tests.helpers.networks import folder

CHAINS = ("MKTAYIAKQR", "GSHMAWLPE", "MKTAYIAKQR")


@pytest.fixture(scope="module")
def multimer() -> AlphaFold:
    torch.set_num_threads(1)
    model = fastfold.load_model(folder("synthetic_multimer") / "params.npz", device="cpu")
    with torch.no_grad():  # its random heads are sure of everything
        for name in ("distogram", "predicted_aligned_error"):
            model.heads[name].logits.weight.mul_(0.02)
    return model


def test_chains_are_in_the_order_of_the_input(multimer: AlphaFold, monkeypatch, tmp_path: Path) -> None:
    """The network's features group copies: there the second chain comes last."""
    seen: dict[str, Any] = {}
    original = network.chain_confidence

    def recording(logits, breaks, asym_id, **distances):
        assert isinstance(logits, LazyRows)
        assert isinstance(distances["distogram"], LazyRows)
        seen.update(logits=logits.whole(), breaks=breaks, asym_id=asym_id)
        return original(logits, breaks, asym_id, **distances)

    monkeypatch.setattr(network, "chain_confidence", recording)
    prediction = fastfold.predict(":".join(CHAINS), multimer, num_recycles=0)
    found, asym_id = prediction.chain_confidence, seen["asym_id"]
    assert [int((asym_id == k).sum()) for k in (1, 2, 3)] == [10, 10, 9]
    for chain, number in enumerate((1, 3, 2)):
        own = asym_id == number
        expected = predicted_tm_score(seen["logits"][own][:, own], seen["breaks"])
        assert found.ptm[chain] == pytest.approx(float(expected), abs=1e-6)
    assert found.iptm.shape == found.pair_actifptm.shape == (3, 3)
    # Whichever order: the best pair of all has at least the ipTM of the complex, whose rows see two chains each.
    assert found.iptm.max() >= prediction.iptm - 1e-6
    assert 0 < found.actifptm < 1

    scores = json.loads(prediction.save(tmp_path, plots=False)["scores"].read_text())["interfaces"]
    assert list(scores["chains"]) == ["A", "B", "C"]
    assert [chain["residues"] for chain in scores["chains"].values()] == [10, 9, 10]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        pair = scores["pairs"][f"{'ABC'[i]}-{'ABC'[j]}"]
        assert pair["iptm"] == pytest.approx(found.iptm[i, j], abs=5.1e-5)
        assert pair["actifptm"] == pytest.approx(found.pair_actifptm[i, j], abs=5.1e-5)
        assert pair["ipsae"] is not None


def test_without_a_distogram_there_is_no_actifptm(multimer: AlphaFold, monkeypatch) -> None:
    """Where its columns are on other processes it would have to be there whole."""
    monkeypatch.setattr(multimer.heads["distogram"], "has_columns", False)
    prediction = fastfold.predict(":".join(CHAINS[:2]), multimer, num_recycles=0)
    assert prediction.chain_confidence.actifptm is None
    assert prediction.interface_scores["pairs"]["A-B"]["actifptm"] is None
    assert prediction.interface_scores["pairs"]["A-B"]["iptm"] == pytest.approx(prediction.iptm, abs=1e-6)


def test_a_single_chain_has_no_interfaces(multimer: AlphaFold) -> None:
    prediction = fastfold.predict(CHAINS[0], multimer, num_recycles=0)
    assert prediction.chain_confidence is None
    assert prediction.interface_scores["pairs"] == {}
    assert np.isfinite(prediction.mean_plddt)
