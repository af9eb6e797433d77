"""The cable between a host (see ``netns.py``) and its switch, with delay, loss and silence on command.

``tc netem`` does it where the kernel has it; elsewhere a process copies the frames, see ``frame_relay.py``.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

from campaign.attacks.mechanisms.frame_relay import FREE, Conditions, words_of
from campaign.attacks.mechanisms.shared import ip

SILENT = Conditions(loss=1.0)


class Cable:
    """A cable whose conditions can be changed while it is in use.

    Args:
        hosts: The hosts, of :mod:`netns`.
        number: The host at its end.
        seed: Of what is drawn for each frame.
        uses_netem: False has a process copy the frames also where the kernel could do it.
    """

    def __init__(self, hosts, number, seed=0, *, uses_netem=True):
        self._hosts, self._number, self._seed = hosts, number, seed
        self._switch = hosts.name(0)
        self._port, self._near, self._far = f"port{number}", f"near{number}", f"far{number}"
        self._relay = None
        self._asking = threading.Lock()
        self.has_netem = uses_netem and self._netem(self._switch, self._port, Conditions(delay_s=1e-6))

    def __enter__(self):
        if not self.has_netem:
            self._insert_relay()
        self.set()
        return self

    def __exit__(self, *_):
        if self.has_netem:
            self.set()
        if self._relay is not None:
            self._relay.stdin.close()
            self._relay.stdout.close()
            self._relay.wait(timeout=20)
            with contextlib.suppress(subprocess.CalledProcessError):  # the namespace may be gone, with all in it
                ip("-n", self._switch, "link", "set", self._port, "master", "bridge0")
                ip("-n", self._switch, "link", "del", self._near)

    def set(self, away=FREE, toward=FREE):
        """Change what happens to frames from the host and to frames to it."""
        if self.has_netem:
            assert self._netem(self._hosts.name(self._number), "eth0", away)
            assert self._netem(self._switch, self._port, toward)
        else:
            self._ask(words_of(away, toward))

    def struck(self):
        """How many frames came under any condition; with ``netem``, since the present conditions were set."""
        if not self.has_netem:
            return self._ask("[]\n")["struck"]
        return sum(map(_counted, ((self._hosts.name(self._number), "eth0"), (self._switch, self._port))))

    def _ask(self, line):
        with self._asking:
            self._relay.stdin.write(line)
            self._relay.stdin.flush()
            return json.loads(self._relay.stdout.readline())

    def silence(self, *, away=True, toward=True):
        """Lose all frames of one direction, or of both; neither end can see that they are lost."""
        self.set(SILENT if away else FREE, SILENT if toward else FREE)

    def _netem(self, namespace, device, conditions):
        words = conditions.netem()
        change = ["replace", "dev", device, "root", "netem", *words] if words else ["del", "dev", device, "root"]
        done = subprocess.run(["tc", "-n", namespace, "qdisc", *change], capture_output=True, timeout=20, check=False)
        return done.returncode == 0 or not words  # without conditions there may be nothing to remove

    def _insert_relay(self):
        """Plug the host into the relay, and the relay into the switch."""
        for command in (
            ("link", "set", self._port, "nomaster"),
            ("link", "add", self._near, "type", "veth", "peer", "name", self._far),
            ("link", "set", self._far, "master", "bridge0", "up"),
            ("link", "set", self._near, "up"),
        ):
            ip("-n", self._switch, *command)
        relay = Path(__file__).with_name("frame_relay.py")
        self._relay = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                self._switch,
                sys.executable,
                "-IS",
                relay,
                self._port,
                self._near,
                str(self._seed),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


def _counted(device):
    """How many frames have come to the ``netem`` of a device, lost ones included; 0 if it has none."""
    words = ["tc", "-s", "-n", device[0], "qdisc", "show", "dev", device[1]]
    said = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout
    found = re.search(r"^qdisc netem .*?Sent \d+ bytes (\d+) pkt \(dropped (\d+)", said, re.MULTILINE | re.DOTALL)
    return sum(map(int, found.groups())) if found else 0
