"""``fastfold serve`` refuses what would be unsafe or cannot work before it listens, and serves until a signal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

from fastfold.inference.request import InferRequest
from fastfold.inference.workers.options import ScreenOptions
from fastfold.products.serve import Client
from fastfold.products.serve.options import ServeOptions
from fastfold.products.serve.server import run_server, serve
from tests.helpers.command_line import CommandLine
from tests.helpers.forked import fork_command
from tests.helpers.screens import workers_of


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--host", "0.0.0.0"], "requests need tokens"),
        (["--port", "70000"], "--port: '70000' is not a whole number from 0 to 65535"),
        (["--tokens", "missing.txt"], "missing.txt"),
        (["--host", "example.org"], "expected an IP address"),
        (["--max-body", "many"], "not an amount of memory"),
        (["--weights", "missing.npz"], "missing.npz"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_served(
    cli: CommandLine, given: list[str], message: str
):
    done = cli.run("serve", "--data", cli.folder / "data", "--port", "0", *given)
    assert done.code == (1 if "missing" in given[1] else 2)
    assert message in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


def test_limits_of_jobs_reach_the_workers(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    found: list[ScreenOptions] = []
    monkeypatch.setattr("fastfold.products.serve.server.serve", lambda *arguments: found.append(arguments[2]))
    limits = ("--time-limit", "15m", "--memory-limit", "2GiB", "--workers", "3")
    assert cli.run("serve", "--data", cli.folder, *limits).code == 0
    assert found == [ScreenOptions(workers=3, time_limit=900.0, memory_limit=2 * 2**30)]


def test_jobs_with_limits_are_sent_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found: list[int] = []
    monkeypatch.setattr(f"{run_server.__module__}._backend", lambda *arguments: None)
    monkeypatch.setattr(
        f"{run_server.__module__}.run_server", lambda options, *_: found.append(options.group)
    )
    for where in (ScreenOptions(), ScreenOptions(time_limit=60.0), ScreenOptions(memory_limit=2**30)):
        options = ServeOptions(tmp_path, port=0, group=4)
        serve(options, InferRequest((), tmp_path), where, print)
    assert found == [4, 1, 1]


def test_a_missing_package_is_named(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fastfold.utils.packages.is_installed", lambda package: package != "uvicorn")
    done = cli.run("serve", "--data", cli.folder)
    assert (done.code, "fastfold serve needs the package uvicorn" in done.err) == (2, True)


def test_a_port_and_a_folder_have_one_server(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    def again(options: object, backend: object, listener: socket.socket, say: object) -> None:
        port = str(listener.getsockname()[1])
        done = cli.run("serve", "--data", cli.folder / "a", "--port", "0")
        assert "another server uses" in done.err
        done = cli.run("serve", "--data", cli.folder / "b", "--port", port)
        assert f"cannot listen on 127.0.0.1 port {port}" in done.err

    monkeypatch.setattr(f"{run_server.__module__}.run_server", again)
    assert cli.run("serve", "--data", cli.folder / "a", "--port", "0").code == 0


@pytest.mark.slow
def test_a_server_folds_as_infer_does_and_ends_in_order(tmp_path: Path):
    port = free_port()
    # Jobs of a group share passes, and differ from single folds by rounding.
    server = fork_command("serve", "--data", tmp_path / "data", "--port", str(port), "--group", "1")
    try:
        client = Client(f"http://127.0.0.1:{port}", patience=120)
        jobs = [client.submit("MKVLAAGIVG"[:n], settings={"num_recycles": 1}) for n in (10, 9)]
        found = [client.wait(job["id"]) for job in jobs]
        assert [job["state"] for job in found] == ["done", "done"]
        client.download(found[0], tmp_path / "served")
    finally:
        server.send_signal(signal.SIGTERM)
        start = time.monotonic()
        code = server.wait(60)
    assert code == 128 + signal.SIGTERM
    assert time.monotonic() - start < 30
    fasta = tmp_path / "query.fasta"
    fasta.write_text(">query\nMKVLAAGIVG\n")
    other = fork_command("infer", fasta, "--out", tmp_path / "infer", "--num-recycles", "1")
    assert other.wait() == 0
    for name in ("query_rank_001_mini_seed_0.pdb", "query_rank_001_mini_seed_0_pae.json"):
        assert (tmp_path / "served" / name).read_bytes() == (tmp_path / "infer" / name).read_bytes()


@pytest.mark.slow
def test_workers_of_a_ray_cluster_fold_and_are_replaced_when_they_are_killed(
    cli: CommandLine, ended: list[subprocess.Popen[str]]
):
    pytest.importorskip("ray")
    port, log = free_port(), cli.folder / "log.txt"
    arguments = [
        "serve",
        "--data",
        cli.folder / "data",
        "--port",
        str(port),
        "--ray",
        "local",
        "--workers",
        "1",
    ]
    with log.open("w") as output:
        # Ray's workers give way to everything else otherwise, and its processes keep pipes open.
        ended.append(cli.start(*arguments, stdout=output, stderr=output, env={"RAY_worker_niceness": "0"}))
    client = Client(f"http://127.0.0.1:{port}", patience=240)
    settings = {"num_recycles": 0, "plots": False}
    first = client.wait(client.submit("MKVLAAGIVG", settings=settings)["id"])
    assert first["state"] == "done", log.read_text()
    assert "in a Ray cluster of 1 machine" in log.read_text()
    (victim,) = workers_of(ended[0].pid)
    os.kill(victim, signal.SIGKILL)
    jobs = [client.submit("MKVLAAGIVG"[:n], settings=settings)["id"] for n in (10, 9)]
    assert [client.wait(job)["state"] for job in jobs] == ["done", "done"], log.read_text()


def free_port() -> int:
    """Return a port of the loopback that no program uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
