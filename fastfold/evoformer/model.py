"""AlphaFold: embedders, Evoformer, structure module and heads, run in recycling cycles (supplement Algorithm 2)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from ml_collections import ConfigDict
from torch import Tensor, nn

from fastfold.data.features.assembly import CHAIN_GAP
from fastfold.evoformer.confidence import plddt
from fastfold.evoformer.confidence.restraint_evidence import limit_probabilities
from fastfold.evoformer.config import descent_settings
from fastfold.evoformer.embedders.input import EXTRA_MSA_FEATURES, InputEmbedder, extra_msa_features
from fastfold.evoformer.embedders.multimer_templates import (
    MultimerTemplateEmbedder,
    MultimerTemplateTorsionEmbedder,
)
from fastfold.evoformer.embedders.templates import TemplateEmbedder, TemplateTorsionEmbedder
from fastfold.evoformer.evoformer import BlockStack, EvoformerBlock, EvoformerStack
from fastfold.evoformer.execution import PolicyModule, of_sample
from fastfold.evoformer.heads import (
    DistogramHead,
    ExperimentallyResolvedHead,
    MaskedMsaHead,
    PredictedAlignedErrorHead,
    PredictedLDDTHead,
)
from fastfold.evoformer.primitives import Linear
from fastfold.evoformer.structure.backbone_energy import bonds
from fastfold.evoformer.structure.distogram_descent import descend
from fastfold.evoformer.structure.restraint_springs import RESTRAINT_FEATURES, RestraintSprings
from fastfold.evoformer.structure.side_chains import place_rotamers
from fastfold.evoformer.structure.structure_module import StructureModule
from fastfold.protein import residue_constants as rc
from fastfold.utils.option_fields import check_kind

Features = dict[str, Tensor]
FeatureSource = Mapping[str, Tensor] | Callable[[int, int], Mapping[str, Tensor]]
"""Features stacked along a leading axis (cycles times ensemble members), or a function that creates the features of
one cycle and ensemble member on demand."""
OnCycle = Callable[[int, dict[str, Any]], None]
PassResult = tuple[Features, dict[str, Any]]  #: Representations and structure of a pass
RunPass = Callable[[Callable[[list[Features], Features], PassResult], list[Features], Features], PassResult]
"""Function that runs a pass. Its arguments are the pass function, the features of each ensemble member and the results
of the previous pass. The pass function removes features from their dicts."""


class KeptState(Protocol):
    """Store of the recycling state between passes, from which an interrupted fold resumes."""

    def load(self, device: torch.device) -> tuple[int, int, Features] | None:
        """Return the next pass, the last pass and the previous results; None for a new fold."""

    def save(self, cycle: int, limit: int, previous: Features) -> None:
        """Save the results that pass ``cycle`` starts from; ``limit`` is the number of the last pass."""


class AlphaFold(PolicyModule):
    """AlphaFold 2 network (supplement Algorithm 2), monomer or multimer by its configuration.

    - Lines 1 and 21: each cycle starts from the results of the previous one, the first from zeros.
    - Lines 5-6: the features and the previous cycle are embedded (Algorithms 3, 4 and 32).
    - Lines 7-8: torsion angles of templates become rows of the MSA.
    - Lines 9-13: templates update the pair (Algorithms 16 and 17).
    - Lines 14-15: the extra MSA updates the pair (Algorithm 18).
    - Line 16: the Evoformer updates MSA and pair, and projects the target's row (Algorithm 6).
    - Lines 17-19: representations are averaged over the ensemble.
    - Line 20: the structure module predicts atoms (Algorithm 20); the heads follow after the last cycle.

    The code is single-device code; precision, memory policy and parallel layout are applied from outside.
    With a policy that works in place (:mod:`fastfold.evoformer.execution`), one pair tensor serves from the first
    cycle to the heads. With ``lazy_logits``, logits of pairs are :class:`~fastfold.evoformer.execution.LazyRows`.

    Example:
        >>> import fastfold
        >>> network = fastfold.AlphaFold(fastfold.load_model("mini").config)
        >>> sum(parameter.numel() for parameter in network.parameters()) > 1_000_000
        True
    """

    operator = "embedding"

    def __init__(self, config: ConfigDict, *, name: str = "model") -> None:
        super().__init__()
        check_kind("config", config, ConfigDict, "the configuration of a network, as of model_config")
        self.config, self.name = config, name
        model = config.model
        c = model.embeddings_and_evoformer
        self.multimer = bool(model.global_config.multimer_mode)
        zero_init = bool(model.global_config.zero_init)
        c_m, c_z, c_s = c.msa_channel, c.pair_channel, c.seq_channel
        self.input_embedder = InputEmbedder(c, c_target=21 if self.multimer else 22, multimer=self.multimer)
        self.template_embedder: nn.Module | None = None
        self.template_torsion_embedder: nn.Module | None = None
        if c.template.enabled and self.multimer:
            self.template_embedder = MultimerTemplateEmbedder(c.template, c_z, zero_init=zero_init)
            self.template_torsion_embedder = MultimerTemplateTorsionEmbedder(c_m)
        elif c.template.enabled:
            self.template_embedder = TemplateEmbedder(c.template, c_z, zero_init=zero_init)
            if c.template.embed_torsion_angles:
                self.template_torsion_embedder = TemplateTorsionEmbedder(
                    c_m, placeholder_for_undefined=not zero_init
                )
        self.extra_msa_embedder: Linear | None = None
        if c.extra_msa_stack_num_block:
            self.extra_msa_embedder = Linear(25, c.extra_msa_channel)

        def stack(blocks: int, channels: int, *, global_column: bool) -> EvoformerStack:
            how = {"global_column": global_column, "zero_init": zero_init}
            return EvoformerStack([EvoformerBlock(c.evoformer, channels, c_z, **how) for _ in range(blocks)])

        self.extra_msa_stack = stack(c.extra_msa_stack_num_block, c.extra_msa_channel, global_column=True)
        self.evoformer = stack(c.evoformer_num_block, c_m, global_column=False)
        self.single_projection = Linear(c_m, c_s)
        heads = model.heads
        self.structure_module = StructureModule(
            heads.structure_module, c_s, c_z, multimer=self.multimer, zero_init=zero_init
        )
        c_out = heads.structure_module.num_channel
        masked_types = heads.masked_msa.get("num_output", 22)
        self.heads = nn.ModuleDict(
            {
                "distogram": DistogramHead(heads.distogram, c_z, zero_init=zero_init),
                "masked_msa": MaskedMsaHead(masked_types, c_m, zero_init=zero_init),
                "experimentally_resolved": ExperimentallyResolvedHead(c_s, zero_init=zero_init),
                "predicted_lddt": PredictedLDDTHead(heads.predicted_lddt, c_out, zero_init=zero_init),
            }
        )
        if heads.predicted_aligned_error.weight:
            self.heads["predicted_aligned_error"] = PredictedAlignedErrorHead(
                heads.predicted_aligned_error, c_z, zero_init=zero_init
            )

    def set_checkpointing(self, enabled: bool) -> None:
        """Turn activation checkpointing of every stack on or off: keep only block inputs for the backward pass."""
        for module in self.modules():
            if isinstance(module, BlockStack):
                module.checkpointing = enabled

    def forward(
        self,
        features: FeatureSource,
        num_recycles: int | None = None,
        *,
        num_ensemble: int = 1,
        recycle_tolerance: float | None = None,
        on_cycle: OnCycle | None = None,
        state: KeptState | None = None,
        run_pass: RunPass | None = None,
        stop_after_block: int | None = None,
    ) -> dict[str, Any]:
        """Predict a structure in recycling passes.

        Args:
            features: AlphaFold's features. Either a dict of tensors with a leading axis of size
                ``(num_recycles + 1) * num_ensemble``, cycle by cycle, or a function ``(cycle, member)`` that returns
                one cycle's dict. Batch axes may follow. The optional ``initial_positions [N, 37, 3]`` (Å) replace the
                structure of a cycle before the first (AF2 initial guess, Bennett et al., 2023). A descent on the
                distogram obeys the optional :data:`~fastfold.evoformer.structure.restraint_springs.RESTRAINT_FEATURES`.
            num_recycles: Extra passes after the first; by default the configuration's.
            num_ensemble: Feature samples whose representations are averaged in each cycle.
            recycle_tolerance: Recycling stops one pass after the mean change of CA distances is at most this, in Å.
                0 to run all passes; by default the configuration's.
            on_cycle: Called after each pass with its number and ``mean_plddt``, a number from 0 to 100, ``plddt [N]``,
                ``atom_positions [N, 37, 3]`` (Å) and ``atom_mask [N, 37]``. Before a descent on the distogram, the last
                pass also has ``result``, the result tree with the structure module's own structure.
            state: Store of the recycling state, to resume from and to save to after each pass; None for no store. The
                result equals that of an uninterrupted fold if the store also restores PyTorch's generators for
                dropout.
            run_pass: Runs each pass, from a CUDA graph for example; None to call the pass function.
            stop_after_block: End the last pass after this Evoformer block, counted from 1, without structure module and
                heads; None to run all.

        Returns:
            AlphaFold's result tree: a dict per head, ``structure_module``, ``representations`` and
            ``num_recycles``, the number of extra passes. Only the last pass records gradients. With
            ``stop_after_block``, only ``representations`` and ``num_recycles``.
        """
        limit = self.config.model.num_recycle if num_recycles is None else num_recycles
        tolerance = recycle_tolerance
        if tolerance is None:
            tolerance = self.config.model.get("recycle_early_stop_tolerance", 0.0)
        iterate = self.iterate if run_pass is None else partial(run_pass, self.iterate)
        previous: Features | None = None
        cycle = 0
        kept = None if state is None else state.load(self.single_projection.weight.device)
        if kept is not None:
            cycle, limit, previous = kept
        while True:
            last = cycle == limit
            members = [self._features(features, cycle, e, num_ensemble) for e in range(num_ensemble)]
            if previous is None:
                previous = self.first_previous(members[0])
            if last:
                break
            with torch.no_grad():
                representations, structure = iterate(members, previous)
                self.report_pass(on_cycle, cycle, representations, structure)
                updated = recycled(representations, structure)
                if tolerance > 0 and distance_change(previous, updated, members[0]["seq_mask"]) <= tolerance:
                    # The official loop runs one more pass after the tolerance is met.
                    limit = cycle + 1
                previous = updated
                del representations, structure, updated
            cycle += 1
            if state is not None:
                state.save(cycle, limit, previous)
        if stop_after_block is not None:
            representations = self._average(members, previous, stop_after_block)
            return {"representations": representations, "num_recycles": cycle}
        representations, structure = iterate(members, previous)
        return self.result_tree(representations, structure, members[0], cycle, on_cycle=on_cycle)

    def result_tree(
        self,
        representations: Features,
        structure: dict[str, Any],
        features: Features,
        cycle: int,
        *,
        on_cycle: OnCycle | None = None,
    ) -> dict[str, Any]:
        """Run the heads on the results of the last pass; return what :meth:`forward` returns."""
        result: dict[str, Any] = {
            name: head(representations) for name, head in self.heads.items() if self._wants(name)
        }
        if "asym_id" in features and "predicted_aligned_error" in result:
            result["predicted_aligned_error"]["asym_id"] = features["asym_id"]
        result |= {
            "structure_module": structure,
            "representations": representations,
            "num_recycles": cycle,
        }
        config = self._descent(features)
        self.report_pass(
            on_cycle, cycle, representations, structure, result=None if config is None else result
        )
        if config is None:
            return result
        moved = self._descended(structure, representations, result.get("distogram"), features, config)
        return result | {"structure_module": moved}

    def _descent(self, features: Features) -> ConfigDict | None:
        """Return the settings of the descent on the distogram; None without one.

        Structures that gradients are recorded for, and those of runs without heads, are the structure module's own.
        """
        if torch.is_grad_enabled() or self.policy.heads == ():
            return None
        return descent_settings(self.config, is_needed=RESTRAINT_FEATURES[0] in features)

    def _descended(
        self,
        structure: dict[str, Any],
        representations: Features,
        distogram: dict[str, Any] | None,
        features: Features,
        config: ConfigDict,
    ) -> dict[str, Any]:
        """Return the structure after the descent on the distogram."""
        head = self.heads["distogram"](representations) if distogram is None else distogram
        affines, aatype = structure["final_affines"], features["aatype"]
        phi_and_psi = structure["sidechains"]["angles_sin_cos"][-1][..., 1:3, :]
        predicted = torch.atan2(phi_and_psi[..., 0], phi_and_psi[..., 1])
        moved = torch.empty_like(affines)
        index, mask = features["residue_index"], features["seq_mask"]
        if "asym_id" in features:
            index = index + CHAIN_GAP * features["asym_id"]
        rows = {"first_row": self._own_rows(aatype.shape[-1]).start, "sum_over_ranks": self._sum_over_ranks}
        probabilities: list[Tensor] = []
        for sample in itertools.product(*map(range, aatype.shape[:-1])):
            logits, edges = of_sample(head["logits"], sample), head["bin_edges"]
            springs = RestraintSprings.from_features(features, sample)
            moved[sample] = descend(
                affines[sample],
                logits,
                edges,
                aatype=aatype[sample],
                residue_index=index[sample],
                seq_mask=mask[sample],
                predicted=predicted[sample],
                config=config,
                restraints=springs,
                **rows,
            )
            if springs is not None and springs.groups:
                pairs, present = springs.limited_pairs(), mask[sample] > 0
                probabilities.append(
                    limit_probabilities(
                        logits, edges, pairs, residue_index=index[sample], present=present, **rows
                    )
                )
        if probabilities:
            whole = torch.stack(probabilities).unflatten(0, aatype.shape[:-1] or (1,))
            structure = structure | {"restraint_probabilities": whole if aatype.dim() > 1 else whole[0]}
        structure = self.structure_module.moved(structure, moved, aatype, bonds(index, mask > 0))
        return structure | place_rotamers(structure, aatype, index, mask)

    def _sum_over_ranks(self, x: Tensor) -> Tensor:
        """Sum a tensor over the processes that hold other rows of the pair; one process holds all."""
        return x

    def _wants(self, head: str) -> bool:
        return self.policy.heads is None or head in self.policy.heads

    def _features(self, source: FeatureSource, cycle: int, member: int, num_ensemble: int) -> Features:
        device = self.single_projection.weight.device
        if callable(source):
            chosen = dict(source(cycle, member))
        else:
            chosen = {key: value[cycle * num_ensemble + member] for key, value in source.items()}
        return {key: torch.as_tensor(value).to(device) for key, value in chosen.items()}

    def first_previous(self, features: Features) -> Features:
        """Return zeros for the results of a previous cycle, except positions from ``initial_positions``."""
        c = self.config.model.embeddings_and_evoformer
        shape = tuple(features["aatype"].shape)
        own, like = self._own_rows(shape[-1]), self.single_projection.weight
        positions = features.get("initial_positions")
        if positions is None:
            positions = like.new_zeros(*shape, 37, 3)
        return {
            "prev_pos": positions.to(self.structure_module.initial.weight.dtype),
            "prev_msa_first_row": like.new_zeros(*shape, c.msa_channel),
            "prev_pair": like.new_zeros(*shape[:-1], own.stop - own.start, shape[-1], c.pair_channel),
        }

    def iterate(self, members: list[Features], previous: Features) -> PassResult:
        """Run one cycle: average representations over the ensemble, then predict the structure.

        Args:
            members: Features of each ensemble member; features are removed after their last use.
            previous: Results of the previous cycle (:func:`recycled`); the memory of the pair may be reused.
        """
        total = self._average(members, previous)
        structure = self.structure_module(
            total["single"], total["pair"], members[0]["aatype"], members[0]["seq_mask"]
        )
        total["structure_module"] = structure.pop("act")
        return total, structure

    def _average(
        self, members: list[Features], previous: Features, last_block: int | None = None
    ) -> Features:
        """Compute the representations of one cycle after an Evoformer block, averaged over the ensemble."""
        total: Features = {}
        inplace = self.policy.inplace and not torch.is_grad_enabled()
        for number, features in enumerate(members, 1):
            # The embedder overwrites the previous pair, which the next member needs.
            pair = previous["prev_pair"] if number == len(members) else previous["prev_pair"].clone()
            representations = self._represent(features, previous | {"prev_pair": pair}, last_block)
            del pair
            for key, value in representations.items():
                if key == "msa":
                    # The MSA is not averaged: the monomer program keeps the first sample, the multimer program the
                    # last.
                    if self.multimer or key not in total:
                        total[key] = value
                elif len(members) == 1:
                    total[key] = value
                else:
                    share = value.div_(len(members)) if inplace else value / len(members)
                    if key in total:
                        share = total[key].add_(share) if inplace else total[key] + share
                    total[key] = share
            del representations
        return total

    def _represent(self, features: Features, previous: Features, last_block: int | None = None) -> Features:
        """Compute the representations of one cycle and ensemble member (supplement Algorithm 2, lines 5-16).

        Features are removed from the dict after their last use. Steps that layouts override are methods.
        """
        msa, pair = self._embed_inputs(features, previous)
        sequences, dtype = msa.shape[-3], pair.dtype
        del features["msa_feat"]
        msa_mask, seq_mask = features["msa_mask"].to(dtype), features["seq_mask"].to(dtype)
        pair_mask = seq_mask[..., :, None] * seq_mask[..., None, :]
        if self.template_embedder is not None:  # lines 9-13
            first = self._own_rows(pair_mask.shape[-1]).start
            pair = self.template_embedder(pair, features, pair_mask, first)
        if self.extra_msa_embedder is not None:  # lines 14-15
            extra = self._embed_extra_msa(self.extra_msa_embedder, features)
            extra_mask = features.pop("extra_msa_mask").to(pair.dtype)
            pair = self.extra_msa_stack(extra, pair, extra_mask, pair_mask)[1]
            del extra, extra_mask
        if self.template_torsion_embedder is not None:  # lines 7-8
            rows, mask = self._template_rows(self.template_torsion_embedder, features)
            msa, msa_mask = torch.cat([msa, rows], -3), torch.cat([msa_mask, mask.to(dtype)], -2)
            del rows, mask
        for key in [key for key in features if key.startswith("template_")]:
            del features[key]
        msa, pair = self.evoformer(msa, pair, msa_mask, pair_mask, last_block)
        first_row = self._first_row(msa)
        parts = {"msa_first_row": first_row, "pair": pair, "single": self.single_projection(first_row)}
        return parts | {"msa": msa[..., :sequences, :, :]} if self._wants("masked_msa") else parts

    def _embed_inputs(self, features: Features, previous: Features) -> tuple[Tensor, Tensor]:
        """Return ``msa [*, S, N, c_m]`` and ``pair [*, N, N, c_z]`` of features and previous cycle (lines 5-6)."""
        msa, pair = self.input_embedder(features, previous)
        return msa, pair

    def _template_rows(self, embedder: nn.Module, features: Features) -> tuple[Tensor, Tensor]:
        """Return MSA rows ``[*, T, N, c_m]`` and their mask ``[*, T, N]``."""
        rows, mask = embedder(features)
        return rows, mask

    def _embed_extra_msa(self, embedder: Linear, features: Features) -> Tensor:
        """Return the embedded extra MSA ``[*, E, N, c_e]``."""
        extra_features = {key: features.pop(key) for key in EXTRA_MSA_FEATURES}

        def embed_rows(_: Tensor, index: slice) -> Tensor:
            part = {key: value[..., index, :] for key, value in extra_features.items()}
            return embedder(extra_msa_features(part).to(embedder.weight.dtype))

        extra = extra_features["extra_msa"].unsqueeze(-1)
        return self.policy.map(extra, embed_rows, dim=-3, channels=embedder.out_features)

    def _first_row(self, msa: Tensor) -> Tensor:
        """Copy the target's row ``[*, N, c_m]`` of the MSA, so that the MSA can be freed."""
        return msa[..., 0, :, :].clone()

    def _own_rows(self, residues: int) -> slice:
        """Return the pair's rows on this process: all, unless a parallel layout overrides this."""
        return slice(0, residues)

    def whole_rows(self, pair: Tensor) -> Tensor:
        """Return all rows ``[*, N, N, c]`` of a tensor of pairs, from those of this process."""
        return pair

    def report_pass(
        self,
        on_cycle: OnCycle | None,
        cycle: int,
        representations: Features,
        structure: dict[str, Any],
        *,
        result: dict[str, Any] | None = None,
    ) -> None:
        """Call ``on_cycle`` with the scores and the structure of a pass, and with ``result``; see :meth:`forward`."""
        if on_cycle is None:
            return
        with torch.no_grad():
            confidence = plddt(self.heads["predicted_lddt"](representations)["logits"])
            atoms = {key: structure[f"final_{key}"] for key in ("atom_positions", "atom_mask")}
            more = {} if result is None else {"result": result}
            on_cycle(cycle, {"mean_plddt": float(confidence.mean()), "plddt": confidence, **atoms, **more})


def recycled(representations: Features, structure: dict[str, Any]) -> Features:
    """Return the results of a pass that the next pass starts from."""
    return {
        "prev_pos": structure["final_atom_positions"],
        "prev_msa_first_row": representations["msa_first_row"],
        "prev_pair": representations["pair"],
    }


def distance_change(before: Features, after: Features, seq_mask: Tensor) -> Tensor:
    """Return the root mean square change of CA-CA distances between two cycles, a number in Å.

    Both ``prev_pos`` are ``[*, N, 37, 3]`` in Å; ``seq_mask [*, N]`` is 0 for padding.
    """
    ca = rc.atom_order["CA"]
    old, new = (x["prev_pos"][..., ca, :] for x in (before, after))
    mask = seq_mask.to(new.dtype)
    total = new.new_zeros(())
    for rows in range(0, new.shape[-2], 1024):
        part = slice(rows, rows + 1024)
        before_part, after_part = (
            torch.cdist(x[..., part, :], x, compute_mode="donot_use_mm_for_euclid_dist") for x in (old, new)
        )
        delta = before_part - after_part
        total += (delta.square() * mask[..., part, None] * mask[..., None, :]).sum()
    count = mask.sum(-1).square().sum()
    return (total / (count + 1e-10) + 1e-8).sqrt()
