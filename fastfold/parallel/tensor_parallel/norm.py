"""LayerNorm over features that are split over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.comm.collectives import gather
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.tensor_parallel.layout import Partition, ShardSpec, block, layouts, replicated, whole
from fastfold.parallel.tensor_parallel.plain_layers import require_type


class ParallelLayerNorm(nn.Module):
    """LayerNorm in the outer layout; make one with :meth:`from_plain`.

    Each rank computes mean and squared deviation of its own features. All ranks' are gathered, two numbers for each
    row and rank, and combined as in a parallel variance (Chan et al. 1979), without cancellation. The statistics are
    at least float32. Weight and bias are cut like the features. Their gradients are summed over the ranks with other
    rows.
    """

    def __init__(self, norm: nn.LayerNorm, mesh: ParallelMesh) -> None:
        super().__init__()
        if len(norm.normalized_shape) != 1:
            raise ConfigError(
                f"cannot split LayerNorm over {tuple(norm.normalized_shape)}; expected one over the last dimension"
            )
        self.layout, _ = layouts(mesh)
        self.parts = Partition.even(norm.normalized_shape[0], self.layout.features.size)
        self.eps = norm.eps
        self._specs = [ShardSpec(0, self.layout.features, self.parts.sizes)]
        self.weight = self._parameter(norm.weight)
        self.bias = self._parameter(norm.bias)

    def _parameter(self, values: Tensor | None) -> nn.Parameter | None:
        return None if values is None else nn.Parameter(block(values, self._specs), values.requires_grad)

    @classmethod
    def from_plain(cls, norm: nn.LayerNorm, mesh: ParallelMesh) -> ParallelLayerNorm:
        """Return this rank's part of a plain layer.

        Raises:
            ConfigError: The layer normalises more than the last dimension, or is of a subclass.
        """
        require_type(norm, nn.LayerNorm, "ParallelLayerNorm")
        return cls(norm, mesh)

    def shard_specs(self) -> dict[str, list[ShardSpec]]:
        """Return the cut of each parameter."""
        return {name: self._specs for name, _ in self.named_parameters()}

    def to_plain(self) -> nn.LayerNorm:
        """Return the plain layer, gathered on every rank (a collective)."""
        norm = nn.LayerNorm(sum(self.parts.sizes), self.eps, self.weight is not None, self.bias is not None)
        with torch.no_grad():
            for name in ("weight", "bias"):
                own = getattr(self, name)
                if own is not None:
                    setattr(norm, name, nn.Parameter(whole(own, self._specs), own.requires_grad))
        return norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``, ``[batch, ..., features]`` in the outer layout."""
        weight = None if self.weight is None else replicated(self.weight, self.layout.rows)
        bias = None if self.bias is None else replicated(self.bias, self.layout.rows)
        group = self.layout.features
        if group.size == 1:
            return F.layer_norm(x, (x.shape[-1],), weight, bias, self.eps)
        wide = x if x.dtype == torch.float64 else x.float()
        counts = wide.new_tensor(self.parts.sizes).view(-1, *[1] * (x.dim() - 1))
        # A rank without features counts zero features with mean 0.
        own_mean = wide.sum(-1) / max(x.shape[-1], 1)
        own_square = (wide - own_mean[..., None]).square().sum(-1)
        means, squares = gather(torch.stack([own_mean, own_square])[None], 0, group).unbind(1)
        mean = (means * counts).sum(0) / sum(self.parts.sizes)
        square = (squares + counts * (means - mean).square()).sum(0)
        scale = (square / sum(self.parts.sizes) + self.eps).rsqrt()
        y = (wide - mean[..., None]) * scale[..., None]
        if weight is not None:
            y = y * weight
        return (y if bias is None else y + bias).to(x.dtype)
