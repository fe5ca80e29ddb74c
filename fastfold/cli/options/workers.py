"""Options of commands that fold with several workers, and their conversion."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastfold.inference.screen.options import ScreenOptions

_NAMES = ("workers", "cpus_per_worker", "ray", "shard", "time_limit", "memory_limit")


def add_worker_group(parser: Any, *, shard: bool = True) -> None:
    """Add the options of workers, and of the shard of a list unless ``shard`` is False."""
    workers = parser.add_argument_group("workers")
    workers.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that fold (default: one per GPU; without GPUs one, or one per machine of the cluster)",
    )
    workers.add_argument(
        "--cpus-per-worker",
        type=int,
        metavar="N",
        help="CPUs of each worker (default: equal parts of all)",
    )
    workers.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="use a Ray cluster: HOST:PORT, auto for the one of this machine, local to start one for this run",
    )
    if shard:
        workers.add_argument(
            "--shard", metavar="I/N", help="fold the I-th of N parts of about equal work, for job arrays"
        )
    else:
        parser.set_defaults(shard=None)
    workers.add_argument(
        "--time-limit", metavar="TIME", help="give a target up after this time: 90s, 15m, 2h (default: none)"
    )
    workers.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="give a target up when its process holds more of the host's memory: 16GiB (default: none)",
    )


def has_workers(options: argparse.Namespace) -> bool:
    """Return True if an option of :func:`add_worker_group` was given."""
    return any(getattr(options, name) is not None for name in _NAMES)


def worker_options(options: argparse.Namespace) -> ScreenOptions:
    """Return workers and limits, from the options of :func:`add_worker_group`.

    Raises:
        ConfigError: An option is invalid; names it.
    """
    from fastfold.inference.screen.options import ScreenOptions
    from fastfold.inference.screen.shard import parse_shard
    from fastfold.utils.units import parse_bytes, parse_duration

    return ScreenOptions(
        workers=options.workers,
        ray=options.ray,
        cpus_per_worker=options.cpus_per_worker,
        time_limit=None if options.time_limit is None else parse_duration(options.time_limit),
        memory_limit=None if options.memory_limit is None else parse_bytes(options.memory_limit),
        shard=None if options.shard is None else parse_shard(options.shard),
    )
