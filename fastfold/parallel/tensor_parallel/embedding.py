"""An embedding table cut over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fastfold.errors import ConfigError
from fastfold.parallel.comm.collectives import all_reduce, gather
from fastfold.parallel.comm.groups import shard_sizes
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.tensor_parallel.layout import Partition, ShardSpec, block, layouts, replicated, whole
from fastfold.parallel.tensor_parallel.plain_layers import require_type


class ParallelEmbedding(nn.Module):
    """A table ``[vocabulary, features]``, looked up into the outer layout; make one with :meth:`from_plain`.

    In 1d the vocabulary is cut: a rank looks up its own entries and zeros for the others, and the result is the sum
    over the ranks. In the other modes features are cut like the activations, and the vocabulary over the innermost
    group of rows. The table is gathered along that group for the lookup, and its gradient is reduce-scattered.
    """

    def __init__(self, embedding: nn.Embedding, mesh: ParallelMesh) -> None:
        super().__init__()
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise ConfigError(
                "cannot split an embedding with max_norm, scale_grad_by_freq or sparse gradients; leave it out of "
                "layers="
            )
        outer, inner = layouts(mesh)
        self.layout = outer
        self.masked = not outer.rows
        # In 1d the activations are whole; the ranks that share the table are those of the inner layout.
        self.vocabulary_group = inner.features if self.masked else outer.rows[-1]
        self.sizes = shard_sizes(embedding.num_embeddings, self.vocabulary_group.size)
        self.parts = Partition.even(embedding.embedding_dim, outer.features.size)
        self.padding_idx = embedding.padding_idx
        self._specs = [
            ShardSpec(0, self.vocabulary_group, self.sizes),
            ShardSpec(1, outer.features, self.parts.sizes),
        ]
        self.weight = nn.Parameter(block(embedding.weight, self._specs), embedding.weight.requires_grad)

    @classmethod
    def from_plain(cls, embedding: nn.Embedding, mesh: ParallelMesh) -> ParallelEmbedding:
        """Return this rank's part of a plain table.

        Raises:
            ConfigError: The table has an option that its parts cannot keep, or is of a subclass.
        """
        require_type(embedding, nn.Embedding, "ParallelEmbedding")
        return cls(embedding, mesh)

    def shard_specs(self) -> dict[str, list[ShardSpec]]:
        """Return the cut of the table."""
        return {"weight": self._specs}

    def to_plain(self) -> nn.Embedding:
        """Return the plain table, gathered on every rank (a collective)."""
        weight = whole(self.weight, self._specs)
        return nn.Embedding.from_pretrained(
            weight, freeze=not self.weight.requires_grad, padding_idx=self.padding_idx
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ``ids [batch, ...]``, this rank's rows; return ``[batch, ..., features]``.

        The result is in the outer layout.

        Raises:
            IndexError: An id is not in the vocabulary. On a GPU it ends the process, as in ``nn.Embedding``.
        """
        if not self.masked:
            table = gather(
                replicated(self.weight, self.layout.rows[:-1]), 0, self.vocabulary_group, self.sizes
            )
            return F.embedding(ids, table, self.padding_idx)
        start = sum(self.sizes[: self.vocabulary_group.rank])
        self._check_ids(ids)
        held = (ids >= start) & (ids < start + self.weight.shape[0])
        # Entries of other ranks use an additional row of zeros, which gets no gradient.
        table = torch.cat([self.weight, self.weight.new_zeros(1, self.weight.shape[1])])
        own = torch.where(held, ids - start, self.weight.shape[0])
        padding = -1 if self.padding_idx is None else self.padding_idx - start
        inside = padding if 0 <= padding < self.weight.shape[0] else None
        return all_reduce(F.embedding(own, table, inside), self.vocabulary_group)

    def _check_ids(self, ids: Tensor) -> None:
        """Refuse ids outside of the vocabulary; no rank holds them, so they would become zeros."""
        rows = sum(self.sizes)
        inside = (ids >= 0) & (ids < rows)
        if ids.device.type == "cuda":
            torch._assert_async(inside.all())
        elif not ids.is_meta and not isinstance(ids, FakeTensor) and not bool(inside.all()):
            wrong = int(ids[~inside].flatten()[0])
            raise IndexError(f"expected ids from 0 to {rows - 1} of the vocabulary, found {wrong}")
