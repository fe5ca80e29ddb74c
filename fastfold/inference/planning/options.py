"""Options of ``fastfold plan``: a model, its inputs, GPUs, and the memory of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from fastfold.utils.option_fields import LARGEST, check_options, option

Device = Literal["auto", "cpu", "cuda"]
PlanPrecision = Literal["bf16", "fp32"]
_COUNT = (1, LARGEST)

_folding = partial(option, group="folding")
_size = partial(_folding, default=None, metavar="SIZE")
_training = partial(option, group="training")


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan, for a training step, a fold or a design.

    Raises:
        ConfigError: An option has the wrong type or an invalid value; names it.
    """

    model: str = option(default="model_1", metavar="NAME", help="official name (default model_1)")
    residues: int = option(default=256, bounds=_COUNT, help="residues (default 256)")
    msa: int = option(default=128, bounds=_COUNT, help="rows of the MSA (default 128)")
    extra_msa: int = option(default=1024, bounds=(0, LARGEST), help="rows of the extra MSA (default 1024)")
    gpus: int | None = _training(default=None, bounds=_COUNT, help="number of GPUs")
    gpu: str | None = _training(
        default=None, metavar="NAME", help="kind of GPU: a100, a100-40gb, h100, h200, b200"
    )
    global_batch: int = _training(default=128, bounds=_COUNT, help="crops of a step (default 128)")
    precision: PlanPrecision = _training(default="bf16", choices=get_args(PlanPrecision), help="default bf16")
    recycles: int | None = _training(
        default=None, bounds=(0, LARGEST), help="maximum recycling iterations (default 3; of a design 0)"
    )
    count: int = _training(default=5, bounds=_COUNT, help="plans to print (default 5)")
    measured: Path | None = _training(
        default=None,
        parse=Path,
        metavar="FILE",
        help="JSON of measured rates, to use in place of the data sheet's",
    )
    cuda_graphs: bool = _training(
        default=False,
        help="count one launch for each block's kernels, as if they were captured in CUDA graphs",
    )
    fold: bool = _folding(
        default=False,
        help="plan a fold, not a training step (so do --memory-budget, --host-memory, --disk and --templates)",
    )
    design: bool = _folding(
        default=False, help="plan the gradients of a design; takes the options of a fold but for --disk"
    )
    memory_budget: str | None = _size(help="memory that a fold or a design may take, 24GiB for example")
    device: Device = _folding(
        default="auto", choices=get_args(Device), help="default: a GPU where there is one"
    )
    host_memory: str | None = _size(
        help="memory of each machine for tensors offloaded from its GPUs (default: most of the free memory here; with "
        "--gpu none)",
    )
    disk: str | None = _size(help="disk of each machine for tensors beyond --host-memory (default: none)")
    templates: int | None = _folding(
        default=None, bounds=(0, LARGEST), help="templates (default: as many as the model takes)"
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def num_recycles(self) -> int:
        """Recycling iterations of a training step or a fold."""
        return 3 if self.recycles is None else self.recycles
