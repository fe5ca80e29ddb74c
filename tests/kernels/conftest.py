"""Triton kernels of this folder's tests run in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import torch

# Triton reads the variable when its own functions are defined, so this stands before anything imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
