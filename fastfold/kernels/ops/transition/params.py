"""Parameters of a transition."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

EPS = 1e-5  #: Added to the variance in the normalisation


class TransitionParams(NamedTuple):
    """Parameters of :func:`fastfold.kernels.transition`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.kernels import TransitionParams, transition
        >>> norm, first, second = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        >>> parameters = TransitionParams(*norm.parameters(), *first.parameters(), *second.parameters())
        >>> transition(torch.randn(3, 5, 8), parameters).shape
        torch.Size([3, 5, 8])
    """

    norm_weight: Tensor  #: ``[c]``, scale of the normalisation
    norm_bias: Tensor  #: ``[c]``, its shift
    w1: Tensor  #: ``[n c, c]``
    b1: Tensor  #: ``[n c]``
    w2: Tensor  #: ``[c, n c]``
    b2: Tensor  #: ``[c]``
