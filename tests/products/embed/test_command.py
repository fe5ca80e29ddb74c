"""``fastfold embed``: resuming, seeds, and folders of another kind."""

from __future__ import annotations

import pytest
from safetensors.numpy import load_file

from tests.helpers.command_line import CommandLine
from tests.inference.runner.inputs import SEQUENCE


def test_embeddings_add_up_and_are_not_made_again(cli: CommandLine):
    fasta, weights = cli.fasta({"T1": SEQUENCE}), cli.weights()

    def embed(*more: str):
        return cli.run("embed", fasta, "--out", cli.out, "--weights", weights, "--num-recycles", "0", *more)

    done = embed("--arrays", "single,contacts")
    assert (done.code, done.out) == (0, f"1 embedded; results in {cli.out}\n")
    names = ["T1_model_1_ptm_seed_0.safetensors", "T1_model_1_ptm_seed_0_config.json"]
    assert cli.names() == names
    before = cli.contents()
    assert embed("--arrays", "contacts,single").out.startswith("0 embedded, 1 finished before")
    assert cli.contents() == before
    assert embed("--arrays", "single,contacts", "--seeds", "0-1").out.startswith("1 embedded;")
    assert "T1_model_1_ptm_seed_1.safetensors" in cli.names()
    shapes = {key: value.shape for key, value in load_file(cli.out / names[0]).items()}
    assert shapes == {"single": (10, 40), "contacts": (10, 10)}
    assert embed("--layer", "1", "--mean", "--dtype", "float16").code == 0
    (other,) = set(cli.out.glob("*.safetensors")) - {
        cli.out / f"T1_model_1_ptm_seed_{k}.safetensors" for k in (0, 1)
    }
    layer = load_file(other)
    assert {key: (value.shape, str(value.dtype)) for key, value in layer.items()} == {
        "msa_row": ((32,), "float16"),
        "pair": ((24,), "float16"),
    }
    (cli.out / names[0]).unlink()
    assert embed("--arrays", "single,contacts").out.startswith("1 embedded;")
    assert (cli.out / names[0]).is_file()


def test_predictions_and_embeddings_have_separate_folders(cli: CommandLine):
    fasta, weights = cli.fasta({"T1": SEQUENCE}), cli.weights()
    assert cli.run("embed", fasta, "--out", cli.out, "--weights", weights, "--num-recycles", "0").code == 0
    done = cli.infer(fasta, weights=[weights])
    assert done.code == 1
    assert "holds results in the format embeddings; give another --out" in done.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layer", "9"], "layer 9: model_1_ptm has 2 Evoformer blocks"),
        (["--arrays", "x"], "arrays: expected single, pair"),
    ],
)
def test_a_mistake_is_named_before_the_first_fold(cli: CommandLine, options: list[str], message: str):
    done = cli.run(
        "embed", cli.fasta({"T1": SEQUENCE}), "--out", cli.out, "--weights", cli.weights(), *options
    )
    assert done.code == 2
    assert message in done.err
    assert not cli.out.exists()


def test_an_input_is_needed(cli: CommandLine):
    done = cli.run("embed", "--out", cli.out)
    assert (done.code, "no input given" in done.err) == (2, True)
