"""Description of a weights file, as values and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ml_collections import ConfigDict

from fastfold.evoformer.config import is_multimer
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.infer_config import has_ptm, has_templates

Kind = Literal["alphafold", "openfold", "fastfold"]

_KINDS: dict[Kind, str] = {
    "alphafold": "official AlphaFold parameters (.npz)",
    "openfold": "OpenFold checkpoint (.pt)",
    "fastfold": "FastFold weights (.safetensors)",
}


@dataclass(frozen=True)
class WeightsInfo:
    """Description of a weights file."""

    path: Path  #: The file
    kind: Kind  #: Program that defines its format
    #: The network, whose parameters are on the meta device until they are loaded
    model: AlphaFold = field(repr=False, compare=False)
    dtype: str  #: Element types in the file; in memory they are float32
    #: Official name of its network, None for other configurations. Some official networks have equal shapes: the
    #: file's name decides between them, or else the first one is returned.
    preset: str | None
    #: Further entries of the file's header, such as the training data
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def config(self) -> ConfigDict:
        """The network's configuration."""
        return self.model.config

    @property
    def multimer(self) -> bool:
        """True for the multimer network."""
        return is_multimer(self.config)

    @property
    def has_templates(self) -> bool:
        """True if the network uses templates."""
        return has_templates(self.config)

    @property
    def has_ptm(self) -> bool:
        """True if the network predicts aligned errors, and so pTM."""
        return has_ptm(self.config)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(value.numel() for value in self.model.state_dict().values())

    def describe(self) -> str:
        """Return the description as a few lines of text."""
        trunk, heads = self.config.model.embeddings_and_evoformer, self.config.model.heads
        parts = [
            "multimer" if self.multimer else "monomer",
            "templates" if self.has_templates else "no templates",
            "predicted aligned error and pTM" if self.has_ptm else "no predicted aligned error",
        ]
        sizes = [
            f"{trunk.evoformer_num_block} Evoformer blocks",
            f"{trunk.extra_msa_stack_num_block} extra MSA blocks",
            f"{heads.structure_module.num_layer} structure iterations",
            f"{self.config.model.num_recycle} recycles",
        ]
        channels = [
            f"MSA {trunk.msa_channel}",
            f"extra MSA {trunk.extra_msa_channel}",
            f"pair {trunk.pair_channel}",
            f"single {trunk.seq_channel}",
        ]
        lines = {
            "file": str(self.path),
            "format": _KINDS[self.kind],
            "model": self.preset or "not an official one",
            "network": ", ".join(parts),
            "size": ", ".join(sizes),
            "channels": ", ".join(channels),
            "parameters": f"{self.parameters:,} ({self.dtype})",
        }
        lines |= {_one_line(name.replace("_", " ")): _one_line(text) for name, text in self.notes.items()}
        return "\n".join(f"{name:<11} {value}" for name, value in lines.items())


def _one_line(text: str) -> str:
    """Return the first 200 characters of an untrusted text, unprintable ones as blanks."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:200])
