"""Train the structure module of ``mini`` by itself, on what the rest of the network says of whole chains.

    python examples/train_structure_module.py DATA WEIGHTS structure.safetensors --recordings DIR [--steps 1500]

The distogram of a small network knows more than its structure module makes of it, and the structure module is the cheap
part. So the network's representations of training chains are recorded once, whole chains in half precision, and the
structure module trains on them together with the heads that predict its errors: a few times as fast as the whole
network, and on lengths that the whole network is not trained on. More iterations cost no parameters, since all have the
same.

Overlaps and violations weigh little at first, so that folds can form, and more later, so that they become possible.

What was recorded is kept, apart for each file of weights and each training set: the same command goes on recording
where it stopped. The folder takes a few megabytes for each chain.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from fastfold import AlphaFold, load_model
from fastfold.data.training.entry import Entry
from fastfold.data.training.sample import FEATURES, LABELS, SampleSettings
from fastfold.errors import InputError
from fastfold.evoformer.confidence import plddt
from fastfold.evoformer.losses.heads import predicted_aligned_error_loss, predicted_lddt_loss
from fastfold.evoformer.losses.total import structure_loss
from fastfold.evoformer.weights.checkpoint import save_weights
from fastfold.parallel.data_parallel.zero import Replicated
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.compactness import near_neighbors, radius_of_gyration
from fastfold.training.compose import compose_config, network_config
from fastfold.training.config import TrainConfig
from fastfold.training.data import MakeSample, entry_reader, sample_settings
from fastfold.training.optim.ema import ExponentialMovingAverage
from fastfold.training.optim.grad_accumulation import SampleGradients
from fastfold.training.optim.optimizers import make_optimizer
from fastfold.training.sets.source import open_source
from fastfold.training.trainer import ca_lddt
from fastfold.utils.atomic_files import write_atomic
from fastfold.utils.hashing import file_digest, input_hash

TRAINED = ("structure_module.", "heads.predicted_lddt.", "heads.predicted_aligned_error.")
LATE_OVERLAP, LATE_VIOLATIONS = 4.0, 0.04  # weights at the end, which rise from those of the configuration
LONGEST = 256  # residues that are recorded of a chain


def record(
    model: AlphaFold, config: TrainConfig, settings: SampleSettings, draws: Iterable[Entry], folder: Path
) -> list[Path]:
    """Write the representations of drawn chains, with their labels, one file for each draw.

    Args:
        model: The network.
        config: Says where samples come from.
        settings: How they are made.
        draws: The chains.
        folder: Where to; what it has is not made again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    make = MakeSample(entry_reader(config.data), model.config, settings, config.trainer.seed)
    files = []
    for number, entry in enumerate(draws):
        path = folder / f"{number:06d}.safetensors"
        if path.exists():
            files.append(path)
            continue
        try:
            sample = {key: torch.as_tensor(x) for key, x in make(number, entry).items()}
        except InputError as error:
            print(f"left out {entry.id}: {error}", flush=True)
            continue
        features = {key.removeprefix(FEATURES): x for key, x in sample.items() if key.startswith(FEATURES)}
        kept = {key.removeprefix(LABELS): x for key, x in sample.items() if key.startswith(LABELS)}
        kept |= {key: features[key][-1].contiguous() for key in ("seq_mask", "residue_index")}
        with torch.no_grad():
            found = model(features, settings.cycles - 1)["representations"]
        kept |= {key: found[key].half().contiguous() for key in ("single", "pair")}
        write_atomic(path, save(kept))
        files.append(path)
    return files


def fold(model: AlphaFold, recorded: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Compute the structure and its predicted errors from recorded representations."""
    pair = recorded["pair"].float()
    structure = model.structure_module(
        recorded["single"].float(), pair, recorded["aatype"], recorded["seq_mask"]
    )
    return {
        "structure_module": structure,
        "predicted_lddt": model.heads["predicted_lddt"]({"structure_module": structure["act"]}),
        "predicted_aligned_error": model.heads["predicted_aligned_error"]({"pair": pair}),
    }


def loss_of(model: AlphaFold, recorded: dict[str, Tensor], heads: Any) -> Tensor:
    """Compute the loss of the layers that train, a scalar.

    Args:
        model: The network.
        recorded: Representations and labels of a chain.
        heads: Config node ``heads`` with the weights of the losses.
    """
    result = fold(model, recorded)
    structure = structure_loss(result["structure_module"], recorded, heads.structure_module)["loss"]
    predicted = predicted_lddt_loss(result, recorded, heads.predicted_lddt)["loss"]
    errors = predicted_aligned_error_loss(
        result, recorded, heads.predicted_aligned_error, heads.structure_module.position_scale
    )["loss"]
    return (
        heads.structure_module.weight * structure
        + heads.predicted_lddt.weight * predicted
        + heads.predicted_aligned_error.weight * errors
    )


def scheduled(heads: Any, share: float) -> Any:
    """Return the loss weights after a share of the training, 0 to 1.

    The weights of overlaps and violations rise between 0.3 and 0.7 of it, each by the same factor in the same time.
    """
    late = min(1.0, max(0.0, (share - 0.3) / 0.4))
    found = copy.deepcopy(heads)
    structure, trace = found.structure_module, found.structure_module.ca_trace
    trace.overlap *= (LATE_OVERLAP / trace.overlap) ** late
    structure.structural_violation_loss_weight *= (
        LATE_VIOLATIONS / structure.structural_violation_loss_weight
    ) ** late
    return found


def rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rates: a short rise, constant up to 0.4 of the steps, then a cosine to zero."""
    falling = max(0.0, step / steps - 0.4) / 0.6
    return min(1.0, step / 20) * 0.5 * (1.0 + math.cos(math.pi * falling))


def validation(model: AlphaFold, files: Sequence[Path]) -> str:
    """Return a line of means over validation chains, and leave the network in training mode."""
    model.eval()
    ca = rc.atom_order["CA"]
    with torch.no_grad():
        scores = []
        for file in files:
            recorded = load_file(file)
            result = fold(model, recorded)
            points, mask = (
                result["structure_module"]["final_atom_positions"][:, ca],
                recorded["all_atom_mask"][:, ca],
            )
            true = radius_of_gyration(recorded["all_atom_positions"][:, ca], mask)
            scores.append(
                (
                    float(ca_lddt(result, recorded)),
                    float(plddt(result["predicted_lddt"]["logits"]).mean() / 100),
                    float(radius_of_gyration(points, mask) / true),
                    near_neighbors(points, mask),
                )
            )
    model.train()
    lddt, predicted, radius, near = np.mean(scores, 0)
    return (
        f"validation lDDT-CA {lddt:.3f}, predicted {predicted:.3f}, radius {radius:.2f} of the true one, "
        f"near neighbours {near:.3f}"
    )


def train(model: AlphaFold, config: TrainConfig, files: Sequence[Path], held_out: Sequence[Path]) -> None:
    """Train; the network has averaged weights in the end."""
    optim, steps = config.optim, config.trainer.steps
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(TRAINED))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(optim, named)
    gradients = SampleGradients(Replicated(named, ParallelMesh(ParallelPlan()), {}), optim.clip)
    rates = [group["lr"] for group in optimizer.param_groups]
    average = ExponentialMovingAverage(model, optim.ema_decay, warm_up=True)
    rng = np.random.default_rng(config.trainer.seed)
    order: list[int] = []
    print(f"before: {validation(model, held_out)}", flush=True)
    for step in range(1, steps + 1):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * rate_factor(step, steps)
        heads = scheduled(model.config.model.heads, step / steps)
        losses = []
        for _ in range(optim.batch_size):
            order = order or rng.permutation(len(files)).tolist()
            recorded = load_file(files[order.pop()])
            clamped = float(rng.random() >= config.data.unclamped_probability)
            loss = loss_of(model, recorded | {"use_clamped_fape": torch.tensor(clamped)}, heads)
            loss.backward()
            gradients.add_sample()
            losses.append(float(loss.detach()))
        gradients.finish(optim.batch_size)
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        if step % config.trainer.validate_every == 0 or step == steps:
            with average.swapped_in():
                print(f"step {step}: loss {np.mean(losses):.3f}, {validation(model, held_out)}", flush=True)
    for name, mean in average.tensors().items():
        named[name].data.copy_(mean)


def main() -> None:
    """Record, train, and write the whole network."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="training set, as for fastfold train")
    parser.add_argument("weights", help="weights of mini to start from")
    parser.add_argument("out", help="weights, .safetensors")
    parser.add_argument("--recordings", type=Path, required=True, help="folder of what is recorded")
    parser.add_argument("--chains", type=int, default=2000, help="draws of training chains to record")
    parser.add_argument("--held-out", type=int, default=48, help="chains to validate with")
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    config = compose_config(
        [
            "+preset=mini_late",
            f"data.directory={args.data}",
            "trainer.out=.",
            f"trainer.steps={args.steps}",
            "trainer.validate_every=250",
            "optim.batch_size=2",
            "optim.lr=4.0e-4",
            "optim.muon_lr=2.0e-3",
            "optim.ema_decay=0.99",
        ]
    )
    torch.manual_seed(config.trainer.seed)
    network = load_model(args.weights)
    source = open_source(config.data, args.held_out)
    drawn = replace(sample_settings(config.data), crop_size=LONGEST, cycles=2)
    order = source.order(config.data, config.trainer.seed)
    # What other weights or other data made is not mixed with this.
    folder = (
        args.recordings / input_hash([file_digest(Path(args.weights)), str(Path(args.data).resolve())])[:16]
    )
    files = record(network, config, drawn, map(order, range(args.chains)), folder / "train")
    plain = SampleSettings(LONGEST, 2, block_deletion=False)
    held_out = record(network, config, plain, source.valid, folder / "valid")
    if not files or not held_out:
        parser.error("the training set needs chains to train on and chains to validate with")
    print(f"{len(files)} recordings to train on, {len(held_out)} to validate with", flush=True)
    # As many iterations as the configuration has today.
    tree = network_config(config.model)
    model = AlphaFold(tree)
    model.load_state_dict(network.state_dict())
    train(model, config, files, held_out)
    save_weights(args.out, model, tree, preset="mini")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
