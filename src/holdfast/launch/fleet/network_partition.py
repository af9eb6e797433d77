"""Disables network devices for some time: ``python cut.py SECONDS DEVICE...``; 0 seconds means forever.

This is a separate process, so that the network is restored whatever happens to the launcher: when the time is over, or
when standard input ends, as it does with the launcher. It prints ``cut`` once the network is down, and nothing if it
could not be disabled. It is run by its path, and imports nothing of the package, so that it starts quickly.
"""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

_IP_S = 10.0
"""Limit for one call of ``ip``, in seconds."""
_FORGOTTEN = (("-6", "addr"), ("-4", "route"), ("-6", "route"))
"""Configuration that a device loses when it is taken down, in the order in which it must be restored."""


def ip(*words: str, stdin: IO[bytes] | None = None) -> bytes:
    """Run ``ip`` and return its output; the ``stderr`` of a CalledProcessError says why it failed."""
    return subprocess.run(["ip", *words], stdin=stdin, capture_output=True, timeout=_IP_S, check=True).stdout


@dataclass(frozen=True, slots=True)
class _Device:
    """A device, and the configuration that it will lose; empty for a protocol that the machine does not support."""

    name: str
    saved: tuple[bytes, ...]

    @classmethod
    def of(cls, name: str) -> _Device:
        saved = []
        for family, what in _FORGOTTEN:
            result = subprocess.run(
                ["ip", family, what, "save", "dev", name], capture_output=True, timeout=_IP_S, check=False
            )
            saved.append(b"" if result.returncode else result.stdout)
        return cls(name, tuple(saved))

    def cut(self) -> None:
        ip("link", "set", "dev", self.name, "down")

    def heal(self) -> None:
        ip("link", "set", "dev", self.name, "up")
        for (family, what), saved in zip(_FORGOTTEN, self.saved, strict=True):
            if saved:
                with tempfile.TemporaryFile() as file:  # not a pipe: ip reads it several times
                    file.write(saved)
                    file.seek(0)
                    ip(family, what, "restore", stdin=file)


def main(seconds: float, names: Sequence[str]) -> int:
    """Disable the devices, wait, restore them; return 0 if every device was disabled and restored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the launcher: this process ends after it
    devices = [_Device.of(name) for name in names]
    done: list[bool] = []
    try:
        done += [_try(device.cut, f"cut {device.name}") for device in devices]
        if all(done):
            print("cut", flush=True)  # noqa: T201 - the launcher waits for it
            select.select([sys.stdin], [], [], seconds or None)
    finally:
        done += [_try(device.heal, f"restore the network of {device.name}") for device in devices]
    return int(not all(done))


def _try(act: Callable[[], None], what: str) -> bool:
    try:
        act()
    except (
        OSError,
        subprocess.SubprocessError,
    ) as error:  # a device that cannot be restored must not keep the other ones disabled
        why = getattr(error, "stderr", None) or str(error).encode()
        print(f"holdfast: could not {what}: {why.decode().strip()}", file=sys.stderr)  # noqa: T201 - of our own
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
