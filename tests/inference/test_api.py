"""The Python API as the documentation shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastfold
from fastfold import FastFoldError
from fastfold.data.msa.find import read_msa
from fastfold.data.msa.keyed import parse_keyed_table
from fastfold.data.queries.fasta import read_fasta
from fastfold.data.targets import target_from_sequence
from fastfold.data.training.dataset import open_dataset
from fastfold.errors import ConfigError, InputError, WeightsError
from fastfold.evoformer.execution import ExecutionPolicy, PolicyModule
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.api import _alignments, _read_alignment
from fastfold.inference.planning import planner
from fastfold.protein.io.read import read_structure
from tests.helpers.command_line import ORACLES, CommandLine, small_model, small_weights

SEQUENCE = "MKTAYIAKQR"
OTHER = "GSHMAWLPE"


@pytest.fixture(autouse=True)
def one_thread():
    """Small networks are fastest so."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "params_model_1_ptm.safetensors"
    path.write_bytes(small_weights())
    return path


@pytest.fixture(scope="module")
def monomer(weights: Path) -> AlphaFold:
    return fastfold.load_model(weights, device="cpu")


@pytest.fixture(scope="module")
def multimer() -> AlphaFold:
    return small_model("model_1_multimer_v3").to("cpu")


@pytest.fixture
def query(tmp_path: Path) -> Path:
    path = tmp_path / "query.a3m"
    path.write_text(f">q\n{SEQUENCE}\n>r\nMRTAWIAKQR\n>s\nMK--YIAKKK\n")
    return path


def test_the_documented_lines_work(cli: CommandLine, query: Path):
    model = fastfold.load_model(str(cli.weights("model_1_ptm")), device="cpu")
    assert (model.name, model.training) == ("model_1_ptm", False)
    prediction = fastfold.predict(SEQUENCE, model=model, msa=str(query), num_recycles=1, seed=0)
    assert isinstance(prediction, fastfold.Prediction)
    prediction.save(cli.out)
    ends = [".cif", ".pdb", ".png", "_pae.json", "_scores.json"]
    assert cli.names() == [f"query_model_1_ptm_seed_0{end}" for end in ends]
    assert prediction.plddt.shape == (10,)
    assert prediction.pae.shape == (10, 10)
    assert 0 <= prediction.ptm <= 1
    assert prediction.iptm is None
    assert prediction.atom_positions.shape == (10, 37, 3)
    assert prediction.sequences == (SEQUENCE,)
    assert (prediction.name, prediction.seed, prediction.num_recycles) == ("query", 0, 1)


def test_the_api_and_the_command_agree(cli: CommandLine, query: Path):
    """To the byte, structure and scores, on one device; a GPU gives other bytes."""
    given = ("--msa-dir", query.parent, "--seed", "5", "--device", "cpu")
    assert cli.infer(cli.fasta({"query": SEQUENCE}), *given).code == 0
    model = fastfold.load_model(cli.weights("model_1_ptm"), device="cpu")
    prediction = fastfold.predict(SEQUENCE, model, msa=query, num_recycles=0, seed=5)
    folder = cli.folder / "api"
    prediction.save(folder, rank=1, plots=False)
    for path in folder.iterdir():
        assert path.read_bytes() == (cli.out / path.name).read_bytes(), path.name


def test_a_path_serves_as_model_and_a_parsed_alignment_as_msa(query: Path, weights: Path, monomer: AlphaFold):
    msa = read_msa(query)
    by_path = fastfold.predict(SEQUENCE, weights, msa=msa, num_recycles=0)
    by_model = fastfold.predict(SEQUENCE, monomer, msa=query, num_recycles=0)
    np.testing.assert_array_equal(by_path.atom_positions, by_model.atom_positions)
    alone = fastfold.predict(SEQUENCE, monomer, num_recycles=0)
    assert not np.array_equal(alone.atom_positions, by_model.atom_positions)


def test_templates_change_the_prediction_and_must_fit_the_chain(monomer: AlphaFold):
    rng = np.random.default_rng(0)
    n = len(SEQUENCE)
    templates = {
        "template_aatype": np.eye(22, dtype=np.float32)[rng.integers(20, size=(1, n))],
        "template_all_atom_positions": rng.normal(size=(1, n, 37, 3)).astype(np.float32) * 5,
        "template_all_atom_masks": np.ones((1, n, 37), np.float32),
        "template_sum_probs": np.ones((1, 1), np.float32),
    }
    without, with_templates = (
        fastfold.predict(SEQUENCE, model=monomer, templates=given, num_recycles=0)
        for given in (None, templates)
    )
    assert np.abs(without.atom_positions - with_templates.atom_positions).max() > 1e-3
    with pytest.raises(InputError, match="template"):
        fastfold.predict(SEQUENCE + "A", model=monomer, templates=templates)


def test_the_seed_decides(monomer: AlphaFold):
    first, again, other = (
        fastfold.predict(SEQUENCE, monomer, num_recycles=0, seed=seed).atom_positions for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_model_in_training_mode_folds_without_dropout_and_stays_in_training_mode(monomer: AlphaFold):
    expected = fastfold.predict(SEQUENCE, monomer, num_recycles=0).atom_positions
    monomer.train()
    try:
        found = fastfold.predict(SEQUENCE, monomer, num_recycles=0).atom_positions
        assert monomer.training
    finally:
        monomer.eval()
    np.testing.assert_array_equal(found, expected)


def test_folding_changes_no_parameter(monomer: AlphaFold):
    """Updates in place are made to activations alone."""
    before = {name: value.clone() for name, value in monomer.state_dict().items()}
    fastfold.predict(SEQUENCE, monomer, num_recycles=1)
    for name, value in monomer.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_folding_in_place_and_in_blocks_gives_what_the_plain_network_gives(
    monkeypatch: pytest.MonkeyPatch, monomer: AlphaFold, query: Path
):
    assert planner.FOLDING_POLICY.inplace
    assert planner.FOLDING_POLICY.block_elements is not None
    found = {}
    seen: set[ExecutionPolicy] = set()

    def policies(module: AlphaFold) -> set[ExecutionPolicy]:
        return {m.policy for m in module.modules() if isinstance(m, PolicyModule)}

    for name, policy in {
        "own": planner.FOLDING_POLICY,
        "plain": ExecutionPolicy(),
        "small": ExecutionPolicy(64, True),
    }.items():
        monkeypatch.setattr(planner, "FOLDING_POLICY", policy)
        seen.clear()
        with monomer.register_forward_pre_hook(lambda module, _: seen.update(policies(module))):
            found[name] = fastfold.predict(SEQUENCE, monomer, msa=query, num_recycles=1).atom_positions
        assert seen == {policy}
        assert policies(monomer) == {ExecutionPolicy()}
    for name in ("own", "small"):
        np.testing.assert_allclose(found[name], found["plain"], atol=1e-3)


def test_a_complex_has_interface_scores_and_chains_in_the_order_given(multimer: AlphaFold, query: Path):
    prediction = fastfold.predict(
        f"{OTHER}:{SEQUENCE}:{OTHER}", multimer, msa=[None, query, None], num_recycles=0
    )
    assert prediction.sequences == (OTHER, SEQUENCE, OTHER)
    assert prediction.iptm is not None
    np.testing.assert_array_equal(prediction.chain_index, [0] * 9 + [1] * 10 + [2] * 9)
    np.testing.assert_array_equal(prediction.residue_index, [*range(9), *range(10), *range(9)])
    assert prediction.ranking_confidence == pytest.approx(0.8 * prediction.iptm + 0.2 * prediction.ptm)


def test_a_trunk_in_bf16(query: Path, weights: Path):
    model = fastfold.load_model(weights, device="cpu", precision="bf16")
    assert model.evoformer.blocks[0].msa_transition.hidden.weight.dtype == torch.bfloat16
    assert model.structure_module.initial.weight.dtype == torch.float32
    prediction = fastfold.predict(SEQUENCE, model, msa=query, num_recycles=0)
    assert prediction.plddt.dtype == np.float32


@pytest.mark.parametrize(
    ("sequence", "options", "kind", "message"),
    [
        ("", {}, InputError, "lacks a sequence"),
        ("MK-T", {}, InputError, "gap '-' at position 3"),
        (SEQUENCE, {"num_recycles": -1}, ConfigError, "num_recycles must be from 0 to 1000, found -1"),
        (SEQUENCE, {"seed": -1}, ConfigError, "seed must be from 0"),
        (None, {}, ConfigError, "sequence must be text, found NoneType"),
        (SEQUENCE, {"msas": []}, ConfigError, "msas is not a setting here: predict takes msa="),
        (SEQUENCE, {"seeds": 1}, ConfigError, "seeds is not a setting here: predict takes seed="),
        (SEQUENCE, {"msa": "none.a3m"}, InputError, "none.a3m: no such file"),
        (
            SEQUENCE,
            {"msa": f">q\n{SEQUENCE}\n" * 20},
            ConfigError,
            "found a text of several lines; save it as",
        ),
        (SEQUENCE, {"msa": [None, None]}, ConfigError, "1 chains, but 2 alignments"),
        (f"{SEQUENCE}:{OTHER}", {"msa": "one.a3m"}, ConfigError, "2 chains, but 1 alignments"),
        ("A" * 200_000, {}, InputError, "200,000 residues would need about"),
    ],
)
def test_errors_of_predict_are_fastfold_errors(monomer: AlphaFold, sequence, options, kind, message):
    with pytest.raises(FastFoldError, match=message) as caught:
        fastfold.predict(sequence, monomer, **options)
    assert type(caught.value) is kind


@pytest.mark.parametrize("wrong", [None, 3, [None]])
def test_what_is_no_network_is_refused(wrong: Any) -> None:
    for call in (fastfold.predict, fastfold.predict_many):
        with pytest.raises(ConfigError, match="model must be a network or a path, found"):
            call({"a": SEQUENCE} if call is fastfold.predict_many else SEQUENCE, wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model must be a network or a path, found"):
        fastfold.load_model(wrong)


def test_arguments_of_the_wrong_kind_are_refused_by_name(tmp_path: Path) -> None:
    prediction = fastfold.predict(SEQUENCE, "mini", num_recycles=0)
    prediction.save(tmp_path, rank=1, plots=False)
    load = fastfold.Prediction.load
    for call, message in (
        (lambda: fastfold.embed(None, "mini"), "sequence must be text, found NoneType"),  # type: ignore[arg-type]
        (lambda: fastfold.AlphaFold("model_1_ptm"), "config must be the configuration of a network"),  # type: ignore[arg-type]
        (lambda: fastfold.model_config(1), "name of a model must be text, found int"),  # type: ignore[arg-type]
        (lambda: load(None), "path must be a file or folder, found NoneType"),  # type: ignore[arg-type]
        (lambda: load(tmp_path, rank="1"), "rank must be a whole number, found '1'"),  # type: ignore[arg-type]
        (lambda: prediction.save(None), "path must be a file or folder, found NoneType"),  # type: ignore[arg-type]
        (lambda: read_msa(None), "path must be a file or folder, found NoneType"),  # type: ignore[arg-type]
        (lambda: read_fasta(3), "path must be a file or folder, found int"),  # type: ignore[arg-type]
        (lambda: open_dataset(None), "path must be a file or folder, found NoneType"),  # type: ignore[arg-type]
        (lambda: read_structure("a.pdb", chain_ids=1), "chain_ids must be names of chains, found int"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_numbers_of_numpy_are_settings(monomer: AlphaFold) -> None:
    numpy = fastfold.predict(SEQUENCE, monomer, num_recycles=np.int32(0), recycle_tolerance=np.float32(0.5))  # type: ignore[arg-type]
    assert numpy.num_recycles == 0


def test_an_alignment_of_another_sequence_is_refused_also_when_it_is_parsed(monomer: AlphaFold, query: Path):
    for msa in (query, read_msa(query)):
        with pytest.raises(InputError, match="the alignment belongs to another sequence"):
            fastfold.predict(OTHER, monomer, msa=msa)


def test_numbers_that_are_not_finite_are_never_a_prediction(cli: CommandLine):
    model = fastfold.load_model(cli.weights(), device="cpu")
    with torch.no_grad():
        model.structure_module.initial.weight[0, 0] = float("inf")
    with pytest.raises(FastFoldError, match="results are not finite"):
        fastfold.predict(SEQUENCE, model, num_recycles=0)


@pytest.mark.parametrize(
    ("path", "options", "kind", "message"),
    [
        ("none.npz", {}, WeightsError, "no such file"),
        ("x.npz", {"device": "tpu"}, ConfigError, "unknown device 'tpu'; use auto, cpu, cuda"),
        (
            ORACLES / "synthetic_monomer/params.npz",
            {"precision": "fp8"},
            ConfigError,
            "found 'fp8'",
        ),
    ],
)
def test_errors_of_load_model_are_fastfold_errors(path, options, kind, message):
    with pytest.raises(FastFoldError, match=message) as caught:
        fastfold.load_model(path, **options)
    assert type(caught.value) is kind


def test_a_file_called_mini_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("mini").write_text("not weights")
    with pytest.raises(WeightsError, match="text file"):
        fastfold.load_model("mini")


@pytest.mark.parametrize("count", [0, 1])
def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, count: int):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match="GPUs here: 1" if count else "no CUDA device can be used here"):
        fastfold.load_model("x.npz", device="cuda:1")


def test_the_public_names_are_those_of_the_documentation():
    assert sorted(fastfold.__all__) == dir(fastfold)
    for name in fastfold.__all__:
        assert getattr(fastfold, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fastfold.nothing


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["MKV", "M1V"], "record 'row_2'.*'1' is neither a residue nor a gap"),
        (["MKV", "MKV", "MKVV"], "record 'row_3'.*found 4 in row 3"),
        (["MKA"], "record 'row_1'.*the alignment belongs to another sequence"),
        (["MKV", "M\nV"], "as a row of msa, found a line end or '>'"),
        (np.array([list("MKV"), list("MK1")]), "record 'row_2'"),
    ],
)
def test_wrong_rows_of_an_alignment_are_named_from_one(rows: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _read_alignment(rows, "MKV")
    read = _read_alignment(["MKV", "M-V"], "MKV")
    assert list(read.sequences) == ["MKV", "M-V"]


def test_rows_with_keys_are_paired_as_those_of_a_folder(tmp_path: Path) -> None:
    """Tables of Boltz, parsed by the user or found by the names of chains."""
    target = target_from_sequence("MKTAY:GSH", "ab")
    tables = ["key,sequence\n0,MKTAY\n1,MRTAY\n-1,MKTAW\n", "key,sequence\n0,GSH\n7,GSN\n1,GTH\n"]
    for chain, table in zip("AB", tables, strict=True):
        (tmp_path / f"ab_{chain}.csv").write_text(table)
    ours, found = _alignments(target, list(map(parse_keyed_table, tables))), _alignments(target, tmp_path)
    assert [one.sequences for _, (one,) in ours] == [("MKTAY", "MRTAY"), ("GSH", "GTH")]
    for mine, theirs in zip(ours, found, strict=True):
        assert [[one.sequences for one in kind] for kind in mine] == [
            [one.sequences for one in kind] for kind in theirs
        ]


def test_copies_of_a_chain_share_an_alignment_wherever_it_is_given() -> None:
    """Networks see one alignment for all copies, which none may lose in silence."""
    target = target_from_sequence("MKTAY:MKTAY:GSH")
    rows, other = ["MKTAY", "MRTAY"], ["MKTAY", "MKTAW"]
    for given in ([rows, None, None], [None, rows, None], [rows, rows, None]):
        shared = [[msa.sequences for msa in own] for own, _ in _alignments(target, given)]
        assert shared == [[("MKTAY", "MRTAY")], [("MKTAY", "MRTAY")], []]
    with pytest.raises(
        ConfigError, match="chain B has the sequence of an earlier chain, and another alignment"
    ):
        _alignments(target, [rows, other, None])


def test_autocast_and_default_device_of_the_caller_change_no_prediction(monomer: AlphaFold) -> None:
    plain = fastfold.predict("MKLVTAGES", monomer, num_recycles=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        in_autocast = fastfold.predict("MKLVTAGES", monomer, num_recycles=0)
    with torch.device("meta"):
        elsewhere = fastfold.predict("MKLVTAGES", monomer, num_recycles=0)
        loaded = fastfold.load_model("mini", device="cpu")
    assert in_autocast.to_pdb() == elsewhere.to_pdb() == plain.to_pdb()
    assert next(loaded.parameters()).device.type == "cpu"
