"""Number of elements that an Evoformer block sends when it folds on several ranks."""

from __future__ import annotations

from fastfold.parallel.axial.matmul import choose_contraction


def inference_elements(
    ranks: int, residues: int, sequences: int, *, c_m: int = 256, c_z: int = 128, msa_heads: int = 8
) -> float:
    """Compute the elements that a rank sends in a block's forward pass without gradients.

    The result is the average over the ranks. It counts gathers of three biases, the left projection of the outer
    product mean, four reshards, and both triangle products in the cheaper way
    (:func:`fastfold.parallel.axial.matmul.choose_contraction`).

    Args:
        ranks: Number of ranks that share the protein along one axis.
        residues: N.
        sequences: Rows of the MSA.
        c_m: MSA channels.
        c_z: Pair channels, also those of the triangle products.
        msa_heads: Heads of the row attention; triangle attention has four.
    """
    n, area = residues, residues * residues
    way = choose_contraction("auto", n, n, n, c_z, ranks)
    products = 2 * c_z * area * (3 / ranks if way == "channels" else 1)
    gathered = (msa_heads + 2 * 4) * area + 32 * sequences * n
    resharded = 2 * (c_z * area + c_m * sequences * n) / ranks
    return (ranks - 1) / ranks * (gathered + resharded + products)
