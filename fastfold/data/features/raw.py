"""Raw features: one chain and its alignments as integer arrays, before sampling.

The layout is that of AlphaFold's data pipeline (supplement, section 1.2). Alignment letters become HHblits ids. Rows
that repeat an earlier row of any alignment are dropped. Each row keeps the UniProt species code of its description, by
which rows of different chains are paired later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastfold.data.msa.msa import Msa, check_query
from fastfold.data.msa.sampling import join_alignments
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc

MSA_LAYOUT = {"msa": ("S", "N"), "deletion_matrix_int": ("S", "N")}
SEQUENCE_LAYOUT = {"aatype": ("N", 21), "residue_index": ("N",), "between_segment_residues": ("N",)}
TEMPLATE_LAYOUT = {
    "template_aatype": ("T", "N", 22),
    "template_all_atom_positions": ("T", "N", 37, 3),
    "template_all_atom_masks": ("T", "N", 37),
    "template_sum_probs": ("T", 1),
}

_INVALID = 255
_LETTER_TO_ID = np.full(256, _INVALID, np.uint8)
for _letter, _id in rc.hhblits_letter_to_id.items():
    _LETTER_TO_ID[ord(_letter)] = _id

# UniProtKB entry, e.g. sp|P0C2L1|A3X1_LOXLA: database | accession (with isoform) | name _ species (_ number).
_UNIPROT_ENTRY = re.compile(
    r"(?:tr|sp)\|[A-Za-z0-9]{6,10}(?:_\d)?\|[A-Za-z0-9]+_(?P<species>[A-Za-z0-9]{1,5})(?:_\d+)?"
)
# Protenix' names: UniRef100_ accession _ number of the taxon.
_PROTENIX_ENTRY = re.compile(r"UniRef100_[^_]+_(?P<species>[^_]+)")


def alignment_ids(rows: Sequence[str]) -> np.ndarray:
    """Convert ``S`` aligned rows of ``N`` upper-case letters and ``-`` to HHblits ids.

    Returns:
        ``[S, N]`` uint8: 0-19 amino acids in alphabetical order of their letters, 20 unknown, 21 gap.

    Raises:
        InputError: A row has another length than the first, or a character that is not a residue.
    """
    if not rows:
        return np.zeros((0, 0), np.uint8)
    width = len(rows[0])
    for number, row in enumerate(rows):
        if len(row) != width:
            raise InputError(
                f"alignment row {number} has {len(row)} columns, the first row {width}; all must be equal"
            )
    # Encoding with "replace" turns characters outside ASCII into "?", which is not a residue, and keeps the columns.
    letters = np.frombuffer("".join(rows).encode("ascii", "replace"), np.uint8)
    ids = _LETTER_TO_ID[letters].reshape(len(rows), width)
    if (ids == _INVALID).any():
        row, column = np.argwhere(ids == _INVALID)[0]
        raise InputError(
            f"alignment row {row}, column {column + 1}: expected a residue (A-Z) or '-', found {rows[row][column]!r}"
        )
    return ids


def species_identifier(description: str) -> str:
    """Return the UniProt species code of a description, Protenix' number of its taxon, or an empty string.

    For ``tr|A0A0K0ME10|A0A0K0ME10_9STAP/1-51 ...`` it is ``9STAP``, for ``UniRef100_A0A0K0ME10_1280/ ...`` 1280.
    """
    words = description.split(maxsplit=1)
    name = words[0].partition("/")[0] if words else ""
    match = _UNIPROT_ENTRY.fullmatch(name) or _PROTENIX_ENTRY.fullmatch(name)
    return match["species"] if match else ""


def sequence_features(sequence: str) -> dict[str, np.ndarray]:
    """Compute features of a chain's ``N`` letters alone; those outside the twenty standard ones count as unknown.

    Returns:
        ``aatype`` one-hot ``[N, 21]``, ``between_segment_residues`` ``[N]`` zeros, ``residue_index``
        ``[N]`` from zero, ``seq_length`` ``[N]`` filled with N, all int32, and ``sequence`` ``[N]`` uint8
        (ASCII).
    """
    length = len(sequence)
    return {
        "aatype": np.eye(21, dtype=np.int32)[rc.sequence_to_aatype(sequence)],
        "between_segment_residues": np.zeros(length, np.int32),
        "residue_index": np.arange(length, dtype=np.int32),
        "seq_length": np.full(length, length, np.int32),
        "sequence": np.frombuffer(sequence.encode("ascii", "replace"), np.uint8),
    }


def msa_features(msas: Sequence[Msa], query: str) -> dict[str, np.ndarray]:
    """Compute features of a chain's alignments, joined in order; repeated rows are dropped.

    The first rows of the alignments are the query of ``N`` letters. Without alignments, the query alone is one
    (single-sequence mode). Alignments with ``Msa.as_is`` keep all rows, and need not contain the query.

    Returns:
        ``msa`` ``[S, N]`` int32 HHblits ids, ``deletion_matrix_int`` ``[S, N]`` int32 residues deleted
        before each column, ``num_alignments`` ``[N]`` int32 filled with S, ``msa_species_identifiers``
        ``[S]`` bytes.

    Raises:
        InputError: An alignment is empty, has another width than the chain, or begins with another sequence.
    """
    for msa in msas:
        if not (msa.as_is and msa.sequences):
            check_query(msa, query)
        elif msa.deletions.shape[1] != len(query):
            raise InputError(
                f"an alignment has {msa.deletions.shape[1]} columns, its chain {len(query)} residues"
            )
    alone = Msa((query,), np.zeros((1, len(query)), np.int32), ("",))
    joined = join_alignments(msas or [alone], unique=True)
    species = [species_identifier(description) for description in joined.descriptions]
    return {
        "deletion_matrix_int": np.asarray(joined.deletions, np.int32),
        "msa": alignment_ids(joined.sequences).astype(np.int32),
        "num_alignments": np.full(len(query), len(joined.sequences), np.int32),
        "msa_species_identifiers": np.array(species, dtype=np.bytes_),
    }


def template_features(templates: Mapping[str, Any], length: int) -> dict[str, np.ndarray]:
    """Return the raw template features that the networks use for ``length`` residues, as float32.

    They are ``template_aatype`` ``[T, N, 22]`` one-hot over HHblits ids, ``template_all_atom_positions``
    ``[T, N, 37, 3]`` in Å, ``template_all_atom_masks`` ``[T, N, 37]``, ``template_sum_probs`` ``[T, 1]``; and
    optionally ``template_frame`` ``[T]``, 0 for a template of this chain alone, and the same positive number
    for chains whose atoms are in one frame. Other features are ignored. Without ``template_aatype``, ``T`` is 0.

    Raises:
        InputError: A feature is missing, or the templates belong to another chain.
    """
    if not len(templates.get("template_aatype", ())):
        sizes = {"T": 0, "N": length}
        return {
            name: np.zeros([sizes[size] if isinstance(size, str) else size for size in shape], np.float32)
            for name, shape in TEMPLATE_LAYOUT.items()
        }
    frame = {"template_frame": ("T",)} if "template_frame" in templates else {}
    check_layout(templates, {**TEMPLATE_LAYOUT, **frame}, N=length)
    arrays = {name: np.asarray(templates[name], np.float32) for name in TEMPLATE_LAYOUT}
    return arrays | {name: np.asarray(templates[name], np.int32) for name in frame}


Layout = Mapping[str, tuple[int | str, ...]]
"""Feature names and their shapes; sizes with the same letter must be equal in all features."""


def check_layout(features: Mapping[str, np.ndarray], layout: Layout, **sizes: int) -> dict[str, int]:
    """Check presence and shapes of features, and return the size of each letter of the layout.

    Some sizes are known by letter.

    Raises:
        InputError: A feature is missing, empty, or has another shape.
    """
    for name, shape in layout.items():
        if name not in features:
            raise InputError(f"feature {name!r} is missing; expected {', '.join(layout)}")
        present = np.shape(features[name])
        if len(present) == len(shape):
            for letter, size in zip(shape, present, strict=True):
                if isinstance(letter, str):
                    sizes.setdefault(letter, size)
        wanted = tuple(sizes.get(size, -1) if isinstance(size, str) else size for size in shape)
        if present != wanted:
            named = ", ".join(
                f"{size} = {sizes[size]}" if size in sizes else str(size) for size in map(str, shape)
            )
            raise InputError(f"feature {name!r} has shape {list(present)}, expected [{named}]")
        if 0 in present:
            raise InputError(f"feature {name!r} is empty: its shape is {list(present)}")
    return sizes


def check_ids(features: Mapping[str, np.ndarray], name: str, classes: int) -> None:
    """Check that a feature of integers is within ``range(classes)``.

    Raises:
        InputError: A value is outside of the range.
    """
    values = np.asarray(features[name])
    if values.size and (values.min() < 0 or values.max() >= classes):
        raise InputError(
            f"feature {name!r} has values from {values.min()} to {values.max()}, expected 0 to {classes - 1}"
        )
