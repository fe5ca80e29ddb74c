"""Contents of a prediction's files, and the scores among them."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fastfold.errors import OutputError
from fastfold.inference.config import OutputFormat
from fastfold.inference.output import score_files
from fastfold.inference.output.file_names import COLABFOLD_SCORES
from fastfold.inference.output.plots import confidence_png
from fastfold.protein.io.pdb_writer import PdbLimitError, to_pdb
from fastfold.protein.protein import check_writable

if TYPE_CHECKING:
    from fastfold.inference.output.prediction import Prediction

_log = logging.getLogger(__name__)


def prediction_scores(prediction: Prediction) -> dict[str, Any]:
    """Return the content of a prediction's scores file; see :meth:`.Prediction.scores`."""
    ranges = prediction.residue_ranges
    is_whole = ranges == [[[1, len(sequence)]] for sequence in prediction.sequences]
    labels = score_files.residue_labels(prediction.author_names, prediction.protein)
    scored = prediction.given_structure
    return {
        "schema_version": score_files.SCHEMA_VERSION,
        "name": prediction.name,
        "model": prediction.model_name,
        "is_multimer": prediction.is_multimer,
        "seed": int(prediction.seed),
        **({} if prediction.sample is None else {"sample": dict(prediction.sample)}),
        "num_recycles": int(prediction.num_recycles),
        "chain_ids": list(prediction.author_names.chain_ids),
        "sequences": list(prediction.sequences),
        **({} if is_whole else {"residue_ranges": ranges}),
        **({} if labels is None else {"residue_labels": labels}),
        "mean_plddt": score_files.rounded(prediction.mean_plddt, 2),
        "ptm": score_files.rounded(prediction.ptm, 4),
        "iptm": score_files.rounded(prediction.iptm, 4),
        "ranking_confidence": score_files.rounded(prediction.ranking_confidence, 4),
        "max_pae": score_files.rounded(prediction.max_pae, 4),
        "interfaces": score_files.rounded_tree(prediction.interface_scores, 4),
        "geometry": prediction.structure_check.to_dict(),
        **(
            {}
            if prediction.templates is None
            else {"templates": [dict(chain) for chain in prediction.templates]}
        ),
        **({} if prediction.restraints is None else {"restraints": dict(prediction.restraints)}),
        **({} if scored is None else {"given_structure": score_files.rounded_tree(dict(scored), 4)}),
        "plddt": score_files.rounded(prediction.plddt, 2),
    }


def prediction_files(
    prediction: Prediction, *, plots: bool, output_format: OutputFormat
) -> dict[str, str | bytes]:
    """Return the contents of a prediction's files by their endings; see :meth:`.Prediction.files`."""
    _check_finite(prediction)
    contents: dict[str, str | bytes] = {}
    try:
        contents[".pdb"] = prediction.to_pdb()
    except PdbLimitError as error:
        _log.warning("%s: no PDB file is written: %s", prediction.name[:100], error)
    contents[".cif"] = prediction.to_mmcif()
    contents["_scores.json"] = score_files.lines_json(prediction.scores())
    if prediction.pae is not None and prediction.max_pae is not None:
        contents["_pae.json"] = score_files.pae_json(prediction.pae, prediction.max_pae)
    if output_format == "colabfold":
        contents[COLABFOLD_SCORES] = score_files.colabfold_json(
            prediction.plddt, pae=prediction.pae, ptm=prediction.ptm, iptm=prediction.iptm
        )
    if plots:
        contents[".png"] = confidence_png(**prediction.plot_arguments())
    for kind, arrays in (
        ("representations", prediction.representations),
        ("distogram", prediction.distogram),
    ):
        if arrays is not None:
            contents[f"_{kind}.npz"] = _npz(arrays)
    for number, recycle in enumerate(prediction.recycles):
        with contextlib.suppress(PdbLimitError):
            contents[f"_r{number}.pdb"] = to_pdb(prediction.with_atoms(*recycle), names=prediction.names)
    return contents


def _check_finite(prediction: Prediction) -> None:
    """Refuse values that are not finite or out of range, also of residues without atoms."""
    check_writable(prediction.protein)
    values = {
        "pLDDT": prediction.plddt,
        "PAE": prediction.pae,
        "max PAE": prediction.max_pae,
        "pTM": prediction.ptm,
        "ipTM": prediction.iptm,
    }
    for label, value in values.items():
        if value is not None and not np.isfinite(value).all():
            raise OutputError(
                f"{label} of {prediction.name[:100]} is not finite: the prediction failed and is not written; "
                "try --precision fp32 and check the weights"
            )
    pae, limit = prediction.pae, 1.001 * (prediction.max_pae or 0)
    if pae is not None and not (pae.min() >= 0 and pae.max() <= limit):
        raise OutputError(
            f"PAE of {prediction.name[:100]} ranges over {pae.min():.2f}..{pae.max():.2f} Å, outside of "
            f"0..{prediction.max_pae} Å: it does not come from this network's error bins and is not written"
        )


def _npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return a NumPy archive, the same bytes for the same arrays."""
    file = io.BytesIO()
    np.savez(file, **dict(arrays))  # type: ignore[arg-type]
    return file.getvalue()
