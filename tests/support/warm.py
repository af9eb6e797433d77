"""Jobs of tests start from a process that has imported torch: an import takes longer than most jobs train.

In the product a launcher starts a fork server, which imports torch and forks the workers. Here the launcher is itself
forked, from a process that has imported torch once (:func:`serve`), and forks its fork server. Everything else is as
in a job that a shell starts: the launcher is a child of the test, all processes are real, and so are their files and
environments. What needs another process still starts from nothing: other variables that torch or Python read while
they start, another seed of hashes, inherited files, and tests that are marked ``cold_start``. ``make test COLD=1``
starts all from nothing.

A script of a test, ``python SCRIPT`` or ``python -c CODE``, starts from there too if its environment has :data:`WARM`, and
so does a command that runs on a host of ``netns.py``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import inspect
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import inside

PRELOADED = ("torch", "torch._dynamo", "holdfast.distributed", "holdfast.session.session", "holdfast.comm.c10d")
"""As the fork server does."""
OF_LAUNCHER = (
    "holdfast.cli.app",
    "holdfast.launch.launcher",
    "holdfast.observe.page.pages",
    "holdfast.observe.terminal.bar",
    "holdfast.tools.debug.bundle_writer",
)
ALSO = (
    "typer._adapters",
    "pydantic.json_schema",
    "jinja2",
    "matplotlib.figure",
    "matplotlib.backends.backend_svg",
    "sklearn.datasets",
    "sklearn.model_selection",
)
"""What launchers, reports and the scripts of most tests import, where it is there; sklearn takes as long as torch."""
READ_AT_START = re.compile(
    r"(?:MPL|PYTHON|LD_|OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|BLIS_|TORCH|PYTORCH_|CUDA_|MALLOC_|GLIBC_)"
)
QUICK_START = str(Path(__file__).with_name("quick_start"))
"""Replaces slow imports in what starts from nothing."""
PYTHON = sys.executable  # a test may put another one there
WARM = "WARM_SCRIPT"
SERVED = {str(Path(__file__).with_name("gloo.py"))}
"""Scripts that start from here without :data:`WARM`."""
HASH_SEED, SEARCHED = "PYTHONHASHSEED", "PYTHONPATH"
SET_BY_IMPORTS = (HASH_SEED, SEARCHED, "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR")
"""The first two are compared apart; torch and scikit-learn set the others, in the process of pytest, too."""
LONGEST = 65536
"""Bytes for a command line, and for an environment."""
START_S = 120.0
LAUNCHER, FORK_SERVER, STARTER = (
    ("-m", "holdfast"),
    ("-m", "holdfast.launch.supervise.fork_server"),
    ("-m", "holdfast.launch.supervise.starter"),
)
_cold_execute_child = subprocess.Popen._execute_child
_signature = inspect.signature(_cold_execute_child)


def read_at_start(env):
    """Return the variables that Python, its libraries and torch read while they start; the seed of hashes apart."""
    return {name: value for name, value in env.items() if READ_AT_START.match(name) and name not in SET_BY_IMPORTS}


def searched(env):
    """Return the folders of PYTHONPATH; a process of the stock has what the one of tests replaces."""
    return [path for path in env.get(SEARCHED, "").split(os.pathsep) if path not in ("", QUICK_START)]


def has_own_start(env):
    """Return whether a file in PYTHONPATH is run at the start of Python."""
    return any(Path(path, f"{name}customize.py").exists() for path in searched(env) for name in ("site", "user"))


def as_of_fork_server(env):
    """Return the environment that a launcher with the environment ``env`` gives to its fork server, for the default seed."""
    from holdfast.launch.supervise.attempt import _ALLOCATOR

    return {**({} if any(name in env for name in _ALLOCATOR) else _ALLOCATOR), **env, HASH_SEED: "0"}


# -- the process that has imported torch


class Stock:
    """A process that has imported torch, from which launchers are forked.

    Args:
        env: What is read of the environment at the start of a process; what starts from here has the same.
        folders: Folders of PYTHONPATH, among which may be the source that is tested.
    """

    def __init__(self, env, folders):
        self.env = as_of_fork_server(env)
        own = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "USER", "LANG", "LC_ALL")}
        whole = {
            **own,
            **self.env,
            "ROOM": "." * LONGEST,
            SEARCHED: os.pathsep.join(folders),
        }
        self.address = f"\0holdfast-tests-{os.getpid()}"  # an abstract one: no file
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.address)
            listener.listen(64)
            command = [sys.executable, __file__, str(listener.fileno()), "." * LONGEST]
            self._process = subprocess.Popen(command, env=whole, pass_fds=(listener.fileno(),))

    def close(self):
        """End the process; what it has forked goes on."""
        self._process.kill()
        self._process.wait()


def fork_launcher(address, env, call, host=""):
    """Have a launcher or a script forked that is a child of this process, for ``call`` of ``subprocess``; return its PID."""
    group, cwd = call.get("process_group"), call["cwd"]
    request = {
        "args": [os.fspath(word) for word in call["args"]],
        "env": {name: value for name, value in env.items() if name != WARM},
        "host": host,
        "cwd": os.getcwd() if cwd is None else os.fspath(cwd),
        "new_session": call["start_new_session"],
        "group": group if group is not None and group >= 0 else None,
    }
    files = [own if call[name] == -1 else call[name] for own, name in enumerate(STANDARD_FILES)]
    data = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, children_of_children():
        connection.settimeout(START_S)
        connection.connect(address)
        socket.send_fds(connection, [len(data).to_bytes(4, "big")], files)
        connection.sendall(data)
        pid = int.from_bytes(connection.recv(4), "big")
    assert pid, "the process that has imported torch ended"
    return pid


@contextlib.contextmanager
def children_of_children():
    """Make this process the parent of a process whose parent ends meanwhile."""
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(37, ctypes.byref(before), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    try:
        yield
    finally:
        libc.prctl(36, before.value, 0, 0, 0)


def receive(connection):
    """Return a request and its descriptors; None if who asked has ended meanwhile."""
    head, files, _, _ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as stream:
        data = stream.read(int.from_bytes(head, "big"))
    if head and len(data) == int.from_bytes(head, "big"):
        return json.loads(data), files
    for file in files:
        os.close(file)
    return None


def serve(listener):
    """Import torch, then fork a launcher for each request; return in the launcher, with what it is asked for."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    gc.disable()
    for name in (*PRELOADED, *OF_LAUNCHER):
        importlib.import_module(name)
    for name in ALSO:
        with contextlib.suppress(ModuleNotFoundError):  # not in every environment that runs tests
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    gc.freeze()
    gc.enable()
    while True:
        connection, _ = listener.accept()
        with connection:
            if (request := receive(connection)) is None:
                continue
            if (begins := fork_for_grandparent(connection)) is not None:
                os.read(begins, 1)
                os.close(begins)
                break
            for file in request[1]:
                os.close(file)
    listener.close()
    return request


def fork_for_grandparent(connection):
    """Fork a process whose parent is the one above this one, and send its PID; there, return what tells that it may begin."""
    (pid_read, pid_write), (begins, begin) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        if grandchild == 0:
            for file in (pid_read, pid_write, begin):
                os.close(file)
            return begins  # at its end once the child has ended, too
        os.write(pid_write, grandchild.to_bytes(4, "big"))
        os._exit(0)
    os.waitpid(child, 0)
    connection.sendall(os.read(pid_read, 4))
    for file in (pid_read, pid_write, begins, begin):
        os.close(file)
    return None


# -- the launcher, and its fork server


def become_launcher(request, files, address):
    """Run the command ``python ...`` with the arguments, the environment and the files of who asked for it."""
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    if request["new_session"]:
        os.setsid()
    if request["group"] is not None:
        os.setpgid(0, request["group"])
    if request["cwd"]:
        os.chdir(request["cwd"])
    if request["host"]:
        inside.enter(request["host"])
    args, env = request["args"], request["env"]
    start_from_here(as_of_fork_server(env), "" if request["host"] else address)
    if tuple(args[1:3]) == LAUNCHER:
        run_as_new(args, env, lambda: runpy.run_module("holdfast", run_name="__main__", alter_sys=True))
    else:
        run_as_new(args, env, lambda: run_script(args))


def run_script(args):
    """Do what ``python SCRIPT`` or ``python -c CODE`` does."""
    sys.modules["holdfast.distributed"].adapt_to_job()
    module = sys.modules["__main__"] = types.ModuleType("__main__")  # for the life of the process
    if args[1] == "-c":
        code = compile(args[2], "<string>", "exec")
    else:
        module.__file__ = os.path.abspath(args[1])
        code = compile(Path(args[1]).read_bytes(), module.__file__, "exec")
    exec(code, vars(module))  # noqa: S102


def argv_of(args):
    """Return ``sys.argv`` and the folder that is searched first, as Python sets them."""
    if args[1] == "-m":
        return [importlib.util.find_spec(args[2]).origin, *args[3:]], os.getcwd()
    if args[1] == "-c":
        return ["-c", *args[3:]], ""
    return args[1:], str(Path(args[1]).resolve().parent)


def run_as_new(args, env, run):
    """Execute ``run`` as in a process that has just been started with these arguments, and end the process."""
    sys.path[:] = [*searched(env), *(path for path in sys.path[1:] if path not in searched(os.environ))]
    os.environ.clear()
    os.environ.update(env)
    show_start(args, env)
    sys.orig_argv = list(args)
    sys.argv, first = argv_of(args)
    sys.path.insert(0, first)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the life of the process
    sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    tempfile.tempdir = None  # may have been looked up during an import, without the TMPDIR of the job
    time.tzset()
    sys.modules["numpy.random"].seed()
    code = 1
    try:
        run()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)


def show_start(args, env):
    """Put a command line and an environment in the place of those with which this process was started.

    Who looks for the processes of a job finds them by these. The strings of ``os.environ`` are elsewhere by now.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    words = [os.fsencode(word) for word in args]
    variables = [os.fsencode(f"{name}={value}") for name, value in env.items()]
    for strings, first, last in ((words, *map(int, fields[45:47])), (variables, *map(int, fields[47:49]))):
        text = b"".join(string + b"\0" for string in strings)
        assert len(text) < last - first, "no room for a command line or an environment of this length"
        ctypes.memset(first, 0, last - first)
        ctypes.memmove(first, text, len(text))


def start_from_here(own_env, address):
    """Let fork servers of this process, and workers that start without one, be forked from it; launchers from ``address``."""

    def execute_child(self, *values, **named):
        call = _signature.bind(self, *values, **named).arguments
        args, env = list(map(str, call["args"])), dict(os.environ if call["env"] is None else call["env"])
        if address and is_launcher(call) and not differs(as_of_fork_server(env), own_env):
            self.pid = fork_launcher(address, env, call)
        elif imports_torch(args, env) and env.get(HASH_SEED) == own_env[HASH_SEED] and not differs(env, own_env):
            self.pid = os.fork()
        else:
            return _cold_execute_child(self, *values, **named)
        if self.pid == 0:
            _become_child_of_launcher(call, args)
        self._child_created = True
        self._close_pipe_fds(*(call[name] for name in PIPES))
        return None

    subprocess.Popen._execute_child = execute_child


def is_launcher(call):
    """Return whether a call starts the command ``holdfast``, in a way that a process of the stock can stand for."""
    args = call["args"]
    return is_plain(call) and tuple(args[1:3]) == LAUNCHER and "--no-preload" not in args


def is_script(call):
    """Return whether a call starts a script of a test that a process of the stock can stand for."""
    return is_plain(call) and (call["args"][1] in SERVED or WARM in environment_of(call))


def environment_of(call):
    return os.environ if call["env"] is None else call["env"]


def is_plain(call):
    """Return whether a call starts this Python as most calls do."""
    args = call["args"]
    if isinstance(args, str | bytes | os.PathLike) or len(args) < 2 or args[0] != PYTHON:
        return False
    if call["preexec_fn"] or call["pass_fds"] or call["shell"] or call["executable"] or not call["close_fds"]:
        return False
    as_usual = call["umask"] < 0 and (call["uid"], call["gid"]) == (None, None)
    is_short = len("".join(map(str, args))) < LONGEST // 2
    return as_usual and is_short and HASH_SEED not in environment_of(call)


def imports_torch(args, env):
    """Return whether a command of the launcher starts a process that would begin by importing torch."""
    from holdfast.launch.supervise import fork_protocol, fork_server

    kind = tuple(args[1:3])
    return kind == FORK_SERVER or (
        kind == STARTER and fork_protocol.FORK_SERVER not in env and fork_server.is_useful(Path(args[3]))
    )


STANDARD_FILES = ("p2cread", "c2pwrite", "errwrite")
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def differs(env, own_env):
    """Return whether a process with the environment ``env`` would start otherwise."""
    return has_own_start(env) or read_at_start(env) != read_at_start(own_env)


def _become_child_of_launcher(call, args):
    try:
        atexit._clear()
        faulthandler.disable()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
        subprocess.Popen._execute_child = _cold_execute_child
        for target, name in enumerate(STANDARD_FILES):
            os.dup2(call[name], target)
        kept = {0, 1, 2, *call["pass_fds"]}
        for file in map(int, os.listdir("/proc/self/fd")):
            if file not in kept:
                with contextlib.suppress(OSError):  # the one of this list
                    os.close(file)
        os.setpgid(0, call["process_group"])
        run_as_new(args, call["env"], starter_main if tuple(args[1:3]) == STARTER else fork_server_main)
    finally:
        os._exit(1)


def fork_server_main():
    """What ``python -m holdfast.launch.supervise.fork_server`` does."""
    from holdfast.launch.supervise import fork_server

    listener, ready, launcher = map(int, sys.argv[1:4])
    fork_server.serve(socket.socket(fileno=listener), ready, launcher)


def starter_main():
    """What ``python -m holdfast.launch.supervise.starter`` does."""
    from holdfast.launch.supervise import starter

    sys.modules["holdfast.distributed"].adapt_to_job()
    starter.main()


# -- the tests


class WarmStart:
    """Makes ``subprocess`` start launchers and scripts from a :class:`Stock` in this process, where that makes no difference."""

    def __init__(self):
        self.stock = None
        self.is_on = True

    def install(self):
        """Begin."""
        warm = self

        def execute_child(self, *values, **named):
            call = _signature.bind(self, *values, **named).arguments
            env, host = dict(environment_of(call)), ""
            if isinstance(call["args"], list):
                host, call["args"] = inside.split(call["args"])
            if not (warm.is_on and (is_launcher(call) or is_script(call)) and warm.has_as_in(env)):
                return _cold_execute_child(self, *values, **named)
            self.pid = fork_launcher(warm.stock.address, env, call, host)
            self._child_created = True
            self._close_pipe_fds(*(call[name] for name in PIPES))
            return None

        subprocess.Popen._execute_child = execute_child

    def has_as_in(self, env):
        """Return whether the stock has started as a process with this environment would."""
        if env.get("OMP_NUM_THREADS") != "1":
            return False  # its imports start threads, and it cannot be forked
        if self.stock is None:
            self.stock = Stock(read_at_start(env), searched(env))
        return not differs(as_of_fork_server(env), self.stock.env)

    def close(self):
        """End the stock."""
        subprocess.Popen._execute_child = _cold_execute_child
        if self.stock is not None:
            self.stock.close()


if __name__ == "__main__":
    stock = socket.socket(fileno=int(sys.argv[1]))
    own_address = stock.getsockname().decode()
    become_launcher(*serve(stock), own_address)
