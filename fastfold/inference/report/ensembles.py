"""Ensembles of a folder of results for the page: samples along two components, and superposed representatives."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.inference.report.discover import FoundPrediction, check_size, is_regular, leaving_out
from fastfold.inference.report.encode import pack_structure

ENDING = "_ensemble.json"  #: Ending of the file with all numbers of an ensemble
MAX_OVERLAID = 8  #: Largest number of representatives that the page shows together


def find_ensembles(
    folder: Path, predictions: Sequence[FoundPrediction], room: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the ensembles that ``fastfold ensemble`` wrote to a folder.

    ``predictions`` are those of the page, ``room`` is the largest number of characters of all representatives, and
    ``say`` gets a line about each file that is left out.

    Returns:
        Per target ``target``, ``members`` with ``row`` (index of the prediction), ``cluster``, ``x`` and ``y``,
        ``shares`` of the variance, ``files``, and ``overlay``: representatives with ``row``, ``cluster``, ``structure``
        and packed ``text``.
    """
    by_target: dict[str, dict[str, int]] = {}
    for number, prediction in enumerate(predictions):
        by_target.setdefault(prediction.target, {})[prediction.stem] = number
    found = []
    for target, rows in by_target.items():
        path = folder / f"{target}{ENDING}"
        if not is_regular(path):
            continue
        with leaving_out(path.name, say):
            values = json.loads(check_size(path).read_bytes())
            ensemble = _checked(values, rows)
            overlay = _overlay(values, rows, predictions)
            room -= sum(len(one["text"]) for one in overlay)
            own = folder.glob(f"{glob.escape(target)}_ensemble[._]*")
            files = sorted(one.name for one in own if one.is_file())
            shown = overlay if room >= 0 else []
            found.append({"target": target, "files": files, **ensemble, "overlay": shown})
    return found


def _checked(values: Any, rows: dict[str, int]) -> dict[str, Any]:
    """Return members and shares of variance of an ensemble's file, or raise ValueError for another file."""
    try:
        names, clusters = values["samples"], np.asarray(values["clusters"])
        points = np.asarray(values["components"], np.float64).reshape(len(names), -1)[:, :2]
        shares = np.asarray(values["variance"], np.float64)[:2]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError("it is not an ensemble") from error
    is_valid = clusters.shape == (len(names),) and clusters.dtype.kind == "i" and clusters.min(initial=1) >= 1
    if not is_valid or not np.isfinite(points).all() or not np.isfinite(shares).all() or not names:
        raise ValueError("it is not an ensemble")
    points = np.pad(points, ((0, 0), (0, 2 - points.shape[1])))
    members = [
        {"row": rows[name], "cluster": int(cluster), "x": float(x), "y": float(y)}
        for name, cluster, (x, y) in zip(names, clusters, points, strict=True)
        if isinstance(name, str) and name in rows
    ]
    if not members:
        raise ValueError("its samples are not in the folder; run fastfold ensemble again")
    return {"members": members, "shares": [*shares.tolist(), 0.0, 0.0][:2]}


def _overlay(
    values: dict[str, Any], rows: dict[str, int], predictions: Sequence[FoundPrediction]
) -> list[dict[str, Any]]:
    """Return the packed structures of the representatives, superposed."""
    found = []
    pairs = list(zip(values.get("representatives", ()), values.get("motions", ()), strict=False))
    for cluster, (name, motion) in enumerate(pairs[:MAX_OVERLAID], 1):
        if not isinstance(name, str) or name not in rows:
            continue
        prediction = predictions[rows[name]]
        path = prediction.files.get(".cif") or prediction.files.get(".pdb")
        rotation = np.asarray(motion["rotation"], np.float64).reshape(3, 3)
        translation = np.asarray(motion["translation"], np.float64).reshape(3)
        if path is None or np.abs(rotation @ rotation.T - np.eye(3)).max() > 1e-3:
            raise ValueError("its representatives cannot be superposed; run fastfold ensemble again")
        motions = (rotation, translation)
        layout, text = pack_structure(check_size(path), prediction.scores["sequences"], motion=motions)
        found.append({"row": rows[name], "cluster": cluster, "structure": layout, "text": text})
    return found
