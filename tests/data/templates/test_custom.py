"""Structures of the user: which chains they give, how they are aligned, and in which order they come."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.msa.msa import Msa, parse_a3m
from fastfold.data.templates.custom import (
    custom_templates,
    read_custom_alignment,
    read_custom_chains,
    structures_inside,
)
from fastfold.data.templates.select import ChainTemplates
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from tests.helpers.template_files import FAMILY, HOMOLOGUE, NAMES, QUERY, entry, position

CA = rc.atom_order["CA"]
MSA = parse_a3m("".join(f">row_{i}\n{row}\n" for i, row in enumerate(FAMILY)))


def templates(
    *paths: Path, alignment: Path | None = None, query: str = QUERY, most: int = 4
) -> ChainTemplates:
    given = [] if alignment is None else [read_custom_alignment(alignment)]
    msa = MSA if query == QUERY else Msa((query,), np.zeros((1, len(query)), np.int32), ("query",))
    chains, unusable = read_custom_chains(paths)
    return custom_templates(chains, query, msa, max_templates=most, alignments=given, unusable=unusable)


def write(path: Path, *letters: str) -> Path:
    """A structure of these chains, A, B and so on."""
    text = entry(dict(zip("ABCDE", letters, strict=False)))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_files_and_folders_packed_or_not_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    write(folder / "b.cif.gz", HOMOLOGUE)
    write(folder / "a.mmcif", QUERY, HOMOLOGUE)
    (folder / "notes.txt").write_text("nothing")
    single = write(tmp_path / "c.cif", "G" + QUERY)
    assert [one.name for one in read_custom_chains([single, folder])[0]] == ["c_A", "a_A", "a_B", "b_A"]
    with pytest.raises(InputError, match=r"has the same name as .*c\.cif; rename one"):
        read_custom_chains([single, single])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="contains no structure"):
        read_custom_chains([tmp_path / "empty"])
    with pytest.raises(InputError, match="no such file"):
        read_custom_chains([tmp_path / "none.cif"])


BAD_FILES = {
    "dna.pdb": (
        "ATOM      1  P    DA A   1      10.000  10.000  10.000  1.00  0.00           P\n",
        "DNA or RNA",
    ),
    "twice.pdb": (
        "ATOM      1  CA  ALA A   1      10.000  10.000  10.000  1.00  0.00           C\n" * 2,
        "twice",
    ),
    "cut.cif": ("data_x\nloop_\n_atom_site.id\n_atom_site.type_symbol\n1\n", "expected 2 values"),
}


def test_a_structure_in_two_formats_counts_once(tmp_path: Path) -> None:
    for name in ("b.pdb", "a.pdb.gz", "a.cif", "c.ent"):
        (tmp_path / name).write_text("")
    assert [path.name for path in structures_inside(tmp_path)] == ["a.cif", "b.pdb", "c.ent"]


def test_results_are_their_predictions_alone(tmp_path: Path) -> None:
    """Files of --save-recycles in both styles and of fastfold ensemble repeat what other files show."""
    names = [
        "p_rank_001_model_1_ptm_seed_0.cif",
        "p_rank_001_model_1_ptm_seed_0_r0.pdb",
        "p_rank_001_model_1_ptm_seed_0_relaxed.pdb",
        "q_unrelaxed_rank_002_alphafold2_ptm_model_1_seed_000.pdb",
        "q_unrelaxed_rank_002_alphafold2_ptm_model_1_seed_000.r3.pdb",
        "p_ensemble.pdb",
        "p_ensemble.json",
        "my_ensemble.pdb",
        "1abc_r1.pdb",
    ]
    for name in names:
        (tmp_path / name).touch()
    chosen = {path.name for path in structures_inside(tmp_path)}
    assert chosen == {names[0], names[2], names[3], names[7], names[8]}


def test_a_bad_file_of_a_folder_is_left_out_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DNA, an atom given twice, a cut file; and the hidden file of macOS, which is none of the user's."""
    folder = tmp_path / "some"
    folder.mkdir()
    write(folder / "good.cif", HOMOLOGUE)
    (folder / "._good.cif").write_bytes(b"\0\5\x16\7")
    for name, (text, _) in BAD_FILES.items():
        (folder / name).write_text(text)
    found = templates(folder)
    assert [template.name for template in found.templates] == ["good_A"]
    left_out = {one.name: one.message for one in found.outcomes if not one.used}
    assert left_out.keys() == {"dna", "twice", "cut"}
    for name, (_, reason) in BAD_FILES.items():
        assert reason in left_out[Path(name).stem]
        assert any(name in record.message and reason in record.message for record in caplog.records)
    assert not any("._good" in record.message for record in caplog.records)


def test_a_bad_file_that_is_named_or_has_no_better_one_beside_it_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "dna.pdb"
    path.write_text(BAD_FILES["dna.pdb"][0])
    with pytest.raises(InputError, match=r"dna\.pdb: contains no protein chain"):
        read_custom_chains([path])
    with pytest.raises(InputError, match=r"no valid structure; the first problem: .*DNA or RNA"):
        read_custom_chains([tmp_path])


def test_the_query_itself_is_a_template_if_it_is_given(tmp_path: Path) -> None:
    (template,) = templates(write(tmp_path / "self.cif", f"GSH{QUERY}")).templates
    assert (template.name, template.sequence) == ("self_A", QUERY)
    np.testing.assert_allclose(template.positions[4, CA], position(8, "CA"), atol=1e-3)


def test_pdb_files_are_templates_too(tmp_path: Path) -> None:
    """Without a sequence but that of the atoms."""
    lines = []
    for place, letter in enumerate(HOMOLOGUE, 1):
        for atom in ("N", "CA", "C", "O") if place != 7 else ():
            x, y, z = position(place, atom)
            lines.append(
                f"ATOM  {len(lines) + 1:5d}  {atom:<3s} {NAMES[letter]} A{place:4d}    {x:8.3f}{y:8.3f}{z:8.3f}  1.00 "
                f"20.00           {atom[0]}  "
            )
    path = tmp_path / "known.pdb.gz"
    path.write_bytes(gzip.compress("\n".join([*lines, "END", ""]).encode()))
    (template,) = templates(path).templates
    assert template.name == "known_A"
    assert template.sequence.replace("-", "") == HOMOLOGUE[:6] + HOMOLOGUE[7:]
    np.testing.assert_allclose(template.positions[20, CA], position(21, "CA"), atol=1e-3)


def test_the_best_chain_of_each_structure_comes_first(tmp_path: Path) -> None:
    """Copies count once; then the second chains; what there are too many of is not needed."""
    one = write(tmp_path / "one.cif", HOMOLOGUE[:30], HOMOLOGUE, HOMOLOGUE)
    two = write(tmp_path / "two.cif", FAMILY[2])
    found = templates(one, two, write(tmp_path / "odd.cif", "W" * 40), most=2)
    assert [template.name for template in found.templates] == ["one_B", "two_A"]
    reasons = {outcome.name: outcome.reason for outcome in found.outcomes}
    assert reasons == {
        "one_A": "not needed",
        "one_B": "used",
        "one_C": "repeated",
        "two_A": "used",
        "odd_A": "other sequence",
    }
    assert found.examined == 5


def test_a_peptide_that_no_profile_finds_is_aligned_if_it_is_alike(tmp_path: Path) -> None:
    peptide = "MKTAYIAK"
    (template,) = templates(write(tmp_path / "p.cif", "MKTAYIAK"), query=peptide).templates
    assert template.sequence == peptide


@pytest.mark.parametrize(
    "text",
    [
        f">query\n{QUERY}\n>own_A\n{'-' * 10}{HOMOLOGUE[:10]}{HOMOLOGUE[10:12].lower()}{HOMOLOGUE[12:30]}--\n",
        f">query\n{QUERY[:20]}--{QUERY[20:]}\n>own\n{'-' * 10}{HOMOLOGUE[:30]}--\n",
    ],
)
def test_the_alignment_of_the_user_counts(tmp_path: Path, text: str) -> None:
    """In A3M or FASTA, by chain or by file."""
    own = write(tmp_path / "own.cif", "GG" + HOMOLOGUE)
    (tmp_path / "own.a3m").write_text(text)
    found = templates(own, alignment=tmp_path / "own.a3m")
    assert found.report()["used"] == [{"name": "own_A", "aligned_residues": 28, "remark": "aligned as given"}]
    (template,) = found.templates
    assert template.sequence == "-" * 10 + HOMOLOGUE[:10] + HOMOLOGUE[12:30] + "--"
    np.testing.assert_allclose(template.positions[10, CA], position(3, "CA"), atol=1e-3)
    np.testing.assert_allclose(template.positions[20, CA], position(15, "CA"), atol=1e-3)


def test_an_alignment_of_another_chain_is_left_to_that(tmp_path: Path) -> None:
    own = write(tmp_path / "own.cif", HOMOLOGUE)
    (tmp_path / "own.a3m").write_text(f">other\n{HOMOLOGUE[::-1]}\n>own_A\n{HOMOLOGUE}\n")
    found = templates(own, alignment=tmp_path / "own.a3m")
    assert found.templates[0].sequence == HOMOLOGUE
    assert found.sources == ("given structures (no given alignment is of this chain)",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f">query\n{QUERY}\n", "expected the chain's row, then a row for each structure"),
        (f">query\n{QUERY}\n>own_A\n{HOMOLOGUE[1:]}\n", r"'own_A'\): the row has 39 columns, the chain 40"),
        (f">query\n-{QUERY}\n>own_A\n{HOMOLOGUE}\n", "must have equal lengths"),
        (f">query\n{QUERY}\n>own_A\n{'1' * 40}\n", ":3 .*neither a letter nor a gap"),
        (f">query\n{QUERY}\n>own_A\n{QUERY}\n>own_A\n{QUERY}\n", "the name is repeated"),
        (
            f">query\n{QUERY}\n>own_Z\n{HOMOLOGUE}\n",
            "no structure has a chain of this name; expected one of own_A",
        ),
        (
            f">query\n{QUERY}\n>own_A\n{'W' * 40}\n",
            "the letters of this row are not in the sequence of its structure",
        ),
        (f">query\n{QUERY}\n>own_A\n{'-' * 40}\n", "the letters of this row are not in the sequence"),
    ],
)
def test_alignments_that_do_not_fit_are_refused(tmp_path: Path, text: str, message: str) -> None:
    own = write(tmp_path / "own.cif", HOMOLOGUE)
    (tmp_path / "own.a3m").write_text(text)
    with pytest.raises(InputError, match=message):
        templates(own, alignment=tmp_path / "own.a3m")


def survive(number: int, folder: Path) -> int:
    """Reads mutated alignments; how many were refused."""
    rng, refused = np.random.default_rng(0), 0
    chains, _ = read_custom_chains([write(folder / "own.cif", HOMOLOGUE)])
    text = f">query\n{QUERY[:20]}--{QUERY[20:]}\n>own\n{'-' * 10}{HOMOLOGUE[:30]}--\n".encode()
    path = folder / "mutated.a3m"
    for _ in range(number):
        data = bytearray(text)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(len(data)))
            kind = rng.integers(3)
            if kind == 0:
                data[at] = rng.choice([0, 10, 32, 45, 62, 88, 97, 200])
            elif kind == 1:
                del data[at : at + int(rng.integers(1, 10))]
            else:
                data[at:at] = data[at : at + int(rng.integers(1, 10))]
        path.write_bytes(data)
        try:
            given = [read_custom_alignment(path)]
            query = given[0].query
            alone = Msa((query,), np.zeros((1, len(query)), np.int32), ("query",))
            custom_templates(chains, query, alone, max_templates=4, alignments=given)
        except InputError:
            refused += 1
    return refused


def test_mutated_alignments_give_templates_or_one_clear_error(tmp_path: Path) -> None:
    assert 20 < survive(200, tmp_path) < 200


@pytest.mark.slow
def test_ten_thousand_mutated_alignments_give_templates_or_one_clear_error(tmp_path: Path) -> None:
    assert 1000 < survive(10_000, tmp_path) < 10_000
