"""``fastfold submit`` sends files and settings, waits, and downloads each job to a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

from fastfold.data.targets import Chain, Target, make_chains
from fastfold.errors import ConfigError, InputError
from fastfold.products.serve.commands.submit import check_sendable, parse_settings
from tests.helpers.command_line import CommandLine
from tests.helpers.loopback import Request, loopback
from tests.products.serve.stub import serving

TOKEN = "secret-" * 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("submit")
    tokens = folder / "tokens"
    tokens.write_text(f"ada {TOKEN}\n")
    tokens.chmod(0o600)
    with serving(folder / "data", tokens=tokens) as (address, _):
        yield address


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTFOLD_TOKEN", TOKEN)


def test_records_and_alignments_are_downloaded_to_folders(server: str, cli: CommandLine):
    fasta = cli.fasta({"one": "MKV", "two": "MKVL"})
    a3m = cli.fasta(">q\nMKVLA\n>h\nMK--A\n", "three.a3m")
    done = cli.run("submit", fasta, a3m, "--server", server, "--out", cli.out, "--set", "num_recycles=1")
    assert done.code == 0, done.err
    folders = sorted(cli.out.iterdir())
    assert [folder.name.rpartition("_")[0] for folder in folders] == ["one", "three", "two"]
    assert (folders[1] / "model.pdb").read_text() == "REMARK MKVLA\n"
    assert done.out.count("results in") == 3
    assert "two: recycle 0/0" in done.err


def test_jobs_are_submitted_first_and_fetched_later(server: str, cli: CommandLine):
    arguments = ("submit", "--sequence", "MKV", "--server", server, "--no-wait")
    assert cli.run(*arguments, "--out", cli.out).code == 0
    assert not cli.out.exists()
    done = cli.run(*arguments)
    job, _, name = done.out.strip().partition("\t")
    assert (done.code, name) == (0, "query")
    done = cli.run("submit", "--job", job, "--server", server, "--out", cli.out, "--quiet")
    assert (done.code, done.err) == (0, "")
    assert len(list(cli.out.glob("query_*/report.html"))) == 1


def test_a_server_does_not_choose_the_folder(cli: CommandLine):
    """A server of somebody else, whose jobs have names that lead elsewhere or control a terminal."""
    job = {"id": "0" * 32, "name": "../../x\x1b[2J", "state": "done", "position": None, "files": ["a"]}
    view = json.dumps(job | {"text": "t", "scores": {}}).encode()

    def answer(request: Request) -> None:
        if request.path.endswith("/events"):
            request.send(200, b"event: state\ndata: " + view + b"\n\n")
        else:
            request.send(200, b"content" if "/files/" in request.path else view)

    with loopback(answer) as server:
        done = cli.run("submit", "--job", "0" * 32, "--server", server.url, "--out", cli.out)
    assert done.code == 0, done.err
    assert "\x1b" not in done.out + done.err
    assert [str(path.relative_to(cli.out)) for path in cli.out.rglob("*")] == [
        "x_2J_00000000",
        "x_2J_00000000/a",
    ]


def test_a_refused_target_does_not_stop_the_others(server: str, cli: CommandLine):
    fasta = cli.fasta({"long": "M" * 501, "short": "MKV"})
    done = cli.run("submit", fasta, "--server", server, "--out", cli.out, "--quiet")
    assert done.code == 1
    assert "error: long: record 'long': 501 residues would need more memory" in done.err
    assert "short: MKV" in done.out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no input given"),
        (["--sequence", "MKV"], "--out"),
        (["--sequence", "MKV", "--out", "x", "--set", "seeds"], "expected NAME=VALUE"),
        (["--sequence", "MKV", "--out", "x", "--token", "wrong"], "missing or unknown token"),
        (["--job", "../x", "--out", "x"], "no such address"),
        (["missing.fasta", "--out", "x"], "missing.fasta"),
        (["--sequence", "MKV", "--out", "x", "--set", "device=cuda"], "settings.device: Extra inputs"),
    ],
)
def test_mistakes_are_one_line(server: str, cli: CommandLine, given: list[str], message: str):
    done = cli.run("submit", *given, "--server", server)
    assert done.code == (2 if message in ("no input given", "--out", "expected NAME=VALUE") else 1)
    assert message in done.err
    assert len(done.err.splitlines()) == 1
    assert not Path("x").exists()


BOLTZ = """\
version: 1
sequences:
  - protein: {id: A, sequence: MKTAYIAKQR, msa: empty}
"""
AF3 = {
    "name": "q",
    "modelSeeds": [7],
    "sequences": [{"protein": {"id": "A", "sequence": "MKTAYIAKQR"}}],
    "dialect": "alphafold3",
    "version": 1,
}


@pytest.mark.parametrize(
    ("name", "text", "lost"),
    [
        ("q.yaml", BOLTZ, "alignments"),
        ("q.json", json.dumps(AF3), "seeds"),
    ],
)
def test_what_a_server_would_not_see_is_refused(
    server: str, cli: CommandLine, name: str, text: str, lost: str
):
    done = cli.run("submit", cli.fasta(text, name), "--server", server, "--out", cli.out)
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert f"without its {lost}" in line
    assert "fastfold infer" in line
    assert not cli.out.exists()


def test_parts_of_a_protein_are_refused():
    part = Target("q", (Chain("A", "KTA", whole="MKTAY", regions=((2, 4),)),), "", "q", ())
    with pytest.raises(InputError, match="without its names, numbers or ranges of residues"):
        check_sendable(part, ["KTA"])
    check_sendable(replace(part, chains=make_chains(["KTA"])), ["KTA"])


def test_every_part_of_a_target_is_sent_or_checked():
    """A new field is one that ``submit`` has to send, or to refuse."""
    names = {"name", "chains", "source", "record", "warnings", "alignments", "alignment_files"}
    checked = {"scored_structure", "templates", "forced_templates", "seeds"}
    used_up = {"partners"}  # a screen tells targets apart by them, and folds without them
    assert {field.name for field in fields(Target)} == names | checked | used_up


def test_settings_are_numbers_lists_and_words():
    texts = [
        "num_recycles=6",
        "seeds=0-2",
        "max_msa=16:32",
        "relax=best",
        "dropout=true",
        "stop_at_score=80.5",
    ]
    assert parse_settings(texts) == {
        "num_recycles": 6,
        "seeds": [0, 1, 2],
        "max_msa": [16, 32],
        "relax": "best",
        "dropout": True,
        "stop_at_score": 80.5,
    }
    with pytest.raises(ConfigError, match="expected NAME=VALUE"):
        parse_settings(["../x=1"])


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"alignments": ()}, "its alignments, because"),
        ({"templates": ()}, "its templates, because"),
        ({"forced_templates": ("t.cif",)}, "its templates, because"),
        ({"seeds": (3,)}, "its seeds, because"),
        ({"templates": (), "seeds": (3,)}, "its templates and seeds, because"),
    ],
)
def test_each_part_of_a_target_is_refused_by_its_name(changes: dict[str, Any], lost: str) -> None:
    target = Target("q", make_chains(["KTA"]), "", "q", ())
    check_sendable(target, ["KTA"])
    with pytest.raises(InputError, match=lost):
        check_sendable(replace(target, **changes), ["KTA"])
