"""The configuration of a training run: Hydra's groups with their types and ranges.

The YAML files in ``fastfold/configs`` hold the values; the classes here say which keys there are, what they mean and
what they may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastfold.errors import ConfigError
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
        directory: Folder of structures and alignments.
        layout: ``folder`` (structure files, ``msas/``, optional ``index.tsv``) or ``openfold`` (``mmcifs/``,
            ``alignments/``, ``chain_data_cache.json``).
        train_split: Split to train on, where the folder has splits.
        valid_split: Split to validate on, or null.
        distillation: A second folder of the same layout with predicted structures, or null.
        distillation_probability: Share of samples taken from it.
        distillation_min_plddt: Residues of it under this pLDDT are masked.
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
    layout: str = "folder"
    train_split: str = "train"
    valid_split: str | None = "valid"
    distillation: str | None = None
    distillation_probability: float = 0.75
    distillation_min_plddt: float = 50.0
    cache: str | None = None
    crop_size: int = 256
    spatial_crop_probability: float = 0.5
    max_chains: int = 20
    min_length: int = 1
    max_length: int | None = None
    max_resolution: float = 9.0
    unknown_resolution: float | None = None
    max_single_residue: float = 0.8
    min_resolved: float = 0.0
    max_release_date: str | None = None
    oversample: dict[str, float] = field(default_factory=dict)
    depth_weights: dict[int, float] = field(default_factory=dict)
    coevolution_dropout: float = 0.0
    coevolution_subsets: int = 0
    single_sequence_probability: float = 0.0
    block_deletion: bool = True
    unclamped_probability: float = 0.1
    max_recycles: int = 3
    workers: int = 4
    prefetch: int = 16
    order: str = "ready"

    def __post_init__(self) -> None:
        _one_of("data.layout", self.layout, ("folder", "openfold"))
        _one_of("data.order", self.order, ("draw", "ready"))
        for name in ("crop_size", "max_chains", "min_length", "prefetch"):
            _at_least(f"data.{name}", getattr(self, name), 1)
        for name in ("workers", "max_recycles", "coevolution_subsets"):
            _at_least(f"data.{name}", getattr(self, name), 0)
        for name in (
            "spatial_crop_probability",
            "distillation_probability",
            "single_sequence_probability",
            "coevolution_dropout",
            "unclamped_probability",
            "max_single_residue",
            "min_resolved",
        ):
            _between(f"data.{name}", getattr(self, name), 0.0, 1.0)


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

    name: str = "adam"
    lr: float = 1e-3
    warmup_steps: int = 1000
    decay_after: int | None = 50_000
    decay_factor: float = 0.95
    cosine_steps: int | None = None
    final_fraction: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.0
    muon_lr: float = 5e-3
    momentum: float = 0.9
    trust: float = 1e-3
    clip: float = 0.1
    batch_size: int = 128
    ema_decay: float = 0.999

    def __post_init__(self) -> None:
        _one_of("optim.name", self.name, ("adam", "muon", "lamb", "lars"))
        _at_least("optim.batch_size", self.batch_size, 1)
        _at_least("optim.warmup_steps", self.warmup_steps, 0)
        for name in ("lr", "muon_lr", "clip", "eps", "trust"):
            _positive(f"optim.{name}", getattr(self, name))
        for name in ("beta1", "beta2", "ema_decay", "final_fraction", "momentum", "weight_decay"):
            _between(f"optim.{name}", getattr(self, name), 0.0, 1.0)


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
        resume: ``auto`` (newest valid checkpoint of ``out``, if there is one), ``never``, or a checkpoint's folder.
        checkpoint_every: Steps between checkpoints.
        keep_checkpoints: Newest checkpoints to keep.
        validate_every: Steps between validations.
        validate_chains: Maximum number of chains to validate on.
        validate_recycles: Recycling iterations in validation.
        log_every: Steps between log entries.
        max_bad_steps: Steps in a row without finite numbers after which the run stops.
    """

    out: str = "???"
    seed: int = 0
    steps: int = 78_000
    device: str = "auto"
    precision: str = "fp32"
    matmul: str = "highest"
    compile: bool = False
    resume: str = "auto"
    checkpoint_every: int = 500
    keep_checkpoints: int = 3
    validate_every: int = 1000
    validate_chains: int = 100
    validate_recycles: int = 3
    log_every: int = 10
    max_bad_steps: int = 20

    def __post_init__(self) -> None:
        _one_of("trainer.precision", self.precision, ("fp32", "bf16"))
        _one_of("trainer.matmul", self.matmul, ("highest", "high", "medium"))
        for name in (
            "steps",
            "checkpoint_every",
            "keep_checkpoints",
            "validate_every",
            "validate_chains",
            "log_every",
            "max_bad_steps",
        ):
            _at_least(f"trainer.{name}", getattr(self, name), 1)
        for name in ("seed", "validate_recycles"):
            _at_least(f"trainer.{name}", getattr(self, name), 0)


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
        folder: With policy ``nvme``: folder for memory-mapped files, or null for the system's temporary folder.
    """

    checkpointing: bool = True
    policy: str | None = None
    budget: str = "16GiB"
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.policy is not None:
            _one_of("memory.policy", self.policy, ("auto", "cuda", "cpu", "nvme"))


@dataclass
class LoggerConfig:
    """Group ``logger``: where numbers go in addition to the terminal.

    Attributes:
        jsonl: ``metrics.jsonl``.
        csv: ``metrics.csv``.
        tensorboard: TensorBoard event files.
    """

    jsonl: bool = True
    csv: bool = True
    tensorboard: bool = True


@dataclass
class FinetuneConfig:
    """Group ``finetune``: which parameters train.

    Attributes:
        freeze: Patterns of parameter names that stay as they are.
        lora_rank: Rank of adapters on attention and transition layers, which then train alone; 0 for none.
        lora_alpha: Their scale is ``alpha / rank``.
    """

    freeze: list[str] = field(default_factory=list)
    lora_rank: int = 0
    lora_alpha: float = 16.0

    def __post_init__(self) -> None:
        _at_least("finetune.lora_rank", self.lora_rank, 0)


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


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} must be above 0, got {value}")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must lie between {low:g} and {high:g}, got {value}")
