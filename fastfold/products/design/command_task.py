"""Options of ``fastfold design`` that define the task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from fastfold.errors import ConfigError
from fastfold.products.design.config import Flexible
from fastfold.utils.option_fields import LARGEST, argument, option, options_of

if TYPE_CHECKING:
    from fastfold.products.design.tasks.task import DesignTask

_BINDER_PARTS = ("redesign", "keep", "contigs", "framework", "loops", "binder_template")
_OPTIONS = {
    "hallucinate": ("length", "copies", "repeats", "cyclic"),
    "fixbb": ("chains", "keep", "copies", "repeats"),
    "partial": ("chains", "motif", "contigs", "length", "copies"),
    "binder": (
        *("length", "copies", "repeats", "cyclic", "chains", "hotspots", "flexible", "also_target", "avoid"),
        *_BINDER_PARTS,
    ),
}
"""Options of the task that belong to each protocol."""
PROTOCOLS = tuple(_OPTIONS)


_task = partial(option, group="task")
_count = partial(_task, default=1, bounds=(1, LARGEST))
_text = partial(_task, default="")
_files = partial(_task, default=(), nargs="+", metavar="FILE")


@dataclass(frozen=True)
class TaskOptions:
    """Options of the command that define the task; those of the group belong to some protocols."""

    protocol: str = argument(choices=PROTOCOLS, help="what to design")
    structure: Path | None = argument(
        default=None, nargs="?", parse=Path, metavar="STRUCTURE", help="PDB or mmCIF file"
    )
    length: str | None = _task(
        default=None,
        metavar="N[-M]",
        help="residues to design, of one chain; of a range, each seed draws one",
    )
    copies: int = _count(help="equal chains; of fixbb, groups of --chains that are equal (default 1)")
    repeats: int = _count(help="equal parts of each chain (default 1)")
    cyclic: bool = _task(default=False, help="designed chains are rings")
    chains: str = _text(metavar="A,B", help="chains of STRUCTURE to use")
    keep: str = _text(metavar="A1-5,A9", help="residues of fixbb and --redesign that stay")
    motif: str = _text(metavar="A1-5,A9", help="residues of partial that stay")
    contigs: str = _text(
        metavar="PARTS",
        help="parts of the designed chain as in RFdiffusion: numbers of new residues, and residues of STRUCTURE whose "
        "type and structure stay, such as 10-20/A16-36/5; --length limits the sum",
    )
    hotspots: str = _text(metavar="A1-5,A9", help="residues that a binder touches")
    redesign: str = _text(metavar="B,C", help="chains of STRUCTURE that are the binder, to be designed again")
    framework: Path | None = _task(
        default=None,
        parse=Path,
        metavar="FILE",
        help="PDB or mmCIF file of a binder whose --loops are designed",
    )
    loops: str = _text(
        metavar="H:26-33,H:97-110=8-14",
        help="loops of --framework, with another length after =; of a range, each seed draws one",
    )
    binder_template: Flexible | None = _task(
        default=None,
        choices=get_args(Flexible),
        help="parts of the template of the binder's given residues that networks do not see, as of --flexible "
        "(default free; with --framework none)",
    )
    flexible: Flexible = _task(
        default="none",
        choices=get_args(Flexible),
        help="parts of the target's template that a binder's networks do not see: sidechains, backbone (residue types "
        "too), or free (all of it) (default none)",
    )
    also_target: Sequence[str] = _files(
        help="further targets of the same binder: FILE, FILE:CHAINS, or FILE:CHAINS:HOTSPOTS such as t.pdb:A,B:A54"
    )
    avoid: Sequence[str] = _files(
        help="off-targets that the binder shall not touch, in the same form (loss: avoid)"
    )


def design_task(options: TaskOptions) -> DesignTask | Callable[[int], DesignTask]:
    """Return the task of a command line, or of each seed if it draws a length, or raise FastFoldError."""
    from fastfold.products.design import fixed_backbone, hallucination
    from fastfold.products.design import partial as partial_task

    protocol, structure = options.protocol, options.structure
    chains = _names(options.chains)
    used = _OPTIONS[protocol]
    shape = {"copies": options.copies, "repeats": options.repeats}
    for field, choice in options_of(TaskOptions):
        if choice.group and field.name not in used and getattr(options, field.name) != field.default:
            shown = ", ".join(f"--{name.replace('_', '-')}" for name in used)
            raise ConfigError(f"{choice.names[0]} does not belong to {protocol}; its options are {shown}")
    if protocol == "hallucinate":
        if structure is not None:
            raise ConfigError(
                f"hallucinate takes no structure, found {structure}; fixbb designs for a backbone"
            )
        return _of_length(options, partial(hallucination, **shape, cyclic=options.cyclic))
    if structure is None:
        raise ConfigError(f"{protocol} needs a structure: fastfold design {protocol} FILE --out DIR")
    if protocol == "binder":
        return _binder(structure, options, chains)
    if protocol == "fixbb":
        return fixed_backbone(structure, chain=chains or None, keep=options.keep, **shape)
    if len(chains) > 1:
        raise ConfigError(f"partial takes one chain, found --chains {options.chains}")
    if chains and options.contigs:
        raise ConfigError("--contigs names the chains of its residues; leave out --chains")
    make = partial(
        partial_task,
        structure,
        options.motif,
        chain=chains[0] if chains else None,
        contigs=options.contigs,
        copies=options.copies,
        length=None if options.length is None else _length(options.length),
    )
    return _of_parts(make, options.contigs)


def _binder(
    structure: Path, options: TaskOptions, chains: list[str]
) -> DesignTask | Callable[[int], DesignTask]:
    from fastfold.products.design import BinderParts, binder
    from fastfold.products.design.tasks.given import TargetStructure

    parts = BinderParts(
        redesign=tuple(_names(options.redesign)),
        keep=options.keep,
        contigs=options.contigs,
        framework=options.framework,
        loops=options.loops,
        flexible=options.binder_template,
    )
    make = partial(
        binder,
        structure,
        chains=chains,
        hotspots=options.hotspots,
        parts=parts,
        copies=options.copies,
        repeats=options.repeats,
        cyclic=options.cyclic,
        flexible=options.flexible,
        others=[TargetStructure.parse(text) for text in options.also_target],
        avoided=[TargetStructure.parse(text) for text in options.avoid],
    )
    if parts.is_empty:
        return _of_length(options, make)
    length = None if options.length is None else _length(options.length)
    return _of_parts(partial(make, length=length), options.contigs or options.loops)


def _of_length(
    options: TaskOptions, make: Callable[..., DesignTask]
) -> DesignTask | Callable[[int], DesignTask]:
    """Return the task of the length, or of each seed if there is a range of lengths."""
    from fastfold.products.design.tasks.layout import draw_numbers

    if options.length is None:
        raise ConfigError(f"{options.protocol} needs --length, the number of residues to design")
    low, high = _length(options.length)
    return make(length=low) if low == high else lambda seed: make(length=draw_numbers([(low, high)], seed)[0])


def _of_parts(make: Callable[..., DesignTask], text: str) -> DesignTask | Callable[[int], DesignTask]:
    """Return the task of contigs or loops, or of each seed if they have ranges of lengths."""
    from fastfold.products.design.tasks.layout import has_ranges

    return (lambda seed: make(seed=seed)) if has_ranges(text) else make()


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _length(text: str) -> tuple[int, int]:
    """Return the smallest and the largest length of ``60`` or ``60-100``."""
    from fastfold.products.design.tasks.layout import parse_range

    numbers = parse_range(text)
    if numbers is None or numbers[0] < 1:
        raise ConfigError(f"--length: expected a number or a range such as 60-100, found {text!r}")
    return numbers
