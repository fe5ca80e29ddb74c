"""Report of a module that is stored in 8 bits: memory, errors, and layers that were left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

_MIB = 1 << 20


@dataclass(frozen=True)
class QuantizationReport:
    """Result of :func:`fastfold.quantize`."""

    bytes_before: int  #: Bytes of parameters and buffers before; shared ones count once
    bytes_after: int  #: Bytes of parameters and buffers after
    quantized: tuple[str, ...]  #: Names of the layers in 8 bits
    #: Reason of each layer with parameters that is not in 8 bits, by name
    refused: Mapping[str, str] = field(default_factory=dict)
    #: Largest error of each output over all batches, relative to its norm, by name; empty without batches
    errors: Mapping[str, float] = field(default_factory=dict)
    #: Largest error of each tested layer's output, from its own input, by name
    layer_errors: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"{len(self.quantized)} layers in 8 bits: {self.bytes_before / _MIB:,.1f} MiB of parameters before, "
            f"{self.bytes_after / _MIB:,.1f} MiB after"
        ]
        lines += [
            f"output {name or '(the only one)'}: error {error:.2%}" for name, error in self.errors.items()
        ]
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
            lines.append(f"not in 8 bits: {names[0]}{more}: {reason}")
        return "\n".join(lines)


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes that a module's parameters and buffers hold; shared memory counts once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if not x.is_meta
    }
    return sum(storages.values())
