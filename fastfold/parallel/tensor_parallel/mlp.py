"""The two-layer perceptron of a transformer block, on the ranks of a tensor parallel group."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fastfold.errors import ConfigError
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.tensor_parallel.linear import ParallelLinear
from fastfold.parallel.tensor_parallel.plain_layers import require_type
from fastfold.parallel.tensor_parallel.randomness import draws, own_randomness


class ParallelMLP(nn.Module):
    """Linear, activation, linear; from the outer layout to the outer layout. Make one with :meth:`from_plain`."""

    def __init__(
        self, first: ParallelLinear, activation: nn.Module, second: ParallelLinear, group: Group
    ) -> None:
        super().__init__()
        self._group = group
        self.first, self.activation, self.second = first, activation, second

    @classmethod
    def from_plain(cls, mlp: nn.Sequential, mesh: ParallelMesh) -> ParallelMLP:
        """Return this rank's part of ``nn.Sequential(nn.Linear, activation, nn.Linear)``.

        Raises:
            ConfigError: The modules are others, or the activation is not elementwise: it has parameters of its own
                (``nn.PReLU``), or combines several features (``nn.Softmax``).
        """
        require_type(mlp, nn.Sequential, "ParallelMLP")
        modules = list(mlp)
        first, second = modules[0], modules[-1]
        if len(modules) != 3 or not isinstance(first, nn.Linear) or not isinstance(second, nn.Linear):
            names = ", ".join(type(module).__name__ for module in modules)
            raise ConfigError(f"a parallel MLP expects Linear, an activation and Linear, found {names}")
        _check_elementwise(modules[1])
        return cls(
            ParallelLinear.from_plain(first, mesh, "first"),
            modules[1],
            ParallelLinear.from_plain(second, mesh, "second"),
            mesh.group("tp"),
        )

    def to_plain(self) -> nn.Sequential:
        """Return the plain modules, gathered on every rank (a collective)."""
        return nn.Sequential(self.first.to_plain(), self.activation, self.second.to_plain())

    def forward(self, x: Tensor, row_sizes: Sequence[int] | None = None) -> Tensor:
        """Apply to ``x`` ``[batch, ..., features]``; ``row_sizes`` as in :meth:`ParallelLinear.forward`.

        Dropout of the activation draws different numbers on each rank.
        """
        hidden = self.first(x, row_sizes)
        if self.training and any(draws(module) for module in self.activation.modules()):
            with own_randomness(self._group, hidden.device):
                hidden = self.activation(hidden)
        else:
            hidden = self.activation(hidden)
        return self.second(hidden, row_sizes)


@torch.no_grad()
def _check_elementwise(activation: nn.Module) -> None:
    """Refuse an activation whose result depends on the cut of the features."""
    name = type(activation).__name__
    if next(activation.parameters(), None) is not None:
        raise ConfigError(
            f"a parallel MLP cannot cut the parameters of its activation {name}, which would become different on the "
            "ranks; use an activation without parameters"
        )
    with unset_fake_temporarily():  # fake tensors hold only shapes
        x = torch.linspace(-3, 3, 24).reshape(3, 8)
        try:
            probed = copy.deepcopy(activation).to("cpu").eval()
            whole, parts = probed(x), torch.cat([probed(part) for part in x.split(4, -1)], -1)
            alike = whole.shape == parts.shape and torch.allclose(whole, parts, rtol=1e-5, atol=1e-6)
        except (RuntimeError, IndexError, ValueError):
            alike = False
    if not alike:
        raise ConfigError(
            f"a parallel MLP needs an elementwise activation, and {name} combines several features, which are cut over "
            "the ranks"
        )
