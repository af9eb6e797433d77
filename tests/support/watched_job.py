"""A job with a dashboard, for tests and pictures of its page."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from jobs import clean_env, free_port, read_report

SCRIPT = Path(__file__).with_name("train_watched.py")


class WatchedJob:
    """``holdfast run`` with a dashboard, in a folder; ends with its `with` block."""

    def __init__(self, folder, *args, script, port=None):
        self.folder, self.port = folder, port or free_port()
        shutil.copyfile(SCRIPT, folder / "train.py")
        self.command = [
            *(sys.executable, "-m", "holdfast", "run", "-n", "4", "--fabric", "gloo", "--report", "out"),
            *("--dashboard", str(self.port), *args, "train.py", *map(str, script)),
        ]

    def __enter__(self):
        self.output = (self.folder / f"printed-{time.monotonic_ns()}").open("w+")
        self.process = subprocess.Popen(
            self.command, cwd=self.folder, env=clean_env(), stdout=self.output, stderr=subprocess.STDOUT, text=True
        )
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self.output.close()

    def printed(self):
        return Path(self.output.name).read_text()

    def url(self, within_s=60):
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if found := re.search(r"dashboard at (\S+)", self.printed()):
                return found[1]
            assert self.process.poll() is None, self.printed()
            time.sleep(0.05)
        raise AssertionError(self.printed())

    def report(self):
        return read_report(self.folder / "out")
