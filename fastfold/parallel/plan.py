"""A plan: the axes of parallelism, their numbers of ranks, and its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fastfold.errors import ConfigError

TP_MODES = ("1d", "2d", "2.5d", "3d")
DAP_MODES = ("axial", "grid")

# Names of the mesh dimensions of tp and dap. A dimension is named after the group that varies along it: "tp_column" is
# the group along a column of the grid.
_DAP_DIMENSIONS = {"axial": ("dap",), "grid": ("dap_column", "dap_row")}
_TP_DIMENSIONS = {
    "1d": ("tp",),
    "2d": ("tp_depth", "tp_column", "tp_row"),
    "2.5d": ("tp_depth", "tp_column", "tp_row"),
    "3d": ("tp_x", "tp_y", "tp_z"),
}


@dataclass(frozen=True)
class ParallelPlan:
    """Sizes of the axes over which ranks are laid out; their product is the number of ranks.

    Raises:
        ConfigError: A size is impossible; the message shows the arithmetic.

    Example:
        >>> from fastfold import ParallelPlan
        >>> plan = ParallelPlan(dp=8, zero=1, tp=4)
        >>> print(plan, "=", plan.ranks, "ranks")
        dp 8 x tp 4 = 32 ranks
        >>> plan.check_ranks(started=8)
        Traceback (most recent call last):
            ...
        fastfold.errors.ConfigError: dp 8 x tp 4 = 32 ranks, but 8 were started
    """

    dp: int = 1  #: Data parallel replicas
    #: ZeRO stage 0 to 3; sharded over the replicas are nothing, optimizer states, gradients, parameters
    zero: int = 0
    pp: int = 1  #: Pipeline stages
    tp: int = 1  #: Ranks of one tensor parallel group
    tp_mode: str = "1d"  #: ``1d`` (Megatron), ``2d`` (SUMMA), ``2.5d`` (SUMMA with depth) or ``3d`` (cube)
    tp_depth: int = 1  #: Depth of ``2.5d``; the group is ``depth`` square grids
    sp: int = 1  #: Ranks over which the sequence is sharded
    dap: int = 1  #: Ranks of one group that shares a protein
    #: ``axial`` (dynamic axial parallelism: one axis of MSA and pair is sharded) or ``grid`` (the pair tensor is cut
    #: into blocks over a grid of ranks)
    dap_mode: str = "axial"
    dap_rows: int = 0  #: Rows of that grid; 0 for a square one
    #: Number of neighbouring replicas over which stage 3 shards; 0 for all. Several such groups hold the same shards
    #: and sum their gradients (HSDP): ``dp`` is ``dp_replicate`` times ``dp_shard``.
    dp_shard: int = 0
    across_machines: bool = False  #: True if groups of ``tp`` and ``dap`` may have ranks on several machines

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "tp", "tp_depth", "sp", "dap"):
            self._check_count(name, 1, "a number of ranks, at least 1")
        if isinstance(self.zero, bool) or self.zero not in (0, 1, 2, 3):
            raise ConfigError(f"parallel.zero: expected stage 0, 1, 2 or 3, found {self.zero!r}")
        for name, known in (("tp_mode", TP_MODES), ("dap_mode", DAP_MODES)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"parallel.{name}: expected one of {', '.join(known)}, found {getattr(self, name)!r}"
                )
        if self.tp_depth > 1 and self.tp_mode != "2.5d":
            raise ConfigError(f"tp_depth={self.tp_depth} needs tp=2.5d, found tp={self.tp_mode}")
        self._check_count("dap_rows", 0, "a number of rows, 0 for a square")
        if self.dap_rows and self.dap_mode != "grid":
            raise ConfigError(f"dap_rows={self.dap_rows} needs dap=grid, found dap={self.dap_mode}")
        self._check_shards()
        # Their properties refuse impossible sizes.
        _ = self.tp_grid, self.dap_grid

    def _check_count(self, name: str, least: int, expected: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"parallel.{name}: expected {expected}, found {value!r}")

    def _check_shards(self) -> None:
        self._check_count("dp_shard", 0, "a number of ranks, 0 for all")
        if not self.dp_shard:
            return
        if self.dp_shard == 1:
            raise ConfigError("dp_shard=1 shards nothing: use zero=0, 1 or 2, or a larger dp_shard")
        if self.dp % self.dp_shard:
            raise ConfigError(f"dp_shard={self.dp_shard} does not divide dp={self.dp}")
        if self.zero != 3 or self.replicas != self.dp:
            raise ConfigError(
                f"dp_shard={self.dp_shard} needs zero=3 without sp and dap: stages 1 and 2 shard over all ranks"
            )

    @property
    def dp_sizes(self) -> dict[str, int]:
        """Dimensions of data parallelism: ``dp``, or ``dp_replicate`` and ``dp_shard``."""
        if not self.dp_shard:
            return {"dp": self.dp}
        return {"dp_replicate": self.dp // self.dp_shard, "dp_shard": self.dp_shard}

    def crosses_machines(self, per_machine: int) -> bool:
        """Return True if a group of ``tp`` or ``dap`` has ranks on several machines."""
        together = self.tp * self.dap
        return together > 1 and self.ranks > per_machine and per_machine % together != 0

    @property
    def of_sample(self) -> ParallelPlan:
        """Plan of the ranks of one sample in one pipeline stage."""
        return replace(self, dp=1, pp=1, zero=0, dp_shard=0, across_machines=False)

    @property
    def dap_grid(self) -> tuple[int, ...]:
        """Shape of the group that shares a protein: ``(dap,)``, or ``(rows, columns)`` of the grid."""
        if self.dap_mode == "axial":
            return (self.dap,)
        if not self.dap_rows:
            side = math.isqrt(self.dap)
            if side * side != self.dap:
                raise ConfigError(
                    f"dap=grid: expected a square number of ranks, found {self.dap}; set dap_rows for a rectangle"
                )
            return (side, side)
        columns, rest = divmod(self.dap, self.dap_rows)
        if rest:
            raise ConfigError(
                f"dap=grid of {self.dap_rows} rows: expected a multiple of {self.dap_rows} ranks, found {self.dap}"
            )
        return (self.dap_rows, columns)

    @property
    def tp_grid(self) -> tuple[int, ...]:
        """Shape of the tensor parallel group: ``(tp,)``, ``(depth, rows, columns)`` or ``(x, y, z)``."""
        if self.tp_mode == "1d":
            return (self.tp,)
        if self.tp_mode == "3d":
            side = round(self.tp ** (1 / 3))
            if side**3 != self.tp:
                raise ConfigError(f"tp=3d: expected a cubic number of ranks, found {self.tp}")
            return (side, side, side)
        square, rest = divmod(self.tp, self.tp_depth)
        side = math.isqrt(square)
        if rest or side * side != square:
            if self.tp_mode == "2d":
                raise ConfigError(f"tp=2d: expected a square number of ranks, found {self.tp}")
            raise ConfigError(
                f"tp=2.5d of depth {self.tp_depth}: expected {self.tp_depth} x a square number of ranks, found "
                f"{self.tp}"
            )
        return (self.tp_depth, side, side)

    @property
    def ranks(self) -> int:
        """Number of ranks that the plan needs."""
        return self.pp * self.dp * self.sp * self.dap * self.tp

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same parameters."""
        return self.dp * self.sp * self.dap

    @property
    def axes(self) -> dict[str, int]:
        """Mesh dimensions with their sizes; neighbouring ranks differ in the last one."""
        names = ("pp", *self.dp_sizes, "sp", *_DAP_DIMENSIONS[self.dap_mode], *_TP_DIMENSIONS[self.tp_mode])
        sizes = (self.pp, *self.dp_sizes.values(), self.sp, *self.dap_grid, *self.tp_grid)
        return dict(zip(names, sizes, strict=True))

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Groups of ranks with the mesh dimensions that each spans (see :class:`fastfold.parallel.ParallelMesh`)."""
        dimensions: dict[str, tuple[str, ...]] = {name: (name,) for name in self.axes}
        dimensions["replicas"] = (*self.dp_sizes, "sp", *_DAP_DIMENSIONS[self.dap_mode])
        dimensions.setdefault("dp", tuple(self.dp_sizes))
        dimensions.setdefault("dap", _DAP_DIMENSIONS[self.dap_mode])
        dimensions.setdefault("tp", _TP_DIMENSIONS[self.tp_mode])
        return dimensions

    def __str__(self) -> str:
        parts = [f"{name} {getattr(self, name)}" for name in ("dp", "pp", "sp") if getattr(self, name) > 1]
        if self.dp_shard and self.dp > 1:
            parts[0] += f" (replicate {self.dp // self.dp_shard} x shard {self.dp_shard})"
        if self.dap > 1:
            shape = "" if self.dap_mode == "axial" else f" (grid {' x '.join(map(str, self.dap_grid))})"
            parts.append(f"dap {self.dap}{shape}")
        if self.tp > 1:
            parts.append(f"tp {self.tp}" + ("" if self.tp_mode == "1d" else f" ({self.tp_mode})"))
        return " x ".join(parts) or "dp 1"

    def check_ranks(self, started: int) -> None:
        """Refuse another number of ranks than the plan's.

        Raises:
            ConfigError: The numbers differ; the message has the arithmetic, as in
                ``dp 2 x tp 3 = 6 ranks, but 8 were started``.
        """
        if started != self.ranks:
            verb = "was" if started == 1 else "were"
            raise ConfigError(f"{self} = {self.ranks} ranks, but {started} {verb} started")

    def check_machines(self, per_machine: int) -> None:
        """Refuse groups across machines that send much at every layer, unless ``across_machines`` allows them.

        ``per_machine`` is the number of ranks started on a machine; 0 if unknown, which is not checked.

        Raises:
            ConfigError: A group of ``tp`` or ``dap`` has ranks on several machines.
        """
        if per_machine and self.crosses_machines(per_machine) and not self.across_machines:
            raise ConfigError(
                f"{self}: groups of tp and dap have {self.tp * self.dap} ranks, which {per_machine} ranks a machine "
                f"split between machines; take a divisor of {per_machine}, or set across_machines=true to send every "
                "layer's messages over the network"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ParallelPlan:
        """Create a plan from a configuration of the attributes' names; missing keys have their defaults.

        ``tp`` may be a mapping ``{size, mode, depth}``, ``dap`` a mapping ``{size, mode, rows}``, ``zero`` a mapping
        ``{stage}``. ``dp_replicate`` and ``dp_shard`` together set ``dp`` and stage 3.

        Raises:
            ConfigError: A key is unknown, or the plan is impossible.
        """
        values = _joined_shards(values)
        flat: dict[str, Any] = {}
        known = [field.name for field in fields(cls)]
        nested = {
            "tp": {"size": "tp", "mode": "tp_mode", "depth": "tp_depth"},
            "dap": {"size": "dap", "mode": "dap_mode", "rows": "dap_rows"},
            "zero": {"stage": "zero"},
        }
        for key, value in values.items():
            inner = value.items() if isinstance(value, Mapping) else [(None, value)]
            for part, number in inner:
                name = key if part is None else nested.get(key, {}).get(part)
                if name not in known:
                    shown = key if part is None else f"{key}.{part}"
                    raise ConfigError(f"parallel.{shown} is unknown; known are {', '.join(known)}")
                if name in flat:
                    raise ConfigError(f"parallel.{name} is given twice: {flat[name]!r} and {number!r}")
                flat[name] = number
        return cls(**flat)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name, for :meth:`from_dict`."""
        return asdict(self)


def _joined_shards(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace ``dp_replicate`` by ``dp`` and stage 3."""
    if "dp_replicate" not in values:
        return values
    rest = {key: value for key, value in values.items() if key != "dp_replicate"}
    sizes = values["dp_replicate"], rest.get("dp_shard")
    if "dp" in rest or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(
            "parallel.dp_replicate and parallel.dp_shard: expected two numbers of ranks, and no parallel.dp"
        )
    return {"zero": 3} | rest | {"dp": sizes[0] * rest["dp_shard"]}
