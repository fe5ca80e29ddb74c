"""Files of an optimisation: the state from which it continues, and the film of its steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from fastfold._version import __version__
from fastfold.errors import ConfigError, OutputError
from fastfold.products.design.config import DesignConfig
from fastfold.products.design.optimize import DesignState
from fastfold.products.design.tasks.task import DesignTask
from fastfold.protein.io.pdb_writer import pdb_chain_ids
from fastfold.protein.labels import AuthorNames
from fastfold.protein.metrics.tm_score import superpose
from fastfold.protein.protein import chain_name
from fastfold.utils.atomic_files import write_atomic
from fastfold.utils.foreign_text import parse_json
from fastfold.utils.hashing import input_hash
from fastfold.utils.tensor_files import tensor_bytes

_TENSORS = ("parameters", "moments", "best", "profile")
"""Tensors of a saved state, by the names of its fields."""
_FRAMES = 100  #: Largest number of models of a film


def design_identity(task: DesignTask, config: DesignConfig, digests: Sequence[str]) -> str:
    """Return a hash of everything that a trajectory depends on but its seed."""
    return input_hash(_task_facts(task), asdict(config), list(digests), __version__)


def _task_facts(task: DesignTask) -> list[Any]:
    """Return everything that a task's losses depend on."""
    facts: list[Any] = [task.source, task.hotspots, task.paratope, task.cyclic, sorted(task.own_losses)]
    own_chains = None if task.own_chains is None else list(task.own_chains)
    facts += [task.flexible, task.own_flexible, task.copies, own_chains]
    facts += [list(map(_task_facts, group)) for group in (task.others, task.avoided)]
    if task.reference is not None:
        atoms = task.reference
        facts += [one.numpy() for one in (atoms.positions, atoms.mask, atoms.rows, atoms.frame)]
    if task.templates is not None:
        facts += [[one.sequence, one.positions, one.mask] for one in task.templates if one is not None]
    chains = [[chain.sequence, chain.indices, chain.id, chain.labels] for chain in task.target.chains]
    return [task.name, chains, facts, dict(task.weights)]


def save_state(path: Path, state: DesignState, identity: str) -> None:
    """Write a state with the identity of its design, or raise WriteError."""
    tensors = {
        **{key: getattr(state, key) for key in _TENSORS},
        "plddt": torch.from_numpy(np.asarray(state.plddt, np.float32)),
        "positions": torch.from_numpy(np.ascontiguousarray(state.positions, np.float32)),
        "trace": torch.from_numpy(np.stack(state.trace)) if state.trace else torch.zeros(0),
    }
    record = {key: getattr(state, key) for key in ("step", "best_loss", "best_violation", "log")}
    write_atomic(path, tensor_bytes(tensors, {"identity": identity, "state": json.dumps(record)}))


def load_state(path: Path, identity: str, *, overwrite: bool) -> DesignState | None:
    """Read a state; None if there is none, or if it has other settings and is to be overwritten.

    A ConfigError tells that it belongs to other settings, an OutputError that the file is damaged.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        is_same = metadata["identity"] == identity
        record = parse_json(metadata["state"], path)
    except Exception as error:
        raise OutputError(
            f"{path}: cannot be read ({error}); delete it to start this design again"
        ) from error
    if not is_same:
        if overwrite:
            return None
        raise ConfigError(
            f"{path}: belongs to a design with other settings, networks or versions; choose another `out`, or "
            "`overwrite` to start again"
        )
    record |= {key: tensors[key] for key in _TENSORS}
    record |= {key: tensors[key].numpy() for key in ("plddt", "positions")}
    return DesignState(**record, trace=list(tensors["trace"].numpy()))


def film_pdb(trace: np.ndarray, chain: np.ndarray, names: AuthorNames | None = None) -> str:
    """Write CA atoms of steps as a PDB file of models, each superposed on the last, at most 100 of them.

    ``trace [steps, N, 3]`` is in Å, and ``chain [N]`` has the chain number of each residue, which is named GLY. Chains
    are by default A, B, ... and residues are numbered from 1.
    """
    chosen = np.unique(np.linspace(0, len(trace) - 1, min(_FRAMES, len(trace))).round().astype(int))
    points = torch.from_numpy(trace[chosen]).double()
    superposed = superpose(points, points[-1:].expand_as(points), torch.ones(points.shape[:2]))
    moved = superposed[..., None].apply(points)
    if names is None:
        counts = np.bincount(chain)
        numbers = tuple(str(number + 1) for count in counts for number in range(count))
        names = AuthorNames(tuple(map(chain_name, range(len(counts)))), numbers)
    letters = pdb_chain_ids(names.chain_ids)
    heads = []
    for i, number in enumerate(chain):
        residue, code = names.split_number(i)
        heads.append(f"{letters[number][:1]:1}{residue % 10_000:4d}{code:1}")
    lines = []
    for model, frame in enumerate(moved.numpy(), 1):
        lines.append(f"MODEL     {model:4d}")
        for i, (x, y, z) in enumerate(frame.clip(-999, 9999)):
            lines.append(
                f"ATOM  {(i + 1) % 100000:5d}  CA  GLY {heads[i]}   {x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00           C  "
            )
        lines.append("ENDMDL")
    return "\n".join([*lines, "END", ""])
