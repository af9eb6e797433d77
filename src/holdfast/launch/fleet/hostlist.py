"""Hosts given by ``--hosts``: a list, a file, or a Slurm allocation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import refuse

SLURM = "slurm"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NUMBER = re.compile(r"[0-9]{1,9}")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, slots=True)
class Host:
    """A host and its slots, the maximum number of workers there."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str, env: Mapping[str, str] | None = None) -> tuple[Host, ...]:
    """Return the hosts given by ``--hosts``.

    Formats: ``node0:8,node1:8``; a file with one host a line, ``node0:8`` or ``node0 slots=8``; or ``slurm`` for the
    hosts of the allocation, which is read from ``env`` (None: the environment of this process).

    Raises:
        ConfigError: if the text is none of these, or names a host twice.
    """
    if text == SLURM:
        hosts = _of_slurm(os.environ if env is None else env)
    elif _is_file(text):
        lines = (line.partition("#")[0].strip() for line in Path(text).read_text(errors="replace").splitlines())
        hosts = [_host(re.sub(r"\s+slots\s*=\s*", ":", line)) for line in lines if line]
    elif "/" in text:
        refuse(f"--hosts: there is no file {text}")
    else:
        hosts = [_host(word.strip()) for word in text.split(",")]
    if not hosts:
        refuse(f"--hosts {text} names no host")
    twice = {host.name for host in hosts if [other.name for other in hosts].count(host.name) > 1}
    if twice:
        refuse(f"--hosts names {', '.join(sorted(twice))} twice; give all its workers as one number, HOST:N")
    return tuple(hosts)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # a list of many hosts is too long for the name of a file
        return False


def _host(word: str) -> Host:
    name, colon, slots = word.partition(":")
    if not _NAME.fullmatch(name):
        refuse(f"--hosts must be HOST:WORKERS[,HOST:WORKERS...], a file of such lines, or {SLURM}; got {word!r}")
    if colon and not (_NUMBER.fullmatch(slots) and 1 <= int(slots) <= 1024):
        refuse(f"--hosts: the number of workers of {name} must be from 1 to 1024, got {slots!r}")
    return Host(name, int(slots) if colon else 1)


def _of_slurm(env: Mapping[str, str]) -> list[Host]:
    nodes, tasks = env.get("SLURM_JOB_NODELIST", ""), env.get("SLURM_TASKS_PER_NODE", "")
    if not nodes or shutil.which("scontrol") is None:
        what = "scontrol is not on PATH" if nodes else "SLURM_JOB_NODELIST is not set"
        refuse(f"--hosts {SLURM} needs a Slurm allocation, and {what}")
    shown = subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=60, check=False
    )
    if shown.returncode:
        refuse(f"--hosts {SLURM}: scontrol show hostnames {nodes} failed: {shown.stderr.strip()}")
    names = shown.stdout.split()
    matches = [_TASKS.fullmatch(part) for part in tasks.split(",")]
    slots = [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))]
    if len(slots) != len(names) or None in matches:
        refuse(f"--hosts {SLURM}: SLURM_TASKS_PER_NODE={tasks!r} does not match the {len(names)} nodes of {nodes}")
    return [Host(name, number) for name, number in zip(names, slots, strict=True)]
