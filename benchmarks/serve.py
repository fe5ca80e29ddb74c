"""Latency of a server: submission and answer, at the median and the 99th percentile, with and without groups.

Usage: python benchmarks/serve.py [--requests 64] [--clients 8] [--residues 20 60] [--groups 1 8] [--json OUT]

Starts ``fastfold serve`` with the small network on a free port, once for each size of a group. Each client submits its
share of the requests at once and waits for the answers. Sequences and lengths are random and the same in each run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastfold.products.serve import Client
from fastfold.utils.atomic_files import write_atomic

SETTINGS = {"num_recycles": 0, "plots": False}


def free_port() -> int:
    """Return a port of the loopback that no program uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that is not below a share of all values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def client(address: str, sequences: list[str]) -> tuple[list[float], list[float]]:
    """Submit sequences and wait; return the seconds of each submission and until each answer."""
    server, submissions, answers = Client(address), [], []
    waiting = []
    for sequence in sequences:
        start = time.perf_counter()
        job = server.submit(sequence, settings=SETTINGS)
        submissions.append(time.perf_counter() - start)
        waiting.append((job["id"], job["submitted"]))
    for job, submitted in waiting:
        found = server.wait(job)
        assert found["state"] == "done", found["text"]
        answers.append(found["finished"] - submitted)
    return submissions, answers


def measure(options: argparse.Namespace, group: int) -> dict[str, Any]:
    """Measure a server with one size of a group."""
    draw = random.Random(0)
    low, high = options.residues
    sequences = [
        "".join(draw.choices("ACDEFGHIKLMNPQRSTVWY", k=draw.randint(low, high)))
        for _ in range(options.requests)
    ]
    port = free_port()
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, "-m", "fastfold", "serve", "--data", data, "--port", str(port), "--quiet"]
        server = subprocess.Popen([*command, "--group", str(group)], env=os.environ)
        try:
            address = f"http://127.0.0.1:{port}"
            first = Client(address, patience=120)
            first.wait(first.submit("MKV", settings=SETTINGS)["id"])  # loads the network
            barrier = threading.Barrier(options.clients)

            def run(number: int) -> tuple[list[float], list[float]]:
                barrier.wait()
                return client(address, sequences[number :: options.clients])

            start = time.perf_counter()
            with ThreadPoolExecutor(options.clients) as pool:
                found = list(pool.map(run, range(options.clients)))
            seconds = time.perf_counter() - start
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    submissions = [x for one, _ in found for x in one]
    answers = [x for _, one in found for x in one]
    return {
        "group": group,
        "submission_median": statistics.median(submissions),
        "submission_p99": percentile(submissions, 0.99),
        "answer_median": statistics.median(answers),
        "answer_p99": percentile(answers, 0.99),
        "jobs_per_second": len(answers) / seconds,
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64, metavar="N")
    parser.add_argument("--clients", type=int, default=8, metavar="N")
    parser.add_argument("--residues", type=int, nargs=2, default=[20, 60], metavar=("LOW", "HIGH"))
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 8], metavar="N")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    print("| group | submission, median | 99% | answer, median | 99% | jobs per second |")
    print("|---|---|---|---|---|---|")
    rows = []
    for group in options.groups:
        row = measure(options, group)
        rows.append(row)
        print(
            f"| {group} | {row['submission_median'] * 1e3:.0f} ms | {row['submission_p99'] * 1e3:.0f} ms | "
            f"{row['answer_median']:.1f} s | {row['answer_p99']:.1f} s | {row['jobs_per_second']:.2f} |",
            flush=True,
        )
    if options.json is not None:
        write_atomic(options.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
