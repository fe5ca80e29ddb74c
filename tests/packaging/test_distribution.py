"""What is published: the source distribution, the wheel built from it, and the page of a package index."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.packaging.project import project_table

_BUILD = "from setuptools import build_meta as b; b.build_{kind}({folder!r})"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution of the tracked files, and the wheel made from it alone."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone: git lists no files")
    root = tmp_path_factory.mktemp("distribution")
    clone, dist = root / "clone", root / "dist"
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, clone / name)
    _build("sdist", clone, dist)
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(root / "source", filter="data")
    (unpacked,) = (root / "source").iterdir()
    _build("wheel", unpacked, dist)
    (wheel,) = dist.glob("*.whl")
    return source, wheel


def _build(kind: str, folder: Path, dist: Path) -> None:
    dist.mkdir(exist_ok=True)
    code = _BUILD.format(kind=kind, folder=str(dist))
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)


def test_the_page_of_a_package_index_links_to_no_file() -> None:
    """A package index has no repository beside the page."""
    text = (REPOSITORY / project_table()["readme"]).read_text(encoding="utf-8")
    assert text.startswith("# FastFold\n")
    targets = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text)
    assert [found for pair in targets for found in pair if found and "://" not in found] == []


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_dockerfile_copies_files_that_are_there_and_all_that_a_build_needs(name: str) -> None:
    text = (REPOSITORY / "docker" / f"{name}.Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for word in line.split()]
    project = project_table()
    assert [path for path in copied if not (REPOSITORY / path).exists()] == []
    assert {"pyproject.toml", "fastfold", project["readme"], *project["license-files"]} <= set(copied)


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_container_runs_as_a_user_on_a_base_that_can_be_pinned(name: str) -> None:
    text = (REPOSITORY / "docker" / f"{name}.Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    steps = [line.split(maxsplit=1) for line in lines]
    assert steps[:2] == [["ARG", "BASE=python:3.12-slim"], ["FROM", "${BASE}"]]
    assert [rest for step, rest in steps if step == "FROM"] == ["${BASE}"]
    assert [step for step, _ in steps][-2:] == ["USER", "ENTRYPOINT"]
    assert steps[-2][1] == "fastfold"
    made = " ".join(rest for step, rest in steps if step == "RUN")
    assert "useradd --create-home --uid 1000 fastfold" in made
    target = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert '--build-arg "BASE=$$base" -f docker/$$kind.Dockerfile' in target


@pytest.mark.slow
def test_the_source_distribution_has_documents_and_examples_and_no_tests(
    distributions: tuple[Path, Path],
) -> None:
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CITATION.cff", "CHANGELOG.md", "LICENSE", "NOTICE", "constraints.txt"} <= names
    assert {"docs/install.md", "docs/prediction.png", "examples/predict.py"} <= names
    assert not [name for name in names if name.startswith("tests/") or name.endswith(".pyc")]


@pytest.mark.slow
def test_the_wheel_has_the_package_alone_with_its_data(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"fastfold"}
    assert "fastfold/trained/mini.safetensors" in names
    assert "fastfold/products/verify/mini_record.npz" in names


@pytest.mark.slow
def test_a_wheel_outside_the_clone_folds_verifies_and_makes_a_page(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    """Other packages are those of this interpreter; FastFold is the wheel."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "venv"], cwd=tmp_path, check=True)
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*install, str(distributions[1])], env=environment, check=True)
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(
        subprocess.run(where, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    )
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    (tmp_path / "a.fasta").write_text(">a\nMKTAYIAKQRQISFVKSHFS\n")

    def fastfold(*arguments: str) -> str:
        done = subprocess.run(
            [str(python.with_name("fastfold")), *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    code = [str(python), "-c", "import fastfold; print(fastfold.__file__)"]
    origin = subprocess.run(code, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert origin.returncode == 0, origin.stderr
    assert Path(origin.stdout.strip()).is_relative_to(packages)
    fastfold("infer", "a.fasta", "--out", "out")
    assert list((tmp_path / "out").glob("a_rank_001_*.pdb"))
    (tmp_path / "out" / "report.html").unlink()
    fastfold("report", "out")
    assert (tmp_path / "out" / "report.html").is_file()
    assert "6 of 6 outputs agree" in fastfold("verify", "--device", "cpu")
    assert fastfold("environment").startswith("fastfold")
