"""Manifest of a checkpoint: its files with lengths and SHA-256, and the state other than tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastfold.utils.hashing import input_hash

MANIFEST = "state.json"  #: Name of the manifest's file, which is written last

_FORMATS = (1, 2)  #: Format 1 has lengths, but no hashes

_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]+")
"""Valid names of files: without separators, so that they stay in the checkpoint's folder."""

Json = dict[str, Any]


class ManifestError(Exception):
    """Invalid manifest; the message gives the reason."""


@dataclass(frozen=True)
class FileRecord:
    """Record of a checkpoint's file.

    The size is in bytes. ``sha256`` is None in checkpoints of format 1.
    """

    size: int
    sha256: str | None


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    These are the number of finished steps, records of the files by name, and state other than tensors, as JSON.
    """

    step: int
    files: Mapping[str, FileRecord]
    state: Json

    def to_json(self) -> bytes:
        """Return the contents of the manifest's file."""
        files = {name: vars(file) for name, file in self.files.items()}
        content = {"format": _FORMATS[-1], "step": self.step, "files": files, "state": self.state}
        content = json.loads(json.dumps(content))
        return json.dumps(content | {"sha256": input_hash(content)}, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Parse a manifest's file; inverse of :meth:`to_json`.

        Raises:
            ManifestError: The text is damaged, has an unknown format, or names a file outside its folder.
        """
        try:
            content = json.loads(text)
            digest = content.pop("sha256", None)
            if content["format"] not in _FORMATS:
                raise ManifestError(
                    f"expected format {' or '.join(map(str, _FORMATS))}, found {content['format']}"
                )
            hashed = content["format"] > 1
            if hashed and digest != input_hash(content):
                raise ManifestError(f"its {MANIFEST} was changed after it was written")
            files = {
                str(name): FileRecord(int(file["size"]), str(file["sha256"]))
                if hashed
                else FileRecord(int(file), None)
                for name, file in content["files"].items()
            }
            for name in files:
                if _NAME.fullmatch(name) is None:
                    raise ManifestError(
                        f"its {MANIFEST} names the file {name[:60]!r}; expected letters, digits, '.', '_' and '-'"
                    )
            return cls(int(content["step"]), files, dict(content["state"]))
        except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ManifestError(f"its {MANIFEST} cannot be read") from error
