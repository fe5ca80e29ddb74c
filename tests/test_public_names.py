"""The names that people import are there, are what they say, and cost nothing before they are used."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

NAMES = {
    "fastfold": (
        "load_model",
        "predict",
        "predict_many",
        "quantize",
        "relax_prediction",
        "view",
        "embed",
        "export",
        "load_exported",
        "search",
        "train",
        "Prediction",
        "Sampling",
        "AlphaFold",
        "model_config",
        "featurize",
        "Protein",
        "compare_structures",
        "parallelize",
        "ParallelPlan",
        "Gemini",
        "GeminiConfig",
        "FastFoldError",
        "__version__",
    ),
    "fastfold.data": ("featurize", "read_fasta", "read_msa", "Msa", "open_dataset"),
    "fastfold.protein": (
        *("Protein", "read_structure", "lddt", "tm_score", "gdt"),
        *("to_biopython", "to_biotite", "to_mdanalysis"),
    ),
    "fastfold.protein.objects": ("to_biopython", "to_biotite", "to_mdanalysis"),
    "fastfold.training": ("Trainer", "TrainConfig"),
}


@pytest.mark.parametrize("package", NAMES)
def test_every_public_name_is_there_with_its_documentation(package: str) -> None:
    module = importlib.import_module(package)
    for name in NAMES[package]:
        found = getattr(module, name)
        assert isinstance(found, str) or (found.__name__ == name and inspect.getdoc(found)), name
        assert name in dir(module)
    assert set(module.__all__) == set(NAMES[package])


@pytest.mark.parametrize("package", NAMES)
def test_a_name_that_is_not_there_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'no_such_name'"):
        _ = importlib.import_module(package).no_such_name


@pytest.mark.parametrize("package", NAMES)
def test_importing_a_package_loads_neither_pytorch_nor_numpy(package: str) -> None:
    code = f"import sys, {package} as p; dir(p); print([x for x in ('torch', 'numpy') if x in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_fold_imports_no_package_that_only_some_folds_need() -> None:
    packages = ("Bio", "gemmi", "matplotlib", "modelcif", "openmm", "pandas", "scipy", "sympy", "triton")
    code = f"import sys, fastfold.inference.runner; print([x for x in {packages} if x in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
