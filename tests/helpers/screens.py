"""Runs of ``fastfold screen`` that are killed, and counting what was folded."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path


def random_targets(number: int, *, shortest: int = 8, longest: int = 16) -> dict[str, str]:
    """Sequences by name, of lengths that repeat."""
    rng = random.Random(number)
    lengths = range(shortest, longest + 1)
    return {
        f"t{k}": "".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=lengths[k % len(lengths)]))
        for k in range(number)
    }


def descendants(pid: int) -> list[int]:
    """All processes below one (Linux)."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def workers_of(pid: int, *, seconds: float = 240.0) -> list[int]:
    """The worker processes below a driver, as soon as there is one; they are spawned, and have PyTorch loaded."""

    found: list[int] = []

    def look() -> bool:
        found[:] = [child for child in descendants(pid) if is_worker(child)]
        return bool(found)

    wait_for(look, seconds)
    return found


def is_worker(pid: int) -> bool:
    """Whether a process is a spawned one that has got as far as to load PyTorch."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"spawn_main" in command and "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def runs(pid: int) -> bool:
    """Whether there is a process of this number that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: There was none within the time.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing within {seconds:.0f} s")


def predictions(out: Path) -> list[tuple[str, int]]:
    """Stem and seed of each prediction in a folder of results, as the files have them."""
    found = []
    for path in sorted(out.glob("*_scores.json")):
        scores = json.loads(path.read_text())
        found.append((path.name.partition("_rank_")[0], scores["seed"]))
    return found


def leftovers(out: Path) -> list[Path]:
    """What should not be there at the end of a run."""
    return [*out.rglob("*.tmp"), *out.rglob("*.new")]
