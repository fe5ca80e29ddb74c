"""Files of a job: its request, with target, templates and settings, and its answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fastfold.data.queries.fasta import parse_fasta
from fastfold.data.queries.formats import parse_a3m_query
from fastfold.data.queries.records import QueryFile, targets_of_records
from fastfold.data.targets import Target, safe_stem, target_from_sequence, unique_targets
from fastfold.errors import ConfigError, InputError
from fastfold.inference.config import InferConfig
from fastfold.inference.request import RunOptions
from fastfold.utils.atomic_files import write_atomic
from fastfold.utils.foreign_text import read_json_object

Kind = Literal["sequence", "fasta", "a3m"]  #: Formats of a target
SETTINGS = (
    *("num_recycles", "recycle_tolerance", "seeds", "max_msa", "dropout", "num_ensemble", "stop_at_score"),
    *("use_cluster_profile", "rank", "cyclic", "pae", "plots", "relax", "num_relax"),
    *("save_representations", "save_distogram", "save_recycles"),
)
"""Fields of :class:`~fastfold.inference.config.InferConfig` that a request may set: none names a file or a device."""
RUN_SETTINGS = ("num_models", "pair_mode", "zip_results")
"""Fields of :class:`~fastfold.inference.request.RunOptions` that a request may set."""
MAX_SEEDS = 100  #: Largest number of seeds of a job
RESULTS = "results"  #: Name of the folder of results in a job's folder
PROGRESS = "progress.log"  #: Name of the file of a job's progress, one line each
ANSWER = "answer.json"  #: Name of the file with the answer of a finished job
_REQUEST = "request.json"
_MAX_ANSWER = 1 << 24
_MAX_REQUEST = 1 << 34


@dataclass(frozen=True)
class JobRequest:
    """Request of one target's fold.

    ``text`` is a sequence, or content of a FASTA or A3M file, with one target, whose name is empty for that in the
    text. Templates are content by name, and settings those of :data:`SETTINGS` and :data:`RUN_SETTINGS`.
    """

    kind: Kind
    text: str = field(repr=False)
    name: str = ""
    complex_: bool = False
    templates: Mapping[str, str] = field(default_factory=dict, repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def target(self) -> Target:
        """Parse the only target of the text, or raise InputError."""
        if self.kind == "sequence":
            return target_from_sequence(self.text, self.name or "query")
        errors: list[InputError] = []
        file = QueryFile(f"query.{self.kind}", self.text.encode("utf-8", "surrogatepass"))
        records = [parse_a3m_query(file)] if self.kind == "a3m" else parse_fasta(file, opens_files=False)
        targets = unique_targets(targets_of_records(records, file, errors, complex_=self.complex_), errors)
        if errors:
            raise errors[0]
        if len(targets) != 1:
            raise InputError(
                f"expected one target, found {len(targets)}; submit each record, or set complex for one of all records"
            )
        if not self.name:
            return targets[0]
        return replace(targets[0], name=safe_stem(self.name), record=self.name)

    def config(self, base: InferConfig) -> InferConfig:
        """Return the server's settings of folds with those of the request, or raise ConfigError."""
        requested = {name: value for name, value in self.settings.items() if name in SETTINGS}
        config = replace(base, **requested)
        if len(config.seeds) > MAX_SEEDS:
            raise ConfigError(f"seeds: expected at most {MAX_SEEDS}, found {len(config.seeds)}")
        return config

    def options(self, base: RunOptions, folder: Path) -> RunOptions:
        """Return the server's options of runs with those of the request, or raise ConfigError.

        The folder of the job has the templates.
        """
        requested = {name: value for name, value in self.settings.items() if name in RUN_SETTINGS}
        number = requested.get("num_models")
        if number is not None and number < 1:
            raise ConfigError(f"num_models must be at least 1, found {number}")
        structures = tuple(folder / name for name in self._template_files())
        return replace(base, templates=replace(base.templates, structures=structures), **requested)

    def fingerprint(self) -> str:
        """Return a hash of the settings: jobs with equal ones can be folded together."""
        text = json.dumps([dict(self.settings), bool(self.templates)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def write(self, folder: Path) -> None:
        """Write the request and its templates to the folder of the job, or raise WriteError."""
        if self.templates:
            (folder / "templates").mkdir(exist_ok=True)
        for place, text in self._template_files().items():
            write_atomic(folder / place, text)
        write_atomic(folder / _REQUEST, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> JobRequest:
        """Read the request of a job's folder, which the server wrote."""
        return cls(**read_json_object(folder / _REQUEST, "fields of a request to values", limit=_MAX_REQUEST))

    def _template_files(self) -> dict[str, str]:
        """Return the content of each template by its place in the folder of the job."""
        return {f"templates/{template_file(name, text)}": text for name, text in self.templates.items()}


def template_file(name: str, text: str) -> str:
    """Return a safe file name for a template, with the suffix of its format, from its name and content."""
    stem = name
    for suffix in (".cif", ".mmcif", ".pdb", ".ent"):
        stem = stem.removesuffix(suffix)
    return safe_stem(stem) + (".cif" if text.lstrip().startswith("data_") else ".pdb")


@dataclass(frozen=True)
class JobAnswer:
    """Result of a job in words, and scores and names of files of a folded one."""

    state: Literal["done", "failed"]
    text: str
    scores: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def write_answer(folder: Path, answer: JobAnswer) -> None:
    """Write the answer to the job of a folder."""
    write_atomic(folder / ANSWER, json.dumps(asdict(answer)))


def read_answer(folder: Path) -> JobAnswer | None:
    """Return the answer in a job's folder, None if there is none yet.

    Raises:
        InputError: The answer cannot be read, or is damaged.
    """
    path = folder / ANSWER
    if not path.exists():
        return None
    content = read_json_object(path, "parts of an answer to their values", limit=_MAX_ANSWER)
    state, text = content.get("state"), content.get("text")
    scores, files = content.get("scores", {}), content.get("files", [])
    if (
        state not in ("done", "failed")
        or not isinstance(text, str)
        or not isinstance(scores, dict)
        or not (isinstance(files, list) and all(isinstance(name, str) for name in files))
    ):
        raise InputError("is not an answer to a job", path=path)
    return JobAnswer(state, text, scores, files)
