"""``report.html``: a page of a folder of results, in one file and without a network."""

from fastfold.inference.report.write import write_report

__all__ = ["write_report"]
