"""The guard study: share of harmful bit flips detected and healed, detection latency, false alarms, and cost.

Small training runs with virtual workers start many times from the same in-memory state. Each trial injects one bit
flip: first without the guard, to see whether it changes the outcome class, then the same flip with ``--guard heal``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from holdfast.errors import ConfigError
from holdfast_lab.studies.base import FAILED, NOT_RUN, Options, Row, Study, Task, check_parts, parts_left_out
from holdfast_lab.studies.campaign import run_campaign
from holdfast_lab.studies.campaign_plan import Campaign, Cell, StopRule
from holdfast_lab.studies.campaign_table import each_row
from holdfast_lab.studies.guard.cells import CellGroup, parts
from holdfast_lab.studies.guard.claims import hold_claims
from holdfast_lab.studies.guard.cost import LARGE, cost_tasks
from holdfast_lab.studies.guard.page import sections
from holdfast_lab.studies.guard.rows import bit_rows, clean_row, kind_row, missed_rows
from holdfast_lab.studies.guard.setup import WEIGHTS
from holdfast_lab.studies.guard.trial import GUARD, SAMPLED, prepare, prepare_clean, trial, trial_clean

FLIPS, COST = "flips", "cost"
ONLY = (FLIPS, "clean", COST)


class _Plan:
    def __init__(self, options: Options) -> None:
        check_parts(options.only, ONLY)
        for option, given in (("--network", options.model), ("--data", options.data)):
            if given:
                raise ConfigError(
                    f"{option} cannot be used with the guard study, which trains its own small networks on digits; "
                    f"got {str(given)!r}: leave it out"
                )
        self._options = options

    def settings(self) -> dict[str, Any]:
        return {
            "only": list(self._options.only),
            "trials a cell": self._options.repetitions or "as the design says",
            "guard": GUARD,
            "guard tried with flips without harm, share": SAMPLED,
        }

    def tasks(self) -> list[Task]:
        wanted = self._options.only or ONLY
        chosen = [
            part
            for part in parts(self._options.seed, quick=self._options.quick, trials=self._options.repetitions)
            if ("clean" if part.clean else FLIPS) in wanted
        ]
        tasks = [Task(part.name, partial(_campaign, self._options, part)) for part in chosen]
        return tasks + (
            cost_tasks(self._options.seed, self._options.repetitions, quick=self._options.quick)
            if COST in wanted
            else []
        )

    def left_out(self) -> list[str]:
        told = ["Flips in models that are split: --guard heal is refused for them."]
        told += parts_left_out(self._options.only, ONLY)
        if self._options.quick:
            told.append(
                "All bits except the critical one; 4 workers; other optimizers and networks; nearly all of the clean "
                f"steps; the cost with {LARGE.name.partition(', ')[2]}."
            )
        return told


STUDY = Study(
    name="guard",
    title="The guard: detection, healing, false alarms and cost",
    paper="the claims of docs/how-to/guard-against-corruption.md; no paper",
    intervals=(
        "95 % intervals: for shares of flips and for alarms, Wilson; for shares weighted by bits, combined by the "
        "method of Zou and Donner; for times, bootstrap over the rounds."
    ),
    task_s=260.0,
    quick_task_s=20.0,
    plan=_Plan,
    claims=lambda rows, _: hold_claims(rows),
    page=sections,
)


def _campaign(options: Options, part: CellGroup, _: Sequence[Row]) -> list[Row]:
    """Run the missing trials of a part, in the part's own table, and return its rows."""
    path = options.out / f"{part.name.replace(', ', '-').replace(' ', '-')}.sqlite"
    stop = StopRule(width=0.0, batch=part.trials, least=part.trials, most=part.trials)
    begins, makes = (prepare_clean, trial_clean) if part.clean else (prepare, trial)
    campaign = Campaign(
        name=f"{STUDY.name}: {part.name}", seed=options.seed, cells=part.cells, prepare=begins, trial=makes, stop=stop
    )
    broken = run_campaign(campaign, path, len(os.sched_getaffinity(0)))
    of = {cell.name: list(each_row(path, cell.name)) for cell in part.cells}
    rows: list[Row] = [{"part": "cell", "status": FAILED, "training": name, "why": why} for name, why in broken.items()]
    return rows + (_clean_rows(part.cells, of) if part.clean else flip_rows(part.cells, of))


def _clean_rows(cells: Sequence[Cell], of: dict[str, list[Row]]) -> list[Row]:
    return [clean_row(cell, of[cell.name]) for cell in cells if of[cell.name]]


def flip_rows(cells: Sequence[Cell], of: dict[str, list[Row]]) -> list[Row]:
    """Return the rows of cells with flips; cells that differ only in their stratum of bits are combined.

    Args:
        cells: The cells of a part.
        of: Their trials, by cell name.
    """
    rows: list[Row] = []
    groups: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        alike = json.dumps({name: value for name, value in cell.settings.items() if name != "bits"})
        groups.setdefault(alike, {})[cell.settings["bits"]] = cell
    for strata in groups.values():
        # A trial whose process died twice has no other results.
        known = {bits: [row for row in of[cell.name] if "differs" in row] for bits, cell in strata.items()}
        known = {bits: trials for bits, trials in known.items() if trials}
        if not known:
            continue
        every = [row for trials in known.values() for row in trials]
        settings = every[0]
        rows += [kind_row(settings, known), *missed_rows(every)]
        if settings["target"] == WEIGHTS:
            rows += bit_rows(settings, every)
        if lost := sum(len(of[cell.name]) for cell in strata.values()) - len(every):
            why = f"{lost} trials ended without a result"
            rows.append({"part": "trials", "status": NOT_RUN, "training": settings["network"], "why": why})
    return rows
