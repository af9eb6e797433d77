"""Hosts as in ``netns.py`` that also have their own processes and shared memory, so that one can lose its power.

The launcher runs on the first: it sees the processes of the other hosts, but they do not see its processes.
"""

import os
import signal
import subprocess

from netns import Hosts, make_hosts

AGENT = """#!/bin/sh
# Runs a command on a host, as ssh would: HOST COMMAND..., without the local environment.
init=$(cat "{folder}/$1") && shift
exec nsenter --target "$init" --net --pid --mount --uts env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$*"
"""

BOOT = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && echo up && exec sleep 100000'


class Machines:
    """Machines numbered from 1.

    Args:
        hosts: Their networks.
        folder: Folder for the agent.
    """

    def __init__(self, hosts: Hosts, folder):
        self.hosts = hosts
        self._folder = folder
        self._inits = {}
        self.agent = folder / "agent.sh"
        self.agent.write_text(AGENT.format(folder=folder))
        self.agent.chmod(0o755)

    def boot(self, number):
        """Start a machine."""
        name = self.hosts.name(number)
        starts = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                name,
                "unshare",
                "--uts",
                "--pid",
                "--fork",
                "--mount-proc",
                "sh",
                "-c",
                BOOT,
                name,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert starts.stdout.readline() == "up\n"
        with open(f"/proc/{starts.pid}/task/{starts.pid}/children") as children:
            init = int(children.read())
        (self._folder / self.hosts.address(number)).write_text(str(init))
        self._inits[number] = starts, init

    def power_off(self, number):
        """Kill all processes of a machine simultaneously."""
        starts, init = self._inits.pop(number)
        os.kill(init, signal.SIGKILL)  # its init process: the kernel kills all others with it
        starts.wait(timeout=20)
        starts.stdout.close()

    def remove(self):
        for number in list(self._inits):
            self.power_off(number)
        self.hosts.remove()

    def cut_off(self, number):
        """Drop all traffic to and from a machine, including the agent's commands."""
        self.hosts.cut_off(number)
        address = self._folder / self.hosts.address(number)
        address.rename(address.with_suffix(".cut"))

    def listed(self, *workers):
        """The hosts in the format of ``--hosts``, with these numbers of workers."""
        return ",".join(f"{self.hosts.address(number)}:{count}" for number, count in enumerate(workers, 1))


def make_machines(count, folder, **where):
    """Create and start machines, or skip the test."""
    made = Machines(make_hosts(count, **where), folder)
    try:
        for number in range(1, count + 1):
            made.boot(number)
    except BaseException:
        made.remove()
        raise
    return made
