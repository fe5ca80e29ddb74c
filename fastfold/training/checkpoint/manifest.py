"""What a checkpoint says of itself: its files with their lengths and SHA-256, and the small part of its state."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastfold.utils.hashing import input_hash

MANIFEST = "state.json"
"""Its file; the last one that is written."""

_FORMATS = (1, 2)
"""The first one has lengths, but no hashes."""

_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]+")
"""Names of files that stay in the checkpoint's folder."""

Json = dict[str, Any]


class ManifestError(Exception):
    """A manifest that cannot be used; the message says why."""


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint.

    Attributes:
        size: Its length in bytes.
        sha256: Hexadecimal digits, or None where an earlier version wrote the checkpoint.
    """

    size: int
    sha256: str | None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: Steps done.
        files: By name.
        state: What is small, as JSON.
    """

    step: int
    files: Mapping[str, FileRecord]
    state: Json

    def to_json(self) -> bytes:
        """The manifest's own file."""
        files = {name: vars(file) for name, file in self.files.items()}
        content = {"format": _FORMATS[-1], "step": self.step, "files": files, "state": self.state}
        content = json.loads(json.dumps(content))
        return json.dumps(content | {"sha256": input_hash(content)}, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Undoes :meth:`to_json`.

        Raises:
            ManifestError: It is damaged, of a version that is not known, or names a file outside its folder.
        """
        try:
            content = json.loads(text)
            digest = content.pop("sha256", None)
            if content["format"] not in _FORMATS:
                raise ManifestError(
                    f"it has format {content['format']}, this version reads {' and '.join(map(str, _FORMATS))}"
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
