"""HTML elements of the report. All text is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from partita.report.plot_style import PointTitles, Style, svg
from partita.storage.safe_text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def escape(text: str) -> str:
    """Escape untrusted text such as labels and client names for an HTML element or attribute."""
    return html.escape(printable(text))


def breakable(text: str) -> str:
    """Escape text and allow line breaks inside long words, after punctuation marks."""
    return re.sub(r"(?<=\w[,(./+_])(?=[^\s\d])", "<wbr>", escape(text))


def preformatted(text: str) -> str:
    """Return text with its line breaks."""
    return "<pre>" + "\n".join(map(escape, text.split("\n"))) + "</pre>"


def html_table(headings: Sequence[str], body: Iterable[Sequence[str]], kind: str = "text") -> str:
    """Return a table with the given headings and body. `kind` is its CSS class."""
    top = "".join(f"<th>{breakable(heading)}</th>" for heading in headings)
    rows = "".join(f"<tr>{''.join(f'<td>{breakable(str(cell))}</td>' for cell in cells)}</tr>\n" for cells in body)
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{top}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody></table></div>\n"
    )


def html_list(comments: Iterable[str]) -> str:
    """Return a list of comments, with the text before a colon in bold; nothing if there are none."""
    items = ""
    for comment in comments:
        about, colon, rest = comment.partition(": ")
        items += f"<li><b>{escape(about)}</b>{colon}{escape(rest)}</li>" if colon else f"<li>{escape(comment)}</li>"
    return f'<ul class="notes">{items}</ul>\n' if items else ""


def value_with_spread(text: str) -> str:
    """Set the spread or interval after a value in small type."""
    value, space, rest = text.partition(" ")
    return f"{escape(value)}{space}<small>{escape(rest)}</small>" if rest[:1] in ("±", "[") else escape(text)


def line_sample(style: Style) -> str:
    """Return a short line in the style of a label's curve."""
    dash = (
        "" if style.dash == "solid" else f' stroke-dasharray="{" ".join(str(3 * length) for length in style.dash[1])}"'
    )
    line = f'<line x1="0" y1="5" x2="26" y2="5" stroke="{style.color}" stroke-width="4"{dash}/>'
    return f'<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true">{line}</svg>'


def collapsible(summary: str, content: str) -> str:
    """Return content that a click on its summary shows."""
    return f"<details><summary>{escape(summary)}</summary>\n{content}</details>\n"


def html_figure(name: str, figure: Figure | None, head: str, caption: str, titles: PointTitles | None = None) -> str:
    """Return a figure with its caption; nothing if there is no figure.

    Args:
        name: The id of the element, and the prefix of ids in the drawing.
        figure: The figure, or None.
        head: The bold start of the caption, also the text for screen readers.
        caption: The rest of the caption.
        titles: Texts that a browser shows for points; see `plot_style.svg`.
    """
    if figure is None:
        return ""
    drawing = svg(figure, name, titles).replace("<svg", f'<svg role="img" aria-label="{escape(head)}"', 1)
    return (
        f'<figure id="{name}">\n<div class="wide">{drawing}</div>\n'
        f"<figcaption><b>{escape(head)}</b> {escape(caption)}</figcaption>\n</figure>\n"
    )
