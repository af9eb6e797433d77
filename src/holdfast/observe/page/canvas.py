"""The style of figures: size, colours, and conversion to inline SVG.

Everything is laid out in inches on figures of one width or half of it, so that letters have the same size in every figure of a page.
"""

from __future__ import annotations

import csv
import html
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NEEDED = "a page needs jinja2 and matplotlib; install them with: pip install 'holdfast[report]'"
"""The message if one of them is missing."""

WIDTH_IN = 10.0
HALF_IN = 4.5
"""Width of a figure that stands beside another one, and below it on a narrow screen."""

INK = "#1b2430"
SOFT = "#5b6675"
FAINT = "#aab2bd"
LINE = "#e3e7ec"
# After Okabe and Ito's palette, which remains distinguishable under all common forms of colour blindness.
WORK = "#0072b2"
WORK_LIGHT = "#a9cbe4"
DEATH = "#c8351b"
RECOVERY = "#f5c451"
SEEN = "#b36a00"
DECIDED = "#00805a"
ASIDE = "#cc79a7"
ACCURACY = "#00805a"

_IN_THE_DARK = {
    INK: "ink",
    SOFT: "soft",
    FAINT: "axis",
    LINE: "line",
    WORK: "work",
    WORK_LIGHT: "work-light",
    DEATH: "death",
    SEEN: "seen",
    DECIDED: "good",
    "#ffffff": "paper",
}
"""Colours that a page replaces in dark mode, and the names of its variables for them."""

_FONTS = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "holdfast",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": SOFT,
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": True,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "lines.solid_capstyle": "butt",
}

_DOTS_PER_IN = 200
_folder: ContextVar[Path | None] = ContextVar("folder of figures", default=None)


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Also write each figure drawn inside the block to ``folder``: as SVG, and as PNG for slides.

    Raises:
        ConfigError: if the folder cannot be written.
    """
    token = _folder.set(folder)
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write figures to {folder}: {error.strerror}") from error
    finally:
        _folder.reset(token)


def keep_rows(label: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows that a figure shows as a CSV file beside it; does nothing if figures are not kept."""
    if (path := _path_of(label)) is not None:
        path.with_suffix(".csv").write_text(as_csv(rows), newline="")


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as the text of a CSV file, with a column for each key; lists and tables are left out."""
    flat = [{key: value for key, value in row.items() if not isinstance(value, list | dict)} for row in rows]
    text = StringIO(newline="")
    table = csv.DictWriter(text, list(dict.fromkeys(key for row in flat for key in row)))
    table.writeheader()
    table.writerows(flat)
    return text.getvalue()


def _path_of(label: str) -> Path | None:
    """Return the path of a figure's files without their suffix; None if figures are not kept."""
    folder = _folder.get()
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return folder / re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


class Canvas:
    """One figure, with axes placed on it in inches from its lower left corner."""

    def __init__(self, figure: Figure, height_in: float, width_in: float = WIDTH_IN) -> None:
        self.figure = figure
        self.height_in = height_in
        self.width_in = width_in

    def axes(self, left: float, bottom: float, width: float, height: float) -> Axes:
        """Return new axes at this position."""
        box = (left / self.width_in, bottom / self.height_in, width / self.width_in, height / self.height_in)
        return self.figure.add_axes(box)

    def svg(self, label: str) -> str:
        """Return the figure as an ``<svg>`` element that fills the width of its container.

        Args:
            label: Text for screen readers.
        """
        text = StringIO()
        self.figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
        if (path := _path_of(html.unescape(label))) is not None:
            path.with_suffix(".svg").write_text(text.getvalue())
            self.figure.savefig(path.with_suffix(".png"), dpi=_DOTS_PER_IN, facecolor="white")
        return _inline(text.getvalue(), label, self.width_in)


@contextmanager
def canvas(height_in: float, width_in: float = WIDTH_IN) -> Iterator[Canvas]:
    """Create a figure; everything drawn inside the block has the standard style.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(NEEDED) from error
    # A user's own matplotlibrc must not change the page.
    style: Any = {k: v for k, v in mpl.rcParamsDefault.items() if "backend" not in k} | _STYLE
    with mpl.rc_context(style):
        yield Canvas(Figure(figsize=(width_in, height_in)), height_in, width_in)


def _inline(svg: str, label: str, width_in: float) -> str:
    """Remove from matplotlib's SVG file everything that an HTML page cannot hold or would hold twice."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # every figure uses the same ids
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("'DejaVu Sans', sans-serif", _FONTS).replace("'DejaVu Sans'", _FONTS)
    for colour, name in _IN_THE_DARK.items():
        svg = svg.replace(colour, f"var(--{name}, {colour})")
    svg = svg.replace("*{stroke-linejoin", "svg *{stroke-linejoin")  # a style in a figure would apply to the whole page
    head = re.match(r"<svg[^>]*>", svg)
    assert head is not None
    viewbox = re.search(r'viewBox="[^"]*"', head[0])
    assert viewbox is not None
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    width = f'style="--in: {width_in:g}"'  # below a least width for each inch, a page lets the figure scroll
    return f'<svg {names} {viewbox[0]} {width} role="img" aria-label="{label}">{svg[head.end() :].strip()}'
