"""Module of the server of workers: it compresses the page's viewer once, for all workers that the server forks."""

from __future__ import annotations

from fastfold.inference.report.molstar import pack_for_forks

pack_for_forks()
