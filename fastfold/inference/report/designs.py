"""Designs of a folder of results for the page: curves of their steps, and films of their structures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.inference.report.discover import (
    FoundPrediction,
    check_size,
    is_regular,
    leaving_out,
    read_table,
)
from fastfold.inference.report.encode import pack

_PARTS = re.compile(r"(_mpnn_\d{1,6})?(_(target|off)_\d{1,6}|_alone)?$")
_STEP = 0.02
_MOST_STEPS = 20_000
_LONGEST = 500
_STAGES = ("soft", "temperature", "hard", "mutate")


def find_designs(
    folder: Path, predictions: Sequence[FoundPrediction], room: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the designs that ``fastfold design`` wrote to a folder.

    ``predictions`` are those of the page, ``room`` is the largest number of characters of all films, and ``say`` gets
    a line about each file that is left out.

    Returns:
        Per design ``rows`` (indices of its predictions), ``loss``, ``plddt`` and ``stages`` of its steps, ``verdicts``
        by target, and ``film`` if there is room: ``frames``, ``chains`` (their lengths), ``steps`` of the frames,
        ``step`` in Å, and packed ``text``: little-endian int16 ``x``, ``y``, ``z`` of each CA atom of each frame.
    """
    trajectories = folder / "trajectories"
    if not trajectories.is_dir() or trajectories.is_symlink():
        return []
    rows: dict[str, list[int]] = {}
    for number, prediction in enumerate(predictions):
        rows.setdefault(_PARTS.sub("", prediction.target), []).append(number)
    verdicts = {
        line["name"]: {key: (line.get(key) or "")[:_LONGEST] for key in ("filters", "note")}
        for line in read_table(folder / "designs.tsv")
        if line.get("name")
    }
    found = []
    for name, numbers in rows.items():
        path = trajectories / f"{name}.jsonl"
        if not is_regular(path):
            continue
        with leaving_out(path.name, say):
            design = {"rows": numbers, **_curve(path), "film": None}
            targets = sorted({predictions[number].target for number in numbers} & verdicts.keys())
            design["verdicts"] = {target: verdicts[target] for target in targets}
            found.append(design)
            film = _film(trajectories / f"{name}.pdb", len(design["loss"]))
            if film is not None and len(film["text"]) <= room:
                room -= len(film["text"])
                design["film"] = film
    return found


def _curve(path: Path) -> dict[str, Any]:
    lines = check_size(path).read_text("utf-8").splitlines()[:_MOST_STEPS]
    try:
        steps = [json.loads(line) for line in lines]
        numbers = {key: [float(one[key]) for one in steps] for key in ("loss", "mean_plddt")}
        stages = [_STAGES.index(one["stage"]) for one in steps]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
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
    quantised = np.rint(points / _STEP).clip(-32_000, 32_000).astype("<i2")
    shown = np.unique(np.linspace(0, steps - 1, len(frames)).round().astype(int))
    if len(shown) != len(frames):
        raise ValueError("its film has more frames than steps")
    layout = {"frames": len(frames), "chains": chains, "steps": shown.tolist(), "step": _STEP}
    return layout | {"text": pack(quantised.tobytes())}
