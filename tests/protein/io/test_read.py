"""Reading structure files: the experimental collection, and what cannot be read."""

from __future__ import annotations

import csv
import gzip
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from tests.conftest import require_shared
from tests.helpers.structure_texts import atom_line, chain_lines, read_lines, seqres_lines

SOUND = "\n".join([*chain_lines(("ALA", 1), ("GLY", 2)), "TER", "END", ""])


@pytest.mark.long
def test_collection_is_read_with_its_sequences():
    """Every 50th chain of the collection gives the sequence of its index, apart from modified residues."""
    folder = require_shared("data", "structures")
    with (folder / "index.tsv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))[::50]
    for row in rows:
        structure = read_structure(folder / row["split"] / f"{row['name']}.pdb.gz")
        (chain,) = structure.chains
        assert (structure.name, chain.chain_id) == (row["name"], "A")
        assert len(chain) == len(row["sequence"])
        assert all(a == b for a, b in zip(chain.sequence, row["sequence"], strict=True) if b != "X")
        assert np.all(np.diff(chain.residue_index) > 0)
        assert np.isfinite(chain.positions).all()
        assert not chain.positions[chain.mask == 0].any()


def test_unobserved_loops_of_real_chains_are_found_again(tmp_path):
    """Real chains with SEQRES and three loops cut out: every residue returns to its place, with its atoms."""
    folder = require_shared("data", "structures", "train")
    rng = np.random.default_rng(0)
    for source in sorted(folder.glob("*.pdb.gz"))[::400]:
        whole = read_structure(source).chains[0]
        keep = np.ones(len(whole), bool)
        for start in rng.integers(0, len(whole), 3):
            keep[start : start + 8] = False
        names = [rc.restype_1to3[letter] for letter in whole.sequence]
        lines = [
            line for line in gzip.decompress(source.read_bytes()).decode().split("\n") if line[:4] != "ANIS"
        ]
        places = {
            key: i for i, key in enumerate(dict.fromkeys(line[22:27] for line in lines if line[:4] == "ATOM"))
        }
        if len(places) != len(whole):  # modified residues, in HETATM records
            continue
        lines = [line for line in lines if line[:4] == "ATOM" and keep[places[line[22:27]]]]
        (cut,) = read_lines(tmp_path, [*seqres_lines(*names), *lines]).chains
        assert cut.sequence == whole.sequence
        assert np.array_equal(cut.mask, whole.mask * keep[:, None])
        assert np.array_equal(cut.positions, whole.positions * keep[:, None, None])


@pytest.mark.parametrize("name", ["1abc.pdb", "1abc.ent", "1abc.PDB.GZ", "1abc.ent.gz", "1abc", "1abc.cif"])
def test_format_is_told_by_content(tmp_path, name):
    """A PDB file is read under any name, which loses only its usual endings."""
    path = tmp_path / name
    data = SOUND.encode()
    path.write_bytes(gzip.compress(data) if name.lower().endswith(".gz") else data)
    structure = read_structure(path)
    assert (structure.name, structure.chains[0].sequence) == ("1abc", "AG")


def test_chosen_chains(tmp_path):
    """Only the chains asked for come back, and a wrong name is answered with the right ones."""
    (tmp_path / "x.pdb").write_text(
        "\n".join(atom_line("N", number=n, chain=c) for c in "ABC" for n in (1, 2))
    )
    assert [c.chain_id for c in read_structure(tmp_path / "x.pdb", chain_ids=["C", "A"]).chains] == ["A", "C"]
    with pytest.raises(InputError, match="lacks the protein chain 'X'; its protein chains are 'A', 'B', 'C'"):
        read_structure(tmp_path / "x.pdb", chain_ids=["A", "X"])
    with pytest.raises(InputError, match="expected at least one chain in chain_ids"):
        read_structure(tmp_path / "x.pdb", chain_ids=[])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\x7fELF\0\0\0", "binary"),
        (b">x\nMKTAYIAK\n", "FASTA"),
        (b"<!DOCTYPE html>\n<html>", "web page"),
        (b"MKTAYIAK\n", "not a PDB or mmCIF"),
        (b"HEADER    DNA\nTITLE     X\n", "no atoms"),
        (
            "\n".join(atom_line("C2", " DA", n) + "\n" + atom_line("N", " DA", n) for n in (1, 2)).encode(),
            "only DNA or RNA",
        ),
    ],
)
def test_no_structure(tmp_path, data, message):
    """Each kind of wrong file is told what it is."""
    path = tmp_path / "x.pdb"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        read_structure(path)
    assert caught.value.path == path


def test_no_file(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_structure(tmp_path / "x.pdb")
    with pytest.raises(InputError, match="is a folder"):
        read_structure(tmp_path)


def test_truncated_gzip(tmp_path):
    path = tmp_path / "x.pdb.gz"
    path.write_bytes(gzip.compress(SOUND.encode())[:-20])
    with pytest.raises(InputError, match="damaged gzip"):
        read_structure(path)


def test_water_is_passed_over(tmp_path):
    """100,000 atoms of water cost well under two seconds, and are no protein."""
    water = [atom_line("O", "HOH", i, record="HETATM") for i in range(10_000)] * 10
    start = time.perf_counter()
    assert read_lines(tmp_path, [*water, *chain_lines(("ALA", 1))]).chains[0].sequence == "A"
    assert time.perf_counter() - start < 2
    with pytest.raises(InputError, match="only 100,000 atoms of water"):
        read_lines(tmp_path, water)


FILES = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_or_refuse(path) -> None:
    try:
        structure = read_structure(path)
    except InputError:
        return
    assert structure.chains
    for chain in structure.chains:
        assert chain.positions.shape == (len(chain), 37, 3)
        assert np.isfinite(chain.positions).all()
        assert np.all(np.diff(chain.residue_index) > 0)


@FILES
@given(st.binary(max_size=300))
@example(b"ATOM")
@example(b"TER\nATOM\n")
@example(b"data_\n_atom_site")
def test_arbitrary_bytes_give_a_structure_or_a_clear_error(tmp_path, data):
    (tmp_path / "x.pdb").write_bytes(data)
    read_or_refuse(tmp_path / "x.pdb")


@FILES
@given(st.data())
def test_damaged_pdb_gives_a_structure_or_a_clear_error(tmp_path, data):
    """Any piece of a sound file replaced or removed."""
    text = "SEQRES   1 A    2  ALA GLY\nMODRES 1ABC MSE A    2  MET\n" + SOUND
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 90)))
    piece = data.draw(st.text(alphabet="ATOMHESQR -.0129\n\r\x0c\xb2", max_size=12))
    (tmp_path / "x.pdb").write_bytes((text[:start] + piece + text[stop:]).encode("latin-1"))
    read_or_refuse(tmp_path / "x.pdb")
