"""Prediction heads (supplement, section 1.9); ``confidence`` computes scores from their logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ml_collections import ConfigDict
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.evoformer.execution import LazyRows, PolicyModule
from fastfold.evoformer.primitives import Init, LayerNorm, Linear


class PairHead(PolicyModule):
    """Logits of the bins of each pair of residues: one linear layer, applied on demand if the policy says so."""

    operator = "heads"

    def __init__(self, config: ConfigDict, c_z: int, *, zero_init: bool) -> None:
        super().__init__()
        self.config = config
        self.logits = Linear(c_z, config.num_bins, init=_last(zero_init))

    def on_demand(self, rows: Callable[[slice], Tensor], pair: Tensor) -> LazyRows | None:
        """Return logits ``[*, N, N, bins]`` of ``pair [*, N, N, c_z]`` by ``rows``; None if they are to be whole.

        They record gradients if gradients are recorded at the call.
        """
        policy = self.policy
        if not policy.lazy_logits or (torch.is_grad_enabled() and not policy.recompute):
            return None
        rows = rows if torch.is_grad_enabled() else torch.no_grad()(rows)
        return LazyRows(rows, (*pair.shape[:-1], self.config.num_bins), policy)


class DistogramHead(PairHead):
    """Distribution of CB distances from the symmetrised pair (supplement, section 1.9.8)."""

    has_columns = True  # False in layouts where other processes hold the mirrored columns

    def forward(self, representations: dict[str, Tensor]) -> dict[str, Any]:
        """Return ``logits [*, N, N, bins]`` and ``bin_edges [bins - 1]`` in Å from ``pair [*, N, N, c_z]``."""
        pair, c = representations["pair"], self.config
        edges = torch.linspace(c.first_break, c.last_break, c.num_bins - 1, device=pair.device)

        def rows(index: slice) -> Tensor:
            half = _exactly(self.logits, pair[..., index, :, :])
            return half + _exactly(self.logits, pair[..., :, index, :]).transpose(-2, -3)

        logits: Tensor | LazyRows | None = self.on_demand(rows, pair) if self.has_columns else None
        if logits is None:
            half = _exactly(self.logits, pair)
            logits = half + self.transposed(half)
        return {"logits": logits, "bin_edges": edges}

    def transposed(self, half: Tensor) -> Tensor:
        """Return ``half [*, N, N, bins]`` with rows and columns exchanged."""
        return half.transpose(-2, -3)


class MaskedMsaHead(nn.Module):
    """Distribution of the residue types at masked MSA positions (section 1.9.9)."""

    def __init__(self, num_output: int, c_m: int, *, zero_init: bool) -> None:
        super().__init__()
        self.logits = Linear(c_m, num_output, init=_last(zero_init))

    def forward(self, representations: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``logits [*, S, N, num_output]`` from ``msa [*, S, N, c_m]``."""
        return {"logits": _exactly(self.logits, representations["msa"])}


class ExperimentallyResolvedHead(nn.Module):
    """Probability that each atom is resolved in the experiment (section 1.9.10)."""

    def __init__(self, c_s: int, *, zero_init: bool) -> None:
        super().__init__()
        self.logits = Linear(c_s, 37, init=_last(zero_init))

    def forward(self, representations: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``logits [*, N, 37]`` from ``single [*, N, c_s]``."""
        return {"logits": _exactly(self.logits, representations["single"])}


class PredictedLDDTHead(nn.Module):
    """Distribution of the per-residue lDDT-CA (supplement Algorithm 29).

    - Line 1: the structure module's single representation is normalised and runs through two layers with ReLU.
    - Line 2: a last layer gives the logits of the bins. :func:`fastfold.evoformer.confidence.scores.plddt` takes their
      softmax and its mean (line 3).
    """

    def __init__(self, config: ConfigDict, c_s: int, *, zero_init: bool) -> None:
        super().__init__()
        c = config.num_channels
        self.norm = LayerNorm(c_s)
        self.hidden = Linear(c_s, c, init="relu")
        self.hidden_2 = Linear(c, c, init="relu")
        self.logits = Linear(c, config.num_bins, init=_last(zero_init))

    def forward(self, representations: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``logits [*, N, bins]`` from ``structure_module [*, N, c_s]``."""
        x = self.norm(representations["structure_module"].to(self.logits.weight.dtype))
        return {"logits": self.logits(F.relu(self.hidden_2(F.relu(self.hidden(x)))))}


class PredictedAlignedErrorHead(PairHead):
    """Distribution of the error of residue j after alignment on residue i (section 1.9.7)."""

    def forward(self, representations: dict[str, Tensor]) -> dict[str, Any]:
        """Return ``logits [*, N, N, bins]`` and ``breaks [bins - 1]`` in Å from ``pair [*, N, N, c_z]``."""
        pair, c = representations["pair"], self.config
        breaks = torch.linspace(0.0, c.max_error_bin, c.num_bins - 1, device=pair.device)

        def rows(index: slice) -> Tensor:
            return _exactly(self.logits, pair[..., index, :, :])

        logits = self.on_demand(rows, pair)
        return {"logits": rows(slice(None)) if logits is None else logits, "breaks": breaks}


def _exactly(linear: Linear, x: Tensor) -> Tensor:
    """Apply the layer in the precision of its parameters, because the trunk may run in less."""
    return linear(x.to(linear.weight.dtype))


def _last(zero_init: bool) -> Init:
    return "final" if zero_init else "default"
