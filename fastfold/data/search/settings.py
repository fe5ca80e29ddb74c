"""Sources of alignments, and the settings of HMMER's programs, light enough for the command line's help."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from fastfold.errors import ConfigError
from fastfold.utils.option_fields import LARGEST, check_options, option, options_of
from fastfold.utils.units import parse_number

if TYPE_CHECKING:
    from fastfold.data.msa.msa import ChainMsas


MsaMode = Literal["mmseqs2_uniref_env", "mmseqs2_uniref_env_envpair", "mmseqs2_uniref", "single_sequence"]
PairMode = Literal["unpaired_paired", "paired", "unpaired"]
PairStrategy = Literal["greedy", "complete"]

PUBLIC_SERVER = "https://api.colabfold.com"
"""Address of ColabFold's public MSA server; requests go there only if a user names it."""
PUBLIC_SERVER_TERMS = (
    f"`SearchSources.server={PUBLIC_SERVER}` asks ColabFold's public server, which sees the sequences and allows one "
    "query at a time from one address"
)


@dataclass(frozen=True)
class ColabFoldModes:
    """Databases that are searched, and rows that a complex gets."""

    #: UniRef30 with or without environmental sequences; ``envpair`` pairs chains in both
    msa_mode: MsaMode = "mmseqs2_uniref_env"
    #: Rows of a complex: each chain's own, those that pair chains, or both
    pair_mode: PairMode = "unpaired_paired"
    #: ``greedy`` pairs rows of a species in two chains or more, ``complete`` in all chains
    pair_strategy: PairStrategy = "greedy"
    templates: bool = False  #: Fetch the structures of the server's template hits

    @property
    def has_environment(self) -> bool:
        """True if environmental sequences are searched."""
        return self.msa_mode in ("mmseqs2_uniref_env", "mmseqs2_uniref_env_envpair")

    @property
    def has_environment_pairs(self) -> bool:
        """True if environmental sequences are paired, too."""
        return self.msa_mode == "mmseqs2_uniref_env_envpair"


def select_rows(alignments: Sequence[ChainMsas], pair_mode: PairMode) -> list[ChainMsas]:
    """Keep the rows of a complex that a pair mode selects from own and paired alignments of each chain.

    ``unpaired`` keeps of paired alignments the query alone; ``paired`` drops each chain's own.
    """
    if pair_mode == "paired":
        return [([], paired) for _, paired in alignments]
    if pair_mode == "unpaired":
        return [(own, [msa.take([0]) for msa in paired]) for own, paired in alignments]
    return list(alignments)


_PASSWORD, _API_KEY, _API_KEY_HEADER = "FASTFOLD_MSA_PASSWORD", "FASTFOLD_MSA_API_KEY", "X-API-Key"


def _credential(name: str, metavar: str, help: str, *, is_secret: bool = False) -> Any:
    """Return a field with an option, which can be written with underscores as well."""
    return option(
        f"--{name}",
        f"--{name.replace('-', '_')}",
        default=None,
        group="sources",
        metavar=metavar,
        is_rare=True,
        is_secret=is_secret,
        help=help,
    )


@dataclass(frozen=True)
class ServerAccess:
    """Credentials for an MSA server: a user with a password, or an API key."""

    username: str | None = _credential("msa-server-username", "NAME", "user of a private MSA server")
    password: str | None = _credential(
        "msa-server-password",
        "TEXT",
        f"the user's password (default: {_PASSWORD} of the environment, which other users cannot see)",
        is_secret=True,
    )
    api_key: str | None = _credential(
        "api-key-value",
        "TEXT",
        f"API key of a private MSA server (default: {_API_KEY} of the environment)",
        is_secret=True,
    )
    api_key_header: str | None = _credential(
        "api-key-header", "NAME", f"header of requests that holds the API key (default {_API_KEY_HEADER})"
    )

    def headers(self, server: str) -> dict[str, str]:
        """Return the headers that name the user to a server; empty without credentials.

        The public server gets no key of the environment.

        Raises:
            ConfigError: A part of the credentials is missing or invalid, or there are two kinds.
        """
        key = self.api_key
        if "@" in server:
            raise ConfigError(
                "`SearchSources.server`: expected an address without a user; give `ServerAccess.username=NAME`"
            )
        if self.username is None and self.password is not None:
            raise ConfigError("`ServerAccess.password` needs `ServerAccess.username=NAME`")
        if self.username is not None:
            password = self.password or os.environ.get(_PASSWORD)
            if password is None:
                raise ConfigError(
                    f"`ServerAccess.username` needs a password: set {_PASSWORD} in the environment"
                )
            if key is not None or self.api_key_header is not None:
                raise ConfigError(
                    "an MSA server takes a user with a password, or an API key; give one of the two"
                )
            login = base64.b64encode(f"{self.username}:{password}".encode()).decode("ascii")
            return {"Authorization": f"Basic {login}"}
        is_public = server.rstrip("/") == PUBLIC_SERVER
        key = key or (None if is_public else os.environ.get(_API_KEY))
        name = self.api_key_header or _API_KEY_HEADER
        if key is None:
            if self.api_key_header is not None:
                raise ConfigError(f"`api_key_header` needs a key: set {_API_KEY} in the environment")
            return {}
        if re.fullmatch(r"[A-Za-z0-9-]+", name, re.ASCII) is None:
            raise ConfigError(f"`api_key_header`: expected letters, digits and hyphens, found {name[:40]!r}")
        if not (key.isascii() and key.isprintable()):
            raise ConfigError("the API key has a character that no header can hold; copy the key again")
        return {name: key}


AlignmentFormat = Literal["sto", "a3m"]
SearchProgram = Literal["jackhmmer", "phmmer", "mmseqs"]
"""Programs that search databases on this machine: HMMER's, or ColabFold's pipeline by MMseqs2."""

MAX_E_VALUE = 1e6
MAX_WORKERS = 1024  #: Largest number of processes of a search


def _number(*names: str, default: float, help: str, is_rare: bool = False) -> Any:
    return option(
        *names, default=default, parse=parse_number, group="hmmer", metavar="X", is_rare=is_rare, help=help
    )


def _filter(number: int, default: float) -> Any:
    text = f"share of unrelated sequences that passes HMMER's filter {number} (default {default:g})"
    return _number(f"--F{number}", default=default, help=text, is_rare=True)


@dataclass(frozen=True)
class HmmerSettings:
    """Settings that determine the result of a search, and its format; the defaults are AlphaFold's for jackhmmer.

    Engine ``phmmer`` makes one pass, with domains up to E-value 0.01 as in the program of that name.
    """

    engine: Literal["jackhmmer", "phmmer"] = "jackhmmer"
    iterations: int = option(
        "--iterations",
        "-N",
        default=1,
        bounds=(1, LARGEST),
        group="hmmer",
        help="maximum passes of jackhmmer; each searches with the hits that the last one included (default 1)",
    )
    e_value: float = _number(
        "--e-value", "-E", default=1e-4, help="largest E-value of a hit (default 0.0001)"
    )
    include_e_value: float = _number(
        "--include-e-value",
        "--incE",
        default=1e-4,
        help="largest E-value of a hit that is aligned (default 0.0001)",
    )
    msv_filter: float = _filter(1, 5e-4)
    viterbi_filter: float = _filter(2, 5e-5)
    forward_filter: float = _filter(3, 5e-7)
    file_format: AlignmentFormat = option(
        "--format",
        default="sto",
        choices=get_args(AlignmentFormat),
        group="hmmer",
        help="Stockholm or A3M (default sto)",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.engine not in ("jackhmmer", "phmmer"):
            raise ConfigError(f"engine must be jackhmmer or phmmer, found {self.engine!r}")
        if self.engine == "phmmer" and self.iterations > 1:
            raise ConfigError("phmmer makes one pass through a database; use jackhmmer for more iterations")
        for name, value in (("`e_value`", self.e_value), ("`include_e_value`", self.include_e_value)):
            if not 0 < value <= MAX_E_VALUE:
                raise ConfigError(f"{name} must be more than 0 and at most {MAX_E_VALUE:g}, found {value:g}")
        for name in ("msv_filter", "viterbi_filter", "forward_filter"):
            if not 0 < (share := getattr(self, name)) <= 1:
                raise ConfigError(
                    f"`HmmerSettings.{name}` must be more than 0 and at most 1, found {share:g}"
                )

    @property
    def pipeline(self) -> dict[str, Any]:
        """Return the settings under the names of HMMER's pipeline."""
        return {
            "E": self.e_value,
            "incE": self.include_e_value,
            "incdomE": 1e-3 if self.engine == "jackhmmer" else 1e-2,
            "F1": self.msv_filter,
            "F2": self.viterbi_filter,
            "F3": self.forward_filter,
        }


@dataclass(frozen=True)
class SearchSources:
    """Sources of alignments: databases on this machine, or an MSA server; each option has its help.

    Raises:
        ConfigError: An option is invalid, or contradicts another.
    """

    databases: tuple[str, ...] = option(
        "--db",
        default=(),
        nargs="+",
        group="sources",
        metavar="[NAME=]FASTA",
        help="databases to search: FASTA (.gz too), or the beginning of the names of an HH-suite database's files "
        "(…/UniRef30_2021_03; needs hhblits)",
    )
    folder: Path | None = option(
        "--databases",
        "--data-dir",
        "--data_dir",
        default=None,
        parse=Path,
        group="sources",
        metavar="DIR",
        help="folder of AlphaFold's databases (uniref90/, mgnify/ ...): search those that it has, for templates too; "
        "'fastfold databases download' fills it",
    )
    engine: SearchProgram = option(
        default="jackhmmer",
        choices=get_args(SearchProgram),
        group="sources",
        help="phmmer: one pass that aligns more distant domains too; mmseqs: ColabFold's pipeline on its databases "
        "(default jackhmmer)",
    )
    server: str | None = option(
        "--msa-server",
        default=None,
        group="sources",
        metavar="URL",
        help="send the sequences to this MSA server, which makes the alignments (default: nothing leaves this "
        f"machine); {PUBLIC_SERVER} is ColabFold's public one, for one query at a time from one address",
    )
    msa_mode: MsaMode | None = option(
        default=None,
        choices=get_args(MsaMode),
        group="sources",
        help="databases of --msa-server or --engine mmseqs: UniRef30 with or without environmental sequences; "
        "single_sequence: no alignment (default: all that there are)",
    )
    pair_strategy: PairStrategy | None = option(
        default=None,
        choices=get_args(PairStrategy),
        group="sources",
        is_rare=True,
        help="greedy: pair rows of a species in two chains or more; complete: in all chains (default "
        f"{ColabFoldModes.pair_strategy})",
    )
    access: ServerAccess = field(default_factory=ServerAccess)  #: Credentials for ``server``
    num_workers: int | None = option(
        "--cpu",
        "--num-workers",
        default=None,
        bounds=(1, MAX_WORKERS),
        group="search processes",
        help="processes that search databases (default: one per core)",
    )
    gpu: bool = option(
        default=False, group="search alone", help="mmseqs: search on a GPU, in databases made for one"
    )
    memory: str | int | None = option(
        default=None,
        group="search alone",
        metavar="SIZE",
        help="memory of all search processes together, 16GiB for example; the part of a database that does not fit is "
        "read repeatedly (default: half of the free memory)",
    )
    #: Settings of HMMER's programs; ``engine`` is that of the sources
    hmmer: HmmerSettings = field(default_factory=HmmerSettings)

    def __post_init__(self) -> None:
        check_options(self)
        if self.gpu and self.engine != "mmseqs":
            raise ConfigError("`gpu` needs `engine=mmseqs`")
        if self.is_by_colabfold:
            self._check_colabfold()
        elif self.msa_mode != "single_sequence":
            for name, value in (("msa_mode", self.msa_mode), ("pair_strategy", self.pair_strategy)):
                if value is not None:
                    raise ConfigError(
                        f"`{name}={value}` needs `SearchSources.server=URL`, or `engine=mmseqs` with "
                        f"`SearchSources.databases=FOLDER`; {PUBLIC_SERVER_TERMS}"
                    )

    def _check_colabfold(self) -> None:
        """Refuse options of other sources next to an MSA server or MMseqs2."""
        own = "`engine=mmseqs`" if self.server is None else "`SearchSources.server`"
        if self.folder is not None:
            raise ConfigError(
                f"`SearchSources.folder` searches AlphaFold's databases on this machine; leave out {own}"
            )
        misplaced = [
            f"`HmmerSettings.{field.name}`"
            for field, _option in options_of(HmmerSettings)
            if getattr(self.hmmer, field.name) != field.default
        ]
        misplaced += ["`memory`"] if self.memory is not None else []
        misplaced += ["`engine`"] if self.server is not None and self.engine != "jackhmmer" else []
        if misplaced:
            raise ConfigError(f"{', '.join(misplaced)}: not for {own}, whose settings are ColabFold's")
        if self.server is not None and self.databases:
            raise ConfigError(
                "`SearchSources.databases` searches on this machine, `SearchSources.server` on another one; give one "
                "of the two"
            )
        if self.server is None and len(self.databases) != 1:
            raise ConfigError(
                "`engine=mmseqs` takes one folder of databases: `SearchSources.databases=FOLDER`"
            )

    @property
    def is_by_colabfold(self) -> bool:
        """True if an MSA server or MMseqs2 makes the alignments, as ColabFold does."""
        return self.server is not None or self.engine == "mmseqs"

    @property
    def wanted(self) -> bool:
        """True if alignments are searched."""
        return self.msa_mode != "single_sequence" and (self.server is not None or bool(self.databases))

    def absolute(self) -> SearchSources:
        """Return the sources with paths that are valid in every working folder."""
        return replace(self, databases=tuple(map(_absolute, self.databases)))


def _absolute(database: str) -> str:
    """Return a database, ``FILE`` or ``NAME=FILE``, with an absolute path."""
    name, separator, path = ("", "", database) if os.path.exists(database) else database.partition("=")
    return f"{name}{separator}{os.path.abspath(path)}" if path else database
