"""Choice of an operator's implementation: Triton on GPUs or PyTorch, with PyTorch's dispatcher or without."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import contains
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves

from fastfold.errors import ConfigError
from fastfold.kernels.common.scratch import autocast_is_enabled, without_autocast

Backend = Literal["auto", "triton", "torch", "cueq"]
BACKENDS: tuple[Backend, ...] = ("auto", "triton", "torch", "cueq")
VARIABLE = "FASTFOLD_KERNELS"  #: Environment variable with the default backend

# Each operator asks. For a variable that is not set, ``os.environ`` raises two exceptions within, and the dictionary
# behind it raises none.
_variables = getattr(os.environ, "_data", None)
_environment_names_backend: Callable[[], bool] = (
    partial(contains, os.environ, VARIABLE)
    if _variables is None
    else partial(contains, _variables, os.environ.encodekey(VARIABLE))
)

_OLDEST_16_BITS = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """Return True if Triton's kernels run in its interpreter, on the CPU and slowly (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def requested_backend(backend: str | None) -> str:
    """Return the name of the requested backend: the argument, else ``FASTFOLD_KERNELS``, else ``auto``.

    Raises:
        ConfigError: The backend does not exist.
    """
    name = backend or os.environ.get(VARIABLE) or "auto"
    if name not in BACKENDS:
        raise ConfigError(f"unknown kernel backend {name!r}; use {', '.join(BACKENDS)} ({VARIABLE})")
    return name


def choose_backend(
    x: Tensor, backend: str | None = None, *, fits: bool = True, cueq: bool = False
) -> Literal["triton", "torch", "cueq"]:
    """Choose the implementation for a tensor.

    Args:
        x: Input of the operator.
        backend: ``auto``, ``triton``, ``torch`` or ``cueq``. Default: the environment variable ``FASTFOLD_KERNELS``,
            else ``auto``. ``auto`` takes Triton for float32, bfloat16 and float16 on CUDA. It takes PyTorch for
            everything else, for 16 bits on GPUs below compute capability 8, and after a kernel asked for more than the
            GPU has. It also takes PyTorch on ROCm, where kernels run only if ``triton`` is requested, untested.
            ``cueq`` is ``auto`` for all operators but those of :mod:`fastfold.kernels.common.cuequivariance`.
        fits: False if the operator's Triton kernels do not hold rows of this size, so that PyTorch computes.
        cueq: True for calls that cuEquivariance can serve.

    Raises:
        ConfigError: The backend does not exist, or Triton was asked for and cannot run here.
    """
    # The compiler would guard all variables of the environment.
    is_default = backend is None and not (is_dynamo_compiling() or _environment_names_backend())
    if not x.is_cuda and (is_default or backend == "auto"):
        return "torch"
    name = requested_backend(backend)
    if name == "cueq" and cueq and not x.is_meta:
        return "cueq"
    if name == "torch" or (name != "triton" and not x.is_cuda):
        return "torch"
    reason = _no_triton(x)
    # The interpreter is for tests, and no configuration was built for ROCm.
    explicit_only = interpreted() or torch.version.hip is not None
    if reason is None and (name == "triton" or not explicit_only):
        return "triton" if fits else "torch"
    if name == "triton":
        raise ConfigError(
            f"Triton kernels cannot run here: {reason}; use the backend auto or torch ({VARIABLE})"
        )
    return "torch"


_transform = torch._C._functorch.peek_interpreter_stack  #: Transform of torch.func that runs, or None


def is_traced() -> bool:
    """Return True if operators are counted, faked or compiled in this thread."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def runs_directly(x: Tensor) -> bool:
    """Return True if an operator on ``x`` may run without PyTorch's dispatcher, as in a fold."""
    # The dispatcher of custom operators costs host time, and its first call imports PyTorch's compiler, which takes
    # seconds. The compiler cannot trace the other questions.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or _transform() is not None:
        return False
    return (x.is_cpu or x.is_cuda) and type(x) is Tensor and torch.is_inference_mode_enabled()


@dataclass(frozen=True)
class Operator:
    """Operator that runs without PyTorch's dispatcher where :func:`runs_directly` allows it."""

    forward: Callable[..., Any]
    registered: Any

    def __call__(self, first: Tensor | Sequence[Tensor], /, *arguments: Any, **options: Any) -> Any:
        """Compute the result, with the arguments of ``forward``.

        Raises:
            RuntimeError: An argument carries a derivative of forward mode, or torch.func cannot transform the call.
        """
        x = first if isinstance(first, Tensor) else first[0]
        if not runs_directly(x):
            if forward_ad._current_level >= 0:
                _refuse_tangents((first, arguments, options))
            if not torch.compiler.is_compiling() and _transform() is not None:
                return self._run_transformed(first, *arguments, **options)
            return self.registered(first, *arguments, **options)
        compute = without_autocast(self.forward) if autocast_is_enabled() else self.forward
        return compute(first, *arguments, **options)

    def _run_transformed(self, *arguments: Any, **options: Any) -> Any:
        try:
            return self.registered(*arguments, **options)
        except RuntimeError as error:
            raise RuntimeError(
                "FastFold's operators lack transforms of torch.func: take gradients by torch.autograd.grad and leading "
                "dimensions instead of vmap, or transform the definitions in fastfold.kernels.reference"
            ) from error


def _refuse_tangents(arguments: Any) -> None:
    # PyTorch would leave out the derivatives of a custom operator without a word.
    for x in tree_leaves(arguments):
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(
                "FastFold's operators lack derivatives of forward mode (torch.func.jvp, jacfwd and hessian, "
                "torch.autograd.forward_ad): use reverse mode (backward, torch.autograd.grad), or the definitions in "
                "fastfold.kernels.reference"
            )


_refused: dict[torch.device, str] = {}


def leave_to_pytorch(device: torch.device, reason: str) -> None:
    """Choose PyTorch, for a reason, for all later tensors of a device whose GPU is too small for a kernel."""
    _refused[device] = reason


_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


def _no_triton(x: Tensor) -> str | None:
    """Return the reason why Triton cannot work on ``x``; None if it can."""
    if x.dtype not in _DTYPES:
        return f"they do not support {x.dtype}".replace("torch.", "")
    if not (x.is_cuda or x.is_meta or interpreted()):
        return f"the tensor is on {x.device.type}, and they need a GPU"
    if x.is_cuda and x.dtype.itemsize == 2 and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(x.device)
        if major < _OLDEST_16_BITS:
            # Registers and shared memory of these GPUs do not hold the blocks.
            return f"16 bits need compute capability {_OLDEST_16_BITS}.0, and this GPU has {major}.{minor}"
    if x.device in _refused:
        return _refused[x.device]
    return None if _TRITON_INSTALLED else "the package triton is not installed"
