"""Commands that talk to a server, each with the server and a proxy in between; and the server of folds itself."""

from __future__ import annotations

import gzip
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from fastfold.errors import FastFoldError
from fastfold.evoformer.weights.published import ARCHIVE, file_name
from fastfold.inference.workers.job import JobResult, Task
from fastfold.products.serve import Client
from fastfold.products.serve.request import RESULTS, JobAnswer, write_answer
from fastfold.products.serve.worker import result_files
from tests.conftest import REPOSITORY
from tests.helpers.command_line import Outcome
from tests.helpers.faults.commands import NETWORKS, SEQUENCE, WEIGHTS, packed_databases, write_targets
from tests.helpers.faults.disk import Fault
from tests.helpers.faults.proxy import Proxy, forwarding
from tests.helpers.faults.table import Case, Table, finish, start
from tests.helpers.loopback import loopback, send_file
from tests.helpers.stand_in_msa_server import StandIn, msa_server, tar_gz
from tests.products.serve.stub import listener, serving

Service = Callable[[Path], AbstractContextManager[Case]]
"""Function from a folder for a server's data to a command that talks to the server through a proxy."""

_ANSWER_S = 90.0


def _through(proxy: Proxy, case: Case) -> Case:
    """Return a command whose connections break by a fault: cut after so many bytes, or slow."""

    def run(table: Table, fault: Fault) -> Outcome:
        proxy.cut_after = fault.step if fault.kind == "cut" else None
        proxy.piece, proxy.delay_s = (fault.step, 0.005) if fault.kind == "slow" else (1 << 16, 0.0)
        before = proxy.cuts
        done = finish(start(table, fault))
        assert fault.kind != "cut" or proxy.cuts > before, "no connection was cut"
        return done

    return replace(case, run=run)


def _nothing(inputs: Path) -> None:
    """Prepare no inputs."""


@contextmanager
def databases(folder: Path) -> Iterator[Case]:
    """Yield a download of databases of all kinds."""
    files = packed_databases()
    names = ("uniref90", "uniref30", "pdb_seqres")
    with (
        loopback(lambda request: send_file(request, files[request.path[1:]])) as server,
        forwarding(server.url) as proxy,
    ):
        case = Case(
            "databases download",
            _nothing,
            lambda inputs, out: ["databases", "download", *names, "--dir", out, "--mirror", proxy.url],
        )
        yield _through(proxy, case)


@contextmanager
def weights(folder: Path) -> Iterator[Case]:
    """Yield a download of two networks from an archive like the published one."""
    npz = (REPOSITORY / "tests" / "oracles" / "synthetic_monomer" / "params.npz").read_bytes()
    archive = gzip.decompress(tar_gz({file_name(name): npz for name in NETWORKS}))
    with (
        loopback(lambda request: send_file(request, archive)) as server,
        forwarding(server.url) as proxy,
    ):
        case = Case(
            "weights download",
            _nothing,
            lambda inputs, out: ["weights", "download", *NETWORKS, "--mirror", f"{proxy.url}/{ARCHIVE}"],
            environment=lambda inputs, out: {"FASTFOLD_WEIGHTS": str(out)},
        )
        yield _through(proxy, case)


@contextmanager
def search(folder: Path) -> Iterator[Case]:
    """Yield a search by an MSA server, whose packed answer has 150 kB."""
    noise = {"noise.bin": random.Random(0).randbytes(150_000)}
    with msa_server(StandIn(extra=noise)) as server, forwarding(server.url) as proxy:
        case = Case(
            "search",
            write_targets,
            lambda inputs, out: ["search", inputs / "one.fasta", "--msa-server", proxy.url, "--out", out],
        )
        yield _through(proxy, case)


@contextmanager
def submit(folder: Path) -> Iterator[Case]:
    """Yield the download of a job's files from a server that folds nothing."""
    with serving(folder, _large_answer) as (address, _), forwarding(address) as proxy:
        job = Client(address).submit(SEQUENCE, name="one")["id"]
        case = Case(
            "submit",
            _nothing,
            lambda inputs, out: ["submit", "--job", job, "--server", proxy.url, "--out", out],
        )
        yield _through(proxy, case)


def _large_answer(number: int, task: Task) -> JobResult:
    """Answer with files of 200 kB."""
    for job in task.job.payload:
        results = job / RESULTS
        results.mkdir()
        (results / "model.pdb").write_text("REMARK\n" * 30_000 + "END\n")
        (results / "scores.json").write_text("[" + "1.25, " * 30_000 + "0]\n")
        write_answer(job, JobAnswer("done", "done", {"plddt": 90.0}, result_files(job)))
    return JobResult("done")


def _serve(table: Table, fault: Fault) -> Outcome:
    """Serve until a job is answered and downloaded, as a client that tries again; end a full disk after a while.

    A job that failed by a fault is submitted again without one.
    """
    with listener() as free:
        port = free.getsockname()[1]
    server = start(table, fault, "--port", str(port))
    client = Client(f"http://127.0.0.1:{port}", patience=1.0)
    key, text, began = "first-job", "no answer", time.monotonic()
    while server.poll() is None and time.monotonic() < began + _ANSWER_S:
        if fault.kind == "ENOSPC" and len(fault.steps()) >= fault.step + 8:
            fault.end()
        try:
            job = client.submit(SEQUENCE, key=key, settings={"num_recycles": 0, "plots": False})
            if job["state"] == "done":
                client.download(job, table.out)
                break
            if job["state"] == "failed" and fault.kind == "none":
                key = "second-job"
            elif job["state"] == "failed":
                text = job["text"]
                break
        except FastFoldError as error:
            text = str(error)
        time.sleep(0.1)
    else:
        server.kill()
    server.send_signal(signal.SIGTERM)
    done = finish(server)
    if done.code == 128 + signal.SIGTERM:
        is_done = (table.out / "report.html").exists()
        return replace(done, code=0) if is_done else replace(done, code=1, err=f"{done.err}error: {text}\n")
    return done


SERVE = Case(
    "serve",
    write_targets,
    lambda inputs, out: [
        *("serve", "--data", out.with_name("data"), "--weights", inputs / WEIGHTS, "--device", "cpu"),
        *("--workers", "1", "--group", "1"),
    ],
    ignored=r"^data/",
    run=_serve,
)
SERVICES: dict[str, Service] = {
    "databases download": databases,
    "weights download": weights,
    "search": search,
    "submit": submit,
}
