"""``report.html``: a self-contained page about a folder of results."""

from fastfold.inference.report.write import write_report

__all__ = ["write_report"]
