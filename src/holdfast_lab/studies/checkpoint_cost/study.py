"""What checkpoints cost, framework by framework: the study of Rojas and others (2020), on today's frameworks.

Every number is measured by ``workers/measure.py`` in the framework's own environment and process. Values computed
from measurements are marked ``extrapolated``; what could not be measured is marked ``not run``, with the reason.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.errors import ConfigError
from holdfast_lab.studies.base import (
    EXTRAPOLATED,
    FAILED,
    MEASURED,
    NOT_RUN,
    Options,
    Row,
    Study,
    Task,
    check_parts,
    parts_left_out,
)
from holdfast_lab.studies.checkpoint_cost.claims import COMPRESSING, hold_claims
from holdfast_lab.studies.checkpoint_cost.page import sections
from holdfast_lab.studies.frameworks import FRAMEWORKS, NotInstalled, WorkerFailed
from holdfast_lab.workloads.data import load_dataset
from holdfast_lab.workloads.models import layers_of, make_model

if TYPE_CHECKING:  # the scripts run in other environments, by name: only this shows that they define what is called
    from holdfast_lab.studies.checkpoint_cost.workers import with_holdfast, with_orbax, with_tensorflow, with_torch
    from holdfast_lab.studies.checkpoint_cost.workers.measure import MeasuredFramework, TrainedFramework

    _MEASURED: tuple[MeasuredFramework, ...] = (with_torch, with_tensorflow, with_holdfast, with_orbax)
    _TRAINED: tuple[TrainedFramework, ...] = (with_torch, with_tensorflow)

TINY = "tiny"
NETWORKS = ("alexnet", "resnet50", "vgg16")
MODELS = (*NETWORKS, TINY)
PARTS = COST, DETERMINISM, MECHANISMS, WORKERS = "cost", "determinism", "mechanisms", "workers"
OPTIMIZERS = ("none", "momentum", "adam")

EVERY = (1, 10, 100, 1000)
"""Steps between two checkpoints."""
EXTRAPOLATED_WORKERS = (16, 64, 256, 1024)

_COST_LIMIT_S = 1800.0
_LIMIT_S = 600.0
_KILL_AT = (0.25, 0.5, 0.75)
"""Times at which a save is killed, as shares of its duration."""
_KEPT_BY = 2
"""Number of workers that save what other numbers of workers load."""
_QUICK = ("torch", "holdfast")
_SHARING = {"torch": ("root", "rank", "shared", "shared by holdfast"), "tensorflow": ("root", "rank")}
_TRAINING = ("torch", "tensorflow")
_TRAINING_STEPS = 40

CHAINER = (
    "chainer: recorded result, no longer run; Chainer 7.8.1 in November 2026, docs/papers/checkpoint-cost.md. VGG-16 with "
    "momentum: saved in 0.57 s as HDF5 and in 1.04 s as npz, loaded in 0.14 s and 0.77 s. Compressing took "
    f"{COMPRESSING}. A resumed run had the bits of the undisturbed one if everything was restored, but not from a "
    "single save call, which leaves out random numbers. After a save killed half-way over an older one, npz left "
    "nothing; HDF5 loaded flipped bits."
)


class _Plan:
    """What is measured, and how."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._scratch = options.out / "scratch"
        self.frameworks = _chosen(options)
        self.parts = tuple(part for part in PARTS if part in options.only) or PARTS
        self.models = _models(options)
        self.repetitions = options.repetitions or (1 if options.quick else 5)
        self.optimizers = OPTIMIZERS[:2] if options.quick else OPTIMIZERS
        self.workers = (1, 2) if options.quick else (1, 2, 4, 8)

    def settings(self) -> dict[str, Any]:
        return {
            "frameworks": list(self.frameworks),
            "networks": list(self.models),
            "optimizers": list(self.optimizers),
            "repetitions": self.repetitions,
            "workers": list(self.workers),
            "digits": "scikit-learn's" if self._options.data is None else f"Fashion-MNIST in {self._options.data}",
            **({"parts": list(self.parts)} if self.parts != PARTS else {}),
        }

    def tasks(self) -> list[Task]:
        if self._options.data is not None:
            load_dataset("fashion", self._options.data, limit=1)
        together = (self.optimizers,) if self._options.quick else tuple((optimizer,) for optimizer in self.optimizers)
        tasks = [
            Task(f"cost: {name}, {model}, optimizer {' or '.join(some)}", partial(self._cost, name, model, some))
            for model in self.models
            for some in together
            for name in self.frameworks
            if COST in self.parts
        ]
        tasks += [
            Task(f"determinism: {name}", partial(self._determinism, name))
            for name in self.frameworks
            if name in _TRAINING and DETERMINISM in self.parts
        ]
        if not self._options.quick and MECHANISMS in self.parts:
            tasks += [Task(f"mechanisms: {name}", partial(self._mechanisms, name)) for name in self.frameworks]
        for name in self.frameworks:
            if name in _SHARING and WORKERS in self.parts:
                tasks += [
                    Task(f"workers: {name}, {count}", partial(self._share, name, count)) for count in self.workers
                ]
                tasks.append(Task(f"more workers: {name}", partial(self._extrapolate, name), derived=True))
        return tasks

    def left_out(self) -> list[str]:
        missing = [name for name in FRAMEWORKS if name not in self.frameworks]
        told = [f"Frameworks: {', '.join(missing)}."] if missing else []
        told += parts_left_out(self.parts, PARTS)
        told += [f"{name}: {why}." for name in self.frameworks if (why := FRAMEWORKS[name].why_not())]
        networks = [name for name in NETWORKS if name not in self.models]
        told += [f"Networks: {', '.join(networks)}."] if networks else []
        if self._options.quick:
            told += [
                "Adam, which stores three values per parameter.",
                "More than 2 workers are extrapolated, not measured.",
                "Mechanisms: saves killed half-way, damaged files, rotation, loading with another number of workers.",
                f"Repetitions: each measurement is made {self.repetitions} "
                f"time{'' if self.repetitions == 1 else 's'}; comparing times needs three.",
            ]
        return [*told, CHAINER]

    # -- parts

    def _cost(self, name: str, model: str, optimizers: Sequence[str], known: Sequence[Row]) -> list[Row]:
        task = {
            "do": "cost",
            "describe": not any(row["part"] == "versions" and row["framework"] == name for row in known),
            "layers": _layers(model),
            "optimizers": optimizers,
            "repetitions": self.repetitions,
        }
        about: Row = {"part": "cost", "framework": name, "model": model}
        return self._guarded(about, lambda: self._run(name, task, _COST_LIMIT_S))

    def _determinism(self, name: str, known: Sequence[Row]) -> list[Row]:
        about: Row = {"part": "determinism", "framework": name}
        return self._guarded(about, lambda: self._resumed(name, self._described(name, known)))

    def _resumed(self, name: str, described: Row) -> list[Row]:
        folder = self._fresh()
        task = {
            "do": "train",
            "data": str(_training_data(folder, self._options.data)),
            "checkpoint": str(folder / "checkpoint"),
            "weights": str(folder / "weights"),
            "batch": 64,
            "steps": _TRAINING_STEPS,
            "save_at": _TRAINING_STEPS // 2 + 3,  # in the middle of an epoch, and of a stage of the schedule
            "decay_every": _TRAINING_STEPS // 4,
        }
        pieces: list[str] = described["pieces"]
        missing: dict[str, list[str]] = {"everything restored": []} | {f"without {piece}": [piece] for piece in pieces}
        by_default = [piece for piece in pieces if piece not in described["default"]]
        missing["what one call saves"] = by_default
        undisturbed = [_training("undisturbed", saves=True), _training("again", saves=False)]
        rows = self._run(name, {**task, "runs": undisturbed}, _LIMIT_S)
        rows += self._run(
            name, {**task, "runs": [_training(run, leave_out=left) for run, left in missing.items()]}, _LIMIT_S
        )
        weights = {row["run"]: _weights(folder, row["run"]) for row in rows}
        shutil.rmtree(folder)
        for row in rows:
            row["left_out"] = ", ".join(missing.get(row["run"], [])) or "nothing"
            row["same_bits"] = row["sha256"] == rows[0]["sha256"]
            row["distance"] = _distance(weights[row["run"]], weights["undisturbed"])
        return rows

    def _share(self, name: str, count: int, _: Sequence[Row]) -> list[Row]:
        model = TINY if self.models == (TINY,) else "resnet50" if self._options.quick else "alexnet"
        about: Row = {"part": "workers", "framework": name, "model": model, "workers": count}
        task = {
            "do": "share",
            "layers": _layers(model),
            "model": model,
            "side": {TINY: 16, "resnet50": 64}.get(model, 128),
            "batch": 16,  # over all workers
            "steps": 3 if self._options.quick else 5,
            "schemes": _SHARING[name],
            "repetitions": self.repetitions,
            "keep": count == _KEPT_BY and not self._options.quick,
            "folder": str(self._scratch),
            "seed": self._options.seed,
        }

        def measured() -> list[Row]:
            self._fresh()
            rows = FRAMEWORKS[name].run_ranks(task, count, _LIMIT_S)
            shares = [{**row, **_shares(row["save_s"], row["step_s"])} for row in rows]
            return shares + (self._elsewhere(name, {**task, "sha256": rows[0]["sha256"]}) if task["keep"] else [])

        return self._guarded(about, measured)

    def _elsewhere(self, name: str, task: Row) -> list[Row]:
        """Load a checkpoint of :data:`_KEPT_BY` workers with fewer and with more workers."""
        rows = []
        for count in (_KEPT_BY - 1, _KEPT_BY + 1):
            FRAMEWORKS[name].run_ranks({**task, "do": "elsewhere"}, count, _LIMIT_S)
            for scheme in task["schemes"]:
                found = [(self._scratch / f"{scheme}.found.{rank}").read_text() for rank in range(count)]
                about = {"part": "elsewhere", "scheme": scheme, "workers": count, "saved_by": _KEPT_BY}
                rows.append({**about, "found": _counted(found), "loads": all(word == "loads it" for word in found)})
        return rows

    def _extrapolate(self, name: str, known: Sequence[Row]) -> list[Row]:
        """Extrapolate to more workers from one worker's measured times and one shared disk of this speed."""
        alone = [
            row
            for row in known
            if row["part"] == "workers"
            and row["framework"] == name
            and row["status"] == MEASURED
            and row["workers"] == 1
        ]
        rows = []
        for scheme in _SHARING[name]:
            of_scheme = [row for row in alone if row["scheme"] == scheme]
            if not of_scheme:
                continue
            save_s, step_s = (statistics.median(row[key] for row in of_scheme) for key in ("save_s", "step_s"))
            size_bytes = of_scheme[0]["bytes"]
            for workers in EXTRAPOLATED_WORKERS:
                copies = workers if scheme == "rank" else 1
                times = {"save_s": save_s * copies, "step_s": step_s / workers, "bytes": size_bytes * copies}
                rows.append(
                    {
                        "part": "workers",
                        "framework": name,
                        "model": of_scheme[0]["model"],
                        "workers": workers,
                        "scheme": scheme,
                        "status": EXTRAPOLATED,
                        "why": "one worker's step divided by the number of workers, communication free; all bytes at one worker's write speed",
                        **times,
                        **_shares(times["save_s"], times["step_s"]),
                    }
                )
        return rows

    def _mechanisms(self, name: str, known: Sequence[Row]) -> list[Row]:
        about: Row = {"part": "mechanisms", "framework": name}
        model = TINY if self.models == (TINY,) else "resnet50"
        task = {"layers": _layers(model), "optimizer": "none"}

        def measured() -> list[Row]:
            ways = self._described(name, known)["ways"]
            rows = self._run(name, {**task, "do": "damage", "ways": ways}, _LIMIT_S)
            killed = self._killed(name, task, ways)
            found = {"old": "not detected, no value was hit", "other": "not detected: loads wrong values"}
            return [
                {
                    "way": row["way"],
                    "held": _held(name, row["way"], known),
                    "kept": row["kept"],
                    "killed": killed[row["way"]],
                    "damage": found.get(row["found"], "refused"),
                }
                for row in rows
            ]

        return self._guarded(about, measured)

    def _killed(self, name: str, task: Row, ways: Sequence[str]) -> dict[str, str]:
        """Kill saves over an older checkpoint; return what could be loaded afterwards, as text."""
        folder = self._fresh()
        times_s = {
            row["way"]: row["save_s"] for row in self._run(name, {**task, "do": "save_times", "ways": ways}, _LIMIT_S)
        }
        cases: list[Row] = []
        for way in ways:
            for share in _KILL_AT:
                case = {"way": way, "folder": str(folder / f"killed-{len(cases)}")}
                late = {**self._common(), **task, **case, "do": "killed_save", "after_s": share * times_s[way]}
                if FRAMEWORKS[name].run_killed(late, _LIMIT_S):
                    cases.append(case)
        found: dict[str, list[str]] = {way: [] for way in ways}
        for row in self._run(name, {**task, "do": "after_kill", "cases": cases}, _LIMIT_S):
            found[row["way"]].append(row["found"].split(" (")[0])
        return {way: _counted(what) or "every save ended before the kill" for way, what in found.items()}

    # -- helpers

    def _described(self, name: str, known: Sequence[Row]) -> Row:
        """Return what a framework says of itself: the first measurement of its cost has asked it."""
        if absent := FRAMEWORKS[name].why_not():
            raise NotInstalled(absent)
        if COST not in self.parts:
            return self._run(name, {"do": "describe"}, _LIMIT_S)[0]
        for row in known:
            if row["part"] == "versions" and row["framework"] == name:
                return row
        why = [row["why"] for row in known if row["framework"] == name and row["status"] == FAILED]
        raise WorkerFailed(why[0] if why else f"{name} was not queried for its capabilities")

    def _common(self) -> Row:
        return {"seed": self._options.seed, "folder": str(self._scratch)}

    def _run(self, name: str, task: Row, timeout_s: float) -> list[Row]:
        return FRAMEWORKS[name].run({**self._common(), **task}, timeout_s)

    def _fresh(self) -> Path:
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        return self._scratch

    def _guarded(self, about: Row, measure: Callable[[], list[Row]]) -> list[Row]:
        """Return the rows with the columns of ``about``; if measuring fails, one row with the reason."""
        try:
            rows = measure()
        except NotInstalled as error:
            rows = [{"status": NOT_RUN, "why": str(error)}]
        except WorkerFailed as error:
            rows = [{"status": FAILED, "why": str(error)}]
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        return [{**about, "status": MEASURED, **row} for row in rows]


STUDY = Study(
    name="checkpoint-cost",
    title="What a checkpoint costs, framework by framework",
    paper=(
        "E. Rojas, A. N. Kahira, E. Meneses, L. Bautista-Gomez, R. M. Badia: A study of checkpointing in large scale "
        "training of deep neural networks, 2020, arXiv 2012.00825"
    ),
    intervals="Intervals are 95 % intervals, by bootstrap over repetitions, or over the states that were compared.",
    task_s=42.0,
    quick_task_s=8.0,
    plan=_Plan,
    claims=hold_claims,
    page=sections,
)


def _chosen(options: Options) -> tuple[str, ...]:
    """Return the frameworks; Holdfast's formats come with PyTorch's, because they save the same states."""
    if "chainer" in options.only:
        raise ConfigError(CHAINER)
    check_parts(options.only, (*FRAMEWORKS, *PARTS))
    named = [name for name in options.only if name not in PARTS]
    wanted = named or (_QUICK if options.quick else FRAMEWORKS)
    return tuple(name for name in FRAMEWORKS if name in wanted or (name == "holdfast" and "torch" in wanted))


def _models(options: Options) -> tuple[str, ...]:
    if options.model:
        check_parts([options.model], MODELS, "--network")
        return (options.model,)
    return ("resnet50",) if options.quick else NETWORKS


def _layers(model: str) -> list[Row]:
    if model == TINY:
        convolution = {"kind": "convolution", "inputs": 3, "outputs": 32, "kernel": 3, "stride": 1, "padding": 0}
        linear = {"kind": "linear", "inputs": 32, "outputs": 10_000, "bias": True}
        return [{**convolution, "bias": True}, linear]
    return layers_of(make_model(model, device="meta"))


def _training(name: str, *, saves: bool = False, leave_out: Sequence[str] | None = None) -> Row:
    return {"name": name, "saves": saves, "resumed": leave_out is not None, "leave_out": list(leave_out or ())}


def _training_data(folder: Path, data: Path | None) -> Path:
    train, _ = load_dataset("digits") if data is None else load_dataset("fashion", data, limit=1500)
    path = folder / "data.npz"
    images, labels = (tensor.numpy() for tensor in train[:])
    np.savez(path, x=images, y=labels)
    return path


def _weights(folder: Path, run: str) -> list[Any]:
    with np.load(f"{folder / 'weights'}-{run}.npz") as file:
        return [file[name].astype(np.float64) for name in file.files]


def _distance(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """Return the Euclidean distance, relative to ``theirs``."""
    difference = sum(float(((a - b) ** 2).sum()) for a, b in zip(ours, theirs, strict=True))
    return float(np.sqrt(difference / sum(float((b**2).sum()) for b in theirs)))


def _held(name: str, way: str, known: Sequence[Row]) -> float | None:
    """Return the share of its saves for which a way held the loop, median over all states.

    Return None if it was not measured.
    """
    rows = [row for row in known if row["part"] == "cost" and row["framework"] == name and row["status"] == MEASURED]
    shares = [row["blocked_s"] / row["save_s"] for row in rows if row["way"] == way]
    return statistics.median(shares) if shares else None


def _counted(words: Sequence[str]) -> str:
    return ", ".join(f"{words.count(word)}x {word}" for word in dict.fromkeys(words))


def _shares(save_s: float, step_s: float) -> Row:
    """Return the share of training time spent saving, by steps between two checkpoints."""
    return {f"share_{every}": save_s / (save_s + every * step_s) for every in EVERY}
