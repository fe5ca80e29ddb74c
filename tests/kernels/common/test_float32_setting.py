"""PyTorch's newer settings of precision neither end a fold nor round it in silence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fastfold
from fastfold.kernels.common.float32_setting import exact_on_gpu, float32_setting
from fastfold.kernels.cpu.products import exact_products


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def test_both_interfaces_are_understood(restored: None) -> None:
    assert float32_setting() == "highest"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert float32_setting() == "high"
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert float32_setting() == "highest"
    torch.set_float32_matmul_precision("medium")
    assert float32_setting() == "medium"


def test_a_fold_on_a_cpu_is_the_same_after_tf32_was_allowed_on_gpus(restored: None) -> None:
    model = fastfold.load_model("mini", device="cpu")
    before = fastfold.predict("MKTAYIAKQR", model, num_recycles=0)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    after = fastfold.predict("MKTAYIAKQR", model, num_recycles=0)
    assert abs(after.atom_positions - before.atom_positions).max() < 1e-3


def test_a_fold_on_a_gpu_rounds_no_convolution_and_no_sum() -> None:
    convolutions, products = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = convolutions.fp32_precision, products.allow_bf16_reduced_precision_reduction
    for context in (exact_on_gpu(), exact_products(torch.device("cuda"))):
        with context:
            assert convolutions.fp32_precision == "ieee"
            assert not products.allow_bf16_reduced_precision_reduction
            assert not products.allow_fp16_reduced_precision_reduction
        assert (convolutions.fp32_precision, products.allow_bf16_reduced_precision_reduction) == before
