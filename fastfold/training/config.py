"""The configuration of a training run: Hydra's groups with their types and ranges.

The YAML files in ``fastfold/configs`` hold the values; the classes here say which keys there are, what they mean and
what they may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastfold.data.templates.database import parse_date
from fastfold.errors import ConfigError
from fastfold.training.bounds import bounded, check_bounds, share
from fastfold.training.parallel_config import ParallelConfig


@dataclass
class ModelConfig:
    """Group ``model``: the network.

    Attributes:
        preset: Official name that the configuration starts from.
        overrides: Changes of the official tree, nested as it is.
        name: Name of the trained network.
        weights: Weights to start from (any format that ``fastfold infer`` takes), or null.
    """

    preset: str = "model_1_ptm"
    overrides: dict[str, Any] = field(default_factory=dict)
    name: str = "model"
    weights: str | None = None


@dataclass
class DataConfig:
    """Group ``data``: what is trained on.

    Attributes:
        directory: Folder of structures and alignments, or a packed set (``fastfold data build``).
        layout: ``folder`` (structure files, ``msas/``, optional ``index.tsv``) or ``openfold`` (``mmcifs/``,
            ``alignments/``, ``chain_data_cache.json``).
        alignments: Folder of alignments, or the index (JSON) of an alignment database; null for the folder that belongs
            to the layout.
        duplicates: Layout ``openfold``: table of chains that share alignments, or null for
            ``duplicate_pdb_chains.txt`` of the folder.
        train_split: Split to train on, where the folder has splits.
        valid_split: Split to validate on, or null.
        distillation: A second folder of the same layout with predicted structures, or null.
        distillation_alignments: As ``alignments``, for that folder.
        distillation_probability: Share of samples taken from it.
        distillation_min_plddt: Residues of it under this pLDDT are masked.
        distillation_max_rows: Rows that are drawn evenly of the deeper ones of its alignments, or null for all rows.
        template_mmcif_dir: Folder of the PDB's mmCIF files, which makes hits beside the alignments templates; or null.
        obsolete_pdbs: The PDB's list of obsolete entries, or null for ``obsolete.dat`` in that folder or next to it.
        template_release_dates: Lines ``1abc:2001-02-03`` or OpenFold's ``mmcif_cache.json``, or null: dates are then
            read from the mmCIF files.
        max_template_date: ``YYYY-MM-DD``; no template is newer, whatever the chain's own date. Null for any.
        index: Folder that keeps what the scan of the data found, so that large sets are scanned once; or null.
        cache: Folder for parsed structures and alignments, or null.
        crop_size: Residues of a training sample.
        spatial_crop_probability: Multimer networks: share of the complexes that are cropped around a residue at an
            interface; the others are cropped chain by chain.
        max_chains: Multimer networks: maximum number of chains of a complex; of larger ones neighbouring chains are
            taken.
        min_length: Shorter chains (complexes, for a multimer network: all chains of a file together) are left out.
        max_length: Longer ones are left out, or null.
        max_resolution: Resolution in Å; chains of worse structures are left out.
        unknown_resolution: Resolution in Å to assume where a structure states none, or null: the confidence heads do
            not learn from such structures then.
        max_single_residue: Chains in which one residue type has a larger share are left out.
        min_resolved: Chains with a smaller share of resolved CA atoms are left out.
        max_release_date: ``YYYY-MM-DD``; later structures are left out, or null.
        oversample: Factors of the sampling weight by chain name.
        depth_weights: Factors of the sampling weight by the number of alignment rows that a chain has at least.
        coevolution_dropout: Networks with coevolution: share of samples with an alignment whose couplings are left out.
        coevolution_subsets: Networks with coevolution: random subsets of each alignment's rows to compute couplings of.
        single_sequence_probability: Share of samples whose alignment is left out.
        block_deletion: Delete blocks of alignment rows.
        unclamped_probability: Share of samples with unclamped backbone FAPE.
        max_recycles: Recycling iterations are drawn evenly from 0 to this, the same for a whole step.
        workers: Processes that prepare samples; 0 prepares them in the training process.
        prefetch: Samples prepared ahead of the network.
        order: ``draw`` hands samples out in the order drawn, ``ready`` as they become ready.
    """

    directory: str = "???"
    layout: str = bounded("folder", choices=("folder", "openfold"))
    alignments: str | None = None
    duplicates: str | None = None
    train_split: str = "train"
    valid_split: str | None = "valid"
    distillation: str | None = None
    distillation_alignments: str | None = None
    distillation_probability: float = share(0.75)
    distillation_min_plddt: float = bounded(50.0, least=0, most=100)
    distillation_max_rows: int | None = bounded(1000, least=1)
    template_mmcif_dir: str | None = None
    obsolete_pdbs: str | None = None
    template_release_dates: str | None = None
    max_template_date: str | None = None
    index: str | None = None
    cache: str | None = None
    crop_size: int = bounded(256, least=1)
    spatial_crop_probability: float = share(0.5)
    max_chains: int = bounded(20, least=1)
    min_length: int = bounded(1, least=1)
    max_length: int | None = bounded(None, least=1)
    max_resolution: float = bounded(9.0, above=0)
    unknown_resolution: float | None = bounded(None, above=0)
    max_single_residue: float = share(0.8)
    min_resolved: float = share(0.0)
    max_release_date: str | None = None
    oversample: dict[str, float] = field(default_factory=dict)
    depth_weights: dict[int, float] = field(default_factory=dict)
    coevolution_dropout: float = share(0.0)
    coevolution_subsets: int = bounded(0, least=0)
    single_sequence_probability: float = share(0.0)
    block_deletion: bool = True
    unclamped_probability: float = share(0.1)
    max_recycles: int = bounded(3, least=0)
    workers: int = bounded(4, least=0)
    prefetch: int = bounded(16, least=1)
    order: str = bounded("ready", choices=("draw", "ready"))

    def __post_init__(self) -> None:
        check_bounds("data", type(self), vars(self))
        for name in ("obsolete_pdbs", "template_release_dates", "max_template_date"):
            if getattr(self, name) is not None and self.template_mmcif_dir is None:
                raise ConfigError(
                    f"data.{name} says something of templates, which need data.template_mmcif_dir as well"
                )
        if self.max_template_date is not None and parse_date(self.max_template_date) is None:
            raise ConfigError(
                f"data.max_template_date must be a date such as 2018-04-30, not {self.max_template_date!r}"
            )


@dataclass
class OptimConfig:
    """Group ``optim``: the optimizer, its schedule, and the average of the weights (supplement, section 1.11.3).

    Attributes:
        name: ``adam``; ``muon`` (the matrices of the blocks and of the structure module by Muon, everything else by
            Adam); or for batches of thousands ``lamb`` or ``lars``
            (see :mod:`fastfold.parallel.data_parallel.large_batch`).
        lr: Learning rate after warm-up.
        warmup_steps: Steps of linear warm-up.
        decay_after: Step after which the rate is multiplied once, or null.
        decay_factor: Factor by which it is multiplied.
        cosine_steps: Steps over which the rate falls along a cosine, or null.
        final_fraction: Share of the rate that the cosine ends at.
        beta1: Adam's first decay.
        beta2: Adam's second decay.
        eps: Adam's epsilon.
        weight_decay: Share of the weights that each step takes off, times the rate.
        muon_lr: Learning rate of Muon's matrices after warm-up; it follows the same schedule.
        momentum: Momentum of ``lars`` and ``muon``.
        trust: Trust coefficient of ``lars``: how far a layer may move in a step.
        clip: Largest gradient norm of one sample.
        batch_size: Samples of a step, over all processes.
        ema_decay: Decay of the exponential moving average of the weights.
    """

    name: str = bounded("adam", choices=("adam", "muon", "lamb", "lars"))
    lr: float = bounded(1e-3, above=0)
    warmup_steps: int = bounded(1000, least=0)
    decay_after: int | None = bounded(50_000, least=0)
    decay_factor: float = bounded(0.95, above=0)
    cosine_steps: int | None = bounded(None, least=1)
    final_fraction: float = share(0.0)
    beta1: float = bounded(0.9, least=0, below=1)
    beta2: float = bounded(0.999, least=0, below=1)
    eps: float = bounded(1e-6, above=0)
    weight_decay: float = share(0.0)
    muon_lr: float = bounded(5e-3, above=0)
    momentum: float = bounded(0.9, least=0, below=1)
    trust: float = bounded(1e-3, above=0)
    clip: float = bounded(0.1, above=0)
    batch_size: int = bounded(128, least=1)
    ema_decay: float = bounded(0.999, least=0, below=1)

    def __post_init__(self) -> None:
        check_bounds("optim", type(self), vars(self))


@dataclass
class TrainerConfig:
    """Group ``trainer``: the loop.

    Attributes:
        out: Folder of the run.
        seed: All randomness follows from it.
        steps: Optimisation steps in all.
        device: ``auto``, ``cpu`` or ``cuda``.
        precision: ``fp32``, or ``bf16`` for autocast with structure module, heads and losses in float32.
        matmul: ``highest`` (float32 products are float32), ``high`` or ``medium`` (they may be TF32 or bfloat16).
        compile: Compile the Evoformer's blocks with ``torch.compile``.
        resume: ``auto`` (newest whole checkpoint, if there is one), ``never``, or a checkpoint's folder or URL.
        accept_changes: Continue although seed, data or network are not those of the last start.
        checkpoint_every: Steps between checkpoints.
        checkpoint_dir: Folder or URL (``s3://bucket/run``, whatever fsspec knows) for the checkpoints of this run
            alone; null for ``checkpoints`` in ``out``.
        keep_last: Newest checkpoints to keep.
        keep_every: Checkpoints of steps that are multiples of this are kept as well, or null; a multiple of
            ``checkpoint_every``.
        validate_every: Steps between validations.
        validate_chains: Maximum number of chains to validate on.
        validate_recycles: Recycling iterations in validation.
        log_every: Steps between log entries.
        profile_steps: Steps of a start, from its third on, to profile into a trace for Chrome or Perfetto; 0 for none.
        max_bad_steps: Steps in a row without finite numbers after which the run stops.
    """

    out: str = "???"
    seed: int = bounded(0, least=0)
    steps: int = bounded(78_000, least=1)
    device: str = "auto"
    precision: str = bounded("fp32", choices=("fp32", "bf16"))
    matmul: str = bounded("highest", choices=("highest", "high", "medium"))
    compile: bool = False
    resume: str = "auto"
    accept_changes: bool = False
    checkpoint_every: int = bounded(500, least=1)
    checkpoint_dir: str | None = None
    keep_last: int = bounded(3, least=1)
    keep_every: int | None = bounded(None, least=1)
    validate_every: int = bounded(1000, least=1)
    validate_chains: int = bounded(100, least=1)
    validate_recycles: int = bounded(3, least=0)
    log_every: int = bounded(10, least=1)
    profile_steps: int = bounded(0, least=0)
    max_bad_steps: int = bounded(20, least=1)

    def __post_init__(self) -> None:
        check_bounds("trainer", type(self), vars(self))
        if self.keep_every is not None and self.keep_every % self.checkpoint_every:
            raise ConfigError(
                f"trainer.keep_every={self.keep_every} must be a multiple of "
                f"trainer.checkpoint_every={self.checkpoint_every}: there are no checkpoints in between"
            )


@dataclass
class MemoryConfig:
    """Group ``memory``: what is kept for the backward pass, and where parameters and states live.

    Attributes:
        checkpointing: Keep only the inputs of each block and recompute the rest (activation checkpointing). Under a
            policy: blocks may be recomputed, where the budget has no room for what they save.
        policy: Placement of parameters, gradients and optimizer states (``auto``, ``cuda``, ``cpu``, ``nvme``; see
            :class:`fastfold.memory.Gemini`), or null to leave all on the device.
        budget: With a policy: memory of the device that the run may take, such as ``20GiB``. On a CPU a device of this
            size is simulated: what would exceed it is an error.
        hard_budget: With a policy: on a GPU too what would exceed the budget is an error (see
            :class:`fastfold.memory.Gemini`); never tried on one.
        folder: With policy ``nvme``: folder for memory-mapped files, or null for the system's temporary folder.
    """

    checkpointing: bool = True
    policy: str | None = bounded(None, choices=("auto", "cuda", "cpu", "nvme"))
    budget: str = "16GiB"
    hard_budget: bool = False
    folder: str | None = None

    def __post_init__(self) -> None:
        check_bounds("memory", type(self), vars(self))


@dataclass
class LoggerConfig:
    """Group ``logger``: where numbers go in addition to the terminal.

    Attributes:
        jsonl: ``metrics.jsonl``.
        csv: ``metrics.csv``.
        tensorboard: TensorBoard event files.
        wandb: Weights & Biases (extra ``wandb``).
        mlflow: MLflow (extra ``mlflow``).
        project: Name of the project there; of the experiment in MLflow.
    """

    jsonl: bool = True
    csv: bool = True
    tensorboard: bool = True
    wandb: bool = False
    mlflow: bool = False
    project: str = "fastfold"


@dataclass
class FinetuneConfig:
    """Group ``finetune``: which parameters train.

    Attributes:
        freeze: Patterns of parameter names that stay as they are.
        lora_rank: Rank of adapters on attention and transition layers, which then train alone; 0 for none.
        lora_alpha: Their scale is ``alpha / rank``.
        from_weights: Whether a run without ``model.weights`` is refused, as it would begin with random ones.
    """

    freeze: list[str] = field(default_factory=list)
    lora_rank: int = bounded(0, least=0)
    lora_alpha: float = bounded(16.0, above=0)
    from_weights: bool = False

    def __post_init__(self) -> None:
        check_bounds("finetune", type(self), vars(self))


@dataclass
class TrainConfig:
    """The whole configuration of ``fastfold train``; the attributes are Hydra's groups."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
