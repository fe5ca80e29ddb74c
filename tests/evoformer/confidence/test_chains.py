"""Confidences of chains equal ColabFold's and AlphaFold's, in blocks of rows as in one piece."""

from __future__ import annotations

import itertools

import pytest
import torch

from fastfold.evoformer.confidence import chain_confidence, predicted_aligned_error, predicted_tm_score
from fastfold.evoformer.confidence.scores import contact_probability
from fastfold.evoformer.execution import ExecutionPolicy, LazyRows
from tests.helpers.interface_oracles import CASES, InterfaceCase

LETTERS = "ABCDEFGH"
EDGES = torch.linspace(2.3125, 21.6875, 63)


def lazy(logits: torch.Tensor, rows: int) -> LazyRows:
    """The same logits, given a few rows at a time and never whole."""

    def part(index: slice) -> torch.Tensor:
        assert index.stop - index.start <= rows
        return logits[index]

    size = logits.shape[-2] * logits.shape[-1]
    return LazyRows(part, tuple(logits.shape), ExecutionPolicy(block_elements=rows * size))


def confidence_of(case: InterfaceCase, **options: float) -> dict[str, torch.Tensor]:
    return chain_confidence(
        torch.from_numpy(case.logits("pae")),
        torch.from_numpy(case.inputs["pae_breaks"]),
        torch.from_numpy(case.inputs["asym_id"]),
        distogram=torch.from_numpy(case.logits("distogram")),
        bin_edges=EDGES,
        **options,
    )


@pytest.mark.parametrize("name", CASES)
def test_scores_are_colabfolds(name: str) -> None:
    case = InterfaceCase(name)
    recorded = case.expected["colabfold_extra_ptm"]["float32"]
    near = {"rel": 0, "abs": 2e-6}
    for key, printed_as, options in (
        ("actifptm_probs", "use_probs_extra=True", {}),
        ("actifptm_contacts", "use_probs_extra=False", {"contact_threshold": 0.6}),
    ):
        found = confidence_of(case, **options)
        printed = recorded[printed_as]
        for i, j in itertools.combinations(range(len(case.letters)), 2):
            pair = f"{LETTERS[i]}-{LETTERS[j]}"
            for matrix in (found["chain_pair_actifptm"], found["chain_pair_actifptm"].T):
                assert float(matrix[i, j]) == pytest.approx(recorded["unrounded"][key][pair], **near)
            iptm = float(found["chain_pair_iptm"][j, i])
            assert iptm == pytest.approx(recorded["unrounded"]["pairwise_iptm"][pair], **near)
            assert round(iptm, 3) == printed["pairwise_iptm"][pair]
        ptm = {LETTERS[i]: float(x) for i, x in enumerate(found["chain_ptm"])}
        assert ptm == pytest.approx(printed["per_chain_ptm"], rel=0, abs=5.1e-4)
        assert float(found["actifptm"]) == pytest.approx(printed["actifptm"], rel=0, abs=5.1e-4)
    whole = confidence_of(case)["actifptm"]
    assert float(whole) == pytest.approx(recorded["unrounded"]["actifptm_probs_whole"], **near)
    # What a run of ColabFold in float16 prints.
    half = case.expected["colabfold_extra_ptm"]["float16"]["use_probs_extra=True"]
    assert float(whole) == pytest.approx(half["actifptm"], rel=0, abs=2e-3)


@pytest.mark.parametrize("name", CASES)
def test_scores_of_the_complex_are_alphafolds(name: str) -> None:
    case = InterfaceCase(name)
    logits, breaks = torch.from_numpy(case.logits("pae")), torch.from_numpy(case.inputs["pae_breaks"])
    asym_id = torch.from_numpy(case.inputs["asym_id"])
    for recorded in (case.expected["alphafold_2.3.2"], case.expected["colabfold_2.3.20_model"]):
        assert float(predicted_tm_score(logits, breaks)) == pytest.approx(recorded["ptm"], rel=0, abs=2e-6)
        iptm = float(predicted_tm_score(logits, breaks, asym_id=asym_id))
        assert iptm == pytest.approx(recorded["iptm"], rel=0, abs=2e-6)
    error, largest = predicted_aligned_error(logits, breaks)
    assert float(largest) == case.expected["alphafold_2.3.2"]["max_predicted_aligned_error"]
    if not name.startswith("synthetic_"):
        expected = torch.from_numpy(case.arrays["pae_alphafold"])
        torch.testing.assert_close(error, expected, rtol=0, atol=1e-4)
        expected = torch.from_numpy(case.arrays["contact_probability_8A"])
        found = contact_probability(torch.from_numpy(case.logits("distogram")), EDGES)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("threshold", [None, 0.02])
def test_blocks_of_rows_give_the_same(threshold: float | None) -> None:
    """Blocks that begin and end within chains, and chains whose numbers do not start at 0."""
    generator = torch.Generator().manual_seed(0)
    asym_id = torch.tensor([3] * 11 + [5] * 2 + [8] * 24)
    logits = 2 * torch.randn(37, 37, 16, generator=generator)
    distogram = 2 * torch.randn(37, 37, 64, generator=generator)
    distogram = distogram + distogram.transpose(0, 1)
    breaks = torch.linspace(0, 31, 15)
    given = {"bin_edges": EDGES, "contact_threshold": threshold}
    whole = chain_confidence(logits, breaks, asym_id, distogram=distogram, **given)
    for rows in (1, 5, 12):
        found = chain_confidence(
            lazy(logits, rows), breaks, asym_id, distogram=lazy(distogram, rows), **given
        )
        assert found.keys() == whole.keys()
        for key, value in whole.items():
            torch.testing.assert_close(found[key], value, msg=key)
    for chain, ptm in zip((3, 5, 8), whole["chain_ptm"], strict=True):
        own = asym_id == chain
        torch.testing.assert_close(ptm, predicted_tm_score(logits[own][:, own], breaks))


def test_two_chains_have_the_iptm_of_the_complex_and_without_a_distogram_no_actifptm() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, breaks = torch.randn(50, 50, 16, generator=generator), torch.linspace(0, 31, 15)
    asym_id = torch.tensor([1] * 20 + [2] * 30)
    found = chain_confidence(logits, breaks, asym_id)
    assert found.keys() == {"chain_ptm", "chain_pair_iptm"}
    iptm = predicted_tm_score(logits, breaks, asym_id=asym_id)
    torch.testing.assert_close(found["chain_pair_iptm"], iptm * (1 - torch.eye(2)))
