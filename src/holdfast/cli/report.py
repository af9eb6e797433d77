"""``holdfast report``: draws the page of a run or of a demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option


def report(
    directory: Annotated[Path, Argument(metavar="DIR", help="Directory of report.json or results.json.")],
    *,
    show: Annotated[bool, Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Draw the page of a run or demo: write DIR/index.html and print its path.

    The page is a single file that needs no network. Figures of a run are drawn from events.jsonl.

    Example: holdfast run -n 4 --report out train.py && holdfast report out --open
    """
    from holdfast.report import write_page

    page = write_page(directory)
    print(page)
    if show:
        typer.launch(str(page))
