"""Train a small network from scratch on one structure, and fold the sequence with what it has learnt.

    python examples/train_overfit.py [--structure 1ten.pdb] [--steps 60]

It shows that everything is connected: structure file to features and labels, losses, optimizer, checkpoints, weights
that ``fastfold infer`` takes. Without ``--structure`` the structure is what ``mini`` predicts for 20 residues.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import fastfold
from fastfold.training.compose import compose_config
from fastfold.training.run import train

SEQUENCE = "MTPAVTTYKLVINGKTLKGE"
TRUNK = "model.overrides.model.embeddings_and_evoformer"
SMALLER = [
    f"{TRUNK}.evoformer_num_block=1",
    f"{TRUNK}.msa_channel=16",
    f"{TRUNK}.pair_channel=16",
    f"{TRUNK}.seq_channel=16",
    f"{TRUNK}.extra_msa_channel=8",
    "model.overrides.model.heads.structure_module.num_layer=2",
    "model.overrides.model.heads.structure_module.num_channel=16",
]
"""A network that takes milliseconds a step; leave these out to train one of the size of ``mini``."""


def predicted_structure(folder: Path) -> Path:
    """A PDB file of what ``mini`` predicts for :data:`SEQUENCE`."""
    prediction = fastfold.predict(SEQUENCE, model="mini", num_recycles=0)
    path = folder / "structure.pdb"
    path.write_text(prediction.to_pdb())
    return path


def main() -> None:
    """Train, and print what has changed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--structure", type=Path, help="PDB or mmCIF file")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="folder of the run; by default a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary) / "run"
        structure = args.structure or predicted_structure(Path(temporary))
        # The same as: fastfold train +preset=overfit data.directory=... trainer.out=... trainer.steps=...
        overrides = [f"data.directory={structure}", f"trainer.out={out}", f"trainer.steps={args.steps}"]
        rates = ["optim.lr=3e-3", "optim.muon_lr=1.5e-2", "trainer.device=cpu"]  # more for a smaller network
        train(compose_config(["+preset=overfit", *SMALLER, *rates, *overrides]))

        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]  # a validation has numbers of its own
        for name, text in (("loss", "loss"), ("lddt_ca", "lDDT-CA")):
            print(f"{text} {mean(steps[:5], name):.2f} -> {mean(steps[-5:], name):.2f} in {len(steps)} steps")
        model = fastfold.load_model(out / "mini.safetensors", device="cpu")
        print(f"the trained weights fold: {fastfold.predict(SEQUENCE, model=model).atom_positions.shape}")


def mean(steps: list[dict[str, float]], name: str) -> float:
    """Mean of one of the numbers of some steps."""
    return sum(step[name] for step in steps) / len(steps)


if __name__ == "__main__":
    main()
