"""Search throughput against HMMER's own jackhmmer, in cells (residues of query times residues of database) per second.

Both search one database for equal queries with AlphaFold's settings, one after the other in one run and on equally many
threads: jackhmmer once per query, as AlphaFold calls it, and FastFold with all queries, including the start of its
workers and the reading of the database. Rows, names and reference columns of all alignments are compared byte by byte.

    python benchmarks/search.py --data DATA --json search.json

DATA is a folder of structures/msas/*.a3m.gz; their distinct sequences without gaps are the database, and first rows of
some are the queries. Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fastfold.data.search.database import SequenceDatabase
from fastfold.data.search.hmmer import HmmerEngine
from fastfold.data.search.local import local_engines
from fastfold.data.search.settings import HmmerSettings, SearchSources
from fastfold.utils.units import parse_bytes

FLAGS = (
    "--noali",
    "--F1",
    "0.0005",
    "--F2",
    "0.00005",
    "--F3",
    "0.0000005",
    "--incE",
    "0.0001",
    "-E",
    "0.0001",
)
TARGET = 1.5
"""Target of FastFold's throughput over jackhmmer's, with two processes."""


def make_database(data: Path, path: Path) -> tuple[int, int]:
    """Write the distinct sequences of all alignments; return the number of sequences and of their residues."""
    no_gaps = str.maketrans("", "", "-.")
    names: dict[str, str] = {}
    for file in sorted((data / "structures/msas").glob("*.a3m.gz")):
        for record in gzip.decompress(file.read_bytes()).decode().split(">")[1:]:
            header, *lines = record.splitlines()
            names.setdefault("".join(lines).translate(no_gaps).upper(), header)
    names.pop("", None)
    with path.open("w") as out:
        for number, (sequence, header) in enumerate(names.items()):
            out.write(f">t{number:06d} {header}\n{sequence}\n")
    return len(names), sum(map(len, names))


def choose_queries(data: Path, number: int, *, longest: int | None = None) -> dict[str, str]:
    """Choose first rows of ``number`` alignments, spread evenly over those of at most ``longest`` residues."""
    queries = {}
    for file in sorted((data / "structures/msas").glob("*.a3m.gz")):
        record = gzip.decompress(file.read_bytes()).decode().split(">")[1]
        queries[file.name.removesuffix(".a3m.gz")] = "".join(record.splitlines()[1:]).upper()
    names = [name for name, sequence in queries.items() if longest is None or len(sequence) <= longest]
    chosen = [names[i * len(names) // number] for i in range(number)]
    return {name: queries[name] for name in chosen}


def digest(text: bytes) -> bytes:
    """Hash a Stockholm file by SHA-256, without the lines that name the program and its version."""
    whole = hashlib.sha256()
    for line in io.BytesIO(text):
        if not line.startswith(b"#=GF"):
            whole.update(line)
    return whole.digest()


class Usage:
    """Seconds, processor seconds and peak memory of a block."""

    def __enter__(self) -> Usage:
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._before = self._processor()
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.processor_seconds = self._processor() - self._before
        self._ended.set()
        self._thread.join()

    @staticmethod
    def _processor() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in used)

    def _watch(self) -> None:
        """Sample the proportional memory of this process and its children; shared pages count once."""
        own = psutil.Process()
        while not self._ended.wait(0.1):
            total = 0
            for process in (own, *own.children(recursive=True)):
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.peak_bytes = max(self.peak_bytes, total)


def run_jackhmmer(
    program: str, database: Path, queries: dict[str, str], cpus: int, folder: Path
) -> dict[str, bytes]:
    """Run jackhmmer, and return digests of its alignments."""
    found = {}
    for name, sequence in queries.items():
        query, out = folder / "query.fasta", folder / "out.sto"
        query.write_text(f">query\n{sequence}\n")
        command = [
            program,
            "-o",
            os.devnull,
            "-A",
            str(out),
            *FLAGS,
            "-N",
            "1",
            "--cpu",
            str(cpus),
            str(query),
            str(database),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found[name] = digest(out.read_bytes())
    return found


def run_fastfold(database: Path, queries: dict[str, str], cpus: int, memory: int) -> dict[str, bytes]:
    """Run FastFold's engine, and return digests of its alignments."""
    engine = HmmerEngine(
        HmmerSettings(), SequenceDatabase("db", database), num_workers=cpus, memory_bytes=memory
    )
    results = engine.search(list(queries.values()), lambda step: None)
    digests = {found.sequence: digest(next(iter(found.files.values()))) for found in results}
    return {name: digests[sequence] for name, sequence in queries.items()}


def measure(
    what: dict[str, Callable[[], dict[str, bytes]]], repeats: int
) -> tuple[dict[str, list[Usage]], dict[str, dict[str, bytes]]]:
    """Run all programs in turn, several times."""
    usages: dict[str, list[Usage]] = {name: [] for name in what}
    found: dict[str, dict[str, bytes]] = {}
    for _ in range(repeats):
        for name, work in what.items():
            with Usage() as usage:
                found[name] = work()
            usages[name].append(usage)
            print(
                f"{name}: {usage.seconds:.1f} s, {usage.processor_seconds:.1f} s of the processors",
                flush=True,
            )
    return usages, found


def main() -> int:
    """Measure, compare and print; return 1 if an alignment differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with structures/msas/*.a3m.gz")
    parser.add_argument("--queries", type=int, default=32, help="number of queries (default 32)")
    parser.add_argument("--cpu", type=int, default=2, help="processes and threads (default 2)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of each program; medians count (default 3)"
    )
    parser.add_argument(
        "--memory", default="4GiB", help="budget when the database stays in memory (default 4GiB)"
    )
    parser.add_argument("--tight", default="300MiB", help="budget when it is read again (default 300MiB)")
    parser.add_argument(
        "--jackhmmer", default=shutil.which("jackhmmer"), help="the program (default: on PATH)"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    if options.jackhmmer is None:
        parser.error("jackhmmer is not on PATH: install HMMER, or name the program with --jackhmmer")
    queries = choose_queries(options.data, options.queries)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        database = folder / "database.fasta"
        num_sequences, num_residues = make_database(options.data, database)
        # Reads its beginning; the rest was written just before and is in the page cache.
        local_engines(SearchSources((str(database),)))
        budgets = {
            "fastfold": parse_bytes(options.memory),
            f"fastfold within {options.tight}": parse_bytes(options.tight),
        }
        what: dict[str, Callable[[], dict[str, bytes]]] = {
            "jackhmmer": lambda: run_jackhmmer(options.jackhmmer, database, queries, options.cpu, folder)
        }
        for name, budget in budgets.items():
            what[name] = lambda budget=budget: run_fastfold(database, queries, options.cpu, budget)  # type: ignore[misc]
        usages, found = measure(what, options.repeats)
    cells = sum(map(len, queries.values())) * num_residues
    print(
        f"{num_sequences:,} sequences, {num_residues:,} residues; {len(queries)} queries, "
        f"{cells / 1e9:.0f} billion cells"
    )
    figures: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "cpu": options.cpu}
    differ = 0
    print(
        "| program | billion cells/s | over jackhmmer | processor seconds | peak memory | budget | alignments equal |"
    )
    print("|---|---|---|---|---|---|---|")
    base = statistics.median(usage.seconds for usage in usages["jackhmmer"])
    for name, runs in usages.items():
        seconds = statistics.median(usage.seconds for usage in runs)
        equal = sum(own == found["jackhmmer"][query] for query, own in found[name].items())
        differ += len(queries) - equal
        row = {
            "cells_per_second": cells / seconds,
            "ratio": base / seconds,
            "processor_seconds": statistics.median(usage.processor_seconds for usage in runs),
            "peak_bytes": max(usage.peak_bytes for usage in runs),
            "budget_bytes": budgets.get(name),
            "equal": equal,
        }
        figures[name] = row
        budget = f"{row['budget_bytes'] >> 20} MiB" if row["budget_bytes"] else ""
        print(
            f"| {name} | {row['cells_per_second'] / 1e9:.2f} | {row['ratio']:.2f} | {row['processor_seconds']:.1f} | "
            f"{row['peak_bytes'] >> 20} MiB | {budget} | {equal} of {len(queries)} |"
        )
    reached = figures["fastfold"]["ratio"]
    print(
        f"aim: {TARGET} times jackhmmer with 2 processes: {'met' if reached >= TARGET else 'not met'} ({reached:.2f})"
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
