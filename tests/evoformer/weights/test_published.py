"""A name stands for files: of the package, of the folder of weights, or of the disk."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

import fastfold
from fastfold.errors import WeightsError
from fastfold.evoformer.config import PRESETS
from fastfold.evoformer.weights.download import open_pieces
from fastfold.evoformer.weights.published import (
    PUBLISHED,
    SUMS,
    one_weights_file,
    published_networks,
    read_sums,
    verify_recorded,
    weights_files,
    weights_folder,
)
from tests.helpers.command_line import ORACLES, CommandLine, cli  # noqa: F401


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of weights with small networks under official names."""
    folder = tmp_path / "weights"
    folder.mkdir()
    for network in (*PUBLISHED["multimer"], "model_1_ptm"):
        kind = "synthetic_multimer" if "multimer" in network else "synthetic_monomer"
        shutil.copyfile(ORACLES / kind / "params.npz", folder / f"params_{network}.npz")
    monkeypatch.setenv("FASTFOLD_WEIGHTS", str(folder))
    return folder


def test_every_published_network_has_a_configuration() -> None:
    assert len(PUBLISHED["all"]) == len(set(PUBLISHED["all"])) == 15
    assert set(PUBLISHED["all"]) <= set(PRESETS)
    assert {network for name in ("monomer", "monomer_ptm", "multimer") for network in PUBLISHED[name]} == set(
        PUBLISHED["all"]
    )
    assert published_networks("model_1") == ("model_1",)
    assert published_networks("model_1_multimer") == ()  # an earlier version, which is not in the archive


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTFOLD_WEIGHTS", "~/w")
    assert weights_folder() == Path.home() / "w"
    monkeypatch.delenv("FASTFOLD_WEIGHTS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert weights_folder() == tmp_path / "fastfold" / "weights"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert weights_folder() == Path.home() / ".cache" / "fastfold" / "weights"


def test_names_stand_for_files(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert weights_files("multimer") == [folder / f"params_model_{i}_multimer_v3.npz" for i in range(1, 6)]
    assert one_weights_file("model_1_ptm") == folder / "params_model_1_ptm.npz"
    assert one_weights_file("mini").name == "mini.safetensors"
    assert weights_files("x.npz") == [Path("x.npz")]  # whether it is there is for who opens it to say
    monkeypatch.chdir(tmp_path)
    Path("multimer").touch()
    assert weights_files("multimer") == [Path("multimer")]  # a file of that name comes first


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "monomer",
            "the weights 'monomer' are not on this machine: .* lacks params_model_1.npz, .*5 files of 373 MB",
        ),
        (
            "monomer_ptm",
            "lacks params_model_2_ptm.npz, .*'fastfold weights download monomer_ptm' fetches them",
        ),
        ("multimr", "did you mean multimer?"),
        ("nothing_at_all", "no such file or .*check the path of the weights"),
    ],
)
def test_what_is_not_there_says_what_to_do(folder: Path, name: str, expected: str) -> None:
    with pytest.raises(WeightsError, match=expected):
        weights_files(name)


def test_several_networks_are_not_one(folder: Path) -> None:
    with pytest.raises(WeightsError, match=r".5 networks.; name one, such as model_1_multimer_v3"):
        one_weights_file("multimer")


def test_a_record_that_is_none_says_so(folder: Path) -> None:
    (folder / SUMS).write_text("nonsense\n")
    with pytest.raises(WeightsError, match=rf"{SUMS}:1: expected '<SHA-256>  <file>'"):
        weights_files("multimer")


def test_a_folder_that_others_keep_is_used_without_a_record(folder: Path) -> None:
    (folder / SUMS).mkdir()
    with pytest.raises(WeightsError, match="cannot be read"):
        read_sums(folder)
    (folder / SUMS).rmdir()
    os.chmod(folder, 0o500)
    try:
        verify_recorded(folder, ["params_model_1_ptm.npz"])
        assert (not (folder / SUMS).exists()) or os.geteuid() == 0  # root may write anywhere
    finally:
        os.chmod(folder, 0o700)


def test_the_record_is_one_that_sha256sum_reads(folder: Path) -> None:
    weights_files("model_1_ptm")
    assert re.fullmatch(r"[0-9a-f]{64}  params_model_1_ptm\.npz\n", (folder / SUMS).read_text())


def test_a_folder_of_files_has_its_pieces_as_they_are(folder: Path) -> None:
    with open_pieces(str(folder), ["params_model_1_ptm.npz"], print) as pieces:
        (piece,) = pieces
        assert (piece.offset, piece.size) == (0, (folder / piece.name).stat().st_size)


@pytest.mark.long
def test_commands_and_the_api_find_them(folder: Path, cli: CommandLine) -> None:  # noqa: F811
    done = cli.infer(
        cli.fasta({"T1": "MKTAY:MKT"}),
        weights=[Path("multimer")],
        settings=["--num-recycles", "0", "--no-plots"],
    )
    assert done.code == 0, done.err
    assert (
        len(
            [
                name
                for name in cli.names()
                if re.fullmatch(r"T1_rank_00\d_model_\d_multimer_v3_seed_0\.pdb", name)
            ]
        )
        == 5
    )
    assert fastfold.load_model("model_1_ptm", device="cpu").name == "model_1_ptm"
    found = fastfold.predict_many({"q": "MKT:MKT"}, "multimer", num_recycles=0)["q"]
    assert len(found) == 5
    assert "params_model_1_ptm.npz" in cli.run("weights", "info", "model_1_ptm").out
    done = cli.infer(cli.fasta({"T1": "MKTAY"}), weights=[Path("monomer")])
    assert done.code == 1
    assert "'fastfold weights download monomer' fetches them" in done.err


def test_the_command_says_what_it_knows(folder: Path, cli: CommandLine) -> None:  # noqa: F811
    done = cli.run("weights", "download", "multimer")
    assert done.code == 0, done.err
    assert done.out.split() == [str(path) for path in weights_files("multimer")]
    assert "CC BY 4.0" in done.err
    assert "already present and verified" in done.err
    assert cli.run("weights", "download", "model_1_ptm", "--quiet").err == ""
    done = cli.run("weights", "download", "model_6")
    assert (
        done.code,
        "'model_6' is not published: give monomer, monomer_ptm, multimer, all" in done.err,
    ) == (2, True)
