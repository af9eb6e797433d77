"""The GPUs of a node: how many there are, and which one each worker uses.

Nothing here imports torch or initialises CUDA: a process that has initialised CUDA must not fork, and a launcher must not hold
memory on a GPU. Each worker sees one GPU, chosen by its slot (see :mod:`holdfast.launch.supervise.slots`): ``cuda:0`` to it.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
AUTO, NONE = "auto", "none"
GPUS = "HOLDFAST_GPUS"
"""The GPUs of a worker's node, as :data:`VISIBLE` names them; :data:`NONE` hides all; ``find:WANTED`` lets the worker find
them, on a machine that the launcher does not know; "" changes nothing."""
_FIND = "find:"
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACE_USED = ":4096:8"
"""With this workspace, cuBLAS computes the same bits in every run; without it, deterministic algorithms of torch raise."""
_SMI_S = 20.0
"""How long nvidia-smi may take, in seconds: it loads the driver if no process uses a GPU."""
_PROC = Path("/proc/driver/nvidia/gpus")


def check_gpus(wanted: str, *, elsewhere: bool = False) -> None:
    """Check a value of ``--gpus``, and that this node has as many, unless workers may be on other machines.

    Raises:
        ConfigError: if it is not :data:`AUTO`, :data:`NONE` or a number of GPUs, or there are fewer.
    """
    if wanted not in (AUTO, NONE) and not (wanted.isascii() and wanted.isdecimal() and int(wanted) > 0):
        raise ConfigError(f"--gpus must be auto, none, or a number of GPUs per node, at least 1, got {wanted!r}")
    if wanted != NONE and not elsewhere:
        choose(wanted, find_gpus())


def choose(wanted: str, found: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs of this node that its workers use.

    Args:
        wanted: A value of ``--gpus``: all of ``found``, none, or the first N.
        found: The GPUs of this node, see :func:`find_gpus`.

    Raises:
        ConfigError: if there are fewer than wanted.
    """
    if wanted in (AUTO, NONE):
        return tuple(found) if wanted == AUTO else ()
    if int(wanted) > len(found):
        there = (
            f"{VISIBLE} and nvidia-smi show {len(found)}" if found else f"neither {VISIBLE} nor nvidia-smi shows any"
        )
        raise ConfigError(
            f"--gpus {wanted} needs as many GPUs on each node, and here {there}; give a smaller number, or auto"
        )
    return tuple(found[: int(wanted)])


def gpu_of(slot: int, gpus: Sequence[str]) -> str:
    """Return the GPU of a slot; slots beyond the last GPU begin again at the first."""
    return gpus[slot % len(gpus)]


def sharing_line(wanted: str, slots: int) -> str:
    """Return a line that says how the workers of this node share its GPUs, "" if none does; see :func:`choose`."""
    return describe_sharing(choose(wanted, find_gpus()), slots) if wanted != NONE and slots else ""


def describe_sharing(gpus: Sequence[str], slots: int) -> str:
    """Return a line that says how the workers of some slots share GPUs, "" if each has its own."""
    if not gpus or slots <= len(gpus):
        return ""
    counts = Counter(gpu_of(slot, gpus) for slot in range(slots))
    most, least = max(counts.values()), min(counts.values())
    each = f"{most}" if most == least else f"{least} or {most}"
    share = "share 1 GPU" if len(gpus) == 1 else f"share {len(gpus)} GPUs, {each} on each"
    return f"{slots} workers {share}: they divide its memory and time; start fewer workers for one GPU each"


# -- finding them


def find_gpus(env: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the GPUs that processes started here may use, as :data:`VISIBLE` names them; empty if there are none."""
    listed = (os.environ if env is None else env).get(VISIBLE)
    return _installed() if listed is None else parse_visible(listed)


def parse_visible(listed: str) -> tuple[str, ...]:
    """Return the GPUs in a value of :data:`VISIBLE`; as CUDA does, ignore everything from the first invalid one on."""
    gpus: list[str] = []
    for word in listed.split(","):
        name = word.strip()
        is_valid = re.fullmatch(r"\d+|(GPU|MIG)-\S+", name) is not None
        if not is_valid or name in gpus:
            break
        gpus.append(name)
    return tuple(gpus)


@functools.cache
def _installed() -> tuple[str, ...]:
    if (smi := shutil.which("nvidia-smi")) is not None:
        try:
            done = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=_SMI_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is not None and done.returncode == 0:
            return parse_smi(done.stdout)
    return tuple(map(str, range(sum(1 for _ in _PROC.iterdir())))) if _PROC.is_dir() else ()


def parse_smi(text: str) -> tuple[str, ...]:
    """Return the GPUs in the output of ``nvidia-smi -L``; a GPU that is divided (MIG) counts as its instances.

    CUDA uses at most one MIG instance in a process, so each is a GPU of its own here.
    """
    gpus: list[str] = []
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            gpus.append(match[1])
            is_whole = True
        elif match := re.match(r"\s+MIG .*UUID: (MIG-[^)\s]+)", line):
            if gpus and is_whole:
                gpus.pop()
            is_whole = False
            gpus.append(match[1])
    return tuple(gpus)


# -- variables of the workers


def for_workers(wanted: str, *, one_process: bool, elsewhere: bool) -> dict[str, str]:
    """Return the variables from which workers find their GPU; see :func:`for_slot`.

    Args:
        wanted: A value of ``--gpus``.
        one_process: All workers are in one process, which sees all of the GPUs.
        elsewhere: Workers may be on other machines, and find the GPUs there themselves.

    Raises:
        ConfigError: if this node has fewer GPUs than wanted.
    """
    if elsewhere and wanted != NONE:
        return {GPUS: _FIND + wanted}
    gpus = choose(wanted, () if wanted == NONE else find_gpus())
    if one_process and gpus:
        return {GPUS: "", **_visible(",".join(gpus))}
    return {GPUS: NONE if wanted == NONE else ",".join(gpus)}


def for_slot(slot: int, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that give a worker the GPU of its slot; empty if its environment stays as it is.

    Args:
        slot: The worker's slot.
        env: Its environment, with :data:`GPUS`.

    Raises:
        ConfigError: if its node has fewer GPUs than wanted.
    """
    env = os.environ if env is None else env
    value = env.get(GPUS, "")
    if value == NONE:
        return {VISIBLE: ""}
    gpus = choose(value.removeprefix(_FIND), find_gpus(env)) if value.startswith(_FIND) else parse_visible(value)
    return _visible(gpu_of(slot, gpus), env) if gpus else {}


def _visible(gpus: str, env: Mapping[str, str] | None = None) -> dict[str, str]:
    env = os.environ if env is None else env
    return {VISIBLE: gpus, WORKSPACE: env.get(WORKSPACE, WORKSPACE_USED)}


def hint_for(message: str, env: Mapping[str, str] | None = None) -> str:
    """Return what to add to the message of an exception, "" if it has nothing to do with the assignment of GPUs."""
    is_assigned = bool((os.environ if env is None else env).get(GPUS))
    if not is_assigned or "invalid device ordinal" not in message:
        return ""
    return "; each worker sees one GPU only, as cuda:0 (--gpus)"
