"""Checks of the first hour on a GPU that no test and no other benchmark makes.

Usage: python benchmarks/gpu/probes.py CHECK [--device D] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from fastfold.cli.process import prepare_environment

prepare_environment()  # must precede the import of PyTorch

import torch  # noqa: E402

import fastfold  # noqa: E402
from fastfold.protein.metrics.tm_score import rmsd  # noqa: E402

SEQUENCE = "MTYKLILNGKTLKGETTTEAVDAATAEKVFKQYANDNGVDGEWTYDDATKTFTVTE"
"""Protein G, 56 residues."""
_DEVIATION = {"bf16": 1.5, "fp32": 0.01}
"""Maximum RMSD in Å of each precision from the fold on the CPU in float32."""


def assemblers() -> dict[str, str]:
    """Return the paths of Triton's assemblers by name; empty without Triton for NVIDIA."""
    try:
        from triton import knobs
    except ImportError:
        return {}
    found = {}
    for name in ("ptxas", "ptxas_blackwell"):
        tool = getattr(knobs.nvidia, name, None)
        if tool is not None:
            found[name] = str(tool.path)
    return found


def show_environment() -> None:
    """Print the environment of a defect report, with the versions of both assemblers."""
    print(f"fastfold {fastfold.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    for number in range(torch.cuda.device_count()):
        print(
            f"cuda:{number} {torch.cuda.get_device_name(number)} {torch.cuda.get_device_capability(number)}"
        )
    for name, path in assemblers().items():
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        print(name, path, version.strip().splitlines()[-1])


def kernel_hashes(device: str) -> None:
    """Print the SHA-256 of the output of every kernel on fixed inputs."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from benchmarks.kernels.cases import cases
    from benchmarks.kernels.rivals import OURS, implementations

    where = torch.device(device)
    for case in cases((48,), ((4, 48),)):
        ours = next(i for i in implementations(case.operator, where) if i.name == OURS)
        out = ours.function(**case.make(where, torch.bfloat16)).float().cpu().numpy()
        print(case.name, hashlib.sha256(out.tobytes()).hexdigest(), flush=True)


def compare_assemblers() -> None:
    """Compare the outputs of all kernels between Triton's assemblers, bit by bit."""
    outputs = {}
    for name, path in assemblers().items():
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "TRITON_PTXAS_PATH": path, "TRITON_CACHE_DIR": cache}
            command = [sys.executable, __file__, "hashes", "--device", "cuda"]
            run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            outputs[name] = run.stdout
    if len(outputs) < 2:
        sys.exit(f"expected two assemblers, found {list(outputs)}")
    if len(set(outputs.values())) > 1:
        sys.exit(f"the assemblers give different bits: {outputs}")
    print("the same bits from", *outputs)


def verify(device: str) -> None:
    """Repeat the recorded runs of the official program, if they are next to the checkout."""
    records = Path(__file__).resolve().parents[3] / "shared" / "oracles"
    command = [sys.executable, "-m", "fastfold", "verify", "--device", device.partition(":")[0]]
    subprocess.run([*command, *([str(records)] if records.is_dir() else [])], check=True)


def ca_rmsd(one: fastfold.Prediction, other: fastfold.Prediction) -> float:
    """Return the RMSD of CA atoms after superposition, in Å."""
    a, b = (torch.as_tensor(p.atom_positions[:, 1]).double() for p in (one, other))
    return float(rmsd(a, b, torch.ones(len(a)).double()))


def compare_precisions(device: str) -> None:
    """Compare folds on the device in fp32 and bf16 with the fold on the CPU in fp32."""
    expected = fastfold.predict(SEQUENCE, fastfold.load_model("mini", device="cpu"))
    for precision, limit in _DEVIATION.items():
        found = fastfold.predict(SEQUENCE, fastfold.load_model("mini", device=device, precision=precision))
        distance = ca_rmsd(found, expected)
        print(f"{device} {precision}: {distance:.4f} Å from the CPU (limit {limit} Å)")
        if not distance <= limit:
            sys.exit(f"{precision} on {device} is {distance:.3f} Å from fp32 on the CPU")


def compare_graphs() -> None:
    """Compare a fold replayed from a CUDA graph with an ordinary one."""
    model = fastfold.load_model("mini", device="cuda")
    plain, graphed = (fastfold.predict(SEQUENCE, model, cuda_graphs=on) for on in (False, True))
    distance = ca_rmsd(plain, graphed)
    print(f"with and without a CUDA graph: {distance:.5f} Å apart")
    if not distance <= _DEVIATION["fp32"]:
        sys.exit("CUDA graphs change the result")


def run_out_of_memory() -> None:
    """Fold after another program took memory that the plan counted on; the fold continues in smaller pieces."""
    torch.cuda.set_per_process_memory_fraction(0.02)
    found = fastfold.predict(SEQUENCE * 14, fastfold.load_model("mini", device="cuda"), num_recycles=0)
    print(f"{len(found.aatype)} residues, peak {torch.cuda.max_memory_reserved() / 2**20:.0f} MiB reserved")


def train(out: Path) -> None:
    """Train for 10 steps, then resume for 10 more."""
    out.mkdir(parents=True)
    structure = out / "example.pdb"
    structure.write_text(fastfold.predict(SEQUENCE, "mini", num_recycles=0).to_pdb())
    for steps in (10, 20):
        command = [
            sys.executable,
            "-m",
            "fastfold",
            "train",
            "+preset=overfit",
            f"data.directory={structure}",
        ]
        extra = [f"trainer.out={out / 'run'}", f"trainer.steps={steps}", "trainer.checkpoint_every=10"]
        subprocess.run([*command, *extra, "trainer.validate_every=10", "optim.cosine_steps=20"], check=True)


def screen(out: Path) -> None:
    """Fold four chains by two workers on two GPUs."""
    out.mkdir(parents=True)
    names = [f">t{i}\n{SEQUENCE[i:]}" for i in range(4)]
    (out / "targets.fasta").write_text("\n".join(names) + "\n")
    command = [
        sys.executable,
        "-m",
        "fastfold",
        "screen",
        str(out / "targets.fasta"),
        "--out",
        str(out / "results"),
    ]
    subprocess.run([*command, "--workers", "2"], check=True)


def main() -> None:
    """Run one check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    checks = {
        "environment": lambda o: show_environment(),
        "hashes": lambda o: kernel_hashes(o.device),
        "assemblers": lambda o: compare_assemblers(),
        "verify": lambda o: verify(o.device),
        "precisions": lambda o: compare_precisions(o.device),
        "graphs": lambda o: compare_graphs(),
        "out-of-memory": lambda o: run_out_of_memory(),
        "train": lambda o: train(o.out),
        "screen": lambda o: screen(o.out),
    }
    parser.add_argument("check", choices=checks)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    checks[options.check](options)


if __name__ == "__main__":
    main()
