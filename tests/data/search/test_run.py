"""Each distinct chain is searched once in each place; what was finished is never searched again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fastfold.data.msa.find import load_alignments
from fastfold.data.search.engine import Found, Report, SearchPlan, SearchStage
from fastfold.data.search.store import SearchKey, SearchStore
from fastfold.data.targets import Target, target_from_sequence
from fastfold.errors import OutputError

TARGETS = [
    target_from_sequence("MKV", "one"),
    target_from_sequence("mkv", "two"),
    target_from_sequence("MKV:GGG", "pair"),
]


class Engine:
    """Finds each sequence and a made-up relative of it; stops with an error at one sequence."""

    def __init__(self, name: str = "uniref90", *, fails_at: str = "", version: int = 1) -> None:
        self.name, self.fails_at, self.version = name, fails_at, version
        self.searched: list[str] = []

    def key(self, store: SearchStore) -> SearchKey:
        return SearchKey(self.name, {"version": self.version})

    def cost(self, sequences: Sequence[str]) -> float:
        return float(sum(map(len, sequences)))

    def search(self, sequences: Sequence[str], report: Report) -> Iterator[Found]:
        for sequence in sequences:
            if sequence == self.fails_at:
                raise RuntimeError("killed")
            self.searched.append(sequence)
            report(SearchStage(len(sequence), 1e9))
            text = f">query\n{sequence}\n>r\n{sequence[::-1]}\n"
            yield Found(sequence, {f"{self.name}_hits.a3m": text.encode()}, {"hits": 1})


def run(targets: Sequence[Target], engines: Sequence[Engine], out: Path) -> tuple[list[str], float]:
    lines: list[str] = []
    done: list[float] = []
    plan = SearchPlan(targets, engines, out)
    cost = plan.cost
    plan.run(say=lines.append, on_step=lambda work, status, cost: done.append(cost), interval_s=0)
    assert sum(done) == cost
    return lines, cost


def test_a_sequence_is_searched_once_whatever_its_name(tmp_path: Path) -> None:
    engines = [Engine(), Engine("mgnify")]
    lines, cost = run(TARGETS, engines, tmp_path / "out")
    assert [engine.searched for engine in engines] == [["MKV", "GGG"]] * 2
    assert cost == 12.0
    assert lines[0].startswith("uniref90: 2 sequences searched in 0:00, ")
    for target in TARGETS:
        for chain, (unpaired, _) in zip(
            target.chains, load_alignments(tmp_path / "out", target), strict=True
        ):
            assert [msa.sequences for msa in unpaired] == [(chain.sequence, chain.sequence[::-1])] * 2
    again = Engine()
    assert run(TARGETS, [again], tmp_path / "out")[0] == ["uniref90: all 2 found before"]
    assert again.searched == []


def test_another_name_later_needs_no_search(tmp_path: Path) -> None:
    run(TARGETS[:1], [Engine()], tmp_path)
    engine = Engine()
    run([target_from_sequence("MKV", "late")], [engine], tmp_path)
    assert engine.searched == []
    assert (tmp_path / "late/uniref90_hits.a3m").samefile(tmp_path / "one/uniref90_hits.a3m")


def test_after_an_interruption_the_rest_is_searched(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run(TARGETS, [Engine(fails_at="GGG")], tmp_path)
    assert (tmp_path / "two/uniref90_hits.a3m").exists()  # in its place as soon as it was found
    engine = Engine()
    lines, cost = run(TARGETS, [engine], tmp_path)
    assert (engine.searched, cost) == (["GGG"], 3.0)
    assert lines[0].endswith(", 1 found before")


def test_a_new_version_is_searched_and_takes_the_place_of_the_old(tmp_path: Path) -> None:
    run(TARGETS[:1], [Engine()], tmp_path)
    engine = Engine(version=2)
    run(TARGETS[:1], [engine], tmp_path)
    assert engine.searched == ["MKV"]


def test_a_chain_with_an_alignment_is_not_searched_and_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one/uniref90_hits.sto").write_text("mine")
    (tmp_path / "pair_B.a3m").write_text(">q\nGGG\n")
    engine = Engine()
    run([TARGETS[0], TARGETS[2]], [engine], tmp_path)
    assert engine.searched == ["MKV"]
    assert (tmp_path / "one/uniref90_hits.sto").read_text() == "mine"
    assert not (tmp_path / "pair/B").exists()


def test_a_file_in_the_way_stops_everything_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "two/pdb70_hits.sto").write_text("mine")  # template hits, which are no alignment
    engine = Engine("pdb70")
    with pytest.raises(OutputError, match="not from a search"):
        run(TARGETS, [engine], tmp_path)
    assert engine.searched == []
    assert (tmp_path / "two/pdb70_hits.sto").read_text() == "mine"


def test_a_place_may_be_left_out_for_some_targets(tmp_path: Path) -> None:
    engine = Engine("uniprot")
    plan = SearchPlan(TARGETS, [engine], tmp_path, skip=lambda engine, target: not target.is_complex)
    plan.run(say=lambda line: None, on_step=lambda *_: None, interval_s=0)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("[!.]*/**/uniprot_hits.a3m"))
    assert found == ["pair/A/uniprot_hits.a3m", "pair/B/uniprot_hits.a3m"]
