"""Repeat a recorded run of AlphaFold and compare every output.

Records exist of the network, of the data pipeline and of the template search. One ships with the package: a small fold
by ``mini``, computed on FastFold's release machine, which shows that an installation computes the tested results.
Records of AlphaFold are larger and are in the repository (``tests/oracles``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.data.features.pipeline import sampler_from_merged
from fastfold.errors import InputError
from fastfold.evoformer.config import MINI, is_multimer
from fastfold.evoformer.execution import ExecutionPolicy, LazyRows, set_policy
from fastfold.evoformer.losses import alphafold_loss
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import about_missing_units, set_precision
from fastfold.evoformer.weights.checkpoint import load_model
from fastfold.inference.folding.network import NetworkPasses, network_results
from fastfold.products.verify.data import (
    DECISIONS,
    ENTRIES,
    EXPECTED,
    check_present,
    compare_entries,
    compare_templates,
    compute_recorded,
    reading,
)
from fastfold.utils.foreign_text import parse_json

RECORD = Path(__file__).with_name("mini_record.npz")  #: File of the record

SEQUENCE = "EQLARLKREFNENRYLTERRRQQLSSELGL"
"""Sequence of the record, two helices of the engrailed homeodomain: folds of most sequences may change by rounding."""


def fold_record(device: str = "cpu", precision: str = "fp32") -> dict[str, np.ndarray]:
    """Fold the record's sequence by ``mini``, with a precision of the trunk.

    Returns:
        By name: positions in Å ``[N, 37, 3]``, pLDDT ``[N]``, aligned errors in Å ``[N, N]``, pTM, and the single
        ``[N, c_s]`` and pair ``[N, N, c_z]`` representations.
    """
    from fastfold.inference.api import load_model, predict

    model = _in_precision(load_model(MINI, device=device), precision)
    prediction = predict(SEQUENCE, model, num_recycles=1, seed=0, save_representations=True)
    assert prediction.pae is not None
    assert prediction.representations is not None
    return {
        "representations/pair": prediction.representations["pair"],
        "representations/single": prediction.representations["single"],
        "structure_module/final_atom_positions": prediction.atom_positions,
        "confidence/plddt": prediction.plddt,
        "confidence/predicted_aligned_error": prediction.pae,
        "confidence/ptm": np.asarray(prediction.ptm),
    }


def _in_precision(network: AlphaFold, precision: str) -> AlphaFold:
    """Set a precision for calls of any size, unless the processor has no units for it and folds in float32."""
    device = next(network.parameters()).device
    return set_precision(network, precision, least_work=None if about_missing_units(precision, device) else 0)


RELATIVE_TOLERANCE = 1e-4
POSITION_TOLERANCE = 0.01  #: Largest distance in Å between an atom and the recorded one
REDUCED_TOLERANCES = {"bf16": 0.1, "bf16-products": 0.03, "int8": 0.03}
"""Relative errors allowed in less than float32; distances of atoms are not checked there."""
_CONFIDENCES = {"pae": "predicted_aligned_error", "max_pae": "max_predicted_aligned_error"}
"""AlphaFold's names of confidences that have others in FastFold."""
_JUMPING = "violations"
"""Name parts of outputs that jump where a distance passes a limit, skipped in less than float32."""
DATA_TOLERANCES = {"deletion_mean": 1e-6, "position_sum": 1e-6}
"""Relative errors allowed in arrays of the data pipeline, by the last part of their names; others are equal."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of one output with the recorded one, by its key of the official result tree, or ``confidence/...``.

    The relative error is the norm of the difference over that of the recorded array. The largest one of positions is a
    distance in Å.
    """

    name: str
    relative_error: float
    largest_error: float
    passed: bool


def verify(
    directory: str | Path,
    *,
    device: str = "cpu",
    precision: str = "fp32",
    policy: ExecutionPolicy | None = None,
) -> Iterator[Comparison]:
    """Compare the network, or the features, with each array of a recorded run of AlphaFold.

    Args:
        directory: Folder of a record. For the data pipeline, ``expected.npz``, ``query.fasta`` and alignments
            (:func:`fastfold.products.verify.data.compute_recorded`). For templates, hits as well
            (:func:`fastfold.products.verify.data.compare_templates`). For the network, ``params.npz``,
            ``config.json``, ``features.npz``, ``outputs.npz`` and ``confidence.npz``; loss targets that depend on the
            predicted structure only through rounding (the bin of a residue's aligned error in its own frame, zero, is
            one of the two lowest) are computed from the recorded structure, which is compared separately. Or
            :data:`~fastfold.products.verify.records.RECORD`, the record that ships with the package.
        device: Device of the network.
        precision: Precision of the network, one of :data:`fastfold.evoformer.precision.Precision`; in less than float32
            :data:`REDUCED_TOLERANCES` apply. The data pipeline has none.
        policy: Execution policy of the network; None for its own.

    Raises:
        MissingInputError: A file is missing.
        InputError: A file is unreadable, or the network lacks a recorded output.

    Example:
        >>> from fastfold.products.verify import RECORD, verify
        >>> all(comparison.passed for comparison in verify(RECORD))
        True
    """
    directory = Path(directory)
    tolerance = REDUCED_TOLERANCES.get(precision, RELATIVE_TOLERANCE)
    farthest = POSITION_TOLERANCE if precision == "fp32" else math.inf
    compare = partial(_compare, tolerance=tolerance, farthest=farthest)
    if directory == RECORD:
        expected = _arrays(directory.parent, directory.name)
        for name, folded in fold_record(device, precision).items():
            yield compare(name, folded, expected[name])
        return
    if (directory / EXPECTED).exists():
        compute = compute_recorded
        if (directory / DECISIONS).exists():
            compute = compare_templates
        elif (directory / ENTRIES).exists():
            compute = compare_entries
        for name, own, theirs in compute(directory, _arrays(directory, EXPECTED)):
            yield _compare(name, own, theirs, tolerance=DATA_TOLERANCES.get(name.rpartition("/")[2], 0.0))
        return
    config = _config(directory)
    features = _arrays(directory, "features.npz")
    outputs = _arrays(directory, "outputs.npz")
    recorded = outputs | {f"confidence/{k}": v for k, v in _arrays(directory, "confidence.npz").items()}
    cycles = config.model.num_recycle + 1
    if is_multimer(config):
        features = sampler_from_merged(features, config, deterministic=True).stack(cycles)
    check_present(directory / "params.npz")
    network = load_model(directory / "params.npz", config=config).to(device)
    model = _in_precision(network, precision)
    if policy is not None:
        set_policy(model, policy)
    tensors = {name: torch.as_tensor(value).to(device) for name, value in features.items()}
    with torch.no_grad():
        result = model(tensors)
        _, confidence = network_results(result, NetworkPasses(0, is_complex=model.multimer))
        result = _computed(result)
        ours = _flatten(result) | {f"confidence/{_CONFIDENCES.get(k, k)}": v for k, v in confidence.items()}
        if "total_loss" in outputs:
            last = {name: value[-1] for name, value in tensors.items()}
            ours |= _losses(result, last, outputs, config)
    for name, theirs in recorded.items():
        if name not in ours:
            raise InputError(f"the network lacks the output {name!r}", path=directory / "outputs.npz")
        if precision == "fp32" or _JUMPING not in name:
            value = ours[name].detach().cpu()
            value = value.float() if value.dtype == torch.bfloat16 else value
            yield compare(name, np.asarray(value), theirs)


def recorded_runs(directory: Path) -> list[Path]:
    """Return the records in a folder: itself, or its folders that are records; itself if none are.

    Example:
        >>> from pathlib import Path
        >>> from fastfold.products.verify import recorded_runs
        >>> for name in ("monomer", "multimer"):
        ...     Path("records", name).mkdir(parents=True)
        ...     _ = Path("records", name, "config.json").write_text("{}")
        >>> [path.name for path in recorded_runs(Path("records"))]
        ['monomer', 'multimer']
    """
    marks = (EXPECTED, "config.json")
    if any((directory / mark).exists() for mark in marks):
        return [directory]
    inside = sorted({path.parent for mark in marks for path in directory.glob(f"*/{mark}")})
    return inside or [directory]


def _computed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _computed(inner) for key, inner in value.items()}
    return value.whole() if isinstance(value, LazyRows) else value


def _compare(
    name: str, ours: np.ndarray, theirs: np.ndarray, *, tolerance: float, farthest: float = math.inf
) -> Comparison:
    """Compare arrays by a relative error and, of positions, by the largest distance in Å; texts are equal."""
    if ours.shape != theirs.shape:
        return Comparison(name, float("inf"), float("inf"), False)
    if theirs.dtype.kind == "S":
        wrong = float((ours != theirs).sum())
        return Comparison(name, wrong, wrong, not wrong)
    difference = ours.astype(np.float64) - theirs
    relative = float(np.linalg.norm(difference)) / (float(np.linalg.norm(theirs)) or 1.0)
    is_positions = name.endswith("final_atom_positions")
    errors = np.linalg.norm(difference, axis=-1) if is_positions else np.abs(difference)
    largest = float(errors.max(initial=0.0))
    passed = relative <= tolerance and (not is_positions or largest <= farthest)
    return Comparison(name, relative, largest, passed)


def _config(directory: Path) -> ConfigDict:
    path, missing = directory / "config.json", "no such file; give the folder of a recorded run"
    with reading(path, "not a folder that verify can use", missing=missing):
        return ConfigDict(parse_json(path.read_bytes(), path))


def _arrays(directory: Path, name: str) -> dict[str, np.ndarray]:
    path = directory / name
    with reading(path, "not a readable array file"), np.load(path, allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


def _losses(
    result: dict[str, Any], batch: dict[str, Tensor], outputs: Mapping[str, np.ndarray], config: ConfigDict
) -> dict[str, Tensor]:
    total, parts = alphafold_loss(result, batch, config)
    if "predicted_aligned_error" in parts:
        affines = torch.as_tensor(outputs["structure_module/final_affines"]).to(total.device)
        labeled = result | {"structure_module": result["structure_module"] | {"final_affines": affines}}
        theirs = alphafold_loss(labeled, batch, config)[1]["predicted_aligned_error"]
        weight = config.model.heads.predicted_aligned_error.weight
        total = total + weight * (theirs["loss"] - parts["predicted_aligned_error"]["loss"])
        parts["predicted_aligned_error"] = theirs
    return _flatten(parts) | {"total_loss": total}


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Flatten a result tree to keys joined by slashes, with frames and atoms split as in AlphaFold."""
    flat: dict[str, Tensor] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key == "structure_module/sidechains/frames":
            rotation, translation = value["rotation"], value["translation"]
            flat |= {f"{key}/0/{i}": part for i, part in enumerate(rotation.flatten(-2).unbind(-1))}
            flat |= {f"{key}/1/{i}": part for i, part in enumerate(translation.unbind(-1))}
        elif key == "structure_module/sidechains/atom_pos":
            flat |= {f"{key}/{i}": part for i, part in enumerate(value.unbind(-1))}
        elif isinstance(value, Mapping):
            flat |= _flatten(value, f"{key}/")
        else:
            flat[key] = torch.as_tensor(value)
    return flat
