"""Every example runs, and prints what it promises."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fastfold import load_model
from fastfold.data.features.pipeline import sampler_from_raw
from fastfold.data.features.raw import sequence_features
from fastfold.evoformer.weights.published import one_weights_file
from tests.conftest import REPOSITORY
from tests.helpers import small_sets
from tests.helpers.forked import Forked, rank_environments

EXAMPLES = REPOSITORY / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(script: str, *options: str) -> str:
    """What a script prints; it must not fail, and must not warn."""
    process = Forked(_script, str(EXAMPLES / script), options)
    return checked(*process.communicate(), process.returncode)


def run_by_torchrun(script: str, *options: str) -> str:
    """What a script prints on two processes."""
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(EXAMPLES / script), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return checked(done.stdout, done.stderr, done.returncode)


def run_by_two(script: str, *options: str) -> str:
    """Return what the first of two forked processes prints; their environment is torchrun's."""
    processes = [
        Forked(_script, str(EXAMPLES / script), options, env=environment)
        for environment in rank_environments(2)
    ]
    printed = [checked(*process.communicate(), process.returncode) for process in processes]
    assert printed[1] == ""
    return printed[0]


def checked(out: str, err: str, code: int | None) -> str:
    assert code == 0, err
    assert "Warning" not in err, err
    return out


def _script(path: str, options: Sequence[str]) -> int:
    sys.argv = [path, *options]
    runpy.run_path(path, run_name="__main__")
    return 0


def number(pattern: str, text: str) -> float:
    """The number that stands in the group of a pattern."""
    found = re.search(pattern, text)
    assert found is not None, f"{pattern!r} is not in {text!r}"
    return float(found[1].replace(",", ""))


def test_every_script_is_tested_and_listed() -> None:
    own = Path(__file__).read_text(encoding="utf-8")
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb"))}
    assert len(names) >= 7
    assert {name for name in names if f'"{name}"' not in own} == set()
    assert {name for name in names if f"]({name})" not in listed} == set()


def test_predict(tmp_path: Path) -> None:
    """Protein G is folded with confidence, and its files are there."""
    printed = run("predict.py", "--out", str(tmp_path))
    assert "61 residues" in printed
    assert number(r"mean pLDDT ([\d.]+)", printed) > 60
    kinds = {"pdb", "cif", "scores", "pae", "plot"}
    paths = dict(line.split(": ", 1) for line in printed.splitlines() if line.split(": ")[0] in kinds)
    assert paths.keys() == kinds
    assert all(Path(path).stat().st_size > 0 for path in paths.values())
    scores = json.loads(Path(paths["scores"]).read_text())
    assert len(scores["plddt"]) == 61


def test_use_one_kernel() -> None:
    """The operator and each of its gradients equal the plain definition, and it trains."""
    printed = run("use_one_kernel.py")
    errors = [float(x) for x in re.findall(r"differs by (\S+)", printed)]
    assert len(errors) == 6
    assert max(errors) < 1e-5
    first, last = (number(rf"loss {part}", printed) for part in (r"(\S+) ->", r"\S+ -> (\S+)"))
    assert last < 0.9 * first


def test_evoformer_only() -> None:
    """All parameters get a gradient, and blocks do not change the result."""
    printed = run("evoformer_only.py")
    assert "contacts (32, 32)" in printed
    assert number(r"; ([\d,]+) of", printed) == number(r"of ([\d,]+) parameters", printed) > 10_000
    assert number(r"differs by (\S+)", printed) < 1e-5


def glycines(folder: Path, length: int) -> str:
    """Write a training set of straight chains of glycine, and return their sequence."""
    for name in ("train/1aaa_A", "train/1bbb_A", "valid/2aaa_A"):
        small_sets.write(folder / f"{name}.pdb", small_sets.pdb_text({"A": "G" * length}))
        small_sets.write(folder / "msas" / f"{name[-6:]}.a3m", small_sets.a3m("G" * length, "A" * length))
    return "G" * length


@pytest.mark.long
def test_pretrain_embedder_in_one_step(tmp_path: Path) -> None:
    """A network that knows nothing yet has the entropy of 64 equal bins; the file that is left is a network."""
    glycines(tmp_path / "set", 12)
    printed = run(
        "pretrain_embedder.py", str(tmp_path / "set"), str(tmp_path / "out.safetensors"), "--steps", "1"
    )
    assert number(r"validation 3-6 (\S+),", printed) == pytest.approx(np.log(64), abs=0.05)
    left, whole = (load_model(one).state_dict() for one in (tmp_path / "out.safetensors", "mini"))
    assert {name: x.shape for name, x in left.items()} == {name: x.shape for name, x in whole.items()}


@pytest.mark.slow
def test_pretrain_embedder(tmp_path: Path) -> None:
    """Distances in straight chains are learnt, and the whole network says them from the beginning."""
    out = tmp_path / "embedder.safetensors"
    glycine = glycines(tmp_path / "set", 40)
    printed = run("pretrain_embedder.py", str(tmp_path / "set"), str(out), "--steps", "120")
    assert number(r"validation 3-6 (\S+),", printed) < 0.5
    network = load_model(out)
    alone = {"msa": np.zeros((1, 40), np.int32), "deletion_matrix_int": np.zeros((1, 40), np.int32)}
    features = sampler_from_raw(sequence_features(glycine) | alone, network.config).sample(0)
    inputs = {key: torch.as_tensor(x) for key, x in features.items()}
    with torch.no_grad():
        distogram = network(lambda cycle, member: dict(inputs), 0)["distogram"]
    third = distogram["logits"].diagonal(3).argmax(0)
    assert (distogram["bin_edges"][third] - 3 * 3.8).abs().max() < 0.5


@pytest.mark.long
def test_train_structure_module_in_a_few_steps(tmp_path: Path) -> None:
    """Only the structure module and its heads change."""
    for name in ("train/1aaa_A", "valid/2aaa_A"):
        small_sets.write(tmp_path / "set" / f"{name}.pdb", small_sets.pdb_text({"A": "GASTVLGAST"}))
    start, out = one_weights_file("mini"), tmp_path / "structure.safetensors"
    options = (str(tmp_path / "set"), str(start), str(out), "--recordings", str(tmp_path / "recordings"))
    run("train_structure_module.py", *options, "--chains", "1", "--steps", "2")
    first, last = load_model(start).state_dict(), load_model(out).state_dict()
    changed = {name.split(".")[0] for name in first if not torch.equal(first[name], last[name])}
    assert changed == {"structure_module", "heads"}
    assert len(list((tmp_path / "recordings").rglob("*.safetensors"))) == 2


@pytest.mark.slow
def test_train_structure_module(tmp_path: Path) -> None:
    """Straight chains come out straighter, nothing else of the network changes, and recordings are made once."""
    for name, residues in (("train/1aaa_A", 14), ("train/1bbb_A", 18), ("valid/2aaa_A", 16)):
        small_sets.write(
            tmp_path / "set" / f"{name}.pdb", small_sets.pdb_text({"A": ("GASTVL" * 3)[:residues]})
        )
    start, out, folder = one_weights_file("mini"), tmp_path / "structure.safetensors", tmp_path / "recordings"
    options = (str(tmp_path / "set"), str(start), str(out), "--recordings", str(folder), "--chains", "2")
    printed = run("train_structure_module.py", *options, "--steps", "40")
    before, after = (
        number(rf"{when}.*validation lDDT-CA (\S+),", printed) for when in ("before:", "step 40:")
    )
    assert after > before + 0.05
    first, last = load_model(start).state_dict(), load_model(out).state_dict()
    changed = {name.split(".")[0] for name in first if not torch.equal(first[name], last[name])}
    assert changed == {"structure_module", "heads"}
    heads = {name for name in first if name.startswith("heads.") and not torch.equal(first[name], last[name])}
    assert heads
    assert all(name.split(".")[1] in ("predicted_lddt", "predicted_aligned_error") for name in heads)
    made = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    assert len(made) == 3
    run("train_structure_module.py", *options, "--steps", "1")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == made


@pytest.mark.long
def test_train_overfit() -> None:
    """The loss falls, local structure is learnt, and the weights that the run leaves fold."""
    printed = run("train_overfit.py", "--steps", "40")
    assert number(r"^loss \S+ -> (\S+) in 40", printed) < 0.7 * number(r"^loss (\S+) ->", printed)
    assert number(r"lDDT-CA \S+ -> (\S+)", printed) > 2 * number(r"lDDT-CA (\S+) ->", printed)
    assert "the trained weights fold: (20, 37, 3)" in printed


def test_an_example_for_two_processes_says_how_to_start_them() -> None:
    assert "RANK" not in os.environ
    process = Forked(_script, str(EXAMPLES / "parallelize_my_model.py"), ())
    _, err = process.communicate()
    assert process.returncode == 2
    assert "start two processes: torchrun --nproc-per-node 2 examples/parallelize_my_model.py" in err


@pytest.mark.long
@pytest.mark.parametrize(
    ("plan", "share", "launch"),
    [
        ("dp=2", 1.0, run_by_two),
        ("tp=2", 0.6, run_by_two),
        pytest.param("tp=2", 0.6, run_by_torchrun, marks=pytest.mark.slow),
    ],
)
def test_parallelize_my_model(plan: str, share: float, launch: Callable[..., str]) -> None:
    """Two processes compute what one computes; tensor parallelism holds about half of the model."""
    printed = launch("parallelize_my_model.py", "--plan", plan)
    assert number(r"differ from one process's by (\S+)", printed) < 1e-12
    held, whole = (number(pattern, printed) for pattern in (r": ([\d,]+) of", r"of ([\d,]+) parameters"))
    assert held <= share * whole


def test_gemini_my_model() -> None:
    """The parameters alone exceed the budget, which holds in every step; weights are those of a plain run."""
    printed = run("gemini_my_model.py", "--budget", "2MiB")
    budget = number(r"budget of ([\d,]+)", printed)
    assert number(r"([\d,]+) bytes of parameters", printed) > 2 * budget
    peaks = [int(x.replace(",", "")) for x in re.findall(r"at most ([\d,]+) bytes", printed)]
    assert len(peaks) == 3
    assert max(peaks) <= budget
    assert number(r"plain run by (\S+)", printed) == 0


@pytest.mark.long
def test_the_cells_of_the_notebook_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an empty folder; they print the output that the file has, and it has pictures."""
    notebook = json.loads((EXAMPLES / "predict.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    namespace: dict[str, object] = {"__name__": "notebook"}
    for cell in cells:
        exec(compile("".join(cell["source"]), "predict.ipynb", "exec"), namespace)
        printed, stream = (
            capsys.readouterr().out,
            [o for o in cell["outputs"] if o["output_type"] == "stream"],
        )
        kept = "".join(text for output in stream for text in output["text"])
        figure = r"\d+\.\d+"
        assert re.sub(figure, "#", printed) == re.sub(figure, "#", kept)
        wanted = [float(text) for text in re.findall(figure, kept)]
        assert [float(text) for text in re.findall(figure, printed)] == pytest.approx(wanted, abs=0.5)
    assert list(tmp_path.glob("*/*.pdb"))
    kinds = {kind for cell in cells for output in cell["outputs"] for kind in output.get("data", {})}
    assert "image/png" in kinds
    assert not [o for cell in cells for o in cell["outputs"] if o["output_type"] == "error"]


def test_fit_ramachandran(tmp_path: Path) -> None:
    """Means, concentrations and weights of a known mixture come back; the program writes a table of four groups."""
    program = runpy.run_path(str(EXAMPLES / "fit_ramachandran.py"))
    torch.manual_seed(0)
    means, scale = torch.tensor([[-1.1, -0.7], [-2.1, 2.4]]).double(), 20.0
    which = (torch.rand(4000) < 0.3).long()
    known = [torch.distributions.VonMises(x, torch.tensor(scale).double()) for x in means]
    draws = torch.stack([x.sample((4000,)) for x in known])[which, torch.arange(4000)]
    logs = torch.stack([x.log_prob(draws).sum(-1) for x in known]) + torch.tensor([[0.7], [0.3]]).log()
    density, weights, mean, concentration = program["fit"](draws, torch.zeros(4000).long(), 3, 0)
    assert density == pytest.approx(float(logs.logsumexp(0).mean()), abs=0.02)
    order = mean[:2, 1].argsort()
    torch.testing.assert_close(mean[:2][order], means, rtol=0, atol=0.03)
    torch.testing.assert_close(concentration[:2], torch.full((2, 2), scale).double(), rtol=0.1, atol=0)
    assert concentration[2].tolist() == [0.0, 0.0]
    torch.testing.assert_close(weights[0, :2][order], torch.tensor([0.7, 0.3]).double(), rtol=0, atol=0.03)
