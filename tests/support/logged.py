"""Jobs that log, whose launchers are killed; and reading their logs back, with the readers of the packages that show them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from jobs import ROOT, clean_env

from holdfast.observe.loggers.tensorboard import read_events
from holdfast.records.files import read_run
from holdfast.records.types import CheckpointSaved, StepCommitted

LOGGED = ROOT / "tests" / "support" / "train_logged.py"
LOGGED_JOB = ("--fabric", "gloo", "--slices", 3, "--no-page")
STEPS = 12
"""Steps of the script."""


def scalars_of(folder):
    """The scalars of a TensorBoard folder as TensorBoard reads them: by tag, a list of step and value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    log.Reload()
    return {tag: [(each.step, each.value) for each in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


def steps_on_disk(folder):
    """The steps of all event files of a folder, in the order of the files, read without TensorBoard's accumulator."""
    files = sorted(folder.glob("events.out.tfevents.*"))
    return [event.step for file in files for event in read_events(file) if event.summary.value]


class Start:
    """One start of a job that resumes, whose launcher will be killed."""

    def __init__(self, folder, target, *options, script_words=("--step-s", 0.05), env=None):
        self._temporary = folder / "tmp"
        self._temporary.mkdir(exist_ok=True)
        self._errors = folder / "errors.txt"
        self._known = set(self._temporary.glob("holdfast-*"))
        words = ["-n", 2, *LOGGED_JOB, "--checkpoint-dir", folder / "checkpoints", "--checkpoint-every", 3, *options]
        for each in (target,) if isinstance(target, str) else target:
            words += ["--log-to", each]
        words += [LOGGED, *script_words]
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast", "run", *map(str, words)],
                env=clean_env(TMPDIR=str(self._temporary), **(env or {})),
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def records(self):
        folders = set(self._temporary.glob("holdfast-*")) - self._known
        return [record for folder in folders for record in read_run(folder)]

    def committed(self):
        return {record.step for record in self.records() if isinstance(record, StepCommitted)}

    def kill_after(self, step):
        """Kill the launcher once the step is committed; return what was committed and saved when all had ended."""
        self._wait_for(step)
        self._process.kill()
        assert self._process.wait(30) == -signal.SIGKILL
        deadline = time.monotonic() + 60
        while self._has_processes():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        saved = {record.step for record in self.records() if isinstance(record, CheckpointSaved)}
        return self.committed(), max(saved, default=0)

    def _wait_for(self, step):
        deadline = time.monotonic() + 60
        while step not in self.committed():
            assert self._process.poll() is None, self._errors.read_text()
            assert time.monotonic() < deadline, self.records()
            time.sleep(0.005)

    def stop_after(self, step):
        """Stop the job once the step is committed: it saves its state."""
        self._wait_for(step)
        self._process.terminate()
        assert self._process.wait(100) == 4, self._errors.read_text()

    def _has_processes(self):
        mark = f"TMPDIR={self._temporary}".encode()
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in environ.read_bytes().split(b"\0"):
                    return True
            except OSError:
                continue
        return False

    def end(self):
        assert self._process.wait(100) == 0, self._errors.read_text()
