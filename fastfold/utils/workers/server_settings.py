"""First module that the server of workers imports: it ignores signals and limits threads of later modules."""

from __future__ import annotations

from fastfold.utils.workers.process import ignore_signals, limit_threads

ignore_signals()
limit_threads()
