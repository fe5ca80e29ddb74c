"""Run a network on the features of a target, and compute its confidences.

On a CPU, freed memory is kept for the next step of a fold, or returned to the system. The C library (glibc) keeps freed
blocks of up to 32 MiB, but returns them when they reach the end of its heap. Where memory is ample, the next step would
get the same pages again, each by a fault of its own; measurements are in ``benchmarks/results/choices.md``. Where it is
not, the next step allocates larger blocks in addition, so the heap is trimmed before the steps that need the most
memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastfold.evoformer.confidence import chain_confidence, plddt, predicted_aligned_error, predicted_tm_score
from fastfold.evoformer.confidence.scores import row_blocks
from fastfold.evoformer.execution import CallSettings, calling, dropout_generator, policies_of
from fastfold.evoformer.heads import DistogramHead
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication
from fastfold.inference.output.recycle_state import RecycleState
from fastfold.inference.planning.cuda_graph import KeptGraph
from fastfold.inference.planning.planner import FoldPlan, folding_policy
from fastfold.kernels.cpu.products import exact_products

OnCycle = Callable[[int, dict[str, Any]], None]
RunNetwork = Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]
"""Callable with the arguments and results of :func:`run_network`."""
Represent = Callable[..., tuple[dict[str, Tensor], int]]
"""Callable with the arguments and results of :func:`represent`."""


@dataclass(frozen=True)
class NetworkPasses:
    """Settings of one run of a network."""

    num_recycles: int  #: Passes after the first
    num_ensemble: int = 1  #: Feature samples per pass
    recycle_tolerance: float = 0.0  #: See :meth:`fastfold.evoformer.model.AlphaFold.forward`
    is_complex: bool = False  #: True to compute scores of interfaces
    pae: bool = True  #: True to keep the aligned errors of all pairs
    distogram: bool = False  #: Keep the probabilities of distances of all pairs
    representations: bool = False  #: Keep the representations, where they would be freed otherwise
    dropout_seed: int | None = None  #: Seed of dropout; None for no dropout
    cuda_graph: KeptGraph | None = None  #: CUDA graph from which passes are replayed; None for no graph

    @property
    def reads_distogram(self) -> bool:
        """True if scores or files need the distogram."""
        return self.is_complex or self.distogram


def run_network(
    model: AlphaFold,
    features: Callable[[int, int], Mapping[str, Tensor]],
    passes: NetworkPasses,
    on_cycle: OnCycle | None,
    *,
    plan: FoldPlan | None = None,
    state: RecycleState | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Run a network; return its result, and ``plddt [N]``, ``pae [N, N]``, ``max_pae``, ``ptm``, ``iptm``.

    A complex also has the scores of its chains, see :func:`fastfold.evoformer.confidence.scores.chain_confidence`.
    Arguments are those of :meth:`fastfold.evoformer.model.AlphaFold.forward`. Without a plan, the policy is that of a
    fold without a memory limit on the network's device.
    """
    with prepared_network(model, passes, plan, distogram=passes.reads_distogram):
        result = model(
            features,
            passes.num_recycles,
            num_ensemble=passes.num_ensemble,
            recycle_tolerance=passes.recycle_tolerance,
            on_cycle=on_cycle,
            state=state,
            run_pass=None if passes.cuda_graph is None else passes.cuda_graph.of(model),
        )
        if passes.representations:
            pair = model.whole_rows(result["representations"]["pair"])
            result["representations"] = {**result["representations"], "pair": pair}
        return network_results(result, passes)


def network_results(
    result: dict[str, Any], passes: NetworkPasses
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a network's result tree, and the scores that :func:`run_network` returns.

    The tree keeps the confidences, so that those of a draft are not computed again for the prediction.
    """
    if "confidences" not in result:
        result["confidences"] = _confidences(result, passes.is_complex, passes.pae)
    return result, result["confidences"] | (_distogram(result["distogram"]) if passes.distogram else {})


def represent(
    model: AlphaFold,
    features: Callable[[int, int], Mapping[str, Tensor]],
    passes: NetworkPasses,
    on_cycle: OnCycle | None = None,
    *,
    stop_after_block: int | None,
    plan: FoldPlan | None = None,
    state: RecycleState | None = None,
) -> tuple[dict[str, Tensor], int]:
    """Run a network for its representations, without heads; arguments as those of :func:`run_network`.

    ``passes.distogram`` adds the distogram head. ``stop_after_block`` is None to run the structure module.

    Returns:
        Representations ``single``, ``pair`` (whole also on shards), ``msa_first_row`` and, after the structure module,
        ``structure_module``, with ``distogram`` and ``distogram_edges`` if asked for; and the passes after the first.
    """
    with prepared_network(model, passes, plan, distogram=False, heads=False):
        result = model(
            features,
            passes.num_recycles,
            num_ensemble=passes.num_ensemble,
            recycle_tolerance=passes.recycle_tolerance,
            on_cycle=on_cycle,
            state=state,
            stop_after_block=stop_after_block,
        )
        representations: dict[str, Tensor] = dict(result["representations"])
        if passes.distogram:
            head = model.heads["distogram"](representations)
            representations |= _distogram({**head, "logits": model.whole_rows(head["logits"])})
        representations["pair"] = model.whole_rows(representations["pair"])
        return representations, int(result["num_recycles"])


@contextmanager
def prepared_network(
    model: AlphaFold, passes: NetworkPasses, plan: FoldPlan | None, *, distogram: bool, heads: bool = True
) -> Iterator[None]:
    """Call a network by a plan, or the default policy: exact products, dropout, distogram, and heads or none."""
    device, seed = next(model.parameters()).device, passes.dropout_seed
    policies = policies_of(model, folding_policy(device.type)) if plan is None else plan.policies(model)
    own, head = policies[model], model.heads["distogram"]
    is_kept = isinstance(head, DistogramHead) and (head.has_columns or passes.distogram)
    if not heads:
        policies[model] = replace(own, heads=())
    elif distogram and own.heads is not None and is_kept:
        # In blocks of rows; with sharded columns the logits are gathered whole, for files alone.
        policies[model] = replace(own, heads=(*own.heads, "distogram"))
    generator = None if seed is None else dropout_generator(device, seed)
    settings = CallSettings(policies, training=seed is not None, generator=generator)
    is_roomy = plan is not None and plan.is_roomy
    if is_roomy and device.type == "cpu":
        keep_freed_memory()
    with (
        torch.inference_mode(),
        exact_products(device),
        nullcontext() if is_roomy else trim_malloc(model),
        calling(settings),
    ):
        yield


def _distogram(head: dict[str, Any]) -> dict[str, Tensor]:
    """Return float16 probabilities ``distogram [N, N, bins]`` on the host, and ``distogram_edges [bins - 1]`` in Å."""
    blocks = [
        torch.softmax(part.float(), -1).to("cpu", torch.float16) for _, part in row_blocks(head["logits"])
    ]
    return {"distogram": torch.cat(blocks), "distogram_edges": head["bin_edges"]}


def _confidences(result: dict[str, Any], is_complex: bool, pae: bool) -> dict[str, Tensor]:
    confidences = {"plddt": plddt(result["predicted_lddt"]["logits"])}
    if (head := result.get("predicted_aligned_error")) is not None:
        logits, breaks = head["logits"], head["breaks"]
        if pae:
            confidences["pae"], confidences["max_pae"] = predicted_aligned_error(logits, breaks)
        confidences["ptm"] = predicted_tm_score(logits, breaks)
        if is_complex:
            confidences["iptm"] = predicted_tm_score(logits, breaks, asym_id=head["asym_id"])
            distances = result.get("distogram", {})
            of_pairs = {"distogram": distances.get("logits"), "bin_edges": distances.get("bin_edges")}
            confidences |= chain_confidence(logits, breaks, head["asym_id"], **of_pairs)
    return confidences


LARGEST_BLOCK = 32 << 20  #: Bytes of the largest block in the heap: glibc's own limit
KEPT = 2 * LARGEST_BLOCK
"""Bytes of free memory that the end of the heap keeps: the most that glibc chooses for such blocks."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's malloc.h


@functools.cache
def keep_freed_memory() -> None:
    """Let this process use freed memory again instead of returning it, with glibc."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        setting = ctypes.CDLL(None).mallopt
        setting(_TRIM_THRESHOLD, KEPT)
        setting(_MMAP_THRESHOLD, LARGEST_BLOCK)


@contextmanager
def trim_malloc(model: AlphaFold) -> Iterator[None]:
    """Trim the heap before each large step of a network inside, on a CPU with glibc."""
    trim, handles = heap_trim(), []
    if trim is not None and model.single_projection.weight.device.type == "cpu":

        def hook(*_: Any) -> None:
            trim(0)

        handles = [module.register_forward_pre_hook(hook) for module in _large_steps(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _large_steps(model: AlphaFold) -> list[nn.Module]:
    within = [m for m in model.modules() if isinstance(m, (OuterProductMean, TriangleMultiplication))]
    parts = (model.template_embedder, model.extra_msa_stack, model.evoformer, model.structure_module)
    return [*(part for part in parts if part is not None), *within]


@functools.cache
def heap_trim() -> Callable[[int], int] | None:
    """Return glibc's ``malloc_trim``; None for other C libraries."""
    with suppress(AttributeError, OSError, TypeError):  # TypeError on Windows
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        return trim
    return None
