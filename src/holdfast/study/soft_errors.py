"""Soft errors in data-parallel and model-parallel training: the experiments of Rojas, Perez and Meneses, on this code.

Real processes train, each with a state and a checkpoint file of its own. A trial goes back to an epoch in the middle of
the training, alters bits of the state of some of them, goes on, and is held against the undisturbed run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.study.base import Claim, Options, Row, Task
from holdfast.study.campaign import run_campaign
from holdfast.study.campaign_plan import Campaign, Stop
from holdfast.study.campaign_table import read_rows
from holdfast.study.soft_cells import QUICK, Pair, cells_of, experiments, quick_pairs
from holdfast.study.soft_claims import hold_claims
from holdfast.study.soft_page import sections
from holdfast.study.soft_rows import cell_row, error_rows, explained_rows, not_run_row
from holdfast.study.soft_setup import DDP, PLATFORMS, SESSION, Setup
from holdfast.study.soft_trial import prepare, trial
from holdfast.workloads import load_dataset
from holdfast.workloads.data import DataMissing

TABLE = "trials.sqlite"
QUICK_PLATFORMS = (DDP, SESSION)
NETWORKS = ("mlp", "cnn", "resnet18", "resnet50")
_FROM_FILES = ("cifar100", "cifar10", "fashion")
_LEAST_SIDE = 16
"""Of images of the large networks."""

_TRIALS = 180
"""The paper's, of each mechanism."""
_QUICK_TRIALS = 40
_PROCESSES = 4
_SAMPLES = 12_000
"""Of a data set from files, so many are trained on."""
_WIDTH = 0.05


class SoftErrors:
    """See the head of this file."""

    name = "soft-errors"
    title = "Soft errors in data-parallel and model-parallel training"
    paper = (
        "E. Rojas, D. Perez, E. Meneses: A characterization of soft-error sensitivity in data-parallel and model-parallel "
        "distributed deep learning, JPDC 2024; with J. Calhoun, L. Bautista-Gomez, T. Jones, CLUSTER 2021; SBAC-PAD 2022"
    )

    def settings(self, options: Options) -> dict[str, Any]:
        """See :meth:`Study.settings`."""
        plan = _Plan(options)
        base = plan.base
        return {
            "quick": options.quick,
            "seed": options.seed,
            "platforms": list(plan.platforms),
            "network": base.network,
            "data": f"{base.dataset} in {base.data}" if base.data else base.dataset,
            "image side": base.size or "as they are",
            "batch": base.batch,
            "optimizer": f"{base.optimizer}, and ReduceLROnPlateau on the mean training loss",
            "restart at epoch": base.restart,
            "epochs after it": base.epochs,
            "processes": plan.processes,
            "trials a cell": plan.trials,
        }

    def tasks(self, options: Options) -> list[Task]:
        """See :meth:`Study.tasks`.

        Raises:
            ConfigError: if a platform or a network is asked for that is not one, or the data are not there.
        """
        return _Plan(options).tasks()

    def left_out(self, options: Options) -> list[str]:
        """See :meth:`Study.left_out`."""
        return _Plan(options).left_out()

    def claims(self, rows: Sequence[Row], seed: int) -> list[Claim]:
        """See :meth:`Study.claims`."""
        return hold_claims(rows, seed)

    def page(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """See :meth:`Study.page`."""
        return sections(rows)


class _Plan:
    """What is run, and how."""

    def __init__(self, options: Options) -> None:
        self._options = options
        for name in options.only:
            if name not in PLATFORMS:
                msg = f"--only must be one of {', '.join(PLATFORMS)}, got {name!r}"
                raise ConfigError(msg)
        network = options.model or ("mlp" if options.quick else "cnn")
        if network not in NETWORKS:
            msg = f"--network must be one of {', '.join(NETWORKS)}, got {network!r}"
            raise ConfigError(msg)
        standing = QUICK_PLATFORMS if options.quick else PLATFORMS
        self.platforms = tuple(name for name in PLATFORMS if name in (options.only or standing))
        self.processes = 2 if options.quick else _PROCESSES
        self.trials = options.repetitions or (_QUICK_TRIALS if options.quick else _TRIALS)
        self.base = self._base(network)

    def _base(self, network: str) -> Setup:
        data, quick = self._options.data, self._options.quick
        dataset = "digits" if data is None else _found_in(data)
        small = network in NETWORKS[:2]
        return Setup(
            platform=PLATFORMS[0],
            processes=1,
            network=network,
            dataset=dataset,
            data="" if data is None else str(data),
            size=None if small or dataset.startswith("cifar") else _LEAST_SIDE,
            limit=None if data is None else _SAMPLES,
            restart=4 if quick else 6,
            epochs=1 if quick else 2,
            training_seed=self._options.seed,
        )

    def tasks(self) -> list[Task]:
        if self._options.quick:
            parts = {QUICK: quick_pairs(self.base, self.platforms)}  # one part: processes are started once
        else:
            parts = dict(experiments(self.base, self.platforms, self.processes))
        tasks = [Task(name, partial(self._campaign, name, pairs)) for name, pairs in parts.items()]
        every = [pair for pairs in parts.values() for pair in pairs]
        return [*tasks, Task("explained", partial(self._explained, every))]

    def left_out(self) -> list[str]:
        told = ["Horovod, and CIFAR-100 with ResNet-50 at full length: --data and --network choose what is nearest."]
        if missing := [name for name in PLATFORMS if name not in self.platforms]:
            told.append(f"Platforms: {', '.join(missing)}.")
        if self._options.quick:
            told.append(
                "Everything but one altered replica of two: 1 flip anywhere, 1 of the critical bit, 100 below it; the "
                "optimizer, other numbers of flips and processes, bit by bit, layers, formats, propagation, bursts."
            )
        if self.trials < _TRIALS:
            told.append(f"Trials: {self.trials} a cell instead of at least {_TRIALS}.")
        return told

    # -- tasks

    def _campaign(self, name: str, pairs: Sequence[Pair], _: Sequence[Row]) -> list[Row]:
        cells, path = cells_of(pairs), self._options.out / TABLE
        campaign = Campaign(
            name=SoftErrors.name,
            seed=self._options.seed,
            cells=cells,
            prepare=prepare,
            trial=trial,
            stop=self._stop(),
        )
        at_once = max(1, len(os.sched_getaffinity(0)) // max(setup.real for _, setup in pairs))
        broken = run_campaign(campaign, path, at_once)
        trials = read_rows(path)
        rows: list[Row] = []
        for cell in cells:
            mine = [row for row in trials if row["cell"] == cell.name]
            if cell.name in broken:
                rows.append(not_run_row(cell.settings, broken[cell.name]))
            elif mine:
                rows += [cell_row(cell.settings, mine), *error_rows(cell.settings, mine)]
        return rows

    def _stop(self) -> Stop:
        """Return when a cell has enough: only above the paper's number the interval says."""
        most = 2 * self.trials if self.trials >= _TRIALS else self.trials
        return Stop(width=_WIDTH, batch=min(20, self.trials), least=self.trials, most=most)

    def _explained(self, pairs: Sequence[Pair], _: Sequence[Row]) -> list[Row]:
        names = {cell.name for cell in cells_of(pairs)}
        path = self._options.out / TABLE
        trials = [row for row in read_rows(path) if row["cell"] in names] if path.is_file() else []
        return explained_rows(trials, self._options.seed) if trials else []


def _found_in(data: Path) -> str:
    """Return the largest of the data sets that are in a directory.

    Raises:
        ConfigError: if none is.
    """
    for name in _FROM_FILES:
        try:
            load_dataset(name, data, limit=1)
        except DataMissing:
            continue
        return name
    msg = f"--data must be a directory with the files of one of {', '.join(_FROM_FILES)}, got {data}"
    raise ConfigError(msg)
