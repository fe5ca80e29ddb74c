"""Shipped launches, recorded without a GPU, and the resources of their machine code."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastfold.kernels.common.backend import launches_replaced
from fastfold.kernels.common.float32_setting import float32_setting
from fastfold.kernels.common.tuning import CHIPS, FALLBACK, TF32X3, as_chip

ARITHMETICS = (
    ("fp32", torch.float32, "highest", "ieee"),
    (TF32X3, torch.float32, "highest", TF32X3),
    ("tf32", torch.float32, "high", "tf32"),
    ("bf16", torch.bfloat16, "highest", "ieee"),
    ("fp16", torch.float16, "highest", "ieee"),
)
"""Name, dtype, PyTorch's float32 setting, and ``input_precision`` of every arithmetic that kernels ship for."""

BLOCKS = frozenset(("BT", "BQ", "BK", "BM", "BH", "BO", "BI", "BJ", "BA", "BE", "BS"))
"""Names of the kernels' block sizes."""

NewTensor = Callable[..., Tensor]
"""Function that makes a tensor of a shape, without memory, in the dtype of the recorded launches."""


@dataclass(frozen=True)
class KernelVariant:
    """Kernel with the arguments of a launch, which decide its machine code."""

    #: Name in the table of results, with the variant's properties: ``attention_forward bf16 D=32 any``
    name: str
    kernel: Any  #: The ``triton.jit`` function
    arguments: tuple[Any, ...] = ()  #: Positional arguments of the launch; its tensors are without memory
    #: Keyword arguments: ``tl.constexpr`` ones, block sizes, ``num_warps``, ``num_stages``
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Class of chips of the configuration, a key of :data:`~fastfold.kernels.common.tuning.CHIPS`
    chip: str = FALLBACK

    @property
    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities that the variant ships for."""
        return CHIPS[self.chip].architectures

    @property
    def blocks(self) -> dict[str, int]:
        """Block sizes by their names in the table of configurations."""
        return {name: x for name, x in self.options.items() if name in BLOCKS}

    @property
    def schedule(self) -> tuple[int, int]:
        """Number of warps of a program, and number of stages of its software pipelining."""
        return self.options["num_warps"], self.options["num_stages"]

    def defect(self, needs: Needs) -> str | None:
        """Return the reason why a configuration with these needs must not ship; None if it may."""
        if needs.spills:
            return f"{needs.spills} bytes per thread do not fit into registers"
        limit = CHIPS[self.chip].shared
        return f"{needs.shared} of {limit} bytes of shared memory" if needs.shared > limit else None


@dataclass(frozen=True)
class Needs:
    """GPU resources that a compiled kernel needs.

    They are registers per thread, bytes of shared memory per program, and bytes per thread that do not fit into
    registers.
    """

    registers: int
    shared: int
    spills: int


def recorded_variants(
    launch: Callable[[NewTensor, int], object], size_name: str, sizes: Iterable[int], suffix: str = ""
) -> list[KernelVariant]:
    """Record the launches of a function in every arithmetic and size, for each class of chips.

    ``launch`` gets a function that makes tensors, and a size. A kernel that it launches twice counts once. The sizes
    are all that configurations ship for, and ``size_name`` and ``suffix`` stand around them in the names of the
    variants.
    """
    found: dict[str, KernelVariant] = {}
    for (arithmetic, dtype, setting, precision), size, chip in itertools.product(ARITHMETICS, sizes, CHIPS):
        new = functools.partial(torch.empty, dtype=dtype, device="meta")
        with (
            _float32_products(setting),
            as_chip(chip, precision) as origins,
            _recorded_launches() as launches,
        ):
            launch(new, size)
        for kernel, arguments, options in launches:
            name = kernel.__name__.removesuffix("_kernel")
            if origins[name] == chip and options.get("PRECISION", "ieee") == precision:
                title = f"{name} {arithmetic} {size_name}={size} {suffix}{chip}"
                found.setdefault(title, KernelVariant(title, kernel, arguments, options, chip))
    return list(found.values())


@contextmanager
def _recorded_launches() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Record launches instead of running them: kernel, positional and keyword arguments."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def keep(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **options: launches.append((kernel, arguments, options))

    with launches_replaced(keep):
        yield launches


@contextmanager
def _float32_products(setting: str) -> Iterator[None]:
    before = float32_setting()
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
