"""Bodies of requests and answers, checked by pydantic, which also makes their part of the OpenAPI description."""

from __future__ import annotations

import types
from dataclasses import fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from fastfold.errors import ConfigError
from fastfold.inference import alignment_search
from fastfold.inference.config import InferConfig
from fastfold.inference.request import RunOptions
from fastfold.products.serve.request import RUN_SETTINGS, SETTINGS, JobRequest, Kind, template_file

MAX_TEXT = 64 << 20  #: Largest number of characters of a target or a template
MAX_PRIORITY = 10
_MAX_TEMPLATES = 20
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


def _json_type(hint: Any) -> Any:
    """Return the type of a setting in JSON, which has lists in place of tuples."""
    if get_origin(hint) is tuple:
        return list[get_args(hint)[0]]  # type: ignore[misc]
    if isinstance(hint, types.UnionType) or get_origin(hint) is Union:
        return Union[tuple(_json_type(one) for one in get_args(hint))]  # noqa: UP007
    return hint


def _settings_model() -> type[BaseModel]:
    """Make the model of a request's settings from those of a fold and a run, which are all optional."""
    chosen: dict[str, Any] = {}
    for source, names in ((InferConfig, SETTINGS), (RunOptions, RUN_SETTINGS)):
        hints = get_type_hints(source, localns=vars(alignment_search))  # has names for type checkers alone
        defaults = {field.name: field.default for field in fields(source)}
        for name in names:
            default = defaults[name]
            chosen[name] = (_json_type(hints[name]), list(default) if isinstance(default, tuple) else default)
    return create_model("Settings", __config__=_STRICT, __doc__="Settings of a fold.", **chosen)


Settings = _settings_model()
"""Model of a request's settings, named and typed as in :class:`~fastfold.inference.config.InferConfig`."""


class TemplateStructure(BaseModel):
    """Structure to use as a template."""

    model_config = _STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,99}$", description="such as 1abc")]
    text: Annotated[Text, Field(description="content of the file, mmCIF or PDB")]


class Submission(BaseModel):
    """Target to fold, in exactly one of three formats."""

    model_config = _STRICT

    sequence: Annotated[
        Text | None, Field(description="one letter per residue, ':' between the chains of a complex")
    ] = None
    fasta: Annotated[Text | None, Field(description="content of a FASTA file with one target")] = None
    a3m: Annotated[Text | None, Field(description="content of an A3M file: a target with its alignment")] = (
        None
    )
    name: Annotated[str, Field(max_length=200, description="name of the target in files")] = ""
    complex: Annotated[bool, Field(description="all records of fasta are one complex")] = False
    templates: Annotated[list[TemplateStructure], Field(max_length=_MAX_TEMPLATES)] = []
    settings: Settings = Settings()  # type: ignore[valid-type]
    priority: Annotated[
        int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="jobs of higher priority start first")
    ] = 0

    def request(self) -> JobRequest:
        """Return the request to store, or raise ConfigError if fields contradict each other."""
        kinds: tuple[Kind, ...] = get_args(Kind)
        sent = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(sent) != 1:
            raise ConfigError(
                f"expected exactly one of sequence, fasta and a3m, found {' and '.join(sent) or 'none'}"
            )
        if self.complex and self.fasta is None:
            raise ConfigError("complex belongs to fasta; in a sequence, ':' joins the chains")
        if not self.name.isprintable():
            raise ConfigError("name: expected printable characters")
        names = [template_file(one.name, one.text).casefold() for one in self.templates]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"templates: two are named {repeated}; rename one")
        return JobRequest(
            sent[0],
            getattr(self, sent[0]),
            self.name,
            self.complex,
            {one.name: one.text for one in self.templates},
            self.settings.model_dump(exclude_unset=True),  # type: ignore[attr-defined]
        )


class JobView(BaseModel):
    """Job as its user sees it."""

    id: str
    name: str
    state: Literal["queued", "running", "done", "failed", "cancelled"]
    text: Annotated[str, Field(description="result or reason in words")]
    residues: int
    priority: int
    number: Annotated[int, Field(description="order of admission")]
    position: Annotated[int | None, Field(description="waiting jobs that precede it; null after its start")]
    answer: Annotated[int | None, Field(description="order of the answers; null before")]
    submitted: Annotated[float, Field(description="seconds since 1970")]
    started: float | None
    finished: float | None
    scores: Annotated[dict[str, Any], Field(description="scores of the best prediction")]
    files: Annotated[list[str], Field(description="names to fetch")]
    progress: Annotated[str | None, Field(description="last line of the progress of a running job")]
    page: Annotated[
        str | None, Field(description="address of the page of results, which needs no token for a day")
    ]


class ServerView(BaseModel):
    """State of the server as its users see it."""

    version: str
    user: str
    queued: Annotated[int, Field(description="waiting jobs of all users")]
    running: int
    workers: Annotated[int, Field(description="workers that fold or wait for jobs")]
    problem: Annotated[str, Field(description="reason why nothing is folded; empty if there is none")]
    max_residues: int | None


class Problem(BaseModel):
    """Reason of a refusal, in one line."""

    error: str
