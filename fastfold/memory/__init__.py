"""Memory of big models on small devices: general, for any ``nn.Module``.

:class:`Gemini` manages a model in one line; :func:`plan` is its planner, to be used alone.
"""

from .devices import DeviceFull
from .gemini import Gemini
from .planner import choose_spans, plan, with_spans
from .schedule import Access, BudgetError, Plan, Span, smallest_budget
from .simulated import SimulatedDevice
from .sizes import parse_bytes
from .tiers import NvmeTier, Tier

__all__ = [
    "Access",
    "BudgetError",
    "DeviceFull",
    "Gemini",
    "NvmeTier",
    "Plan",
    "SimulatedDevice",
    "Span",
    "Tier",
    "choose_spans",
    "parse_bytes",
    "plan",
    "smallest_budget",
    "with_spans",
]
