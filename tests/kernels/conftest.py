"""Triton kernels of this folder's tests run in Triton's interpreter where there is no GPU.

The interpreter of Triton 3.6 needs NumPy before 2.4, which no longer turns arrays of one element into numbers; that of
Triton 3.9 takes any.
"""

from __future__ import annotations

import os

import torch

# Triton reads the variable when its own functions are defined, so this stands before anything imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
