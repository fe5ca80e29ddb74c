"""``fastfold design``: optimise sequences, resume them after a stop, and fold each again as any other target."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.inputs import encode_sequence
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.config import InferConfig
from fastfold.inference.design.evaluate import Evaluator, uniform_bias
from fastfold.inference.design.joint import JointEvaluator
from fastfold.inference.design.limits import limit_weights
from fastfold.inference.design.memory import plan_design
from fastfold.inference.design.optimise import (
    DesignConfig,
    DesignState,
    final_parameters,
    first_state,
    optimise,
    schedule,
)
from fastfold.inference.design.results.film import film_pdb
from fastfold.inference.design.results.filters import Filter, read_filters
from fastfold.inference.design.results.folds import touching
from fastfold.inference.design.results.program import SequenceProgram
from fastfold.inference.design.results.refold import fold_designs
from fastfold.inference.design.results.table import PASSED, Design, design_rows, table_text
from fastfold.inference.design.saved import design_identity, load_state, save_state
from fastfold.inference.design.task import DesignTask
from fastfold.inference.error_messages import is_out_of_memory
from fastfold.inference.folding.gradients import GradientRun
from fastfold.inference.models import requested_networks, suitable
from fastfold.inference.output.plots import trajectory_png
from fastfold.inference.report import write_report
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.protein.protein import Protein
from fastfold.utils.atomic_files import prepare_output_directory, write_atomic
from fastfold.utils.device import choose_device

SEQUENCES, TABLE, TRAJECTORIES, PROGRAM = "designs.fasta", "designs.tsv", "trajectories", "mpnn"
"""Files of a results folder that only designs have, and folders of trajectories and of another program's sequences."""

_SAVE_EVERY = 10
_AVOID = "avoid"


@dataclass(frozen=True)
class Redesign:
    """Sequences of another program for the designed backbones.

    Attributes:
        program: The program.
        keep_interface: True if residues of designed chains within 4 Å of other chains stay.
    """

    program: SequenceProgram
    keep_interface: bool = False


def run_designs(
    task: DesignTask | Callable[[int], DesignTask],
    output: Path,
    weights: Sequence[Path] = (),
    config: DesignConfig | None = None,
    *,
    seeds: Sequence[int] = (0,),
    predict: Sequence[Path] | None = None,
    infer: InferConfig | None = None,
    filters: Path | None = None,
    redesign: Redesign | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> list[Design]:
    """Design a sequence with each seed, fold all of them again, and write tables and a page.

    Args:
        task: Residues to design, or a function that returns them for a seed.
        output: Folder for the results.
        weights: Weights files or names of networks to design with; none for ``mini``.
        config: Settings of the optimisation.
        seeds: One optimisation for each.
        predict: Networks that fold the designs; None for those of ``weights``. They see the sequence alone, and
            the templates of given chains.
        infer: Settings of these folds, their seeds included, and device and memory of both.
        filters: File of filters (:mod:`fastfold.inference.design.results.filters`); None for none.
        redesign: Another program, whose sequences for the designed backbones are folded as well; None for none.
        overwrite: True to start again where the folder has designs with other settings.
        say: Called with lines about the progress.

    Returns:
        The designs in the order of the seeds, each followed by the other program's sequences.

    Raises:
        ConfigError: Settings contradict the task or the networks, or the folder has designs with other settings.
        InputError: A structure or a file of filters cannot be used, another program failed, or memory was not enough.
        WriteError: A result cannot be written.
    """
    config, infer = config or DesignConfig(), infer or InferConfig()
    device = choose_device(infer.device)
    networks = requested_networks(weights)
    folding = list(predict if predict is not None else weights)
    tasks = [task(seed) if callable(task) else task for seed in seeds]
    names = [network.name for network in suitable(requested_networks(folding), tasks[0].target)]
    chosen = [] if filters is None else _filters(filters, tasks[0], len(names))
    models = [network.load(infer.precision or "fp32").to(device) for network in networks]
    digests = [network.digest for network in networks]
    plan = partial(plan_design, models=models, infer=infer, say=say)
    evaluator = design_evaluator(tasks[0], models, config, plan)
    folder = prepare_output_directory(prepare_output_directory(output) / TRAJECTORIES)
    designs = []
    for seed, one in zip(seeds, tasks, strict=True):
        if one is not evaluator.task:
            evaluator = design_evaluator(one, models, config, plan)
        identity = f"{design_identity(one, config, digests)}-{seed}"
        path = folder / f"{one.name}_seed_{seed:03d}"
        design = _design(evaluator, config, seed, path, identity, overwrite, say)
        designs.append(design)
        if redesign is not None and not design.is_given_up:
            designs += _redesigned(design, redesign, output, seed, config, say)
    del evaluator, models, networks  # before the networks that fold are loaded
    folded = [design for design in designs if not design.is_given_up]
    write_atomic(output / SEQUENCES, "".join(design.records for design in folded))
    if folded:
        for target, why in fold_designs(folded, output / SEQUENCES, folding, infer, overwrite=overwrite):
            say(f"error: {target}: {why}")
    rows = design_rows(designs, output, names, chosen, config.limits)
    write_atomic(output / TABLE, table_text(rows))
    if folded:
        with suppress(InputError):  # nothing to show if all folds failed
            write_report(output, say=say)  # the page shows the table's verdicts
    if chosen:
        say(f"{sum(row['filters'] == PASSED for row in rows)} of {len(rows)} designs pass the filters")
    return designs


def design_evaluator(
    task: DesignTask,
    models: Sequence[AlphaFold],
    config: DesignConfig,
    plan: Callable[[DesignTask], GradientRun | None] = lambda _: None,
) -> Evaluator:
    """Return the losses of a task with the weights of its protocol and of the settings.

    Args:
        task: The task.
        models: Networks of one kind, on one device.
        config: Settings of the optimisation.
        plan: Function that plans the gradients of each complex.
    """
    weights = {**task.weights, **limit_weights(config.limits), **config.weights}
    settings: dict[str, Any] = {
        "recycles": config.recycles,
        "recycle_mode": config.recycle_mode,
        "bias": uniform_bias(config.forbid),
    }
    if _AVOID in config.weights and not task.avoided:
        raise ConfigError("the loss avoid needs off-targets; give them with --avoid")
    if not (task.others or task.avoided):
        return Evaluator(task, models, weights, limits=config.limits, gradients=plan(task), **settings)
    avoid = {_AVOID: weights.pop(_AVOID, 1.0)}
    avoided = task.avoided if avoid[_AVOID] else []
    return JointEvaluator(
        task,
        models,
        weights,
        limits=config.limits,
        gradients=plan(task),
        others=[
            Evaluator(one, models, weights, limits=config.limits, gradients=plan(one), **settings)
            for one in task.others
        ],
        avoided=[Evaluator(one, models, avoid, gradients=plan(one), **settings) for one in avoided],
        **settings,
    )


def _filters(path: Path, task: DesignTask, networks: int) -> list[Filter]:
    chains = len(task.target.chains)
    return read_filters(path, networks=networks, chains=chains, off_targets=len(task.avoided))


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
    state = load_state(saved, identity, overwrite=overwrite)
    if state is None:
        state = first_state(evaluator, config, seed)
    elif state.step:
        say(f"{path.name}: continues after step {state.step}")
    total = len(schedule(config))

    def keep(current: DesignState) -> None:
        row = current.log[-1]
        if current.step % _SAVE_EVERY == 0 or current.step == total:
            save_state(saved, current, identity)
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
    save_state(saved, state, identity)
    design = Design(path.name, evaluator.task, final_parameters(evaluator, state), state)
    write_atomic(path.with_name(f"{path.name}.jsonl"), "".join(f"{json.dumps(row)}\n" for row in state.log))
    write_atomic(path.with_name(f"{path.name}.pdb"), film_pdb(np.stack(state.trace), evaluator.task.chain))
    write_atomic(path.with_name(f"{path.name}_design.pdb"), to_pdb(_structure(design)))
    if find_spec("matplotlib") is not None:
        series = ([row[key] for row in state.log] for key in ("loss", "mean_plddt", "stage"))
        write_atomic(path.with_name(f"{path.name}.png"), trajectory_png(*series, title=path.name))
    if design.is_given_up:
        say(f"{path.name}: given up after step {state.step}: pLDDT {float(state.plddt.mean()):.1f}")
    return design


def _structure(design: Design) -> Protein:
    """Return the structure of a design, with pLDDT of the last step as B-factors."""
    aatype = encode_sequence("".join(design.sequences)).argmax(-1).numpy()
    task = design.task
    # Residues that the last step has changed lack atoms, which are at the origin.
    mask = rc.restype_atom37_mask[aatype] * (np.abs(design.state.positions).sum(-1) > 0)
    b_factors = np.repeat(np.asarray(design.state.plddt)[:, None], mask.shape[1], 1)
    return Protein(design.state.positions, mask, aatype, task.place + 1, task.chain, b_factors)


def _redesigned(
    design: Design,
    redesign: Redesign,
    output: Path,
    seed: int,
    config: DesignConfig,
    say: Callable[[str], None],
) -> list[Design]:
    """Return the other program's sequences for a design, those outside the limits left out."""
    structure = _structure(design)
    kept = np.zeros(0, np.int64)
    if redesign.keep_interface:
        near = touching(structure.atom_positions, structure.atom_mask, design.task.chain)
        kept = np.flatnonzero(near & np.isin(design.task.chain, design.task.chain[design.task.source >= 0]))
    found = redesign.program.sequences(
        design.task,
        to_pdb(structure),
        "".join(design.sequences),
        kept=kept,
        folder=prepare_output_directory(output / PROGRAM),
        name=design.name,
        seed=seed,
    )
    made = [
        Design(f"{design.name}_mpnn_{number}", design.task, parameters, design.state, score, True)
        for number, (parameters, score) in enumerate(found, 1)
    ]
    within = [one for one in made if not config.limits.broken(one.designed)]
    left = len(made) - len(within)
    out = f", {left} left out because they break --composition or --charge" if left else ""
    say(f"{design.name}: {len(made)} sequences by {redesign.program.command.split()[0]}{out}")
    return within
