"""``holdfast report``: draws the page of a run, a demo, a study or a simulation, or of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option


def report(
    directories: Annotated[
        list[Path],
        Argument(
            metavar="DIR...",
            help="Directory of report.json or results.json; several: of report.json each.",
            show_default=False,
        ),
    ],
    *,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="The page of several runs  [comparison.html in the first DIR]")
    ] = None,
    show: Annotated[bool, Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Draw the page of a run, demo, study or simulation, or compare several runs, and print the path of the page.

    For one DIR the page is DIR/index.html. For several, the page shows the metrics of all runs in the same axes, and
    compares the others with the first. A page is a single file that needs no network; each figure can be saved as SVG
    and PNG, and its values as CSV.

    Example: holdfast report undisturbed killed --out comparison.html
    """
    from holdfast.errors import ConfigError
    from holdfast.observe.page.comparison import write_comparison
    from holdfast.observe.page.html import write_page

    first, *other_directories = directories
    if not other_directories and out is not None:
        raise ConfigError(f"--out is for the page of several runs; the page of one is {first / 'index.html'}")
    page = write_comparison(directories, out or first / "comparison.html") if other_directories else write_page(first)
    print(page)
    if show:
        typer.launch(str(page))
