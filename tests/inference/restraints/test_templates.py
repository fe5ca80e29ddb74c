"""Forced templates: their restraints, deviations by hand, and folds that keep to them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import fastfold
from fastfold.data.targets import Target, target_from_sequence
from fastfold.data.templates.features import ForcedTemplate
from fastfold.errors import InputError
from fastfold.inference.config import InferConfig
from fastfold.inference.embedding.config import EmbedConfig
from fastfold.inference.folding.predictor import TargetPredictor
from fastfold.inference.restraints.templates import forced_template_report, template_restraints
from tests.helpers.command_line import CommandLine
from tests.helpers.template_files import HOMOLOGUE, QUERY, entry

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEV"


def forced(
    sequence: str, positions: np.ndarray, threshold: float = 1.0, absent: tuple[int, ...] = ()
) -> Target:
    """Return a target whose only chain keeps to CA atoms ``[N, 3]``, of which some are absent."""
    mask = ~np.isin(np.arange(len(sequence)), absent)
    one = ForcedTemplate("known_A", threshold, positions.astype(np.float32), mask)
    return replace(target_from_sequence(sequence), forced_templates=((one,),))


def test_pairs_of_a_template_are_powers_of_two_apart() -> None:
    """Residues of unknown type and without an atom have none, and no lower limit is negative."""
    line = np.arange(7.0)[:, None] * [3.0, 0.0, 0.0]
    target = forced("MKXAYIA", line, threshold=4.0, absent=(4,))  # residues 0, 1, 3, 5 and 6 remain
    found = {(one.first, one.second): (one.low, one.high) for one in template_restraints(target)}
    neighbors = {(0, 1): (0, 7), (1, 3): (2, 10), (3, 5): (2, 10), (5, 6): (0, 7)}
    assert found == neighbors | {(0, 3): (5, 13), (1, 5): (8, 16), (3, 6): (5, 13)} | {(0, 6): (14, 22)}
    both = replace(target, chains=target.chains * 2, forced_templates=((), *target.forced_templates))
    assert min(one.first for one in template_restraints(both)) == 7


def test_deviations_are_those_of_the_superposed_prediction() -> None:
    """A square of which one corner is moved out of the plane by 2 Å: all deviate by half an Å at first order."""
    square = np.array([[0.0, 0, 0], [20, 0, 0], [20, 20, 0], [0, 20, 0]])
    moved = square.copy()
    moved[0, 2] = 2.0
    turn = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
    positions = np.zeros((4, 37, 3))
    positions[:, 1] = moved @ turn.T + 7.0
    (found,) = forced_template_report(forced("MKVA", square, threshold=0.45), positions)
    assert found == {
        "chain": "A",
        "name": "known_A",
        "threshold": 0.45,
        "residues": 4,
        "within": 0,
        "rmsd": pytest.approx(0.5, abs=0.01),
        "largest_deviation": pytest.approx(0.5, abs=0.05),
    }
    assert forced_template_report(forced("MKVA", square, threshold=0.6), positions)[0]["within"] == 4


def predictor(target: Target, config: InferConfig, model: fastfold.AlphaFold) -> TargetPredictor:
    return TargetPredictor(
        target, [model], [([], [])], config, device=torch.device("cpu"), say=lambda line: None
    )


@pytest.mark.parametrize("change", [{"embed": EmbedConfig()}, {"precision": "int8"}])
def test_runs_that_cannot_keep_to_a_template_are_refused(change: dict[str, object]) -> None:
    target = forced("MKTAYIAK", np.arange(24.0).reshape(8, 3))
    with pytest.raises(InputError, match=r"its input forces a template, which .* cannot; remove 'force'"):
        predictor(target, InferConfig(**change), fastfold.load_model("mini"))  # type: ignore[arg-type]


@pytest.mark.long
def test_a_fold_keeps_to_the_shape_of_another_protein() -> None:
    """By the descent of ``mini``: the backbone of a chain of other residues, in which its own fold is far from it."""
    model, other = fastfold.load_model("mini"), "MTPAVTTYKLVINGKTLKGETTTKAVDAETAE"
    shape = fastfold.predict(other, model).atom_positions[:, 1]
    target = forced(SEQUENCE, shape, threshold=1.5, absent=(0, 1))
    free = fastfold.predict(SEQUENCE, model)
    (before,) = forced_template_report(target, free.atom_positions)
    assert before["rmsd"] > 5.0
    fold = predictor(target, InferConfig(), model).predict(model, 0)
    ((found,),) = (fold.forced_templates,)
    assert (found["within"], found["residues"]) == (30, 30)
    assert found["largest_deviation"] < 1.5
    assert fold.scores()["forced_templates"] == [found]
    assert fold.restraints is None
    again = predictor(replace(target, forced_templates=()), InferConfig(), model).predict(model, 0)
    np.testing.assert_array_equal(again.atom_positions, free.atom_positions)


@pytest.mark.slow
def test_a_fit_comes_nearer_to_a_template() -> None:
    """A network that ends in the structure module, as AlphaFold's do."""
    model = fastfold.load_model("mini")
    shape = fastfold.predict("MTPAVTTYKLVINGKTLKGETTTKAVDAETAE", model).atom_positions[:, 1]
    model.config.model.heads.structure_module.distogram_descent = None
    target = forced(SEQUENCE, shape, threshold=1.5)
    fold = predictor(target, InferConfig(restraint_steps=20), model).predict(model, 0)
    (before,) = forced_template_report(target, fastfold.predict(SEQUENCE, model).atom_positions)
    assert fold.forced_templates[0]["rmsd"] < 0.7 * before["rmsd"]
    assert fold.restraints is None


@pytest.mark.long
def test_the_command_tells_how_near_the_fold_is(cli: CommandLine) -> None:
    """By two networks with and without templates; another threshold is another prediction."""
    (cli.folder / "1abc.cif").write_text(entry({"A": HOMOLOGUE}))
    query = cli.folder / "q.yaml"
    text = "sequences:\n- protein: {{id: A, sequence: {}}}\n"
    text += "templates:\n- {{cif: 1abc.cif, force: true, threshold: {}}}\n"
    hashes = []
    for threshold in (2, 2, 3):
        query.write_text(text.format(QUERY, threshold))
        out = cli.folder / f"out_{threshold}"
        done = cli.run("infer", query, "--out", out, "--no-plots", "--num-recycles", "0")
        assert done.code == 0, done.err
        (path,) = out.glob("*_scores.json")
        (found,) = json.loads(path.read_text())["forced_templates"]
        assert (found["name"], found["threshold"]) == ("1abc_A", threshold)
        hashes.append(json.loads(next(out.glob("*_config.json")).read_text())["input_hash"])
        if "finished before" not in done.err:
            line = f"{found['within']} of 40 residues within {threshold} Å of 1abc_A, chain A"
            assert line in " ".join(done.err.split())
    assert hashes[0] == hashes[1] != hashes[2]
    done = cli.run("mutate", query, "--mutations", "K2R", "--out", cli.folder / "m")
    assert "its input forces a template, which mutants would not keep to" in " ".join(done.err.split())
    weights = cli.weights("model_1_ptm")
    short = ("--weights", weights, "--restraint-steps", "1", "--max-msa", "8:8")
    done = cli.run("infer", query, "--out", cli.folder / "a", "--no-plots", "--num-recycles", "0", *short)
    assert done.code == 0, done.err
    assert "of 40 residues within 3 Å of 1abc_A, chain A" in " ".join(done.err.split())
