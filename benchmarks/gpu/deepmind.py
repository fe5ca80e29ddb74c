"""Part of ``whole_folds.py`` that folds by DeepMind's program, and the compilation that precedes all parts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu import timing
from benchmarks.gpu.timing import PASSES, SITE, Line, Sizes, random_target, reported

CACHE = Path(tempfile.gettempdir()) / "fastfold_jax_cache"
"""Folder of the programs that JAX compiled, which other processes load."""


def missing() -> str | None:
    """Return the reason why DeepMind's program cannot run, or None."""
    if not _checkout().is_dir():
        return "no checkout in .gpu/alphafold"
    return None if importlib.util.find_spec("jax") else "jax is not installed"


def alphafold(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield folds of DeepMind's program, if JAX is installed and ``.gpu/alphafold`` has its checkout."""
    if reason := missing():
        yield {"skipped": reason}
        return

    def timed(residues: int) -> Iterator[Line]:
        with tempfile.TemporaryDirectory() as folder:
            versions, answer = answers(start(residues, Path(folder), device, sizes))
        for fold, seconds in (("first", answer["first"]), ("second", answer["seconds"])):
            yield versions | {"fold": fold, "passes": PASSES, "fold_s": round(seconds, 3)}

    for residues in sizes.float32_lengths:
        yield from reported(
            {"program": "AlphaFold", "network": "model_3", "residues": residues}, timed(residues)
        )


def start(
    residues: int, folder: Path, device: str, sizes: Sizes, *, compile_only: bool = False
) -> subprocess.Popen[str]:
    """Start a fold of a random target by DeepMind's program, or only its compilation, with files in a folder."""
    import numpy as np

    from fastfold import model_config
    from fastfold.data.features.pipeline import featurize
    from fastfold.data.targets import target_from_sequence

    sequence, msa = random_target(residues, sizes.rows)
    target = target_from_sequence(sequence, "random")
    features = featurize(target.chains, [([msa], [])], model_config("model_3")).stack(PASSES)
    features["seq_length"] = np.full(PASSES, residues, np.int32)
    path = folder / f"features_{residues}.npz"
    np.savez(path, **features)
    request = {
        "case": "monomer",
        "blocks": sizes.blocks,
        "passes": PASSES,
        "subbatch": 4,
        "features": str(path),
        "compile_only": compile_only,
    }
    requests = folder / f"request_{residues}.json"
    requests.write_text(json.dumps(request) + "\n")
    packages = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "PYTHONPATH": packages,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    environment |= {} if device == "cuda" else {"JAX_PLATFORMS": "cpu"}
    program = timing.REPOSITORY / "benchmarks" / "alphafold_program.py"
    with requests.open() as lines:
        return subprocess.Popen(
            [sys.executable, str(program), str(_checkout()), "wall"],
            env=environment,
            stdin=lines,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def answers(program: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Wait for DeepMind's program; return its versions and its answer.

    Raises:
        RuntimeError: The program failed.
    """
    output, errors = program.communicate()
    if program.returncode:
        raise RuntimeError(f"AlphaFold's program failed: {errors[-400:]}")
    return [json.loads(line) for line in output.splitlines()]


def compilations(device: str, sizes: Sizes, folder: Path) -> dict[int, subprocess.Popen[str]]:
    """Start the compilation of each fold of :func:`alphafold`, by residues; none if the program cannot run."""
    if missing():
        return {}
    return {
        residues: start(residues, folder, device, sizes, compile_only=True)
        for residues in sizes.float32_lengths
    }


def _checkout() -> Path:
    return timing.REPOSITORY / ".gpu" / "alphafold"
