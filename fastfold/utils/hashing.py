"""Digests of inputs and of files, equal in every process and on every machine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np


def input_hash(*values: Any) -> str:
    """Return a digest of inputs and settings, equal in every process and on every machine.

    Args:
        values: Any nesting of mappings with text keys, lists, tuples, sets, dataclasses, text, bytes, paths,
            numbers, booleans, None and numpy arrays. The order of a mapping or a set does not count; a tuple
            equals a list.

    Returns:
        64 hexadecimal digits of SHA-256.

    Raises:
        TypeError: A value has another type, whose text form might change from run to run.
    """
    canonical = json.dumps(_canonical(values), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _canonical(value: Any) -> Any:
    """Convert a value to JSON's types; other types are marked so that none equals another."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, np.generic):
        return _canonical(value.item())
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("input_hash takes no arrays of objects")
        # Little-endian, so that the machine's own byte order does not count.
        data = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
        digest = hashlib.sha256(data).hexdigest()
        return {"\0array": [value.dtype.newbyteorder("<").str, list(value.shape), digest]}
    if isinstance(value, bytes):
        return {"\0bytes": hashlib.sha256(value).hexdigest()}
    if isinstance(value, os.PathLike):
        return {"\0path": os.fspath(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _canonical(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("input_hash takes mappings with text keys only")
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return {"\0set": sorted((_canonical(item) for item in value), key=json.dumps)}
    raise TypeError(f"input_hash cannot take a {type(value).__name__}")


def file_digest(path: str | os.PathLike[str], algorithm: str = "sha256") -> str:
    """Return the digest of a file's contents in hexadecimal digits, or raise OSError."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
