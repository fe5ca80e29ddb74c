"""Inputs of other programs are read as these programs read them, by recorded numbers.

Each record holds an input with gaps, insertions and odd letters, and its reading by the program: AlphaFold 3's
``Input.from_json`` and ``Msa.featurize``, Boltz' ``parse_csv``, Chai's ``parse_aligned_pqt_to_msa_context``,
OpenFold 3's ``InferenceQuerySet``, ``parse_a3m`` and ``parse_stockholm``, and Protenix' ``RawMsa.featurize``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from fastfold.data.features.raw import alignment_ids, species_identifier
from fastfold.data.msa.find import load_alignments
from fastfold.data.msa.keyed import parse_keyed_table
from fastfold.data.msa.msa import Msa
from fastfold.data.queries.read import read_targets
from fastfold.data.targets import Target, target_from_sequence

PUBLISHED: dict[str, Any] = json.loads(Path(__file__).with_name("published_inputs.json").read_text())
LETTERS = "ACDEFGHIKLMNPQRSTVWYX-"


def rows_of(msa: Msa) -> list[str]:
    """Return the rows in the letters that networks distinguish."""
    return ["".join(LETTERS[one] for one in row) for row in alignment_ids(msa.sequences)]


def unique(rows: list[str], *more: list[Any]) -> list[tuple[Any, ...]]:
    """Return rows with their values, without rows that repeat an earlier one."""
    first: dict[str, tuple[Any, ...]] = {}
    for line in zip(rows, *more, strict=True):
        first.setdefault(line[0], line)
    return list(first.values())


def read_all(path: Path) -> list[Target]:
    targets, errors = read_targets([path])
    assert not errors, errors
    return targets


def test_alphafold_3(tmp_path: Path) -> None:
    record = PUBLISHED["AlphaFold 3"]
    (tmp_path / "in.json").write_text(json.dumps(record["input"]))
    (target,) = read_all(tmp_path / "in.json")
    assert target.seeds == tuple(record["seeds"])
    # Copies of a chain stand together in both programs.
    assert [chain.record for chain in target.chains] == [chain["id"] for chain in record["chains"]]
    assert target.alignments is not None
    for chain, alignments, theirs in zip(target.chains, target.alignments, record["chains"], strict=True):
        assert chain.sequence == theirs["sequence"]
        assert alignments is not None
        (own,), (paired,) = alignments
        expected = theirs["unpaired"]
        assert unique(rows_of(own), own.deletions.tolist()) == unique(expected["rows"], expected["deletions"])
        expected = theirs["paired"]
        assert rows_of(paired) == expected["rows"]
        assert paired.deletions.tolist() == expected["deletions"]
        assert [species_identifier(one) for one in paired.descriptions] == expected["species"]


def test_boltz() -> None:
    """Boltz drops a row whose residues without gaps are those of an earlier one; the record has none."""
    for chain in PUBLISHED["Boltz"]["chains"]:
        msa = parse_keyed_table(chain["text"])
        assert rows_of(msa) == chain["rows"]
        assert msa.deletions.tolist() == chain["deletions"]


def test_chai(tmp_path: Path) -> None:
    """Chai sorts the rows by database; equal hashes of its keys are equal keys here."""
    keys: set[tuple[str, int]] = set()
    for chain in PUBLISHED["Chai"]["chains"]:
        columns = {name: [row[name] for row in chain["table"]] for name in chain["table"][0]}
        parquet.write_table(pyarrow.table(columns), tmp_path / chain["file"])
        target = target_from_sequence(chain["sequence"], name="t")
        (((msa,), _),) = load_alignments(tmp_path, target)
        found = sorted(zip(rows_of(msa), msa.deletions.tolist(), msa.keys, strict=True))
        expected = sorted(zip(chain["rows"], chain["deletions"], chain["pairing"], strict=True))
        assert [one[:2] for one in found] == [one[:2] for one in expected]
        keys |= {(mine[2], theirs[2]) for mine, theirs in zip(found, expected, strict=True)}
    assert len(keys) == len({key for key, _ in keys}) == len({key for _, key in keys}) == 5


def test_openfold_3(tmp_path: Path) -> None:
    record = PUBLISHED["OpenFold 3"]
    for name, text in record["files"].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "in.json").write_text(json.dumps(record["input"]))
    targets = {target.record: target for target in read_all(tmp_path / "in.json")}
    assert targets.keys() == record["queries"].keys()
    for name, target in targets.items():
        chains = [(one, chain) for chain in record["queries"][name] for one in chain["ids"]]
        assert target.seeds == tuple(record["seeds"])
        assert [(chain.record, chain.sequence) for chain in target.chains] == [
            (one, chain["sequence"]) for one, chain in chains
        ]
        for number, (_, chain) in enumerate(chains):
            own = target.alignments[number][0] if target.alignments else []  # type: ignore[index]
            theirs = [record["alignments"][file] for file in chain["files"]]
            found = sorted((list(msa.sequences), msa.deletions.tolist()) for msa in own)
            assert found == sorted((one["rows"], one["deletions"]) for one in theirs)


def test_protenix(tmp_path: Path) -> None:
    chains = PUBLISHED["Protenix"]["chains"]
    target = target_from_sequence(":".join(chain["sequence"] for chain in chains), name="t")
    for ours, chain in zip(target.chains, chains, strict=True):
        place = tmp_path / "t" / ours.id
        place.mkdir(parents=True)
        for name in ("pairing", "non_pairing"):
            (place / f"{name}.a3m").write_text(chain[name])
    for (own, paired), chain in zip(load_alignments(tmp_path, target), chains, strict=True):
        (lines,) = paired
        assert rows_of(lines) == chain["rows"]
        assert lines.deletions.tolist() == chain["deletions"]
        assert [species_identifier(one) for one in lines.descriptions] == chain["species"]
        assert rows_of(own[-1]) == chain["own"]
