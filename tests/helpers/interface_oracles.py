"""Recorded interface scores: what the published programs print for invented complexes."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import REPOSITORY, require_shared

CASES = (
    "synthetic_interface",
    "dimer_contact",
    "dimer_no_contact",
    "trimer_short_chain",
    "tetramer",
    "d0_edges",
    "chain_letters_out_of_order",
)


class InterfaceCase:
    """One complex, and what was recorded of it; the test is skipped where the files are not there.

    ``synthetic_interface`` is part of the repository: chains of 11, 16, 27 and 28 residues, where the two definitions
    of d0 part, with one aligned error everywhere.
    """

    def __init__(self, name: str) -> None:
        self.folder: Path = (
            REPOSITORY / "tests" / "oracles" / name
            if name.startswith("synthetic_")
            else require_shared("oracles_data", "interface_scores", name)
        )
        with np.load(self.folder / "inputs.npz", allow_pickle=False) as file:
            self.inputs: dict[str, np.ndarray] = {key: file[key] for key in file.files}
        self.expected: dict[str, Any] = json.loads((self.folder / "expected.json").read_text())
        scores = json.loads((self.folder / "scores.json").read_text())
        self.pae, self.plddt = np.array(scores["pae"]), np.array(scores["plddt"])
        self.letters: list[str] = self.inputs["chain_ids"].tolist()
        self.chain_index: np.ndarray = self.inputs["asym_id"] - 1

    @property
    def chains(self) -> list[slice]:
        """Residues of each chain."""
        ends = np.cumsum(self.inputs["chain_lengths"]).tolist()
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Recorded arrays; only the complexes beside the checkout have them."""
        with np.load(self.folder / "expected.npz", allow_pickle=False) as file:
            return {key: file[key] for key in file.files}

    def logits(self, name: str) -> np.ndarray:
        """``[N, N, 64]`` float32 of ``pae`` or ``distogram``."""
        return self.inputs[f"{name}_logits_q"].astype(np.float32) / 4
