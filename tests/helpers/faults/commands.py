"""Commands that write, with the smallest inputs that make them write each kind of file."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import torch

from fastfold.evoformer.weights.adapters import LowRankUpdate, write_adapter
from fastfold.evoformer.weights.checkpoint import load_model
from fastfold.evoformer.weights.published import file_name
from fastfold.protein.io.pdb_writer import to_pdb
from tests.conftest import REPOSITORY
from tests.helpers.command_line import small_weights
from tests.helpers.faults.table import Case
from tests.helpers.peptides import helix
from tests.helpers.sequence_databases import queries, write_database
from tests.helpers.stand_in_msa_server import tar_gz
from tests.products.ensemble.conftest import save_two_states
from tests.training.conftest import TINY, write_data

SEQUENCE, OTHER = "MKTAYIAKQR", "GSHMAWLPE"
WEIGHTS = "params_model_1_ptm.safetensors"
NETWORKS = ("model_1_ptm", "model_2_ptm")
LAYER = "evoformer.blocks.0.pair_transition.hidden"
CLUSTERS = {
    f"UniRef30_2021_03_{part}.{end}": f"{part} {end} ".encode() * 2000
    for part in ("a3m", "hhm", "cs219")
    for end in ("ffdata", "ffindex")
}


def write_targets(inputs: Path) -> None:
    """Write two short sequences and a small network."""
    (inputs / "in.fasta").write_text(f">one\n{SEQUENCE}\n>two\n{OTHER}\n")
    (inputs / "one.fasta").write_text(f">one\n{SEQUENCE}\n")
    (inputs / WEIGHTS).write_bytes(small_weights())


def _structures(inputs: Path) -> None:
    (inputs / WEIGHTS).write_bytes(small_weights())
    for name, sequence in (("one", "AKLEW"), ("two", "AKVEW")):
        (inputs / f"{name}.pdb").write_text(to_pdb(helix(sequence)))


def _database(inputs: Path) -> None:
    searched = queries()
    (inputs / "in.fasta").write_text("".join(f">{name}\n{text}\n" for name, text in searched.items()))
    write_database(inputs / "small.fasta", searched)


def _official(inputs: Path) -> None:
    """Write a mirror of two networks."""
    for name in NETWORKS:
        shutil.copyfile(
            REPOSITORY / "tests" / "oracles" / "synthetic_monomer" / "params.npz", inputs / file_name(name)
        )


def packed_databases() -> dict[str, bytes]:
    """Return the packed files of three databases, one of each kind, by name."""
    rows = "".join(f">UniRef90_{i}\n{SEQUENCE * 9}\n" for i in range(3000)).encode()
    return {
        "uniref90.fasta.gz": gzip.compress(rows, 1, mtime=0),
        "UniRef30_2021_03.tar.gz": tar_gz(dict(CLUSTERS)),
        "pdb_seqres.txt": b">1abc_A mol:protein length:4\nMKVL\n" * 4000,
    }


def _mirror(inputs: Path) -> None:
    for name, content in packed_databases().items():
        (inputs / name).write_bytes(content)


def _adapter(inputs: Path) -> None:
    write_targets(inputs)
    state = load_model(inputs / WEIGHTS).state_dict()
    rows, columns = state[f"{LAYER}.weight"].shape
    update = LowRankUpdate(torch.full((2, columns), 0.1), torch.full((rows, 2), 0.2), 0.5)
    write_adapter(inputs / "adapter", {LAYER: update}, state, base=None)


def _fold(command: str, *more: str, start: tuple[str, ...] = ("in.fasta",)) -> Case:
    settings = ("--num-recycles", "0", "--device", "cpu")

    def arguments(inputs: Path, out: Path) -> list[str | Path]:
        files = [inputs / name for name in start]
        return [command, *files, "--weights", inputs / WEIGHTS, "--out", out, *settings, *more]

    return Case(command, _structures if command == "score" else write_targets, arguments)


INFER = _fold("infer", "--seeds", "0-1", "--zip")
CONVERT = Case(
    "weights convert",
    write_targets,
    lambda inputs, out: ["weights", "convert", inputs / WEIGHTS, out.with_suffix(".safetensors")],
)
CASES = (
    INFER,
    Case(
        "search",
        _database,
        lambda inputs, out: [
            *("search", inputs / "in.fasta", "--db", inputs / "small.fasta", "--out", out, "--cpu", "1")
        ],
    ),
    _fold("screen", "--workers", "1", "--no-plots"),
    Case(
        "design",
        write_targets,
        lambda inputs, out: [
            *("design", "hallucinate", "--length", "10", "--steps", "2,1,1", "--mutations", "1,2"),
            *("--weights", inputs / WEIGHTS, "--out", out),
        ],
    ),
    _fold("score", "--no-plots", start=("one.pdb", "two.pdb")),
    _fold("mutate", "--mutations", "K2A", start=("one.fasta",)),
    _fold("embed"),
    Case(
        "ensemble",
        lambda inputs: save_two_states(inputs / "samples") and None,
        lambda inputs, out: ["ensemble", out],
        start=lambda inputs, out: shutil.copytree(inputs / "samples", out) and None,
    ),
    Case(
        "relax",
        _structures,
        lambda inputs, out: [
            *(
                "relax",
                inputs / "one.pdb",
                inputs / "two.pdb",
                "--out",
                out,
                "--platform",
                "CPU",
                "--threads",
                "1",
            ),
        ],
        again=(0, 1),  # finished structures are refused
    ),
    Case(
        "train",
        lambda inputs: write_data(inputs / "data") and None,
        lambda inputs, out: [
            *("train", *TINY, "trainer.log_every=1", "trainer.steps=4", "trainer.checkpoint_every=2"),
            *("optim.batch_size=1", "data.max_recycles=0", "data.workers=0"),
            *(f"data.directory={inputs / 'data'}", f"trainer.out={out}"),
        ],
        # The hash of the state, which has the seconds.
        masked=(r'("sha256": )"[0-9a-f]{64}"(?=\n}$)',),
        ignored=r"owner\.json$|metrics\.(jsonl|csv)$|order_rank_0\.jsonl$|/tensorboard/|/report/",
    ),
    Case(
        "data build",
        lambda inputs: write_data(inputs / "data") and None,
        lambda inputs, out: [
            *("data", "build", "--out", out.with_suffix(".packed"), *TINY),
            *(f"data.directory={inputs / 'data'}", "data.workers=0"),
        ],
    ),
    Case(
        "databases download",
        _mirror,
        lambda inputs, out: [
            *("databases", "download", "uniref90", "uniref30", "pdb_seqres", "--dir", out),
            *("--mirror", inputs),
        ],
    ),
    Case(
        "weights download",
        _official,
        lambda inputs, out: ["weights", "download", *NETWORKS, "--mirror", inputs],
        environment=lambda inputs, out: {"FASTFOLD_WEIGHTS": str(out)},
    ),
    CONVERT,
    Case(
        "weights merge",
        _adapter,
        lambda inputs, out: [
            *("weights", "merge", inputs / WEIGHTS, inputs / "adapter", out.with_suffix(".safetensors"))
        ],
    ),
)
