"""Tables, an HTML page and figures from recorded runs. Jinja2, matplotlib and scipy are imported lazily."""

from partita.report.comparison import Comparison
from partita.report.draw import figures, picture
from partita.report.load import ReportError, RunRecord, find, load_run, load_runs, read_metric
from partita.report.page import page
from partita.report.render import to_json, to_markdown, to_text
from partita.report.tables import compare

__all__ = [
    "Comparison",
    "ReportError",
    "RunRecord",
    "compare",
    "figures",
    "find",
    "load_run",
    "load_runs",
    "page",
    "picture",
    "read_metric",
    "to_json",
    "to_markdown",
    "to_text",
]
