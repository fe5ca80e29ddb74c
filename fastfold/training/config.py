"""Configuration of a training run: Hydra's groups with types and ranges.

The YAML files in ``fastfold/configs`` hold the values. The classes here define the keys, their meaning and bounds.
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
        preset: Official name of the configuration to start from.
        overrides: Changes of the official tree, with its nesting.
        name: Name of the trained network.
        weights: Initial weights (any format that ``fastfold infer`` reads), or null.
    """

    preset: str = "model_1_ptm"
    overrides: dict[str, Any] = field(default_factory=dict)
    name: str = "model"
    weights: str | None = None


@dataclass
class DataConfig:
    """Group ``data``: training data and samples.

    Attributes:
        directory: Folder of structures and alignments, or a packed set (``fastfold data build``).
        layout: ``folder`` (structure files, ``msas/``, optional ``index.tsv``) or ``openfold`` (``mmcifs/``,
            ``alignments/``, ``chain_data_cache.json``).
        alignments: Folder of alignments, or the index (JSON) of an alignment database; null for the layout's
            folder.
        duplicates: Layout ``openfold``: table of chains that share alignments, or null for
            ``duplicate_pdb_chains.txt`` of the folder.
        train_split: Split to train on, if the folder has splits.
        valid_split: Split to validate on, or null.
        distillation: A second folder of the same layout with predicted structures, or null.
        distillation_alignments: As ``alignments``, for that folder.
        distillation_probability: Share of samples from the distillation folder.
        distillation_min_plddt: Residues of predicted structures under this pLDDT are masked.
        distillation_max_rows: Rows to draw evenly from deeper alignments of predicted structures, or null for all
            rows.
        template_mmcif_dir: Folder of the PDB's mmCIF files, from which template hits next to the alignments are read;
            or null for no templates.
        obsolete_pdbs: The PDB's list of obsolete entries, or null for ``obsolete.dat`` in that folder or next to it.
        template_release_dates: Lines ``1abc:2001-02-03`` or OpenFold's ``mmcif_cache.json``, or null to read dates
            from the mmCIF files.
        max_template_date: ``YYYY-MM-DD``, the newest date of templates, in addition to the chain's own date. Null for
            any.
        index: Folder for the results of scanning the data, so that large sets are scanned once; or null.
        cache: Folder for parsed structures and alignments, or null.
        crop_size: Residues of a training sample.
        spatial_crop_probability: Multimer networks: share of the complexes that are cropped around a residue at an
            interface; the others are cropped chain by chain.
        max_chains: Multimer networks: maximum number of chains of a complex; larger ones are cut to neighbouring
            chains.
        min_length: Shorter chains are left out; for a multimer network complexes with fewer residues in all chains.
        max_length: Longer chains (or complexes) are left out; null for no limit.
        max_resolution: Resolution in Å; chains of worse structures are left out.
        unknown_resolution: Resolution in Å of structures that state none, or null to keep the confidence heads from
            learning from such structures.
        max_single_residue: Chains in which one residue type has a larger share are left out.
        min_resolved: Chains with a smaller share of resolved CA atoms are left out.
        max_release_date: ``YYYY-MM-DD``; later structures are left out, or null.
        oversample: Factors of the sampling weight by chain name.
        depth_weights: Factors of the sampling weight by the minimum number of alignment rows.
        coevolution_dropout: Networks with coevolution: share of samples with an alignment whose couplings are left
            out.
        coevolution_subsets: Networks with coevolution: number of random subsets of each alignment's rows from which
            couplings are computed.
        single_sequence_probability: Share of samples whose alignment is left out.
        block_deletion: Delete blocks of alignment rows.
        unclamped_probability: Share of samples with unclamped backbone FAPE.
        max_recycles: Recycling iterations are drawn evenly from 0 to this, the same for a whole step.
        workers: Processes that prepare samples; 0 prepares them in the training process.
        prefetch: Samples prepared ahead of the network.
        order: ``draw`` uses samples in the order of draws, ``ready`` as they become ready.
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
                raise ConfigError(f"data.{name} needs templates; set data.template_mmcif_dir too")
        if self.max_template_date is not None and parse_date(self.max_template_date) is None:
            raise ConfigError(
                f"data.max_template_date must be a date such as 2018-04-30, not {self.max_template_date!r}"
            )


@dataclass
class OptimConfig:
    """Group ``optim``: optimizer, learning rate schedule and average of the weights (supplement, section 1.11.3).

    Attributes:
        name: ``adam``; ``muon`` (the matrices of the blocks and of the structure module by Muon, everything else by
            Adam); or for batches of thousands ``lamb`` or ``lars``
            (see :mod:`fastfold.parallel.data_parallel.large_batch`).
        lr: Learning rate after warm-up.
        warmup_steps: Steps of linear warm-up.
        decay_after: Step after which the rate is multiplied once by ``decay_factor``, or null.
        decay_factor: See ``decay_after``.
        cosine_steps: Steps over which the rate falls along a cosine, or null.
        final_fraction: Share of the rate at the end of the cosine.
        beta1: Adam's first decay.
        beta2: Adam's second decay.
        eps: Adam's epsilon.
        weight_decay: Share of the weights that each step subtracts, times the rate.
        muon_lr: Learning rate of Muon's matrices after warm-up, with the same schedule.
        momentum: Momentum of ``lars`` and ``muon``.
        trust: Trust coefficient of ``lars``: size of a layer's step relative to its weights.
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
    """Group ``trainer``: the training loop.

    Attributes:
        out: Folder of the run.
        seed: Seed of all random numbers.
        steps: Total number of optimisation steps.
        device: ``auto``, ``cpu`` or ``cuda``.
        precision: ``fp32``, or ``bf16`` for autocast with structure module, heads and losses in float32.
        matmul: ``highest`` (float32 products are float32), ``high`` or ``medium`` (they may be TF32 or bfloat16).
        compile: Compile the Evoformer's blocks with ``torch.compile``.
        resume: ``auto`` (newest complete checkpoint, if any), ``never``, or a checkpoint's folder or URL.
        accept_changes: Continue although seed, data or network differ from the last start.
        checkpoint_every: Steps between checkpoints.
        checkpoint_dir: Folder or URL (``s3://bucket/run``, or any fsspec protocol) for the checkpoints of this run
            only; null for ``checkpoints`` in ``out``.
        keep_last: Newest checkpoints to keep.
        keep_every: Also keep checkpoints of steps that are multiples of this, or null; must be a multiple of
            ``checkpoint_every``.
        validate_every: Steps between validations.
        validate_chains: Maximum number of chains to validate on.
        validate_recycles: Recycling iterations in validation.
        log_every: Steps between log entries.
        profile_steps: Number of steps after the second one of each start to profile for Chrome or Perfetto; 0 for
            none.
        aligned_error_after: Steps after which the predicted aligned error counts in the loss; its head keeps its
            initial weights until then (supplement, section 1.9.7: the head is trained at the end).
        max_bad_steps: Number of consecutive steps without finite numbers after which the run stops.
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
    aligned_error_after: int = bounded(0, least=0)
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
    """Group ``memory``: activations for the backward pass, and placement of parameters and states.

    Attributes:
        checkpointing: Keep only the inputs of each block and recompute the rest (activation checkpointing). With a
            policy: allow recomputation of blocks whose activations exceed the budget.
        policy: Placement of parameters, gradients and optimizer states (``auto``, ``cuda``, ``cpu``, ``nvme``; see
            :class:`fastfold.memory.Gemini`), or null to keep all on the device.
        budget: With a policy: limit of device memory, such as ``20GiB``. On a CPU a device of this size is simulated,
            and exceeding the limit is an error.
        hard_budget: With a policy: exceeding the budget is an error on a GPU too (see
            :class:`fastfold.memory.Gemini`); untested on GPUs.
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
    """Group ``logger``: loggers in addition to the terminal.

    Attributes:
        jsonl: Write ``metrics.jsonl``.
        csv: Write ``metrics.csv``.
        tensorboard: Write TensorBoard event files.
        wandb: Log to Weights & Biases (extra ``wandb``).
        mlflow: Log to MLflow (extra ``mlflow``).
        project: Name of the project in Weights & Biases, and of the experiment in MLflow.
    """

    jsonl: bool = True
    csv: bool = True
    tensorboard: bool = True
    wandb: bool = False
    mlflow: bool = False
    project: str = "fastfold"


@dataclass
class FinetuneConfig:
    """Group ``finetune``: choice of the trained parameters.

    Attributes:
        freeze: Patterns of names of parameters that are not trained.
        lora_rank: Rank of adapters on attention and transition layers; if set, only adapters are trained. 0 for none.
        lora_alpha: Adapters are scaled by ``lora_alpha / lora_rank``.
        from_weights: Whether a run without ``model.weights`` is refused, because it would begin with random weights.
    """

    freeze: list[str] = field(default_factory=list)
    lora_rank: int = bounded(0, least=0)
    lora_alpha: float = bounded(16.0, above=0)
    from_weights: bool = False

    def __post_init__(self) -> None:
        check_bounds("finetune", type(self), vars(self))


@dataclass
class TrainConfig:
    """Whole configuration of ``fastfold train``; the attributes are Hydra's groups."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
