"""``fastfold infer --msa-dir`` in all its layouts."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

import fastfold
from tests.helpers.command_line import CommandLine, Outcome, small_model
from tests.inference.runner.inputs import OTHER, SEQUENCE, a3m, stockholm


def infer_pair(cli: CommandLine, msas: Path) -> Outcome:
    """Fold a complex of two chains with the alignments of a folder."""
    fasta, weights = cli.fasta({"pair": f"{SEQUENCE}:{OTHER}"}), [cli.weights("model_1_multimer_v3")]
    return cli.infer(fasta, "--msa-dir", msas, weights=weights)


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """pLDDT from the sequence alone."""
    plddt: list[float] = fastfold.predict(SEQUENCE, small_model(), num_recycles=0).scores()["plddt"]
    return plddt


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("T1.a3m", a3m(SEQUENCE, 4), 4),
        ("T1.a3m.gz", gzip.compress(a3m(SEQUENCE, 5).encode()), 5),
        ("T1/uniref90_hits.sto", stockholm(SEQUENCE, 3), 3),
        ("T1/bfd_uniclust_hits.a3m", a3m(SEQUENCE, 6), 6),
        ("T1/msas/mgnify_hits.sto", stockholm(SEQUENCE, 4), 4),
    ],
    # Names of their own: the bytes of a gzip file hold the time at which they were made.
    ids=["a3m", "a3m.gz", "stockholm", "folder", "msas"],
)
def test_alignments_of_a_chain_are_found_and_used(cli: CommandLine, alone: list[float], name, content, rows):
    path = cli.folder / "msas" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    fasta = cli.fasta({"T1": SEQUENCE})
    done = cli.infer(fasta, "--msa-dir", cli.folder / "msas")
    assert done.code == 0
    assert f"{rows} alignment rows" in done.err
    assert cli.config("T1")["alignment_rows"] == [[rows, 0]]
    assert cli.scores("T1")["plddt"] != alone


def test_without_alignments_the_command_and_the_api_agree(cli: CommandLine, alone: list[float]):
    assert cli.infer(cli.fasta({"T1": SEQUENCE})).code == 0
    assert cli.scores("T1")["plddt"] == alone


def test_all_alignments_of_a_folder_are_used_together(cli: CommandLine):
    folder = cli.folder / "msas" / "T1"
    folder.mkdir(parents=True)
    (folder / "uniref90_hits.sto").write_text(stockholm(SEQUENCE, 3))
    (folder / "bfd.a3m").write_text(a3m(SEQUENCE, 4))
    assert "7 alignment rows" in cli.infer(cli.fasta({"T1": SEQUENCE}), "--msa-dir", folder.parent).err


@pytest.mark.parametrize("layout", ["pair_{}.a3m", "pair_{}/uniref90_hits.a3m", "pair/{}/uniref90_hits.a3m"])
def test_alignments_of_the_chains_of_a_complex(cli: CommandLine, layout: str):
    for chain, sequence, rows in (("A", SEQUENCE, 4), ("B", OTHER, 3)):
        path = cli.folder / "msas" / layout.format(chain)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(a3m(sequence, rows))
    done = infer_pair(cli, cli.folder / "msas")
    assert done.code == 0
    assert "7 alignment rows" in done.err
    assert cli.config("pair")["alignment_rows"] == [[4, 0], [3, 0]]


def test_a_colabfold_alignment_of_a_complex_is_split_into_its_chains(cli: CommandLine):
    text = (
        f"#10,9\t1,1\n>101\t102\n{SEQUENCE}{OTHER}\n>both\n{SEQUENCE[::-1]}{OTHER[::-1]}\n>only_a\n{SEQUENCE}"
    )
    (cli.folder / "pair.a3m").write_text(text + "-" * 9 + "\n")
    done = infer_pair(cli, cli.folder)
    assert done.code == 0
    assert cli.config("pair")["alignment_rows"] == [[1, 2], [0, 2]]


def test_a_target_without_alignment_among_others_is_named(cli: CommandLine):
    msas = cli.folder / "msas"
    msas.mkdir()
    (msas / "T1.a3m").write_text(a3m(SEQUENCE))
    done = cli.infer(cli.fasta({"T1": SEQUENCE, "T2": OTHER}), "--msa-dir", msas)
    assert done.code == 0
    assert f"warning: T2: no alignment of 'T2' in {msas}; only its sequence is used" in done.err
    assert "warning: T1: no alignment" not in done.err


def test_a_chain_without_alignment_is_named(cli: CommandLine):
    (cli.folder / "pair_A.a3m").write_text(a3m(SEQUENCE))
    done = infer_pair(cli, cli.folder)
    assert done.code == 0
    assert "warning: pair: no alignment of chain B" in done.err
    assert "no alignment of chain A" not in done.err


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_folder_that_is_none_is_told_at_once(cli: CommandLine, kind: str):
    fasta = cli.fasta({"T1": SEQUENCE, "T2": OTHER})
    done = cli.infer(fasta, "--msa-dir", fasta if kind == "file" else cli.folder / "missing")
    assert done.code == 1
    assert done.err.count("no such folder; give the folder of the alignments") == 1
    assert not cli.out.exists()
