"""What a run leaves of a target: predictions, settings and versions, and the completion marker; all or nothing."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastfold._version import __version__
from fastfold.data.msa.find import ChainMsas
from fastfold.data.targets import Target
from fastfold.errors import OutputError
from fastfold.inference.models import Network
from fastfold.inference.output.completion import CompletionMarker
from fastfold.inference.output.json_files import lines_json
from fastfold.inference.output.prediction import Prediction
from fastfold.utils.atomic_files import write_atomic
from fastfold.utils.hashing import input_hash


def run_record(
    target: Target,
    alignments: Sequence[ChainMsas],
    networks: Sequence[Network],
    settings: Mapping[str, Any],
    *,
    device: str,
) -> dict[str, Any]:
    """Settings, versions and ``input_hash``, the hash of everything that the result depends on, in JSON's types.

    Args:
        target: The target.
        alignments: Its alignments.
        networks: The networks that fold it.
        settings: Settings that the result depends on.
        device: Where it is folded; for the record only, a result from another device is as good.
    """
    chains = {chain.id: chain.sequence for chain in target.chains}
    weights = [
        {"model": network.name, "file": network.path.name, "sha256": network.digest} for network in networks
    ]
    rows = [
        [[(m.sequences, m.deletions, m.descriptions) for m in group] for group in pair] for pair in alignments
    ]
    return {
        "schema_version": 1,
        "name": target.name,
        "source": Path(target.source).name,
        "record": target.record,
        "chains": chains,
        "alignment_rows": [[sum(len(m.sequences) for m in group) for group in pair] for pair in alignments],
        "weights": weights,
        "settings": dict(settings),
        "device": device,
        "versions": {
            "fastfold": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "input_hash": input_hash(chains, rows, weights, settings, __version__),
    }


def write_target(
    output: Path, name: str, record: Mapping[str, Any], predictions: Sequence[Prediction], *, plots: bool
) -> int:
    """Write all files of a target and then its completion marker; if one cannot be written, none.

    Args:
        output: The output folder, which exists.
        name: Name of the target.
        record: See :func:`run_record`.
        predictions: Best first.
        plots: Whether plots are drawn.

    Returns:
        The number of files, without the marker.

    Raises:
        OutputError: A file cannot be written; what stood there before still does.
    """
    with _staging(output) as folder:
        staged = [write_config(folder, name, record)]
        for rank, prediction in enumerate(predictions, 1):
            staged += prediction.save(folder, rank=rank, plots=plots).values()
        files = [output / path.name for path in staged]
        for path, file in zip(staged, files, strict=True):
            try:
                os.replace(path, file)
            except OSError as error:
                raise OutputError(
                    f"cannot write {str(file)!r}: {error.strerror}; remove what is there"
                ) from error
    CompletionMarker.mark_complete(output, name, record["input_hash"], files)
    return len(files)


def write_config(output: Path, name: str, record: Mapping[str, Any]) -> Path:
    """Write ``<name>_config.json`` with the settings, versions and input hash of a target."""
    path = output / f"{name}_config.json"
    write_atomic(path, lines_json(record))
    return path


@contextlib.contextmanager
def _staging(output: Path) -> Iterator[Path]:
    """A hidden folder within the output folder, where files wait until all of them are there."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=".fastfold-", suffix=".tmp", dir=output))
    except OSError as error:
        raise OutputError(f"cannot write to {str(output)!r}: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
