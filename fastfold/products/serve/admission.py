"""Admission of jobs: a target that cannot be folded is refused when it is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastfold.data.targets import Target
from fastfold.data.templates.source import open_templates
from fastfold.errors import InputError
from fastfold.evoformer.precision import element_size
from fastfold.inference.folding.prediction import check_rings
from fastfold.inference.models import (
    Network,
    check_settings,
    check_takers,
    limit_networks,
    suitable,
)
from fastfold.inference.network_settings import apply_settings
from fastfold.inference.planning.fit import check_fit, plan_target
from fastfold.inference.planning.planner import Planner
from fastfold.inference.relax.config import check_installed
from fastfold.inference.request import InferRequest
from fastfold.inference.target_templates import takes_templates
from fastfold.products.serve.request import JobRequest


@dataclass(frozen=True)
class Admission:
    """Checks of a job before it is admitted, for folds on a type of device.

    ``memory`` are the bytes of a fold; None if unknown, and then the fold checks them. ``host_memory`` is for tensors
    offloaded from a GPU. The shipped network folds single chains only.
    """

    networks: Sequence[Network]
    request: InferRequest
    device: str = "cpu"
    memory: int | None = None
    host_memory: int = 0
    max_residues: int | None = None

    def check(self, request: JobRequest, target: Target, folder: Path) -> None:
        """Check settings, templates and memory of a job, or raise FastFoldError; its folder has the templates."""
        if self.max_residues is not None and target.num_residues > self.max_residues:
            raise InputError(
                f"{target.num_residues:,} residues; this server folds at most {self.max_residues:,}",
                record=target.record,
            )
        if not self.request.weights and target.is_complex:
            raise InputError(
                f"complex of {len(target.chains)} chains, but this server folds single chains only; submit the chains "
                "one by one, or ask its operator for networks of complexes",
                record=target.record,
            )
        config = request.config(self.request.config)
        options = request.options(self.request.options, folder)
        if config.relax != "none":
            check_installed()
        networks = suitable(limit_networks(self.networks, options.num_models), target)
        check_settings(config, [network.info.config for network in networks])
        is_joined = target.is_complex and not all(network.info.multimer for network in networks)
        check_rings(target, config.ring_names, is_joined=is_joined)
        shown = 0
        check_takers(options.templates, networks)
        if open_templates(options.templates) is not None:  # refuses invalid structures
            shown = options.templates.max_templates
        rows = sum(
            len(m.sequences) for pair in target.alignments or () for group in pair or () for m in group
        )
        if self.memory is None:
            return
        for network in networks:
            size = element_size(config.precision)
            planner = Planner(
                apply_settings(config, network.info.config),
                size,
                self.device,
                host_memory=self.host_memory,
                parameters=network.info.parameters * size,
                cuda_graph=bool(config.cuda_graphs),
                rows=rows,
                templates=shown if takes_templates(network.info.config, target) else 0,
            )
            length, name = target.num_residues, target.record
            check_fit(planner, length, config.budget, self.memory, name=name)
            if config.budget is not None:
                plan_target(planner, length, config.budget, name=name)
