"""Soft errors in data-parallel and model-parallel training: the experiments of Rojas, Perez and Meneses, on this code.

Real processes train, each with its own state and checkpoint file. A trial goes back to an epoch in the middle of the
training, alters bits in the state of some processes, resumes, and is compared with the undisturbed run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast_lab.studies.base import Options, Row, Study, Task, check_parts
from holdfast_lab.studies.campaign import run_campaign
from holdfast_lab.studies.campaign_plan import Campaign, StopRule
from holdfast_lab.studies.campaign_table import each_row
from holdfast_lab.studies.soft_errors.alone import alone_row, pair_for
from holdfast_lab.studies.soft_errors.cells import EXPERIMENTS, QUICK, Pair, cells_of, experiments, quick_pairs
from holdfast_lab.studies.soft_errors.claims import hold_claims
from holdfast_lab.studies.soft_errors.page import sections
from holdfast_lab.studies.soft_errors.rows import FACTORS, cell_row, error_rows, explained_rows, failed_row
from holdfast_lab.studies.soft_errors.setup import DDP, PLATFORMS, SESSION, SoftErrorSetup
from holdfast_lab.studies.soft_errors.trial import prepare, trial
from holdfast_lab.workloads import load_dataset
from holdfast_lab.workloads.data import DataMissing

TABLE, LARGE_TABLE = "trials.sqlite", "trials-large.sqlite"
"""Trials of the small networks, and of the large networks, for which fewer trials are made."""
QUICK_PLATFORMS = (DDP, SESSION)
SMALL, LARGE = ("mlp", "cnn"), ("resnet18", "resnet50")
NETWORKS = (*SMALL, *LARGE)
_DIGITS = "digits"
_FROM_FILES = ("cifar100", "cifar10", "fashion")

_TRIALS = 180
"""Trials per mechanism in the paper."""
_QUICK_TRIALS, _LARGE_TRIALS = 40, 20
_ALONE, _QUICK_ALONE = 40, 3
"""Trials that are rerun in fresh processes."""
_PROCESSES = 4
_SMALL = {"limit": 1_536, "test_limit": 500}
_LARGE = {"limit": 512, "test_limit": 200, "size": 16, "restart": 6}
"""Limits that keep a trial at a few seconds, for data read from files and for large networks: samples, image size,
restart epoch."""
_RESTART, _QUICK_RESTART = 20, 4
"""The paper's restart epoch, unless another is given."""
_WIDTH = 0.05


class _Plan:
    """What is run, and how."""

    def __init__(self, options: Options) -> None:
        self._options = options
        known = PLATFORMS if options.quick else (*PLATFORMS, *EXPERIMENTS)
        check_parts(options.only, known)
        check_parts([options.model] if options.model else [], NETWORKS, "--network")
        standing = QUICK_PLATFORMS if options.quick else PLATFORMS
        self.platforms = _named(options.only, PLATFORMS) or standing
        self.experiments = (QUICK,) if options.quick else _named(options.only, EXPERIMENTS) or EXPERIMENTS
        self.processes = 2 if options.quick else _PROCESSES
        self.trials = options.repetitions or (_QUICK_TRIALS if options.quick else _TRIALS)
        self.large_trials = options.repetitions or _LARGE_TRIALS
        is_one = options.quick or options.model  # otherwise every network runs on every dataset
        found = None if options.data is None else _found_in(options.data)
        self.base = self._setup(options.model or SMALL[0], (found or _DIGITS) if is_one else _DIGITS)
        pairs = [] if is_one else [(network, data) for data in (_DIGITS, found) if data for network in NETWORKS]
        self.others = [other for pair in pairs if (other := self._setup(*pair)) != self.base]

    def _setup(self, network: str, dataset: str) -> SoftErrorSetup:
        limits: Mapping[str, int] = _LARGE if network in LARGE else {} if dataset == _DIGITS else _SMALL
        return SoftErrorSetup(
            platform=PLATFORMS[0],
            processes=1,
            network=network,
            dataset=dataset,
            data="" if dataset == _DIGITS else str(self._options.data),
            restart=limits.get("restart", _QUICK_RESTART if self._options.quick else _RESTART),
            epochs=1,
            training_seed=self._options.seed,
            limit=limits.get("limit"),
            test_limit=limits.get("test_limit"),
            size=None if dataset.startswith("cifar") else limits.get("size"),
        )

    def settings(self) -> dict[str, Any]:
        return {
            "platforms": list(self.platforms),
            "experiments": list(self.experiments),
            "network": _trained(self.base),
            "further networks": [_trained(other) for other in self.others],
            "batch": self.base.batch,
            "optimizer": f"{self.base.optimizer}, with ReduceLROnPlateau on the mean training loss",
            "epochs after the restart": self.base.epochs,
            "processes": self.processes,
            "trials per cell": self.trials,
            "trials per cell of large networks": self.large_trials,
        }

    def tasks(self) -> list[Task]:
        if self._options.quick:
            parts = {QUICK: quick_pairs(self.base, self.platforms)}  # one part, so that processes are started once
        else:
            design = experiments(self.base, self.platforms, self.processes, self.others)
            parts = {name: pairs for experiment, name, pairs in design if experiment in self.experiments}
        if not parts:
            raise ConfigError(
                f"--only {' --only '.join(self._options.only)} leaves nothing to run: every experiment but crossed "
                f"needs {DDP}; add --only {DDP}"
            )
        tasks = [Task(name, partial(self._campaign, name, pairs)) for name, pairs in parts.items()]
        every = [pair for pairs in parts.values() for pair in pairs]
        if pair := pair_for([pair for pair in every if pair[1].network in SMALL]):
            tasks.append(Task("alone", partial(self._alone, pair), derived=True))
        return [*tasks, Task("explained", partial(self._explained, every), derived=True)]

    def left_out(self) -> list[str]:
        told = ["Horovod, and CIFAR-100 with ResNet-50 at full length; choose the nearest with --data and --network."]
        for what, all_of_them, chosen in (
            ("Platforms", PLATFORMS, self.platforms),
            ("Experiments", () if self._options.quick else EXPERIMENTS, self.experiments),
        ):
            if missing := [name for name in all_of_them if name not in chosen]:
                told.append(f"{what}: {', '.join(missing)}.")
        if self._options.quick:
            told.append(
                "All but one altered replica of two with 1 flip anywhere, 1 flip of the critical bit, or 100 below "
                "it: the optimizer, other numbers of flips and processes, bit by bit, layers, formats, propagation, "
                "bursts."
            )
        if self.trials < _TRIALS:
            told.append(f"Trials: {self.trials} per cell instead of at least {_TRIALS}.")
        if any(setup.network in LARGE for setup in (self.base, *self.others)):
            told.append(f"Trials of ResNets: {self.large_trials} per cell, on {_LARGE['limit']} samples.")
        return told

    # -- tasks

    def _campaign(self, name: str, pairs: Sequence[Pair], _: Sequence[Row]) -> list[Row]:
        cells, is_large = cells_of(pairs), pairs[0][1].network in LARGE
        path = self._options.out / (LARGE_TABLE if is_large else TABLE)
        campaign = Campaign(
            name=STUDY.name,
            seed=self._options.seed,
            cells=cells,
            prepare=prepare,
            trial=trial,
            stop=_stop(self.large_trials if is_large else self.trials),
        )
        at_once = max(1, len(os.sched_getaffinity(0)) // max(setup.real for _, setup in pairs))
        broken = run_campaign(campaign, path, at_once)
        rows: list[Row] = []
        for cell in cells:
            mine = list(each_row(path, cell.name))
            if cell.name in broken:
                rows.append(failed_row(cell.settings, broken[cell.name]))
            elif mine:
                rows += [cell_row(cell.settings, mine), *error_rows(cell.settings, mine)]
        return rows

    def _alone(self, pair: Pair, _: Sequence[Row]) -> list[Row]:
        [cell] = cells_of([pair])
        most = _QUICK_ALONE if self._options.quick else _ALONE
        trials = list(itertools.islice(each_row(self._options.out / TABLE, cell.name), most))
        return [alone_row(cell.settings, trials)] if trials else []

    def _explained(self, pairs: Sequence[Pair], _: Sequence[Row]) -> list[Row]:
        names = {cell.name for cell in cells_of(pairs)}
        path = self._options.out / TABLE
        there = (row for row in each_row(path) if row["cell"] in names) if path.is_file() else ()
        kept = ("outcome", *FACTORS)  # the other columns of so many rows would only take memory
        trials = [{name: row[name] for name in kept if name in row} for row in there]
        return explained_rows(trials, self._options.seed) if trials else []


STUDY = Study(
    name="soft-errors",
    title="Soft errors in data-parallel and model-parallel training",
    paper=(
        "E. Rojas, D. Perez, E. Meneses: A characterization of soft-error sensitivity in data-parallel and "
        "model-parallel distributed deep learning, JPDC 2024; with J. Calhoun, L. Bautista-Gomez, T. Jones, CLUSTER "
        "2021; SBAC-PAD 2022"
    ),
    intervals=(
        "Intervals are 95 % intervals: of a share of trials Wilson's, of a difference over many settings by "
        "bootstrap over the settings."
    ),
    task_s=280.0,
    quick_task_s=20.0,
    plan=_Plan,
    claims=hold_claims,
    page=sections,
)


def _stop(trials: int) -> StopRule:
    """Return the stopping rule of a cell: beyond the paper's number of trials, the width of the interval decides."""
    most = trials + trials // 3 if trials >= _TRIALS else trials
    return StopRule(width=_WIDTH, batch=min(20, trials), least=trials, most=most)


def _named(names: Sequence[str], among: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in among if name in names)


def _trained(setup: SoftErrorSetup) -> str:
    files = f" in {setup.data}" if setup.data else ""
    sizes = f", {setup.limit} samples" if setup.limit else ""
    side = f" scaled to {setup.size} x {setup.size}" if setup.size else ""
    return f"{setup.network} on {setup.dataset}{files}{sizes}{side}, from epoch {setup.restart}"


def _found_in(data: Path) -> str:
    """Return the largest known dataset in a directory.

    Raises:
        ConfigError: if the directory has none.
    """
    for name in _FROM_FILES:
        try:
            load_dataset(name, data, limit=1)
        except DataMissing:
            continue
        return name
    raise ConfigError(f"--data must be a directory with the files of one of {', '.join(_FROM_FILES)}, got {data}")
