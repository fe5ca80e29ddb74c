"""Limits of composition and net charge: penalties, allowed mutations, and messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastfold.errors import ConfigError
from fastfold.evoformer.inputs import Relaxation, encode_sequence
from fastfold.evoformer.model import AlphaFold
from fastfold.products.design.config import DesignConfig, parse_contacts
from fastfold.products.design.evaluate import Evaluator
from fastfold.products.design.limits import (
    Limits,
    Share,
    count_residues,
    limit_weights,
    net_charge,
    parse_shares,
)
from fastfold.products.design.optimize import final_parameters, first_state, optimize
from fastfold.products.design.tasks.protocols import hallucination
from fastfold.protein import residue_constants as rc


def test_limits_are_read() -> None:
    assert parse_shares("KE<=0.3, W>=0.02,") == (Share("KE", high=0.3), Share("W", low=0.02))
    assert list(map(str, parse_shares("KE<=0.3,W>=0.02"))) == ["KE<=0.3", "W>=0.02"]
    for wrong in ("K<0.3", "K<=2", "B<=0.1", "k<=0.1", "<=0.1"):
        with pytest.raises(ConfigError, match="expected a limit such as"):
            parse_shares(wrong)
    with pytest.raises(ConfigError, match="charge: expected a smallest and a largest"):
        Limits(charge=(2.0, -2.0))


def test_charges_are_those_of_side_chains() -> None:
    assert net_charge("DEKRH") == 0
    assert net_charge("DEHHA") == -2
    assert net_charge("KKR") == 3


def test_losses_are_the_distance_from_the_limits() -> None:
    limits = Limits((Share("K", high=0.25), Share("W", low=0.25)), (-1.0, 1.0))
    assert limits.losses(encode_sequence("KAWA")) == {
        "composition": torch.tensor(0.0),
        "charge": torch.tensor(0.0),
    }
    found = limits.losses(encode_sequence("KKKA"))
    assert found["composition"].item() == pytest.approx(0.5 + 0.25)
    assert found["charge"].item() == pytest.approx(2 / 4)
    assert limits.losses(encode_sequence("DDDW"))["charge"].item() == pytest.approx(2 / 4)
    assert limit_weights(limits).keys() == {"composition", "charge"}
    assert limit_weights(Limits()) == {}


def test_violations_count_residues() -> None:
    limits = Limits((Share("A", high=0.3), Share("W", low=0.15)), (0.0, 1.0))
    assert limits.violation(count_residues("AAAGGGGGWW")) == 0
    assert limits.violation(count_residues("AAAAGGGGGG")) == 1 + 2
    assert limits.violation(count_residues("AAAGGGKDDD"[:8] + "WW")) == 0
    assert limits.broken("AAAAAGGGWD") == [
        "A 0.50, not A<=0.3",
        "W 0.10, not W>=0.15",
        "charge -1, not 0 to 1",
    ]


def test_mutations_keep_limits_or_mend_them() -> None:
    limits = Limits((Share("A", high=0.3),))
    a, g, w = (rc.restype_order[letter] for letter in "AGW")
    at_the_limit = limits.mutations("AAAGGGGGGG")
    assert not at_the_limit[g, a]
    assert at_the_limit[a, g]
    assert at_the_limit[g, w]
    above = limits.mutations("AAAAAGGGGG")
    assert above[a, g]
    assert not above[g, w]
    assert Limits().mutations("AAAA").all()


def test_mutations_of_a_design_keep_the_limits(monomer: AlphaFold) -> None:
    """From outside the limits, each round mends one residue; the best residues are the ones inside."""
    config = DesignConfig(
        soft_steps=0,
        temperature_steps=0,
        hard_steps=1,
        mutation_steps=6,
        tries=1,
        charge=(0.0, 0.0),
        weights={},
    )
    made = Evaluator(hallucination(10), [monomer], {"con": 1.0}, limits=config.limits)
    state = first_state(made, config, 0)
    state.parameters = encode_sequence("KKKAAAAAAA")
    optimize(made, config, 0, state)
    charges = [abs(net_charge(row["sequence"])) for row in state.log]
    assert charges[0] == 3
    assert np.diff(charges).max() <= 0
    assert charges[-1] == 0
    assert state.best_violation == 0
    sequence = final_parameters(made, state)
    assert net_charge(sequence) == 0


def test_the_penalty_has_a_gradient(monomer: AlphaFold) -> None:
    limits = Limits((Share("A", high=0.1),))
    made = Evaluator(hallucination(10), [monomer], {"composition": 1.0}, limits=limits)
    parameters = encode_sequence("AAAAAAAAGG")
    found = made(parameters, Relaxation(soft=1.0))
    assert found.gradient is not None
    assert (found.gradient[:, rc.restype_order["A"]] > 0).all()
    with pytest.raises(ConfigError, match="has no loss 'charge'"):
        Evaluator(hallucination(10), [monomer], {"charge": 1.0}, limits=limits)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num=1", {"num": 1}),
        ("num_pos=1", {"num_pos": 1}),
        ("cutoff=2.01", {"cutoff": 2.01}),
        ("seqsep=0", {"seqsep": 0}),
        ("", {}),
        (" num=2 , cutoff=14,", {"num": 2, "cutoff": 14.0}),
    ],
)
def test_smallest_settings_of_contacts_are_kept(text: str, expected: dict[str, float]) -> None:
    assert parse_contacts("con", text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num=0", "num: expected a whole number from 1, found 0"),
        ("num_pos=0", "num_pos: expected a whole number from 1, found 0"),
        ("cutoff=2", "cutoff: expected a distance in Å above 2, found 2"),
        ("cutoff=inf", "cutoff: expected a distance in Å above 2, found inf"),
        ("cutoff=nan", "cutoff: expected a distance in Å above 2, found nan"),
        ("seqsep=-1", "seqsep: expected a whole number from 0, found -1"),
        ("number=1", "expected settings such as num=2,cutoff=14"),
        ("num=1_0", "expected settings such as num=2,cutoff=14"),
        ("num=x", "expected settings such as num=2,cutoff=14"),
        ("num", "expected settings such as num=2,cutoff=14"),
    ],
)
def test_smaller_settings_of_contacts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^con: {message}"):
        parse_contacts("con", text)
