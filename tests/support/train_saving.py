"""Training that needs all of its state: if a checkpoint lacks any part of it, the final bits differ.

As a script over Holdfast: ``train_saving.py [--ballast MB] [--deed WHAT:STEP:WHO]...``.
"""

import argparse
import contextlib
import functools
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.checkpoint import steps
from holdfast.faults import points
from holdfast.records.paths import requests_path

SAMPLES, BATCH, SLICES, SEED = 60, 10, 3, 11
EPOCHS = (1, 2)
"""Epochs of each loop over the data."""
LOOP_ENDS = (6, 18)
"""Steps after each loop."""


class Mean:
    """A running mean of weights, towards which the weights are pulled."""

    def __init__(self, weight):
        self.value = weight.detach().clone()

    def update(self, weight):
        self.value = 0.8 * self.value + 0.2 * weight.detach()

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"].clone()


class Noise:
    """A level that the script changes at random, once a step, outside the slices."""

    def __init__(self):
        self.level = 0.0

    def move(self):
        self.level = 0.7 * self.level + random.random() - np.random.rand() + torch.rand(()).item()

    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        self.level = state["level"]


class Ballast:
    """Makes the state large, without gradients to reduce."""

    def __init__(self, megabytes):
        self.values = torch.arange(megabytes << 18, dtype=torch.float32).reshape(-1, 1 << 10)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


class Training:
    """A model and everything that belongs to it.

    Args:
        schedule: Whether the scheduler steps once a step or once an epoch.
        ballast_mb: Size of additional state.
        **settings: Settings of the session.
    """

    def __init__(self, schedule="step", ballast_mb=0, **settings):
        torch.set_num_threads(1)
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.session = holdfast.Session(
            self.model,
            optimizer,
            scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + 0.3 * count)),
            schedule=schedule,
            # Not a power of two, because only then do the bits depend on the scale.
            scaler=torch.amp.GradScaler("cpu", init_scale=1000.0, growth_factor=1.7, growth_interval=2),
            **({"seed": SEED, "slices": SLICES, "bucket_bytes": 1024} | settings),
        )
        self.mean, self.noise = Mean(self.model[0].weight), Noise()
        things = {"mean": self.mean, "noise": self.noise}
        if ballast_mb:
            things["ballast"] = Ballast(ballast_mb)
        self.session.register(**things)
        self.stopped = False

    def run(self, each=lambda step: None, after_loop=lambda: None):
        """Train; ``each`` is called in every step, after its slices, and ``after_loop`` after each loop."""
        x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(x, x[:, :4].argmax(1))
        for epochs in EPOCHS:
            for step in self.session.steps(data, BATCH, epochs):
                self.noise.move()
                for x, y in step:
                    loss = F.cross_entropy(self.model(x + 0.1 * self.noise.level), y)
                    step.backward(loss + (self.model[0].weight - self.mean.value).square().mean())
                self.noise.move()
                self.mean.update(self.model[0].weight)
                each(step)
            after_loop()
            if self.stopped:
                return self
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter += 0.01 * random.random() * float(np.random.rand()) * torch.randn_like(parameter)
        return self

    def stop(self, step):
        """End the script after ``step``."""
        self.stopped = True
        step.stop()

    @property
    def sha256(self):
        """Hash of the model and the optimizer at the end."""
        return self.session._job.loops.finished[0].state_sha256


@functools.cache
def undisturbed(schedule="step"):
    """The hash of an undisturbed run."""
    return Training(schedule).run().sha256


def launcher():
    return int(os.environ["HOLDFAST_LAUNCHER"].split()[0])


def others():
    """All other watchers and workers of the job."""
    noted = Path(os.environ["HOLDFAST_RUN_DIR"]).glob("process-*")
    pids = {int(line.split()[0]) for pair in noted for line in pair.read_text().splitlines()}
    return sorted(pids - {os.getpid()}, key=lambda pid: pid == os.getppid())


def kill(*pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # another worker may do the same
            os.kill(pid, signal.SIGKILL)


class Deeds:
    """Planned failures: ``WHAT:STEP:WHO``, WHO being a rank or ``all``.

    In a step; or at a point of its checkpoint; in its recovery: ``WHAT@shrink:STEP:WHO``; or before it, between two
    loops: ``WHAT@loop:STEP:WHO``.
    """

    def __init__(self, training, deeds):
        self.training = training
        self.deeds = [deed.split(":") for deed in deeds]

    def at_point(self, name, step=None):
        """Carry out the deeds that are due at a point of the checkpoint in progress, or of ``step``."""
        step = self.training.session._job.checkpoints.step if step is None else step
        for what, when, who in self.deeds:
            if what.endswith(f"@{name}") and int(when) == step and who in (str(self.training.session.rank), "all"):
                self.do(what.partition("@")[0])

    def in_recovery(self):
        """From now on, carry out deeds that are due when the survivors are about to continue."""
        session, shrink = self.training.session, self.training.session._job.comm.shrink

        def shrink_after_deeds(**changes):
            for what, when, who in self.deeds:
                if what.endswith("@shrink") and int(when) == session.step and who in (str(session.rank), "all"):
                    self.do(what.partition("@")[0])
            return shrink(**changes)

        session._job.comm.shrink = shrink_after_deeds

    def in_step(self, step):
        """Carry out the deeds that are due in the step, each once."""
        for deed in list(self.deeds):
            what, when, who = deed
            if "@" not in what and int(when) == step.number and who in (str(self.training.session.rank), "all"):
                self.deeds.remove(deed)
                self.do(what, step)

    def do(self, what, step=None):
        if what in ("block", "limit"):
            self.training.session._job.checkpoints._writer.wait()  # an earlier save must complete
        place = Path(self.training.session._settings.checkpoint_dir)
        match what:
            case "die":
                kill(os.getpid())
            case "end":  # all processes: first the launcher, which would restart, then the workers, which would save
                kill(launcher(), *others(), os.getpid())
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
            case "term-launcher":
                os.kill(launcher(), signal.SIGTERM)
            case "term-and-die":
                os.kill(launcher(), signal.SIGTERM)
                time.sleep(0.3)
                kill(os.getpid())
            case "kill-launcher":
                kill(launcher())
            case "kill-launcher-and-die":
                kill(launcher(), os.getpid())
            case "stop-launcher":
                os.kill(launcher(), signal.SIGSTOP)
                wake = f"sleep 2; kill -CONT {launcher()}"
                subprocess.Popen(["sh", "-c", wake], start_new_session=True)
            case "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "stop":
                self.training.stop(step)
            case "sleep":
                time.sleep(60)
            case "pause":
                time.sleep(0.5)
            case "await":
                self.wait_until(lambda: self.world.comm.newcomers(self.world.loop))
            case "await-2" | "await-3":
                self.wait_until(lambda: len(self.world.comm.newcomers(self.world.loop)) == int(what[-1]))
            case "await-notice":
                self.wait_until(lambda: self.world.pending.leaves)
            case "await-request":
                path = requests_path(Path(os.environ["HOLDFAST_RUN_DIR"]))
                self.wait_until(lambda: path.exists() and path.read_bytes().endswith(b"\n"))
            case "await-checkpoint":  # of the step before; whoever does not know of it writes all of the next ones
                self.wait_until(lambda: steps(place)[-1] == step.number - 1)
            case "block":  # a path that cannot be written: root may write to any directory
                shutil.rmtree(place, ignore_errors=True)
                place.write_text("in the way")
            case "limit":
                resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
            case _:
                raise ValueError(what)

    @property
    def world(self):
        return self.training.session._job

    def wait_until(self, ready):
        """Wait for an external event; the other workers wait for this worker meanwhile."""
        ends_s = time.monotonic() + 120
        with self.training.session.busy():
            while not ready():
                if time.monotonic() > ends_s:
                    raise TimeoutError("the awaited event did not happen")
                time.sleep(0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ballast", type=int, default=0, metavar="MB")
    parser.add_argument("--deed", action="append", default=[], metavar="WHAT[@POINT]:STEP:WHO")
    parser.add_argument("--step-s", type=float, default=0.0)
    options = parser.parse_args()
    if f"term:-1:{os.environ.get('RANK')}" in options.deed:  # before training
        os.kill(os.getpid(), signal.SIGTERM)
    training = Training(ballast_mb=options.ballast, total_steps=LOOP_ENDS[-1])
    deeds = Deeds(training, options.deed)
    if any("@" in deed for deed in options.deed):
        points.arm(deeds.at_point)

    def each(step):
        if step.number == 0 and any("@shrink" in deed for deed in options.deed):
            deeds.in_recovery()
        time.sleep(options.step_s)
        deeds.in_step(step)

    training.run(each, lambda: deeds.at_point("loop", training.session.step))
