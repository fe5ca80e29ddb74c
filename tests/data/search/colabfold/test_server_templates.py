"""Template hits of an MSA server become templates, and their files are not trusted."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.data.msa.find import load_alignments
from fastfold.data.search.colabfold.msa_server import MsaServer, TicketServer, _hit_names
from fastfold.data.search.colabfold.server_templates import check_templates, find_server_templates
from fastfold.data.search.colabfold.source import search_colabfold
from fastfold.data.search.settings import ColabFoldModes
from fastfold.data.targets import target_from_sequence
from fastfold.data.templates import source
from fastfold.data.templates.options import TemplateOptions
from fastfold.data.templates.source import TemplateFinder
from fastfold.errors import ConfigError, InputError
from tests.helpers.hh_suite import needs_hhsearch, profile_files
from tests.helpers.loopback import Request
from tests.helpers.stand_in_msa_server import StandIn, msa_server, tar_gz
from tests.helpers.template_files import FAMILY, HOMOLOGUE, QUERY, entry, hhr

TABLE = b"101\t1abc_A\t0.8\n101\t../../x\t0.8\n101\t2abc_A\t0.8\n101\t1abc_A\t0.7\n"
EMPTY = {f"pdb70_{kind}.ff{part}": b"" for kind in ("a3m", "hhm") for part in ("data", "index")}
ENTRIES = {"1abc.cif": entry({"A": HOMOLOGUE}).encode(), "2abc.cif": entry({"A": FAMILY[2]}).encode()}


def search(archive: bytes, out: Path, sequence: str = QUERY) -> list[Request]:
    """Search with templates; return what the server was asked."""
    stand_in = StandIn(extra={"pdb70.m8": TABLE}, results={"template": archive})
    with msa_server(stand_in) as server:
        client = MsaServer(TicketServer(server.url, timeout_s=5), modes=ColabFoldModes(templates=True))
        search_colabfold([target_from_sequence(sequence, "t")], client, out)
        return server.requests


def test_hits_are_fetched_and_aligned_by_hhsearch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = search(tar_gz({**EMPTY, **ENTRIES, "evil.sh": b"#"}), tmp_path)
    assert requests[-1].path == "/template/1abc_A,2abc_A"
    target = target_from_sequence(QUERY, "t")
    (path,) = find_server_templates(tmp_path, target).values()
    assert path == tmp_path / "t" / "colabfold_templates_A.tar.gz"
    unpacked = []

    def hhsearch(msa: object, databases: list[Path]) -> str:
        unpacked.extend(sorted(path.name for path in databases[0].parent.iterdir()))
        return hhr([("1ABC_A", QUERY, HOMOLOGUE, 30.0), ("2ABC_A", QUERY, FAMILY[2], 40.0)])

    monkeypatch.setattr(source, "hhsearch", hhsearch)
    monkeypatch.setattr(source, "find_program", lambda name: "hhsearch")
    finder = TemplateFinder(TemplateOptions(server=True))
    (found,) = finder.find(target, load_alignments(tmp_path, target), tmp_path)
    assert [template.name for template in found.templates] == ["2abc_A", "1abc_A"]
    assert found.sources == ("colabfold_templates_A.tar.gz",)
    assert "evil.sh" not in unpacked
    assert {"pdb70_cs219.ffdata", "1abc.cif"} < set(unpacked)


def test_chains_of_a_complex_keep_their_own_hits(tmp_path: Path) -> None:
    search(tar_gz(EMPTY), tmp_path, f"{QUERY}:{HOMOLOGUE}")
    found = find_server_templates(tmp_path, target_from_sequence(f"{QUERY}:{HOMOLOGUE}", "t"))
    assert {sequence: path.name for sequence, path in found.items()} == {
        QUERY: "colabfold_templates_A.tar.gz",
        HOMOLOGUE: "colabfold_templates_B.tar.gz",
    }


@needs_hhsearch
def test_hhsearch_reads_the_unpacked_database(tmp_path: Path) -> None:
    (tmp_path / "hh").mkdir()
    alignments = {
        name: f">{name}\n{row}\n" + "".join(f">r{i}\n{other}\n" for i, other in enumerate(FAMILY))
        for name, row in (("1abc_A", HOMOLOGUE), ("2abc_A", FAMILY[2]))
    }
    search(tar_gz({**profile_files(alignments, tmp_path / "hh"), **ENTRIES}), tmp_path / "msas")
    target = target_from_sequence(QUERY, "t")
    finder = TemplateFinder(TemplateOptions(server=True))
    alignments_of = load_alignments(tmp_path / "msas", target)
    (found,) = finder.find(target, alignments_of, tmp_path / "msas")
    assert {template.name for template in found.templates} == {"1abc_A", "2abc_A"}
    assert all(len(template.mapping) == len(QUERY) for template in found.templates)


@pytest.mark.parametrize(
    ("archive", "expected"),
    [
        (tar_gz(ENTRIES), "expected template hits with pdb70_a3m.ffdata"),
        (tar_gz({**EMPTY, "../1abc.cif": b""}), "leads out of it"),
        (b"nonsense", "damaged or truncated"),
    ],
)
def test_archives_that_cannot_be_used_leave_nothing(tmp_path: Path, archive: bytes, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        search(archive, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_only_names_of_pdb_chains_are_asked_for() -> None:
    rows = b"".join(b"101\t%dabc_A\n" % (number % 10) for number in range(50))
    assert _hit_names(b"102\t1xyz_A\n" + TABLE) == ["1abc_A", "2abc_A"]
    assert len(_hit_names(rows)) == 10
    many = b"".join(b"101\t1a%02d_A\n" % number for number in range(50))
    assert _hit_names(many) == [f"1a{number:02}_A" for number in range(20)]


def test_without_hhsearch_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "find_program", lambda name: None)
    with pytest.raises(ConfigError, match="hhsearch, which is not installed"):
        TemplateFinder(TemplateOptions(server=True))
    assert check_templates(tar_gz(EMPTY), origin="x").keys() == EMPTY.keys()
