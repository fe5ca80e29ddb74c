"""Prediction heads (supplement, section 1.9); what is read off their logits is in ``confidence``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.evoformer.execution import LazyRows, PolicyModule
from fastfold.evoformer.primitives import Init, LayerNorm, Linear


class DistogramHead(PolicyModule):
    """Distribution of CB distances from the symmetrised pair (supplement, section 1.9.8)."""

    operator = "heads"
    has_columns = True  # a layout may leave other processes the columns that mirror the rows which are here

    def __init__(self, config: Any, c_z: int, *, zero_init: bool) -> None:
        super().__init__()
        self.config = config
        self.logits = Linear(c_z, config.num_bins, init=_last(zero_init))

    def forward(self, representations: dict[str, Tensor]) -> dict[str, Any]:
        """``pair [*, N, N, c_z]`` to ``logits [*, N, N, bins]`` and ``bin_edges [bins - 1]`` in Å."""
        pair, c = representations["pair"], self.config
        edges = torch.linspace(c.first_break, c.last_break, c.num_bins - 1, device=pair.device)

        def rows(index: slice) -> Tensor:
            half = _exactly(self.logits, pair[..., index, :, :])
            return half + _exactly(self.logits, pair[..., :, index, :]).transpose(-2, -3)

        if self.policy.lazy_logits and self.has_columns and not torch.is_grad_enabled():
            return {
                "logits": LazyRows(torch.no_grad()(rows), (*pair.shape[:-1], c.num_bins), self.policy),
                "bin_edges": edges,
            }
        half = _exactly(self.logits, pair)
        return {"logits": half + self.transposed(half), "bin_edges": edges}

    def transposed(self, half: Tensor) -> Tensor:
        """``half [*, N, N, bins]`` with rows and columns exchanged."""
        return half.transpose(-2, -3)


class MaskedMsaHead(nn.Module):
    """Residue types of masked MSA positions (section 1.9.9)."""

    def __init__(self, num_output: int, c_m: int, *, zero_init: bool) -> None:
        super().__init__()
        self.logits = Linear(c_m, num_output, init=_last(zero_init))

    def forward(self, representations: dict[str, Tensor]) -> dict[str, Tensor]:
        """``msa [*, S, N, c_m]`` to ``logits [*, S, N, num_output]``."""
        return {"logits": _exactly(self.logits, representations["msa"])}


class ExperimentallyResolvedHead(nn.Module):
    """Whether each atom is resolved in the experiment (section 1.9.10)."""

    def __init__(self, c_s: int, *, zero_init: bool) -> None:
        super().__init__()
        self.logits = Linear(c_s, 37, init=_last(zero_init))

    def forward(self, representations: dict[str, Tensor]) -> dict[str, Tensor]:
        """``single [*, N, c_s]`` to ``logits [*, N, 37]``."""
        return {"logits": _exactly(self.logits, representations["single"])}


class PredictedLDDTHead(nn.Module):
    """Distribution of the per-residue lDDT-CA (supplement Algorithm 29).

    - Line 1: the structure module's single representation is normalised and runs through two layers with ReLU.
    - Line 2: a last layer gives the logits of the bins; their softmax and its mean (line 3) are taken in
      :func:`plddt`.
    """

    def __init__(self, config: Any, c_s: int, *, zero_init: bool) -> None:
        super().__init__()
        c = config.num_channels
        self.norm = LayerNorm(c_s)
        self.hidden = Linear(c_s, c, init="relu")
        self.hidden_2 = Linear(c, c, init="relu")
        self.logits = Linear(c, config.num_bins, init=_last(zero_init))

    def forward(self, representations: dict[str, Tensor]) -> dict[str, Tensor]:
        """``structure_module [*, N, c_s]`` to ``logits [*, N, bins]``."""
        x = self.norm(representations["structure_module"].to(self.logits.weight.dtype))
        return {"logits": self.logits(F.relu(self.hidden_2(F.relu(self.hidden(x)))))}


class PredictedAlignedErrorHead(PolicyModule):
    """Distribution of the error of residue j when aligned on residue i (section 1.9.7)."""

    operator = "heads"

    def __init__(self, config: Any, c_z: int, *, zero_init: bool) -> None:
        super().__init__()
        self.config = config
        self.logits = Linear(c_z, config.num_bins, init=_last(zero_init))

    def forward(self, representations: dict[str, Tensor]) -> dict[str, Any]:
        """``pair [*, N, N, c_z]`` to ``logits [*, N, N, bins]`` and ``breaks [bins - 1]`` in Å."""
        pair, c = representations["pair"], self.config
        breaks = torch.linspace(0.0, c.max_error_bin, c.num_bins - 1, device=pair.device)

        def rows(index: slice) -> Tensor:
            return _exactly(self.logits, pair[..., index, :, :])

        if self.policy.lazy_logits and not torch.is_grad_enabled():
            return {
                "logits": LazyRows(torch.no_grad()(rows), (*pair.shape[:-1], c.num_bins), self.policy),
                "breaks": breaks,
            }
        return {"logits": rows(slice(None)), "breaks": breaks}


def _exactly(linear: Linear, x: Tensor) -> Tensor:
    """The layer in the precision of its parameters, whatever the trunk ran in."""
    return linear(x.to(linear.weight.dtype))


def _last(zero_init: bool) -> Init:
    return "final" if zero_init else "default"
