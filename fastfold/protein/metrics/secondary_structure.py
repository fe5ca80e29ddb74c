"""Secondary structure from hydrogen bonds of the backbone (Kabsch & Sander 1983, Biopolymers 22, 2577)."""

from __future__ import annotations

import numpy as np

from fastfold.protein import residue_constants as rc

HELIX, STRAND, LOOP = "H", "E", "-"

_ENERGY = -0.5  #: Weakest hydrogen bond in kcal/mol
_FACTOR = 0.42 * 0.20 * 332.0  #: Product of the partial charges, in kcal/mol times Å
_NH = 1.01  #: Length of the bond between N and its hydrogen in Å
_FAR = 9.0  #: Largest distance of CA atoms with a bond, in Å
_PEPTIDE = 2.5  #: Longest peptide bond in Å


def assign_secondary_structure(
    positions: np.ndarray, mask: np.ndarray, aatype: np.ndarray, chain: np.ndarray
) -> str:
    """Return a letter for each residue: H for helices of any kind, E for strands, - for the rest.

    Helices are DSSP's H, G and I, strands its E; its isolated bridges (B) are loops. Residues without N, CA, C and O
    are loops.

    Args:
        positions: atom37 ``[N, 37, 3]`` in Å.
        mask: ``[N, 37]``, 1 for present atoms.
        aatype: Residue types ``[N]``; the nitrogen of proline gives no bond.
        chain: Chain number of each residue, ``[N]``.
    """
    slots = [rc.atom_order[name] for name in ("N", "CA", "C", "O")]
    complete = np.asarray((mask[:, slots] > 0.5).all(-1))
    n, ca, c, o = positions[:, slots].astype(np.float64).transpose(1, 0, 2)
    joined = (chain[1:] == chain[:-1]) & complete[1:] & complete[:-1]
    joined &= np.linalg.norm(n[1:] - c[:-1], axis=-1) < _PEPTIDE
    gives = np.r_[False, joined] & (aatype != rc.restype_order["P"])
    bonds = _bonds(n, ca, c, o, gives, complete)
    # run[i] is the number of joined residues after residue i.
    run = np.zeros(len(chain), int)
    for i in range(len(chain) - 2, -1, -1):
        run[i] = run[i + 1] + 1 if joined[i] else 0
    strand = _strands(bonds, run)
    helix = _helices(bonds, run, strand)
    letters = np.where(helix, HELIX, np.where(strand, STRAND, LOOP))
    return "".join(letters)


def _bonds(
    n: np.ndarray, ca: np.ndarray, c: np.ndarray, o: np.ndarray, gives: np.ndarray, complete: np.ndarray
) -> np.ndarray:
    """Return ``[N, N]`` bool, True if the CO of the first residue binds the NH of the second."""
    before = np.roll(c - o, 1, 0)
    h = n + _NH * before / np.linalg.norm(before, axis=-1, keepdims=True).clip(1e-9)

    def inverse(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return 1.0 / np.linalg.norm(a[:, None] - b[None], axis=-1).clip(0.5)

    energy = _FACTOR * (inverse(o, n) + inverse(c, h) - inverse(o, h) - inverse(c, n))
    near = np.linalg.norm(ca[:, None] - ca[None], axis=-1) < _FAR
    apart = np.subtract.outer(np.arange(len(n)), np.arange(len(n)))
    allowed = near & complete[:, None] & gives & (apart != 0) & (apart != -1)
    bonds: np.ndarray = (energy < _ENERGY) & allowed
    return bonds


def _helices(bonds: np.ndarray, run: np.ndarray, strand: np.ndarray) -> np.ndarray:
    """Return residues within helices: two turns of equal kind in a row; kinds with 4, 3 and 5 residues per turn."""
    count = len(run)
    helix = np.zeros(count, bool)
    for turn in (4, 3, 5):
        ends = np.arange(count) + turn
        starts = np.array([end < count and run[i] >= turn and bonds[i, end] for i, end in enumerate(ends)])
        for i in np.flatnonzero(starts[1:] & starts[:-1]) + 1:
            part = slice(i, i + turn)
            if turn == 4 or not (helix[part] | strand[part]).any():
                helix[part] = True
    return helix


def _strands(bonds: np.ndarray, run: np.ndarray) -> np.ndarray:
    """Return residues within ladders: two bridges in a row, or with a bulge between them."""
    inner = np.flatnonzero((run >= 1) & np.r_[False, run[:-1] >= 1])
    i, j = (x.ravel() for x in np.meshgrid(inner, inner, indexing="ij"))
    i, j = i[j - i > 2], j[j - i > 2]
    parallel = bonds[i - 1, j] & bonds[j, i + 1] | bonds[j - 1, i] & bonds[i, j + 1]
    anti = bonds[i, j] & bonds[j, i] | bonds[i - 1, j + 1] & bonds[j - 1, i + 1]
    strand = np.zeros(len(run), bool)
    for kind, way in ((parallel, 1), (anti, -1)):
        pairs = set(zip(i[kind].tolist(), j[kind].tolist(), strict=True))
        for one, two in pairs:
            for up, across in _STEPS:
                other = one + up, two + way * across
                ends = (one, other[0]), tuple(sorted((two, other[1])))
                if other in pairs and all(run[low] >= high - low for low, high in ends):
                    for low, high in ends:
                        strand[low : high + 1] = True
    return strand


_STEPS = (
    (1, 1),
    *((1, across) for across in range(2, 6)),
    *((up, 1) for up in range(2, 6)),
    (2, 2),
)
"""Steps from a bridge to the next one of its ladder: neighbours, or a bulge of up to four residues on one side."""
