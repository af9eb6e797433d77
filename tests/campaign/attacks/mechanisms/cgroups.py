"""Control groups of both versions: a limit of memory or of processes for what is started inside."""

from __future__ import annotations

import atexit
import os
import re
import threading
from pathlib import Path

from campaign.attacks.mechanisms.afterwards import afterwards

ROOT = Path("/sys/fs/cgroup")
REMOVE = """
for _ in $(seq 300); do
    rmdir "$1" && exit
    while read -r pid; do kill -KILL "$pid"; done < "$1/cgroup.procs"
    sleep 0.05
done
"""
"""A process that was killed counts until it has been waited for."""
RESTORE = 'for _ in $(seq 100); do echo "-$2" > "$1" && exit; sleep 0.1; done'
"""It is refused while a group below that gives it on still exists."""
_DELEGATING = threading.Lock()
V1 = {"memory": "memory.limit_in_bytes", "pids": "pids.max"}
V2 = {"memory": "memory.max", "pids": "pids.max"}


def missing(controller: str) -> str:
    """Why no group of this controller can be created, "" if one can."""
    try:
        with ControlGroup(controller, f"try-{os.getpid()}"):
            return ""
    except OSError as error:
        return f"no {controller} control group can be created: {error}"


def home(controller: str, membership: str, root: Path = ROOT) -> tuple[Path, dict[str, str]]:
    """Return the folder in which groups are created, and the names of the limits there.

    Of version 2 that is the nearest group above this process that gives the controller to its children: one that has
    processes of its own, as that of this process, may not.

    Args:
        controller: "memory" or "pids".
        membership: Content of ``/proc/self/cgroup``.
        root: Where control groups are mounted.
    """
    lines = [line.split(":", 2) for line in membership.splitlines()]
    for _, controllers, path in lines:
        if controller in controllers.split(","):
            return root / controller / path.lstrip("/"), V1
    own = root / next((path for number, _, path in lines if number == "0"), "/").lstrip("/")
    for folder in (own, *own.parents):
        control = folder / "cgroup.subtree_control"
        if control.exists() and controller in control.read_text().split():
            return folder, V2
        if folder == root:
            break
    return own, V2


class ControlGroup:
    """A group below that of this process, removed at the end with the processes in it.

    Args:
        controller: "memory" or "pids".
        name: Its name.

    Raises:
        OSError: on entering, if it cannot be created.
    """

    def __init__(self, controller: str, name: str) -> None:
        self._home, self._limits = home(controller, Path("/proc/self/cgroup").read_text())
        self._controller = controller
        self.path = self._home / name

    def __enter__(self) -> ControlGroup:
        if self._limits is V2:
            delegate(self._home / "cgroup.subtree_control", self._controller)
        self.path.mkdir()
        self._removed = afterwards(REMOVE, self.path)
        self._removed.__enter__()
        if self._controller == "memory" and (swap := self.path / "memory.swap.max").exists():
            swap.write_text("0")  # what is above the limit would be swapped out instead
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes of the group, and remove it."""
        self._removed.__exit__(None, None, None)

    def prefix(self) -> list[str]:
        """What to put before a command so that it runs in the group, in the command's own process.

        The path leads through this process, because ``ip netns exec`` hides control groups.
        """
        return ["sh", "-c", 'echo 0 > "$0" && exec "$@"', f"/proc/{os.getpid()}/root{self.path}/cgroup.procs"]

    def add(self, pid: int) -> None:
        """Move a process into the group; what it starts later is in it, too."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def pids(self) -> list[int]:
        """The processes of the group."""
        return [int(pid) for pid in (self.path / "cgroup.procs").read_text().split()]

    def limit(self, most: int | None) -> None:
        """Set the limit, in bytes or processes; None: no limit.

        Raises:
            OSError: if more memory is in use (version 1).
        """
        unlimited = "-1" if self._limits is V1 and self._controller == "memory" else "max"
        (self.path / self._limits[self._controller]).write_text(unlimited if most is None else str(most))

    def used(self) -> int:
        """How many bytes or processes count at present."""
        v1 = {"memory": "memory.usage_in_bytes", "pids": "pids.current"}
        v2 = {"memory": "memory.current", "pids": "pids.current"}
        return int((self.path / (v1 if self._limits is V1 else v2)[self._controller]).read_text())

    def struck(self) -> int:
        """How many processes the kernel has ended for lack of memory, or how often it refused to start one."""
        if self._controller == "pids":
            counted = (self.path / "pids.events").read_text()
            return int(re.search(r"^max (\d+)", counted, re.MULTILINE)[1])
        name = "memory.oom_control" if self._limits is V1 else "memory.events"
        return int(re.search(r"^oom_kill (\d+)", (self.path / name).read_text(), re.MULTILINE)[1])


def delegate(control: Path, controller: str) -> None:
    """Give a controller to the groups below, until the end of this process: others may use it at the same time."""
    with _DELEGATING:
        if controller not in control.read_text().split():
            control.write_text(f"+{controller}")
            restored = afterwards(RESTORE, control, controller)
            restored.__enter__()
            atexit.register(restored.__exit__, None, None, None)
