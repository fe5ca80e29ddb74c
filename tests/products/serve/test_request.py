"""A stored request gives the same target, settings and templates as the submitted one."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.errors import ConfigError, InputError
from fastfold.inference.config import InferConfig
from fastfold.inference.request import RunOptions
from fastfold.products.serve.request import (
    ANSWER,
    MAX_SEEDS,
    JobAnswer,
    JobRequest,
    read_answer,
    template_file,
    write_answer,
)


def test_a_request_is_read_as_it_was_written(tmp_path: Path):
    settings = {"num_recycles": 1, "seeds": [1, 2], "max_msa": [16, 32], "pair_mode": "paired"}
    request = JobRequest("fasta", ">a\nMKV\n", "name", False, {"1abc.cif": "data_1ABC"}, settings)
    request.write(tmp_path)
    found = JobRequest.read(tmp_path)
    assert found == request
    assert (found.target().name, found.target().chains[0].sequence) == ("name", "MKV")
    config = found.config(InferConfig(device="cpu"))
    assert (config.seeds, config.max_msa, config.device) == ((1, 2), (16, 32), "cpu")
    options = found.options(RunOptions(), tmp_path)
    assert options.pair_mode == "paired"
    assert [path.read_text() for path in options.templates.structures] == ["data_1ABC"]


def test_each_format_has_one_target():
    assert JobRequest("sequence", "MKV:MKL").target().is_complex
    assert JobRequest("fasta", ">a\nMKV\n>b\nMKL\n", complex_=True).target().is_complex
    target = JobRequest("a3m", ">q\nMKV\n>h\nMKL\n").target()
    assert target.alignments is not None
    assert target.alignments[0][0][0].sequences == ("MKV", "MKL")
    with pytest.raises(InputError, match="expected one target, found 2"):
        JobRequest("fasta", ">a\nMKV\n>b\nMKL\n").target()
    with pytest.raises(InputError, match=r"query\.fasta:2"):
        JobRequest("fasta", ">a\nMK1\n").target()


def test_files_of_the_server_that_a_header_names_are_not_opened(tmp_path: Path):
    """Boltz' headers name alignments."""
    (tmp_path / "x.a3m").write_text(">q\nMKV\n>1\nMRV\n")
    with pytest.raises(InputError, match="names a file, which is not opened here"):
        JobRequest("fasta", f">A|protein|{tmp_path}/x.a3m\nMKV\n").target()


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "a\0b", "con"])
def test_names_are_never_paths(name: str):
    assert set(JobRequest("sequence", "MKV", name).target().name).isdisjoint("/\\\0")
    assert set(template_file(name, "")).isdisjoint("/\\\0")
    assert not template_file(name, "").startswith(".")


def test_templates_get_the_suffix_of_their_content():
    assert template_file("1abc.pdb", "\ndata_1ABC") == "1abc.cif"
    assert template_file("1abc", "ATOM") == "1abc.pdb"


def test_seeds_are_limited():
    most = JobRequest("sequence", "MKV", settings={"seeds": list(range(MAX_SEEDS))}).config(InferConfig())
    assert len(most.seeds) == 100
    with pytest.raises(ConfigError, match="at most 100, found 101"):
        JobRequest("sequence", "MKV", settings={"seeds": list(range(MAX_SEEDS + 1))}).config(InferConfig())


def test_settings_mean_what_the_options_of_infer_mean(tmp_path: Path):
    relaxed = JobRequest("sequence", "MKV", settings={"num_relax": 2}).config(InferConfig())
    assert (relaxed.relax, relaxed.num_relax) == ("best", 2)
    with pytest.raises(ConfigError, match="num_models must be at least 1, found 0"):
        JobRequest("sequence", "MKV", settings={"num_models": 0}).options(RunOptions(), tmp_path)


def test_jobs_of_other_settings_are_not_folded_together():
    plain = JobRequest("sequence", "MKV")
    assert plain.fingerprint() == JobRequest("sequence", "MKVLLL", "x").fingerprint()
    assert plain.fingerprint() != JobRequest("sequence", "MKV", settings={"num_recycles": 1}).fingerprint()


def test_an_answer_is_read_back(tmp_path: Path):
    assert read_answer(tmp_path) is None
    answer = JobAnswer("done", "good", {"plddt": 90.0}, ["a.pdb"])
    write_answer(tmp_path, answer)
    assert read_answer(tmp_path) == answer


@pytest.mark.parametrize(
    "content",
    [
        *("", "{}", "[]", "[" * 100_000, '{"state": "queued", "text": ""}', '{"state": "done", "text": 1}'),
        '{"state": "done", "text": "", "scores": []}',
        '{"state": "done", "text": "", "files": [1]}',
    ],
)
def test_a_damaged_answer_is_refused(tmp_path: Path, content: str):
    (tmp_path / ANSWER).write_text(content)
    with pytest.raises(InputError, match=ANSWER):
        read_answer(tmp_path)
