"""A designed sequence with the task and the optimisation that it comes from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastfold.products.design.optimize import DesignState
from fastfold.products.design.tasks.task import DesignTask
from fastfold.protein import residue_constants as rc
from fastfold.protein.protein import Protein


@dataclass(frozen=True)
class Design:
    """A designed sequence.

    Example:
        >>> from pathlib import Path
        >>> from fastfold.inference.config import InferConfig
        >>> from fastfold.products.design import DesignConfig, DesignRequest, hallucination, run_designs
        >>> steps, fold = DesignConfig(soft_steps=1, temperature_steps=0, hard_steps=0), InferConfig(num_recycles=0)
        >>> request = DesignRequest(hallucination(12), Path("designs"), config=steps, infer=fold)
        >>> (design,) = run_designs(request, say=lambda line: None)
        >>> design.name, design.state.step, design.is_external
        ('hallucinate_seed_000', 1, False)
    """

    name: str  #: Name of its record and files
    task: DesignTask  #: Its task
    parameters: str  #: Letters of the designed residues, in the order of the task's parameters
    state: DesignState  #: Final state of the optimisation that made it or its backbone
    #: Score of the program that made the sequence; None for one of the optimisation
    score: float | None = None
    is_external: bool = False  #: True if another program made the sequence

    @property
    def sequences(self) -> tuple[str, ...]:
        """Sequence of each chain, given chains included."""
        return tuple(self.task.letters(self.parameters))

    @property
    def complexes(self) -> dict[str, DesignTask]:
        """Task of each fold by the name of its record: its own, a binder alone, further targets, off-targets."""
        named = {self.name: self.task}
        if self.task.alone is not None:
            named[f"{self.name}_alone"] = self.task.alone
        named |= {f"{self.name}_target_{i}": one for i, one in enumerate(self.task.others, 2)}
        return named | {f"{self.name}_off_{i}": one for i, one in enumerate(self.task.avoided, 1)}

    @property
    def records(self) -> str:
        """FASTA records of its complexes."""
        return "".join(
            f">{name}\n{':'.join(task.letters(self.parameters))}\n" for name, task in self.complexes.items()
        )

    @property
    def is_given_up(self) -> bool:
        """True if the optimisation ended early, so that the design is not folded."""
        return bool(self.state.log and self.state.log[-1].get("given_up"))

    @property
    def designed(self) -> str:
        """Sequence of the designed chain, equal ones once."""
        letters = "".join(self.sequences)
        return "".join(letters[i] for i in self.task.designed_chain)

    @property
    def structure(self) -> Protein:
        """Structure of the design, with pLDDT of the last step as B-factors."""
        aatype = rc.sequence_to_aatype("".join(self.sequences))
        # Residues that the last step has changed lack atoms, which are at the origin.
        mask = rc.restype_atom37_mask[aatype] * (np.abs(self.state.positions).sum(-1) > 0)
        b_factors = np.repeat(np.asarray(self.state.plddt)[:, None], mask.shape[1], 1)
        return Protein(
            self.state.positions, mask, aatype, self.task.residue_index, self.task.chain, b_factors
        )
