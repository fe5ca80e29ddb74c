""":class:`TargetPredictor` folds one target by several networks, for the command line and for Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from fastfold.data.features.pipeline import featurize
from fastfold.data.msa.find import ChainMsas
from fastfold.data.targets import Target
from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.config import descent_settings
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.config import InferConfig
from fastfold.inference.embedding.compute import Embedding, compute_embedding
from fastfold.inference.error_messages import is_out_of_memory
from fastfold.inference.folding.compare import compare_with_given
from fastfold.inference.folding.kept_networks import KeptNetworks
from fastfold.inference.folding.network import OnCycle, Represent, RunNetwork, represent, run_network
from fastfold.inference.folding.prediction import (
    TargetFold,
    add_settings,
    check_rings,
    initial_structure,
    ring_chains,
)
from fastfold.inference.network_settings import apply_settings
from fastfold.inference.output.prediction import Prediction
from fastfold.inference.output.recycle_state import RecycleState
from fastfold.inference.planning.cuda_graph import KeptGraph, check_cuda_graphs, uses_cuda_graphs
from fastfold.inference.planning.fit import Fit, FoldMemory, fit_target
from fastfold.inference.planning.planner import parameter_bytes
from fastfold.inference.sampling.samples import Sample
from fastfold.inference.target_templates import TargetTemplates, takes_templates
from fastfold.utils.device import own_settings

if TYPE_CHECKING:
    from fastfold.inference.distributed import DistributedFolder
    from fastfold.inference.planning.gradient_plan import GradientPlan
    from fastfold.inference.restraints.report import RestraintReport
    from fastfold.inference.restraints.restraint import Restraint


class TargetPredictor:
    """Predictor of one target, for the command line and for Python.

    The constructor plans the fold by each network, so a target that does not fit is refused before any work, as are
    settings that contradict a network or the device. :meth:`predict` uses smaller blocks if memory runs out anyway,
    which ``say`` tells. Each network, in the precision to fold in, is moved to the device while it folds. With
    ``kept``, which earlier targets share, all networks stay there if they and a fold take at most half of the memory.
    ``templates`` are for the networks that use them, ``distributed`` runs the networks on several processes, and
    ``graph`` is that of earlier targets.
    """

    def __init__(
        self,
        target: Target,
        models: Sequence[AlphaFold],
        alignments: Sequence[ChainMsas],
        config: InferConfig,
        *,
        device: torch.device,
        templates: TargetTemplates | None = None,
        say: Callable[[str], None],
        distributed: DistributedFolder | None = None,
        graph: KeptGraph | None = None,
        kept: KeptNetworks | None = None,
    ) -> None:
        check_cuda_graphs(bool(config.cuda_graphs), device)
        graph = graph or KeptGraph(is_required=bool(config.cuda_graphs))
        graph.keep_for(target.num_residues)
        self.target, self.alignments, self.config, self.templates = target, alignments, config, templates
        self.device, self.say, self._distributed, self._kept = device, say, distributed, kept
        self._run: RunNetwork = run_network
        self._represent: Represent = represent
        if distributed is not None:
            self._run, self._represent = (partial(distributed.run, one) for one in (run_network, represent))
        self._check_templates(models)
        # Settings name chains and residues of the input, outputs those of the initial guess.
        self.target, self._guess, self._rings = _with_guess(target, config)
        if config.embed is not None and config.embed.file_format == "bioemu" and target.is_complex:
            raise ConfigError(f"{target.name}: BioEmu samples single chains, and this target is a complex")
        is_joined = target.is_complex and not all(model.multimer for model in models)
        check_rings(self.target, self._rings, is_joined=is_joined)
        self._restraints, self._of_templates = _restraints_of(target, config, say)
        self._configs = {id(model): apply_settings(config, model.config) for model in models}
        passes = len(config.seeds) * sum(1 + self.num_recycles(model) for model in models)
        is_graphed = not self._of_templates and uses_cuda_graphs(config, device, target.num_residues, passes)
        try:
            self._fits = self._fit_all(models, is_graphed)
        except InputError:
            if not is_graphed or config.cuda_graphs:
                raise
            is_graphed = False
            self._fits = self._fit_all(models, is_graphed)
        self._graph = graph if is_graphed else None
        # Other devices share the host's memory.
        self._all_stay = kept is not None and (device.type != "cuda" or self._make_room(models, kept))
        self._gradients: dict[int, GradientPlan | None] = {}
        if self._restraints or self._of_templates:
            from fastfold.inference.restraints.fit import plan_restraints

            is_limited = config.budget is not None
            self._gradients = {
                id(model): plan_restraints(self.fit(model), is_limited=is_limited)
                for model in models
                if descent_settings(self._configs[id(model)]) is None
            }

    @property
    def _shown(self) -> int:
        return 0 if self.templates is None else self.templates.number

    def _check_templates(self, models: Sequence[AlphaFold]) -> None:
        target = self.target
        if not self._shown or target.has_forced_templates or any(self._shows(model) for model in models):
            return
        raise ConfigError(
            f"{target.name}: templates are given, but {', '.join(model.name for model in models)} does not use "
            f"any{' for a complex' * target.is_complex}; leave them out, or fold with model_1, model_2 (single "
            "chains) or a multimer network"
        )

    def _fit_all(self, models: Sequence[AlphaFold], is_graphed: bool) -> dict[int, Fit]:
        """Plan the fold by each network, or raise InputError if it does not fit."""
        config, residues, distributed = self.config, self.target.num_residues, self._distributed
        available = partial(FoldMemory.here, self.device) if distributed is None else distributed.memory
        # A replayed graph cannot offload to the host.
        memory = available(host_memory=0 if is_graphed else config.host_bytes, offload_dir=config.offload_dir)

        def memory_for(model: AlphaFold) -> FoldMemory:
            if self._kept is None or self.device.type != "cuda":
                return memory
            # The other networks leave the device if their memory is needed.
            return replace(memory, free=memory.free + self._kept.bytes_besides(model))

        return {
            id(model): fit_target(
                *(model, self.device, residues, config.budget),
                config=self._configs[id(model)],
                name=self.target.name,
                rows=sum(len(msa.sequences) for chain in self.alignments for group in chain for msa in group),
                templates=self._shown,
                memory=memory_for(model),
                offload_dir=config.offload_dir,
                ranks=1 if distributed is None else distributed.ranks,
                cuda_graph=is_graphed,
            )
            for model in models
        }

    def _make_room(self, models: Sequence[AlphaFold], kept: KeptNetworks) -> bool:
        """Return True if all networks can stay on the device, and leave their memory out of the others' budgets."""
        total = kept.bytes_besides(*models) + sum(map(parameter_bytes, models))
        others = {id(model): total - parameter_bytes(model) for model in models}
        if any(2 * (fit.plan.peak + others[key]) > fit.budget for key, fit in self._fits.items()):
            return False
        self._fits = {key: replace(fit, budget=fit.budget - others[key]) for key, fit in self._fits.items()}
        return True

    def _shows(self, model: AlphaFold) -> bool:
        are_whole = self.templates is not None and self.templates.is_in_one_frame
        return takes_templates(model.config, self.target, are_whole=are_whole)

    def num_recycles(self, model: AlphaFold) -> int:
        """Return the largest number of recycles of a network."""
        return int(self._configs[id(model)].model.num_recycle)

    def predict(
        self,
        model: AlphaFold,
        seed: int,
        on_cycle: OnCycle | None = None,
        *,
        state: RecycleState | None = None,
        sample: Sample | None = None,
    ) -> Prediction:
        """Fold by one of the networks with a seed.

        ``on_cycle`` is that of :meth:`fastfold.evoformer.model.AlphaFold.forward`. ``state`` saves the state after each
        pass. Without a sample, the network sees the target's own alignments. Errors are those of
        :func:`fastfold.predict`.
        """
        with self.moved(model):
            one = self.target_fold(model, seed, on_cycle, sample=sample)
            if self._restraints or self._of_templates:
                prediction = self._restrained(model, one, state)
            else:
                prediction = self._fold(model, one, self._run, state)
        templates, structure = self._templates_for(model), self.target.scored_structure
        return replace(
            prediction,
            seed=seed,
            sample=None if sample is None else sample.record,
            templates=None if templates is None else templates.report or None,
            given_structure=None if structure is None else compare_with_given(prediction, structure),
        )

    def embed(
        self,
        model: AlphaFold,
        seed: int,
        on_cycle: OnCycle | None = None,
        *,
        state: RecycleState | None = None,
        sample: Sample | None = None,
    ) -> Embedding:
        """Compute the representations that ``config.embed`` selects; arguments and errors as of :meth:`predict`."""
        with self.moved(model):
            one = self.target_fold(model, seed, on_cycle, sample=sample)
            by = partial(compute_embedding, one, run=self._represent, state=state)
            embedding = self.fit(model).run(by, self.say)
        return replace(embedding, seed=seed, sample=None if sample is None else sample.record)

    def reason_alone(self, model: AlphaFold) -> str:
        """Return why the target cannot share a pass of a network with other targets; empty if it can."""
        if self._distributed is not None:
            return "parallel folds targets one by one"
        for name in ("cuda_graphs", "dropout", "restraints", "initial_guess", "sample", "embed"):
            if getattr(self.config, name) not in (None, False):
                return f"{name} folds targets one by one"
        if self.target.scored_structure is not None:
            return "given structures are scored one by one"
        if self._of_templates or self._templates_for(model) is not None:
            return "targets with templates are folded one by one"
        return "its fold runs in blocks" if self.fit(model).plan.blocks else ""

    def target_fold(
        self, model: AlphaFold, seed: int, on_cycle: OnCycle | None = None, *, sample: Sample | None = None
    ) -> TargetFold:
        """Return the fold of a network's features; arguments and errors as in :meth:`predict`."""
        draw_seed = seed if sample is None else sample.draw_seed
        templates = self._templates_for(model)
        sampler = featurize(
            self.target.chains,
            self.alignments if sample is None else sample.drawn,
            self._configs[id(model)],
            seed=draw_seed,
            templates=None if templates is None else templates.features,
            join=self.target.is_complex and not model.multimer,
        )
        add_settings(sampler, self.target, cyclic=self._rings, guess=self._guess)
        return TargetFold(model, sampler, self.target, self.config, draw_seed, on_cycle, self._graph)

    def fit(self, model: AlphaFold) -> Fit:
        """Return the plan of the target's fold by one of the networks."""
        return self._fits[id(model)]

    @contextmanager
    def moved(self, model: AlphaFold) -> Iterator[None]:
        """Move a network to the device of the fold; without kept networks, it moves back afterwards."""
        kept = self._kept or KeptNetworks()
        with own_settings(self.device):
            if not self._all_stay:
                kept.send_home(but=model)
            kept.bring(model, self.device)
            try:
                yield
            finally:
                if self._kept is None:
                    kept.send_home()

    def _fold(
        self, model: AlphaFold, one: TargetFold, run: RunNetwork, state: RecycleState | None = None
    ) -> Prediction:
        return self.fit(model).run(partial(one.run, run=run, state=state), self.say)

    def _restrained(self, model: AlphaFold, one: TargetFold, state: RecycleState | None) -> Prediction:
        """Fold under the restraints, or raise InputError if the memory was not enough for gradients."""
        from fastfold.inference.restraints.fit import fit_restraints
        from fastfold.inference.restraints.springs import fold_with_springs

        leave_one_out = self.config.restraint_leave_one_out
        if descent_settings(self._configs[id(model)]) is not None:
            prediction, report = fold_with_springs(
                one,
                self._restraints,
                lambda trial, run: self._fold(model, trial, run, state if trial is one else None),
                self._run,
                leave_one_out=leave_one_out,
            )
            return self._with_report(prediction, report)
        try:
            restrained = fit_restraints(
                model,
                one.sampler,
                self._restraints,
                steps=self.config.restraint_steps,
                of_templates=self._of_templates,
                leave_one_out=leave_one_out,
                plan=self._gradients[id(model)],
                distributed=self._distributed,
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise InputError(
                f"the memory was not enough for a gradient of {self.target.num_residues:,} residues; use `max_msa`, "
                "`precision=bf16`, or a device with more memory",
                record=self.target.name,
            ) from error
        one.sampler = restrained.sampler
        prediction = self._fold(model, one, self._run, state)
        report = restrained.report(prediction.atom_positions, prediction.mean_plddt)
        return self._with_report(prediction, report)

    def _with_report(self, prediction: Prediction, report: RestraintReport) -> Prediction:
        """Add the report of restraints and the deviations from forced templates to a prediction."""
        from fastfold.inference.restraints.templates import forced_template_report

        return replace(
            prediction,
            restraints=report.to_json() if self._restraints else None,
            forced_templates=tuple(forced_template_report(self.target, prediction.atom_positions)),
        )

    def _templates_for(self, model: AlphaFold) -> TargetTemplates | None:
        return self.templates if self._shows(model) else None


def _with_guess(target: Target, config: InferConfig) -> tuple[Target, np.ndarray | None, bool | str]:
    """Return the target named as its initial guess, the guess, and the rings by the names of that target."""
    guess, rings = config.initial_guess, config.ring_names
    if target.scored_structure is not None and target.scored_structure.use == "initial_guess":
        guess = target.scored_structure.path
    if guess is None:
        return target, None, rings
    structure, named = initial_structure(guess, target)
    if isinstance(rings, str):
        rings = ",".join(named.chains[number].id for number in sorted(ring_chains(target, rings)))
    return named, structure, rings


def _restraints_of(
    target: Target, config: InferConfig, say: Callable[[str], None]
) -> tuple[Sequence[Restraint], Sequence[Restraint]]:
    """Return the restraints of the settings, and those of forced templates; gradients are slow to import."""
    restraints: Sequence[Restraint] = ()
    of_templates: Sequence[Restraint] = ()
    if config.restraints is not None:
        from fastfold.inference.restraints.file import read_restraints

        restraints = read_restraints(config.restraints, target, say=say)
    if target.has_forced_templates:
        from fastfold.inference.restraints.templates import template_restraints

        _check_forced(target, config)
        of_templates = template_restraints(target)
    return restraints, of_templates


def _check_forced(target: Target, config: InferConfig) -> None:
    """Refuse settings under which a target's templates cannot be forced, or raise InputError."""
    wrong = {
        "fastfold embed": config.embed is not None,
        "`cuda_graphs`": bool(config.cuda_graphs),
        f"`precision={config.precision}`": config.precision in ("int8", "bf16-products"),
    }
    if names := [name for name, is_set in wrong.items() if is_set]:
        raise InputError(
            f"its input forces a template, which {names[0]} cannot; remove 'force' from the input, or fold in fp32",
            record=target.name,
        )
