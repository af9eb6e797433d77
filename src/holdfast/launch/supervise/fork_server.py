"""The fork server of a node: a process that imports torch once, and forks the workers of this node from itself.

A worker, a spare or a replacement then starts in milliseconds instead of importing torch for seconds, and the pages of
the imported modules are shared. Each starter, see :mod:`holdfast.launch.supervise.starter`, asks the server for a watcher; the
watcher forks the worker, as it does without a server. Nothing depends on the server afterwards: it may be killed at any
time, and starters that reach none start their workers without it.

Torch survives a fork as long as it has computed nothing: no threads, no CUDA context. If the import starts threads, the
server ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from holdfast.launch.supervise.fork_protocol import FORK_SERVER, GO, READY, peer, surroundings
from holdfast.launch.supervise.processes import Process, die_with_parent, open_log

_SOCKET = "fork-server"
_REQUEST_S = 10.0
"""Time that a starter may take to send its request; it sends it at once."""
_KILLED_WITHIN_S = 1.0
"""Time that it may take to end by SIGKILL: blocked I/O or a debugger may keep it forever."""
_LOOKS_APART_S = 5.0
"""Longest time between two looks of a launcher that was not itself stopped or asleep in between."""
_PRELOADED = ("torch", "torch._dynamo", "holdfast.distributed", "holdfast.session.session", "holdfast.comm.c10d")
"""The first optimizer of a process imports torch's compiler, to exclude itself from compilation."""
_READ_AT_IMPORT = re.compile(rb"(?:OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|TORCH|TORCHDYNAMO|TORCHINDUCTOR|PYTORCH)_[A-Z]+")
"""Variables that torch and its libraries read while they are imported: a script that sets one imports torch itself."""


def is_useful(script: Path) -> bool:
    """Return whether a script's workers can be forked after the import of torch: it needs torch, and does not set it up."""
    try:
        text = script.read_bytes()
    except OSError:  # reported by the worker
        return False
    needs_torch = re.search(rb"\b(?:torch|holdfast)\b", text) is not None
    return needs_torch and not (b"environ" in text and _READ_AT_IMPORT.search(text))


class ForkServer:
    """A running fork server, for the launcher.

    Args:
        run_dir: Directory of this machine in which its socket is created.
        env: Environment of the workers, as far as they share it.
        log: File to which its output is appended.
        files: Descriptors that it and all workers inherit.
        words: The script and its arguments, for the command line that the system shows of all workers.
    """

    def __init__(
        self, run_dir: Path, env: Mapping[str, str], log: Path, files: Sequence[int] = (), words: Sequence[str] = ()
    ) -> None:
        self._path = run_dir / _SOCKET
        self.variables = {FORK_SERVER: str(self._path)}
        """Variables by which starters find it."""
        listener = _listen(self._path)
        self._importing, ready = os.pipe()
        ours = listener.fileno(), ready
        with os.fdopen(open_log(log), "ab") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "holdfast.launch.supervise.fork_server",
                    *map(str, ours),
                    str(os.getpid()),
                    *words,
                ],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,  # Ctrl-C is for the launcher
                pass_fds=(*ours, *files),
            )
        listener.close()
        os.close(ready)
        self._stopped_since_s: float | None = None
        self._looked_s = 0.0

    def is_importing(self) -> bool:
        """Return whether it is not ready yet, so that starters wait for it."""
        return not select.select([self._importing], [], [], 0.0)[0]  # it closes the other end, or ends

    def stopped_s(self, now_s: float) -> float:
        """Return for how many seconds a signal has stopped the server, as far as earlier calls have seen it.

        Time in which the launcher did not look, because it was itself stopped, does not count.
        """
        is_gone = self.process.poll() is not None  # and another process may have its PID
        process = None if is_gone else Process.of(self.process.pid)
        apart_s, self._looked_s = now_s - self._looked_s, now_s
        if process is None or not process.is_stopped():
            self._stopped_since_s = None
            return 0.0
        if self._stopped_since_s is None or apart_s > _LOOKS_APART_S:
            self._stopped_since_s = now_s
        return now_s - self._stopped_since_s

    def kill(self) -> None:
        """End the process. Starters that wait for it, and later ones, start their workers without it."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_KILLED_WITHIN_S)

    def close(self) -> None:
        """End the server. The workers that it forked go on."""
        self.kill()
        os.close(self._importing)
        with contextlib.suppress(OSError):  # it is removed with its folder, unless access to that was taken away
            self._path.unlink()


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fchmod(listener.fileno(), 0o600)  # Linux gives the file of the socket this mode, whatever the umask is
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")  # a path may be longer than an address
        listener.listen(1024)  # starters wait here while torch is imported
    except OSError:
        listener.close()
        raise
    finally:
        os.close(folder)
    return listener


# -- the server


def serve(listener: socket.socket, ready: int, launcher: int) -> NoReturn:
    """Import torch and close ``ready``, then fork a watcher with a worker for each request, until the launcher has ended."""
    die_with_parent(signal.SIGKILL, launcher)  # its PID may be 1, in a container
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the watchers: the kernel reaps them
    gc.disable()  # a fifth of the import would be spent on looking for garbage among the modules
    for name in _PRELOADED:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("the fork server ends, because importing torch started threads; each worker imports torch itself")
    gc.freeze()  # the collector of a worker would otherwise touch, and so copy, all pages
    gc.enable()
    os.close(ready)
    while True:
        connection, _ = listener.accept()
        with connection:
            request = _receive(connection)
            if request is not None and _is_child():
                listener.close()
                _become_watcher(connection, *request)
            for file in request[1] if request is not None else ():
                os.close(file)


def _is_child() -> bool:
    """Fork, and return whether this is the child. The starter whose watcher the system refuses goes on by itself."""
    try:
        return os.fork() == 0
    except OSError:
        return False


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a request and the descriptors of the starter's output; None if it is not for this server."""
    if peer(connection)[1] != os.getuid():
        return None
    connection.settimeout(_REQUEST_S)
    files: list[int] = []
    try:
        head, files, _, _ = socket.recv_fds(connection, 4, 3)
        with connection.makefile("rb") as stream:
            request = json.loads(stream.read(int.from_bytes(head, "big")))
        is_ours = isinstance(request, dict) and request.get("surroundings") == surroundings()
    except (OSError, ValueError, RecursionError):  # the starter was killed
        is_ours = False
    connection.settimeout(None)
    if is_ours:
        return request, files
    for file in files:
        os.close(file)
    return None


def _become_watcher(connection: socket.socket, request: dict[str, Any], files: list[int]) -> NoReturn:
    """Take over the surroundings of the starter, and be the watcher of its worker."""
    from holdfast.launch.supervise.watcher import Starter, end_if_orphaned, mpirun_above
    from holdfast.launch.supervise.worker import run_watched
    from holdfast.launch.supervise.worker_context import read_our_clock

    try:
        _take_over(request, files)
        _answer(connection)
        if connection.recv(1) != GO:  # it gave up waiting, or was killed
            os._exit(1)
    except OSError:
        os._exit(1)
    read_our_clock()
    end_if_orphaned(request["parent"])
    run_watched(request["words"], mpirun_above(request["parent"]), Starter(connection))


def _answer(connection: socket.socket) -> None:
    """Tell the starter that its watcher runs, with a pidfd of it and one of the launcher, unless that is elsewhere."""
    from holdfast.launch.supervise.worker_context import launcher_process

    launcher = launcher_process()
    handle = None if launcher is None else launcher.open()
    if handle is None:
        connection.sendall(READY)
        return
    ours = os.pidfd_open(os.getpid())
    socket.send_fds(connection, [READY], [ours, handle])
    os.close(ours)
    os.close(handle)


def _take_over(request: dict[str, Any], files: list[int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as in the server, waitpid of the worker would fail: ECHILD
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ.pop(FORK_SERVER)
    os.sched_setaffinity(0, request["cores"])
    for name, limits in request["limits"].items():
        resource.setrlimit(getattr(resource, name), tuple(limits))
    with contextlib.suppress(PermissionError):  # a group of another session
        os.setpgid(0, request["group"])
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # as in a process that has just imported it; Python does so itself for its own
    sys.modules["holdfast.distributed"].adapt_to_job()


if __name__ == "__main__":
    listener, ready, launcher = map(int, sys.argv[1:4])
    serve(socket.socket(fileno=listener), ready, launcher)
