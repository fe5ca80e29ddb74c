"""Passes of DeepMind's AlphaFold program, timed on request.

Usage: python benchmarks/alphafold_program.py CHECKOUT wall|processor

It needs jax, dm-haiku and ml_collections, and nothing of FastFold. ``benchmarks/against_alphafold.py`` and
``benchmarks/gpu`` run it. Each line of the standard input is a JSON object with a case. The answer is its time in
seconds; the first answer of a case also has the time of its first run, which compiles. Without ``warm_up`` the first
run after the compilation is the answer, and with ``compile_only`` the time of the compilation. The first line of the
output names the versions. Products of float32 are TF32's on a GPU, JAX's default.
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

_CLIP = jnp.clip


def _clip(*arguments: Any, a_min: Any = None, a_max: Any = None, **options: Any) -> Any:
    """Accept the names of arguments that the program uses and newer releases of JAX lack."""
    options |= {} if a_min is None else {"min": a_min}
    options |= {} if a_max is None else {"max": a_max}
    return _CLIP(*arguments, **options)


jnp.clip = _clip
sys.path.insert(0, sys.argv[1])

from alphafold.model import config as configs  # type: ignore[import-not-found] # noqa: E402
from alphafold.model import modules, prng, utils  # noqa: E402

Run = Callable[[], Any]


def settings(network: str, subbatch: int | None) -> Any:
    """Return the configuration of a monomer network, with a size of sub-batches; None for no sub-batches."""
    config = configs.model_config(network).model
    config.global_config.subbatch_size = 1 << 20 if subbatch is None else subbatch
    config.global_config.deterministic = True
    return config


def random_parameters(transformed: Any, *inputs: Any) -> Any:
    """Return random parameters of a network; compiling their initialisation would take minutes."""
    random = np.random.default_rng(0)
    return jax.tree_util.tree_map(
        lambda x: jnp.asarray(random.standard_normal(x.shape) * max(1, (*x.shape, 1)[0]) ** -0.5, x.dtype),
        jax.eval_shape(transformed.init, jax.random.PRNGKey(0), *inputs),
    )


def block(sequences: int, residues: int, config: Any, *, dtype: str, backward: bool) -> Run:
    """Return one Evoformer block, compiled; in ``bfloat16`` parameters stay float32, as in the program's multimer."""
    node, kind = config.embeddings_and_evoformer, jnp.dtype(dtype)

    def forward(msa: Any, pair: Any) -> Any:
        masks = {"msa": jnp.ones((sequences, residues), kind), "pair": jnp.ones((residues, residues), kind)}
        with utils.bfloat16_context():
            layer = modules.EvoformerIteration(node.evoformer, config.global_config, is_extra_msa=False)
            key = prng.SafeKey(jax.random.PRNGKey(0))
            return layer({"msa": msa, "pair": pair}, masks, is_training=backward, safe_key=key)

    transformed = hk.transform(forward)
    random = np.random.default_rng(0)
    msa = jnp.asarray(random.standard_normal((sequences, residues, node.msa_channel)), kind)
    pair = jnp.asarray(random.standard_normal((residues, residues, node.pair_channel)), kind)
    parameters = random_parameters(transformed, msa, pair)
    if not backward:
        run = jax.jit(functools.partial(transformed.apply, parameters, None))
        return lambda: run(msa, pair)

    def total(parameters: Any, msa: Any, pair: Any) -> Any:
        return sum(x.sum() for x in transformed.apply(parameters, None, msa, pair).values())

    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    return lambda: gradients(parameters, msa, pair)


def monomer(blocks: int | None, passes: int, config: Any, features: str) -> Run:
    """Return a fold by a monomer network, compiled; ``blocks`` is None for the official number."""
    config.num_recycle = passes - 1
    config.resample_msa_in_recycling = False
    if blocks is not None:
        config.embeddings_and_evoformer.evoformer_num_block = blocks
        config.embeddings_and_evoformer.extra_msa_stack_num_block = 1
    with np.load(features) as archive:
        batch = {name: archive[name] for name in archive.files}

    def forward(batch: Any) -> Any:
        network = modules.AlphaFold(config)
        result = network(batch, is_training=False, compute_loss=False, ensemble_representations=True)
        return result["structure_module"]["final_atom_positions"]

    transformed = hk.transform(forward)
    parameters = random_parameters(transformed, batch)
    key = jax.random.PRNGKey(0)
    run = jax.jit(transformed.apply).lower(parameters, key, batch).compile()
    return lambda: run(parameters, key, batch)


def compiled(request: dict[str, Any]) -> Run:
    """Return the function of a request."""
    config = settings(request.get("network", "model_3"), request["subbatch"])
    if request["case"] == "monomer":
        return monomer(request["blocks"], request["passes"], config, request["features"])
    backward = request["pass"] != "forward"
    sizes = request["sequences"], request["residues"]
    return block(*sizes, config, dtype=request["dtype"], backward=backward)


def main() -> None:
    """Answer requests until the input ends."""
    versions = {"jax": jax.__version__, "haiku": hk.__version__, "backend": jax.default_backend()}
    print(json.dumps(versions), flush=True)
    clock = time.process_time if sys.argv[2] == "processor" else time.perf_counter
    runs: dict[str, Run] = {}
    for line in sys.stdin:
        answer: dict[str, float] = {}
        if line not in runs:
            request = json.loads(line)
            start = clock()
            runs[line] = compiled(request)
            if request.get("compile_only"):
                print(json.dumps({"seconds": clock() - start}), flush=True)
                continue
            if request.get("warm_up", True):
                jax.block_until_ready(runs[line]())
                answer["first"] = clock() - start
        start = clock()
        jax.block_until_ready(runs[line]())
        print(json.dumps(answer | {"seconds": clock() - start}), flush=True)


if __name__ == "__main__":
    main()
