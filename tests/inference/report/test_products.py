"""Tables of products become columns of the page's list; the head of the page tells what was run."""

from __future__ import annotations

from pathlib import Path

from fastfold.inference.report.about import RunFacts, rows_of_alignments
from fastfold.inference.report.products import product_columns


def test_mutants_and_designs_get_their_columns(tmp_path: Path) -> None:
    assert product_columns(tmp_path) == {}
    (tmp_path / "mutations.tsv").write_text(
        "mutations\tplddt\tdplddt\tdplddt_site\tdpae\tname\nA4G\t70\t-1.5\t-8.25\tnan\tT_A4G\n\t\t1\t\t\tother\nx\n"
    )
    assert product_columns(tmp_path) == {
        "T_A4G": {"mutation": "A4G", "dplddt": -1.5, "dplddt_site": -8.25},
        "other": {"dplddt": 1.0},
    }
    (tmp_path / "mutations.tsv").unlink()
    (tmp_path / "designs.tsv").write_text("name\tsequence\tloss\tfilters\trmsd\nd1\tMKV\t3.5\tpassed\t\nd2\n")
    assert product_columns(tmp_path) == {
        "d1": {"order": 1, "sequence": "MKV", "filters": "passed", "loss": 3.5},
        "d2": {"order": 2},
    }


def test_the_run_is_told_in_words() -> None:
    facts = RunFacts()
    config = {"source": "/home/me/proteins.fasta", "versions": {"fastfold": "0.1.0"}}
    for target, seed in (("a", 0), ("a", 1), ("b", 0)):
        facts.add(target, {"model": "mini", "seed": seed, "num_recycles": 3}, config)
    assert facts.lines(0) == ["proteins.fasta", "2 targets", "by mini, 2 seeds, 3 recycles", "FastFold 0.1.0"]
    assert "1 failed" in facts.lines(1)
    facts.add("c", {"model": "model_1_ptm", "seed": 0, "num_recycles": 1}, None)
    assert facts.lines(0)[1:3] == ["3 targets", "by mini, model_1_ptm, 2 seeds"]
    for number in range(4):
        facts.add("c", {"model": f"m{number}", "seed": 0}, [])
    assert facts.lines(0)[2] == "by mini, model_1_ptm, m0 and 3 more, 2 seeds"


def test_alignment_rows_are_counted_over_chains() -> None:
    assert rows_of_alignments({"alignment_rows": [[2, 3], [0, 1]]}) == 6
    assert rows_of_alignments({"alignment_rows": [[0, 0]]}) == 0
    for other in (None, {}, {"alignment_rows": 3}, {"alignment_rows": [[None]]}):
        assert rows_of_alignments(other) is None
