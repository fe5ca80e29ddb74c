"""The choice of candidates is the best one of all combinations where these can be counted."""

from __future__ import annotations

import itertools

import numpy as np

from fastfold.protein.side_chains.assignment import Pairs, choose, energies_of_choice


def total(choice: tuple[int, ...], own: list[np.ndarray], pairs: Pairs) -> float:
    energy = sum(float(energies[k]) for energies, k in zip(own, choice, strict=True))
    return energy + sum(float(table[choice[i], choice[j]]) for (i, j), table in pairs.items())


def problem(seed: int) -> tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]:
    """Return six residues of two to four candidates, of which a third of the pairs clash by up to 10."""
    generator = np.random.default_rng(seed)
    own = [generator.exponential(1.5, size=generator.integers(2, 5)) for _ in range(6)]
    pairs = {
        (i, j): generator.uniform(0, 10, size=(len(own[i]), len(own[j])))
        * (generator.random((len(own[i]), len(own[j]))) < 0.35)
        for i, j in itertools.combinations(range(6), 2)
        if generator.random() < 0.5
    }
    return own, pairs


def test_choices_are_best_or_nearly_and_never_worse_than_a_single_change() -> None:
    best = 0
    for seed in range(20):
        own, pairs = problem(seed)
        choice = tuple(choose(own, pairs))
        every = [
            total(one, own, pairs) for one in itertools.product(*(range(len(energies)) for energies in own))
        ]
        best += total(choice, own, pairs) < min(every) + 1e-9
        assert total(choice, own, pairs) < min(every) + 2.0
        for i, energies in enumerate(own):
            for k in range(len(energies)):
                changed = (*choice[:i], k, *choice[i + 1 :])
                assert total(choice, own, pairs) <= total(changed, own, pairs) + 1e-9
    assert best >= 17


def test_two_residues_change_together() -> None:
    """Each one's first candidate is best alone, but both clash; a change of either one alone costs 2."""
    own = [np.array([0.0, 2.0]), np.array([0.0, 0.5])]
    assert choose(own, {(0, 1): np.array([[9.0, 0.0], [0.0, 0.0]])}) == [0, 1]


def test_the_energy_of_a_residue_is_what_the_choice_would_lose_without_it() -> None:
    own, pairs = problem(0)
    choice = [0] * len(own)
    for i, energy in enumerate(energies_of_choice(choice, own, pairs)):
        without = {pair: table for pair, table in pairs.items() if i not in pair}
        others = [np.zeros(len(one)) if i == j else one for j, one in enumerate(own)]
        lost = total(tuple(choice), own, pairs) - total(tuple(choice), others, without)
        assert abs(energy - lost) < 1e-9


def test_nothing_to_choose() -> None:
    assert choose([], {}) == []
    assert choose([np.array([3.0])], {}) == [0]
