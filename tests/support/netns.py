"""Hosts on one switch, made of namespaces: each has its own network, address and host name.

They need root and iproute2; elsewhere the tests that use them are skipped. The clock, the disk and /proc are shared,
so these are not machines that fail independently; they show network traffic, and the effect of losing it.
"""

import contextlib
import os
import shutil
import signal
import subprocess

import inside
import pytest

AGENT = """#!/bin/sh
# Open MPI starts this instead of ssh: HOST COMMAND...
name={prefix}${{1##*.}}
shift
exec ip netns exec "$name" unshare --uts sh -c 'hostname "$0" && exec sh -c "$1"' "$name" "$*"
"""


def ip(*words):
    subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=True)


class Hosts:
    """Hosts numbered from 1.

    Args:
        count: Number of hosts.
        net: First three numbers of their addresses.
        prefix: Beginning of the names of their namespaces, if this process needs several sets of hosts at a time.
    """

    def __init__(self, count, net="10.201.0", prefix=""):
        self.net = net
        self.prefix = prefix or f"holdfast{os.getpid()}-"
        self._switch = f"{self.prefix}0"
        self._numbers = range(1, count + 1)

    def make(self):
        """Create all of them, or none."""
        try:
            ip("netns", "add", self._switch)
            for bridge in ("bridge0", "bridge1"):  # no host is at the second one until the switch is divided
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
        """Remove the namespaces and everything in them, including processes."""
        for number in (*self._numbers, 0):
            self.kill(number)
            subprocess.run(["ip", "netns", "del", self.name(number)], capture_output=True, check=False)

    def name(self, number):
        return f"{self.prefix}{number}"

    def address(self, number):
        return f"{self.net}.{number}"

    def write_agent(self, path):
        """Write the agent that Open MPI starts instead of ssh."""
        path.write_text(AGENT.format(prefix=self.prefix))
        path.chmod(0o755)

    def inside(self, number):
        """The prefix of a command that runs it on a host, in the command's own process."""
        return inside.prefix(self.name(number))

    def run(self, number, *words):
        """Run a command in the network of a host; return the finished process."""
        command = ["ip", "netns", "exec", self.name(number), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)

    def pids(self, number):
        """The processes on a host."""
        listed = subprocess.run(["ip", "netns", "pids", self.name(number)], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]

    def kill(self, number):
        """Kill all processes of a host simultaneously, as if its power failed."""
        for pid in self.pids(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut_off(self, number):
        """Drop all further traffic to and from a host."""
        ip("-n", self._switch, "link", "set", f"port{number}", "down")

    def divide(self, numbers):
        """Give some hosts their own switch: they reach each other and no other host."""
        for number in numbers:
            ip("-n", self._switch, "link", "set", f"port{number}", "master", "bridge1")

    def heal(self, number):
        """Restore the traffic to and from a host."""
        ip("-n", self._switch, "link", "set", f"port{number}", "master", "bridge0", "up")


def make_hosts(count, **where):
    """Create hosts, or skip the test."""
    if os.getuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "hostname"))):
        pytest.skip("hosts are made of namespaces, which needs root, ip, unshare and hostname")
    made = Hosts(count, **where)
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine does not permit network namespaces: {error.stderr.strip()}")
    return made
