"""Comparison of the predictions of a results folder with experimental structures, after the fold."""

from __future__ import annotations

import glob
from collections.abc import Callable
from pathlib import Path

from fastfold.inference.config import OutputFormat
from fastfold.inference.folding.target_lines import compare_in_folder
from fastfold.inference.report.discover import SCORES, find_predictions


def compare_results(directory: Path, reference: Path, say: Callable[[str], None]) -> None:
    """Compare each target of a results folder with its structure, for the page.

    ``<target>_reference.json`` gets the scores, next to the files of the target.

    Args:
        directory: The folder.
        reference: Structure of all targets, or a folder of structures named like the targets.
        say: Called with a line for each target.

    Raises:
        InputError: The folder has no predictions, or a structure cannot be read.
    """
    names: dict[tuple[Path, str], str] = {}
    for prediction in find_predictions(directory):
        place = prediction.files[SCORES].parent, prediction.target
        names.setdefault(place, str(prediction.scores["name"]))
    for (folder, stem), name in names.items():
        is_plain = any(folder.glob(f"{glob.escape(stem)}_rank_*.cif"))
        style: OutputFormat = "fastfold" if is_plain else "colabfold"
        say(compare_in_folder(folder, stem, (name, stem), reference, label=name, output_format=style))
