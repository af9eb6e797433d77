"""Write the generated parts of the reference pages from the code: `python docs/generate.py`.

A generated part is between `<!-- generated: NAME -->` and `<!-- end of NAME -->`. A test compares the pages with the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import typer

from holdfast import errors
from holdfast.base.options import DeclaredOption, fields_of, variable
from holdfast.base.phases import Phase
from holdfast.cli import app, exit_code_of
from holdfast.cli.run import OPTIONS
from holdfast.config import Settings
from holdfast.observe.monitor.metrics import METRICS
from holdfast.records.encoding import RECORDS
from holdfast.summary.goodput import CAUSES

OF_THE_LAUNCHER = ("ranks", "rank", "store", "run_dir", "origin_s", "launch_dir")
"""Settings that only the launcher gives to its workers."""
REFERENCE = Path(__file__).parent / "reference"
HELP_MODULE = Path(__file__).parents[1] / "src" / "holdfast" / "cli" / "help_text.py"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
"""Where benchmarks that were run on a GPU leave ``gpu-NAME.json``."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines = [line.replace("|  |", "| |") for line in lines]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines])


def options() -> str:
    """Return one table for each group of the options of `holdfast run`, each under its heading."""
    intro = "`holdfast run --help` lists the most used options, `--help-all` all of them, by group."
    groups = groupby(OPTIONS, key=lambda each: each.option.group)
    return "\n\n".join([intro, *(f"### {group}\n\n{_of_group(list(members))}" for group, members in groups)])


def _of_group(members: Sequence[DeclaredOption]) -> str:
    rows = [(_flags(each), each.manual, each.usual) for each in members]
    return table(("option", "meaning", "default"), rows)


def _flags(declared: DeclaredOption) -> str:
    names = [name for flag in sorted(declared.flags, key=len) for name in flag.split("/")]
    value = "" if declared.kind is bool else f" {declared.metavar}"
    return ", ".join([*(f"`{name}`" for name in names[:-1]), f"`{names[-1]}{value}`"])


def settings() -> str:
    """Return a row for each setting that a user may give: its option, its variable, its default."""
    flags = {each.name: f"`{each.flag}`" for each in fields_of(Settings) if each.option.help}
    rows = []
    for field in dataclasses.fields(Settings):
        if field.name not in OF_THE_LAUNCHER:
            default = f"`{field.default}`" if field.default != "" else "none"
            rows.append((f"`{field.name}`", flags.get(field.name, "none"), f"`{variable(field.name)}`", default))
    return table(("setting", "option", "variable", "default"), rows)


def records() -> str:
    """Return a row for each record: its fields, with the default of those that have one."""
    rows = []
    for name, kind in sorted(RECORDS.items()):
        fields = [field for field in dataclasses.fields(kind) if field.name not in ("t_s", "rank", "step")]
        said = [f"`{f.name}{'' if f.default is dataclasses.MISSING else f' = {f.default!r}'}`" for f in fields]
        rows.append((f"`{name}`", ", ".join(said)))
    return table(("record", "fields"), rows)


def causes() -> str:
    """Return a row for each cause of badput."""
    return table(("cause", "meaning"), [(f"`{cause}`", meaning) for cause, meaning in CAUSES.items()])


def metrics() -> str:
    """Return a row for each metric that a running job exports."""
    rows = [(f"`{m.name}`", m.kind, f"`{m.label}`" if m.label else "", m.help) for m in METRICS]
    return table(("metric", "kind", "label", "meaning"), rows)


def exit_codes() -> str:
    """Return a row for each error of `holdfast.errors`: the exit code of a command that it ends."""
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.HoldfastError)]
    rows = [(f"`{kind.__name__}`", str(exit_code_of(kind)), _first_sentence(kind)) for kind in kinds]
    return table(("error", "code", "meaning"), sorted(rows, key=lambda row: (row[1], row[0])))


def phases() -> str:
    """Return a row for each phase of a job: what watches it, its limit, and what happens at its end."""
    rows = [(p.value.name, p.value.owner, p.value.limit, p.value.clock, p.value.at_end) for p in Phase]
    return table(("phase", "watched by", "limit", "counted while", "then"), rows)


EVIDENCE = ("benchmark", "command", "card", "cards", "driver", "torch", "commit", "date")
"""What each result of a GPU must say: a text, except for ``cards``, their number."""


def gpu_evidence(results: Path = RESULTS) -> str:
    """Return a row for each figure in ``gpu-*.json`` of a folder: what was measured, and on which card.

    Raises:
        ValueError: if a file lacks one of :data:`EVIDENCE`, or ``figures``, texts by their names.
    """
    rows = []
    for path in sorted(results.glob("gpu-*.json")):
        result = json.loads(path.read_text())
        if missing := [name for name in (*EVIDENCE, "figures") if not result.get(name)]:
            raise ValueError(f"{path.name} must say {', '.join(missing)}")
        card = f"{result['cards']} x {result['card']}, driver {result['driver']}, torch {result['torch']}"
        made = f"`{result['command']}`", card, f"{result['commit'][:9]}, {result['date']}"
        rows += [(result["benchmark"], f"{name}: {figure}", *made) for name, figure in result["figures"].items()]
    if not rows:
        return "There is no result: **nothing of Holdfast was run on a GPU** so far."
    return table(("benchmark", "result", "command", "card", "commit"), rows)


def _first_sentence(kind: type) -> str:
    words = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    return re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", words.replace("``", "`"))


GENERATED: dict[str, tuple[str, Callable[[], str]]] = {
    "options of holdfast run": ("cli.md", options),
    "settings": ("configuration.md", settings),
    "fields of records": ("records.md", records),
    "causes of badput": ("report.md", causes),
    "metrics": ("metrics.md", metrics),
    "phases of a job": ("phases.md", phases),
    "exit codes of errors": ("exit-codes.md", exit_codes),
    "results on GPUs": ("gpu-evidence.md", gpu_evidence),
}
"""Name of a generated part: its page, and what writes it."""


def rewritten(page: str, name: str) -> str:
    """Return a page with a generated part as the code has it now; ValueError if a marker is missing."""
    begin, end = f"<!-- generated: {name} -->", f"<!-- end of {name} -->"
    before, behind = page[: page.index(begin)], page[page.index(end) :]
    return f"{before}{begin}\n\n{GENERATED[name][1]()}\n\n{behind}"


def help_module() -> str:
    """Return the module that has the text of `holdfast --help`, as it is in a terminal of 80 columns or more."""
    command = typer.main.get_command(app)
    context = command.context_class(command, info_name="holdfast", terminal_width=78)
    doc = "What ``holdfast --help`` prints in a terminal of 80 columns or more; written by ``python docs/generate.py``."
    return f'"""{doc}"""\n\nHELP = """\\\n{command.get_help(context)}"""\n'


if __name__ == "__main__":
    HELP_MODULE.write_text(help_module())
    for name, (page, _) in GENERATED.items():
        path = REFERENCE / page
        path.write_text(rewritten(path.read_text(), name))
