"""Groups of predictions for the page: designs with their steps, and ensembles along two components."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.errors import InputError
from fastfold.inference.output.summary import read_table
from fastfold.inference.report.discover import FoundPrediction, check_size, is_regular, leaving_out, read_json
from fastfold.inference.report.encode import pack, pack_structure
from fastfold.inference.report.products import DESIGNS
from fastfold.utils.foreign_text import parse_json

_PARTS = re.compile(r"(_mpnn_\d{1,6})?(_(target|off)_\d{1,6}|_alone)?$")
_STEP = 0.02
_SHOWN = ("chains", "hotspots", "kept", "filters", "note")  #: Columns of the table of designs on the page
_MOST_STEPS = 20_000
_LONGEST = 500
_FIGURES = ("backbone_rmsd", "motif_rmsd", "seqid", "ring_gap")  #: Columns of designs that the page shows
_STAGES = ("screen", "soft", "temperature", "hard", "mutate")


def find_designs(
    folder: Path, predictions: Sequence[FoundPrediction], room: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the designs of ``fastfold design`` in a folder; arguments are those of :func:`find_ensembles`.

    Each has ``rows`` (indices of its predictions), ``loss``, ``plddt`` and ``stages`` of its steps, ``verdicts`` by
    target, and ``film`` if there is room: ``frames``, ``chains`` (their lengths), ``steps`` of the frames, ``step`` in
    Å, and packed ``text``: little-endian int16 ``x``, ``y``, ``z`` of each CA atom of each frame.
    """
    trajectories = folder / "trajectories"
    if not trajectories.is_dir() or trajectories.is_symlink():
        return []
    rows: dict[str, list[int]] = {}
    for number, prediction in enumerate(predictions):
        rows.setdefault(_PARTS.sub("", prediction.target), []).append(number)
    verdicts = {
        line["name"]: {key: (line.get(key) or "")[:_LONGEST] for key in _SHOWN if key in line}
        | {key: value[:_LONGEST] for key in _FIGURES if (value := line.get(key))}
        for line in read_table(folder / DESIGNS)
        if line.get("name")
    }
    designs = []
    for name, numbers in rows.items():
        path = trajectories / f"{name}.jsonl"
        if not is_regular(path):
            continue
        with leaving_out(path.name, say):
            design = {"rows": numbers, **_curve(path), "film": None}
            targets = sorted({predictions[number].target for number in numbers} & verdicts.keys())
            design["verdicts"] = {target: verdicts[target] for target in targets}
            designs.append(design)
            film = _film(trajectories / f"{name}.pdb", len(design["loss"]))
            if film is not None and len(film["text"]) <= room:
                room -= len(film["text"])
                design["film"] = film
    return designs


def _curve(path: Path) -> dict[str, Any]:
    lines = check_size(path).read_text("utf-8").splitlines()[:_MOST_STEPS]
    try:
        steps = [parse_json(line, path) for line in lines]
        numbers = {key: [float(one[key]) for one in steps] for key in ("loss", "mean_plddt")}
        stages = [_STAGES.index(one["stage"]) for one in steps]
    except (InputError, KeyError, TypeError, ValueError) as error:
        raise ValueError("it is not a trajectory of a design") from error
    if not steps or not all(math.isfinite(value) for values in numbers.values() for value in values):
        raise ValueError("it is not a trajectory of a design")
    starts = [[_STAGES[stage], i] for i, stage in enumerate(stages) if i == 0 or stage != stages[i - 1]]
    return {
        "loss": [round(value, 4) for value in numbers["loss"]],
        "plddt": [round(value, 2) for value in numbers["mean_plddt"]],
        "stages": starts,
    }


def _film(path: Path, steps: int) -> dict[str, Any] | None:
    """Return the packed film of a trajectory; None without its file. Raise ValueError for another file."""
    if not is_regular(path):
        return None
    import gemmi  # slow to import

    try:
        models = gemmi.read_pdb_string(check_size(path).read_text("utf-8"))
    except (RuntimeError, UnicodeDecodeError) as error:
        raise ValueError("its film cannot be read") from error
    frames = [[atom.pos.tolist() for chain in model for one in chain for atom in one] for model in models]
    chains = [len(chain) for chain in models[0]] if len(models) else []
    if not chains or len({len(frame) for frame in frames}) != 1 or sum(chains) != len(frames[0]):
        raise ValueError("its film has frames of different chains")
    points = np.array(frames)
    points -= points[-1].mean(0)
    quantized = np.rint(points / _STEP).clip(-32_000, 32_000).astype("<i2")
    shown = np.unique(np.linspace(0, steps - 1, len(frames)).round().astype(int))
    if len(shown) != len(frames):
        raise ValueError("its film has more frames than steps")
    layout = {"frames": len(frames), "chains": chains, "steps": shown.tolist(), "step": _STEP}
    return layout | {"text": pack(quantized.tobytes())}


ENDING = "_ensemble.json"  #: Ending of the file with all numbers of an ensemble
MAX_OVERLAID = 8  #: Largest number of representatives that the page shows together


def find_ensembles(
    folder: Path, predictions: Sequence[FoundPrediction], room: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the ensembles of ``fastfold ensemble`` in a folder.

    ``predictions`` are those of the page, ``room`` limits the characters of packed structures, and ``say`` gets a line
    about each file that is left out. Each ensemble has ``target``, ``members`` with ``row`` (index of the prediction),
    ``cluster``, ``x`` and ``y``, ``shares`` of the variance, ``files``, and ``overlay``: representatives with ``row``,
    ``cluster``, ``structure`` and packed ``text``.
    """
    by_target: dict[str, dict[str, int]] = {}
    for number, prediction in enumerate(predictions):
        by_target.setdefault(prediction.target, {})[prediction.stem] = number
    ensembles = []
    for target, rows in by_target.items():
        path = folder / f"{target}{ENDING}"
        if not is_regular(path):
            continue
        with leaving_out(path.name, say):
            values = read_json(path)
            ensemble = _checked(values, rows)
            overlay = _overlay(values, rows, predictions)
            room -= sum(len(one["text"]) for one in overlay)
            own = folder.glob(f"{glob.escape(target)}_ensemble[._]*")
            files = sorted(one.name for one in own if one.is_file())
            shown = overlay if room >= 0 else []
            ensembles.append({"target": target, "files": files, **ensemble, "overlay": shown})
    return ensembles


def _checked(values: Any, rows: dict[str, int]) -> dict[str, Any]:
    """Return members and shares of variance of an ensemble's file, or raise ValueError for another file."""
    try:
        names, clusters = values["samples"], np.asarray(values["clusters"])
        points = np.asarray(values["components"], np.float64).reshape(len(names), -1)[:, :2]
        shares = np.asarray(values["variance"], np.float64)
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
    structures = []
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
        structures.append({"row": rows[name], "cluster": cluster, "structure": layout, "text": text})
    return structures
