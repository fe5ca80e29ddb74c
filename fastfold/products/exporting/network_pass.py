"""Passes of a network as functions of tensors, for ``torch.export``."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.data.features.pipeline import featurize
from fastfold.data.targets import target_from_sequence
from fastfold.evoformer.confidence import plddt, predicted_aligned_error
from fastfold.evoformer.model import AlphaFold, distance_change

Tensors = dict[str, Tensor]
_SHORT = 16  #: Length of the target from which the names and types of features are read
_OF_PAIRS = ("coevolution_pair",)
_RECYCLED = ("prev_msa_first_row", "prev_pair", "prev_pos")


@dataclass(frozen=True)
class LengthClass:
    """Sizes of an exported program: residues of all chains, rows of MSA and extra MSA, and templates."""

    residues: int
    clusters: int
    extra: int
    templates: int = 0


class NetworkPass(nn.Module):
    """One pass of a network, which is not changed, with recycling outside."""

    def __init__(self, model: AlphaFold) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensors, previous: Tensors) -> Tensors:
        """Return the outputs of a pass.

        Args:
            features: Features of the pass, those of :func:`read_features`.
            previous: ``prev_pos [N, 37, 3]`` in Å, ``prev_msa_first_row [N, c_m]`` and ``prev_pair [N, N, c_z]``.

        Returns:
            These three for the next pass; ``single [N, c_s]``, ``atom_mask [N, 37]``, ``plddt [N]`` and, of networks
            with the head, ``pae [N, N]`` in Å.
        """
        representations, structure = self.model.iterate([dict(features)], dict(previous))
        outputs = {
            "prev_pos": structure["final_atom_positions"],
            "prev_msa_first_row": representations["msa_first_row"],
            "prev_pair": representations["pair"],
            "single": representations["single"],
            "atom_mask": structure["final_atom_mask"],
            "plddt": plddt(self.model.heads["predicted_lddt"](representations)["logits"]),
        }
        if "predicted_aligned_error" in self.model.heads:
            head = self.model.heads["predicted_aligned_error"](representations)
            outputs["pae"] = predicted_aligned_error(head["logits"], head["breaks"])[0]
        return outputs


class UnrolledPasses(nn.Module):
    """All passes of a network, the first from zeros.

    All passes are computed. Those after the one at which the network would stop recycling by the tolerance in Å
    (:meth:`fastfold.evoformer.model.AlphaFold.forward`) change nothing.
    """

    def __init__(self, model: AlphaFold, num_recycles: int, tolerance: float = 0.0) -> None:
        super().__init__()
        self.step, self.num_recycles, self.tolerance = NetworkPass(model), num_recycles, tolerance

    def forward(self, features: Tensors) -> Tensors:
        """Return the outputs of the last pass, from features with a leading axis of passes."""
        outputs = first_previous(self.step.model, features["aatype"].shape[-1])
        is_over = is_stable = torch.zeros((), dtype=torch.bool)
        for cycle in range(self.num_recycles + 1):
            previous = {name: outputs[name] for name in _RECYCLED}
            updated = self.step({name: value[cycle] for name, value in features.items()}, previous)
            if self.tolerance > 0:
                change = distance_change(previous, updated, features["seq_mask"][cycle])
                if cycle > 1:
                    updated = {
                        name: torch.where(is_over, outputs[name], new) for name, new in updated.items()
                    }
                # One more pass follows the first stable one.
                is_over, is_stable = is_stable, is_stable | (change <= self.tolerance)
            outputs = updated
        return outputs


def first_previous(model: AlphaFold, residues: int) -> Tensors:
    """Return the zeros that the first pass starts from."""
    return model.first_previous({"aatype": torch.zeros(residues, dtype=torch.int32)})


def read_features(model: AlphaFold, shape: LengthClass) -> tuple[Tensors, list[str]]:
    """Run a short pass, and return features of a class that a network reads.

    They are those of a short target with padding; names of others that it reads where a target has them follow.
    """
    target = target_from_sequence("A" * min(_SHORT, shape.residues))
    sampler = featurize(target.chains, [([], [])], model.config)
    features = {name: torch.as_tensor(np.asarray(value)) for name, value in sampler.sample(0).items()}
    reads = _Reads(features)
    with torch.enable_grad():  # without gradients empty templates are not read
        model.iterate([reads], first_previous(model, len(target.chains[0].sequence)))  # type: ignore[list-item]
    read = pad_features({name: features[name] for name in sorted(reads.names & features.keys())}, shape)
    return read, sorted((reads.names | {"initial_positions"}) - features.keys())


def pad_features(features: Mapping[str, Tensor], shape: LengthClass) -> Tensors:
    """Pad the features of one pass, without leading axes, to a class with zeros, which their masks leave out.

    A ValueError names a feature that exceeds the class.
    """
    rows = {"msa": shape.clusters, "extra": shape.extra, "template": shape.templates}
    padded = {}
    for name, value in features.items():
        number = rows.get(name.partition("_")[0])
        leading = [shape.residues, shape.residues] if name in _OF_PAIRS else [shape.residues]
        if number is not None:  # a row of the MSA, or a template
            leading = [number, shape.residues]
        wanted = [*leading, *value.shape[len(leading) :]][: value.dim()]
        if any(size > most for size, most in zip(value.shape, wanted, strict=True)):
            raise ValueError(f"{name} has shape {list(value.shape)}, the class {wanted}")
        amounts = [n for size, most in zip(value.shape, wanted, strict=True) for n in (most - size, 0)]
        padded[name] = F.pad(value, amounts[::-1])
    return padded


class _Reads(UserDict[str, Any]):
    """Features that record the names that are read, also of those that are missing."""

    def __init__(self, features: Mapping[str, Tensor]) -> None:
        self.names: set[str] = set()
        super().__init__(features)

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return self.data[name]

    get = MutableMapping.get  # reads by the method above
