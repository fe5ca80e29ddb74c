"""Linear layers of plain models: PyTorch's, and those of GPT-2 with a transposed weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.tensor_parallel.layout import Partition
from fastfold.parallel.tensor_parallel.linear import Linear1D, ParallelLinear, Role
from fastfold.utils.module_structure import shallow_copy

if TYPE_CHECKING:
    from typing import TypeGuard


def is_transposed(layer: nn.Module) -> bool:
    """Return True for a layer ``x @ weight + bias`` with ``weight [in, out]``, transformers' ``Conv1D``."""
    return type(layer).__name__ == "Conv1D" and (isinstance(getattr(layer, "nf", None), int))


def is_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True for ``nn.Linear`` itself and for a layer with a transposed weight."""
    return type(layer) is nn.Linear or is_transposed(layer)


def features(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output features of a linear layer."""
    outputs, inputs = cast(Tensor, layer.weight).shape
    return (outputs, inputs) if is_transposed(layer) else (inputs, outputs)


def cut_linear(
    layer: nn.Module,
    mesh: ParallelMesh,
    role: Role,
    *,
    in_parts: Partition | None = None,
    out_parts: Partition | None = None,
) -> ParallelLinear:
    """Return this rank's part of a linear layer of either kind; see :meth:`ParallelLinear.from_plain`.

    Raises:
        ConfigError: The layer is of another class, or is transposed and the layout is not 1d.
    """
    if not is_transposed(layer):
        return ParallelLinear.from_plain(
            cast(nn.Linear, layer), mesh, role, in_parts=in_parts, out_parts=out_parts
        )
    if mesh.plan.tp_mode != "1d":
        raise ConfigError(f"{type(layer).__name__} is cut in 1d only, plain tp_mode={mesh.plan.tp_mode}")
    return TransposedLinear(layer, mesh, role, in_parts, out_parts)


class TransposedLinear(Linear1D):
    """This rank's part of a layer with ``weight [in, out]``; the part has ``weight [out, in]``.

    Made by :func:`cut_linear`; the arguments are those of :class:`ParallelLinear`.
    """

    def __init__(
        self,
        layer: nn.Module,
        mesh: ParallelMesh,
        role: Role,
        in_parts: Partition | None,
        out_parts: Partition | None,
    ) -> None:
        super().__init__(_turned(layer), mesh, role, in_parts, out_parts)
        # In a list, so that it is not a submodule; its tensors are released.
        self._plain = [shallow_copy(layer)]
        for name in list(self._plain[0]._parameters):
            self._plain[0]._parameters[name] = None

    def to_plain(self) -> nn.Linear:
        """Return the plain layer, gathered on every rank (a collective)."""
        linear, plain = super().to_plain(), shallow_copy(self._plain[0])
        plain.weight = nn.Parameter(linear.weight.detach().T.contiguous(), linear.weight.requires_grad)
        plain.bias = linear.bias
        return cast(nn.Linear, plain)


def _turned(layer: nn.Module) -> nn.Linear:
    """Return a plain linear layer with the memory of a transposed one."""
    inputs, outputs = features(layer)
    bias = cast("nn.Parameter | None", layer.bias)
    linear = nn.Linear(inputs, outputs, bias is not None, device="meta")
    weight = cast(nn.Parameter, layer.weight)
    linear.weight = nn.Parameter(weight.detach().T, weight.requires_grad)
    if bias is not None:
        linear.bias = bias
    return linear
