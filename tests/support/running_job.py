"""A job that is under way, for tests that act on its processes."""

import subprocess
import sys
import time

from jobs import clean_env, of_kind, read_report
from warm import WARM

from holdfast.launch.supervise.processes import WatchedWorker, pair_path
from holdfast.records.beacon import Beacon
from holdfast.records.paths import beacon_path

DEADLINE_S = 120.0


class Running:
    """A job that is under way, and its processes; ``launcher`` is what Python runs instead of the ``holdfast`` command."""

    def __init__(self, folder, *options, launcher=("-m", "holdfast")):
        self.folder = folder
        command = [sys.executable, *launcher, "run", "--no-page", "--report", folder / "report", *options]
        env = clean_env(TMPDIR=str(folder), **{WARM: ""})
        self.job = subprocess.Popen(
            [*map(str, command)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_for(self, ready):
        """Return what ``ready`` returns as soon as it is not None."""
        ends_s = time.monotonic() + DEADLINE_S
        while (found := ready()) is None:
            assert self.job.poll() is None, self.job.communicate()
            assert time.monotonic() < ends_s, "it did not come to that"
            time.sleep(0.01)
        return found

    def pair_at_step(self, rank, step):
        """Return a worker and its watcher once it has come so far."""

        def ready():
            for run_dir in self.folder.glob("holdfast-*-*"):
                position = Beacon.read(beacon_path(run_dir, rank))
                if position is not None and position.step >= step:
                    return WatchedWorker.read(pair_path(run_dir, rank))
            return None

        return self.wait_for(ready)

    def end(self):
        """Wait for the end of the job, which must be well; return its report, and the exit codes of workers by PID."""
        _, err = self.job.communicate(timeout=DEADLINE_S)
        assert self.job.returncode == 0, err
        report = read_report(self.folder / "report")
        return report, {event["pid"]: event["exit_code"] for event in of_kind(report, "WorkerEnded")}
