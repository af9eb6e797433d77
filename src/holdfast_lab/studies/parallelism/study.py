"""What each parallelism loses with a worker, and the cost of recovery: the study of Amatya and others (2017).

Every job is a ``holdfast run`` of real processes, one of which is killed by SIGKILL. The MPI calls that recovery needs
are found by the explorer, which tries every run of a small job with one call left out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast_lab.studies.base import FAILED, MEASURED, NOT_RUN, Options, Row, Study, Task, check_parts
from holdfast_lab.studies.parallelism.claims import hold_claims
from holdfast_lab.studies.parallelism.elastic import ElasticCase, cases, elastic_row
from holdfast_lab.studies.parallelism.jobs import (
    BACKUPS,
    FORWARD,
    HYBRID,
    KINDS,
    PARTIAL,
    PIPELINE,
    REINIT,
    REPLICATED,
    RESTART,
    ROLLBACK,
    SCRIPTS,
    SHARDED,
    STRATEGIES,
    ParallelismRun,
    TrainingScale,
    carry_out,
    write_data,
)
from holdfast_lab.studies.parallelism.needs import NEEDS_CHECKOUT, OMISSIONS, Omission, model_checker, need_rows
from holdfast_lab.studies.parallelism.page import sections
from holdfast_lab.studies.parallelism.rows import NOT_COMPARED, data_row, row_of, structure_rows
from holdfast_lab.studies.processes import run_script
from holdfast_lab.workloads import load_dataset
from holdfast_lab.workloads.models import layout

PAPER_NETWORKS = ("alexnet", "googlenet")
NETWORKS = ("cnn", *PAPER_NETWORKS)

PAPER_KILL = 300
"""The iteration in which the authors' code kills a rank."""

_TINY = TrainingScale(
    dataset="digits", side=None, samples=1472, batch=64, epochs=1, slices=4, kills=(11,), checkpoint_every=4
)
_DIGITS = replace(_TINY, epochs=16, slices=8, kills=(30, 150, PAPER_KILL), checkpoint_every=20)
_FASHION = replace(_DIGITS, dataset="fashion", samples=59_904, batch=128, epochs=1)
_DEEP = "alexnet"
"""The network with enough blocks for a pipeline of the most workers; the small network has too few."""
_LARGE = 28
"""The smallest image side for both of the paper's networks here: that of Fashion-MNIST."""
_SHORT_RUN = (30, 50)
_PAPER_RUNS = {"alexnet": (PAPER_KILL, 320), "googlenet": _SHORT_RUN}
"""Iteration of the kill and length of the run. An iteration of GoogLeNet takes seconds, so its runs are shorter."""

_QUICK_LIMIT_S = 240.0
_LIMIT_S = 3600.0
_FREE_STEPS = 30


class _Plan:
    """What is run, and how."""

    def __init__(self, options: Options) -> None:
        self._options = options
        check_parts(options.only, KINDS)
        self.kinds = tuple(dict.fromkeys(options.only)) or KINDS
        self.network = options.model or NETWORKS[0]
        check_parts([self.network], NETWORKS, "--network")
        if options.quick and not options.only:
            self.kinds = tuple(kind for kind in self.kinds if kind != HYBRID)
        self.repetitions = options.repetitions or 1
        self.workers = (2, 4) if options.quick else (2, 4, 8)
        self.scale = self._scale()
        self._limit_s = _QUICK_LIMIT_S if options.quick else _LIMIT_S

    def _scale(self) -> TrainingScale:
        if self._options.quick:
            scale = _TINY if self._options.data is None else replace(_TINY, dataset="fashion", side=8)
        else:
            scale = _DIGITS if self._options.data is None else _FASHION
        return scale if self.network == NETWORKS[0] else _of_paper(scale, self.network)

    def settings(self) -> dict[str, Any]:
        return {
            "parallelisms": list(self.kinds),
            "network": self.network,
            "repetitions": self.repetitions,
            "workers": list(self.workers),
            "data": "scikit-learn's digits instead of ImageNet"
            if self._options.data is None
            else f"Fashion-MNIST in {self._options.data} instead of ImageNet",
            "batch": self.scale.batch,
            "slices": self.scale.slices,
            "iterations": self.scale.steps,
            "killed in iteration": list(self.scale.kills),
            "checkpoint every": self.scale.checkpoint_every,
            "delta standbys under partial": " ".join(BACKUPS),
        }

    def tasks(self) -> list[Task]:
        if self._options.data is not None:
            load_dataset("fashion", self._options.data, limit=1)
        quick = self._options.quick
        calm = [(kind, n) for kind, n in self._jobs() if not (quick and kind == HYBRID and PIPELINE in self.kinds)]
        tasks = [self._undisturbed(kind, count) for kind, count in calm]
        tasks += [task for kind, count in self._jobs() for task in self._killed(kind, count)]
        tasks += [Task(f"structures: {kind}", partial(self._structures, kind)) for kind in self.kinds]
        if not quick:
            split = [kind for kind in self.kinds if kind != REPLICATED]
            tasks += [Task(f"refused: {kind}, {FORWARD}", partial(self._refused, kind)) for kind in split]
            tasks += self._tasks_of_whole()
        for omission in self._omissions():
            tasks.append(Task(f"without {omission.call}: {omission.instead}", partial(_tried, omission)))
        return tasks

    def _tasks_of_whole(self) -> list[Task]:
        """Return the tasks that ``--quick`` leaves out."""
        tasks = []
        if REPLICATED in self.kinds:
            tasks += [Task(f"data: {count} workers", partial(self._data, count)) for count in self.workers]
            tasks += [Task(case.key, partial(self._elastic, case)) for case in cases(self.workers)]
        if REPLICATED in self.kinds and self.network == NETWORKS[0]:
            for network in PAPER_NETWORKS:
                tasks += [
                    Task(f"paper: {network}, {count} workers", partial(self._paper, REPLICATED, network, count))
                    for count in self.workers
                ]
        if PIPELINE in self.kinds and self.network == NETWORKS[0]:
            count = self.workers[-1]
            tasks.append(Task(f"deep: {_DEEP}, {count} stages", partial(self._paper, PIPELINE, _DEEP, count)))
        for network in PAPER_NETWORKS:
            tasks += [
                Task(f"step: {network}, {count} workers", partial(self._step, network, count)) for count in self.workers
            ]
        return tasks

    def left_out(self) -> list[str]:
        missing = [kind for kind in KINDS if kind not in self.kinds]
        told = [f"Parallelisms: {', '.join(missing)}."] if missing else []
        told += [f"ImageNet and its image size: {'Fashion-MNIST' if self._options.data else 'digits'} instead."]
        if not self._options.quick and REPLICATED in self.kinds and self.network == NETWORKS[0]:
            kill, steps = _PAPER_RUNS["googlenet"]
            told += [
                "The paper's networks: mini-batches of 32 in all, not 256 (AlexNet) and 32 (GoogLeNet) per process; "
                f"GoogLeNet's worker is killed in iteration {kill} of {steps} instead of {PAPER_KILL}."
            ]
        if self._options.quick:
            told += [
                f"Iterations: a worker is killed in iteration {self.scale.kills[0]} of {self.scale.steps} instead of "
                f"{PAPER_KILL}.",
                "Numbers of workers: 2 (hybrid: 4); no 8. Hybrid is compared with the single pipeline, which "
                "computes the same bits.",
                "Split models under restart; split models with neither standbys nor checkpoints; shards without "
                "standbys.",
                f"Networks: {', '.join(PAPER_NETWORKS)}, and their step without faults, with and without ULFM.",
                "Failed workers replaced by spares; the paper's data policy; calls whose absence shows only with 4 "
                "workers.",
                "Split models with delta standbys only (partial); jobs that shrink, keep their size or grow (elastic).",
            ]
        told += [] if model_checker() else [NEEDS_CHECKOUT]
        return told

    def _jobs(self) -> list[tuple[str, int]]:
        """Return each parallelism with each of its numbers of workers."""
        counts = {HYBRID: [n for n in self.workers if n >= 4]}
        few = list(self.workers[:1]) if self._options.quick else list(self.workers)
        return [(kind, count) for kind in self.kinds for count in counts.get(kind, few)]

    def _omissions(self) -> list[Omission]:
        if model_checker() is None:
            return []
        return [o for o in OMISSIONS if not self._options.quick or o.workers < 4]

    # -- recovery

    def _undisturbed(self, kind: str, count: int) -> Task:
        return Task(
            f"undisturbed: {kind}, {count} workers", lambda known: [self._row(self._job(kind, ROLLBACK, count), known)]
        )

    def _killed(self, kind: str, count: int) -> list[Task]:
        tasks = []
        strategies = (ROLLBACK,) if self._options.quick and kind != REPLICATED else _strategies_of(kind)
        for place, strategy in enumerate(strategies):
            for number, step in enumerate(self.scale.kills):
                for repetition in range(self.repetitions):
                    rank = (place + number + repetition) % count
                    job = replace(self._job(kind, strategy, count), kills=((rank, step),))
                    key = f"kill: {kind}, {strategy}, {count} workers, rank {rank} in iteration {step}"
                    tasks.append(Task(f"{key}, repetition {repetition}", partial(self._rows, [job])))
            if not self._options.quick and strategy in (ROLLBACK, REINIT):
                job = replace(self._job(kind, strategy, count), kills=((count - 1, self.scale.kills[-1]),), spares=1)
                tasks.append(Task(f"replaced: {kind}, {strategy}, {count} workers", partial(self._rows, [job])))
        return tasks

    def _job(
        self, kind: str, strategy: str, count: int, network: str = "", scale: TrainingScale | None = None
    ) -> ParallelismRun:
        return ParallelismRun(
            kind=kind,
            strategy=strategy,
            network=network or self.network,
            workers=count,
            scale=scale or self.scale,
            checkpoints=strategy == RESTART or (strategy == REINIT and kind != REPLICATED),
            seed=self._options.seed,
            reinit_from=_reinit_from(kind) if strategy == REINIT else "",
            options=BACKUPS if strategy == PARTIAL else (),
        )

    def _rows(self, jobs: Sequence[ParallelismRun], known: Sequence[Row]) -> list[Row]:
        return [self._row(job, known) for job in jobs]

    def _row(self, job: ParallelismRun, known: Sequence[Row]) -> Row:
        if why := _impossible(job):
            return {**job.about(), "part": "recovery" if job.kills else "undisturbed", "status": NOT_RUN, "why": why}
        outcome = carry_out(job, self._options.data, self._limit_s)
        same = (row for row in known if row["part"] == "undisturbed" and _is_same(row, job))
        undisturbed = next(same, None) if job.kills else None
        if undisturbed is not None and undisturbed["status"] == FAILED:
            return {**job.about(), "part": "recovery", "status": FAILED, "why": "the undisturbed run failed"}
        return row_of(job, outcome, undisturbed)

    def _structures(self, kind: str, known: Sequence[Row]) -> list[Row]:
        """Kill a worker without standbys, with and without checkpoints."""
        kills = self.scale.kills[:1]
        of_kind = [
            row
            for row in known
            if row["part"] == "recovery"
            and row["status"] == MEASURED
            and (row["kind"], row["form"], row["kill_step"]) == (kind, "survivors only", kills[0])
        ]
        kept = [row for row in of_kind if row["strategy"] == ROLLBACK and row["differs"] != NOT_COMPARED]
        backup = next((row for row in of_kind if row["strategy"] == PARTIAL), None)
        if not kept:
            return [{"part": "structures", "kind": kind, "status": FAILED, "why": "the run under rollback failed"}]
        bare: list[Row] = []
        if kind == PIPELINE or (kind == SHARDED and not self._options.quick):
            job = replace(self._job(kind, ROLLBACK, kept[0]["workers"]), kills=((1, kills[0]),), mirror=0)
            jobs = [replace(job, checkpoints=True), *([] if self._options.quick else [job])]
            bare = [{**self._row(one, known), "part": "bare"} for one in jobs]
        failed = [row for row in bare if row["status"] != MEASURED]
        saved, beginning = [*bare, None, None][:2]
        return failed or [*bare, *structure_rows(kind, kept[0], saved, beginning, backup)]

    # -- only in the full study

    def _refused(self, kind: str, _: Sequence[Row]) -> list[Row]:
        """Request a strategy that a split model does not support, and record the answer."""
        jobs = [replace(self._job(kind, FORWARD, n), kills=((1, self.scale.kills[0]),)) for n in self.workers]
        job = next(job for job in reversed(jobs) if not _impossible(job))
        outcome = carry_out(job, self._options.data, self._limit_s)
        if not outcome.failed:
            return [{**job.about(), "part": "refused", "status": MEASURED}]
        status = NOT_RUN if outcome.code == _REFUSED else FAILED
        return [{**job.about(), "part": "refused", "status": status, "why": outcome.failed}]

    def _data(self, count: int, _: Sequence[Row]) -> list[Row]:
        scale = replace(self.scale, slices=2 * max(self.workers))
        kill = scale.kills[-1]
        kills = [((1, kill),)] + ([((1, kill), (count - 1, kill + 5))] if count > 2 else [])
        jobs = [
            replace(self._job(REPLICATED, ROLLBACK, count, scale=scale), kills=these, blocks=True) for these in kills
        ]
        return [data_row(job, carry_out(job, self._options.data, self._limit_s)) for job in jobs]

    def _elastic(self, case: ElasticCase, known: Sequence[Row]) -> list[Row]:
        job = case.job(self.network, self.scale, self._options.seed)
        return [elastic_row(case, job, carry_out(job, self._options.data, self._limit_s), known)]

    def _paper(self, kind: str, network: str, count: int, known: Sequence[Row]) -> list[Row]:
        job = self._job(
            kind, ROLLBACK, count, network, _of_paper(self.scale, network, _SHORT_RUN if kind == PIPELINE else None)
        )
        undisturbed = self._row(job, known)
        kills = ((count - 1, job.scale.kills[0]),)
        jobs = [
            replace(self._job(kind, strategy, count, network, job.scale), kills=kills)
            for strategy in _strategies_of(kind)
        ]
        return [undisturbed, *self._rows(jobs, [undisturbed])]

    def _step(self, network: str, count: int, _: Sequence[Row]) -> list[Row]:
        """Measure the step without faults: by MPI alone, with ULFM on, and with protection on."""
        paper = _of_paper(self.scale, network)
        scale = replace(paper, epochs=1, samples=_FREE_STEPS * paper.batch, slices=count, kills=())
        about: Row = {"part": "step", "status": MEASURED, "network": network, "workers": count, "batch": scale.batch}
        rows = [{**about, "mode": mode, **self._plain(network, count, scale, ft=ft)} for mode, ft in _MODES.items()]
        protected = self._row(self._job(REPLICATED, ROLLBACK, count, network, scale), ())
        kept = ("step_s", "parameters", "status", "why")
        return [*rows, {**about, "mode": "ULFM and protection", **{k: protected[k] for k in kept if k in protected}}]

    def _plain(self, network: str, count: int, scale: TrainingScale, *, ft: bool) -> Row:
        with tempfile.TemporaryDirectory(prefix="holdfast-study-") as name:
            write_data(Path(name, "data"), scale, self._options.data)
            words = [SCRIPTS / "plain.py", "--network", network, "--data", Path(name, "data"), "--batch", scale.batch]
            words += ["--steps", _FREE_STEPS]
            yields = ("--mca", "mpi_yield_when_idle", "1")
            return run_script(count, lambda out: [*words, "--out", out], self._limit_s, *yields, ft=ft)


STUDY = Study(
    name="parallelism",
    title="What fault-tolerant training needs, parallelism by parallelism",
    paper=(
        "V. Amatya, A. Vishnu, C. Siegel, J. Daily: What does fault tolerant deep learning need from MPI?, EuroMPI "
        "2017, arXiv 1709.03316"
    ),
    intervals="Intervals are 95 % intervals, by bootstrap over runs; of a share of runs by Clopper and Pearson.",
    task_s=36.0,
    quick_task_s=3.0,
    plan=_Plan,
    claims=hold_claims,
    page=sections,
)


_REFUSED = 2
"""Exit code of a command that refuses its options."""
_MODES = {"MPI alone": False, "ULFM on": True}


def _tried(omission: Omission, _: Sequence[Row]) -> list[Row]:
    return need_rows(omission)


def _of_paper(scale: TrainingScale, network: str, run: tuple[int, int] | None = None) -> TrainingScale:
    """Return the size of a training of the paper's networks: small mini-batches, a few iterations beyond the kill."""
    batch = 32
    kill, steps = run or _PAPER_RUNS[network]
    per_epoch = steps if scale.dataset == "fashion" else min(steps, scale.samples // batch)
    quick = scale.slices == _TINY.slices
    return replace(
        scale,
        side=_LARGE,
        samples=per_epoch * batch,
        batch=batch,
        epochs=1 if quick else -(-steps // per_epoch),
        kills=scale.kills if quick else (kill,),
    )


def _strategies_of(kind: str) -> tuple[str, ...]:
    """Return the strategies of a parallelism.

    A split model cannot skip a part of a step. In a hybrid model a pipeline replica has everything, so nothing is
    restored.
    """
    return {REPLICATED: STRATEGIES, HYBRID: (ROLLBACK, RESTART, REINIT)}.get(kind, (ROLLBACK, RESTART, PARTIAL, REINIT))


def _reinit_from(kind: str) -> str:
    """Return what a rebuilt application restores from.

    In the code of 2017 the root takes a snapshot at the fault; the root of a split model has only a part.
    """
    return "root" if kind == REPLICATED else "checkpoint"


def _impossible(job: ParallelismRun) -> str:
    """Return why a job cannot be run; "" if it can."""
    blocks = len(layout(job.network, 10, image=(1, job.scale.side or 8)).blocks)
    if job.kind in (PIPELINE, HYBRID) and job.parts > blocks:
        return f"{job.network} has {blocks} blocks and a stage needs at least one: {job.parts} stages are too many"
    return ""


def _is_same(row: Row, job: ParallelismRun) -> bool:
    """Return whether a row is of the job's run without a kill; parallel pipelines do not change the bits."""
    if (row["network"], row["parts"]) != (job.network, job.parts):
        return False
    return row["kind"] == job.kind or {row["kind"], job.kind} == {PIPELINE, HYBRID}
