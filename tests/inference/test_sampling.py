"""Settings that make other predictions of the same target, from the command line and from Python."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import openmm
import pytest
import torch

import fastfold
from fastfold.data.targets import target_from_sequence
from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.embedders.relative_position import ring_offset
from fastfold.inference.config import InferConfig
from fastfold.inference.folding import background
from fastfold.inference.folding.prediction import initial_structure
from fastfold.inference.output.summary import aligned_table, read_table
from fastfold.inference.output.writer import ranking_scores
from fastfold.inference.relax.config import PLATFORMS
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from tests.helpers.command_line import CommandLine, small_model
from tests.helpers.structure_texts import atom_line, chain_lines

SEQUENCE = "MKTAYIAKQR"
OTHER = "GSHMAWLPE"


@pytest.fixture(scope="module")
def model() -> fastfold.AlphaFold:
    return small_model()


@pytest.fixture(scope="module")
def multimer() -> fastfold.AlphaFold:
    return small_model("model_1_multimer_v3")


@pytest.fixture(scope="module")
def plain(model: fastfold.AlphaFold) -> np.ndarray:
    """Positions without any setting."""
    return positions(model)


def positions(model: fastfold.AlphaFold, sequence: str = SEQUENCE, **settings: object) -> np.ndarray:
    return fastfold.predict(sequence, model, **({"num_recycles": 0} | settings)).atom_positions  # type: ignore[arg-type]


def test_seeds_and_networks_make_a_prediction_each(cli: CommandLine):
    weights = [cli.weights("model_1_ptm"), cli.weights("model_2_ptm", noise=0.3)]
    done = cli.infer(cli.fasta({"T1": SEQUENCE}), "--seed", "3", "--num-seeds", "2", weights=weights)
    assert done.code == 0
    lines = read_table(cli.out / "summary.tsv")
    assert {(line["model"], line["seed"]) for line in lines} == {
        (model, seed) for model in ("model_1_ptm", "model_2_ptm") for seed in ("3", "4")
    }
    assert [line["rank"] for line in lines] == ["1", "2", "3", "4"]
    plddt = [cli.scores("T1", rank)["mean_plddt"] for rank in range(1, 5)]
    assert plddt == sorted(plddt, reverse=True)
    table = aligned_table(lines, ("target", "rank", "iptm")).splitlines()
    assert [row.split() for row in table] == [
        ["target", "rank", "iptm"],
        *(["T1", str(i), "-"] for i in range(1, 5)),
    ]


def test_a_list_of_seeds_and_a_first_seed_contradict(cli: CommandLine):
    done = cli.infer(cli.fasta({"T1": SEQUENCE}), "--seed", "3", "--seeds", "0-1")
    assert done.code == 2
    assert "--seeds names all seeds" in done.err


def test_a_good_prediction_ends_a_target(cli: CommandLine):
    fasta = cli.fasta({"T1": SEQUENCE})
    assert cli.infer(fasta, "--seeds", "0-4", "--stop-at-score", "1").code == 0
    assert len(read_table(cli.out / "summary.tsv")) == 1
    assert cli.infer(fasta, "--seeds", "0-2", "--stop-at-score", "100").code == 0
    assert len(read_table(cli.out / "summary.tsv")) == 3


def test_ranking_is_by_what_is_asked_for():
    scores = [{"plddt": 50.0, "ptm": 0.9, "iptm": 0.1}, {"plddt": 60.0, "ptm": 0.2, "iptm": 0.8}]
    assert ranking_scores("plddt", scores) == [50.0, 60.0]
    assert ranking_scores("ptm", scores) == [0.9, 0.2]
    assert ranking_scores("iptm", scores) == [0.1, 0.8]
    assert ranking_scores("multimer", scores) == ranking_scores("auto", scores) == pytest.approx([0.26, 0.68])
    mixed = [*scores, {"plddt": 55.0, "ptm": None, "iptm": None}]
    assert ranking_scores("auto", mixed) == [50.0, 60.0, 55.0]
    assert ranking_scores("iptm", mixed)[2] == -np.inf


@pytest.mark.parametrize("by", ["auto", "plddt", "ptm", "iptm", "multimer"])
def test_chains_in_each_other_rank_last_whatever_is_asked_for(by: str):
    free = {"plddt": 5.0, "ptm": 0.1, "iptm": 0.1, "has_clash": False}
    clashing = {"plddt": 99.0, "ptm": 0.9, "iptm": 0.9, "has_clash": True}
    first, second = ranking_scores(by, [free, clashing])
    assert first > second
    assert ranking_scores(by, [clashing])[0] == pytest.approx(
        ranking_scores(by, [clashing | {"has_clash": None}])[0] - 100
    )


def test_one_bad_weights_file_can_be_left_out(cli: CommandLine):
    bad = cli.folder / "params_model_2_ptm.npz"
    bad.write_bytes(b"")
    broken = cli.official_weights("model_3_ptm")
    with np.load(broken) as archive:
        arrays = {key: archive[key].copy() for key in archive.files}
    next(value for value in arrays.values() if value.ndim)[...] = np.nan
    np.savez(broken, **arrays)
    weights, fasta = [cli.weights(), bad, broken], cli.fasta({"T1": SEQUENCE})
    done = cli.infer(fasta, "--skip-bad-weights", weights=weights)
    assert done.code == 0
    assert done.err.count("warning: left out: ") == 2
    assert "holds NaN or infinite values" in done.err
    assert [line["model"] for line in read_table(cli.out / "summary.tsv")] == ["model_1_ptm"]
    cli.out = cli.folder / "strict"
    done = cli.infer(fasta, weights=[cli.weights(), broken])
    assert (done.code, "holds NaN or infinite values" in done.err) == (1, True)
    assert cli.names() == []


def test_quiet_says_what_matters_alone(cli: CommandLine):
    done = cli.infer(cli.fasta({"T1": SEQUENCE, "T2": "GSHMAWLPEB"}), "--quiet")
    lines = done.err.splitlines()
    # Random networks write no proteins, which matters too.
    assert {line.partition(":")[0] for line in lines} == {"warning"}
    not_proteins = [line for line in lines if "is not physical" in line]
    assert [line.split(":")[1].strip() for line in not_proteins] == ["T1", "T2"]
    assert [line for line in lines if line not in not_proteins] == [
        "warning: T2: B at 10 read as X (unknown residue)"
    ]


def test_short_targets_first(cli: CommandLine):
    done = cli.infer(cli.fasta({"long": SEQUENCE, "short": "GSHM"}), "--sort", "length")
    assert done.err.index("1/2 short") < done.err.index("2/2 long")


def test_what_the_network_has_in_between_is_written_when_asked_for(cli: CommandLine):
    fasta = cli.fasta({"T1": SEQUENCE})
    assert cli.infer(fasta, settings=["--num-recycles", "2", "--no-plots"]).code == 0
    before = cli.contents()
    done = cli.infer(
        fasta,
        "--save-representations",
        "--save-recycles",
        settings=["--num-recycles", "2", "--no-plots"],
    )
    assert done.code == 0
    assert before.items() <= cli.contents().items()
    (path,) = cli.out.glob("*_representations.npz")
    with np.load(path) as arrays:
        shapes = {key: arrays[key].shape for key in arrays.files}
    assert {key: shape[:-1] for key, shape in shapes.items()} == {
        "single": (10,),
        "pair": (10, 10),
        "structure_module": (10,),
    }
    passes = sorted(cli.out.glob("*_r?.pdb"))
    assert [path.stem[-2:] for path in passes] == ["r0", "r1", "r2"]
    (final,) = (path for path in cli.out.glob("*_seed_0.pdb"))
    atoms = [read_structure(path).chains[0].positions for path in (*passes, final)]
    assert np.array_equal(atoms[2], atoms[3])
    assert not np.array_equal(atoms[0], atoms[1])


@pytest.mark.long
def test_relaxation_adds_to_a_finished_prediction(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    """The structures of these random networks may not relax: that is reported, and nothing else is touched."""
    monkeypatch.setattr(background, "available_cores", lambda: 1)  # one process relaxes both
    fasta = cli.fasta({"T1": SEQUENCE, "one": "M"})
    assert cli.infer(fasta).code == 0
    before = {name: data for name, data in cli.contents().items() if not name.endswith("_scores.json")}
    done = cli.infer(fasta, "--relax", "best", "--relax-platform", "CPU")
    assert done.code == 0
    assert "recycle" not in done.err
    assert before.items() <= cli.contents().items()
    for target in ("T1", "one"):
        found = cli.scores(target)["relaxation"]
        assert found["relaxed"] or "not relaxed: " + found["reason"] in done.err
    assert "one" in done.err
    assert cli.infer(fasta, "--relax", "best").out.startswith("0 folded, 2 finished before")


def test_a_platform_that_does_not_work_ends_the_run_before_the_first_fold(cli: CommandLine):
    here = {openmm.Platform.getPlatform(i).getName() for i in range(openmm.Platform.getNumPlatforms())}
    absent = [name for name in PLATFORMS if name not in here]
    if not absent:
        pytest.skip("every platform of OpenMM is installed here")
    done = cli.infer(cli.fasta({"T1": SEQUENCE}), "--relax", "--relax-platform", absent[0])
    assert done.code == 2
    assert f"the relaxation platform {absent[0]} cannot be used here" in done.err
    assert not cli.out.exists()


class TestSettingsOfTheNetwork:
    def test_dropout_follows_the_seed(self, model: fastfold.AlphaFold, plain: np.ndarray):
        torch.manual_seed(0)
        state = torch.get_rng_state()
        first, again, other = (positions(model, seed=seed, dropout=True) for seed in (0, 0, 1))
        assert np.array_equal(first, again)
        assert not np.array_equal(first, plain)
        assert not np.array_equal(first, other)
        assert not model.training
        assert torch.equal(torch.get_rng_state(), state)

    def test_an_ensemble_and_fewer_rows_change_the_numbers(self, model: fastfold.AlphaFold):
        rows = [
            "MKTAYIAKQR",
            "MKTAYLAKQR",
            "MRTAYIAKQK",
            "MKTWYIAKQR",
            "MKTAYIGKQR",
            "MKSAYIAKQR",
            "AKTAYIAKQR",
        ]
        plain = positions(model, msa=rows)
        assert not np.array_equal(plain, positions(model, msa=rows, num_ensemble=2))
        assert not np.array_equal(plain, positions(model, msa=rows, max_msa=(5, 1)))

    def test_a_tolerance_ends_recycling(self, model: fastfold.AlphaFold):
        early = fastfold.predict(SEQUENCE, model, num_recycles=5, recycle_tolerance=1000.0)
        late = fastfold.predict(SEQUENCE, model, num_recycles=5, recycle_tolerance=0.0)
        assert (early.num_recycles, late.num_recycles) == (1, 5)
        assert np.array_equal(early.atom_positions, positions(model, num_recycles=1))

    def test_an_initial_guess_is_as_if_it_were_recycled(
        self, model: fastfold.AlphaFold, multimer: fastfold.AlphaFold, plain: np.ndarray, tmp_path: Path
    ):
        first = fastfold.predict(SEQUENCE, model, num_recycles=0)
        path = first.save(tmp_path, plots=False)["pdb"]
        assert not np.array_equal(plain, positions(model, initial_guess=path))
        assert np.array_equal(plain, positions(model, num_recycles=0))
        with pytest.raises(InputError, match="expected the target's chains in the initial guess"):
            positions(model, OTHER, initial_guess=path)
        # A complex whose copies stand apart, which the features group: each chain has its own atoms.
        aba = f"{SEQUENCE}:{OTHER}:{SEQUENCE}"
        whole = fastfold.predict(aba, multimer, num_recycles=0)
        guess = whole.save(tmp_path, plots=False)["pdb"]
        assert not np.array_equal(whole.atom_positions, positions(multimer, aba, initial_guess=guess))

    def test_an_initial_guess_with_another_residue_is_named_as_its_file_has_it(self, tmp_path: Path):
        path = tmp_path / "guess.pdb"
        lines = [*chain_lines(("ALA", 7), ("HSE", 8)), atom_line("ND1", "HSE", 8), atom_line("NE2", "HSE", 8)]
        path.write_text("\n".join(lines))
        guess, _ = initial_structure(path, target_from_sequence("AH"))
        assert np.allclose(guess[1, rc.atom_order["CA"]], [3.8, 0.0, 0.0])
        with pytest.raises(InputError, match="HSE 8 of its chain 'A' is H, where the target has S"):
            initial_structure(path, target_from_sequence("AS"))
        for sequence, difference in (
            ("AHA", "its chains: 2 residues; the target's: 3 residues"),
            ("A:H", "its chains: 2 residues; the target's: 1 residues, 1 residues"),
            ("SS", "ALA 7 of its chain 'A' is A, where the target has S"),
        ):
            with pytest.raises(InputError, match=re.escape(difference)):
                initial_structure(path, target_from_sequence(sequence))

    def test_a_ring_is_not_an_open_chain(self, model: fastfold.AlphaFold, plain: np.ndarray):
        assert not np.array_equal(plain, positions(model, cyclic=True))

    def test_a_ring_looks_the_same_from_every_residue(self):
        index = torch.arange(7)
        found = ring_offset(index[:, None] - index, {"ring_length": torch.full((7,), 7)}, slice(0, 7))
        for shift in range(1, 7):
            assert torch.equal(found.roll((shift, shift), (0, 1)), found)

    def test_the_offset_of_a_ring_goes_the_shorter_way(self):
        index = torch.arange(6)
        offset = index[:, None] - index
        length = torch.full((6,), 6)
        found = ring_offset(offset, {"ring_length": length}, slice(0, 6))
        assert found[0].tolist() == [0, -1, -2, -3, 2, 1]
        assert found[5].tolist() == [-1, -2, 3, 2, 1, 0]
        assert torch.equal(found[2:4], ring_offset(offset[2:4], {"ring_length": length}, slice(2, 4)))
        assert torch.equal(ring_offset(offset, {"ring_length": length * 0}, slice(0, 6)), offset)
        assert ring_offset(offset, {}, slice(0, 6)) is offset

    def test_rings_of_joined_chains_do_not_reach_other_chains(self):
        index = torch.cat([torch.arange(6), 206 + torch.arange(5)])
        length = torch.tensor([6] * 6 + [0] * 5)
        offset = index[:, None] - index
        found = ring_offset(offset, {"ring_length": length}, slice(0, 11))
        assert torch.equal(found[:6, 6:], offset[:6, 6:])
        assert torch.equal(found[6:], offset[6:])
        assert found[0, :6].tolist() == [0, -1, -2, -3, 2, 1]

    def test_rings_in_a_complex(self, model, multimer):
        pair = f"{SEQUENCE}:{OTHER}"
        joined = [positions(model, pair, rings=names) for names in (None, "A", "B")]
        assert not np.array_equal(joined[0], joined[1])
        assert not np.array_equal(joined[1], joined[2])
        with pytest.raises(ConfigError, match="holds rings up to 200 residues, and chain A has 201"):
            positions(model, f"{'A' * 201}:{OTHER}", cyclic=True)
        rings = [positions(multimer, pair), positions(multimer, pair, cyclic=True)]
        rings += [positions(multimer, pair, rings=names) for names in ("B", "A,B")]
        assert not np.array_equal(rings[0], rings[1])
        assert not np.array_equal(rings[0], rings[2])
        assert not np.array_equal(rings[1], rings[2])
        np.testing.assert_array_equal(rings[1], rings[3])
        with pytest.raises(ConfigError, match="no chain 'C', only A, B"):
            positions(multimer, pair, rings="C")
        with pytest.raises(ConfigError, match="without cyclic"):
            InferConfig(rings="A", cyclic=True)


class TestPredictMany:
    def test_it_makes_what_predict_makes_best_first(self, model: fastfold.AlphaFold):
        found = fastfold.predict_many({"a": SEQUENCE, "b": OTHER}, model, seeds=range(2), num_recycles=0)
        assert list(found) == ["a", "b"]
        for name, sequence in (("a", SEQUENCE), ("b", OTHER)):
            assert sorted(one.seed for one in found[name]) == [0, 1]
            assert found[name][0].mean_plddt >= found[name][1].mean_plddt
            for one in found[name]:
                assert np.array_equal(one.atom_positions, positions(model, sequence, seed=one.seed))
        assert list(fastfold.predict_many([OTHER], [model], num_recycles=0)) == ["query_1"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"sequences": SEQUENCE}, "sequences must be a mapping or a list"),
            ({"sequences": 3}, "sequences must be a mapping or a list, found int"),
            ({"sequences": [3]}, "names and sequences must be text"),
            ({"models": []}, "models is empty"),
            ({"models": [3]}, "model must be a network or a path, found int"),
            ({"msas": {"x": None}}, "msas has 'x', which is not a name of a sequence"),
            ({"msas": {"a": 3}}, "msa must be a file, an alignment, or rows of letters, found int"),
            ({"seeds": "0"}, "seeds must be a whole number"),
            ({"num_recycle": 3}, "unknown setting 'num_recycle'; did you mean num_recycles"),
            ({"relax": "best"}, "relax is not a setting here: .*relax_prediction"),
            ({"relax_platform": "CPU"}, "relax_platform is not a setting here: .*relax_prediction"),
            ({"device": "cpu"}, "device= is for networks by path or name; load_model"),
            ({"num_recycles": 1.5}, "num_recycles must be a whole number, found 1.5"),
            ({"memory_budget": []}, "memory_budget must be text or a number of bytes"),
        ],
    )
    def test_a_mistake_is_named(self, model: fastfold.AlphaFold, arguments: dict[str, object], message: str):
        given: dict[str, object] = {"sequences": {"a": SEQUENCE}, "models": model} | arguments
        with pytest.raises(ConfigError, match=message):
            fastfold.predict_many(given.pop("sequences"), given.pop("models"), **given)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("rows", "error"),
        [
            (["MKTAYIAKQR", "MKT"], InputError),
            (["GSHM"], InputError),
            (["MKTAYIAKQR\n>x\nMKTAYIAKQR"], InputError),
            ([], InputError),
            (np.array([1, 2]), ConfigError),
            (np.zeros((2, 2, 2)), ConfigError),
        ],
    )
    def test_rows_that_are_no_alignment_are_refused(
        self, model: fastfold.AlphaFold, rows: object, error: type
    ):
        with pytest.raises(error):
            fastfold.predict(SEQUENCE, model, msa=rows, num_recycles=0)  # type: ignore[arg-type]

    def test_rows_may_be_text_or_arrays(self, model: fastfold.AlphaFold, plain: np.ndarray):
        rows = ["MKTAYIAKQR", "MRTAYIAKQK"]
        letters = np.array([list(row) for row in rows])
        aligned = positions(model, msa=rows)
        assert np.array_equal(aligned, positions(model, msa=letters))
        assert not np.array_equal(aligned, plain)

    def test_an_alignment_without_rows_is_refused(self, model: fastfold.AlphaFold):
        from fastfold.data import Msa

        with pytest.raises(InputError, match="an alignment without rows"):
            fastfold.predict(SEQUENCE, model, msa=Msa((), np.zeros((0, 10), np.int32), ()))
