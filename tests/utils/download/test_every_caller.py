"""Behind a proxy that cuts every answer after 64 KiB, a file arrives whole or has no final name, with every caller."""

from __future__ import annotations

import gzip
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fastfold.data.databases import download as databases
from fastfold.data.databases.download import download_databases
from fastfold.data.databases.published import find_published
from fastfold.data.search.colabfold.msa_server import TicketServer
from fastfold.errors import ConfigError, NetworkError
from fastfold.evoformer.weights import download as weights
from fastfold.evoformer.weights.download import download_weights
from fastfold.evoformer.weights.published import file_name
from fastfold.products.serve import client as clients
from fastfold.products.serve.client import Client
from fastfold.products.serve.request import RESULTS, JobAnswer, write_answer
from fastfold.utils.download.answers import Retries
from tests.conftest import REPOSITORY
from tests.helpers.cutting_proxy import EVERY, cutting_proxy
from tests.helpers.loopback import Request, loopback, send_file
from tests.helpers.stand_in_msa_server import StandIn, tar_gz
from tests.products.serve.stub import serving
from tests.training.checkpoint.failing_files import FailingFiles, failing_files
from tests.training.checkpoint.test_checkpoints import Run

__all__ = ["failing_files"]

DATA = random.Random(0).randbytes(5 * EVERY)
NETWORK = "model_1_ptm"
NPZ = (REPOSITORY / "tests" / "oracles" / "synthetic_monomer" / "params.npz").read_bytes()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between attempts."""
    for module in (weights, databases, clients):
        monkeypatch.setattr(module, "Retries", partial(Retries, pause=lambda seconds: None))


def files(folder: Path) -> dict[str, bytes]:
    """Files under a final name, with those that are hidden."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".partial")
    return {path.name: path.read_bytes() for path in paths}


def without_ranges(request: Request, data: bytes) -> None:
    request.send(200, data, {"ETag": '"1"'})


@pytest.mark.parametrize("ranges", [True, False])
def test_weights(tmp_path: Path, ranges: bool) -> None:
    archive = tar_gz({file_name(NETWORK): NPZ})
    with (
        loopback(lambda r: (send_file if ranges else without_ranges)(r, gzip.decompress(archive))) as server,
        cutting_proxy(server.url) as proxy,
    ):
        fetch = partial(download_weights, [NETWORK], mirror=proxy.url, folder=tmp_path)
        if ranges:
            fetch()
        else:
            with pytest.raises(NetworkError, match="gave up after 6 attempts"):
                fetch()
    assert proxy.cuts > 4
    assert files(tmp_path).get(file_name(NETWORK)) == (NPZ if ranges else None)


@pytest.mark.parametrize("ranges", [True, False])
def test_databases(tmp_path: Path, ranges: bool) -> None:
    packed = gzip.compress(DATA)
    with (
        loopback(lambda r: (send_file if ranges else without_ranges)(r, packed)) as server,
        cutting_proxy(server.url) as proxy,
    ):
        fetch = partial(download_databases, [find_published("uniref90")], tmp_path, mirror=proxy.url)
        if ranges:
            fetch()
        else:
            with pytest.raises(NetworkError, match="gave up after 6 attempts"):
                fetch()
    assert proxy.cuts > 4
    assert files(tmp_path).get("uniref90.fasta") == (DATA if ranges else None)
    assert "uniref90.fasta.gz" not in files(tmp_path)


@pytest.mark.parametrize("ranges", [True, False])
def test_alignments_and_template_hits_of_an_msa_server(ranges: bool) -> None:
    stand_in = StandIn()

    def answer(request: Request) -> None:
        if request.path.startswith("/ticket"):
            stand_in(request)
        else:
            (send_file if ranges else without_ranges)(request, DATA)

    with loopback(answer) as server, cutting_proxy(server.url) as proxy:
        client = TicketServer(proxy.url, pause=lambda seconds: None)
        for fetch in (
            lambda: client.result("msa", ">101\nMKVL\n", "env"),
            lambda: client.structures(["1abc_A"]),
        ):
            if ranges:
                assert fetch() == DATA
            else:
                with pytest.raises(NetworkError, match=r"gave up after 6 attempts.*results are kept"):
                    fetch()


def test_a_ticket_that_is_cut_is_no_ticket() -> None:
    body = json.dumps({"status": "COMPLETE", "id": "t", "words": "a" * EVERY}).encode()
    with loopback(lambda request: request.send(200, body)) as server, cutting_proxy(server.url) as proxy:
        client = TicketServer(proxy.url, pause=lambda seconds: None)
        with pytest.raises(NetworkError, match=r"closed after .* gave up after 6 attempts"):
            client.result("msa", ">101\nMKVL\n", "env")


def fold(number: int, task: Any) -> Any:
    """Answer each job with a large file and a description that is larger than a connection."""
    from fastfold.inference.workers.job import JobResult

    for folder in task.job.payload:
        (folder / RESULTS).mkdir()
        (folder / RESULTS / "model.pdb").write_bytes(DATA)
        (folder / RESULTS / "empty.txt").write_bytes(b"")
        write_answer(folder, JobAnswer("done", "folded", {}, ["empty.txt", "model.pdb"]))
    return JobResult("done")


def test_results_of_a_server(tmp_path: Path) -> None:
    with serving(tmp_path / "data", fold) as (url, _), cutting_proxy(url) as proxy:
        client = Client(proxy.url)
        job = client.wait(client.submit("MKV")["id"])
        client.download(job, tmp_path / "out")
        assert proxy.cuts >= 5
    assert files(tmp_path / "out") == {"model.pdb": DATA, "empty.txt": b""}


def test_results_that_cannot_be_resumed(tmp_path: Path) -> None:
    with (
        loopback(lambda request: without_ranges(request, DATA)) as server,
        cutting_proxy(server.url) as proxy,
    ):
        job = {"id": "0" * 32, "files": ["model.pdb"]}
        with pytest.raises(NetworkError, match="gave up after 2 attempts"):
            Client(proxy.url, patience=1).download(job, tmp_path / "out")
    assert files(tmp_path / "out") == {}


@pytest.mark.parametrize("has_sums", [True, False])
def test_checkpoints_behind_a_url(
    failing_files: FailingFiles, monkeypatch: pytest.MonkeyPatch, has_sums: bool
) -> None:
    """A driver that ends a read early without an error; the checkpoint before is used instead."""
    run = Run("failing://bucket/a")
    run.save(1)
    run.save(2)
    for step in (1, 2) if not has_sums else ():  # a checkpoint of format 1 has lengths alone
        manifest = f"failing://bucket/a/step_{step:08}/state.json"
        content = json.loads(failing_files.cat_file(manifest))
        content |= {"format": 1, "files": {name: one["size"] for name, one in content["files"].items()}}
        with failing_files.open(manifest, "wb") as file:
            file.write(json.dumps(content).encode())
    failing_files.cut = {"step_00000002": 10}
    assert run.checkpoints.find("auto") == "failing://bucket/a/step_00000001"
    (said,) = run.said
    assert "step_00000002 is left out: it cannot be read: " in said
    assert "it is truncated" in said
    with pytest.raises(ConfigError, match="cannot be resumed from: it cannot be read"):
        run.checkpoints.find("failing://bucket/a/step_00000002")
