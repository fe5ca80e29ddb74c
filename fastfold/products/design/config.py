"""``DesignConfig``: the settings of an optimisation, for the command line and for Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from fastfold.errors import ConfigError
from fastfold.utils.foreign_text import plain_float, plain_int
from fastfold.utils.option_fields import LARGEST, check_options, check_whole, option
from fastfold.utils.units import parse_number

if TYPE_CHECKING:
    from fastfold.products.design.limits import Limits

PROGRAM_SEQUENCES = 4  #: Default number of another program's sequences for a backbone
_CONTACTS_HELP = (
    "contacts {} chains that the loss counts, such as num=2,cutoff=14,seqsep=9,binary=false,num_pos=20: contacts per "
    "residue, distance in Å, separation, probability alone, and residues that count (all by default)"
)
_count = partial(option, bounds=(0, LARGEST), metavar="N")

Optimizer = Literal["sgd", "adam"]
RecycleMode = Literal["last", "average", "first", "sample", "add_prev", "backprop"]
"""Passes whose gradient counts, as in ColabDesign.

The last, the mean of all, the first, one drawn for each step, the mean of the outputs of all, or the last with its
dependence on all earlier ones.
"""
Start = Literal["gumbel", "random", "wildtype"]
SHORTEST_BINDER = 5  #: Smallest number of residues of a binder

Flexible = Literal["none", "sidechains", "backbone", "free"]
"""Parts of the templates of given chains that are left out.

``sidechains``: atoms past CB (ColabDesign's ``rm_target_sc``); ``backbone``: residue types as well (``rm_target_seq``,
its ``target_flexible``); ``free``: the whole template (``rm_target``).
"""


def parse_counts(text: str, *, least: int, most: int) -> tuple[int, ...]:
    """Parse ``least`` to ``most`` whole numbers joined by commas, or raise ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    if not least <= len(parts) <= most or not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"expected {most} whole numbers with commas, found {text!r}")
    return tuple(map(int, parts))


@dataclass(frozen=True)
class DesignConfig:
    """Settings of an optimisation; ConfigError for a value out of range.

    Example:
        >>> from fastfold.products.design import DesignConfig
        >>> config = DesignConfig(soft_steps=60, temperature_steps=20, hard_steps=5, forbid="C")
        >>> config.soft_steps + config.temperature_steps + config.hard_steps
        85
    """

    #: Steps before those, up to nine tenths of a softmax, after which weak designs end
    screen_steps: int = _count(
        default=0,
        help="steps before those of --steps, up to nine tenths of a softmax (default 0; BindCraft: 50)",
    )
    #: Steps from logits to their softmax
    soft_steps: int = option(
        "--steps",
        default=300,
        fields=("soft_steps", "temperature_steps", "hard_steps"),
        parse=partial(parse_counts, least=3, most=3),
        metavar="S,T,H",
        help="steps from logits to softmax, of sharpening, and on residues (default 300,100,10)",
    )
    temperature_steps: int = 100  #: Steps in which the softmax sharpens
    hard_steps: int = 10  #: Steps on the most likely residues
    mutation_steps: int = option(
        "--mutations",
        default=0,
        fields=("mutation_steps", "tries"),
        parse=partial(parse_counts, least=1, most=2),
        metavar="N[,TRIES]",
        help="rounds of mutations at the end, each the best of TRIES (default 0,10)",
    )
    tries: int = 10  #: Mutations that a round compares
    #: Mutations that a round compares in percent of the designed residues, rounded up; 0 for ``tries``
    tries_percent: float = 0.0
    profile_mutations: bool = option(
        default=False,
        help="draw mutated residues by the softmax of the logits at the end of the soft steps, not evenly",
    )
    #: ``sgd`` or ``adam``, on gradients of unit length per residue
    optimizer: Optimizer = option(
        default="sgd", choices=get_args(Optimizer), help="default sgd, with gradients of unit length"
    )
    #: Step length
    learning_rate: float = option(default=0.1, parse=parse_number, metavar="X", help="default 0.1")
    recycles: int = _count("--num-recycles", default=0, help="extra passes of a step (default 0)")
    recycle_mode: RecycleMode = option(
        default="last",
        choices=get_args(RecycleMode),
        help="passes whose gradient counts; add_prev for the loss of the mean output of all, backprop for the last "
        "through all before it (default last)",
    )
    con: str = option(default="", metavar="SETTINGS", help=_CONTACTS_HELP.format("within"))
    i_con: str = option(default="", metavar="SETTINGS", help=_CONTACTS_HELP.format("between"))
    #: True if the number of extra passes grows during the steps from logits to softmax
    ramp_recycles: bool = option(
        "--no-recycle-ramp", default=True, help="all extra passes in each step from logits to softmax as well"
    )
    strand_recycles: int | None = _count(
        default=None,
        help="extra passes after --screen-steps if over 15%% of the binder is in strands (default --num-recycles)",
    )
    #: True for dropout before the steps on residues
    dropout: bool = option("--no-dropout", default=True, help="no dropout in any step")
    #: Networks drawn for a step; None or 0 for all. Steps on residues and mutations use all.
    networks: int | None = _count(
        "--num-models", default=1, help="networks drawn for a step (default 1; 0 for all)"
    )
    #: True if steps on residues and mutations use all networks
    all_networks: bool = option(
        "--one-network", default=True, help="--num-models networks in steps on residues and mutations as well"
    )
    #: First parameters: Gumbel noise, small noise, or the residues of the given structure
    start: Start = option(default="gumbel", choices=get_args(Start), help="first sequence (default gumbel)")
    #: Weights of losses that differ from the protocol's, by name; texts such as ``rg=0.3`` become a mapping
    weights: Mapping[str, float] = option(
        "--loss",
        default=(),
        nargs="+",
        metavar="NAME=WEIGHT",
        help="weights of losses that differ from the defaults below",
    )
    forbid: str = option(default="", metavar="LETTERS", help="residues never used, such as CM")
    composition: str = option(
        default="",
        metavar="LIMITS",
        help="shares of residue types in the designed chain, such as KE<=0.3,W>=0.02: a loss (composition), a rule for "
        "mutations, and the first criterion of the best sequence",
    )
    #: Smallest and largest net charge of the designed chain at pH 7, used as the composition is; None for any
    charge: tuple[float, float] | None = option(
        default=None,
        nargs=2,
        parse=parse_number,
        metavar=("LOW", "HIGH"),
        help="net charge of the designed chain at pH 7 (D and E -1, K and R +1, H 0), in the same way",
    )
    give_up_below: float = option(
        default=0.0,
        bounds=(0.0, 100.0),
        metavar="PLDDT",
        help="end a design whose pLDDT is lower in the best step of a stage, and leave it out of the folds (default 0)",
    )
    check_binder: bool = option(
        default=False,
        help="leave out binders with CA atoms within 2.5 Å, under 3 residues at the target, or a pLDDT below 70",
    )

    def __post_init__(self) -> None:
        check_options(self)
        steps = ("screen_steps", "soft_steps", "temperature_steps", "hard_steps", "mutation_steps")
        for name, least in (*((step, 0) for step in steps), ("tries", 1)):
            check_whole(name, getattr(self, name), least, LARGEST)
        if not any(getattr(self, name) for name in steps):
            raise ConfigError("a design needs at least one step")
        if self.profile_mutations and self.mutation_steps and not self.soft_steps:
            raise ConfigError("`profile_mutations` needs soft steps, which are 0; add some, or leave it out")
        if not self.learning_rate > 0:
            raise ConfigError(
                f"`DesignConfig.learning_rate`: expected a positive number, found {self.learning_rate}"
            )
        if not 0 <= self.tries_percent <= 100:
            raise ConfigError(
                f"`DesignConfig.tries_percent`: expected a number from 0 to 100, found {self.tries_percent}"
            )
        if self.networks == 0:
            object.__setattr__(self, "networks", None)
        if not isinstance(self.weights, Mapping):
            object.__setattr__(self, "weights", dict(map(_weight, self.weights)))
        from fastfold.products.design.limits import forbidden_letters  # NumPy is slow to import

        _ = self.limits
        forbidden_letters(self.forbid)
        for name in ("con", "i_con"):
            parse_contacts(f"`DesignConfig.{name}`", getattr(self, name))

    @property
    def limits(self) -> Limits:
        """Limits of the designed chain."""
        from fastfold.products.design.limits import Limits, parse_shares  # NumPy is slow to import

        return Limits(parse_shares(self.composition), self.charge)


def parse_contacts(name: str, text: str) -> dict[str, Any]:
    """Parse settings such as ``num=2,cutoff=14`` of the contacts of a loss, or raise ConfigError."""
    settings: dict[str, Any] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        key, _, value = part.partition("=")
        try:
            settings[key] = _CONTACT_VALUES[key](value)
        except (KeyError, ValueError):
            raise ConfigError(
                f"{name}: expected settings such as num=2,cutoff=14 of {', '.join(_CONTACT_VALUES)}, found {part!r}"
            ) from None
        if key in ("num", "num_pos") and not settings[key] >= 1:
            raise ConfigError(f"{name}: {key}: expected a whole number from 1, found {value}")
        if key == "cutoff" and not 2.0 < settings[key] < math.inf:
            raise ConfigError(f"{name}: cutoff: expected a distance in Å above 2, found {value}")
        if key == "seqsep" and settings[key] < 0:
            raise ConfigError(f"{name}: seqsep: expected a whole number from 0, found {value}")
    return settings


_CONTACT_VALUES: dict[str, Callable[[str], Any]] = {
    "num": plain_int,
    "cutoff": plain_float,
    "seqsep": plain_int,
    "binary": lambda text: {"true": True, "false": False}[text.lower()],
    "num_pos": lambda text: float("inf") if text == "inf" else plain_int(text),
}


def _weight(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, plain_float(value)
    except ValueError:
        raise ConfigError(
            f"`DesignConfig.weights`: expected NAME=WEIGHT such as rg=0.3, found {text!r}"
        ) from None
