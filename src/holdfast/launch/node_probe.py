"""Checks one machine, as a process of its own: a check that hangs, on a dead disk for instance, hangs only this process.

The launcher runs this file without the package: ``python -I -S node_probe.py JSON``. Every check writes one JSON line
once it is done: ``name``, ``value``, ``why``. Checks run at the same time, each in a thread.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

DISK_BYTES = 1 << 20
LOOPBACK_BYTES = 4 << 20
_BUFFER = 1 << 18


def check_disk(folder: str, limit_s: float) -> tuple[str, str]:
    """Write and sync 1 MiB in a folder; return what was measured, and what is wrong, or ""."""
    path = os.path.join(folder, f".holdfast-probe-{os.getpid()}-{threading.get_ident()}")
    began_s = time.monotonic()
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.unlink(path)  # so that nothing stays if this process is killed
            written = 0
            while written < DISK_BYTES:
                written += os.write(handle, b"\0" * (DISK_BYTES - written))
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        return "", f"cannot be written: {error.strerror}"
    took_s = time.monotonic() - began_s
    why = f"a synced write of 1 MiB took {took_s:.3g} s, more than {limit_s:g} s" if took_s > limit_s else ""
    return f"1 MiB synced in {1000 * took_s:.1f} ms", why


def check_memory(least_bytes: float) -> tuple[str, str]:
    """Read the memory that is available, of the machine or of this control group."""
    available = _available_bytes()
    if available is None:
        return "unknown", ""
    least, shown = least_bytes / 2**20, f"{available / 2**20:,.0f} MiB available"
    return shown, f"{shown}, fewer than {least:,.0f}" if available < least_bytes else ""


def _available_bytes() -> "int | None":
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as file:
        found.append(next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        limit, used = (int(_read(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current"))
        stat = _read("/sys/fs/cgroup/memory.stat").splitlines()
        cached = next(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
        found.append(limit - used + cached)  # the page cache of files is given back when needed
    return min(found, default=None)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def check_loopback(least_bytes_per_s: float) -> tuple[str, str]:
    """Send 4 MiB through a connection of this machine with itself."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(10)
            sender = threading.Thread(target=_send, args=(server.getsockname(),), daemon=True)
            sender.start()
            connection, _ = server.accept()
            with connection:
                connection.settimeout(10)
                began_s, received = time.monotonic(), 0
                while received < LOOPBACK_BYTES:
                    part = len(connection.recv(_BUFFER))
                    if not part:
                        return "", f"the connection broke after {received} bytes"
                    received += part
    except OSError as error:
        return "", f"does not work: {error.strerror or error}"
    speed = LOOPBACK_BYTES / max(time.monotonic() - began_s, 1e-9)
    shown = f"{speed / 1e6:,.0f} MB/s"
    return shown, f"{shown}, less than {least_bytes_per_s / 1e6:g}" if speed < least_bytes_per_s else ""


def _send(address: "tuple[str, int]") -> None:
    # Without memory Python lacks even an encoding. The receiver says what is wrong.
    with contextlib.suppress(OSError, LookupError, MemoryError), socket.create_connection(address, 10) as connection:
        block = b"\0" * _BUFFER
        for _ in range(LOOPBACK_BYTES // _BUFFER):
            connection.sendall(block)


def check_gpus(limit_s: float) -> tuple[str, str]:
    """Ask the driver whether GPUs respond, and whether rows of their memory wait for a reset or cannot be remapped."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "no nvidia-smi", ""
    fields = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
    command = [program, f"--query-remapped-rows={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi did not answer within {limit_s:g} s"
    except OSError as error:
        return "", f"nvidia-smi cannot be run: {error.strerror}"
    said = " ".join((done.stdout + done.stderr).split())
    if done.returncode and ("lost" in said or "Unable to determine" in said or "communicate with the NVIDIA" in said):
        return "", f"nvidia-smi: {said[:200]}"
    if done.returncode:
        return "not measured: this nvidia-smi does not report remapped rows", ""
    for line in done.stdout.splitlines():
        gpu, *flags = [cell.strip() for cell in line.split(",")]
        for name, flag in zip(("pending, which needs a reset", "impossible"), flags, strict=False):
            if flag.lower() in ("yes", "1"):
                return "", f"the remapping of memory rows of GPU {gpu} is {name}"
    return f"{len(done.stdout.splitlines())} GPUs, no row remapping pending", ""


def main(wanted: "list[list[object]]") -> None:
    """Run checks, ``[kind, name, argument...]`` each, and write a line for each that ends."""
    checks = {"disk": check_disk, "memory": check_memory, "loopback": check_loopback, "gpu": check_gpus}
    lock = threading.Lock()

    def say(name: str, value: str, why: str) -> None:
        with lock:
            try:
                sys.stdout.write(json.dumps({"name": name, "value": value, "why": why}) + "\n")
                sys.stdout.flush()
            except BrokenPipeError:  # the launcher was killed: nothing waits for the checks
                os._exit(1)

    def run(kind: str, name: str, arguments: "list[object]") -> None:
        try:
            value, why = checks[kind](*arguments)  # type: ignore[operator]
        except Exception as error:  # the launcher must learn of it
            value, why = "", f"the check failed: {error!r}"
        say(name, value, why)

    threads = []
    for kind, name, *arguments in wanted:
        thread = threading.Thread(target=run, args=(str(kind), str(name), arguments), daemon=True)
        try:
            thread.start()
        except RuntimeError:
            say(str(name), "", "the system refuses a thread for the check")
        else:
            threads.append(thread)
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
