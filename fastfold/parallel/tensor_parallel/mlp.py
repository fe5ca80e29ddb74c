"""The two-layer perceptron of a transformer block, on the ranks of a tensor parallel group."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.tensor_parallel.linear import ParallelLinear


class ParallelMLP(nn.Module):
    """Linear, activation, linear; from the outer layout to the outer layout. Make one with :meth:`from_plain`."""

    def __init__(self, first: ParallelLinear, activation: nn.Module, second: ParallelLinear) -> None:
        super().__init__()
        self.first, self.activation, self.second = first, activation, second

    @classmethod
    def from_plain(cls, mlp: nn.Sequential, mesh: ParallelMesh) -> ParallelMLP:
        """This rank's part of ``nn.Sequential(nn.Linear, activation, nn.Linear)``.

        The activation has to work on each number alone.

        Raises:
            ConfigError: The modules are others.
        """
        modules = list(mlp)
        first, second = modules[0], modules[-1]
        if len(modules) != 3 or not isinstance(first, nn.Linear) or not isinstance(second, nn.Linear):
            names = ", ".join(type(module).__name__ for module in modules)
            raise ConfigError(f"a parallel MLP is made of Linear, an activation and Linear, got {names}")
        return cls(
            ParallelLinear.from_plain(first, mesh, "first"),
            modules[1],
            ParallelLinear.from_plain(second, mesh, "second"),
        )

    def to_plain(self) -> nn.Sequential:
        """The plain modules, gathered on every rank (a collective)."""
        return nn.Sequential(self.first.to_plain(), self.activation, self.second.to_plain())

    def forward(self, x: Tensor, row_sizes: Sequence[int] | None = None) -> Tensor:
        """Apply to ``x`` ``[batch, ..., features]``; ``row_sizes`` as in :meth:`ParallelLinear.forward`."""
        return self.second(self.activation(self.first(x, row_sizes)), row_sizes)
