"""``InferConfig``: the settings of a fold, for the command line and for Python."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from fastfold.errors import ConfigError
from fastfold.inference.embedding.config import EmbedConfig
from fastfold.inference.relax.config import PLATFORM_CHOICES
from fastfold.inference.sampling.settings import Sampling
from fastfold.inference.setting_values import (
    check_max_msa,
    check_seeds,
    parse_device,
    parse_parallel,
    parse_seeds,
    structure_path,
)
from fastfold.utils.option_fields import check_options, option
from fastfold.utils.units import parse_bytes

RankBy = Literal["auto", "plddt", "ptm", "iptm", "multimer"]
"""Scores that rank predictions: mean pLDDT, pTM, ipTM, AlphaFold-Multimer's 0.8 ipTM + 0.2 pTM, or ``auto``.

``auto`` is AlphaFold-Multimer's score for predictions with an ipTM, and otherwise mean pLDDT."""
RelaxWhich = Literal["none", "best", "all"]  #: Predictions of a target that are relaxed
OutputFormat = Literal["fastfold", "colabfold"]  #: Styles of file names and scores files
FolderFormat = Literal["fastfold", "colabfold", "embeddings"]
"""Kinds of results folders: predictions in a style, or embeddings."""
DEFAULT_SEEDS = (0,)  #: Seeds where neither the settings nor an input name others
PRECISIONS = ("auto", "fp32", "bf16", "bf16-products", "int8")
"""``auto``, and the names of :data:`fastfold.evoformer.precision.Precision`."""

WITHOUT_GRAPHS = {
    "parallel": "a graph does not contain messages to other processes",
    "dropout": "a replay would repeat the random numbers",
    "host_memory": "a replay does not offload to the host",
    "offload_dir": "a replay does not offload to a disk",
}
"""Settings that exclude CUDA graphs, with the reasons."""

_machine = partial(option, group="machine")
_rare_machine = partial(_machine, is_rare=True)
_memory = partial(option, default=None, group="memory", metavar="SIZE")
_restraints = partial(option, group="restraints")
_sampling = partial(option, group="sampling")
_rare_sampling = partial(_sampling, is_rare=True)
_structures = partial(option, group="structures")
_rare_structures = partial(_structures, is_rare=True)


@dataclass(frozen=True)
class InferConfig:
    """Settings of a fold.

    Raises:
        ConfigError: A setting has the wrong type or an invalid value; names it.
    """

    num_recycles: int | None = _sampling(
        "--num-recycles",
        "--num-recycle",
        default=None,
        bounds=(0, 1000),
        help="passes after the first (monomers 3, multimers up to 20)",
    )
    #: Random seeds; each network makes one prediction per seed. Equal seeds give equal predictions.
    seeds: tuple[int, ...] = _sampling(
        default=DEFAULT_SEEDS, parse=parse_seeds, metavar="LIST", help="fold with these seeds: 0-4, or 1,3,7"
    )
    precision: str | None = _sampling(
        default=None,
        choices=PRECISIONS,
        help="precision of the trunk: bf16 halves the memory and is faster on GPUs; bf16-products (with AMX or "
        "AVX512_BF16) and int8 (with VNNI; products with weights in 8 bits) are faster on CPUs; auto: best for the "
        "device (default: auto on GPUs, fp32 on CPUs)",
    )
    plots: bool = _structures("--no-plots", default=True, help="write no plots")  #: Draw plots
    pae: bool | None = _structures(
        default=None,
        choices={"auto": None, "yes": True, "no": False},
        help="write the predicted aligned error of all pairs of residues (default: of targets up to 5,000 residues; "
        "pTM and ipTM are computed anyway)",
    )
    cif_pae: bool | None = _rare_structures(
        default=None,
        choices={"auto": None, "yes": True, "no": False},
        help="write the predicted aligned error into new .cif files too, for ChimeraX and Mol* (default: of targets "
        "up to 400 residues; 36 MB at 1,000)",
    )
    device: str = _machine(
        default="auto",
        parse=parse_device,
        metavar="DEVICE",
        help="auto, cpu, cuda, cuda:1 for the second GPU, or mps for an Apple GPU (default: cuda where there is one)",
    )
    parallel: str | None = option(
        default=None,
        group="ranks",
        metavar="dap=N",
        help="N processes, started by torchrun, share each fold or gradient: memory and work of each fall with N",
    )
    memory_budget: str | int | None = _memory(
        help="memory that a fold or a gradient may take, 24GiB for example (default: free memory of the device); the "
        "sizes of all blocks, and recomputation, follow from it",
    )
    host_memory: str | int | None = _memory(
        is_rare=True,
        help="memory of this machine for tensors offloaded from a GPU (default: most of the free memory; 0 for none)",
    )
    offload_dir: Path | None = _rare_machine(
        default=None,
        parse=Path,
        metavar="DIR",
        help="folder on a fast disk for tensors beyond --host-memory (default: none)",
    )
    checkpoint_after: float = _rare_machine(
        default=180.0,
        bounds=(0.0, 1e9),
        metavar="SECONDS",
        help="save the state after each pass that takes at least this long, so that a killed fold can continue "
        "(default 180)",
    )
    max_msa: tuple[int, int] | None = _rare_sampling(
        default=None,
        metavar="CLUSTERS:EXTRA",
        help="alignment rows that the network sees, 512:1024 for example (default: the network's own)",
    )
    #: False to give multimer networks no profiles of clusters of alignment rows
    use_cluster_profile: bool = _rare_sampling(
        "--disable-cluster-profile",
        default=True,
        help="give multimer networks no profiles of clusters of alignment rows (monomer networks always get them)",
    )
    cuda_graphs: bool | None = _rare_machine(
        default=None,
        choices=(True, False),
        help="on a GPU, record one pass as a CUDA graph and replay it for the others (default: for targets up to 256 "
        "residues, whose passes wait for the host)",
    )
    dropout: bool = _rare_sampling(
        "--dropout",
        "--use-dropout",
        default=False,
        help="keep dropout on, for more diverse predictions by many seeds",
    )
    #: Samples of the target per network and seed (:class:`~fastfold.inference.sampling.settings.Sampling`); a text is
    #: the method. None for one prediction.
    sample: Sampling | None = None
    recycle_tolerance: float | None = _rare_sampling(
        "--recycle-tolerance",
        "--recycle-early-stop-tolerance",
        default=None,
        bounds=(0.0, 1000.0),
        metavar="Å",
        help="stop recycling when CA distances change less than this (multimers 0.5, monomers 0: never)",
    )
    stop_at_score: float | None = _restraints(
        default=None,
        bounds=(0.0, 100.0),
        metavar="X",
        help="make no more predictions of a target after one of this mean pLDDT (complexes: 100 times 0.8 ipTM + 0.2 "
        "pTM)",
    )
    num_ensemble: int | None = _rare_sampling(
        default=None, bounds=(1, 64), help="samples of the alignment averaged in each pass (default 1)"
    )
    rank: RankBy = _structures(
        default="auto",
        choices=get_args(RankBy),
        help="rank by mean pLDDT, pTM, ipTM, or 0.8 ipTM + 0.2 pTM (default: the last for complexes, else pLDDT)",
    )
    save_representations: bool = _rare_structures(
        default=False, help="write single, pair and structure module's activations"
    )
    save_distogram: bool = _rare_structures(
        default=False, help="write the probabilities of distances of all pairs"
    )
    save_recycles: bool = _rare_structures(default=False, help="write the structure after each pass")
    #: Structure file with initial atom positions, used as the recycled positions of the first pass. In Python also
    #: another structure of :func:`fastfold.protein.io.read.read_structure`.
    initial_guess: Any = _rare_sampling(
        default=None,
        parse=structure_path,
        metavar="FILE",
        help="start from this structure of the target (PDB or mmCIF), as if it were recycled",
    )
    restraints: Path | None = _restraints(
        default=None,
        parse=Path,
        metavar="FILE",
        help="distances that the structure should have: a table, or a file of Boltz, Chai, AlphaLink, xiVIEW or CASP",
    )
    restraint_steps: int = _restraints(
        default=60,
        bounds=(1, 100_000),
        help="largest number of gradient steps towards the restraints (default 60)",
    )
    restraint_springs: bool = _restraints(
        default=False,
        help="end any network in a descent on its distogram with springs between restrained residues, which takes "
        "about the time of a fold, in place of gradient steps",
    )
    restraint_leave_one_out: bool = _restraints(
        default=False,
        help="if not all restraints hold, leave out each in turn with a quarter of the steps, to tell which contradict "
        "each other",
    )
    cyclic: bool = _rare_sampling(default=False, help="each chain is a ring (cyclic peptides)")
    rings: str | None = _rare_sampling(
        default=None,
        metavar="A,C",
        help="these chains are rings, by their order in the target (default: none, or all with --cyclic)",
    )
    #: Representations to compute instead of structures; None to fold
    embed: EmbedConfig | None = None
    relax: RelaxWhich = _structures(
        default="none",
        choices=get_args(RelaxWhich),
        nargs="?",
        bare="best",
        help="relax the best prediction of each target, or all, in the Amber force field (default none)",
    )
    num_relax: int | None = _rare_structures(
        default=None,
        bounds=(0, 10_000),
        help="relax the N best predictions of each target (default: as --relax says)",
    )
    relax_platform: str = _rare_structures(
        default="auto",
        choices=PLATFORM_CHOICES,
        help="OpenMM's platform for relaxation (default: the fastest that works)",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.num_relax is not None and self.num_relax > 0:
            if self.relax == "all":
                raise ConfigError("relax 'all' and num_relax exclude each other; leave out one of them")
            self._set("relax", "best")
        self._set("num_relax", self.num_relax or None)
        if self.sample is not None:
            if not isinstance(self.sample, Sampling):
                self._set("sample", Sampling(self.sample))
            if self.sample.method == "dropout":
                self._set("dropout", True)
        self._set("seeds", check_seeds(self.seeds))
        parse_parallel(self.parallel)  # refuses other forms
        if self.max_msa is not None:
            self._set("max_msa", check_max_msa(self.max_msa))
        self._set("memory_budget", _bytes_of("memory_budget", self.memory_budget))
        self._set("host_memory", _bytes_of("host_memory", self.host_memory, none=True))
        if self.initial_guess is not None and not isinstance(self.initial_guess, Path):
            self._set("initial_guess", _read_guess(self.initial_guess))
        if self.rings is not None and (self.cyclic or not isinstance(self.rings, str)):
            raise ConfigError(
                f"rings must be names of chains such as A,C, without cyclic, found {self.rings!r}"
            )
        self._check_restraints()
        if self.embed is not None:
            self._check_embed()
        for name, why in WITHOUT_GRAPHS.items() if self.cuda_graphs else ():
            if getattr(self, name):
                raise ConfigError(f"cuda_graphs and {name} exclude each other, {why}: leave out one of them")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_restraints(self) -> None:
        if self.restraints is None:
            for name in ("restraint_leave_one_out", "restraint_springs"):
                if getattr(self, name):
                    raise ConfigError(f"{name} needs restraints")
            return
        if self.cuda_graphs:
            raise ConfigError(
                "restraints and cuda_graphs exclude each other: gradient steps are not recorded"
            )
        if self.precision in ("int8", "bf16-products"):
            raise ConfigError(f"restraints need gradients; precision {self.precision} has none, use fp32")

    def _check_embed(self) -> None:
        unused = ("cuda_graphs", "restraints", "stop_at_score", "num_relax")
        saved = ("save_representations", "save_distogram", "save_recycles")
        wrong = next((name for name in (*unused, *saved) if getattr(self, name)), None)
        wrong = "relax" if wrong is None and self.relax != "none" else wrong
        if wrong is not None:
            raise ConfigError(f"{wrong} is not available for embeddings; leave it out")
        if self.embed is not None and self.embed.file_format == "bioemu":
            if len(self.seeds) > 1 or self.sample is not None:
                raise ConfigError("BioEmu reads one embedding of a sequence: give one seed, without sample")
            if self.num_recycles is None:
                self._set("num_recycles", 0)

    @property
    def ring_names(self) -> bool | str:
        """Chains that are rings: all, none, or their names."""
        return self.cyclic if self.rings is None else self.rings

    @property
    def ranks(self) -> int:
        """Number of processes that fold each target together."""
        return parse_parallel(self.parallel)

    @property
    def budget(self) -> int | None:
        """``memory_budget`` in bytes."""
        return None if self.memory_budget is None else int(self.memory_budget)

    @property
    def host_bytes(self) -> int | None:
        """``host_memory`` in bytes."""
        return None if self.host_memory is None else int(self.host_memory)


def _bytes_of(name: str, value: Any, *, none: bool = False) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{name} must be text or a number of bytes, found {value!r}")
    return parse_bytes(value, none=none)


def _read_guess(source: Any) -> Any:
    from fastfold.protein.io.read import read_objects

    try:
        (guess,) = read_objects([source])
    except ConfigError as error:
        raise ConfigError(f"initial_guess: {error}") from None
    return guess


class FoldSettings(TypedDict, total=False):
    """Fields of :class:`InferConfig` that the Python API takes as further keyword arguments.

    Example:
        >>> import fastfold
        >>> from fastfold.inference.config import FoldSettings
        >>> settings: FoldSettings = {"dropout": True, "max_msa": (64, 128)}
        >>> fastfold.predict("MTYKLILNGK", "mini", num_recycles=0, **settings).aatype.shape
        (10,)
    """

    cif_pae: bool | None
    host_memory: str | int | None
    offload_dir: str | Path | None
    max_msa: tuple[int, int] | None
    use_cluster_profile: bool
    cuda_graphs: bool | None
    dropout: bool
    sample: Sampling | None
    recycle_tolerance: float | None
    stop_at_score: float | None
    num_ensemble: int | None
    rank: RankBy
    save_representations: bool
    save_distogram: bool
    save_recycles: bool
    initial_guess: Any
    restraints: str | Path | None
    restraint_steps: int
    restraint_springs: bool
    restraint_leave_one_out: bool
    cyclic: bool
    rings: str | None


class ManyFoldSettings(FoldSettings, total=False):
    """Settings of :func:`fastfold.predict_many`."""

    num_recycles: int | None
    memory_budget: str | int | None
    pae: bool | None
