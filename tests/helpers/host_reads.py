"""Notices where the host looks at values of tensors: on a GPU it would wait there for everything before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_OPERATORS = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_METHODS = {
    Tensor.tolist,
    Tensor.item,
    Tensor.numpy,
    Tensor.cpu,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
}
# On a CPU it looks whether its numbers are classes, on a GPU it does not.
_ON_CPU_ALONE = {torch.nn.functional.one_hot}


class HostRead(AssertionError):
    """The host would have waited for the device."""


def _in_plain_operator() -> bool:
    """Whether a fused operator is being computed by its plain definition, in whose place a GPU has kernels."""
    frame = sys._getframe()
    while frame is not None:
        if "/fastfold/kernels/ops/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Functions(TorchFunctionMode):
    """Reads that no operator carries out, and what reads on CPUs alone."""

    def __init__(self, reads: NoHostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _METHODS and isinstance(args[0], Tensor):
            self._reads.refuse(getattr(func, "__name__", str(func)), args[0])
        if func in _ON_CPU_ALONE:
            with self._reads.allowed():
                return func(*args, **dict(kwargs or {}))
        return func(*args, **dict(kwargs or {}))


class NoHostReads(TorchDispatchMode):
    """Inside, reads of tensors raise :class:`HostRead`: ``.item()``, ``.tolist()``, ``bool(x)``, ``nonzero``, masks as
    indices and what else needs values on the host.

    Args:
        host: Tensors that would be on the host anyway, an optimizer's counters of steps for example.
    """

    def __init__(self, host: Callable[[], Iterable[Tensor]] = tuple) -> None:
        super().__init__()
        self._host, self._allowed = host, 0
        self._functions = _Functions(self)

    def __enter__(self) -> NoHostReads:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, reads are no reads of a device."""
        self._allowed += 1
        try:
            yield
        finally:
            self._allowed -= 1

    def refuse(self, what: str, x: Tensor) -> None:
        """Raise, unless the tensor is one of the host's."""
        if not (self._allowed or _in_plain_operator() or any(x is other for other in self._host())):
            raise HostRead(f"{what} of a tensor of {tuple(x.shape)}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name in _OPERATORS:
            self.refuse(name, args[0])
        if name in _INDEXING:
            for index in tree_iter(args[1]):
                if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                    self.refuse(f"{name} with a mask", index)
        return func(*args, **(kwargs or {}))


def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package take the ways that it takes on a GPU, where it does not look at values."""
    found = 0
    for name, module in list(sys.modules.items()):
        if name.startswith("fastfold.") and hasattr(module, "reads_are_free"):
            monkeypatch.setattr(module, "reads_are_free", lambda device: False)
            found += 1
    assert found > 5
