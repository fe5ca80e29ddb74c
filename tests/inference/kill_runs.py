"""Kills ``fastfold infer`` at random moments in one folder, over and over, and looks at what is left at the end.

Two processes at a time fold the same targets with several seeds into one folder; each is killed with SIGKILL after a
random time. Then one run finishes. Run it as ``python tests/inference/kill_runs.py [kills]``.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SEQUENCES = {"one": "MKTAYIAKQR", "two": "GSHMAWLPE", "a/b": "MKTAYIAKQRW", "a_b": "MKTAYIAKWW"}
SEEDS = range(40)


def command(fasta: Path, out: Path, weights: Path) -> list[str]:
    """The command that is killed."""
    settings = ["--seeds", f"{SEEDS[0]}-{SEEDS[-1]}", "--num-recycles", "20", "--no-plots", "--quiet"]
    infer = [sys.executable, "-m", "fastfold", "infer", str(fasta), "--out", str(out), *settings]
    return [*infer, "--weights", str(weights)]


def kill_runs(folder: Path, kills: int, seed: int = 0) -> dict[str, int]:
    """Kill runs ``kills`` times, finish, and check.

    Returns:
        How many predictions were there after each kill, on average and at the end.

    Raises:
        AssertionError: A prediction is lost, there twice, or not where its rank says.
    """
    rng = random.Random(seed)
    fasta, out, weights = folder / "in.fasta", folder / "out", folder / "params_model_1_ptm.npz"
    fasta.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in SEQUENCES.items()))
    shutil.copyfile(REPOSITORY / "tests" / "oracles" / "synthetic_monomer" / "params.npz", weights)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}

    def start() -> subprocess.Popen[bytes]:
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(command(fasta, out, weights), env=environment, stdout=nothing, stderr=pipe)

    began = time.monotonic()
    first = start()
    while not list(out.glob("*.pdb")):  # how long a process takes to its first result
        time.sleep(0.05)
    warm = time.monotonic() - began
    running = [first, start()]
    known: set[str] = set()
    for kill in range(kills):
        victim = rng.randrange(2)
        until = time.monotonic() + rng.uniform(0.3, 1.3) * warm
        # On a fast machine all would be finished before the last kill.
        limit = len(SEQUENCES) * len(SEEDS) * (kill + 1) // (kills + 5)
        while time.monotonic() < until and len(finished(out)) < limit:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.1))
        if running[victim].poll() is not None:
            _, said = running[victim].communicate()
            raise AssertionError(f"ended by itself, {len(known)} predictions are finished: {said.decode()}")
        running[victim].send_signal(signal.SIGKILL)
        running[victim].communicate()
        found = finished(out)
        assert known <= found, f"lost: {known - found}"
        known = found
        running[victim] = start()
    for process in running:
        _, said = process.communicate()
        assert process.returncode == 0, said.decode()
    check = subprocess.run(
        command(fasta, out, weights), env=environment, capture_output=True, text=True, check=True
    )
    assert check.stdout.startswith(f"0 folded, {len(SEQUENCES)} finished before"), check.stdout
    return check_folder(out)


def finished(out: Path) -> set[str]:
    """Predictions that are finished, while others are being made."""
    targets = [path for path in (out / ".fastfold").iterdir() if path.suffix != ".tmp" and path.is_dir()]
    return {path.stem for target in targets for path in target.glob("*.json") if path.name != "target.json"}


def check_folder(out: Path) -> dict[str, int]:
    """Every prediction is there once, ranks are right, and no temporary file is left."""
    owners = {}
    for path in out.glob(".fastfold/*/target.json"):
        owner = json.loads(path.read_text())
        owners[owner["record"]] = owner["stem"]
    assert set(owners) == set(SEQUENCES)
    for stem in owners.values():
        scores = sorted(out.glob(f"{stem}_rank_*_scores.json"))
        scores = [path for path in scores if path.name.startswith(f"{stem}_rank_")]
        loaded = [json.loads(path.read_text()) for path in scores]
        assert sorted(one["seed"] for one in loaded) == list(SEEDS), (stem, [path.name for path in scores])
        ranks = [int(path.name.removeprefix(f"{stem}_rank_")[:3]) for path in scores]
        assert ranks == list(range(1, len(SEEDS) + 1)), ranks
        confidences = [one["ranking_confidence"] for one in loaded]
        assert confidences == sorted(confidences, reverse=True), confidences
        for end in (".pdb", ".cif", "_pae.json", "_config.json"):
            assert len(list(out.glob(f"{stem}_rank_*_seed_*{end}"))) == len(SEEDS), (stem, end)
    lines = (out / "summary.tsv").read_text().splitlines()
    assert len(lines) == 1 + len(SEQUENCES) * len(SEEDS)
    assert not list(out.rglob("*.tmp"))
    assert not list(out.rglob("*.new"))
    return {"targets": len(owners), "predictions": len(lines) - 1}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(kill_runs(Path(temporary), int(sys.argv[1]) if len(sys.argv) > 1 else 50))
