"""Memory of big models on small devices: general, for any ``nn.Module``.

:class:`Gemini` manages a model in one line; :func:`plan` is its planner, to be used alone;
:class:`ActivationTier` sends saved activations home by the same rule.
"""

from .activations import ActivationTier
from .devices import DeviceFull
from .gemini import Gemini
from .planner import plan
from .schedule import Access, BudgetError, Plan, smallest_budget
from .simulated import SimulatedDevice
from .sizes import parse_bytes
from .tiers import NvmeTier, Tier

__all__ = [
    "Access",
    "ActivationTier",
    "BudgetError",
    "DeviceFull",
    "Gemini",
    "NvmeTier",
    "Plan",
    "SimulatedDevice",
    "Tier",
    "parse_bytes",
    "plan",
    "smallest_budget",
]
