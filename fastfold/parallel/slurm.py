"""Number of started processes, and the environment of torchrun for those of ``srun``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from fastfold.errors import ConfigError

_FIRST_PORT, _PORTS = 20_000, 20_000


def started_processes() -> int:
    """Return the number of processes that torchrun or srun started, see :func:`_adopt_srun`; 1 without them.

    Example:
        >>> from fastfold.parallel import started_processes
        >>> started_processes()  # 8 after `torchrun --nproc-per-node 8`
        1
    """
    _adopt_srun(os.environ)
    return int(os.environ.get("WORLD_SIZE", "1"))


def _adopt_srun(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from those of SLURM in a step of several tasks, unless torchrun has set them."""
    # A batch script outside of srun has the variables of its whole job, not of processes.
    if "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return
    try:
        variables = {
            "RANK": environment["SLURM_PROCID"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "MASTER_ADDR": _first_host(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(_port(environment)),
        }
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"srun started several tasks, but SLURM's variables do not tell which this one is ({error}); start one "
            "task on each node: srun --ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 "
            "--rdzv-backend c10d --rdzv-endpoint HOST:29500 -m fastfold train ..."
        ) from None
    for name, value in variables.items():
        environment.setdefault(name, value)


def _first_host(nodes: str) -> str:
    """Return the first host of a SLURM list: ``gpu003`` for ``gpu[003-006,010],login1``."""
    match = re.match(r"([^\s,\[\]]+)(?:\[(\d+)[^\]]*\]([^\s,\[\]]*))?(?:,|$)", nodes)
    if match is None:
        raise ValueError(f"expected a list of nodes, found {nodes!r}")
    name, number, rest = match.groups()
    return name + (number or "") + (rest or "")


def _port(environment: Mapping[str, str]) -> int:
    """Return a port that all tasks of a step compute alike, and other steps rarely."""
    job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
    return _FIRST_PORT + (31 * job + step) % _PORTS
