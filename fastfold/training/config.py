"""Configuration of a training run: Hydra's groups with types and ranges.

The YAML files in ``fastfold/configs`` hold the values. The classes here define the keys, their meaning and bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastfold.data.templates.database import require_date
from fastfold.errors import ConfigError
from fastfold.training.bounds import bounded, check_bounds, share
from fastfold.training.parallel_config import ParallelConfig


@dataclass
class ModelConfig:
    """Group ``model``: the network."""

    preset: str = "model_1_ptm"  #: Official name of the configuration to start from
    overrides: dict[str, Any] = field(default_factory=dict)  #: Changes of the official tree, with its nesting
    name: str = "model"  #: Name of the trained network, and of its weights file in ``trainer.out``
    weights: str | None = None  #: Initial weights (any format that ``fastfold infer`` reads), or null

    def __post_init__(self) -> None:
        check_bounds("model", type(self), vars(self))
        if Path(self.name).name != self.name:
            raise ConfigError(
                f"model.name must be the name of a file without folders, not {self.name!r}; trainer.out is the folder"
            )


@dataclass
class DataConfig:
    """Group ``data``: training data and samples."""

    directory: str = "???"  #: Folder of structures and alignments, or a packed set (``fastfold data build``)
    #: ``folder`` (structure files, ``msas/``, optional ``index.tsv``) or ``openfold`` (``mmcifs/``, ``alignments/``,
    #: ``chain_data_cache.json``)
    layout: str = bounded("folder", choices=("folder", "openfold"))
    #: Folder of alignments, or the index (JSON) of an alignment database; null for the layout's folder
    alignments: str | None = None
    #: Layout ``openfold``: table of chains that share alignments, or null for ``duplicate_pdb_chains.txt`` of the
    #: folder
    duplicates: str | None = None
    train_split: str = "train"  #: Split to train on, if the folder has splits
    valid_split: str | None = "valid"  #: Split to validate on, or null
    distillation: str | None = None  #: A second folder of the same layout with predicted structures, or null
    distillation_alignments: str | None = None  #: As ``alignments``, for that folder
    distillation_probability: float = share(0.75)  #: Share of samples from the distillation folder
    #: Residues of predicted structures under this pLDDT are masked
    distillation_min_plddt: float = bounded(50.0, least=0, most=100)
    #: Rows to draw evenly from deeper alignments of predicted structures, or null for all rows
    distillation_max_rows: int | None = bounded(1000, least=1)
    #: Shorter predicted structures are left out; ``min_length`` does not apply to them
    distillation_min_length: int = bounded(200, least=1)
    #: Longer predicted structures are left out, or null for no limit; ``max_length`` does not apply to them
    distillation_max_length: int | None = bounded(1024, least=1)
    #: Predicted structures with fewer alignment rows are left out; ``min_rows`` does not apply to them
    distillation_min_rows: int = bounded(200, least=0)
    #: Folder of the PDB's mmCIF files, from which template hits next to the alignments are read; or null for no
    #: templates
    template_mmcif_dir: str | None = None
    #: The PDB's list of obsolete entries, or null for ``obsolete.dat`` in that folder or next to it
    obsolete_pdbs: str | None = None
    #: Lines ``1abc:2001-02-03`` or OpenFold's ``mmcif_cache.json``, or null to read dates from the mmCIF files
    template_release_dates: str | None = None
    #: ``YYYY-MM-DD``, the newest date of templates, in addition to the chain's own date. Null for any.
    max_template_date: str | None = None
    #: Folder for the results of scanning the data, so that large sets are scanned once; or null
    index: str | None = None
    cache: str | None = None  #: Folder for parsed structures and alignments, or null
    crop_size: int = bounded(256, least=1)  #: Residues of a training sample
    #: Multimer networks: share of the complexes that are cropped around a residue at an interface; the others are
    #: cropped chain by chain
    spatial_crop_probability: float = share(0.5)
    #: Multimer networks: maximum number of chains of a complex; larger ones are cut to neighbouring chains
    max_chains: int = bounded(20, least=1)
    #: Shorter chains are left out; for a multimer network complexes with fewer residues in all chains
    min_length: int = bounded(1, least=1)
    #: Longer chains (or complexes) are left out; null for no limit
    max_length: int | None = bounded(None, least=1)
    #: Chains with fewer alignment rows are left out, with the query; 0 counts no rows
    min_rows: int = bounded(0, least=0)
    max_resolution: float = bounded(9.0, above=0)  #: Resolution in Å; chains of worse structures are left out
    #: Resolution in Å of structures that state none, or null to keep the confidence heads from learning from such
    #: structures
    unknown_resolution: float | None = bounded(None, above=0)
    #: Chains in which one residue type has a larger share are left out
    max_single_residue: float = share(0.8)
    min_resolved: float = share(0.0)  #: Chains with a smaller share of resolved CA atoms are left out
    max_release_date: str | None = None  #: ``YYYY-MM-DD``; later structures are left out, or null
    #: Factors of the sampling weight by chain name
    oversample: dict[str, float] = field(default_factory=dict)
    #: Factors of the sampling weight by the minimum number of alignment rows
    depth_weights: dict[int, float] = field(default_factory=dict)
    #: Networks with coevolution: share of samples with an alignment whose couplings are left out
    coevolution_dropout: float = share(0.0)
    #: Networks with coevolution: number of random subsets of each alignment's rows from which couplings are computed
    coevolution_subsets: int = bounded(0, least=0)
    single_sequence_probability: float = share(0.0)  #: Share of samples whose alignment is left out
    block_deletion: bool = True  #: Delete blocks of alignment rows
    unclamped_probability: float = share(0.1)  #: Share of samples with unclamped backbone FAPE
    #: Recycling iterations are drawn evenly from 0 to this, the same for a whole step
    max_recycles: int = bounded(3, least=0)
    #: Processes that prepare samples; 0 prepares them in the training process
    workers: int = bounded(4, least=0)
    prefetch: int = bounded(16, least=1)  #: Samples prepared ahead of the network
    #: ``draw`` uses samples in the order of draws, ``ready`` as they become ready
    order: str = bounded("ready", choices=("draw", "ready"))

    def __post_init__(self) -> None:
        check_bounds("data", type(self), vars(self))
        for name in ("obsolete_pdbs", "template_release_dates", "max_template_date"):
            if getattr(self, name) is not None and self.template_mmcif_dir is None:
                raise ConfigError(f"data.{name} needs templates; set data.template_mmcif_dir too")
        for name in ("max_template_date", "max_release_date"):
            if getattr(self, name) is not None:
                require_date(f"data.{name}", getattr(self, name))


@dataclass
class OptimConfig:
    """Group ``optim``: optimizer, learning rate schedule and average of the weights (supplement, section 1.11.3)."""

    #: ``adam``; ``muon`` (the matrices of the blocks and of the structure module by Muon, everything else by Adam); or
    #: for batches of thousands ``lamb`` or ``lars`` (see :mod:`fastfold.parallel.data_parallel.large_batch`)
    name: str = bounded("adam", choices=("adam", "muon", "lamb", "lars"))
    lr: float = bounded(1e-3, above=0)  #: Learning rate after warm-up
    warmup_steps: int = bounded(1000, least=0)  #: Steps of linear warm-up
    #: Step after which the rate is multiplied once by ``decay_factor``, or null
    decay_after: int | None = bounded(50_000, least=0)
    decay_factor: float = bounded(0.95, above=0)  #: See ``decay_after``
    #: Steps over which the rate falls along a cosine, or null
    cosine_steps: int | None = bounded(None, least=1)
    final_fraction: float = share(0.0)  #: Share of the rate at the end of the cosine
    beta1: float = bounded(0.9, least=0, below=1)  #: Adam's first decay
    beta2: float = bounded(0.999, least=0, below=1)  #: Adam's second decay
    eps: float = bounded(1e-6, above=0)  #: Adam's epsilon
    weight_decay: float = share(0.0)  #: Share of the weights that each step subtracts, times the rate
    #: Learning rate of Muon's matrices after warm-up, with the same schedule
    muon_lr: float = bounded(5e-3, above=0)
    momentum: float = bounded(0.9, least=0, below=1)  #: Momentum of ``lars`` and ``muon``
    #: Trust coefficient of ``lars``: size of a layer's step relative to its weights
    trust: float = bounded(1e-3, above=0)
    clip: float = bounded(0.1, above=0)  #: Largest gradient norm of one sample
    batch_size: int = bounded(128, least=1)  #: Samples of a step, over all processes
    #: Decay of the exponential moving average of the weights
    ema_decay: float = bounded(0.999, least=0, below=1)

    def __post_init__(self) -> None:
        check_bounds("optim", type(self), vars(self))


@dataclass
class TrainerConfig:
    """Group ``trainer``: the training loop."""

    out: str = "???"  #: Folder of the run
    seed: int = bounded(0, least=0, most=2**63 - 1)  #: Seed of all random numbers
    steps: int = bounded(78_000, least=1)  #: Total number of optimisation steps
    device: str = "auto"  #: ``auto``, ``cpu`` or ``cuda``
    #: ``fp32``, or ``bf16`` for autocast with structure module, heads and losses in float32
    precision: str = bounded("fp32", choices=("fp32", "bf16"))
    #: ``highest`` (float32 products are float32), ``high`` or ``medium`` (they may be TF32 or bfloat16)
    matmul: str = bounded("highest", choices=("highest", "high", "medium"))
    compile: bool = False  #: Compile the Evoformer's blocks with ``torch.compile``
    #: ``auto`` (newest complete checkpoint, if any), ``never``, or a checkpoint's folder or URL
    resume: str = "auto"
    accept_changes: bool = False  #: Continue although seed, data or network differ from the last start
    checkpoint_every: int = bounded(500, least=1)  #: Steps between checkpoints
    #: Folder or URL (``s3://bucket/run``, or any fsspec protocol) for the checkpoints of this run only; null for
    #: ``checkpoints`` in ``out``
    checkpoint_dir: str | None = None
    keep_last: int = bounded(3, least=1)  #: Newest checkpoints to keep
    #: Also keep checkpoints of steps that are multiples of this, or null; must be a multiple of ``checkpoint_every``
    keep_every: int | None = bounded(None, least=1)
    validate_every: int = bounded(1000, least=1)  #: Steps between validations
    validate_chains: int = bounded(100, least=1)  #: Maximum number of chains to validate on
    validate_recycles: int = bounded(3, least=0)  #: Recycling iterations in validation
    log_every: int = bounded(10, least=1)  #: Steps between log entries
    #: Number of steps after the second one of each start to profile for Chrome or Perfetto; 0 for none
    profile_steps: int = bounded(0, least=0)
    #: Steps after which the predicted aligned error counts in the loss; its head keeps its initial weights until then
    #: (supplement, section 1.9.7: the head is trained at the end)
    aligned_error_after: int = bounded(0, least=0)
    #: Number of consecutive steps without finite numbers after which the run stops
    max_bad_steps: int = bounded(20, least=1)

    def __post_init__(self) -> None:
        check_bounds("trainer", type(self), vars(self))
        if self.keep_every is not None and self.keep_every % self.checkpoint_every:
            raise ConfigError(
                f"trainer.keep_every={self.keep_every} must be a multiple of "
                f"trainer.checkpoint_every={self.checkpoint_every}"
            )


@dataclass
class MemoryConfig:
    """Group ``memory``: activations for the backward pass, and placement of parameters and states."""

    #: Keep only the inputs of each block and recompute the rest (activation checkpointing). With a policy: allow
    #: recomputation of blocks whose activations exceed the budget.
    checkpointing: bool = True
    #: Placement of parameters, gradients and optimizer states (``auto``, ``cuda``, ``cpu``, ``nvme``; see
    #: :class:`fastfold.memory.Gemini`), or null to keep all on the device
    policy: str | None = bounded(None, choices=("auto", "cuda", "cpu", "nvme"))
    #: With a policy: limit of device memory, such as ``20GiB``. On a CPU a device of this size is simulated, and
    #: exceeding the limit is an error.
    budget: str = "16GiB"
    #: With a policy: exceeding the budget is an error on a GPU too (see :class:`fastfold.memory.Gemini`); untested on
    #: GPUs
    hard_budget: bool = False
    #: With policy ``nvme``: folder for memory-mapped files, or null for the system's temporary folder
    folder: str | None = None

    def __post_init__(self) -> None:
        check_bounds("memory", type(self), vars(self))


@dataclass
class LoggerConfig:
    """Group ``logger``: loggers in addition to the terminal."""

    jsonl: bool = True  #: Write ``metrics.jsonl``
    csv: bool = True  #: Write ``metrics.csv``
    tensorboard: bool = True  #: Write TensorBoard event files
    wandb: bool = False  #: Log to Weights & Biases (extra ``wandb``)
    mlflow: bool = False  #: Log to MLflow (extra ``mlflow``)
    project: str = "fastfold"  #: Name of the project in Weights & Biases, and of the experiment in MLflow


@dataclass
class FinetuneConfig:
    """Group ``finetune``: choice of the trained parameters."""

    freeze: list[str] = field(default_factory=list)  #: Patterns of names of parameters that are not trained
    #: Rank of adapters on attention and transition layers; if set, only adapters are trained. 0 for none.
    lora_rank: int = bounded(0, least=0)
    lora_alpha: float = bounded(16.0, above=0)  #: Adapters are scaled by ``lora_alpha / lora_rank``
    #: Whether a run without ``model.weights`` is refused, because it would begin with random weights
    from_weights: bool = False

    def __post_init__(self) -> None:
        check_bounds("finetune", type(self), vars(self))


@dataclass
class TrainConfig:
    """Whole configuration of ``fastfold train``; the attributes are Hydra's groups.

    Example:
        >>> from fastfold.training import TrainConfig
        >>> from fastfold.training.config import OptimConfig
        >>> TrainConfig(optim=OptimConfig(lr=1e-4)).trainer.precision
        'fp32'
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
