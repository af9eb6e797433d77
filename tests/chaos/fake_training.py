"""A training without torch: sums over MPI, recovery, and the records and beacons that the launcher judges by.

Usage: fake_training.py [--steps N] [--step-s S] [DEED...], a deed being WHAT:RANK:STEP, done by that worker
before the sum of that step, or WHAT:any:STEP, done by each.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import mpi4py

mpi4py.rc.finalize = False
import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

from holdfast.base.clock import SystemClock  # noqa: E402
from holdfast.config import Settings  # noqa: E402
from holdfast.errors import ConfigError  # noqa: E402
from holdfast.faults.plan import FaultPlan  # noqa: E402
from holdfast.records.beacon import Beacon  # noqa: E402
from holdfast.records.files import FileRecorder  # noqa: E402
from holdfast.records.paths import beacon_path, records_path  # noqa: E402
from holdfast.records.types import CheckpointSaved, FaultFired, Finished, Recovered, RunStarted, StepCommitted  # noqa: E402


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--step-s", type=float, default=0.01)
    options.add_argument("deeds", nargs="*")
    Worker(options.parse_args()).train()


class Worker:
    def __init__(self, options):
        self.options = options
        self.settings = Settings.from_env()
        self.comm = MPI.COMM_WORLD.Dup()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        size = self.comm.Get_size()
        self.ranks = [int(r) for r in self.settings.ranks.split(",")] if self.settings.ranks else list(range(size))
        self.rank = self.ranks[self.comm.Get_rank()]
        self.world = self.ranks
        run_dir = Path(self.settings.run_dir)
        self.clock = SystemClock(self.settings.origin_s)
        self.recorder = FileRecorder(records_path(run_dir, str(self.rank)))
        self.beacon = Beacon(beacon_path(run_dir, self.rank))
        self.plan = FaultPlan.from_json(self.settings.faults) if self.settings.faults else FaultPlan()
        self.generation = 0
        self.asked_to_stop = False
        signal.signal(signal.SIGTERM, self.ask_to_stop)

    def ask_to_stop(self, number, frame):
        self.asked_to_stop = True

    def write(self, event, step, **fields):
        self.recorder.write(event(t_s=self.clock.now_s(), rank=self.rank, step=step, **fields))

    def train(self):
        self.start()
        step = self.first_step()
        while step < self.options.steps:
            self.beacon.mark("forward", step, self.rank, range(self.rank * 4, self.rank * 4 + 4))
            time.sleep(self.options.step_s)
            self.misbehave(step)
            flags = np.array([1.0, float(self.asked_to_stop)])
            if not self.sum(flags, step):
                continue
            if self.rank == self.ranks[0]:
                self.write(
                    StepCommitted, step, epoch=0, samples=4, workers=len(self.ranks), metrics={"loss": 1.0 / (step + 1)}
                )
                self.save(step + 1)
            step += 1
            if flags[1]:
                self.leave(step, "stopped")
            if len(self.ranks) < self.settings.min_workers:
                self.leave(step, "gave-up")
        self.leave(step, "done")

    def start(self):
        s = self.settings
        self.write(
            RunStarted, self.first_step(), fabric="ulfm", strategy=s.strategy, seed=s.seed, workers=len(self.ranks),
            slices=s.slices or s.workers, order="fold", split=s.split, batch=s.batch, rescale=s.rescale,
            steps_planned=self.options.steps, samples_planned=4 * self.options.steps, num_buckets=1, parameters=1,
        )  # fmt: skip

    def first_step(self):
        if not self.settings.resume:
            return 0
        saved = sorted(Path(self.settings.checkpoint_dir).glob("step-*"))
        return int(saved[-1].name[5:]) if saved else 0

    def save(self, step):
        if self.settings.checkpoint_dir:
            path = Path(self.settings.checkpoint_dir, f"step-{step:06d}")
            path.mkdir(parents=True, exist_ok=True)
            self.write(CheckpointSaved, step, path=str(path), size_bytes=0, seconds=0.0)

    def sum(self, flags, step):
        self.beacon.mark("allreduce", step)
        try:
            self.comm.Allreduce(MPI.IN_PLACE, flags)
        except MPI.Exception:
            self.recover(step)
            return False
        return True

    def recover(self, step):
        self.beacon.mark("recovery", step)
        self.comm.Revoke()
        self.comm = self.comm.Shrink()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        alive = np.zeros(64)
        alive[self.rank] = 1
        self.comm.Allreduce(MPI.IN_PLACE, alive)
        before, self.ranks = self.ranks, [int(r) for r in np.flatnonzero(alive)]
        self.generation += 1
        self.write(
            Recovered, step, lost=tuple(sorted(set(before) - set(self.ranks))), survivors=tuple(self.ranks),
            decision="redo", redone_steps=1, generation=self.generation,
        )  # fmt: skip

    def leave(self, step, outcome):
        self.beacon.mark("gate", step)
        self.comm.Barrier()
        saved = sorted(Path(self.settings.checkpoint_dir).glob("step-*")) if self.settings.checkpoint_dir else []
        self.write(
            Finished, step, outcome=outcome, sha256="0" * 64, state_sha256="0" * 64, planned=4 * step,
            committed=4 * step, lost=0, repeated=0, metrics={"loss": 0.1}, checkpoint=str(saved[-1]) if saved else "",
        )  # fmt: skip
        sys.exit(0)

    def misbehave(self, step):
        due = self.plan.due(self.rank, step, "forward")
        if due is not None:
            self.write(FaultFired, step, fault=due[0], kind="kill", phase="forward")
            os.kill(os.getpid(), signal.SIGKILL)
        for deed in self.options.deeds:
            what, rank, when = deed.split(":")
            if int(when) == step and rank in ("any", str(self.rank)):
                DEEDS[what](self)


def fail(worker):
    raise ValueError(f"rank {worker.rank} cannot go on")


def refuse(worker):
    raise ConfigError("color must be red, got 'blue'")


def stand_still(worker):
    worker.beacon.mark("allreduce", 0)
    time.sleep(60)


DEEDS = {
    "raise": fail,
    "config": refuse,
    "os_exit": lambda worker: os._exit(3),
    "sys_exit": lambda worker: sys.exit(3),
    "leave": lambda worker: sys.exit(0),
    "kill": lambda worker: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda worker: os.kill(os.getpid(), signal.SIGSEGV),
    "once": lambda worker: None if worker.settings.ranks else os.kill(os.getpid(), signal.SIGSEGV),
    "hang": stand_still,
    "hang_once": lambda worker: None if worker.settings.ranks else stand_still(worker),
    "abort": lambda worker: MPI.COMM_WORLD.Abort(1),
}

if __name__ == "__main__":
    main()
