"""A script with an evaluation after each epoch, a scheduler and the best model, as people write it.

    train_epochs.py [--epochs N] [--range] [--loops N] [--deed WHAT:STEP:RANK]... [--own-handler] [--patience N]

Deeds that strike after a loop that has ended with STEP steps, or in a loop once STEP steps are committed; -1: after all
epochs:

term        send SIGTERM to the launcher, with wrong weights in the model, and evaluate until that takes effect
wait        evaluate until SIGTERM takes effect
term-late   the same as term, once another worker is in the next loop
end         kill all workers, but not the launcher
die         kill this worker
break, swallow    leave the loop
"""

import argparse
import hashlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

PER_EPOCH = 4
LIMIT_S = 60.0


class Best:
    """What a script keeps between epochs, registered."""

    def __init__(self):
        self.value, self.epoch, self.seen = 9.0, -1, []

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


class Script:
    def __init__(self, options, **settings):
        self.options = options
        self.deeds = [deed.split(":") for deed in options.deed]
        self.asked = False
        self.bad = 0  # as in most scripts, in no state
        torch.manual_seed(0)
        x = torch.randn(12 * PER_EPOCH + 12, 8)
        y = (x[:, :4].sum(1) > x[:, 4:].sum(1)).long()
        self.test = (x[-12:], y[-12:])
        self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        loader = DataLoader(TensorDataset(x[:-12], y[:-12]), batch_size=12, shuffle=True)
        self.best = Best()
        self.model, self.optimizer, self.loader, self.scheduler = holdfast.prepare(
            self.model, optimizer, loader, scheduler, register={"best": self.best}, **settings
        )
        if options.own_handler:
            signal.signal(signal.SIGTERM, self.ask)

    def ask(self, number, frame):
        self.asked = True

    def run(self):
        self.do("before", 0)
        epochs = range(self.options.epochs) if self.options.range else self.loader.epochs(self.options.epochs)
        for epoch in epochs:
            begun = self.loader.step
            for _ in range(self.options.loops):
                self.train_epoch()
            self.evaluate(epoch, self.loader.step - begun)
            self.scheduler.step()
            if self.asked or (self.options.patience and self.bad > self.options.patience):
                break
        self.do("after", -1)
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())).hexdigest()[:16]

    def train_epoch(self):
        if "HOLDFAST_RUN_DIR" in os.environ:
            Path(os.environ["HOLDFAST_RUN_DIR"], f"loop-{self.loader.session.rank}-{self.loader.step}").touch()
        try:
            for inputs, targets in self.loader:
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(inputs), targets).backward()
                self.optimizer.step()
                if self.loader.committed and (deed := self.due("break", "swallow", "die-in")):
                    if deed == "break":
                        break
                    if deed == "die-in":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise RuntimeError("no more")
        except RuntimeError as error:
            if "no more" not in str(error):
                raise

    def evaluate(self, epoch, steps):
        with torch.no_grad():
            value = F.cross_entropy(self.model(self.test[0]), self.test[1]).item()
        if value < self.best.value:
            self.best.value, self.best.epoch, self.bad = value, epoch, 0
        else:
            self.bad += 1
        self.best.seen.append(epoch)
        if self.loader.session.is_lead:
            print(f"epoch {epoch} steps {steps} val {value:.6f}", flush=True)
        self.do("after", self.loader.step)

    def due(self, *kinds):
        for what, step, rank in self.deeds:
            if what in kinds and int(step) == self.loader.step and rank in (str(self.loader.session.rank), "all"):
                return what
        return None

    def do(self, where, step):
        launcher = int(os.environ.get("HOLDFAST_LAUNCHER", "0").split()[0])
        rank = os.environ.get("RANK", "0") if where == "before" else str(self.loader.session.rank)
        for what, at, who in self.deeds:
            if int(at) != step or who not in (rank, "all"):
                continue
            match what:
                case "term" | "wait" | "term-late":
                    if where == "after":
                        with torch.no_grad():
                            for parameter in self.model.parameters():
                                parameter.zero_()
                    if what == "term-late":
                        wait_for(lambda: list(Path(os.environ["HOLDFAST_RUN_DIR"]).glob(f"loop-*-{step}")))
                        time.sleep(0.5)
                    if what != "wait":
                        os.kill(launcher, signal.SIGTERM)
                    wait_for(lambda: self.asked)
                case "end":
                    marker = Path(os.environ["HOLDFAST_RUN_DIR"], "was-ended")
                    if marker.exists():
                        continue
                    marker.touch()
                    for noted in Path(os.environ["HOLDFAST_RUN_DIR"]).glob("process-*"):
                        pid = int(noted.read_text().splitlines()[0].split()[0])
                        if pid != os.getpid():
                            os.kill(pid, signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(found):
    end_s = time.monotonic() + LIMIT_S
    while not found():
        if time.monotonic() > end_s:
            raise TimeoutError("nothing happened")
        time.sleep(0.01)


def options(words):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--range", action="store_true")
    parser.add_argument("--loops", type=int, default=1)
    parser.add_argument("--deed", action="append", default=[])
    parser.add_argument("--own-handler", action="store_true")
    parser.add_argument("--patience", type=int, default=0)
    return parser.parse_args(words)


if __name__ == "__main__":
    script = Script(options(sys.argv[1:]))
    weights = script.run()
    if script.loader.session.is_lead:
        print(f"evaluated {script.best.seen}", flush=True)
    drawn = torch.rand(()).item(), np.random.rand(), random.random()
    print(f"rank {script.loader.session.rank} steps {script.loader.step} weights {weights} drawn {drawn}", flush=True)
