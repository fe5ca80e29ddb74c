"""Every option of a fold sets one field of what is run, and nothing else."""

from __future__ import annotations

import argparse
import dataclasses
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from fastfold.cli.commands.infer import add_infer_command
from fastfold.data.search.settings import SearchSources
from fastfold.data.templates.options import TemplateOptions
from fastfold.inference.command_line.fold_options import infer_request
from fastfold.inference.config import InferConfig
from fastfold.inference.request import RunOptions
from fastfold.inference.sampling.settings import Sampling
from fastfold.products.embed.command import add_embed_command
from fastfold.products.mutate.command import add_mutate_command
from fastfold.products.score.command import add_score_command
from fastfold.products.screen.command import add_screen_command

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "recycles": ("--num-recycles 7", {"num_recycles": 7}),
    "recycles as elsewhere": ("--num-recycle 7", {"num_recycles": 7}),
    "tolerance": ("--recycle-tolerance 0.5", {"recycle_tolerance": 0.5}),
    "seed": ("--seed 5", {"seeds": (5,)}),
    "number of seeds": ("--seed 5 --num-seeds 3", {"seeds": (5, 6, 7)}),
    "seeds": ("--seeds 0-2,9", {"seeds": (0, 1, 2, 9)}),
    "msa": ("--max-msa 16:32", {"max_msa": (16, 32)}),
    "dropout": ("--dropout", {"dropout": True}),
    "profile": ("--disable-cluster-profile", {"use_cluster_profile": False}),
    "ensemble": ("--num-ensemble 8", {"num_ensemble": 8}),
    "stop": ("--stop-at-score 90", {"stop_at_score": 90.0}),
    "guess": ("--initial-guess a.pdb", {"initial_guess": Path("a.pdb")}),
    "restraints": ("--restraints a.csv", {"restraints": Path("a.csv")}),
    "restraint steps": ("--restraint-steps 7", {"restraint_steps": 7}),
    "restraint springs": (
        "--restraints r.csv --restraint-springs",
        {"restraints": Path("r.csv"), "restraint_springs": True},
    ),
    "restraint contradictions": (
        "--restraints r.csv --restraint-leave-one-out",
        {"restraints": Path("r.csv"), "restraint_leave_one_out": True},
    ),
    "ring": ("--cyclic", {"cyclic": True}),
    "rings": ("--rings B,C", {"rings": "B,C"}),
    "precision": ("--precision bf16", {"precision": "bf16"}),
    "rank": ("--rank ptm", {"rank": "ptm"}),
    "errors": ("--pae yes", {"pae": True}),
    "no errors": ("--pae no", {"pae": False}),
    "errors in structures": ("--cif-pae yes", {"cif_pae": True}),
    "plots": ("--no-plots", {"plots": False}),
    "relax": ("--relax", {"relax": "best"}),
    "relax some": ("--num-relax 3", {"relax": "best", "num_relax": 3}),
    "relax none": ("--num-relax 0", {}),
    "skipped": ("--skip-output plots,pae_json", {"plots": False, "pae": False}),
    "relax all": ("--relax all --relax-platform CPU", {"relax": "all", "relax_platform": "CPU"}),
    "representations": ("--save-representations", {"save_representations": True}),
    "distances": ("--save-distogram", {"save_distogram": True}),
    "steps": ("--save-recycles", {"save_recycles": True}),
    "device": ("--device cuda:1", {"device": "cuda:1"}),
    "memory": ("--memory-budget 24GiB", {"memory_budget": "24GiB"}),
    "host": ("--host-memory 64GiB", {"host_memory": "64GiB"}),
    "no host": ("--host-memory 0", {"host_memory": "0"}),
    "disk": ("--offload-dir d", {"offload_dir": Path("d")}),
    "graphs": ("--cuda-graphs", {"cuda_graphs": True}),
    "no graphs": ("--no-cuda-graphs", {"cuda_graphs": False}),
    "state": ("--checkpoint-after 0", {"checkpoint_after": 0.0}),
    "sample": (
        "--sample columns --samples 3 --sample-fraction 0.2",
        {"sample": Sampling("columns", number=3, fraction=0.2)},
    ),
    "depths": ("--sample depth --sample-depths 8,32", {"sample": Sampling("depth", depths=(8, 32))}),
    "parallel": ("--parallel dap=4", {"parallel": "dap=4"}),
}
AROUND: dict[str, tuple[str, dict[str, Any]]] = {
    "batch": ("--batch auto", {"batch": "auto"}),
    "alignments": ("--msa-dir m", {"msa_dir": Path("m")}),
    "templates": (
        "--templates a.pdb b.cif --template-alignment a.a3m --template-db pdb70 --template-mmcif-dir d "
        "--max-template-date 2021-11-01 --max-templates 2 --obsolete-pdbs o",
        {
            "templates": TemplateOptions(
                structures=(Path("a.pdb"), Path("b.cif")),
                alignments=(Path("a.a3m"),),
                database=Path("pdb70"),
                mmcif_dir=Path("d"),
                obsolete=Path("o"),
                max_date=date(2021, 11, 1),
                max_templates=2,
            )
        },
    ),
    "hits of ColabFold": (
        "--templates --pdb-hit-file h.m8 --local-pdb-path d",
        {"templates": TemplateOptions(hits=Path("h.m8"), mmcif_dir=Path("d"))},
    ),
    "complexes": (
        "--cross-chain-templates a.pdb a.pdb --superpose-chains b.pdb --template-chains c.csv --clash-overlap 0.9 "
        "--template-min-plddt 50",
        {
            "templates": TemplateOptions(
                complexes=(Path("a.pdb"),) * 2,
                chains=(Path("b.pdb"),),
                chain_map=Path("c.csv"),
                overlap=0.9,
                min_plddt=50.0,
            )
        },
    ),
    "kept clashes": (
        "--cross-chain-templates a.pdb --keep-clashes",
        {"templates": TemplateOptions(complexes=(Path("a.pdb"),), keep_clashes=True)},
    ),
    "search": (
        "--db a.fasta bfd=b.fasta --cpu 3 --engine phmmer",
        {"sources": SearchSources(("a.fasta", "bfd=b.fasta"), engine="phmmer", num_workers=3)},
    ),
    "pairs": ("--pair-mode paired", {"pair_mode": "paired"}),
    "networks": ("--num-models 2", {"num_models": 2}),
    "names": ("--jobname-prefix job", {"name_prefix": "job"}),
    "archives": ("--zip", {"zip_results": True}),
    "complex": ("--complex", {"complex_": True}),
    "downloads": ("--allow-download", {"allow_download": True}),
    "reference": ("--reference r", {"reference": Path("r")}),
    "weights": ("--skip-bad-weights", {"skip_bad_weights": True}),
    "overwrite": ("--overwrite", {"overwrite": True}),
    "sort": ("--sort length", {"sort": "length"}),
    "quiet": ("--quiet", {"quiet": True}),
    "folders": ("--folder-per-target", {"folder_per_target": True}),
    "format": ("--output-format colabfold", {"output_format": "colabfold"}),
}


STRUCTURES = {
    *(
        "stop",
        "restraints",
        "restraint steps",
        "restraint springs",
        "restraint contradictions",
        "folders",
        "rank",
        "errors",
        "no errors",
        "errors in structures",
        "plots",
        "relax",
        "relax some",
    ),
    *("relax none", "skipped", "relax all", "representations", "distances", "steps"),
    *("reference", "archives", "format"),
}
"""Options about structures, which embeddings lack."""
COMMANDS: dict[str, tuple[str, Any, set[str]]] = {
    "infer": ("x.fasta", add_infer_command, set()),
    "screen": ("x.fasta", add_screen_command, {"sort", "parallel"}),
    "score": ("x.pdb", add_score_command, {"sort", "guess"}),
    "mutate": ("x.fasta --mutations all", add_mutate_command, {"sort"}),
    "embed": ("x.fasta", add_embed_command, {"sort", *STRUCTURES}),
}
"""Inputs of each command, its parser, and the options that it does not share."""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_sets_its_own_field(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    inputs, add_command, lacking = COMMANDS[command]
    add_command(parser.add_subparsers())

    def settings(flags: str) -> tuple[InferConfig, RunOptions]:
        options = parser.parse_args([command, *inputs.split(), "--out", "there", *flags.split()])
        request = infer_request(options)
        return request.config, request.options

    for name, (flags, wanted) in SETTINGS.items():
        if name not in lacking:
            assert settings(flags) == (InferConfig(**wanted), RunOptions()), flags
    for name, (flags, wanted) in AROUND.items():
        if name not in lacking:
            assert settings(flags) == (InferConfig(), RunOptions(**wanted)), flags
    for name in sorted(lacking):
        with pytest.raises(SystemExit):  # unknown, or another option of the same name
            settings((SETTINGS | AROUND)[name][0])
    capsys.readouterr()
    for cases, kind in ((SETTINGS, InferConfig), (AROUND, RunOptions)):
        # The command embed has its own options, tested with it.
        tried = {"embed"} & {field.name for field in dataclasses.fields(kind)}
        tried |= {name for _, wanted in cases.values() for name in wanted}
        assert tried == {field.name for field in dataclasses.fields(kind)}
