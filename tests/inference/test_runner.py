"""``fastfold infer``: what it writes, in which order, and when it folds again."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from Bio.PDB import MMCIFParser, PDBParser
from Bio.PDB.MMCIF2Dict import MMCIF2Dict

import fastfold
from fastfold.inference.folding import predictor
from fastfold.inference.output.results_folder import STATE
from fastfold.inference.output.summary import read_summary
from tests.helpers.command_line import QUICK, CommandLine

SEQUENCE = "MKTAYIAKQR"
OTHER = "GSHMAWLPE"
LETTERS = "ARNDCQEGHILKMFPSTWYV"


def a3m(sequence: str, rows: int = 4) -> str:
    """An alignment of random rows below the query."""
    rng = np.random.default_rng(0)
    text = f">query\n{sequence}\n"
    for i in range(1, rows):
        text += f">row_{i}\n" + "".join(rng.choice(list(LETTERS), len(sequence))) + "\n"
    return text


def stockholm(sequence: str, rows: int = 3) -> str:
    lines = [f"row{i} {sequence[i:] + sequence[:i]}" for i in range(1, rows)]
    return "\n".join(["# STOCKHOLM 1.0", f"query {sequence}", *lines, "//"]) + "\n"


def mean_b_factors(structure) -> list[float]:
    residues = list(structure.get_residues())
    for residue in residues:
        assert len({atom.bfactor for atom in residue}) == 1
    return [next(iter(residue)).bfactor for residue in residues]


def test_a_prediction_gets_structure_scores_aligned_error_picture_and_settings(cli: CommandLine):
    done = cli.infer(cli.fasta({"T1": SEQUENCE}), settings=["--num-recycles", "1", "--seed", "7"])
    assert (done.code, done.out) == (0, f"1 folded; results in {cli.out}\n")
    stem = "T1_rank_001_model_1_ptm_seed_7"
    ends = [".cif", ".pdb", ".png", "_config.json", "_pae.json", "_scores.json"]
    assert cli.names() == [stem + end for end in ends]

    scores = cli.load(f"{stem}_scores.json")
    assert scores["schema_version"] == 1
    assert scores["sequences"] == [SEQUENCE]
    assert scores["model"] == "model_1_ptm"
    assert (scores["seed"], scores["num_recycles"]) == (7, 1)
    assert len(scores["plddt"]) == len(SEQUENCE)
    assert all(0 <= value <= 100 for value in scores["plddt"])
    assert scores["mean_plddt"] == pytest.approx(np.mean(scores["plddt"]), abs=0.01)
    assert scores["ranking_confidence"] == pytest.approx(scores["mean_plddt"], abs=0.01)
    assert 0 <= scores["ptm"] <= 1
    assert scores["iptm"] is None

    pae = cli.load(f"{stem}_pae.json")
    assert np.shape(pae[0]["predicted_aligned_error"]) == (10, 10)
    assert pae[0]["max_predicted_aligned_error"] == 31.75

    pdb = PDBParser(QUIET=True).get_structure("x", cli.out / f"{stem}.pdb")
    cif = MMCIFParser(QUIET=True).get_structure("x", cli.out / f"{stem}.cif")
    for structure in (pdb, cif):
        assert [residue.id[1] for residue in structure.get_residues()] == list(range(1, 11))
        assert mean_b_factors(structure) == pytest.approx(scores["plddt"], abs=0.006)
    metrics = MMCIF2Dict(cli.out / f"{stem}.cif")["_ma_qa_metric_local.metric_value"]
    assert [float(value) for value in metrics] == pytest.approx(scores["plddt"], abs=0.006)
    assert (cli.out / f"{stem}.png").read_bytes().startswith(b"\x89PNG")

    config = cli.config("T1")
    assert config["settings"] == {
        "seed": 7,
        "num_recycles": 1,
        "recycle_tolerance": 0.0,
        "num_ensemble": 1,
        "max_msa": [512, 5120],
        "precision": "fp32",
        "dropout": False,
        "cyclic": False,
        "initial_guess": None,
    }
    assert config["device"] in ("cpu", "cuda")
    assert config["chains"] == {"A": SEQUENCE}
    assert config["source"] == "input.fasta"
    assert config["versions"]["fastfold"] == fastfold.__version__
    assert config["versions"]["torch"] == torch.__version__
    assert len(config["input_hash"]) == 64
    assert (cli.out / STATE / "t1" / f"{config['input_hash']}.json").is_file()
    (line,) = read_summary(cli.out / "summary.tsv")
    assert (line["target"], line["model"], line["seed"], line["rank"]) == ("T1", "model_1_ptm", "7", "1")
    assert (line["length"], line["iptm"], line["files"]) == ("10", "", stem)
    assert float(line["plddt"]) == pytest.approx(scores["mean_plddt"], rel=1e-3)
    assert float(line["seconds"]) > 0
    assert float(line["peak_memory"]) > 50


def test_single_sequence_mode_and_the_result_are_announced(cli: CommandLine):
    done = cli.infer(cli.fasta({"T1": SEQUENCE}))
    assert "1/1 T1: 10 residues, no alignment, from the sequence alone, by model_1_ptm" in done.err
    scores = cli.scores("T1")
    result = f"pLDDT {scores['mean_plddt']:.1f}, pTM {scores['ptm']:.2f} by model_1_ptm_seed_0, best of "
    result += f"1 prediction in {cli.out}"
    assert result in done.err


def test_predictions_of_several_weights_are_ranked_by_confidence(cli: CommandLine):
    weights = [cli.weights("model_1_ptm"), *(cli.weights(f"model_{i}_ptm", noise=0.4 * i) for i in (2, 3))]
    assert cli.infer(cli.fasta({"T1": SEQUENCE}), weights=weights).code == 0
    scores = [cli.scores("T1", rank) for rank in (1, 2, 3)]
    confidences = [found["ranking_confidence"] for found in scores]
    assert confidences == sorted(confidences, reverse=True)
    assert len(set(confidences)) == 3
    assert {found["model"] for found in scores} == {"model_1_ptm", "model_2_ptm", "model_3_ptm"}
    found = [cli.config("T1", rank)["weights"] for rank in (1, 2, 3)]
    assert {weight["file"] for weight in found} == {path.name for path in weights}
    assert len({weight["sha256"] for weight in found}) == 3


class Finished:
    """A finished run with an alignment, to be changed and run again."""

    def __init__(self, cli: CommandLine) -> None:
        self.cli = cli
        self.msas = cli.folder / "msas"
        self.msas.mkdir()
        (self.msas / "T1.a3m").write_text(a3m(SEQUENCE))
        self.fasta = cli.fasta({"T1": SEQUENCE})
        self.weights = cli.weights()
        self.before: dict[str, int] = {}

    def run(self, *more: str | Path):
        return self.cli.infer(self.fasta, "--msa-dir", self.msas, *more, weights=[self.weights])

    def times(self) -> dict[str, int]:
        return {name: (self.cli.out / name).stat().st_mtime_ns for name in self.cli.names()}

    def untouched(self) -> bool:
        return self.times() == self.before


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a finished run, once there has been one."""
    return tmp_path_factory.mktemp("finished") / "out"


@pytest.fixture
def finished(cli: CommandLine, folded: Path) -> Finished:
    """Folded once; each test has a copy of its own, with the times of the files."""
    run = Finished(cli)
    if folded.exists():
        shutil.copytree(folded, cli.out)
    else:
        assert run.run().code == 0
        shutil.copytree(cli.out, folded)
    run.before = run.times()
    return run


def test_a_second_run_skips_what_is_finished_and_says_so(finished: Finished):
    again = finished.run()
    assert (again.code, again.out) == (0, f"0 folded, 1 finished before; results in {finished.cli.out}\n")
    assert "1/1 T1: finished before with the same input and settings, skipped" in again.err
    assert "recycle" not in again.err
    assert finished.untouched()


def test_more_targets_join_a_finished_one_in_the_same_folder(finished: Finished):
    finished.fasta = finished.cli.fasta({"T1": SEQUENCE, "T2": OTHER})
    assert finished.run().out.startswith("1 folded, 1 finished before;")
    assert finished.cli.scores("T1")["sequences"] == [SEQUENCE]
    assert finished.cli.scores("T2")["sequences"] == [OTHER]


@pytest.mark.parametrize(
    "change", ["recycles", "seed", "precision", "alignment", "weights", "max_msa", "dropout"]
)
def test_whatever_changes_the_numbers_adds_a_prediction_to_those_that_are_there(
    finished: Finished, change: str
):
    cli = finished.cli
    before = cli.contents()
    more = {
        "recycles": ["--num-recycles", "1"],
        "seed": ["--seed", "1"],
        "precision": ["--precision", "bf16"],
        "max_msa": ["--max-msa", "6:2"],
        "dropout": ["--dropout"],
    }.get(change, [])
    if change == "alignment":
        (finished.msas / "T1.a3m").write_text(a3m(SEQUENCE, rows=5))
    elif change == "weights":
        finished.weights = cli.weights(noise=0.01)
    done = finished.run(*more)
    assert done.code == 0
    assert done.out.startswith("1 folded;")
    assert sorted(before.values()) == sorted(set(before.values()) & set(cli.contents().values()))
    scores = [cli.scores("T1", rank) for rank in (1, 2)]
    assert scores[0]["ranking_confidence"] >= scores[1]["ranking_confidence"]
    assert len(read_summary(cli.out / "summary.tsv")) == 2
    keys = {line["files"].partition("_rank_")[2][4:] for line in read_summary(cli.out / "summary.tsv")}
    assert "model_1_ptm_seed_0" in keys
    if change == "seed":
        assert keys == {"model_1_ptm_seed_0", "model_1_ptm_seed_1"}
    assert finished.run(*more).out.startswith("0 folded, 1 finished before")


def test_another_sequence_of_the_same_name_gets_another_stem(finished: Finished):
    cli, before = finished.cli, finished.cli.contents()
    changed = SEQUENCE[:-1] + "W"
    finished.fasta = cli.fasta({"T1": changed})
    (finished.msas / "T1.a3m").write_text(a3m(changed))
    done = finished.run()
    assert done.out.startswith("1 folded;")
    assert "T1: " in done.err
    assert "has results of another record or sequence under this name; this one's are called T1_" in done.err
    assert before.items() <= cli.contents().items()
    assert len(cli.contents()) == 2 * len(before)
    assert finished.run().out.startswith("0 folded, 1 finished before")


@pytest.mark.parametrize("change", ["deleted", "damaged", "record"])
def test_a_damaged_prediction_is_made_again(finished: Finished, change: str):
    cli, before = finished.cli, finished.cli.contents()
    if change == "deleted":
        next(cli.out.glob("*.cif")).unlink()
    elif change == "damaged":
        path = next(cli.out.glob("*.pdb"))
        path.write_bytes(path.read_bytes().replace(b"ATOM", b"BTOM", 1))
    else:
        (record,) = (path for path in (cli.out / STATE / "t1").glob("*.json") if path.name != "target.json")
        record.unlink()
    assert finished.run().out.startswith("1 folded;")
    if change == "record":  # whose files these are is not known any more, so they stay
        assert before.items() <= cli.contents().items()
        assert len(cli.contents()) == 2 * len(before)
    else:
        assert cli.contents() == before


def test_plots_and_the_default_spelled_out_fold_nothing_again(finished: Finished):
    cli, before = finished.cli, finished.before
    done = cli.infer(
        finished.fasta,
        "--msa-dir",
        finished.msas,
        weights=[finished.weights],
        settings=["--num-recycles", "0"],
    )
    assert done.code == 0
    assert "recycle" not in done.err
    (picture,) = cli.out.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert before.items() <= finished.times().items()
    again = finished.run("--num-ensemble", "1", "--recycle-tolerance", "0", "--seeds", "0")
    assert again.out.startswith("0 folded, 1 finished before")


def test_overwriting_is_asked_for(finished: Finished):
    finished.run("--seeds", "1-2")
    assert len(read_summary(finished.cli.out / "summary.tsv")) == 3
    before = finished.cli.contents()
    done = finished.run("--overwrite")
    assert done.out.startswith("1 folded;")
    (line,) = read_summary(finished.cli.out / "summary.tsv")
    assert (line["seed"], line["rank"]) == ("0", "1")
    assert len(finished.cli.names()) * 3 == len(before)
    assert set(finished.cli.contents().values()) <= set(before.values())


def test_names_that_look_alike_in_files_do_not_share_results(cli: CommandLine):
    assert cli.infer(cli.fasta({"a_b": SEQUENCE})).code == 0
    before = cli.contents()
    done = cli.infer(cli.fasta({"a/b": OTHER}))
    assert done.out.startswith("1 folded;")
    assert before.items() <= cli.contents().items()
    assert len(cli.contents()) == 2 * len(before)


def test_a_failing_target_is_reported_and_the_others_go_on(cli: CommandLine):
    msas = cli.folder / "msas"
    msas.mkdir()
    (msas / "bad.a3m").write_text(">bad\nGSHM\n")
    done = cli.infer(cli.fasta({"one": SEQUENCE, "bad": SEQUENCE, "two": OTHER}), "--msa-dir", msas)
    assert done.code == 1
    assert done.out == f"2 folded, 1 failed; results in {cli.out}\n"
    assert "the alignment is of another sequence" in done.err
    assert {name.split("_")[0] for name in cli.names()} == {"one", "two"}


def test_a_bug_that_one_target_brings_to_light_does_not_stop_the_others(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
):
    def fold(model, sampler, target, *rest, **options):
        if target.name == "bad":
            raise TypeError("unsupported operand\nsecond line")
        return real(model, sampler, target, *rest, **options)

    real = predictor.fold
    monkeypatch.setattr(predictor, "fold", fold)
    fasta = cli.fasta({"bad": SEQUENCE, "good": OTHER})
    done = cli.infer(fasta)
    assert done.code == 1
    assert done.out.startswith("1 folded, 1 failed;")
    assert "error: bad: internal error, TypeError: unsupported operand. This is a bug" in done.err
    assert "Traceback" not in done.err
    monkeypatch.setenv("FASTFOLD_DEBUG", "1")
    assert "Traceback" in cli.infer(fasta).err


def test_running_out_of_memory_is_told_with_a_remedy(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(predictor, "fold", lambda *_, **__: torch.empty(1 << 52))
    done = cli.infer(cli.fasta({"T1": SEQUENCE}))
    assert done.code == 1
    assert "residues would fit: fold shorter pieces, use --precision bf16" in done.err
    assert "bug" not in done.err


def test_one_seed_gives_the_same_bytes_and_another_seed_others(cli: CommandLine):
    """With more rows than cluster centres and masked positions there is much to draw."""
    msas = cli.folder / "msas"
    msas.mkdir()
    (msas / "T1.a3m").write_text(a3m(SEQUENCE, rows=600))
    runs = []
    for out, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        cli.out = cli.folder / out
        done = cli.infer(
            cli.fasta({"T1": SEQUENCE}), "--msa-dir", msas, settings=["--num-recycles", "1", "--seed", seed]
        )
        assert done.code == 0
        assert "600 alignment rows" in done.err
        runs.append({name.replace(f"seed_{seed}", "seed"): data for name, data in cli.contents().items()})
    first, again, other = runs
    assert first == again
    assert any(name.endswith(".png") for name in first)
    assert first.keys() == other.keys()
    for end in ("seed.pdb", "seed.cif", "_scores.json"):
        (name,) = (name for name in first if name.endswith(end))
        assert first[name] != other[name]


def test_no_recycles_is_one_pass_and_the_default_is_the_networks_own_number(cli: CommandLine):
    fasta = cli.fasta({"T1": SEQUENCE})
    done = cli.infer(fasta, settings=["--num-recycles", "0", "--no-plots"])
    assert "recycle 0/0" in done.err
    assert cli.scores("T1")["num_recycles"] == 0
    cli.out = cli.folder / "default"
    done = cli.infer(fasta, settings=["--no-plots"])
    assert [f"recycle {i}/3" in done.err for i in range(5)] == [True] * 4 + [False]
    assert cli.scores("T1")["num_recycles"] == 3


def test_bf16_is_used_and_close_to_fp32(cli: CommandLine):
    """Close: these random networks put atoms up to 17 Å from the centre, and another seed moves them by 9 Å."""
    fasta = cli.fasta({"T1": SEQUENCE})
    found = []
    for precision in ("fp32", "bf16"):
        cli.out = cli.folder / precision
        done = cli.infer(fasta, "--precision", precision, "--num-recycles", "1")
        assert done.code == 0
        assert cli.config("T1")["settings"]["precision"] == precision
        (path,) = cli.out.glob("*.pdb")
        atoms = PDBParser(QUIET=True).get_structure("x", path).get_atoms()
        found.append(([atom.coord for atom in atoms if atom.name == "CA"], cli.scores("T1")["plddt"]))
    (exact, exact_plddt), (rough, rough_plddt) = found
    assert 0 < np.linalg.norm(np.subtract(exact, rough), axis=-1).max() < 1.7
    assert rough_plddt == pytest.approx(exact_plddt, abs=0.02)


def test_cuda_without_a_gpu_is_a_clear_error(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = cli.infer(cli.fasta({"T1": SEQUENCE}), "--device", "cuda")
    assert done.code == 1
    assert done.err.startswith("fastfold: no CUDA device can be used here")
    assert "--device cpu" in done.err
    assert not cli.out.exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_what_the_cpu_gives(cli: CommandLine):
    fasta = cli.fasta({"T1": SEQUENCE})
    found = []
    for device in ("cpu", "cuda"):
        cli.out = cli.folder / device
        assert cli.infer(fasta, "--device", device).code == 0
        assert cli.config("T1")["device"] == device
        found.append(cli.scores("T1")["plddt"])
    assert found[1] == pytest.approx(found[0], abs=0.02)


class TestComplexes:
    """Complexes and multimer networks."""

    def test_chains_come_in_the_order_of_the_input(self, cli: CommandLine):
        """Also where copies of a chain stand apart, which the network's features group."""
        weights = [cli.weights("model_1_multimer_v3")]
        fasta = cli.fasta({"aba": f"{SEQUENCE}:{OTHER}:{SEQUENCE}"})
        assert cli.infer(fasta, weights=weights).code == 0
        scores = cli.scores("aba")
        assert scores["sequences"] == [SEQUENCE, OTHER, SEQUENCE]
        assert scores["chain_ids"] == ["A", "B", "C"]
        assert scores["ranking_confidence"] == pytest.approx(
            0.8 * scores["iptm"] + 0.2 * scores["ptm"], abs=1e-3
        )
        (path,) = cli.out.glob("*.cif")
        chains = list(MMCIFParser(QUIET=True).get_structure("x", path)[0])
        assert [chain.id for chain in chains] == ["A", "B", "C"]
        assert [len(list(chain)) for chain in chains] == [10, 9, 10]
        assert [residue.resname for residue in chains[1]][:3] == ["GLY", "SER", "HIS"]
        (pae,) = cli.out.glob("*_pae.json")
        assert np.shape(json.loads(pae.read_text())[0]["predicted_aligned_error"]) == (29, 29)

    def test_records_of_a_file_are_one_complex_when_asked(self, cli: CommandLine):
        fasta = cli.fasta({"first": SEQUENCE, "second": OTHER}, name="dimer.fasta")
        weights = [cli.weights("model_1_multimer_v3")]
        assert cli.infer(fasta, "--complex", weights=weights).out.startswith("1 folded;")
        assert cli.scores("dimer")["sequences"] == [SEQUENCE, OTHER]

    def test_each_target_is_folded_by_the_networks_that_suit_it(self, cli: CommandLine):
        weights = [cli.weights("model_1_ptm"), cli.weights("model_1_multimer_v3")]
        fasta = cli.fasta({"pair": f"{SEQUENCE}:{OTHER}", "single": OTHER})
        done = cli.infer(fasta, weights=weights)
        assert done.code == 0
        assert "sequence alone, by model_1_multimer_v3" in done.err
        assert "sequence alone, by model_1_ptm\n" in done.err
        assert cli.scores("pair")["model"] == "model_1_multimer_v3"
        assert cli.scores("single")["model"] == "model_1_ptm"
        assert not list(cli.out.glob("*_rank_002_*"))

    def test_a_single_chain_goes_to_a_multimer_network_if_there_is_no_other(self, cli: CommandLine):
        done = cli.infer(cli.fasta({"single": SEQUENCE}), weights=[cli.weights("model_1_multimer_v3")])
        assert done.code == 0
        scores = cli.scores("single")
        assert scores["iptm"] is None
        assert scores["ranking_confidence"] == pytest.approx(scores["mean_plddt"], abs=0.01)

    def test_a_complex_with_monomer_weights_is_folded_as_one_chain_and_that_is_said(self, cli: CommandLine):
        done = cli.infer(cli.fasta({"pair": f"{SEQUENCE}:{OTHER}"}))
        assert done.code == 0
        assert "warning: pair: a complex folded by a monomer network, as one chain" in done.err
        assert "--weights multimer is made for complexes" in done.err
        scores = cli.scores("pair")
        assert scores["sequences"] == [SEQUENCE, OTHER]
        assert scores["chain_ids"] == ["A", "B"]
        assert 0 < scores["iptm"] < 1
        assert scores["interfaces"]["pairs"]["A-B"]["iptm"] is not None


class TestAlignments:
    """--msa-dir in all its layouts."""

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
    def test_alignments_of_a_chain_are_found_and_used(self, cli: CommandLine, name, content, rows):
        path = cli.folder / "msas" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        fasta = cli.fasta({"T1": SEQUENCE})
        done = cli.infer(fasta, "--msa-dir", cli.folder / "msas")
        assert done.code == 0
        assert f"{rows} alignment rows" in done.err
        assert cli.config("T1")["alignment_rows"] == [[rows, 0]]
        with_alignment = cli.scores("T1")["plddt"]
        cli.out = cli.folder / "alone"
        cli.infer(fasta)
        assert cli.scores("T1")["plddt"] != with_alignment

    def test_all_alignments_of_a_folder_are_used_together(self, cli: CommandLine):
        folder = cli.folder / "msas" / "T1"
        folder.mkdir(parents=True)
        (folder / "uniref90_hits.sto").write_text(stockholm(SEQUENCE, 3))
        (folder / "bfd.a3m").write_text(a3m(SEQUENCE, 4))
        assert "7 alignment rows" in cli.infer(cli.fasta({"T1": SEQUENCE}), "--msa-dir", folder.parent).err

    @pytest.mark.parametrize(
        "layout", ["pair_{}.a3m", "pair_{}/uniref90_hits.a3m", "pair/{}/uniref90_hits.a3m"]
    )
    def test_alignments_of_the_chains_of_a_complex(self, cli: CommandLine, layout: str):
        for chain, sequence, rows in (("A", SEQUENCE, 4), ("B", OTHER, 3)):
            path = cli.folder / "msas" / layout.format(chain)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(a3m(sequence, rows))
        done = cli.infer(
            cli.fasta({"pair": f"{SEQUENCE}:{OTHER}"}),
            "--msa-dir",
            cli.folder / "msas",
            weights=[cli.weights("model_1_multimer_v3")],
        )
        assert done.code == 0
        assert "7 alignment rows" in done.err
        assert cli.config("pair")["alignment_rows"] == [[4, 0], [3, 0]]

    def test_a_colabfold_alignment_of_a_complex_is_split_into_its_chains(self, cli: CommandLine):
        text = f"#10,9\t1,1\n>101\t102\n{SEQUENCE}{OTHER}\n>both\n{SEQUENCE[::-1]}{OTHER[::-1]}\n>only_a\n{SEQUENCE}"
        (cli.folder / "pair.a3m").write_text(text + "-" * 9 + "\n")
        done = cli.infer(
            cli.fasta({"pair": f"{SEQUENCE}:{OTHER}"}),
            "--msa-dir",
            cli.folder,
            weights=[cli.weights("model_1_multimer_v3")],
        )
        assert done.code == 0
        assert cli.config("pair")["alignment_rows"] == [[1, 2], [0, 2]]

    def test_a_target_without_alignment_among_others_is_named(self, cli: CommandLine):
        msas = cli.folder / "msas"
        msas.mkdir()
        (msas / "T1.a3m").write_text(a3m(SEQUENCE))
        done = cli.infer(cli.fasta({"T1": SEQUENCE, "T2": OTHER}), "--msa-dir", msas)
        assert done.code == 0
        assert f"warning: T2: no alignment of 'T2' in {msas}; its sequence alone is used" in done.err
        assert "warning: T1" not in done.err

    def test_a_chain_without_alignment_is_named(self, cli: CommandLine):
        (cli.folder / "pair_A.a3m").write_text(a3m(SEQUENCE))
        done = cli.infer(
            cli.fasta({"pair": f"{SEQUENCE}:{OTHER}"}),
            "--msa-dir",
            cli.folder,
            weights=[cli.weights("model_1_multimer_v3")],
        )
        assert done.code == 0
        assert "warning: pair: no alignment of chain B" in done.err
        assert "no alignment of chain A" not in done.err

    @pytest.mark.parametrize("kind", ["missing", "file"])
    def test_a_folder_that_is_none_is_told_at_once(self, cli: CommandLine, kind: str):
        fasta = cli.fasta({"T1": SEQUENCE, "T2": OTHER})
        done = cli.infer(fasta, "--msa-dir", fasta if kind == "file" else cli.folder / "missing")
        assert done.code == 1
        assert done.err.count("no such folder; give the one that holds the alignments") == 1
        assert not cli.out.exists()


def test_the_command_works_in_a_process_of_its_own(cli: CommandLine, ended):
    fasta, weights = cli.fasta({"T1": SEQUENCE}), cli.weights()
    process = cli.start("infer", fasta, "--out", cli.out, "--weights", weights, *QUICK)
    ended.append(process)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == f"1 folded; results in {cli.out}\n"
    assert "recycle 0/0 pLDDT" in err
    # The same files as in this process, byte for byte.
    first = cli.contents()
    shutil.rmtree(cli.out)
    cli.infer(fasta, weights=[weights])
    assert cli.contents() == first
