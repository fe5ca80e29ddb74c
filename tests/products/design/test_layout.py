"""Layouts of designed chains: contigs in RFdiffusion's words, drawn lengths, repeats, and loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastfold.errors import ConfigError, InputError
from fastfold.products.design.tasks.layout import (
    chain_of_parts,
    draw_numbers,
    has_ranges,
    new_chain,
    parse_range,
    read_contigs,
)
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
