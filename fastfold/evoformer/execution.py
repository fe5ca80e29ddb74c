"""Execution of the network's layers: in place or not, whole or in blocks, on the device or offloaded.

A layer computes its residual branch for any :class:`Block` of rows. An :class:`ExecutionPolicy` chooses the blocks and
the memory of the results, so that layers read like the paper.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fastfold.errors import ConfigError
from fastfold.kernels.ops.triangle_multiplication.passes import ContractionPlan
from fastfold.memory.offload import HostBuffers, OffloadedRows

Result = TypeVar("Result")


@dataclass(frozen=True)
class ExecutionPolicy:
    """Execution of one module.

    While gradients are recorded, only ``block_elements``, ``recompute``, ``keep_projections``, ``templates``,
    ``lazy_logits`` and ``heads`` have an effect.

    Example:
        >>> import fastfold
        >>> from fastfold.evoformer import ExecutionPolicy
        >>> from fastfold.evoformer.execution import set_policy
        >>> model = fastfold.load_model("mini", device="cpu")
        >>> set_policy(model, ExecutionPolicy(block_elements=2**16, inplace=True))
    """

    #: Maximum number of elements of a block of the input (but at least one row); None for a single block, which the
    #: operators cut further
    block_elements: int | None = None
    #: Write results into their input. The caller's tensors change: only for callers that own them.
    inplace: bool = False
    #: Block size of triangle multiplications, and the memory that holds their product
    contraction: ContractionPlan = field(default_factory=ContractionPlan)
    #: Indices of the templates that a monomer network reads, for callers that know them; None to read the template
    #: mask, which makes the host wait for a GPU, or for all while gradients are recorded
    templates: tuple[int, ...] | None = None
    #: Keep every embedded template of a monomer network between its two uses, rather than embed it twice
    hold_templates: bool = True
    #: Host memory for the pair while templates are embedded; None to leave the pair on the device
    offload: HostBuffers | None = None
    #: With ``offload``: share of the pair's rows that stay on the device, from 0 to 1
    offload_kept: float = 0.0
    #: Where ranks share a protein: number of channel blocks in which a shard changes its axis
    reshard_blocks: int = 4
    #: Return the logits of pairs as :class:`LazyRows`, computed on demand; while gradients are recorded, only with
    #: ``recompute``
    lazy_logits: bool = False
    #: Names of the heads to run; None for all. Representations that these heads do not need are freed early.
    heads: tuple[str, ...] | None = None
    #: While gradients are recorded, keep only the inputs of each block for the backward pass
    recompute: bool = False
    #: While gradients are recorded, keep projections of attention and triangles, and the intermediate of transitions,
    #: for the backward pass on a CPU: less time, more memory
    keep_projections: bool = False
    #: Compute attention of all rows of a block at once on a GPU: more memory, fewer launches
    attention_at_once: bool = False

    def slices(self, x: Tensor, dim: int, channels: int = 1) -> Iterator[slice]:
        """Yield slices that cover axis ``dim`` of any tensor ``x`` in order, for its blocks.

        Each element of ``x`` counts as ``channels`` elements.
        """
        size = x.shape[dim]
        step = size
        if self.block_elements is not None:
            rows = max(1, self.block_elements * size // max(1, x.numel() * channels))
            step = -(-size // -(-size // rows)) if size else 1
        # An empty axis (of a rank without rows of a shallow alignment) is one empty block.
        for start in range(0, max(1, size), max(1, step)):
            yield slice(start, min(size, start + step))

    def pair_rows(self, pair: Tensor) -> PairRows:
        """Return an accessor of the rows of ``pair [*, N, N, c]``, which must not be used before they are restored."""
        alone = pair.is_contiguous() and pair.untyped_storage().nbytes() == pair.nbytes
        if self.offload is None or not self.inplace or not alone or torch.is_grad_enabled():
            return PairRows(pair)
        offloaded = OffloadedRows(pair, self.offload, kept=self.offload_kept)
        return PairRows(offloaded.placeholder, offloaded)

    def map(
        self,
        x: Tensor,
        function: Callable[[Tensor, slice], Tensor],
        *,
        dim: int,
        start: int = 0,
        channels: int = 1,
        consume: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Apply ``function(block, index)`` to blocks of ``x`` and join the results along the same axis.

        Args:
            x: Any tensor.
            function: Returns a block of the result, as long as the block of ``x`` along ``dim``.
            dim: The axis, counted from the end.
            start: Index of the start of ``x`` in the tensor that ``x`` is a part of.
            channels: Elements of the result per element of ``x``, for the size of the blocks.
            consume: True if the caller does not read ``x`` again, so that its memory may hold the result.
            out: Tensor for the result, used if no gradients are recorded.
        """
        function = self.recomputed(function)
        blocks = list(self.slices(x, dim, channels))
        results = []
        for index in blocks:
            result = function(narrowed(x, dim, index), slice(start + index.start, start + index.stop))
            if (len(blocks) == 1 and out is None) or torch.is_grad_enabled():
                results.append(result)
                continue
            if out is None:
                shape = list(result.shape)
                shape[dim] = x.shape[dim]
                same = consume and self.inplace and list(x.shape) == shape and x.dtype == result.dtype
                out = x if same else result.new_empty(shape)
            narrowed(out, dim, index).copy_(result)
        if out is not None:
            return out
        return results[0] if len(results) == 1 else torch.cat(results, dim)

    def recomputed(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return ``function``, to be computed again in the backward pass where the policy says so."""
        if not (self.recompute and torch.is_grad_enabled()):
            return function
        return partial(recomputed, function)


class Block(NamedTuple):
    """Input and output of one call of a residual branch."""

    x: Tensor  #: The updated tensor, or a part of it
    rows: slice  #: Slice of the axis that ``x`` is cut along
    dropout: Tensor | None  #: Factors that broadcast against ``x``, or None
    out: Tensor | None  #: Tensor for the result, or None for a new tensor
    policy: ExecutionPolicy = ExecutionPolicy()  #: Policy of the module in this call
    mask: Tensor | None = None  #: ``[*, A, B]`` for ``x [*, A, B, c]``, or None

    def add(self, update: Tensor) -> Tensor:
        """Return ``x + dropout * update``, for operators without a residual; ``update`` has the shape of ``x``."""
        if self.dropout is not None:
            update = update * self.dropout
        return self.x + update if self.out is None else torch.add(self.x, update, out=self.out)

    def take(self, dim: int, rows: slice) -> Block:
        """Return the part of this block at ``rows`` along ``dim``."""
        dropout = self.dropout
        if dropout is not None and dropout.shape[dim] > 1:
            dropout = narrowed(dropout, dim, rows)
        out = None if self.out is None else narrowed(self.out, dim, rows)
        mask = None if self.mask is None else narrowed(self.mask, dim + 1, rows)
        return Block(narrowed(self.x, dim, rows), rows, dropout, out, self.policy, mask)

    def transposed(self) -> Block:
        """Return a view of this block ``[*, A, B, c]`` as ``[*, B, A, c]``."""
        dropout = None if self.dropout is None else self.dropout.transpose(-3, -2)
        out = None if self.out is None else self.out.transpose(-3, -2)
        mask = None if self.mask is None else self.mask.transpose(-2, -1)
        return Block(self.x.transpose(-3, -2), self.rows, dropout, out, self.policy, mask)


Branch = Callable[[Block], Tensor]
"""Function from a block to ``block.x + block.dropout * update(block.x)``, written to ``block.out`` if given."""


class PairRows:
    """Accessor of a pair tensor ``[*, N, N, c]`` that reads and updates rows, on the device or on the host.

    ``pair`` is a tensor of the same shape, to be cut into blocks; it has no contents while the rows are ``offloaded``.
    """

    def __init__(self, pair: Tensor, offloaded: OffloadedRows | None = None) -> None:
        self.pair, self._offloaded = pair, offloaded

    def reader(self) -> Callable[[slice], Tensor]:
        """Return a function of rows that returns ``[*, rows, N, c]`` on the device.

        Recomputed blocks have to read the pair of now after it is updated.
        """
        pair = self.pair
        return (lambda rows: pair[..., rows, :, :]) if self._offloaded is None else self._offloaded.rows

    def add(self, block: Block, update: Tensor) -> Tensor:
        """Add ``update [*, rows, N, c]`` to the block's rows; return the sum, or ``block.x`` if it is on the host."""
        if self._offloaded is None:
            return block.add(update)
        self._offloaded.write(block.rows, self._offloaded.rows(block.rows).add_(update))
        return block.x

    def restore(self) -> Tensor:
        """Return the updated tensor ``[*, N, N, c]`` on the device."""
        return self.pair if self._offloaded is None else self._offloaded.restore()


class LazyRows:
    """Tensor of residue pairs ``[*, N, N, c]`` with rows computed on demand."""

    def __init__(
        self, function: Callable[[slice], Tensor], shape: tuple[int, ...], policy: ExecutionPolicy
    ) -> None:
        self.rows, self.shape, self.policy = function, torch.Size(shape), policy

    def slices(self) -> Iterator[slice]:
        """Yield the indices of the blocks of rows in order; one empty block if there are no rows."""
        size, limit = self.shape[-3], self.policy.block_elements
        step = size if limit is None else max(1, limit * size // max(1, self.shape.numel()))
        for start in range(0, max(1, size), max(1, step)):
            yield slice(start, min(size, start + step))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the blocks of rows in order, each with its index."""
        for index in self.slices():
            yield index, self.rows(index)

    def whole(self) -> Tensor:
        """Return the whole tensor ``[*, N, N, c]``."""
        return self.rows(slice(0, self.shape[-3]))


def rows_of(x: Tensor | LazyRows, index: slice) -> Tensor:
    """Return rows ``[*, rows, N, c]`` of a tensor of residue pairs."""
    return x.rows(index) if isinstance(x, LazyRows) else x[..., index, :, :]


def of_sample(x: Tensor | LazyRows, sample: tuple[int, ...]) -> Tensor | LazyRows:
    """Return ``[N, N, c]`` of one sample of a tensor of residue pairs, by its indices of the batch axes."""
    if isinstance(x, LazyRows) and sample:
        return LazyRows(lambda rows: x.rows(rows)[sample], x.shape[len(sample) :], x.policy)
    return x[sample] if isinstance(x, Tensor) else x


def columns(x: Tensor | None) -> Tensor | None:
    """Return a view of ``x [*, A, B, c]`` as ``[*, B, A, c]``; None for None."""
    return None if x is None else x.transpose(-3, -2)


def narrowed(x: Tensor, dim: int, index: slice) -> Tensor:
    """Return the part of ``x [*]`` at ``index`` along ``dim``, or ``x`` itself if that is all, to save a view."""
    if index == slice(None) or index.stop - index.start == x.shape[dim]:
        return x
    return x.narrow(dim, index.start, index.stop - index.start)


@dataclass(frozen=True, eq=False)
class CallSettings:
    """Settings of one call of a network, which other threads that call the same network do not see."""

    policies: Mapping[PolicyModule, ExecutionPolicy] = field(default_factory=dict)
    training: bool = False  #: True to draw dropout factors, as in training
    generator: torch.Generator | None = None  #: Random numbers of dropout; None for PyTorch's own
    checkpointing: bool = False  #: While gradients are recorded, keep only the inputs of the trunk's blocks
    #: See :class:`fastfold.evoformer.structure.structure_module.StructureModule`
    stop_rotation_gradient: bool = True


_CALL: ContextVar[CallSettings | None] = ContextVar("settings of a call", default=None)
# The compiler cannot trace context variables, but guards this number: steps compiled outside of calls read no variable.
_calls = 0
_calls_lock = threading.Lock()


def current_call() -> CallSettings | None:
    """Return the settings of the call that runs in this thread; None outside calls with settings."""
    return _CALL.get() if _calls else None


@contextmanager
def calling(settings: CallSettings) -> Iterator[None]:
    """Call networks with settings in this thread, in place of the attributes of their modules."""
    _count_calls(1)
    token = _CALL.set(settings)
    try:
        yield
    finally:
        _CALL.reset(token)
        _count_calls(-1)


def _count_calls(change: int) -> None:
    global _calls
    with _calls_lock:
        _calls += change


def is_training(module: nn.Module) -> bool:
    """Return True if a module draws dropout factors: by the settings of the call, else by its mode."""
    call = _CALL.get() if _calls else None
    return module.training if call is None else call.training


def dropout_generator(device: torch.device, seed: int) -> torch.Generator | None:
    """Return random numbers of a call on a device; None for tensors without contents, which need none."""
    return None if device.type == "meta" else torch.Generator(device).manual_seed(seed)


def random_state(device: torch.device) -> Tensor:
    """Return the state of the random numbers of dropout: the call's, else PyTorch's on the device."""
    call = current_call()
    if call is not None and call.generator is not None:
        return call.generator.get_state()
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Restore the result of :func:`random_state`."""
    call = current_call()
    if call is not None and call.generator is not None:
        call.generator.set_state(state)
    elif device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """Return ``function(*inputs)``, to be computed again in the backward pass with the settings of this call."""
    call = current_call()
    if call is None:
        return checkpoint(function, *inputs, use_reentrant=False)
    contexts = nullcontext(), _Again(call)
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=lambda: contexts)


class _Again:
    """Context of a block that is computed again, perhaps in another thread, with the same random numbers."""

    def __init__(self, call: CallSettings) -> None:
        self._call, self._start = call, call.generator and call.generator.clone_state()

    def __enter__(self) -> None:
        generator = self._start and self._start.clone_state()
        self._context = calling(replace(self._call, generator=generator))
        self._context.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._context.__exit__(*exception)


class _Registered(NamedTuple):
    """Layers and parameters below a module, as it registers them, and forward functions of single layers."""

    tables: tuple[dict[str, Any], ...]  #: Tables of the entries, first of all the module's own
    names: tuple[str, ...]
    values: tuple[Any, ...]
    hooks: tuple[dict[int, Any], ...]  #: Tables of the hooks of its layers


_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}


def check_parts(module: nn.Module) -> None:
    """Check that an operator may compute a module from the parameters of its layers; see :func:`check_part`."""
    for name, layer in _parts(module):
        check_part(layer, f"{name} of {type(module).__name__}")


def check_part(layer: nn.Module, name: str) -> None:
    """Check that an operator may use a layer's parameters in place of a call; ``name`` is for the message.

    Hooks with a true attribute ``observes`` are allowed: they change no result of a call.

    Raises:
        ConfigError: The layer is of a class with another forward pass, or has hooks or a forward pass of its own.
    """
    forward, problem = type(layer).forward, None
    if forward is not nn.Linear.forward and not forward.__module__.startswith("fastfold."):
        problem = f"is a {type(layer).__module__}.{type(layer).__qualname__}"
    elif "forward" in vars(layer):
        problem = "has a forward() of its own instance"
    for table, text in _HOOKS.items():
        if not all(getattr(hook, "observes", False) for hook in getattr(layer, table).values()):
            problem = f"has {text}"
    if problem is not None:
        raise ConfigError(
            f"{name} {problem}, which would be ignored: an operator reads its parameters and does not call it. "
            "Change parameters by torch.nn.utils.parametrize, as fastfold.training.lora does; put hooks on the module "
            "around it, or replace that module"
        )


def _check_when_traced(module: nn.Module) -> None:
    check_parts(module)


# As torch.compiler.assume_constant_result marks it, which would import the compiler, for seconds, in every fold.
_check_when_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers with parameters in a module by name, without those that compute a parameter."""
    for name, layer in module.named_children():
        if next(layer.parameters(), None) is None:
            continue
        yield prefix + name, layer
        if not layer._parameters and not is_parametrized(layer):
            yield from _parts(layer, f"{prefix}{name}.")


class PolicyModule(nn.Module):
    """Base of modules that run under a policy."""

    operator: str = ""  #: Name of this kind of module in plans
    _policy: ExecutionPolicy = ExecutionPolicy()
    _collected: tuple[_Registered, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without collected parameters, whose tables are those of the original."""
        return {name: value for name, value in vars(self).items() if name != "_collected"}

    def collected(self, collect: Callable[[], Result]) -> Result:
        """Return ``collect()``, the parameters of this module's operators, or its result of an earlier call.

        Parameters are collected again if one of them, or a layer, is replaced. Their values may change.

        Raises:
            ConfigError: A layer would do more than its parameters say; see :func:`check_parts`.
        """
        if torch.compiler.is_compiling():
            _check_when_traced(self)
            return collect()
        if self._collected is not None:
            (tables, names, values, hooks), parameters = self._collected
            # A replica has tables of its own and the attributes of its original. Loops of Python would be slow here.
            is_current = tables[0] is self._modules and all(map(is_, map(dict.get, tables, names), values))
            if is_current and not any(hooks):
                return parameters
        check_parts(self)
        parameters = collect()
        own = [t for module in self.modules() for t in (module._modules, module._parameters)]
        entries = [(table, name, value) for table in own for name, value in table.items()]
        registered = {id(value) for *_, value in entries if value is not None}
        # A weight that is computed at each use is not registered, nor is a layer that is missing.
        if all(id(x) in registered for x in tree_leaves(parameters)):
            layers = [layer for _, layer in _parts(self)]
            entries += [(vars(layer), "forward", None) for layer in layers]
            tables, names, values = zip(*entries, strict=True)
            hooks = tuple(getattr(layer, table) for layer in layers for table in _HOOKS)
            self._collected = _Registered(tables, names, values, hooks), parameters
        return parameters

    @property
    def policy(self) -> ExecutionPolicy:
        """Policy of the current call, else the module's own."""
        call = _CALL.get() if _calls else None
        return self._policy if call is None else call.policies.get(self, self._policy)

    @policy.setter
    def policy(self, policy: ExecutionPolicy) -> None:
        """Set the module's own policy."""
        self._policy = policy

    def apply_residual(
        self,
        x: Tensor,
        branch: Branch,
        *,
        dim: int | None,
        dropout: nn.Module | Tensor | None = None,
        mask: Tensor | None = None,
        columns: bool = False,
    ) -> Tensor:
        """Return ``x + dropout * update(x)``, computed block by block under the policy of the current call.

        Args:
            x: Any tensor.
            branch: Computes the sum for a block (:data:`Branch`), which must depend on ``x`` only through that block.
            dim: Axis along which ``x`` may be cut, counted from the end; None if the branch needs all of it.
            dropout: Factors that broadcast against ``x`` (zero or ``1 / keep rate``), or a module that returns them,
                called in training only; None for no dropout.
            mask: Mask ``[*, A, B]`` of ``x [*, A, B, c]``, which blocks hold their part of; None for none.
            columns: Call the branch with transposed blocks, whose rows are the columns of ``x [*, A, B, c]``.
        """
        # One look at the settings of the call, because a block asks for them nine times.
        call = _CALL.get() if _calls else None
        policy = self._policy if call is None else call.policies.get(self, self._policy)
        if isinstance(dropout, nn.Module):
            dropout = dropout(x) if (dropout.training if call is None else call.training) else None
        if policy.recompute:
            branch = policy.recomputed(branch)
        out = None if torch.is_grad_enabled() else x if policy.inplace else torch.empty_like(x)
        rows = slice(None) if dim is None else slice(0, x.shape[dim])
        whole = Block(x, rows, dropout, out, policy, mask)
        blocks = [whole]
        if dim is not None and policy.block_elements is not None and x.numel() > policy.block_elements:
            blocks = [whole.take(dim, part) for part in policy.slices(x, dim)]
        results = []
        for block in blocks:
            results.append(branch(block.transposed() if columns else block))
        if out is not None:
            return out
        if columns:
            results = [result.transpose(-3, -2) for result in results]
        return results[0] if dim is None or len(results) == 1 else torch.cat(results, dim)


def policies_of(
    model: nn.Module, policy: ExecutionPolicy, blocks: Mapping[str, int | None] | None = None
) -> dict[PolicyModule, ExecutionPolicy]:
    """Return a policy for every :class:`PolicyModule` in ``model``.

    Args:
        model: The network, or a part of it.
        policy: Policy of every module.
        blocks: ``block_elements`` by :attr:`PolicyModule.operator`, for kinds that differ from ``policy``.
    """
    policies: dict[PolicyModule, ExecutionPolicy] = {}
    for module in model.modules():
        if isinstance(module, PolicyModule):
            own = (blocks or {}).get(module.operator, policy.block_elements)
            policies[module] = policy if own == policy.block_elements else replace(policy, block_elements=own)
    return policies


def set_policy(
    model: nn.Module, policy: ExecutionPolicy, blocks: Mapping[str, int | None] | None = None
) -> None:
    """Set the policy of a network that only one thread calls; arguments are those of :func:`policies_of`."""
    for module, own in policies_of(model, policy, blocks).items():
        module.policy = own
