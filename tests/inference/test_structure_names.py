"""Gaps, names and numbers of a given structure stand in what networks see and in every output."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import gemmi
import numpy as np
import pytest
import torch

import fastfold
from fastfold.data.features.pipeline import featurize
from fastfold.data.targets import Target, name_chains, structure_chains, target_from_sequence
from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.config import model_config
from fastfold.evoformer.losses.design import Outputs
from fastfold.inference.config import InferConfig
from fastfold.inference.folding.prediction import add_settings, check_rings, initial_structure
from fastfold.inference.output.score_files import scored_names
from fastfold.inference.report.interfaces import find_rows
from fastfold.inference.restraints import read_restraints
from fastfold.inference.restraints.residues import Residues
from fastfold.inference.target_templates import TargetTemplates
from fastfold.products.design import DesignConfig, DesignRequest, run_designs
from fastfold.products.design.evaluate import Evaluator
from fastfold.products.design.tasks.binders import binder
from fastfold.products.design.tasks.given import residue_places, residue_text
from fastfold.products.design.tasks.losses import task_losses
from fastfold.products.design.tasks.protocols import fixed_backbone, partial
from fastfold.products.design.tasks.task import DesignTask
from fastfold.products.score.run import structure_targets
from fastfold.protein.io.observed import SCORE, read_observed
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.protein.labels import AuthorNames
from tests.helpers.command_line import CommandLine, small_model
from tests.helpers.peptides import helix

NUMBERS_D = [*map(str, range(310, 316)), *map(str, range(330, 336))]
NUMBERS_E = ["19", "20", "20A", "20B", "21", "22", "23", "24"]
INDEX_D = [*range(310, 316), *range(330, 336)]
INDEX_E = list(range(19, 27))


@pytest.fixture
def complex_de(tmp_path: Path) -> Path:
    """Helices D, without residues 316-329, and E, with insertion codes; without SEQRES."""
    protein = helix("MTYKLILNGKTLKGETTTEAVDAATA", "EKVFKQYA")
    numbers = (*(str(310 + k) for k in range(26)), *NUMBERS_E)
    text = to_pdb(protein, names=AuthorNames(("D", "E"), numbers))
    kept = {("D", number) for number in NUMBERS_D} | {("E", number) for number in NUMBERS_E}
    lines = [line for line in text.splitlines() if line.startswith("ATOM")]
    path = tmp_path / "de.pdb"
    path.write_text("".join(f"{line}\n" for line in lines if (line[21], line[22:27].strip()) in kept))
    return path


@pytest.fixture
def chain_d(complex_de: Path) -> Path:
    """Chain D alone."""
    path = complex_de.with_name("d.pdb")
    lines = complex_de.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if line[21] == "D"))
    return path


def written(path: Path) -> dict[str, list[str]]:
    """Chains and numbers of a file, as gemmi reads them."""
    return {
        chain.name: [f"{residue.seqid.num}{residue.seqid.icode.strip()}" for residue in chain]
        for chain in gemmi.read_structure(str(path))[0]
    }


def seen(target: Target, name: str) -> list[int]:
    """The residue index that a network sees."""
    sampler = featurize(target.chains, [([], [])] * len(target.chains), model_config(name), join=True)
    add_settings(sampler, target, cyclic=False, guess=None)
    found: list[int] = sampler.static["residue_index"].tolist()
    return found


def test_networks_see_the_gap_in_every_protocol(complex_de: Path, chain_d: Path) -> None:
    for task in (
        fixed_backbone(chain_d),
        partial(chain_d, "D311-313"),
        fixed_backbone(complex_de, chain="D"),
    ):
        assert seen(task.target, "model_1_ptm") == INDEX_D
        assert task.residue_index.tolist() == INDEX_D
    task = binder(complex_de, 5, others=[], hotspots="D330")
    assert seen(task.target, "model_1_multimer_v3") == [*INDEX_D, *INDEX_E, *range(5)]
    (scored,), errors = structure_targets([chain_d])
    assert not errors
    assert seen(scored, "model_1_ptm") == INDEX_D
    (both,), _ = structure_targets([complex_de], "initial_guess")
    assert seen(both, "model_1_multimer_v3") == [*INDEX_D, *INDEX_E]
    joined = seen(both, "model_1_ptm")
    assert joined[:12] == [index - 310 for index in INDEX_D]
    assert joined[12] - joined[11] == 201


@pytest.mark.parametrize("seqres", [False, True])
def test_copies_that_lack_other_residues_are_one_entity(tmp_path: Path, seqres: bool) -> None:
    """Ids of the residues equal those of the same residues in the complex without gaps."""
    one, other = "MTYKLILNGKTLKG", "EKVFKQYA"
    whole = target_from_sequence(f"{one}:{other}:{one}:{one}")
    missing = {("A", 5), ("A", 6), ("C", 9), ("C", 14)}
    text = to_pdb(helix(one, other, one, one), names=whole.names)
    lines = [
        line
        for line in text.splitlines(keepends=True)
        if (line.startswith("ATOM") and (line[21], int(line[22:26])) not in missing)
        or (seqres and line.startswith("SEQRES"))
    ]
    path = tmp_path / "abaa.pdb"
    path.write_text("".join(lines))
    (target,), _ = structure_targets([path])
    kept = [
        (chain.id, number) not in missing
        for chain in (whole.chains[0], whole.chains[2], whole.chains[3], whole.chains[1])
        for number in chain.numbers
    ]
    config = model_config("model_1_multimer_v3")
    gapped, expected = (featurize(one.chains, [([], [])] * 4, config, seed=0) for one in (target, whole))
    for name in ("asym_id", "entity_id", "sym_id", "aatype"):
        assert gapped.static[name].tolist() == expected.static[name][kept].tolist()
    assert gapped.chain_order == expected.chain_order == (0, 2, 3, 1)
    residues = Residues(target)
    assert [residues.label(place) for place in residues.copies(residues.place("A", "9"))] == ["A:G9", "D:G9"]
    assert [residues.label(place) for place in residues.copies(residues.place("C", "8"))] == [
        "C:N8",
        "A:N8",
        "D:N8",
    ]


def test_halves_of_a_chain_are_copies_of_a_whole_one(tmp_path: Path) -> None:
    sequence = "MTYKLILNGKTLKGEKVF"
    text = to_pdb(helix(sequence, sequence, sequence))
    lines = [line for line in text.splitlines(keepends=True) if line.startswith("ATOM")]
    half = {"A": range(1, 19), "B": range(1, 10), "C": range(10, 19)}
    path = tmp_path / "halves.pdb"
    path.write_text("".join(line for line in lines if int(line[22:26]) in half[line[21]]))
    (target,), _ = structure_targets([path])
    assert [chain.entity for chain in target.chains] == [sequence] * 3


def test_chains_with_a_mutation_are_entities_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "ab.pdb"
    path.write_text(to_pdb(helix("MTYKLILNGKTLKG", "MTYKLALNGKTLKGE")))
    (target,), _ = structure_targets([path])
    sampler = featurize(target.chains, [([], [])] * 2, model_config("model_1_multimer_v3"))
    assert sampler.static["entity_id"].tolist() == [1] * 14 + [2] * 15


def test_separations_of_losses_are_those_of_the_index(chain_d: Path, complex_de: Path) -> None:
    offset = fixed_backbone(chain_d).offset
    assert (int(offset[5, 0]), int(offset[6, 5])) == (5, 15)
    ring = binder(complex_de, 8, cyclic=True)
    assert ring.rings == "A"
    assert int(ring.offset[20, 27]) == 1
    assert int(ring.offset[6, 5]) == 15


def test_a_helix_does_not_cross_a_gap(chain_d: Path) -> None:
    """The loss counts residues i and i + 3 of the index: six pairs of the twelve residues, not nine."""
    logits = torch.zeros(12, 12, 64, requires_grad=True)
    edges, nothing = torch.linspace(2.3125, 21.6875, 63), torch.zeros(12, 37, 3)
    outputs = Outputs(
        distogram=logits,
        lower_edges=torch.cat([edges.new_zeros(1), edges]),
        lddt=torch.zeros(12, 50),
        resolved=torch.zeros(12, 37),
        positions=nothing,
        atom14=nothing[:, :14],
    )
    losses = task_losses(fixed_backbone(chain_d), torch.device("cpu"), torch.float32)
    losses["helix"](outputs, torch.zeros(12).long()).backward()
    assert logits.grad is not None
    pairs = (logits.grad.abs().sum(-1) > 0).nonzero().tolist()
    assert {tuple(sorted(pair)) for pair in pairs} == {(i, i + 3) for i in (0, 1, 2, 6, 7, 8)}


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("model_1_ptm", lambda folder: fixed_backbone(folder / "d.pdb")),
        ("model_1_multimer_v3", lambda folder: binder(folder / "de.pdb", 5)),
    ],
)
def test_the_network_of_a_design_sees_the_gap(
    chain_d: Path, name: str, make: Callable[[Path], DesignTask]
) -> None:
    task = make(chain_d.parent)
    ((features, order),) = Evaluator(task, [small_model(name)], {"plddt": 1.0})._features
    index = features["residue_index"]
    assert (index if order is None else index[order]).tolist() == task.residue_index.tolist()
    assert index.tolist()[:12] == INDEX_D


@pytest.mark.long
def test_a_design_has_the_names_of_its_target_everywhere(
    complex_de: Path, cli: CommandLine, tmp_path: Path
) -> None:
    weights = cli.weights("model_1_multimer_v3")
    task = binder(complex_de, 5, hotspots="D330-332,E20A")
    steps = DesignConfig(soft_steps=1, temperature_steps=0, hard_steps=0)
    fold = InferConfig(num_recycles=0, plots=False)
    request = DesignRequest(task, cli.out, [weights], steps, infer=fold)
    (design,) = run_designs(request, say=lambda line: None)
    names = {"D": NUMBERS_D, "E": NUMBERS_E, "A": ["1", "2", "3", "4", "5"]}
    trajectories = cli.out / "trajectories"
    files = [next(cli.out.glob(f"{design.name}_rank_001_*{ending}")) for ending in (".pdb", ".cif")]
    for path in (*files, trajectories / f"{design.name}.pdb", trajectories / f"{design.name}_design.pdb"):
        assert written(path) == names, path.name
    (alone,) = cli.out.glob(f"{design.name}_alone_rank_001_*.pdb")
    assert written(alone) == {"A": names["A"]}
    (row,) = csv.DictReader((cli.out / "designs.tsv").read_text().splitlines(), delimiter="\t")
    steps_written = [
        json.loads(line) for line in (trajectories / f"{design.name}.jsonl").read_text().splitlines()
    ]
    for columns in (row, *steps_written):
        assert columns["chains"] == "D310-315,D330-335,E19-24,A1-5"
        assert columns["hotspots"] == "D330-332,E20A"
    scores = cli.scores(design.name)
    assert scores["chain_ids"] == ["D", "E", "A"]
    assert scores["residue_labels"] == list(names.values())
    assert list(scores["interfaces"]["pairs"]) == ["D-E", "D-A", "E-A"]
    assert {(one["chain_1"], one["chain_2"]) for one in find_rows(cli.out)} == {
        ("D", "E"),
        ("D", "A"),
        ("E", "A"),
    }


def test_a_score_has_the_names_of_its_structure(chain_d: Path, cli: CommandLine) -> None:
    arguments = ("score", chain_d, "--out", cli.out, "--initial-guess", "--num-recycles", "0", "--no-plots")
    done = cli.run(*arguments)
    assert done.code == 0, done.err
    for ending in (".pdb", ".cif"):
        (path,) = cli.out.glob(f"d_rank_001_*{ending}")
        assert written(path) == {"D": NUMBERS_D}
    scores = cli.scores("d")
    assert (scores["chain_ids"], scores["residue_ranges"]) == (["D"], [[[310, 315], [330, 335]]])
    assert "residue_labels" not in scores
    assert cli.config("d")["chains"] == {"D": scores["sequences"][0]}
    loaded = fastfold.Prediction.load(cli.out, "d")
    assert loaded.names == scored_names(scores)
    assert (
        loaded.to_pdb().splitlines()[3:]
        == next(cli.out.glob("d_rank_001_*.pdb")).read_text().splitlines()[3:]
    )
    (again,), _ = structure_targets([next(cli.out.glob("d_rank_001_*.pdb"))])
    assert np.diff(again.chains[0].residue_index).tolist() == np.diff(INDEX_D).tolist()


def test_restraints_of_a_score_have_the_names_of_its_structure(chain_d: Path, tmp_path: Path) -> None:
    (target,), errors = structure_targets([chain_d])
    assert not errors
    labels = target.chains[0].residue_labels
    table = tmp_path / "links.csv"
    table.write_text(f"chain1,residue1,chain2,residue2,max\nD,{labels[2]},D,{labels[-1]},40\n")
    (restraint,) = read_restraints(table, target)
    assert (restraint.first, restraint.second) == (2, len(labels) - 1)
    table.write_text("chain1,residue1,chain2,residue2,max\nA,3,A,9,40\n")
    with pytest.raises(InputError, match="unknown chain 'A'; the target has D"):
        read_restraints(table, target)


def test_residues_without_coordinates_are_parts_left_out_of_the_chain(tmp_path: Path) -> None:
    """Alignments and templates are those of the whole chain, cut to the residues with coordinates."""
    whole = "MTYKLILNGKTL"
    names = AuthorNames(("D",), tuple(str(31 + k) for k in range(12)))
    lines = to_pdb(helix(whole), names=names).splitlines()
    path = tmp_path / "x.pdb"
    kept = [line for line in lines if line[:4] != "ATOM" or int(line[22:26]) not in (31, 35, 36)]
    path.write_text("".join(f"{line}\n" for line in kept))
    (target,), errors = structure_targets([path], searches=True)
    assert not errors
    (chain,) = target.chains
    assert (chain.sequence, target.uncut.chains[0].sequence) == ("TYKLNGKTL", whole)
    assert seen(target, "model_1_ptm") == [1, 2, 3, 6, 7, 8, 9, 10, 11]
    assert target.names.numbers == ("32", "33", "34", "37", "38", "39", "40", "41", "42")
    assert target.scored_structure is not None
    shown = TargetTemplates(target.scored_structure.templates() or ()).cut(target).features[0]
    assert shown is not None
    assert np.asarray(shown["template_all_atom_masks"])[0, :, 1].tolist() == [1.0] * 9
    guess, guessed = initial_structure(path, target_from_sequence(whole))
    assert guess[:, 1].any(1).tolist() == [i not in (0, 4, 5) for i in range(12)]
    assert guessed.names == names
    guess, guessed = initial_structure(path, target_from_sequence("TYKLNGKTL"))
    assert guess.shape == (9, 37, 3)
    assert guessed.chains[0].residue_index.tolist() == [1, 2, 3, 6, 7, 8, 9, 10, 11]


def test_an_initial_guess_gives_its_numbering(chain_d: Path) -> None:
    (sequence,) = (chain.sequence for chain in read_observed(chain_d, SCORE).chains)
    plain = fastfold.predict(sequence, "mini", num_recycles=0)
    guessed = fastfold.predict(sequence, "mini", num_recycles=0, initial_guess=chain_d)
    assert guessed.residue_index.tolist() == guessed.protein.residue_index.tolist() == INDEX_D
    assert guessed.author_names == AuthorNames(("D",), tuple(NUMBERS_D))
    assert plain.author_names == AuthorNames(("A",), tuple(map(str, range(1, 13))))


def test_rings_lack_no_residue(chain_d: Path, complex_de: Path) -> None:
    (target,), _ = structure_targets([complex_de])
    check_rings(target, "E", is_joined=False)
    with pytest.raises(ConfigError, match="cyclic= closes whole chains, and chain D lacks residues"):
        check_rings(target, True, is_joined=False)


def test_a_motif_needs_the_backbone_of_its_residues(chain_d: Path) -> None:
    lines = chain_d.read_text().splitlines(keepends=True)
    kept = [line for line in lines if int(line[22:26]) > 312 or line[12:16] == " CA "]
    chain_d.write_text("".join(kept))
    assert partial(chain_d, "D313-315").source.tolist().count(-1) == 3
    with pytest.raises(InputError, match="cannot hold a motif: 2 of 4 residues have CA alone"):
        partial(chain_d, "D311-314")


def test_texts_of_residues_are_read_back(complex_de: Path) -> None:
    structure = read_observed(complex_de, SCORE)
    target = Target("t", structure_chains(structure), "", "t", ())
    for text in ("D310-315,D330-335,E19-24", "D330", "E20A,E20B-22", "D312,D315,D330"):
        places = residue_places(text, structure.chains, complex_de)
        assert residue_places(
            residue_text(target, places.tolist()), structure.chains, complex_de
        ).tolist() == (places.tolist())
    assert residue_text(target, [5, 6, 14]) == "D315,D330,E20A"


def test_chains_without_a_usable_name_get_a_free_letter() -> None:
    assert name_chains(["D", "", "A", "../x", "B-2"]) == ["D", "B", "A", "C", "B-2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chain_ids": ["A", "B"]}, "chain_ids are not given for each chain"),
        ({"chain_ids": [3]}, "chain_ids are not given for each chain"),
        ({"residue_labels": [["1"]]}, "residue_labels are not given for each residue"),
        ({"residue_labels": [["1", "x"]]}, "residue_labels: expected a number, found 'x'"),
    ],
)
def test_damaged_names_of_a_scores_file_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scored_names({"sequences": ["MK"], "chain_ids": ["D"], "residue_labels": [["1", "1A"]], **changes})
