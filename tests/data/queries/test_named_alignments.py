"""Alignments that inputs of other programs name are those of a folder of alignments."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfold import model_config
from fastfold.data.features.pipeline import featurize
from fastfold.data.msa.find import load_alignments, target_alignments
from fastfold.data.queries.jobs import QueryJob
from fastfold.data.queries.named_alignments import ALIGNMENT_FIELDS, entity_alignments
from fastfold.data.queries.read import read_targets
from fastfold.data.targets import Target
from fastfold.errors import InputError

FIRST, SECOND = "MKTAYIAK", "GSHMAW"
OWN = {
    FIRST: f">q\n{FIRST}\n>1\nMKTAYIAR\n>2\nMKTaaAYIWK\n>2b\nMKTAYIWK\n",
    SECOND: f">q\n{SECOND}\n>1\nGS--AW\n",
}
SPECIES = {
    FIRST: f">q\n{FIRST}\n>tr|A0A001|A0A001_HUMAN/1-8\nMKTAYLLK\n>tr|A0A002|A0A002_MOUSE/1-8\nMRTAYIAK\n",
    SECOND: f">q\n{SECOND}\n>tr|B0A001|B0A001_MOUSE/1-6\nGSHLAW\n>tr|B0A002|B0A002_YEAST/1-6\nGSHMWW\n",
}


def put(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def single(folder: Path, tree: Any, name: str = "in.json") -> Target:
    (folder / name).write_text(tree if isinstance(tree, str) else json.dumps(tree))
    (target,), errors = read_targets([folder / name])
    assert not errors, errors
    return target


def problem(folder: Path, tree: Any, name: str = "in.json") -> str:
    (folder / name).write_text(tree if isinstance(tree, str) else json.dumps(tree))
    targets, (error,) = read_targets([folder / name])
    assert not targets
    return str(error)


def af3(*proteins: dict[str, Any], kind: str = "protein") -> dict[str, Any]:
    tree = {"name": "t", "sequences": [{kind: protein} for protein in proteins]}
    return tree if kind == "proteinChain" else tree | {"dialect": "alphafold3", "version": 2}


def assert_same_features(target: Target, folder: Path, network: str) -> None:
    """The features of a target are those of the files of its chains in a folder for ``--msa-dir``."""
    ours = target_alignments(None, target)
    theirs = load_alignments(folder, target)
    found, expected = (
        featurize(target.chains, one, model_config(network), join=len(ours) > 1).sample(0)
        for one in (ours, theirs)
    )
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], name)
    assert sum(len(msa.sequences) for own, paired in ours for msa in (*own, *paired)) > len(ours)


MSA_DIR = {
    f"t/{chain}/{name}": text[sequence]
    for chain, sequence in (("A", FIRST), ("B", SECOND))
    for name, text in (("bfd.a3m", OWN), ("uniprot_hits.a3m", SPECIES))
}


@pytest.mark.parametrize("network", ["model_1_ptm", "model_1_multimer_v3"])
def test_alphafold_3_as_text_and_as_files(tmp_path: Path, network: str) -> None:
    """Own rows and rows paired by species, of which HUMAN and YEAST have no partner; packed files too."""
    put(tmp_path / "dir", MSA_DIR)
    put(
        tmp_path,
        {
            "m/a.a3m.gz": gzip.compress(OWN[FIRST].encode()),
            "m/a_paired": lzma.compress(SPECIES[FIRST].encode()),
            "b.a3m": OWN[SECOND],
            "b_paired.a3m": SPECIES[SECOND],
        },
    )
    texts = [
        {"id": name, "sequence": sequence, "unpairedMsa": OWN[sequence], "pairedMsa": SPECIES[sequence]}
        for name, sequence in (("A", FIRST), ("B", SECOND))
    ]
    files = [
        {"id": "A", "sequence": FIRST, "unpairedMsaPath": "m/a.a3m.gz", "pairedMsaPath": "m/a_paired"},
        {
            "id": "B",
            "sequence": SECOND,
            "unpairedMsaPath": str(tmp_path / "b.a3m"),
            "pairedMsaPath": "b_paired.a3m",
        },
    ]
    for proteins in (texts, files):
        assert_same_features(single(tmp_path, af3(*proteins)), tmp_path / "dir", network)


def test_null_leaves_the_alignment_open_and_an_empty_text_says_none(tmp_path: Path) -> None:
    """A chain that is open has the alignment of the folder; the others do not."""
    put(tmp_path / "dir", MSA_DIR)
    left_open = {"id": "A", "sequence": FIRST, "unpairedMsa": None, "pairedMsa": None}
    assert single(tmp_path, af3(left_open, {"id": "B", "sequence": SECOND})).alignments is None
    without = {"id": "B", "sequence": SECOND, "unpairedMsa": "", "pairedMsa": ""}
    target = single(tmp_path, af3(left_open, without))
    assert target.alignments == (None, ([], []))
    assert [target.has_alignment(index) for index in (0, 1)] == [False, True]
    assert not target.has_all_alignments
    first, second = target_alignments(tmp_path / "dir", target)
    assert [msa.sequences for msa in first[0]] == [
        load_alignments(tmp_path / "dir", target)[0][0][0].sequences
    ]
    assert second == ([], [])
    assert target_alignments(None, target) == [([], []), ([], [])]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"unpairedMsaPath": "none.a3m", "pairedMsa": ""},
            "entry 1, 'unpairedMsaPath': no such file: 'none.a3m' in",
        ),
        (
            {"unpairedMsa": "x", "unpairedMsaPath": "y"},
            "'unpairedMsa' and 'unpairedMsaPath' exclude each other",
        ),
        ({"unpairedMsa": "bad.a3m", "pairedMsa": ""}, "name a file by 'unpairedMsaPath'"),
        ({"unpairedMsa": 5}, "'unpairedMsa': expected the text of an A3M alignment, found '5'"),
        (
            {"unpairedMsa": f">q\n{SECOND}\n"},
            "'unpairedMsa': record 'q': the alignment belongs to another sequence",
        ),
        ({"pairedMsaPath": "bad.a3m"}, "bad.a3m:3 (record 'a'): expected 8 columns"),
        ({"unpairedMsaPath": "zstd"}, "is packed by zstd; unpack it"),
        ({"unpairedMsaPath": "cut.xz"}, "is a damaged xz file"),
        ({"unpairedMsaPath": "."}, "is a folder; name a file in it"),
        ({"unpairedMsaPath": "a\0b"}, "expected a path"),
        ({"msa": "bad.a3m", "unpairedMsa": ""}, "names alignments in 'msa' and in other fields"),
    ],
)
def test_wrong_alignments_are_named_with_file_and_field(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    put(tmp_path, {"bad.a3m": f">q\n{FIRST}\n>a\nMK\n", "zstd": b"\x28\xb5\x2f\xfd..."})
    put(tmp_path, {"cut.xz": lzma.compress(OWN[FIRST].encode())[:-9]})
    message = problem(tmp_path, af3({"id": "A", "sequence": FIRST, **fields}))
    assert message.startswith(f"{tmp_path / 'in.json'} (record 't'): entry 1")
    assert said in message


def test_entries_of_one_sequence_have_one_alignment(tmp_path: Path) -> None:
    one = {"sequence": FIRST, "unpairedMsa": OWN[FIRST], "pairedMsa": ""}
    other = one | {"unpairedMsa": f">q\n{FIRST}\n"}
    assert "entry 2 has the sequence of an earlier entry, and another alignment" in problem(
        tmp_path, af3(one, other)
    )
    target = single(tmp_path, af3(one, {"sequence": FIRST}))
    assert target.alignments is not None
    assert target.alignments[0] == target.alignments[1]


def test_msa_of_boltz_is_a_file_or_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths start at the file, or at the working folder, as in Boltz itself."""
    put(tmp_path, {"work/x.a3m": OWN[FIRST], "q/b.a3m": OWN[SECOND], "dir/t_A.a3m": OWN[FIRST]})
    put(tmp_path, {"dir/t_B.a3m": OWN[SECOND]})
    monkeypatch.chdir(tmp_path / "work")
    text = "sequences:\n- protein: {{id: A, sequence: {}, msa: {}}}\n- protein: {{id: B, sequence: {}, msa: {}}}\n"
    named = single(tmp_path / "q", text.format(FIRST, "./x.a3m", SECOND, "./b.a3m"), "t.yaml")
    for network in ("model_1_ptm", "model_1_multimer_v3"):
        assert_same_features(named, tmp_path / "dir", network)
    empty = single(tmp_path / "q", text.format(FIRST, "empty", SECOND, "b.a3m"), "t.yaml")
    assert empty.alignments is not None
    assert empty.alignments[0] == ([], [])
    message = problem(tmp_path / "q", text.format(FIRST, "b.a3m", SECOND, "b.a3m"), "t.yaml")
    assert "entry 1, 'msa': " in message
    assert "b.a3m (record 'q'): the alignment belongs to another sequence" in message


@pytest.mark.parametrize("network", ["model_1_ptm", "model_1_multimer_v3"])
def test_protenix_files_and_folders(tmp_path: Path, network: str) -> None:
    """``pairing.a3m`` is paired by taxa, and used for the chain alone, too."""
    taxa = {
        sequence: f">query\n{sequence}\n"
        + "".join(f">UniRef100_X{n}_{taxon}/\n{row}\n" for n, taxon, row in rows)
        for sequence, rows in (
            (FIRST, [(1, 9606, "MKTAYLLK"), (2, 10090, "MRTAYIAK")]),
            (SECOND, [(3, 10090, "GSHLAW"), (4, 7227, "GSHMWW")]),
        )
    }
    for chain, sequence in (("A", FIRST), ("B", SECOND)):
        put(tmp_path / f"dir/t/{chain}", {"pairing.a3m": taxa[sequence], "non_pairing.a3m": OWN[sequence]})
    folders = [
        {
            "sequence": sequence,
            "count": 1,
            "msa": {"precomputed_msa_dir": f"./dir/t/{chain}", "pairing_db": "uniref100"},
        }
        for chain, sequence in (("A", FIRST), ("B", SECOND))
    ]
    files = [
        {
            "sequence": sequence,
            "count": 1,
            "pairedMsaPath": f"dir/t/{chain}/pairing.a3m",
            "unpairedMsaPath": f"dir/t/{chain}/non_pairing.a3m",
        }
        for chain, sequence in (("A", FIRST), ("B", SECOND))
    ]
    for proteins in (folders, files):
        target = single(tmp_path, [af3(*proteins, kind="proteinChain")])
        assert_same_features(target, tmp_path / "dir", network)
        lines = featurize(target.chains, target_alignments(None, target), model_config("model_1_multimer_v3"))
        assert lines.static["aatype"].shape == (14,)
    put(tmp_path, {"hollow/x": ""})
    hollow = {"sequence": FIRST, "count": 1, "msa": {"precomputed_msa_dir": "hollow"}}
    assert "has neither pairing.a3m nor non_pairing.a3m" in problem(
        tmp_path, [af3(hollow, kind="proteinChain")]
    )


def test_fields_are_those_of_a_protein(tmp_path: Path) -> None:
    """Each field alone decides whether a chain's alignment is open."""
    (tmp_path / "x.a3m").write_text(OWN[FIRST])
    job = QueryJob(tmp_path / "in.json", "t")
    assert entity_alignments(job, {}, FIRST, 1, is_protenix=False) is None
    for field in ALIGNMENT_FIELDS:
        value = OWN[FIRST] if field in ("unpairedMsa", "pairedMsa") else "x.a3m"
        found = entity_alignments(job, {field: value}, FIRST, 1, is_protenix=False)
        assert found is not None
        assert [len(group) for group in found] == ([0, 1] if field.startswith("paired") else [1, 0])
    with pytest.raises(InputError, match="no such file"):
        entity_alignments(job, {"msa": "y.a3m"}, FIRST, 3, is_protenix=False)
