"""Evoformer blocks of FastFold against those of OpenFold, on this machine's processor.

Usage: python benchmarks/against_openfold.py --openfold DIR [--case one|four] [--rounds N] [--json FILE]

DIR is a checkout of OpenFold (https://github.com/aqlaboratory/openfold). Nothing of it is installed or built: its
compiled extension is for GPUs only, but its modules need scipy. Both programs run in separate processes, with equal
weights (FastFold reads OpenFold's) and inputs, in turns; ratios are medians over the rounds. First the outputs and
gradients are compared. Memory is the peak of the resident set (Linux, VmHWM) above that with weights and inputs in
place.

Forward passes are those of inference: nothing is kept, results may overwrite the inputs, and FastFold's float32
products are oneDNN's on AMD's processors, as in a fold. "In pieces" is
OpenFold's ``chunk_size=4`` against FastFold's blocks of 2^20 elements. Several blocks are trained with activation
checkpointing, which both programs apply block by block.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fastfold.cli.process import prepare_environment

prepare_environment()  # must precede the import of PyTorch

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from fastfold.evoformer.config import model_config  # noqa: E402
from fastfold.evoformer.evoformer import EvoformerStack  # noqa: E402
from fastfold.evoformer.execution import ExecutionPolicy, set_policy  # noqa: E402
from fastfold.evoformer.model import AlphaFold  # noqa: E402
from fastfold.evoformer.weights.mapping import read_parameters  # noqa: E402
from fastfold.evoformer.weights.names import alphafold_mappings  # noqa: E402
from fastfold.evoformer.weights.openfold_file import OpenFoldParameters  # noqa: E402
from fastfold.kernels.cpu.linear import Products, reduced_products  # noqa: E402
from fastfold.kernels.cpu.products import exact_products  # noqa: E402
from fastfold.utils.machine import process_memory  # noqa: E402
from fastfold.utils.units import parse_bytes  # noqa: E402

C_M, C_Z = 256, 128
TOLERANCE = 1e-3
"""Maximum root mean square of the difference of outputs or gradients, relative to OpenFold's."""
_PREFIX = "evoformer.blocks."


@dataclass(frozen=True)
class Case:
    """Size of a comparison: blocks, sequences of the MSA, residues."""

    blocks: int
    sequences: int
    residues: int

    def __str__(self) -> str:
        return f"{self.blocks} block{'s' * (self.blocks > 1)}, MSA {self.sequences} x {self.residues}"


CASES = {"one": Case(1, 128, 256), "four": Case(4, 512, 384)}
PRODUCTS: dict[str, Products | None] = {"fp32": None, "bf16-products": "bf16", "int8": "int8"}
PASSES = ("forward", "forward in pieces", "forward + backward")

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


class Program(Protocol):
    """Evoformer blocks of one program."""

    @property
    def modules(self) -> nn.Module:
        """Module with the blocks."""

    def infer(self, inputs: Inputs, pieces: bool) -> tuple[Tensor, Tensor]:
        """Return MSA and pair after the blocks; the inputs may be overwritten."""

    def train(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return MSA and pair after the blocks, with a graph for the backward pass."""


# ---- the two programs -----------------------------------------------------------------------------------


class OpenFoldBlocks:
    """OpenFold's blocks from a checkout."""

    def __init__(self, checkout: Path, case: Case) -> None:
        for name in ("openfold", "openfold.model", "openfold.utils", "openfold.utils.kernel"):
            # The packages' own __init__ would import all of OpenFold's dependencies.
            package = types.ModuleType(name)
            package.__path__ = [str(checkout.joinpath(*name.split(".")))]
            sys.modules[name] = package
        sys.modules["attn_core_inplace_cuda"] = types.ModuleType("attn_core_inplace_cuda")
        evoformer = importlib.import_module("openfold.model.evoformer")
        self.modules = nn.ModuleList(
            evoformer.EvoformerBlock(
                c_m=C_M,
                c_z=C_Z,
                c_hidden_msa_att=32,
                c_hidden_opm=32,
                c_hidden_mul=128,
                c_hidden_pair_att=32,
                no_heads_msa=8,
                no_heads_pair=4,
                transition_n=4,
                msa_dropout=0.15,
                pair_dropout=0.25,
                no_column_attention=False,
                opm_first=False,
                fuse_projection_weights=False,
                inf=1e9,
                eps=1e-3,
            )
            for _ in range(case.blocks)
        ).eval()

    def infer(self, inputs: Inputs, pieces: bool) -> tuple[Tensor, Tensor]:
        """See :class:`Program`."""
        msa, pair, *masks = inputs
        for block in self.modules:
            msa, pair = block(
                msa, pair, *masks, chunk_size=4 if pieces else None, inplace_safe=True, _mask_trans=False
            )
        return msa, pair

    def train(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """See :class:`Program`."""
        msa, pair, *masks = inputs
        for block in self.modules:

            def run(msa: Tensor, pair: Tensor, block: nn.Module = block) -> tuple[Tensor, Tensor]:
                found: tuple[Tensor, Tensor] = block(msa, pair, *masks, _mask_trans=False)
                return found

            msa, pair = _run_checkpointed(run, len(self.modules), msa, pair)
        return msa, pair


class FastFoldBlocks:
    """FastFold's blocks, with OpenFold's weights."""

    def __init__(self, weights: Path, case: Case, products: Products | None) -> None:
        config = model_config("model_1")
        config.model.embeddings_and_evoformer.evoformer_num_block = case.blocks
        config.model.embeddings_and_evoformer.extra_msa_stack_num_block = 1
        with torch.device("meta"):
            network = AlphaFold(config)
        mappings = [each for each in alphafold_mappings(network) if each.name.startswith(_PREFIX)]
        tensors = {f"{_PREFIX}{name}": x for name, x in torch.load(weights, weights_only=True).items()}
        state = read_parameters(network, mappings, OpenFoldParameters(tensors, str(weights)))
        self.modules: EvoformerStack = network.evoformer.to_empty(device="cpu").eval()
        own = {name: state[f"evoformer.{name}"] for name in self.modules.state_dict()}
        self.modules.load_state_dict(own)
        self._products = products

    def infer(self, inputs: Inputs, pieces: bool) -> tuple[Tensor, Tensor]:
        """See :class:`Program`."""
        set_policy(self.modules, ExecutionPolicy(block_elements=2**20 if pieces else None, inplace=True))
        reduced = nullcontext() if self._products is None else reduced_products(self._products)
        with exact_products(torch.device("cpu")), reduced:
            found: tuple[Tensor, Tensor] = self.modules(*inputs)
        return found

    def train(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """See :class:`Program`."""
        set_policy(self.modules, ExecutionPolicy())
        self.modules.checkpointing = len(self.modules.blocks) > 1
        found: tuple[Tensor, Tensor] = self.modules(*inputs)
        return found


def _run_checkpointed(run: Callable[..., Any], blocks: int, *inputs: Tensor) -> Any:
    return checkpoint(run, *inputs, use_reentrant=False) if blocks > 1 else run(*inputs)


def randomize(modules: nn.Module) -> None:
    """Fill the modules with weights that preserve a signal's size.

    OpenFold initialises the last layer of each branch with zeros.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in modules.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
            else:
                parameter.add_(0.02 * noise)


# ---- a process with one of them ----------------------------------------------------------------------------


def make_inputs(case: Case) -> Inputs:
    """Return random MSA and pair, equal in every process, and masks that hide nothing."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(case.sequences, case.residues, C_M, generator=generator),
        torch.randn(case.residues, case.residues, C_Z, generator=generator),
        torch.ones(case.sequences, case.residues),
        torch.ones(case.residues, case.residues),
    )


def one_pass(program: Program, name: str, inputs: Inputs) -> tuple[float, tuple[Tensor, Tensor]]:
    """Run a pass; return its seconds and its results."""
    msa, pair, *masks = inputs
    if name == "forward + backward":
        leaves = msa.clone().requires_grad_(), pair.clone().requires_grad_()
        start = time.perf_counter()
        outputs = program.train((*leaves, masks[0], masks[1]))
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
        seconds = time.perf_counter() - start
        program.modules.zero_grad(set_to_none=True)
        return seconds, (leaves[0].grad, leaves[1].grad)  # type: ignore[return-value]
    own = msa.clone(), pair.clone()
    with torch.no_grad():
        start = time.perf_counter()
        found = program.infer((*own, masks[0], masks[1]), name == "forward in pieces")
        return time.perf_counter() - start, found


def work(options: argparse.Namespace) -> None:
    """Answer the requests of the parent process: the name of a pass in, a JSON object out."""
    limit = parse_bytes(options.memory)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    folder, case = Path(options.worker[1]), CASES[options.case]
    program: Program
    if options.worker[0] == "openfold":
        program = OpenFoldBlocks(options.openfold, case)
        randomize(program.modules)
        torch.save(program.modules.state_dict(), folder / "weights.pt")
    else:
        program = FastFoldBlocks(folder / "weights.pt", case, PRODUCTS[options.precision])
    inputs = make_inputs(case)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        before = process_memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        try:
            seconds, found = one_pass(program, request["pass"], inputs)
        except (RuntimeError, MemoryError) as error:
            if "alloc" not in str(error) and not isinstance(error, MemoryError):
                raise
            answer: dict[str, Any] = {"out_of_memory": True}
        else:
            answer = {"seconds": seconds, "peak": process_memory("VmHWM") - before}
            if request["keep"]:
                torch.save(found, folder / f"{options.worker[0]}.pt")
            del found
        print(json.dumps(answer), flush=True)


# ---- the parent ------------------------------------------------------------------------------------------


class Worker:
    """Process with one of the programs.

    Raises:
        RuntimeError: The process ended.
    """

    def __init__(self, name: str, folder: Path, options: argparse.Namespace) -> None:
        arguments = ["--openfold", str(options.openfold), "--case", options.case, "--memory", options.memory]
        arguments += ["--precision", options.precision, "--worker", name, str(folder)]
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def ask(self, name: str, *, keep: bool = False) -> dict[str, Any]:
        """Let the process run a pass, and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"pass": name, "keep": keep}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process with {self._name} ended (status {self._process.wait()})")
        found: dict[str, Any] = json.loads(line)
        return found


def difference(folder: Path) -> float:
    """Return the difference of the programs' last results, relative to the root mean square.

    The largest difference would not do: at ReLU inputs near zero, rounding decides if a gradient passes.
    """
    ours, theirs = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("fastfold", "openfold"))
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Measure times and peaks of both programs, and the difference of their outputs."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workers: Mapping[str, Worker] = {}
        try:
            workers = {each: Worker(each, folder, options) for each in ("openfold", "fastfold")}
            for each in PASSES:
                first = {program: worker.ask(each, keep=True) for program, worker in workers.items()}
                result: dict[str, Any] = {}
                finished = [program for program, answer in first.items() if "seconds" in answer]
                if len(finished) == 2:
                    result["difference"] = difference(folder)
                rounds = [
                    {program: workers[program].ask(each) for program in finished}
                    for _ in range(options.rounds)
                ]
                for program in finished:
                    result[program] = {
                        "seconds": statistics.median(found[program]["seconds"] for found in rounds),
                        "peak": max(found[program]["peak"] for found in rounds),
                    }
                if len(finished) == 2:
                    result["times_faster"] = statistics.median(
                        found["openfold"]["seconds"] / found["fastfold"]["seconds"] for found in rounds
                    )
                results[each] = result
        finally:
            for worker in workers.values():
                worker.close()
    return results


def show(case: Case, results: Mapping[str, Any], unit: int) -> None:
    """Print a table: seconds, their ratio, and peaks in U (a pair tensor) and GiB."""
    print(f"{case}, float32, {torch.get_num_threads()} threads; one U is {unit / 2**20:.0f} MiB")
    print(f"{'':<19} {'FastFold':>22} {'OpenFold':>22}  times faster  difference")
    for name, result in results.items():
        cells = []
        for program in ("fastfold", "openfold"):
            if program in result:
                found = result[program]
                cells.append(f"{found['seconds']:.2f} s, {found['peak'] / unit:.1f} U")
            else:
                cells.append("out of memory")
        ratio = f"{result['times_faster']:.2f}" if "times_faster" in result else "-"
        difference = f"{result['difference']:.1e}" if "difference" in result else "-"
        print(f"{name:<19} {cells[0]:>22} {cells[1]:>22}  {ratio:>12}  {difference:>10}")


def main() -> None:
    """Compare the programs, print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--openfold", type=Path, required=True, metavar="DIR", help="checkout of OpenFold")
    parser.add_argument("--case", choices=CASES, default="one", help="one block or four (default one)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each pass (default 3)")
    parser.add_argument(
        "--precision",
        choices=PRODUCTS,
        default="fp32",
        help="precision of FastFold's products in forward passes; OpenFold's is float32 (default fp32)",
    )
    parser.add_argument("--memory", default="16GiB", help="limit of each process (default 16GiB)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.openfold / "openfold" / "model" / "evoformer.py").is_file():
        parser.error(
            f"--openfold: expected OpenFold's checkout, found no openfold/model/evoformer.py in {options.openfold}"
        )
    if importlib.util.find_spec("scipy") is None:
        parser.error("OpenFold's modules need scipy: pip install scipy")
    if options.worker:
        work(options)
        return
    case = CASES[options.case]
    results = compare(options)
    show(case, results, case.residues**2 * C_Z * 4)
    if options.json:
        about = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "precision": options.precision,
        }
        options.json.write_text(json.dumps({"case": str(case), **about, "passes": results}, indent=1) + "\n")
    apart = [result["difference"] for result in results.values() if "difference" in result]
    if options.precision == "fp32" and max(apart, default=0.0) > TOLERANCE:
        sys.exit(f"outputs or gradients differ by {max(apart):.1e}, more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
