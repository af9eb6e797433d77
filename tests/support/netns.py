"""Hosts on one switch, made of namespaces: each has a network, an address and a host name of its own.

They need root and iproute2, and tests that want them are left out elsewhere. The clock, the disk and /proc are shared,
so these are not machines that fail alone; what they show is what goes over the wire, and what happens when it does not.
"""

import contextlib
import os
import shutil
import signal
import subprocess

import pytest

AGENT = """#!/bin/sh
# What Open MPI starts instead of ssh: HOST COMMAND...
name={prefix}${{1##*.}}
shift
exec ip netns exec "$name" unshare --uts sh -c 'hostname "$0" && exec sh -c "$1"' "$name" "$*"
"""


def ip(*words):
    subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=True)


class Hosts:
    """So many hosts, numbered from 1."""

    def __init__(self, count, net="10.201.0"):
        self.net = net
        self.prefix = f"holdfast{os.getpid()}-"
        self._switch = f"{self.prefix}0"
        self._numbers = range(1, count + 1)

    def make(self):
        """Make them, or nothing."""
        try:
            ip("netns", "add", self._switch)
            for bridge in ("bridge0", "bridge1"):  # nobody is at the second one before the switch is divided
                ip("-n", self._switch, "link", "add", "name", bridge, "type", "bridge")
                ip("-n", self._switch, "link", "set", bridge, "up")
            for number in self._numbers:
                self._plug_in(number)
        except BaseException:
            self.remove()
            raise

    def _plug_in(self, number):
        name, port = self.name(number), f"port{number}"
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self._switch)
        ip("-n", self._switch, "link", "set", port, "master", "bridge0", "up")
        ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")

    def remove(self):
        """Take away the namespaces, and with them everything that is in them, processes too."""
        for number in (*self._numbers, 0):
            self.kill(number)
            subprocess.run(["ip", "netns", "del", self.name(number)], capture_output=True, check=False)

    def name(self, number):
        return f"{self.prefix}{number}"

    def address(self, number):
        return f"{self.net}.{number}"

    def write_agent(self, path):
        """Write what Open MPI can start instead of ssh."""
        path.write_text(AGENT.format(prefix=self.prefix))
        path.chmod(0o755)

    def inside(self, number):
        """The words before a command that run it on a host; the process is the command's own."""
        name = self.name(number)
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]

    def run(self, number, *words):
        """Run a command in the network of a host; return the finished process."""
        command = ["ip", "netns", "exec", self.name(number), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)

    def pids(self, number):
        """The processes on a host."""
        listed = subprocess.run(["ip", "netns", "pids", self.name(number)], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]

    def kill(self, number):
        """End everything on a host at once, as if its power failed."""
        for pid in self.pids(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut_off(self, number):
        """Drop everything that goes to a host or comes from it from now on."""
        ip("-n", self._switch, "link", "set", f"port{number}", "down")

    def divide(self, numbers):
        """Give some hosts a switch of their own: they reach each other, and nobody else."""
        for number in numbers:
            ip("-n", self._switch, "link", "set", f"port{number}", "master", "bridge1")

    def heal(self, number):
        """Let through again what goes to a host or comes from it."""
        ip("-n", self._switch, "link", "set", f"port{number}", "master", "bridge0", "up")


def make_hosts(count, **where):
    """Make hosts, or skip the test that wants them."""
    if os.getuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "hostname"))):
        pytest.skip("hosts are made of namespaces, which needs root, ip, unshare and hostname")
    made = Hosts(count, **where)
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine lets nobody make network namespaces: {error.stderr.strip()}")
    return made
