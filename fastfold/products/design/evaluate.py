"""Loss of a designed sequence under networks, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfold.data.features.pipeline import featurize
from fastfold.errors import ConfigError, OutputError
from fastfold.evoformer.confidence.scores import plddt
from fastfold.evoformer.inputs import (
    RESIDUES,
    Relaxation,
    RelaxedSequence,
    decode_sequence,
    relax_sequence,
    sequence_features,
)
from fastfold.evoformer.losses.design import Outputs, seq_ent_loss
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.config import InferConfig
from fastfold.inference.folding.gradients import GradientRun, differentiable
from fastfold.inference.folding.prediction import add_settings, check_rings, input_order
from fastfold.inference.network_settings import apply_settings
from fastfold.inference.planning.gradient_plan import GradientPlan, gradient_run
from fastfold.inference.target_templates import takes_templates
from fastfold.kernels.cpu.products import exact_products
from fastfold.parallel.comm.groups import Group
from fastfold.products.design.config import RecycleMode
from fastfold.products.design.limits import Limits, count_residues, forbidden_letters, limit_weights
from fastfold.products.design.passes import PassState, RecordedPass, counted_passes
from fastfold.products.design.tasks.losses import check_losses, task_losses
from fastfold.products.design.tasks.task import DesignTask
from fastfold.protein import residue_constants as rc


@dataclass(frozen=True)
class Evaluation:
    """Losses of a sequence, means over the networks."""

    loss: float  #: Weighted sum of the losses
    losses: Mapping[str, float]  #: Losses by name, without weights
    #: ``[P, 20]`` of the loss with respect to the parameters, None if it was not asked for
    gradient: Tensor | None
    plddt: np.ndarray  #: ``[N]``, 0 to 100
    positions: np.ndarray  #: ``[N, 37, 3]`` in Å, of the first network
    logits: Tensor  #: Logits ``[P, 20]`` of the sequence


class Evaluator:
    """Losses of designs under several networks of one kind, on one device.

    Args:
        task: Residues to design, and losses.
        models: The networks.
        weights: Weight of each loss by its name; others are not computed.
        recycles: Extra passes.
        recycle_mode: Passes whose gradient counts.
        bias: Added to the logits, ``[20]``.
        limits: Limits of the designed chain, whose losses are ``composition`` and ``charge``.
        hard_profile: True if the MSA's profile has the most likely residues, whose gradient is an estimate. By default
            of multimer networks alone, as in ColabDesign.
        gradients: Plan of the passes; None for one without a memory limit.

    Raises:
        ConfigError: A loss is not defined for the task or a network, or selects no residues; or large rings of
            several chains need a multimer network.
    """

    def __init__(
        self,
        task: DesignTask,
        models: Sequence[AlphaFold],
        weights: Mapping[str, float],
        *,
        recycles: int = 0,
        recycle_mode: RecycleMode = "last",
        bias: Tensor | None = None,
        limits: Limits | None = None,
        hard_profile: bool | None = None,
        gradients: GradientRun | None = None,
    ) -> None:
        self.task, self.models, self.recycles, self.recycle_mode = task, list(models), recycles, recycle_mode
        self.weights = {name: weight for name, weight in weights.items() if weight}
        if not self.weights or not all(map(math.isfinite, self.weights.values())):
            raise ConfigError(
                f"{task.name}: expected losses with finite weights, not all 0, found {dict(weights)}"
            )
        self._hard_profile = models[0].multimer if hard_profile is None else hard_profile
        parameter = next(models[0].parameters())
        self.device, self.dtype = parameter.device, models[0].structure_module.initial.weight.dtype
        self._bias = None if bias is None else bias.to(self.device, self.dtype)
        self._losses = task_losses(task, self.device, self.dtype)
        self.limits = limits or Limits()
        known = {*self._losses, "seq_ent", *limit_weights(self.limits)}
        if unknown := sorted(set(weights) - known):
            raise ConfigError(f"{task.name} has no loss {unknown[0]!r}; it has {', '.join(sorted(known))}")
        check_losses(task, self.weights)
        reads_errors = bool(self.weights.keys() & {"pae", "i_pae", "i_ptm"})
        for model in models:
            if reads_errors and "predicted_aligned_error" not in model.heads:
                raise ConfigError(
                    f"{model.name} predicts no aligned error, which the losses pae, i_pae and i_ptm need; use a "
                    "network such as model_1_ptm"
                )
            is_joined = task.target.is_complex and not model.multimer
            check_rings(task.target, task.rings, is_joined=is_joined)
        self._gradients = gradients or design_gradients(task, None, self.device)
        self._features = [self._constant_features(model) for model in models]

    def __call__(
        self,
        parameters: Tensor,
        relaxation: Relaxation,
        *,
        networks: Sequence[int] | None = None,
        recycles: int | None = None,
        seed: int = 0,
        dropout: bool = False,
        gradient: bool = True,
    ) -> Evaluation:
        """Compute the losses of parameters ``[P, 20]``, and their gradient if it is asked for.

        The networks, by their numbers, see a mixture by the relaxation. Networks and recycles are by default those of
        the evaluator. Dropout is that of training, with a seed. An OutputError tells that a loss is not finite.
        """
        chosen = range(len(self.models)) if networks is None else networks
        recycles = self.recycles if recycles is None else recycles
        leaf = parameters.detach().to(self.device, self.dtype).requires_grad_(gradient)
        total: dict[str, float] = {}
        confidence: list[np.ndarray] = []
        positions: np.ndarray | None = None
        logits = leaf.detach()
        for network in chosen:
            for share, one in self._passes(network, leaf, relaxation, recycles, seed, dropout):
                outputs, relaxed = one.outputs, one.relaxed
                losses = self._named_losses(outputs, relaxed, relaxation, one.aatype)
                loss = torch.stack([self.weights[name] * value for name, value in losses.items()]).sum()
                if not bool(torch.isfinite(loss)):
                    raise OutputError(
                        f"{self.models[network].name}: the loss is not finite; try `precision=fp32`"
                    )
                if gradient and share:
                    (share * loss / len(chosen)).backward()
            for name, value in {"loss": loss, **losses}.items():
                total[name] = total.get(name, 0.0) + float(value.detach()) / len(chosen)
            confidence.append(plddt(outputs.lddt.detach()).cpu().numpy())
            if positions is None:
                positions = outputs.positions.detach().float().cpu().numpy()
            logits = relaxed.logits.detach()
        assert positions is not None
        return Evaluation(
            loss=total.pop("loss"),
            losses=total,
            gradient=None if leaf.grad is None else self._gradients.mean(leaf.grad),
            plddt=np.mean(confidence, 0),
            positions=positions,
            logits=logits.cpu(),
        )

    @property
    def allowed(self) -> np.ndarray:
        """Residue types that designs may have, ``[20]`` bool."""
        return np.ones(RESIDUES, bool) if self._bias is None else (self._bias > -1e5).cpu().numpy()

    def violation(self, parameters: Tensor) -> float:
        """Return how many residues and charges of the designed chain are outside its limits."""
        return float(self.limits.violation(count_residues(self.designed(parameters))))

    def designed(self, parameters: Tensor) -> str:
        """Return the most likely sequence of the designed chain, equal ones once."""
        letters = "".join(self.task.letters(decode_sequence(self.logits_of(parameters))))
        return "".join(letters[i] for i in self.task.designed_chain)

    def logits_of(self, parameters: Tensor) -> Tensor:
        """Return the logits ``[P, 20]`` of parameters, on the CPU."""
        bias = None if self._bias is None else self._bias.cpu()
        return relax_sequence(parameters.cpu(), Relaxation(), bias).logits

    def _named_losses(
        self, outputs: Outputs, relaxed: RelaxedSequence, relaxation: Relaxation, aatype: Tensor
    ) -> dict[str, Tensor]:
        named = {name: self._losses[name](outputs, aatype) for name in self.weights if name in self._losses}
        form = relaxed.hard if relaxation.hard else relaxed.soft
        limited = self.limits.losses(self.task.sequence(form)[torch.from_numpy(self.task.designed_chain)])
        named |= {name: loss for name, loss in limited.items() if name in self.weights}
        if "seq_ent" in self.weights:
            everyone = relaxed.logits.new_ones(len(relaxed.logits))
            named["seq_ent"] = seq_ent_loss(relaxed.logits, everyone, relaxation.temperature)
        return named

    def _passes(
        self, network: int, leaf: Tensor, relaxation: Relaxation, recycles: int, seed: int, dropout: bool
    ) -> Iterator[tuple[float, RecordedPass]]:
        """Yield the passes whose loss is asked for, with the share of its gradient."""

        def one_pass(number: int, state: PassState | None) -> AbstractContextManager[RecordedPass]:
            return self._pass(network, leaf, relaxation, number, seed + number, dropout, state)

        return counted_passes(
            self.recycle_mode, one_pass, recycles, seed=seed, is_recorded=leaf.requires_grad
        )

    @contextmanager
    def _pass(
        self,
        network: int,
        leaf: Tensor,
        relaxation: Relaxation,
        number: int,
        seed: int,
        dropout: bool,
        state: PassState | None,
    ) -> Iterator[RecordedPass]:
        """Compute pass ``number``, from the one before if its state is given; record it while the context is open."""
        model = self.models[network]
        relaxed = relax_sequence(leaf, relaxation, self._bias)
        features, aatype, order = self._features_of(network, relaxed)
        recording = differentiable(model, len(aatype), seed, dropout, self._gradients)
        with recording, exact_products(self.device):
            result = model(lambda *_: features, number, recycle_tolerance=0.0, state=state)
            yield RecordedPass(result, Outputs.from_result(result, order), relaxed, aatype)

    def _features_of(
        self, network: int, relaxed: RelaxedSequence
    ) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
        """Return features with the sequence, residue types in the order of the task, and the order of the features."""
        constant, order = self._features[network]
        sequence = self.task.sequence(relaxed.pseudo)
        profile = self.task.sequence(relaxed.hard) if self._hard_profile else sequence
        aatype = sequence.detach().argmax(-1)
        if order is not None:
            back = torch.argsort(order)
            sequence, profile = sequence[back], profile[back]
        multimer, blocks = self.models[network].multimer, self.task.copy_blocks
        if blocks is not None:
            blocks = None if multimer else blocks.to(sequence.device)
            blocks = blocks if blocks is None or order is None else blocks[:, back]
        dynamic = sequence_features(sequence, multimer=multimer, profile=profile, blocks=blocks)
        return constant | dynamic, aatype, order

    def _constant_features(self, model: AlphaFold) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return features that do not depend on the sequence, and the order of their residues if it differs."""
        task = self.task
        alignments: list[Any] = [([], []) for _ in task.target.chains]
        joined = task.target.is_complex and not model.multimer
        templates = task.joined_template_features if joined else task.template_features
        if templates is not None and not takes_templates(model.config, task.target, are_whole=joined):
            raise ConfigError(
                f"{model.name} takes no templates, which hold the given chains; use `weights=multimer`, or `flexible` "
                "free to design without their structure"
            )
        config = apply_settings(InferConfig(), model.config)
        frames = len(task.template_indices)
        if joined and frames > (places := config.data.eval.max_templates):
            raise ConfigError(
                f"{model.name} takes {places} templates, and the chains need {frames}, one for each copy of a "
                "framework and one for the target; use `weights=multimer`, or fewer `copies`"
            )
        sampler = featurize(task.target.chains, alignments, config, templates=templates, join=joined)
        add_settings(sampler, task.target, cyclic=task.rings, guess=None)
        features: dict[str, Tensor] = {}
        for key, sampled in sampler.sample(0, 0).items():
            value = torch.as_tensor(np.asarray(sampled))
            # Without further sequences, the extra MSA is one row that is masked out.
            if value.is_floating_point() and not key.startswith("extra_"):
                value = value.to(self.dtype)
            features[key] = value.to(self.device)
        order = torch.from_numpy(input_order(sampler))
        is_plain = bool((order == torch.arange(len(order))).all())
        return features, None if is_plain else order.to(self.device)


def uniform_bias(forbidden: str) -> Tensor | None:
    """Return a bias ``[20]`` that forbids residues, None for none; errors of :func:`forbidden_letters`."""
    letters = forbidden_letters(forbidden)
    bias = torch.zeros(RESIDUES)
    bias[[rc.restype_order[letter] for letter in letters]] = -1e6
    return bias if letters else None


def design_gradients(
    task: DesignTask, plan: GradientPlan | None, device: torch.device, group: Group | None = None
) -> GradientRun:
    """Return the passes of a design by a plan, or by its length alone without one.

    ``group`` are the ranks that share the target; None for one.
    """
    return gradient_run(plan, len(task.source), device, group, task.template_indices)
