"""Files of a finished run: averaged weights for ``fastfold infer``, and LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ml_collections import ConfigDict
from torch import Tensor

from fastfold._version import __version__
from fastfold.evoformer.weights.adapters import write_adapter
from fastfold.evoformer.weights.checkpoint import save_weights
from fastfold.training.build import plain_network
from fastfold.training.config import TrainConfig
from fastfold.training.logging.draw_log import consumed_chains
from fastfold.training.lora import lora_updates, merge_lora
from fastfold.training.step_outcome import RunProgress


def write_weights(
    config: TrainConfig,
    tree: ConfigDict,
    weights: Mapping[str, Tensor],
    progress: RunProgress,
    say: Callable[[str], None],
) -> None:
    """Write a run's weights for ``fastfold infer``, adapters merged, and the adapters also alone.

    Args:
        config: Settings of the run.
        tree: Configuration of its network.
        weights: Parameters of the plain network by name.
        progress: Progress of the run, for the file's metadata.
        say: Called with a line for each written file.

    Raises:
        WriteError: A file cannot be written.
    """
    out, state = Path(config.trainer.out), dict(weights)
    if config.finetune.lora_rank:
        model = plain_network(config, tree)
        model.load_state_dict(state)
        updates = lora_updates(model)
        for layer in updates:
            state[f"{layer}.weight"] = state[f"{layer}.parametrizations.weight.original"]
        write_adapter(out / "adapter", updates, state, base=config.model.weights)
        say(f"adapter in {out / 'adapter'}")
        state = merge_lora(model).state_dict()
    metadata = {
        "trained_steps": str(progress.step),
        "trained_samples": str(progress.samples),
        "trained_chains": str(len(consumed_chains(out))),
        "fastfold_version": __version__,
    }
    path = out / f"{config.model.name}.safetensors"
    save_weights(path, state, tree, metadata=metadata)
    say(f"weights in {path}")
