"""Names of a package: loaded on first use (PEP 562), imported without garbage collection, and old ones."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar, cast

T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package, for its imports under ``if TYPE_CHECKING:``."""
    modules = _deferred_imports(package)

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # later uses skip this function
        return value

    def names() -> list[str]:
        return sorted({*getattr(sys.modules[package], "__all__", ()), *modules})

    return get, names


def _deferred_imports(package: str) -> dict[str, str]:
    """Return the module of each name that a package imports for type checkers only."""
    loader: Any = sys.modules[package].__spec__.loader  # type: ignore[union-attr]
    blocks = [x for x in ast.parse(loader.get_source(package)).body if isinstance(x, ast.If)]
    imports = [x for block in blocks for x in block.body if isinstance(x, ast.ImportFrom)]
    return {alias.name: x.module for x in imports for alias in x.names if x.module is not None}


class MovedModules(MetaPathFinder):
    """Finder that imports a module at its new path, by the paths of ``moved``: old ones to new ones.

    A path means its module and all below it; the longest one counts. Both paths give the same module, so that
    classes and settings exist once. The warning is a FutureWarning that names the new path.
    """

    def __init__(self, moved: Mapping[str, str]) -> None:
        self._moved = sorted(moved.items(), key=lambda pair: -len(pair[0]))
        self._beginnings = tuple(moved)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how a moved module is loaded; None for any other one."""
        if not fullname.startswith(self._beginnings):  # one test, because every import asks first
            return None
        for old, new in self._moved:
            if fullname == old or fullname.startswith(f"{old}."):
                name = new + fullname[len(old) :]
                warnings.warn(f"{fullname} is {name} now; import that one", FutureWarning, stacklevel=2)
                return ModuleSpec(fullname, _NewPath(name))
        return None


class _NewPath(Loader):
    """Loader that gives the module of another path, unchanged."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec  # the import system has written the old path's


def old_attributes(names: Mapping[str, str]) -> Callable[[T], T]:
    """Return a decorator that gives attributes of a class under old names, too.

    Reading one warns with a DeprecationWarning that names the new one.

    Args:
        names: New names by old ones.
    """

    def decorate(kind: T) -> T:
        for old, new in names.items():
            read = functools.partial(_renamed, old=old, new=new)
            setattr(kind, old, property(read, doc=f"Old name of ``{new}``."))
        return kind

    return decorate


def old_methods(functions: Mapping[str, str]) -> Callable[[T], T]:
    """Return a decorator that gives functions of an object as its methods, as before.

    Reading one warns with a DeprecationWarning that names the function, which is imported then.

    Args:
        functions: Functions by names of methods, such as ``fastfold:view``.
    """

    def decorate(kind: T) -> T:
        for old, function in functions.items():
            read = functools.partial(_as_method, old=old, function=function)
            setattr(
                kind, old, property(read, doc=f"Old form of the function ``{function.replace(':', '.')}``.")
            )
        return kind

    return decorate


def old_keywords(names: Mapping[str, str]) -> Callable[[F], F]:
    """Return a decorator that takes keyword arguments of a function under old names, too.

    Passing one warns with a DeprecationWarning that names the new one; TypeError if both are passed.

    Args:
        names: New names by old ones.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            for old in names.keys() & keywords.keys():
                name, new = function.__name__, names[old]
                if new in keywords:
                    raise TypeError(f"{name}() takes {new}= or its old name {old}=, not both")
                warnings.warn(f"{name}({old}=) is {name}({new}=) now", DeprecationWarning, stacklevel=2)
                keywords[new] = keywords.pop(old)
            return function(*arguments, **keywords)

        return cast(F, call)

    return decorate


def old_arguments(request: type, names: Mapping[str, str]) -> Callable[[F], F]:
    """Return a decorator that takes the fields of a function's request as its arguments, too.

    Positional ones are in the order of the fields, and None is a field's default. Passing them warns with a
    DeprecationWarning.

    Args:
        request: Dataclass of the function's first argument.
        names: Names of fields by old ones.
    """
    import inspect  # slow to import

    order = tuple(inspect.signature(request).parameters)

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if "request" in keywords or isinstance(arguments[0] if arguments else None, request):
                return function(*arguments, **keywords)
            name, kind = function.__name__, request.__name__
            warnings.warn(f"{name} takes a {kind} now", DeprecationWarning, stacklevel=2)
            values = dict(zip(order, arguments, strict=False))
            for old in [key for key in keywords if names.get(key, key) in order]:
                values[names.get(old, old)] = keywords.pop(old)
            chosen = {key: value for key, value in values.items() if value is not None}
            return function(request(**chosen), **keywords)

        return cast(F, call)

    return decorate


def old_functions(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return ``__getattr__`` of a package that gives its functions under old names, too.

    Reading one warns with a DeprecationWarning that names the new one.

    Args:
        package: Name of the package.
        names: New names by old ones.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warnings.warn(f"{package}.{name} is {package}.{names[name]} now", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[package], names[name])

    return get


def _renamed(instance: object, *, old: str, new: str) -> Any:
    kind = type(instance).__name__
    warnings.warn(f"{kind}.{old} is {kind}.{new} now", DeprecationWarning, stacklevel=2)
    return getattr(instance, new)


def _as_method(instance: object, *, old: str, function: str) -> Callable[..., Any]:
    shown = function.replace(":", ".")
    warnings.warn(
        f"{type(instance).__name__}.{old} is the function {shown} now", DeprecationWarning, stacklevel=2
    )
    return functools.partial(pkgutil.resolve_name(function), instance)


@contextlib.contextmanager
def imports_without_collection() -> Iterator[None]:
    """Import modules inside without garbage collection, and leave their objects out of later ones.

    Modules live until the end, so that searches for garbage among them are in vain.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
