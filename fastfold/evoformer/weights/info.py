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
    #: Official name of its network, None for other configurations. Some official networks have equal shapes: the
    #: file's name decides between them, or else the first one is returned.
    preset: str | None
    multimer: bool  #: True for the multimer network
    has_templates: bool  #: True if the network uses templates
    has_ptm: bool  #: True if the network predicts aligned errors, and so pTM
    parameters: int  #: Number of parameters
    dtype: str  #: Element types in the file; in memory they are float32
    config: ConfigDict  #: The network's configuration
    #: Further entries of the file's header, such as the training data
    notes: Mapping[str, str] = field(default_factory=dict)
    #: The network, whose parameters are on the meta device until they are loaded
    model: AlphaFold = field(kw_only=True, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        path: Path,
        kind: Kind,
        model: AlphaFold,
        dtype: str,
        preset: str | None,
        notes: Mapping[str, str] | None = None,
    ) -> WeightsInfo:
        """Describe a file with the parameters of ``model``, which may be on the meta device."""
        return cls(
            path=path,
            kind=kind,
            preset=preset,
            multimer=is_multimer(model.config),
            has_templates=has_templates(model.config),
            has_ptm=has_ptm(model.config),
            parameters=sum(value.numel() for value in model.state_dict().values()),
            dtype=dtype,
            config=model.config,
            notes=notes or {},
            model=model,
        )

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
