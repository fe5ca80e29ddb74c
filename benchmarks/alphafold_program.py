"""Passes of DeepMind's AlphaFold program, timed on request; run by ``benchmarks/against_alphafold.py``.

Usage: python benchmarks/alphafold_program.py CHECKOUT FEATURES wall|processor

It needs jax, dm-haiku and ml_collections, and nothing of FastFold. Each line of the standard input is a JSON object
with a case, a pass and the size of sub-batches; the answer is its time in seconds. A pass is compiled with its first
request, which is not timed. The first line of the output names the versions.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, sys.argv[1])

from alphafold.model import config as configs  # type: ignore[import-not-found]
from alphafold.model import modules, prng

Run = Callable[[], Any]


def settings(subbatch: int | None) -> Any:
    """Return the configuration of a monomer network, with a size of sub-batches; None for no sub-batches."""
    config = configs.model_config("model_3")
    config.model.global_config.subbatch_size = 1 << 20 if subbatch is None else subbatch
    config.model.global_config.deterministic = True
    return config


def block(sequences: int, residues: int, subbatch: int | None, *, backward: bool) -> Run:
    """Return one Evoformer block, compiled."""
    config = settings(subbatch).model
    node = config.embeddings_and_evoformer

    def forward(msa: Any, pair: Any) -> Any:
        masks = {"msa": jnp.ones((sequences, residues)), "pair": jnp.ones((residues, residues))}
        layer = modules.EvoformerIteration(node.evoformer, config.global_config, is_extra_msa=False)
        key = prng.SafeKey(jax.random.PRNGKey(0))
        return layer({"msa": msa, "pair": pair}, masks, is_training=backward, safe_key=key)

    transformed = hk.transform(forward)
    random = np.random.default_rng(0)
    msa = random.standard_normal((sequences, residues, node.msa_channel)).astype(np.float32)
    pair = random.standard_normal((residues, residues, node.pair_channel)).astype(np.float32)
    parameters = jax.jit(transformed.init)(jax.random.PRNGKey(0), msa, pair)
    parameters = jax.tree_util.tree_map(
        lambda x: jnp.asarray(
            random.standard_normal(x.shape) * (x.shape[0] if x.shape else 1) ** -0.5, x.dtype
        ),
        parameters,
    )
    if not backward:
        run = jax.jit(functools.partial(transformed.apply, parameters, None))
        return lambda: run(msa, pair)

    def total(parameters: Any, msa: Any, pair: Any) -> Any:
        return sum(x.sum() for x in transformed.apply(parameters, None, msa, pair).values())

    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    return lambda: gradients(parameters, msa, pair)


def monomer(blocks: int, subbatch: int | None, features: str) -> Run:
    """Return one pass of a monomer network with few blocks, compiled."""
    config = settings(subbatch).model
    config.num_recycle = 0
    config.embeddings_and_evoformer.evoformer_num_block = blocks
    config.embeddings_and_evoformer.extra_msa_stack_num_block = 1
    with np.load(features) as archive:
        batch = {name: archive[name] for name in archive.files}

    def forward(batch: Any) -> Any:
        network = modules.AlphaFold(config)
        found = network(batch, is_training=False, compute_loss=False, ensemble_representations=True)
        return found["structure_module"]["final_atom_positions"]

    transformed = hk.transform(forward)
    parameters = jax.jit(transformed.init)(jax.random.PRNGKey(0), batch)
    run = jax.jit(transformed.apply)
    return lambda: run(parameters, jax.random.PRNGKey(0), batch)


def main() -> None:
    """Answer requests until the input ends."""
    print(json.dumps({"jax": jax.__version__, "haiku": hk.__version__}), flush=True)
    clock = time.process_time if sys.argv[3] == "processor" else time.perf_counter
    compiled: dict[str, Run] = {}
    for line in sys.stdin:
        if line not in compiled:
            request = json.loads(line)
            if request["blocks"]:
                run = monomer(request["blocks"], request["subbatch"], sys.argv[2])
            else:
                backward = request["pass"] != "forward"
                run = block(request["sequences"], request["residues"], request["subbatch"], backward=backward)
            jax.block_until_ready(run())
            compiled[line] = run
        start = clock()
        jax.block_until_ready(compiled[line]())
        print(json.dumps({"seconds": clock() - start}), flush=True)


if __name__ == "__main__":
    main()
