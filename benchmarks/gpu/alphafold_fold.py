"""Folds of DeepMind's AlphaFold program in JAX with random parameters, timed.

Usage: python benchmarks/gpu/alphafold_fold.py CHECKOUT FEATURES.npz BLOCKS PASSES

It needs jax, dm-haiku and ml_collections, and nothing of FastFold. BLOCKS is 0 for the official number. Parameters have
the shapes of ``jax.eval_shape`` and random values, since compiling their initialisation takes minutes. Each line of the
output is a JSON object; the first run compiles. Products of float32 are TF32's on a GPU, JAX's default.
"""

from __future__ import annotations

import json
import sys
import time
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


def main() -> None:
    """Time the folds, and print them."""
    checkout, features, blocks, passes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    sys.path.insert(0, checkout)
    jnp.clip = _clip
    from alphafold.model import config as configs  # type: ignore[import-not-found]
    from alphafold.model import modules

    config = configs.model_config("model_3").model
    config.num_recycle = passes - 1
    config.resample_msa_in_recycling = False
    config.global_config.deterministic = True
    if blocks:
        config.embeddings_and_evoformer.evoformer_num_block = blocks
        config.embeddings_and_evoformer.extra_msa_stack_num_block = 1
    with np.load(features) as archive:
        batch = {name: archive[name] for name in archive.files}

    def forward(batch: Any) -> Any:
        network = modules.AlphaFold(config)
        result = network(batch, is_training=False, compute_loss=False, ensemble_representations=True)
        return result["structure_module"]["final_atom_positions"]

    transformed = hk.transform(forward)
    random = np.random.default_rng(0)
    key = jax.random.PRNGKey(0)
    parameters = jax.tree_util.tree_map(
        lambda x: jnp.asarray(random.standard_normal(x.shape) * max(1, (*x.shape, 1)[0]) ** -0.5, x.dtype),
        jax.eval_shape(transformed.init, key, batch),
    )
    run = jax.jit(transformed.apply)
    for fold in ("first", "second"):
        start = time.perf_counter()
        jax.block_until_ready(run(parameters, key, batch))
        line = {"jax": jax.__version__, "backend": jax.default_backend(), "fold": fold, "passes": passes}
        print(json.dumps(line | {"fold_s": round(time.perf_counter() - start, 3)}), flush=True)


if __name__ == "__main__":
    main()
