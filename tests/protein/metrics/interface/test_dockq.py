"""DockQ and lDDT of interfaces, against recorded numbers of the programs DockQ 2.1.3 and Biotite 1.6.0."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fastfold.protein.metrics.chain_mapping import chain_candidates
from fastfold.protein.metrics.compare import compare_structures
from fastfold.protein.metrics.interface.dockq import complex_dockq
from fastfold.protein.protein import Protein
from tests.helpers.complexes import FIRST, SECOND, cut, helix_chain, joined, perturbed, ring

PUBLISHED = json.loads(Path(__file__).with_name("published_dockq.json").read_text())


def complexes() -> dict[str, tuple[Protein, Protein]]:
    """Predictions and references by name. Their PDB files were scored by the published programs."""
    pair = [helix_chain(FIRST), helix_chain(SECOND, (8.5, 1, 2))]
    twins = [helix_chain(FIRST), helix_chain(FIRST, (0.5, 8.5, 3))]
    # No symmetry is exact, so that one mapping is the best.
    trimer = perturbed(ring(FIRST, 3, 5.5), 0.4)
    four = perturbed([*ring(FIRST, 2, 4.5), *ring(SECOND, 2, 5.0, 28.0)], 0.4)
    inside = slice(3, -4)
    cases = {
        "two chains": (perturbed(pair, 1.0), pair),
        "two chains, the longer one last": (perturbed(pair[::-1], 0.6), pair),
        "copies, reordered": (perturbed(twins, 0.8)[::-1], twins),
        "copies, far away": ([twins[0], *perturbed([twins[1]], 9.0)], twins),
        "a shorter prediction": ([cut(chain, inside) for chain in perturbed(twins, 0.7)], twins),
        "a reference with gaps": (
            perturbed(twins, 0.7),
            [cut(twins[0], np.r_[2:13, 18:29]), cut(twins[1], slice(0, 25))],
        ),
        "three copies, reordered": ([perturbed(trimer, 1.0)[i] for i in (1, 2, 0)], trimer),
        "a missing copy": ([perturbed(trimer, 1.0)[i] for i in (2, 1)], trimer),
        "two copies of two chains": ([perturbed(four, 0.5)[i] for i in (3, 0, 2, 1)], four),
    }
    return {name: (joined(prediction), joined(reference)) for name, (prediction, reference) in cases.items()}


COMPLEXES = complexes()


@pytest.mark.parametrize("name", COMPLEXES)
def test_dockq_equals_the_program(name: str) -> None:
    scores = compare_structures(*COMPLEXES[name])
    published = PUBLISHED[name]
    assert scores.dockq == pytest.approx(published["GlobalDockQ"], abs=1e-4)
    assert {"".join(one.chains) for one in scores.interfaces} == set(published["interfaces"])
    for one in scores.interfaces:
        found = {"DockQ": one.dockq, "iRMSD": one.irmsd, "LRMSD": one.lrmsd, "fnat": one.fnat, "F1": one.f1}
        assert found == pytest.approx(published["interfaces"]["".join(one.chains)], abs=1e-4)
    assert scores.dockq_mapping == published["mapping"]


@pytest.mark.parametrize("name", ["two chains", "copies, far away", "two copies of two chains"])
def test_lddt_of_interfaces_equals_biotite(name: str) -> None:
    """Its atoms have one name each, so that none is renamed."""
    scores = compare_structures(*COMPLEXES[name])
    assert scores.chain_mapping == scores.dockq_mapping
    assert scores.lddt_interface == pytest.approx(PUBLISHED[name]["interface lDDT"], abs=1e-4)


def test_a_perfect_complex() -> None:
    _, reference = COMPLEXES["two copies of two chains"]
    scores = compare_structures(reference, reference)
    assert scores.dockq == pytest.approx(1.0, abs=1e-6)
    assert scores.lddt_interface == pytest.approx(1.0)
    assert len(scores.interfaces) > 1
    for one in scores.interfaces:
        assert (one.dockq, one.fnat, one.f1, one.lddt) == pytest.approx((1.0, 1.0, 1.0, 1.0), abs=1e-6)


def test_lddt_of_an_interface_is_that_of_its_chains_alone() -> None:
    prediction, reference = COMPLEXES["two copies of two chains"]
    for one in compare_structures(prediction, reference).interfaces:
        ours, theirs = (
            cut(whole, np.r_[tuple(whole.chains["ABCD".index(name)] for name in names)])
            for whole, names in ((prediction, one.predicted_chains), (reference, one.chains))
        )
        alone = compare_structures(ours, theirs)
        assert alone.chain_mapping == dict(zip("AB", "AB", strict=True))
        assert alone.lddt_interface == pytest.approx(one.lddt)


def test_chains_that_do_not_touch_have_no_dockq() -> None:
    far = joined([helix_chain(FIRST), helix_chain(SECOND, (60, 0, 0))])
    scores = compare_structures(far, far)
    assert (scores.dockq, scores.lddt_interface, scores.interfaces) == (None, None, ())
    single = helix_chain(FIRST)
    assert compare_structures(single, single).dockq is None


def test_many_copies_are_exchanged_until_dockq_is_largest() -> None:
    """Eight copies have 40,320 mappings, which are not all tried."""
    reference = perturbed(ring(FIRST, 8, 12.0), 0.6)
    order = (3, 0, 7, 2, 6, 1, 5, 4)
    prediction, reference = joined([perturbed(reference, 0.3)[i] for i in order]), joined(reference)
    candidates = chain_candidates(prediction.sequences, reference.sequences)
    swapped = [(0, 0), (1, 3), *((place, chain) for place, chain in enumerate(order) if place > 1)]
    start = tuple(sorted(swapped, key=lambda pair: pair[1]))
    quality = complex_dockq(prediction, reference, candidates, start)
    assert dict(quality.mapping) == dict(enumerate(order))
