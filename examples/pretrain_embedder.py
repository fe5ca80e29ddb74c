"""Pretrain the input layers of ``mini`` on distances along the chain, before the network is trained as a whole.

    python examples/pretrain_embedder.py DATA embedder.safetensors [--steps 6000]
    fastfold train +preset=mini data.directory=DATA model.weights=embedder.safetensors

What a window of residues says about secondary structure takes many residues to learn, and no attention. So the layers
that read windows train alone first: convolutions over the sequence, projections to the pair, relative positions, the
first transitions and the distogram's head, on pairs of few separations. That is thousands of residues per second of
one core, where the whole network does a hundred. Other layers of the blocks add nothing before they are trained, so
that the whole network starts with these predictions.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold import AlphaFold, model_config
from fastfold.data.features import coevolution, transforms
from fastfold.data.features.raw import msa_features
from fastfold.data.training.dataset import open_dataset
from fastfold.data.training.entry import read_entry
from fastfold.errors import InputError
from fastfold.evoformer.heads import DistogramHead
from fastfold.evoformer.weights.checkpoint import save_weights
from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import pseudo_beta, pseudo_beta_mask

CHAINS, CROP = 4, 128
NEAR, FAR, MOST = 12, 6, 100  # all separations up to 12 in a step, and six of those up to 100
TRANSITIONS = 2
VARIANTS = 4  # of an alignment: all of its rows, and random subsets
ALONE, UNCOUPLED = 0.15, 0.4  # shares of the samples without an alignment, and without the flag of couplings


class Chain(NamedTuple):
    """What is trained on: ``N`` residues.

    Attributes:
        aatype: ``[N]`` residue types.
        residue_index: ``[N]`` numbers in the chain.
        single: ``[V, N, 25]``, what variants of the alignment say of each residue; ``V`` is 0 without an alignment.
        beta: ``[N, 3]``, CB in Å, CA for glycine.
        mask: ``[N]``, whether it is there.
    """

    aatype: Tensor
    residue_index: Tensor
    single: Tensor
    beta: Tensor
    mask: Tensor


class Batch(NamedTuple):
    """Crops of chains, padded: as :class:`Chain`, with a leading axis and one-hot ``target_feat [B, N, 22]``."""

    target_feat: Tensor
    single: Tensor
    residue_index: Tensor
    beta: Tensor
    mask: Tensor


def read(directory: str, split: str, rng: np.random.Generator) -> list[Chain]:
    """The chains of a training set; what cannot be read is left out."""
    found = []
    for entry in open_dataset(directory, split=split):
        try:
            data = read_entry(entry)
        except InputError:
            continue
        chain = data.chain
        aatype = torch.from_numpy(np.asarray(rc.sequence_to_aatype(chain.sequence))).long()
        positions, mask = torch.from_numpy(chain.positions).float(), torch.from_numpy(chain.mask).float()
        rows = np.empty((0, len(chain)))
        if data.alignments:
            rows = transforms.to_restype_order(msa_features(data.alignments, chain.sequence)["msa"])
        variants = [
            _profile(rows, rng if number else None) for number in range(VARIANTS if len(rows) > 1 else 0)
        ]
        found.append(
            Chain(
                aatype,
                torch.from_numpy(np.asarray(chain.residue_index)).long(),
                torch.from_numpy(np.stack(variants)) if variants else torch.zeros(0, len(chain), 25),
                pseudo_beta(aatype, positions),
                pseudo_beta_mask(aatype, mask),
            )
        )
    return found


def _profile(rows: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
    """``[N, 25]`` of an alignment, or of as many random rows of it as come out of a logarithmically even draw."""
    if rng is not None:
        kept = int(np.exp(rng.uniform(0.0, np.log(len(rows)))))
        rows = np.concatenate([rows[:1], rng.permutation(rows[1:])[: max(1, kept)]])
    analysis = coevolution.analyze(rows, couplings=False)
    single = coevolution.features(analysis, rows.shape[1])["coevolution_single"]
    single[:, -1] = 1  # the network will be given couplings as well
    return single


def draw(chains: Sequence[Chain], rng: np.random.Generator) -> Batch:
    """Crops of random chains; those with an alignment come twice as often."""
    weights = np.array([2.0 if len(chain.single) else 1.0 for chain in chains])
    chosen = rng.choice(len(chains), CHAINS, p=weights / weights.sum())
    crops = []
    for chain in (chains[i] for i in chosen):
        start = rng.integers(max(1, len(chain.mask) - CROP + 1))
        window = slice(start, start + CROP)
        single = torch.zeros(len(chain.mask), 25)
        if len(chain.single) and rng.random() >= ALONE:
            single = chain.single[rng.integers(len(chain.single))].clone()
            if rng.random() < UNCOUPLED:
                single[:, -1] = 0
        crops.append(_padded(chain, single, window))
    return Batch(*(torch.stack(parts) for parts in zip(*crops, strict=True)))


def _padded(chain: Chain, single: Tensor, window: slice) -> Batch:
    target_feat = F.pad(F.one_hot(chain.aatype, 21).float(), (1, 0))
    parts = (target_feat, single, chain.residue_index, chain.beta, chain.mask)
    cut = [part[window] for part in parts]
    return Batch(*(F.pad(part, (0, 0) * (part.dim() - 1) + (0, CROP - len(part))) for part in cut))


class Local:
    """The layers of the network that are trained here, on pairs of some separations.

    Args:
        network: The whole network.
    """

    def __init__(self, network: AlphaFold) -> None:
        head, convolution = network.heads["distogram"], network.input_embedder.sequence_convolution
        assert isinstance(head, DistogramHead)
        assert convolution is not None
        self.embedder, self.head, self.convolution = network.input_embedder, head, convolution
        blocks = list(network.evoformer.blocks)[:TRANSITIONS]
        self.transitions = [m for block in blocks for m in block.modules() if m is block.pair_transition]
        embedder, relative = self.embedder, self.embedder.relative_position
        trained: list[nn.Module] = [convolution, embedder.target_left, embedder.target_right, relative]
        self.parameters = [p for m in (*trained, *self.transitions, self.head) for p in m.parameters()]

    def losses(self, batch: Batch, separations: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Sums of the cross-entropy of distances for each separation, and numbers of pairs."""
        known = torch.cat([batch.target_feat, batch.single], -1)
        target = self.convolution(known, batch.target_feat.sum(-1))  # zeros of padding have no residue type
        left, right = self.embedder.target_left(target), self.embedder.target_right(target)
        relative = self.embedder.relative_position
        pairs = []
        for d in separations:
            offset = (batch.residue_index[:, :-d] - batch.residue_index[:, d:]).clamp(
                -relative.max_offset, relative.max_offset
            )
            table = relative.linear.weight.t()
            pairs.append(left[:, :-d] + right[:, d:] + F.embedding(relative.max_offset + offset, table))
            pairs.append(left[:, d:] + right[:, :-d] + F.embedding(relative.max_offset - offset, table))
        pair = torch.cat(pairs, 1) + relative.linear.bias
        for transition in self.transitions:
            pair = transition(pair.unsqueeze(1)).squeeze(1)
        halves = self.head.logits(pair).split([x.shape[1] for x in pairs], 1)
        c = self.head.config
        edges = torch.linspace(c.first_break, c.last_break, c.num_bins - 1).square()
        sums, counts = [], []
        for d, forth, back in zip(separations, halves[::2], halves[1::2], strict=True):
            squared = (batch.beta[:, :-d] - batch.beta[:, d:]).square().sum(-1)
            mask = batch.mask[:, :-d] * batch.mask[:, d:]
            bins = torch.bucketize(squared, edges)
            errors = F.cross_entropy((forth + back).transpose(1, 2), bins, reduction="none")
            sums.append((errors * mask).sum())
            counts.append(mask.sum())
        return torch.stack(sums), torch.stack(counts)


def validation(local: Local, chains: Sequence[Chain]) -> str:
    """Cross-entropy in bands of separations, each represented by a few."""
    bands = {"3-6": (3, 4, 5), "6-12": (6, 8, 10), "12-24": (12, 16, 20), "24+": (24, 32, 44)}
    found = []
    local.convolution.eval()
    rng = np.random.default_rng(0)
    batches = [draw(chains, rng) for _ in range(100)]
    for name, separations in bands.items():
        with torch.no_grad():
            sums, counts = zip(*(local.losses(batch, separations) for batch in batches), strict=True)
        found.append(f"{name} {float(sum(map(torch.sum, sums)) / sum(map(torch.sum, counts))):.3f}")
    local.convolution.train()
    return "validation " + ", ".join(found)


def main() -> None:
    """Train, and write the whole network."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="training set, as for fastfold train")
    parser.add_argument("out", help="weights, .safetensors")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate")
    args = parser.parse_args()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    training, held_out = read(args.data, "train", rng), read(args.data, "valid", rng)
    print(f"{len(training)} chains to train on, {len(held_out)} to validate with")
    config = model_config("mini")
    network = AlphaFold(config)
    local = Local(network)
    # Not trained here, and not to add anything before it is.
    assert network.input_embedder.coevolution is not None
    torch.nn.init.zeros_(network.input_embedder.coevolution.weight)
    optimizer = torch.optim.AdamW(local.parameters, lr=args.lr, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.steps, pct_start=min(0.5, 100 / args.steps), cycle_momentum=False
    )
    for step in range(1, args.steps + 1):
        far = sorted(rng.choice(np.arange(NEAR + 1, MOST), FAR, replace=False).tolist())
        sums, counts = local.losses(draw(training, rng), [*range(1, NEAR + 1), *far])
        loss = (sums / counts.clamp(min=1)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(local.parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 500 == 0 or step == args.steps:
            print(f"step {step}: loss {loss.item():.3f}, {validation(local, held_out)}", flush=True)
    save_weights(args.out, network, config, preset="mini")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
