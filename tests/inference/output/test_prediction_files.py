"""Contents of a prediction's files: the scores are those of the prediction, and values out of range are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fastfold.errors import OutputError
from tests.helpers.results import helix_prediction


def test_the_scores_file_has_the_scores_of_the_prediction() -> None:
    prediction = helix_prediction("t", 12)
    contents = prediction.files(plots=False)
    scores = prediction.scores()
    assert json.loads(contents["_scores.json"]) == json.loads(json.dumps(scores))
    assert (
        scores["geometry"]["ramachandran_outliers"]
        == prediction.structure_check.figures["ramachandran_outliers"]
    )


def test_aligned_errors_out_of_range_are_refused() -> None:
    prediction = helix_prediction("t", 12)
    assert prediction.pae is not None
    with pytest.raises(OutputError, match="PAE of t ranges over"):
        replace(prediction, pae=prediction.pae + 40).files(plots=False)
    with pytest.raises(OutputError, match="pTM of t is not finite"):
        replace(prediction, ptm=np.nan).files(plots=False)
