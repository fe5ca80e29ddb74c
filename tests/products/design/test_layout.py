"""Layouts of designed chains: contigs in RFdiffusion's words, drawn lengths, repeats, and loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastfold.data.targets import Chain
from fastfold.errors import ConfigError, InputError
from fastfold.products.design.tasks.layout import (
    chain_of_parts,
    chain_with_loops,
    draw_numbers,
    has_ranges,
    new_chain,
    parse_range,
    read_contigs,
)
from fastfold.products.design.tasks.protocols import _reference
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.observed import MOTIF, ObservedChain, read_observed


@pytest.fixture
def chains(backbone: Path) -> tuple[ObservedChain, ...]:
    return read_observed(backbone, MOTIF).chains


def test_contigs_are_read_in_their_order(chains: tuple[ObservedChain, ...], backbone: Path) -> None:
    parts = read_contigs("[2-4/B3-5/A1/7/A10-12]", chains, backbone)
    shown = [part if isinstance(part, tuple) else part.tolist() for part in parts]
    assert shown == [(2, 4), [16, 17, 18], [0], (7, 7), [9, 10, 11]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10/A1-5/0 20", "expected parts of one chain such as 10-20/A16-36/5, found '0 20'"),
        ("10//A1-5", "found ''"),
        ("20-10/A1-5", "found '20-10'"),
        ("10/A1-5/A3-6", "a residue comes twice"),
        ("10-20", "expected new residues and residues of the file"),
        ("A1-5/B1-5", "expected new residues and residues of the file"),
    ],
)
def test_other_contigs_are_refused(
    text: str, message: str, chains: tuple[ObservedChain, ...], backbone: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_contigs(text, chains, backbone)
    with pytest.raises(InputError, match="chain A has no residue 99"):
        read_contigs("10/A99", chains, backbone)


def test_lengths_are_drawn_within_their_sum() -> None:
    drawn = [draw_numbers([(2, 6), (3, 3), (0, 5)], seed, fixed=10, total=(18, 19)) for seed in range(30)]
    assert {10 + sum(one) for one in drawn} == {18, 19}
    assert all(2 <= first <= 6 and second == 3 and 0 <= third <= 5 for first, second, third in drawn)
    assert len({tuple(one) for one in drawn}) > 5
    assert drawn == [
        draw_numbers([(2, 6), (3, 3), (0, 5)], seed, fixed=10, total=(18, 19)) for seed in range(30)
    ]
    with pytest.raises(ConfigError, match="expected a range that overlaps 15-24, found 30-40"):
        draw_numbers([(2, 6), (3, 3), (0, 5)], 0, fixed=10, total=(30, 40))
    assert [parse_range(text) for text in ("7", "7-9", "9-7", "A7")] == [(7, 7), (7, 9), None, None]
    assert [has_ranges(text) for text in ("5/A3-6/7", "5-6/A3-6", "H:26-33,L:1-4=5", "H:26-33=5-6")] == [
        False,
        True,
        False,
        True,
    ]


def test_parts_have_the_letters_and_atoms_of_the_file(chains: tuple[ObservedChain, ...]) -> None:
    places = [np.array([16, 17, 18]), np.array([0])]
    made = chain_of_parts("X", [2, places[0], 1, places[1], 1], chains)
    assert made.observed is not None
    assert made.is_kept is not None
    assert made.chain.sequence == f"GG{chains[1].sequence[2:5]}G{chains[0].sequence[0]}G"
    assert made.rows.tolist() == [0, 1, -1, -1, -1, 2, -1, 3]
    np.testing.assert_array_equal(made.observed.positions[2:5], chains[1].positions[2:5])
    np.testing.assert_array_equal(made.observed.positions[6], chains[0].positions[0])
    assert made.observed.mask[~made.is_kept].sum() == 0
    assert made.chain.residue_index.tolist() == list(range(1, 9))


def test_repeats_share_their_residues() -> None:
    made = new_chain("A", 4, repeats=3)
    assert (made.chain.sequence, made.rows.tolist()) == ("G" * 12, [0, 1, 2, 3] * 3)


@pytest.mark.parametrize(("first", "second"), [(3, 2), (5, 1), (1, 2)])
def test_loops_are_replaced_and_all_other_residues_stay(
    chains: tuple[ObservedChain, ...], first: int, second: int
) -> None:
    """Loops of residues 3 to 5 and 9 to 10, given in another order; numbers go on behind a loop of another length."""
    given = chains[0]
    loops = [(np.array([9, 10]), second), (np.array([3, 4, 5]), first)]
    made = chain_with_loops(Chain("Q", given.sequence), given, loops, frame=4)
    letters = given.sequence
    kept = [True] * 3 + [False] * first + [True] * 3 + [False] * second + [True] * (len(given) - 11)
    assert made.is_kept is not None
    assert made.is_kept.tolist() == kept
    rows = iter(range(first + second))
    assert made.rows.tolist() == [-1 if one else next(rows) for one in kept]
    stays = [*range(3), *range(6, 9), *range(11, len(given))]
    assert made.observed is not None
    np.testing.assert_array_equal(made.observed.positions[kept], given.positions[stays])
    np.testing.assert_array_equal(made.observed.mask[kept], given.mask[stays])
    assert not made.observed.mask[np.invert(kept)].any()
    is_same = (first, second) == (3, 2)
    loop = (
        [letters[3:6], letters[9:11]]
        if is_same
        else ["X" * first, letters[9:11] if second == 2 else "X" * second]
    )
    if first == 3:
        loop[0] = letters[3:6]
    assert made.observed.sequence == letters[:3] + loop[0] + letters[6:9] + loop[1] + letters[11:]
    assert made.observed.residue_index.tolist() == list(range(1, len(kept) + 1))
    assert (made.frame, made.chain.id, len(made.chain.sequence)) == (4, "Q", len(kept))
    assert [one for one, keeps in zip(made.chain.sequence, kept, strict=True) if keeps] == [
        letters[i] for i in stays
    ]
    assert made.chain.indices == (() if is_same else tuple(range(1, len(kept) + 1)))


def test_residues_behind_a_gap_of_the_given_chain_keep_it(chains: tuple[ObservedChain, ...]) -> None:
    index = np.array([5, 6, 7, 11, 12, 13, 14, 20])
    whole = chains[0]
    given = ObservedChain(
        "A", whole.sequence[:8], whole.positions[:8], whole.mask[:8], index, whole.b_factors[:8]
    )
    made = chain_with_loops(Chain("Q", given.sequence), given, [(np.array([4, 5]), 3)], frame=0)
    assert made.observed is not None
    assert made.observed.residue_index.tolist() == [1, 2, 3, 7, 8, 9, 10, 11, 17]


def test_chains_of_new_residues_stand_without_atoms_beside_given_ones(
    chains: tuple[ObservedChain, ...],
) -> None:
    """Only designed residues that are kept are compared; given chains hold their atoms in frame 0."""
    parts = chain_with_loops(Chain("Q", chains[0].sequence), chains[0], [(np.array([3, 4]), 2)], frame=2)
    reference = _reference([chains[1]], [new_chain("N", 3), parts], is_summed=True)
    assert reference is not None
    given, kept = len(chains[1]), len(chains[0])
    assert reference.frame.tolist() == [0] * given + [0] * 3 + [2] * kept
    is_loop = np.isin(np.arange(kept), [3, 4])
    assert reference.rows.tolist() == [0.0] * (given + 3) + np.invert(is_loop).astype(float).tolist()
    letters = chains[1].sequence + "XXX" + chains[0].sequence
    assert rc.aatype_to_sequence(reference.aatype.numpy()) == letters
    ca = rc.atom_order["CA"]
    assert (
        reference.mask[:, ca].tolist()
        == [1.0] * given + [0.0] * 3 + np.invert(is_loop).astype(float).tolist()
    )
    np.testing.assert_array_equal(reference.positions[:given, ca], chains[1].positions[:, ca])
    assert reference.is_summed
    assert _reference([chains[1]], [new_chain("N", 3)], is_summed=False) is None
