"""The Evoformer as a module of your own network: any MSA-shaped and pair-shaped tensors, no protein files.

    python examples/evoformer_only.py

A block takes ``msa [S, N, c_m]``, ``pair [N, N, c_z]`` and their masks, and gives both back updated. Nothing in it
knows about proteins: rows could be the views of a scene and columns its points.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastfold import model_config
from fastfold.evoformer.evoformer import EvoformerBlock
from fastfold.evoformer.execution import ExecutionPolicy, set_policy

S, N, C_M, C_Z = 8, 32, 32, 16


class MyNetwork(nn.Module):
    """Two Evoformer blocks, and one number for each pair of columns."""

    def __init__(self) -> None:
        super().__init__()
        config = model_config("model_1_ptm").model.embeddings_and_evoformer.evoformer
        config.outer_product_mean.num_outer_channel = 8
        config.triangle_multiplication_outgoing.num_intermediate_channel = C_Z
        config.triangle_multiplication_incoming.num_intermediate_channel = C_Z
        # zero_init starts each block as the identity, as AlphaFold does; here the first pass should show something.
        self.blocks = nn.ModuleList(EvoformerBlock(config, C_M, C_Z, zero_init=False) for _ in range(2))
        self.contact = nn.Linear(C_Z, 1)

    def forward(self, msa: Tensor, pair: Tensor) -> Tensor:
        """``[N, N]`` from ``msa [S, N, c_m]`` and ``pair [N, N, c_z]``."""
        msa_mask, pair_mask = msa.new_ones(msa.shape[:-1]), pair.new_ones(pair.shape[:-1])
        for block in self.blocks:
            msa, pair = block(msa, pair, msa_mask, pair_mask)
        return self.contact(pair).squeeze(-1)


def main() -> None:
    """Run it forward, backward, and once more in small blocks that write into their inputs."""
    torch.manual_seed(0)
    model = MyNetwork()
    msa, pair = torch.randn(S, N, C_M), torch.randn(N, N, C_Z)
    size = sum(p.numel() for p in model.parameters())
    contacts = model(msa, pair)
    contacts.square().mean().backward()
    reached = sum(p.numel() for p in model.parameters() if p.grad is not None)
    print(f"contacts {tuple(contacts.shape)}; {reached:,} of {size:,} parameters have a gradient")

    model.eval()
    with torch.no_grad():
        expected = model(msa, pair)
        # Memory is a policy that is set from outside: results written into their inputs, few rows at a time.
        set_policy(model, ExecutionPolicy(block_elements=2 * N * C_Z, inplace=True))
        found = model(msa.clone(), pair.clone())
    print(
        f"in place and a few rows at a time it differs by {(found - expected).norm() / expected.norm():.1e}"
    )


if __name__ == "__main__":
    main()
