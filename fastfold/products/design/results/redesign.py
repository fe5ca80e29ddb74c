"""Sequences of another program for designed backbones, and the table of their substitutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.inference.output.summary import score_table
from fastfold.products.design.limits import Limits
from fastfold.products.design.results.design import Design
from fastfold.products.design.results.folds import touching
from fastfold.products.design.results.program import SequenceProgram
from fastfold.products.design.tasks.given import residue_text
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.utils.atomic_files import prepare_output_directory

PROGRAM = "mpnn"  #: Folder of another program's sequences
CHANGES = "mpnn.tsv"  #: Table of the substitutions of the program
CHANGE_COLUMNS = ("name", "design", "score", "changed", "identity", "substitutions", "fixed")


@dataclass(frozen=True)
class Redesign:
    """Sequences of another program for the designed backbones.

    Example:
        >>> from fastfold.products.design import Redesign, SequenceProgram
        >>> redesign = Redesign(SequenceProgram("python my_mpnn.py --pdb {pdb} --out {out}"), keep_interface=True)
        >>> redesign.program.number
        4
    """

    program: SequenceProgram  #: The program
    keep_interface: bool = False  #: True if residues of designed chains within 4 Å of other chains stay


def program_designs(
    design: Design, redesign: Redesign, output: Path, limits: Limits, seed: int, say: Callable[[str], None]
) -> list[Design]:
    """Return the other program's sequences for a design, those outside the limits left out.

    Args:
        design: The design.
        redesign: The program and its settings.
        output: Folder of results, in which the program's sequences are kept.
        limits: Limits of the designed chain.
        seed: Seed of the program.
        say: Called with a line about the number of sequences.

    Raises:
        InputError: The program fails, or its sequences do not fit.
    """
    written = redesign.program.sequences(
        design.task,
        to_pdb(replace(design.structure, residue_index=design.task.place + 1)),
        "".join(design.sequences),
        kept=_fixed(design, redesign),
        folder=prepare_output_directory(output / PROGRAM),
        name=design.name,
        seed=seed,
    )
    made = [
        Design(f"{design.name}_mpnn_{number}", design.task, parameters, design.state, score, True)
        for number, (parameters, score) in enumerate(written, 1)
    ]
    within = [one for one in made if not limits.broken(one.designed)]
    left = len(made) - len(within)
    out = f", {left} left out because they break `composition` or `charge`" if left else ""
    say(f"{design.name}: {len(made)} sequences by {redesign.program.command.split()[0]}{out}")
    return within


def _fixed(design: Design, redesign: Redesign) -> np.ndarray:
    """Return the residues of designed chains that stay because they touch other chains, ``[K]``."""
    if not redesign.keep_interface:
        return np.zeros(0, np.int64)
    structure, task = design.structure, design.task
    near = touching(structure.atom_positions, structure.atom_mask, task.chain)
    return np.flatnonzero(near & task.in_designed & (task.source >= 0))


def change_rows(designs: Sequence[Design], redesign: Redesign) -> dict[str, dict[str, Any]]:
    """Return a row of :data:`CHANGE_COLUMNS` for each sequence of the program, by its name.

    ``substitutions`` are those of the designed chain, equal ones once, such as ``B:G3A``; ``identity`` is the share of
    its designed residues that stay, and ``fixed`` has the residues that had to stay at the interface.
    """
    rows = {}
    own = {design.name: design for design in designs if not design.is_external}
    for made in (design for design in designs if design.is_external):
        design, task = own[made.name.rpartition("_mpnn_")[0]], made.task
        before, after = "".join(design.sequences), "".join(made.sequences)
        names = task.target.names
        places = [i for i in task.designed_chain if task.source[i] >= 0]
        changed = [i for i in places if before[i] != after[i]]
        texts = [f"{names.chain_ids[task.chain[i]]}:{before[i]}{names.numbers[i]}{after[i]}" for i in changed]
        rows[made.name] = {
            "name": made.name,
            "design": design.name,
            "score": "" if made.score is None else f"{made.score:.4f}",
            "changed": len(changed),
            "identity": f"{1 - len(changed) / len(places):.3f}",
            "substitutions": ",".join(texts),
            "fixed": residue_text(task.target, _fixed(design, redesign).tolist()),
        }
    return rows


def change_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of the program's sequences as tab-separated text with :data:`CHANGE_COLUMNS`."""
    return score_table(CHANGE_COLUMNS, [row for row in rows if "substitutions" in row])
