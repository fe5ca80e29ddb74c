"""``fastfold design``: optimise sequences, resume them after a stop, and fold each again as any other target."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from fastfold._version import __version__
from fastfold.errors import ConfigError, InputError, OutputError
from fastfold.evoformer.config import MINI
from fastfold.inference.config import InferConfig
from fastfold.inference.design.evaluate import Evaluator, uniform_bias
from fastfold.inference.design.film import film_pdb
from fastfold.inference.design.memory import plan_design
from fastfold.inference.design.optimise import (
    DesignConfig,
    DesignState,
    final_sequence,
    first_state,
    optimise,
    schedule,
)
from fastfold.inference.design.task import DesignTask
from fastfold.inference.error_messages import is_out_of_memory
from fastfold.inference.models import open_networks
from fastfold.inference.output.plots import trajectory_png
from fastfold.inference.report.discover import find_predictions
from fastfold.inference.runner import run as run_infer
from fastfold.inference.target_runner import RunOptions
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_user_structure
from fastfold.protein.metrics.superposition import rmsd
from fastfold.utils.atomic_files import prepare_output_directory, write_atomic
from fastfold.utils.device import choose_device
from fastfold.utils.hashing import input_hash

SEQUENCES, TABLE, TRAJECTORIES = "designs.fasta", "designs.tsv", "trajectories"
"""Files of a results folder that only designs have, and the folder of their trajectories."""

_SAVE_EVERY = 10
_COLUMNS = ("name", "sequence", "steps", "loss", "design_plddt", "plddt", "ptm", "iptm", "rmsd")


@dataclass(frozen=True)
class Design:
    """A designed sequence.

    Attributes:
        name: Name of its record and files.
        sequences: Sequence of each chain, given chains included.
        state: Final state of the optimisation.
    """

    name: str
    sequences: tuple[str, ...]
    state: DesignState

    @property
    def record(self) -> str:
        """FASTA record."""
        return f">{self.name}\n{':'.join(self.sequences)}\n"


def run_designs(
    task: DesignTask,
    output: Path,
    weights: Sequence[Path] = (),
    config: DesignConfig | None = None,
    *,
    seeds: Sequence[int] = (0,),
    predict: Sequence[Path] | None = None,
    infer: InferConfig | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> list[Design]:
    """Design a sequence with each seed, fold all of them again, and write tables and a page.

    Args:
        task: Residues to design.
        output: Folder for the results.
        weights: Weights files or names of networks to design with; none for ``mini``.
        config: Settings of the optimisation.
        seeds: One optimisation for each.
        predict: Networks that fold the designs; None for those of ``weights``. They see the sequence alone.
        infer: Settings of these folds, and device and memory of both.
        overwrite: True to start again where the folder has designs with other settings.
        say: Called with lines about the progress.

    Returns:
        The designs in the order of the seeds.

    Raises:
        ConfigError: Settings contradict the task or the networks, or the folder has designs with other settings.
        InputError: A structure cannot be used, or memory was not enough.
        WriteError: A result cannot be written.
    """
    config, infer = config or DesignConfig(), infer or InferConfig()
    device = choose_device(infer.device)
    networks = open_networks(list(weights) or [Path(MINI)])
    models = [network.load(infer.precision or "fp32").to(device) for network in networks]
    evaluator = Evaluator(
        task,
        models,
        {**task.weights, **config.weights},
        recycles=config.recycles,
        recycle_mode=config.recycle_mode,
        bias=uniform_bias(config.forbid),
        gradients=plan_design(task, models, infer, say),
    )
    identity = _identity(task, config, [network.digest for network in networks])
    folder = prepare_output_directory(prepare_output_directory(output) / TRAJECTORIES)
    designs = []
    for seed in seeds:
        name = f"{task.name}_seed_{seed:03d}"
        designs.append(_design(evaluator, config, seed, folder / name, f"{identity}-{seed}", overwrite, say))
    write_atomic(output / SEQUENCES, "".join(design.record for design in designs))
    summary = run_infer(
        [output / SEQUENCES],
        output,
        list(predict if predict is not None else weights),
        replace(infer, seeds=(0,)),
        RunOptions(overwrite=overwrite),
    )
    write_atomic(output / TABLE, _table(designs, output))
    for target, why in summary.failed:
        say(f"error: {target}: {why}")
    return designs


def _identity(task: DesignTask, config: DesignConfig, digests: Sequence[str]) -> str:
    """Return a hash of everything that a trajectory depends on but its seed."""
    given: list[Any] = [task.source, task.hotspots, task.cyclic]
    if task.reference is not None:
        given += [task.reference.positions.numpy(), task.reference.mask.numpy()]
    if task.templates is not None:
        given.append([None if path is None else path.read_bytes() for path in task.templates])
    chains = [chain.sequence for chain in task.target.chains]
    return input_hash(
        task.name, chains, given, dict(task.weights), asdict(config), list(digests), __version__
    )


def _design(
    evaluator: Evaluator,
    config: DesignConfig,
    seed: int,
    path: Path,
    identity: str,
    overwrite: bool,
    say: Callable[[str], None],
) -> Design:
    """Optimise one sequence from its last saved state, and write its trajectory."""
    saved = path.with_name(f"{path.name}.safetensors")
    state = _load(saved, identity, overwrite)
    if state is None:
        state = first_state(evaluator, config, seed)
    elif state.step:
        say(f"{path.name}: continues after step {state.step}")
    total = len(schedule(config))

    def keep(current: DesignState) -> None:
        row = current.log[-1]
        if current.step % _SAVE_EVERY == 0 or current.step == total:
            _save(saved, current, identity)
            say(
                f"{path.name}: step {current.step} of {total} ({row['stage']}), loss {row['loss']:.3f}, "
                f"pLDDT {row['mean_plddt']:.1f}"
            )

    try:
        optimise(evaluator, config, seed, state, keep)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            f"{path.name}: the memory was not enough for a gradient of {len(evaluator.task.source)} residues; use "
            "fewer, --precision bf16, or a device with more memory"
        ) from error
    _save(saved, state, identity)
    write_atomic(path.with_name(f"{path.name}.jsonl"), "".join(f"{json.dumps(row)}\n" for row in state.log))
    write_atomic(path.with_name(f"{path.name}.pdb"), film_pdb(np.stack(state.trace), evaluator.task.chain))
    if find_spec("matplotlib") is not None:
        series = ([row[key] for row in state.log] for key in ("loss", "mean_plddt", "stage"))
        write_atomic(path.with_name(f"{path.name}.png"), trajectory_png(*series, title=path.name))
    if state.log[-1].get("given_up"):
        say(f"{path.name}: given up after step {state.step}: pLDDT {float(state.plddt.mean()):.1f}")
    return Design(path.name, tuple(final_sequence(evaluator, state)), state)


def _save(path: Path, state: DesignState, identity: str) -> None:
    tensors = {
        "parameters": state.parameters.contiguous(),
        "moments": state.moments.contiguous(),
        "best": state.best.contiguous(),
        "plddt": torch.from_numpy(np.asarray(state.plddt, np.float32)),
        "trace": torch.from_numpy(np.stack(state.trace)) if state.trace else torch.zeros(0),
    }
    record = {"step": state.step, "best_loss": state.best_loss, "log": state.log}
    write_atomic(path, save(tensors, {"identity": identity, "state": json.dumps(record)}))


def _load(path: Path, identity: str, overwrite: bool) -> DesignState | None:
    """Read a saved state; None if there is none, or if it is to be overwritten because its settings differ.

    Raises:
        ConfigError: It belongs to other settings.
        OutputError: The file is damaged.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        is_same = metadata["identity"] == identity
        record = json.loads(metadata["state"])
    except Exception as error:
        raise OutputError(
            f"{path}: cannot be read ({error}); delete it to start this design again"
        ) from error
    if not is_same and overwrite:
        return None
    if not is_same:
        raise ConfigError(
            f"{path}: belongs to a design with other settings, networks or versions; choose another --out, or "
            "--overwrite to start again"
        )
    return DesignState(
        found["parameters"],
        record["step"],
        found["moments"],
        found["best"],
        record["best_loss"],
        found["plddt"].numpy(),
        record["log"],
        list(found["trace"].numpy()),
    )


def _table(designs: Sequence[Design], output: Path) -> str:
    """Return the table of designs, best first by the confidence of the folds."""
    best = {one.scores["name"]: one for one in find_predictions(output) if one.rank in (None, 1)}
    rows = []
    for design in designs:
        state, found = design.state, best.get(design.name)
        loss = state.best_loss if math.isfinite(state.best_loss) else state.log[-1]["loss"]
        row: dict[str, Any] = {
            "name": design.name,
            "sequence": ":".join(design.sequences),
            "steps": state.step,
            "loss": f"{loss:.4f}",
            "design_plddt": f"{float(state.plddt.mean()):.2f}",
        }
        if found is not None:
            row["plddt"] = f"{float(np.mean(found.scores['plddt'])):.2f}"
            row |= {
                key: f"{found.scores[key]:.3f}"
                for key in ("ptm", "iptm")
                if found.scores.get(key) is not None
            }
            if found.structure is not None:
                row["rmsd"] = f"{_rmsd(found.structure, state.trace[-1]):.2f}"
        rows.append(row)
    rows.sort(key=lambda row: -float(row.get("plddt", 0.0)))
    lines = [_COLUMNS, *([str(row.get(column, "")) for column in _COLUMNS] for row in rows)]
    return "".join("\t".join(line) + "\n" for line in lines)


def _rmsd(path: Path, trace: np.ndarray) -> float:
    """Return the deviation in Å of a folded structure's CA atoms ``[N, 3]`` from those of the design."""
    chains = read_user_structure(path).chains
    folded = np.concatenate([chain.positions[:, rc.atom_order["CA"]] for chain in chains])
    points = (torch.from_numpy(folded), torch.from_numpy(trace))
    return float(rmsd(*points, torch.ones(len(trace))))
