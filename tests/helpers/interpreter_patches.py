"""Triton's interpreter without the repeated patches of ``triton.language``.

It replaces the functions of ``triton.language`` by its own for each launch, and does so again at every call of a device
function within a launch: a third of the time of the kernels' tests. Here a launch does so once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import triton
from triton import language
from triton.runtime import interpreter

_patch = getattr(interpreter, "_patch_lang", None)  # not public: other versions of Triton may lack it
_launch = interpreter.GridExecutor.__call__
_running = threading.local()
_languages: dict[str, set[str]] = {}


class _Unchanged:
    """Scope of a call that has changed nothing."""

    def restore(self) -> None:
        pass


def _patch_once(fn: Callable[..., Any]) -> Any:
    patched = getattr(_running, "languages", None)
    assert _patch is not None
    if patched is None:
        return _patch(fn)
    module = fn.__globals__["__name__"]
    if module not in _languages:
        names = fn.__globals__.values()
        _languages[module] = {
            one.__name__ for one in (language, language.core) if any(one is x for x in names)
        }
    if _languages[module] <= patched:
        return _Unchanged()
    patched |= _languages[module]
    return _patch(fn)


def _launch_once(self: Any, *args: Any, **kwargs: Any) -> Any:
    _running.languages = set()
    try:
        return _launch(self, *args, **kwargs)
    finally:
        _running.languages = None


if _patch is not None:
    interpreter._patch_lang = _patch_once
    interpreter.GridExecutor.__call__ = _launch_once

if hasattr(interpreter, "_get_np_dtype"):
    _np_dtype = interpreter._get_np_dtype
    _np_dtype_once = functools.cache(_np_dtype)

    def _dtype_of_elements(kind: language.dtype) -> Any:
        """Return NumPy's dtype of a type's elements, without the table of all types made at every call."""
        element = kind.scalar
        return (_np_dtype if element.is_ptr() else _np_dtype_once)(element)

    interpreter._get_np_dtype = _dtype_of_elements

# Methods of types differ in other versions of Triton.
if triton.__version__.startswith("3.9."):
    from tests.helpers import interpreter_types

    interpreter_types.install()
