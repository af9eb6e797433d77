"""Write the option tables of docs/reference/cli.md from the declared options: `python docs/options_table.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from holdfast.cli.run import OPTIONS
from holdfast.options import DeclaredOption

PAGE = Path(__file__).parent / "reference" / "cli.md"
_BEGIN = "<!-- options of holdfast run: written by docs/options_table.py -->"
_END = "<!-- end of options -->"
_INTRO = "`holdfast run --help` lists the most used options, `--help-all` all of them, by group."


def tables(options: Sequence[DeclaredOption]) -> str:
    """Return one Markdown table for each group of options, each under its heading."""
    groups = groupby(options, key=lambda each: each.option.group)
    return "\n\n".join(f"### {group}\n\n{_table(list(members))}" for group, members in groups)


def _table(options: Sequence[DeclaredOption]) -> str:
    rows = [(_cell(each), each.manual, each.usual) for each in options]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    head = ["| option | meaning | default |", "|---|---|---|"]
    return "\n".join([*head, *(line.replace("|  |", "| |") for line in lines)])


def _cell(declared: DeclaredOption) -> str:
    names = [name for flag in sorted(declared.flags, key=len) for name in flag.split("/")]
    value = "" if declared.kind is bool else f" {declared.metavar}"
    return ", ".join(f"`{name}`" for name in names[:-1]) + (", " if names[1:] else "") + f"`{names[-1]}{value}`"


def rewritten(page: str) -> str:
    """Return the page with new tables between its two markers; raise a ValueError if a marker is missing."""
    before, behind = page[: page.index(_BEGIN)], page[page.index(_END) :]
    return f"{before}{_BEGIN}\n\n{_INTRO}\n\n{tables(OPTIONS)}\n\n{behind}"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
