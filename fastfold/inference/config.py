"""``InferConfig``: the settings of a fold, for the command line and for Python."""

from __future__ import annotations

import numbers
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fastfold.errors import ConfigError
from fastfold.inference.embed.config import EmbedConfig
from fastfold.inference.ensemble.settings import Sampling
from fastfold.utils.units import parse_bytes

RankBy = Literal["auto", "plddt", "ptm", "iptm", "multimer"]
"""Scores that rank predictions: mean pLDDT, pTM, ipTM, AlphaFold-Multimer's 0.8 ipTM + 0.2 pTM, or ``auto``.

``auto`` is AlphaFold-Multimer's score for predictions with an ipTM, and otherwise mean pLDDT."""
RelaxWhich = Literal["none", "best", "all"]
"""Predictions of a target that are relaxed."""
OutputFormat = Literal["fastfold", "colabfold"]
"""Styles of file names and scores files."""
FolderFormat = Literal["fastfold", "colabfold", "embeddings"]
"""Kinds of results folders: predictions in a style, or embeddings."""
PRECISIONS = ("auto", "fp32", "bf16", "bf16-products", "int8")
"""``auto``, and the names of :data:`fastfold.evoformer.precision.Precision`."""
SEED_LIMIT = 2**31
"""Upper limit of seeds, exclusive."""


@dataclass(frozen=True)
class InferConfig:
    """Settings of a fold.

    Attributes:
        num_recycles: Passes after the first; None for each network's default.
        seeds: Random seeds; each network makes one prediction per seed. Equal seeds give equal predictions.
        precision: Precision of the trunk, one of :data:`PRECISIONS`. ``auto`` is the device's default
            (:func:`~fastfold.evoformer.precision.choose_precision`). None is ``auto`` on a GPU and ``fp32`` otherwise.
        plots: Draw plots.
        pae: Keep and write the aligned errors of all pairs; None for short targets only
            (:func:`~fastfold.inference.folding.prediction.keeps_pae`).
        device: ``auto`` (CUDA if available), ``cpu``, ``cuda`` or ``cuda:1``.
        parallel: ``dap=<number>``: number of processes that fold each target together
            (:mod:`fastfold.inference.distributed`); None for one process.
        memory_budget: Memory of a fold, for example ``24GiB`` or a number of bytes; None for the device's free memory.
            It determines the sizes of all blocks. With several processes, the budget of each.
        host_memory: Host memory for offloaded tensors, in the same form; None for most of the free memory, and for none
            if the device is a CPU.
        offload_dir: Folder on a fast disk for tensors that exceed ``host_memory``; None for no disk.
        checkpoint_after: Seconds of a pass from which its state is saved to disk, so that an interrupted fold continues
            after its last finished pass.
        max_msa: Alignment rows that are cluster centres, and rows of the extra MSA; None for each network's defaults.
        cuda_graphs: Replay passes from a CUDA graph, which saves the host's part of short folds on a GPU
            (:mod:`fastfold.inference.planning.cuda_graph`); offloading is disabled then.
        dropout: Keep dropout on, for more diverse predictions of different seeds.
        sample: Samples of the target per network and seed (:class:`~fastfold.inference.ensemble.settings.Sampling`); a
            text is the method. None for one prediction.
        recycle_tolerance: Recycling stops when CA distances change by less than this on average, in Å; None for each
            network's default (multimer networks 0.5, others do not stop early).
        stop_at_score: Stop after a prediction of a target with this mean pLDDT (complexes: 100 times the multimer
            ranking confidence), 0 to 100.
        num_ensemble: Samples of the alignment whose representations are averaged in each pass; None for each network's
            default (1).
        rank: Score that ranks predictions.
        save_representations: Keep single and pair representation and the structure module's activations.
        save_distogram: Keep the probabilities of distances of all pairs.
        save_recycles: Keep the structure after each pass.
        initial_guess: Structure file with initial atom positions, used as the recycled positions of the first pass.
        restraints: File of distances that the structure should have (:mod:`fastfold.inference.restraints`).
        restraint_steps: Largest number of gradient steps towards them.
        restraint_leave_one_out: Find contradictions by fits that leave out each restraint or group in turn.
        cyclic: Treat each chain as a ring, with a bond between last and first residue; or names of the chains that are
            rings, such as ``B`` or ``A,C``, by their order in the target.
        embed: Representations to compute instead of structures (:class:`~fastfold.inference.embed.config.EmbedConfig`);
            None to fold.
        relax: Predictions of a target that are relaxed.
        num_relax: Number of best predictions that are relaxed; None for those of ``relax``.
        relax_platform: OpenMM's platform for the relaxation; ``auto`` for the fastest that works.

    Raises:
        ConfigError: A setting has the wrong type or an invalid value; names it.
    """

    num_recycles: int | None = None
    seeds: tuple[int, ...] = (0,)
    precision: str | None = None
    plots: bool = True
    pae: bool | None = None
    device: str = "auto"
    parallel: str | None = None
    memory_budget: str | int | None = None
    host_memory: str | int | None = None
    offload_dir: Path | None = None
    checkpoint_after: float = 180.0
    max_msa: tuple[int, int] | None = None
    cuda_graphs: bool = False
    dropout: bool = False
    sample: Sampling | None = None
    recycle_tolerance: float | None = None
    stop_at_score: float | None = None
    num_ensemble: int | None = None
    rank: RankBy = "auto"
    save_representations: bool = False
    save_distogram: bool = False
    save_recycles: bool = False
    initial_guess: Path | None = None
    restraints: Path | None = None
    restraint_steps: int = 60
    restraint_leave_one_out: bool = False
    cyclic: bool | str = False
    embed: EmbedConfig | None = None
    relax: RelaxWhich = "none"
    num_relax: int | None = None
    relax_platform: str = "auto"

    def __post_init__(self) -> None:
        for name, least, most in (
            ("num_recycles", 0, 1000),
            ("num_ensemble", 1, 64),
            ("num_relax", 1, 10_000),
        ):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), least, most)
        for name, highest in (
            ("recycle_tolerance", 1000.0),
            ("stop_at_score", 100.0),
            ("checkpoint_after", 1e9),
        ):
            _check_number(name, getattr(self, name), highest)
        for name, choices in (
            ("rank", get_args(RankBy)),
            ("relax", get_args(RelaxWhich)),
            ("precision", PRECISIONS),
        ):
            if name != "precision" or self.precision is not None:
                _check_choice(name, getattr(self, name), choices)
        if self.sample is not None:
            if not isinstance(self.sample, Sampling):
                object.__setattr__(self, "sample", Sampling(self.sample))
            if self.sample.method == "dropout":
                object.__setattr__(self, "dropout", True)
        kept = ("save_representations", "save_recycles", "save_distogram")
        if not isinstance(self.cyclic, bool | str):
            raise ConfigError(f"cyclic must be True, False or names of chains, found {self.cyclic!r}")
        for name in ("plots", "cuda_graphs", "dropout", *kept, "restraint_leave_one_out"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, found {getattr(self, name)!r}")
        if self.pae not in (None, True, False):
            raise ConfigError(f"pae must be True, False or None, found {self.pae!r}")
        object.__setattr__(self, "seeds", check_seeds(self.seeds))
        if self.max_msa is not None:
            object.__setattr__(self, "max_msa", _check_max_msa(self.max_msa))
        for name in ("memory_budget", "host_memory"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, str)):
                raise ConfigError(f"{name} must be text or a number of bytes, found {value!r}")
            object.__setattr__(self, name, parse_bytes(value, none=name == "host_memory"))
        if self.offload_dir is not None:
            if not isinstance(self.offload_dir, (str, Path)):
                raise ConfigError(f"offload_dir must be a path, found {self.offload_dir!r}")
            object.__setattr__(self, "offload_dir", Path(self.offload_dir))
        for name in ("initial_guess", "restraints"):
            value = getattr(self, name)
            if value is not None:
                if not isinstance(value, (str, Path)):
                    raise ConfigError(f"{name} must be a path, found {value!r}")
                object.__setattr__(self, name, Path(value))
        _check_whole("restraint_steps", self.restraint_steps, 1, 100_000)
        if self.restraint_leave_one_out and self.restraints is None:
            raise ConfigError("restraint_leave_one_out needs restraints")
        if self.restraints is not None:
            for name, why in (
                ("parallel", "gradients need one process per fold"),
                ("cuda_graphs", "gradient steps are not recorded"),
            ):
                if getattr(self, name):
                    raise ConfigError(f"restraints and {name} exclude each other: {why}")
            if self.precision in ("int8", "bf16-products"):
                raise ConfigError(f"restraints need gradients; precision {self.precision} has none, use fp32")
        alone = ("dropout", "save_representations", "save_distogram")
        asked = next((name for name in alone if getattr(self, name)), None)
        if self.parallel is not None and asked is not None:
            raise ConfigError(f"{asked} needs one process per fold: leave out parallel={self.parallel!r}")
        if self.embed is not None:
            self._check_embed()
        if self.cuda_graphs:
            for name, why in (
                ("parallel", "a graph does not contain messages to other processes"),
                ("dropout", "a replay would repeat the random numbers"),
                ("host_memory", "a replay does not offload to the host"),
                ("offload_dir", "a replay does not offload to a disk"),
            ):
                if getattr(self, name):
                    raise ConfigError(
                        f"cuda_graphs and {name} exclude each other, {why}: leave out one of them"
                    )

    def _check_embed(self) -> None:
        """Refuse settings that an embedding does not have."""
        unused = ("parallel", "cuda_graphs", "restraints", "stop_at_score", "num_relax")
        saved = ("save_representations", "save_distogram", "save_recycles")
        wrong = next((name for name in (*unused, *saved) if getattr(self, name)), None)
        wrong = "relax" if wrong is None and self.relax != "none" else wrong
        if wrong is not None:
            raise ConfigError(f"{wrong} is not available for embeddings; leave it out")
        if self.embed is not None and self.embed.file_format == "bioemu":
            if len(self.seeds) > 1 or self.sample is not None:
                raise ConfigError("BioEmu reads one embedding of a sequence: give one seed, without sample")
            if self.num_recycles is None:
                object.__setattr__(self, "num_recycles", 0)

    @property
    def budget(self) -> int | None:
        """``memory_budget`` in bytes."""
        return None if self.memory_budget is None else int(self.memory_budget)

    @property
    def host_bytes(self) -> int | None:
        """``host_memory`` in bytes."""
        return None if self.host_memory is None else int(self.host_memory)


def check_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Return seeds as a tuple without repetitions, in the given order.

    Raises:
        ConfigError: The list is empty, or a seed is not a whole number from 0 to 2³¹ - 1.
    """
    if not isinstance(seeds, (numbers.Number, Sequence)) or isinstance(seeds, str):
        raise ConfigError(f"seeds must be a whole number or a list of them, found {seeds!r}")
    given = [seeds] if isinstance(seeds, numbers.Number) else list(seeds)
    if not given:
        raise ConfigError("seeds is empty; give at least one seed")
    for seed in given:
        _check_whole("seed", seed, 0, SEED_LIMIT - 1)
    return tuple(dict.fromkeys(int(seed) for seed in given))  # type: ignore[arg-type]


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse seeds written as ``0``, ``0-4`` or ``1,3,10-12``.

    Raises:
        ConfigError: The text has another form; names the wrong part.
    """
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,10})(?:-(\d{1,10}))?\s*", part, re.ASCII)
        if found is None:
            raise ConfigError(
                f"seeds {text[:40]!r}: {part[:20]!r} is not a seed; write for example 0-4 or 1,3,7"
            )
        first, last = int(found[1]), int(found[2] or found[1])
        if not first <= last < SEED_LIMIT or last - first >= 100_000:
            raise ConfigError(
                f"seeds {text[:40]!r}: {part[:24]!r} is not a range of at most 100,000 seeds below 2³¹"
            )
        seeds += range(first, last + 1)
    return check_seeds(seeds)


def parse_max_msa(text: str) -> tuple[int, int]:
    """Parse numbers of rows written as ``512:1024``: cluster centres and extra MSA.

    Raises:
        ConfigError: The text has another form.
    """
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text.strip(), re.ASCII)
    if found is None:
        raise ConfigError(f"max_msa {text[:40]!r}: write CLUSTERS:EXTRA, for example 512:1024")
    return _check_max_msa((int(found[1]), int(found[2])))


def _check_max_msa(value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        return parse_max_msa(value)
    if not isinstance(value, Sequence) or len(value) != 2:
        raise ConfigError(f"max_msa must be two numbers of rows, clusters and extra, found {value!r}")
    for number in value:
        _check_whole("max_msa", number, 1, 100_000)
    return int(value[0]), int(value[1])


def _check_whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(f"{name} must be a whole number, found {value!r}")
    if not least <= int(value) <= most:
        raise ConfigError(f"{name} must be from {least} to {most}, found {value}")


def _check_number(name: str, value: Any, most: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} must be a number, found {value!r}")
    if not 0 <= float(value) <= most:
        raise ConfigError(f"{name} must be from 0 to {most:g}, found {value}")


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, found {value!r}")
