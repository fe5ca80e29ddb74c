"""ColabFold's modes decide what is asked and which rows a complex gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.data.msa.find import load_alignments
from fastfold.data.search.colabfold.msa_server import MsaServer, TicketServer
from fastfold.data.search.colabfold.source import search_colabfold
from fastfold.data.search.settings import ColabFoldModes, select_rows
from fastfold.data.targets import target_from_sequence
from tests.helpers.stand_in_msa_server import StandIn, msa_server

A, B = "MKVLAAGIT", "GSHMWLPEK"


@pytest.mark.parametrize(
    ("modes", "queries", "rows"),
    [
        (ColabFoldModes(), [("msa", "env"), ("msa", "env"), ("pair", "pairgreedy")], ([7, 8], [3, 3])),
        (
            ColabFoldModes("mmseqs2_uniref"),
            [("msa", "all"), ("msa", "all"), ("pair", "pairgreedy")],
            ([4, 5], [3, 3]),
        ),
        (
            ColabFoldModes("mmseqs2_uniref_env_envpair", pair_strategy="complete"),
            [("msa", "env"), ("msa", "env"), ("pair", "paircomplete-env")],
            ([7, 8], [3, 3]),
        ),
        (ColabFoldModes(pair_mode="unpaired"), [("msa", "env"), ("msa", "env")], ([7, 7], [1, 1])),
        (ColabFoldModes(pair_mode="paired"), [("pair", "pairgreedy")], ([0, 1], [3, 3])),
    ],
)
def test_modes_decide_queries_and_rows(
    tmp_path: Path, modes: ColabFoldModes, queries: list[tuple[str, str]], rows: tuple[list[int], list[int]]
) -> None:
    """A complex of two chains; the stand-in's third pair has no residue of the first chain."""
    target, stand_in = target_from_sequence(f"{A}:{B}", "dimer"), StandIn()
    with msa_server(stand_in) as server:
        client = MsaServer(TicketServer(server.url, timeout_s=5), modes=modes)
        search_colabfold([target], client, tmp_path)
    assert [query[:2] for query in stand_in.queries] == queries
    alignments = load_alignments(tmp_path, target)
    counts = [[sum(len(msa.sequences) for msa in kind) for kind in chain] for chain in alignments]
    assert ([own for own, _ in counts], [paired for _, paired in counts]) == rows


def test_copies_of_one_chain_have_nothing_to_pair(tmp_path: Path) -> None:
    target, stand_in = target_from_sequence(f"{A}:{A}", "homo"), StandIn()
    with msa_server(stand_in) as server:
        client = MsaServer(TicketServer(server.url, timeout_s=5), modes=ColabFoldModes(pair_mode="paired"))
        search_colabfold([target], client, tmp_path)
    assert stand_in.queries == []
    first, second = load_alignments(tmp_path, target)
    assert first == second
    assert [msa.sequences for kind in first for msa in kind] == [(A,)]


def test_rows_of_any_alignment_are_selected(tmp_path: Path) -> None:
    target = target_from_sequence(f"{A}:{B}", "dimer")
    with msa_server(StandIn()) as server:
        search_colabfold([target], MsaServer(TicketServer(server.url, timeout_s=5)), tmp_path)
    both = load_alignments(tmp_path, target)
    unpaired, paired = select_rows(both, "unpaired"), select_rows(both, "paired")
    assert [own for own, _ in unpaired] == [own for own, _ in both]
    assert [[msa.sequences for msa in pairs] for _, pairs in unpaired] == [[(A,)], [(B,)]]
    assert paired == [([], pairs) for _, pairs in both]
    assert select_rows(both, "unpaired_paired") == both
