"""A line with a progress bar, for terminals of any width."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_WIDEST, _NARROWEST = 40, 8
_PARTS = 1000


def bar_line(name: str, share: float | None, text: str, width: int) -> Table:
    """Return a line: a name, a bar, and a text; a terminal that is too narrow for a bar gets none.

    Args:
        name: What makes progress; cut if there is too little room.
        share: What is done, from 0 to 1; None if that is not known.
        text: Follows the bar.
        width: Columns of the terminal.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    percent = "" if share is None else f"{int(100 * share)} %  "
    after = Text(f"{percent}{text}", no_wrap=True, overflow="ellipsis")
    before = Text(name, no_wrap=True, overflow="ellipsis")
    before.truncate(max(0, width - len(after) - 1), overflow="ellipsis")
    room = min(_WIDEST, width - len(after) - len(before) - 2)
    row = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    if room < _NARROWEST:
        row.add_row(before, after)
        return row
    done = 0 if share is None else round(_PARTS * share)
    row.add_row(before, ProgressBar(total=_PARTS, completed=done, width=room, pulse=share is None), after)
    return row
