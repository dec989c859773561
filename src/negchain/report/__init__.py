"""The report: what happened in a run, or in several, as one HTML page that needs no network."""

from .page import write_report
from .results import comparison_table, summary_table
from .runs import Run, load_run

__all__ = ["Run", "comparison_table", "load_run", "summary_table", "write_report"]
