"""``InferRequest``: targets to fold, and the options of their run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from fastfold.data.search.settings import PUBLIC_SERVER_TERMS, ColabFoldModes, PairMode, SearchSources
from fastfold.data.templates.options import TemplateOptions
from fastfold.errors import ConfigError
from fastfold.inference.config import InferConfig, OutputFormat
from fastfold.inference.setting_values import BatchSize, check_batch
from fastfold.utils.option_fields import check_options, option

if TYPE_CHECKING:
    from fastfold.data.queries.read import TargetReader
    from fastfold.data.targets import Target
    from fastfold.errors import InputError

ALIGNMENTS = "alignments"  #: Folder for searched alignments within the results
Order = Literal["input", "length", "depth"]
"""Orders of targets: as they are given, short ones first, or those with few alignment rows first."""


_output = partial(option, group="output")
_rare_output = partial(_output, is_rare=True)
_structures = partial(option, group="structures")


@dataclass(frozen=True)
class RunOptions:
    """Options of a run other than the model's.

    Raises:
        ConfigError: An option has the wrong type or an invalid value; names it.
    """

    msa_dir: Path | None = option(
        default=None,
        parse=Path,
        group="alignments",
        metavar="DIR",
        help="folder of alignments, found by record id",
    )
    pair_mode: PairMode = option(
        default=ColabFoldModes.pair_mode,
        choices=get_args(PairMode),
        group="pairs",
        help="alignment rows of a complex: each chain's own, paired ones, or both (default "
        f"{ColabFoldModes.pair_mode})",
    )
    #: Sources of alignments, which go to ``msa_dir``, or to a folder ``alignments`` in the results
    sources: SearchSources = field(default_factory=SearchSources)
    templates: TemplateOptions = field(default_factory=TemplateOptions)  #: Sources of templates
    complex_: bool = option(
        "--complex", default=False, group="targets", help="all records of a file are one complex"
    )
    allow_download: bool = option(
        default=False,
        group="targets",
        help="fetch the sequences of inputs such as P69905 or AF-P69905-F1 from rest.uniprot.org (default: no network)",
    )
    num_models: int | None = option(
        default=None,
        bounds=(1, 1000),
        group="networks",
        help="fold by the first N networks of --weights only (default: all)",
    )
    name_prefix: str | None = _rare_output(
        "--jobname-prefix",
        default=None,
        metavar="TEXT",
        help="name targets TEXT_0, TEXT_1 and so on (default: by their records)",
    )
    zip_results: bool = _structures(
        "--zip", default=False, help="pack the files of each target into <id>.result.zip, too"
    )
    reference: Path | None = option(
        default=None,
        parse=Path,
        group="reference",
        metavar="PATH",
        help="experimental structure to compare with, or a folder of files named like the targets",
    )
    skip_bad_weights: bool = _rare_output(default=False, help="leave out weights files that cannot be used")
    overwrite: bool = _output(
        "--overwrite",
        "--overwrite-existing-results",
        default=False,
        help="fold finished targets again, and remove their other predictions in DIR",
    )
    batch: BatchSize = option(
        default=1,
        parse=check_batch,
        group="machine",
        metavar="N",
        help="fold up to N targets of similar length in one pass, for short targets; auto: where it is faster "
        "(default 1)",
    )
    sort: Order = option(
        "--sort",
        "--sort-queries-by",
        default="input",
        choices=get_args(Order),
        group="order",
        help="length: short targets first; depth: those with few alignment rows first",
    )
    quiet: bool = _output(default=False, help="print only warnings and errors")
    output_format: OutputFormat = _structures(
        default="fastfold",
        choices=get_args(OutputFormat),
        help="colabfold: name files like ColabFold, with its scores files, and make a folder per target like "
        "AlphaFold, for programs that read these (default fastfold)",
    )
    folder_per_target: bool = _structures(default=False, help="write the files of each target into DIR/<id>")

    def __post_init__(self) -> None:
        check_options(self)
        if self.folder_per_target and self.output_format == "colabfold":
            raise ConfigError(
                "`folder_per_target` and `output_format=colabfold` exclude each other, because that format has "
                "AlphaFold's folders"
            )
        if self.sources.msa_mode == "single_sequence":
            searches = (
                ("`SearchSources.databases`", self.sources.databases),
                ("`msa_dir`", self.msa_dir),
                ("`templates` without files", self.templates.server),
            )
            if others := [name for name, value in searches if value]:
                raise ConfigError(
                    f"`msa_mode=single_sequence` uses no alignment and asks no server; leave out {', '.join(others)}"
                )
        if self.templates.server and not self.sources.is_by_colabfold and self.msa_dir is None:
            raise ConfigError(
                "`templates` without files fetches the template hits of an MSA server: add `SearchSources.server=URL`, "
                f"or name structures after it; {PUBLIC_SERVER_TERMS}"
            )


@dataclass(frozen=True)
class InferRequest:
    """Targets to fold, and how."""

    inputs: Sequence[Path] | TargetReader  #: Files of sequences, or a function that reads the targets
    output: Path = option(
        "--out", is_required=True, parse=Path, group="results", metavar="DIR", help="folder for the results"
    )
    weights: Sequence[Path] = option(
        default=(),
        nargs="+",
        parse=Path,
        group="weights",
        metavar="FILE",
        help="weights files, or monomer, monomer_ptm, multimer (default: mini)",
    )
    config: InferConfig = field(default_factory=InferConfig)  #: Settings of the fold
    options: RunOptions = field(default_factory=RunOptions)  #: Options of the run other than the model's
    #: True if the seeds of ``config`` replace those that an input names, also if they are the default
    has_seeds: bool = False

    def read_targets(self) -> tuple[list[Target], list[InputError]]:
        """Read the targets; return them, and the errors of others."""
        if callable(self.inputs):
            return self.inputs()
        from fastfold.data.queries.read import read_targets  # NumPy is slow to import

        options = self.options
        return read_targets(self.inputs, complex_=options.complex_, allow_download=options.allow_download)

    @property
    def msa_dir(self) -> Path:
        """Folder of the alignments that are searched for."""
        return self.options.msa_dir or self.output / ALIGNMENTS
