"""Chains with an alignment keep it and are not searched for, whatever is searched and whichever chains these are."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain as joined
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from fastfold.data.features.assembly import complex_lines
from fastfold.data.msa.find import load_alignments, target_rows
from fastfold.data.msa.msa import ChainMsas
from fastfold.data.search.colabfold.mmseqs import MmseqsSource
from fastfold.data.search.colabfold.msa_server import MsaServer, TicketServer
from fastfold.data.search.colabfold.source import Chains, ColabFoldSource
from fastfold.data.search.database import PAIRING
from fastfold.data.search.engine import Found, Report
from fastfold.data.search.settings import ColabFoldModes
from fastfold.data.search.store import FOLDER, SearchKey, SearchStore
from fastfold.data.targets import Target, target_from_sequence
from fastfold.errors import InputError
from fastfold.inference.alignment_search import AlignmentSearch
from fastfold.inference.workers.job import Task
from fastfold.inference.workers.search import EngineSearch, search_jobs
from tests.helpers.stand_in_mmseqs import install_mmseqs, make_databases
from tests.helpers.stand_in_msa_server import StandIn, msa_server

A, B, C = "MKVLAAGIT", "GSHMWLPEK", "AWLQERTYIH"
TARGETS = {
    "single": A,
    "homodimer": f"{A}:{A}",
    "dimer": f"{A}:{B}",
    "trimer": f"{A}:{B}:{A}",
    "three": f"{A}:{B}:{C}",
}
OF_SINGLE = (
    "{t}.a3m",
    "{t}.sto.gz",
    "{t}/mine.a3m",
    "{t}/msas/uniref90_hits.sto",
    "{t}/ur_hits.sto",
    "{t}/colabfold_hits.a3m",
)
OF_CHAIN = (
    "{t}_{c}.a3m",
    "{t}/{c}.sto.gz",
    "{t}/{c}/mine.a3m",
    "{t}/msas/{c}/uniref90_hits.sto",
    "{t}/{c}/ur_hits.sto",
    "{t}/{c}/colabfold_hits.a3m",
)
"""Places of an alignment of the user, the last two named like results of searches."""

CASES = [
    *((name, False) for name in TARGETS if name != "three"),
    pytest.param("three", False, marks=pytest.mark.long),
    *(pytest.param(name, True, marks=pytest.mark.long) for name in ("single", "dimer")),
]
"""Targets, and whether alignments are tried in all places."""


@dataclass
class Engine:
    """Finds a row for each sequence, and notes what it is asked for."""

    name: str
    asked: list[str] = field(default_factory=list)

    def key(self, store: SearchStore) -> SearchKey:
        return SearchKey(self.name, {"version": 1})

    def cost(self, sequences: Sequence[str]) -> float:
        return float(len(sequences))

    def search(self, sequences: Sequence[str], report: Report) -> Iterator[Found]:
        for sequence in sequences:
            self.asked.append(sequence)
            hit = "tr|A0A000|A0A000_HUMAN" if self.name == PAIRING else self.name
            text = f"# STOCKHOLM 1.0\nquery {sequence}\n{hit} {sequence[::-1]}\n//\n"
            yield Found(sequence, {f"{self.name}_hits.sto": text.encode()}, {})


class Noted(ColabFoldSource):
    """Another source, which notes what it is asked for."""

    def __init__(self, source: ColabFoldSource) -> None:
        self._source, self.modes = source, source.modes
        self.alone: list[str] = []
        self.together: list[str] = []

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._source.settings

    def announce(self, *given: Any) -> None:
        return

    def unpaired(self, sequences: Sequence[str]) -> Iterator[Any]:
        self.alone += sequences
        return self._source.unpaired(sequences)

    def paired(self, complexes: Sequence[Chains]) -> Iterator[Any]:
        self.together += joined.from_iterable(complexes)
        return self._source.paired(complexes)


@dataclass
class Search:
    """A way to search: by databases, in a screen, by a server or by MMseqs2."""

    run: Callable[[Sequence[Target], Path], list[InputError]]  #: Search for targets into a folder
    alone: list[str]  #: Sequences that were searched for
    together: list[str]  #: Sequences that were searched for to pair them
    by_colabfold: bool
    is_slow: bool = False

    def layouts(self, in_all_places: bool) -> Sequence[int]:
        """The places of alignments to try for a target: some, or all of them where that is fast."""
        if self.is_slow:
            return (0,)
        return range(len(OF_CHAIN)) if in_all_places else (0, 2)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["databases", "screen", "server", pytest.param("mmseqs", marks=pytest.mark.long)])
def search(
    request: pytest.FixtureRequest, opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Search:
    if request.param in ("databases", "screen"):
        plain, pairing = Engine("ur"), Engine(PAIRING)

        def by_databases(targets: Sequence[Target], out: Path) -> list[InputError]:
            return AlignmentSearch((plain, pairing), out).run(targets)[1]

        def in_a_screen(targets: Sequence[Target], out: Path) -> list[InputError]:
            engines = EngineSearch((plain, pairing), out)
            for job in search_jobs(targets, [1.0] * len(targets), out)[0]:
                assert engines(job.id, Task(job, None)).status == "done"
            errors = []
            for target in targets:
                try:
                    engines.publish(target)
                except InputError as error:
                    errors.append(error)
            return errors

        run = by_databases if request.param == "databases" else in_a_screen
        return Search(run, plain.asked, pairing.asked, False)
    if request.param == "server":
        server = opened.enter_context(msa_server(StandIn()))
        source = Noted(MsaServer(TicketServer(server.url, pause=lambda seconds: None)))
    else:
        install_mmseqs(tmp_path / "bin", monkeypatch)
        source = Noted(
            MmseqsSource(
                make_databases(tmp_path / "db"),
                modes=ColabFoldModes("mmseqs2_uniref"),
                threads=1,
                temporary=tmp_path,
            )
        )
    return Search(
        lambda targets, out: AlignmentSearch(source, out).run(targets)[1],
        source.alone,
        source.together,
        by_colabfold=True,
        is_slow=request.param == "mmseqs",
    )


def rows_of(sequence: str) -> tuple[str, ...]:
    """The rows of the user's alignment of a sequence."""
    return (sequence, *(f"{sequence[:k]}-{sequence[k + 1 :]}" for k in range(3)))


def put(path: Path, sequence: str, rows: Sequence[str] | None = None) -> bytes:
    """Write an alignment in the format of its name; return the content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = rows_of(sequence) if rows is None else rows
    text = "".join(f">r{k}\n{row}\n" for k, row in enumerate(rows))
    if ".sto" in path.name:
        text = "# STOCKHOLM 1.0\n" + "".join(f"r{k} {row}\n" for k, row in enumerate(rows)) + "//\n"
    content = gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode()
    path.write_bytes(content)
    return content


def give(out: Path, target: Target, sequences: Sequence[str], layout: int) -> dict[Path, bytes]:
    """Write the user's alignments of some sequences, at the places of a layout; return the contents."""
    files = {}
    out.mkdir(parents=True, exist_ok=True)
    for sequence in sequences:
        chain = next(chain for chain in reversed(target.chains) if chain.sequence == sequence)
        form = OF_CHAIN[layout] if target.is_complex else OF_SINGLE[layout]
        path = out / form.format(t=target.name, c=chain.id)
        files[path] = put(path, sequence)
    return files


def texts(alignments: Sequence[ChainMsas]) -> list[list[list[str]]]:
    """The rows of each chain: its own, and paired ones."""
    return [[[row for msa in kind for row in msa.sequences] for kind in chain] for chain in alignments]


def visible(out: Path) -> dict[str, bytes]:
    """Files of a folder of alignments outside of the store."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and FOLDER not in path.parts
    }


@pytest.mark.parametrize(("name", "in_all_places"), CASES)
def test_chains_without_an_alignment_are_searched_for_alone(
    search: Search, tmp_path: Path, name: str, in_all_places: bool
) -> None:
    """Every subset of the chains; given rows are the user's, others those of a search for this chain alone."""
    target = target_from_sequence(TARGETS[name], name)
    distinct = list(dict.fromkeys(chain.sequence for chain in target.chains))
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    search.run([target_from_sequence(sequence, sequence) for sequence in distinct], alone)
    search.run([target], whole)
    found = {
        sequence: texts(load_alignments(alone, target_from_sequence(sequence, sequence)))[0][0]
        for sequence in distinct
    }
    every = texts(load_alignments(whole, target))
    pairs = {chain.sequence: paired for chain, (_, paired) in zip(target.chains, every, strict=True)}
    subsets = list(joined.from_iterable(combinations(distinct, k) for k in range(len(distinct) + 1)))
    for layout, given in product(search.layouts(in_all_places), subsets):
        out = tmp_path / f"msa{layout}" / "".join(given)
        files = give(out, target, given, layout)
        search.alone.clear()
        search.together.clear()
        assert search.run([target], out) == []
        missing = [sequence for sequence in distinct if sequence not in given]
        has_pairing = len(distinct) > 1 and (bool(missing) or not search.by_colabfold)
        assert search.alone == missing
        assert search.together == (distinct if has_pairing else [])
        alignments = load_alignments(out, target)
        lines = complex_lines(target.chains, alignments)  # the chains' rows fit together
        assert bool(lines.number_paired) == (has_pairing and any(len(rows) > 1 for rows in pairs.values()))
        rows = texts(alignments)
        for chain, (own, paired) in zip(target.chains, rows, strict=True):
            if chain.sequence in given:
                assert own == list(rows_of(chain.sequence))
            elif given or not search.by_colabfold:
                assert own == found[chain.sequence]
            else:
                assert rows == every
            assert paired == (pairs[chain.sequence] if has_pairing else [])
        used = target_rows(out, target).files
        for path in files:
            assert any(path.relative_to(out).as_posix() in names for names in used.values())
        seen = visible(out)
        assert search.run([target], out) == []
        assert (search.alone, search.together) == (missing, distinct if has_pairing else [])
        assert texts(load_alignments(out, target)) == rows
        assert visible(out) == seen
        assert {path: path.read_bytes() for path in files} == files


@pytest.mark.parametrize(("name", "in_all_places"), CASES)
def test_results_of_earlier_searches_never_come_before_a_file_of_the_user(
    search: Search, tmp_path: Path, name: str, in_all_places: bool
) -> None:
    """A file that is added to the results of a search, or to those of a version that searched for every chain."""
    target = target_from_sequence(TARGETS[name], name)
    distinct = list(dict.fromkeys(chain.sequence for chain in target.chains))
    for layout in search.layouts(in_all_places):
        if layout > 3:  # would replace a result
            continue
        out = tmp_path / f"msa{layout}"
        search.run([target], out)
        before = texts(load_alignments(out, target))
        files = give(out, target, distinct[:1], layout)
        search.alone.clear()
        for run in range(3):
            rows = texts(load_alignments(out, target))
            for chain, (own, paired), (earlier, pairs) in zip(target.chains, rows, before, strict=True):
                if chain.sequence != distinct[0]:
                    assert set(own) >= set(earlier) - set(pairs)
                elif "mine" in str(*files):  # among the results, which are read as well
                    assert set(own) >= set(rows_of(chain.sequence))
                else:
                    assert own == list(rows_of(chain.sequence))
                assert paired == pairs
            if run < 2:
                assert search.run([target], out) == []
        assert search.alone == []
        assert {path: path.read_bytes() for path in files} == files


def test_an_alignment_of_the_whole_complex_serves_all_of_its_chains(search: Search, tmp_path: Path) -> None:
    target = target_from_sequence(f"{A}:{B}", "dimer")
    whole = tmp_path / "dimer.a3m"
    gap = "-" * len(A)
    whole.write_text(f"#9,9\t1,1\n>1\t2\n{A}{B}\n>a\n{A[:-1]}-{gap}\n>b\n{gap}-{B[1:]}\n")
    content = whole.read_bytes()
    assert search.run([target], tmp_path) == []
    assert search.alone == search.together == []
    expected = [[[f"{A[:-1]}-"], [A]], [[f"-{B[1:]}"], [B]]]
    assert texts(load_alignments(tmp_path, target)) == expected
    files = give(tmp_path, target, [B], 0)  # together with an alignment of one chain, which comes first
    assert search.run([target], tmp_path) == []
    assert search.alone == []
    expected[1][0] = list(rows_of(B))
    assert texts(load_alignments(tmp_path, target)) == expected
    assert whole.read_bytes() == content
    assert {path: path.read_bytes() for path in files} == files


def test_an_alignment_of_the_query_alone_is_one(search: Search, tmp_path: Path) -> None:
    target = target_from_sequence(f"{A}:{B}", "dimer")
    content = put(tmp_path / "dimer_A.a3m", A, [A])
    search.run([target], tmp_path)
    assert search.alone == [B]
    assert texts(load_alignments(tmp_path, target))[0][0] == [A]
    assert (tmp_path / "dimer_A.a3m").read_bytes() == content


@pytest.mark.parametrize("content", [b"", b">q\nMK\n", b"\x1f\x8b\x08", None, b"# STOCKHOLM 1.0\n"])
def test_a_file_that_cannot_be_read_is_an_error_and_no_search(
    search: Search, tmp_path: Path, content: bytes | None
) -> None:
    """Empty, of another sequence, damaged, a link to nowhere, in another format; other targets are searched for."""
    bad = target_from_sequence(f"{A}:{B}", "bad")
    path = tmp_path / "bad_A.a3m"
    if content is None:
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.write_bytes(content)
    errors = search.run([bad, target_from_sequence(C, "good")], tmp_path)
    assert search.alone == [C]
    assert load_alignments(tmp_path, target_from_sequence(C, "good"))[0][0]
    assert [error.path for error in errors] == [path]
    with pytest.raises(InputError, match="bad_A"):
        load_alignments(tmp_path, bad)


def test_an_empty_folder_is_filled(search: Search, tmp_path: Path) -> None:
    target = target_from_sequence(f"{A}:{B}", "dimer")
    put(tmp_path / "dimer_A.a3m", A)
    (tmp_path / "dimer" / "B").mkdir(parents=True)
    search.run([target], tmp_path)
    (own, _) = load_alignments(tmp_path, target)[1]
    assert (search.alone, len(own)) == ([B], 1)


def test_the_alignment_of_a_cut_chain_is_that_of_its_protein(search: Search, tmp_path: Path) -> None:
    whole = target_from_sequence(f"{A}:{B}", "cut")
    first = replace(whole.chains[0], sequence=A[2:6], whole=A, regions=((3, 6),))
    target = replace(whole, chains=(first, whole.chains[1]))
    put(tmp_path / "cut_A.a3m", A)
    search.run([target], tmp_path)
    assert search.alone == [B]
    rows = target_rows(tmp_path, target)
    assert texts(rows.chains)[0][0] == list(rows_of(A))
    assert rows.files["A"][0] == "cut_A.a3m"


def test_a_sequence_that_one_target_has_is_searched_for_once_for_the_others(
    search: Search, tmp_path: Path
) -> None:
    targets = [
        target_from_sequence(text, f"t{k}") for k, text in enumerate((A, f"{A}:{B}", f"{B}:{A}", f"{B}:{C}"))
    ]
    put(tmp_path / "t0.a3m", A)
    put(tmp_path / "t1_A.a3m", A)
    put(tmp_path / "t2_B.a3m", A)
    search.run(targets, tmp_path)
    assert sorted(search.alone) == sorted([B, C])


def test_a_monomer_of_the_name_of_a_chain_is_another_target(search: Search, tmp_path: Path) -> None:
    """Results for ``dimer_A`` are at a place of the chain A of ``dimer``, whose own results come first."""
    targets = [target_from_sequence(C, "dimer_A"), target_from_sequence(f"{A}:{B}", "dimer")]
    for _ in range(2):
        search.run(targets, tmp_path)
        assert sorted(search.alone) == sorted([A, B, C])
        assert all(own for own, _ in texts(load_alignments(tmp_path, targets[1])))


def test_results_of_another_kind_of_search_are_used(search: Search, tmp_path: Path) -> None:
    target = target_from_sequence(f"{A}:{B}", "dimer")
    if search.by_colabfold:
        AlignmentSearch((Engine("mgnify"),), tmp_path).run([target])
    else:
        with msa_server(StandIn()) as server:
            AlignmentSearch(MsaServer(TicketServer(server.url, pause=lambda seconds: None)), tmp_path).run(
                [target]
            )
    before = texts(load_alignments(tmp_path, target))
    search.run([target], tmp_path)
    assert search.alone == []
    assert [own for own, _ in texts(load_alignments(tmp_path, target))] == [own for own, _ in before]


def test_a_line_names_the_files(
    search: Search, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if "screen" in request.node.name:
        pytest.skip("a screen prints its own lines")
    target = target_from_sequence(f"{A}:{B}:{A}", "t")
    path = tmp_path / "t_A.a3m"
    put(path, A)
    search.run([target], tmp_path)
    line = f"t: chains A, C use {path}; searching chain B, pairing all chains\n"
    assert line in capsys.readouterr().err
    put(tmp_path / "x.a3m", A)
    search.run([target_from_sequence(A, "x")], tmp_path)
    assert f"x: uses {tmp_path / 'x.a3m'}; not searched\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "engines", "files", "line"),
    [
        ("hetero", ("ur", PAIRING), "A", "chain A uses {}; searching chain B, pairing all chains"),
        ("hetero", ("ur",), "A", "chain A uses {}; searching chain B"),
        ("hetero", (PAIRING,), "AB", "chain A uses {}, chain B uses {}; not searched, pairing all chains"),
        ("homo", ("ur", PAIRING), "A", "chains A, B use {}; not searched"),
        ("hetero", ("ur", PAIRING), "", ""),
    ],
)
def test_a_line_tells_which_files_replace_a_search(
    tmp_path: Path, target: str, engines: tuple[str, ...], files: str, line: str
) -> None:
    sequences = {"hetero": f"{A}:{B}", "homo": f"{A}:{A}"}[target]
    paths = []
    for letter in files:
        paths.append(tmp_path / f"t_{letter}.a3m")
        paths[-1].write_text(f">query\n{A if letter == 'A' else B}\n")
    search = AlignmentSearch([Engine(name) for name in engines], tmp_path)  # type: ignore[list-item]
    found = search.line(target_from_sequence(sequences, name="t"))
    assert found == (f"t: {line.format(*paths)}" if line else "")
