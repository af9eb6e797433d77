"""Hosts as of ``netns.py`` with processes and shared memory of their own, so that one can lose its power all at once.

The first is where the launcher runs: it sees the processes of the others, but they do not see its own.
"""

import os
import signal
import subprocess

from netns import Hosts, make_hosts

AGENT = """#!/bin/sh
# What reaches a host, as ssh would: HOST COMMAND..., with nothing of the environment of here.
init=$(cat "{folder}/$1") && shift
exec nsenter --target "$init" --net --pid --mount --uts env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$*"
"""

BOOT = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && echo up && exec sleep 100000'


class Machines:
    """So many of them, numbered from 1.

    Args:
        hosts: Their networks.
        folder: For the agent.
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
        """End everything on a machine at once."""
        starts, init = self._inits.pop(number)
        os.kill(init, signal.SIGKILL)  # the first of its processes: the kernel kills all others with it
        starts.wait(timeout=20)
        starts.stdout.close()

    def remove(self):
        for number in list(self._inits):
            self.power_off(number)
        self.hosts.remove()

    def cut_off(self, number):
        """Drop everything that goes to a machine or comes from it, the agent's commands too."""
        self.hosts.cut_off(number)
        address = self._folder / self.hosts.address(number)
        address.rename(address.with_suffix(".cut"))

    def listed(self, *workers):
        """The hosts as ``--hosts`` wants them, with so many workers each."""
        return ",".join(f"{self.hosts.address(number)}:{count}" for number, count in enumerate(workers, 1))


def make_machines(count, folder, **where):
    """Make and start machines, or skip the test that wants them."""
    made = Machines(make_hosts(count, **where), folder)
    try:
        for number in range(1, count + 1):
            made.boot(number)
    except BaseException:
        made.remove()
        raise
    return made
