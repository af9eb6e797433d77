"""What bounds other benchmarks: starts of bare processes, and moving bytes between two hosts with slow links.

    python benchmarks/limits.py processes [--rounds 7] [--names "the interpreter" "import torch"] [--json FILE]
    python benchmarks/limits.py wire [--rate 1gbit] [--megabytes 34] [--rounds 7] [--json FILE]

processes   From the start of a process to its end: the interpreter, imports and ``--help`` of Holdfast and of the peers,
            in turns and in a different order each time. Peers that are not installed are left out
wire        Two hosts, which are network namespaces with shaped links as in ``hosts.py``, send each other so many bytes at
            the same time over TCP; from the first byte until both have everything. Needs root, ``ip`` and ``tc``
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from common import PEERS_PYTHON, ROOT, command_line, spread, table, write_json

PORT = 29411
CHUNK_BYTES = 1 << 20
LIMIT_S = 120.0
"""Time limit of one process, and of one exchange, in seconds."""


# ---------------------------------------------------------------------------------------------
# Processes


COMMANDS = {
    "the interpreter": [sys.executable, "-c", "pass"],
    "import holdfast": [sys.executable, "-c", "import holdfast"],
    "holdfast --help": [sys.executable, "-m", "holdfast", "--help"],
    "import torch": [sys.executable, "-c", "import torch"],
    "torchrun --help": [sys.executable, "-m", "torch.distributed.run", "--help"],
    "import torchft": [str(PEERS_PYTHON), "-c", "import torchft"],
    "ray --help": [str(ROOT / ".venv-peers-ray" / "bin" / "ray"), "--help"],
}


def time_processes(rounds: int, names: Sequence[str]) -> dict[str, list[float]]:
    """Return how long each process takes, in seconds, in turns."""
    words = {name: COMMANDS[name] for name in names if Path(COMMANDS[name][0]).exists()}
    found: dict[str, list[float]] = {name: [] for name in words}
    rng = random.Random(0)
    for number in range(rounds + 1):  # the first one reads files, and may write compiled files
        for name in rng.sample(list(words), len(words)):
            begun_s = time.perf_counter()
            subprocess.run(
                words[name], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LIMIT_S
            )
            if number:
                found[name].append(time.perf_counter() - begun_s)
    return found


# ---------------------------------------------------------------------------------------------
# The wire


def time_wire(rate: str, size_bytes: int, rounds: int) -> list[float]:
    """Return how long two hosts take to send each other so many bytes at the same time, in milliseconds."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from hosts import shape
    from netns import Hosts

    hosts = Hosts(2, net="10.211.0")
    try:
        hosts.make()
        shape(hosts, 2, rate)
        words = [sys.executable, __file__, "end", json.dumps([hosts.address(1), size_bytes, rounds])]
        ends = [
            subprocess.Popen([*hosts.inside(number), *words, role], stdout=subprocess.PIPE, text=True)
            for number, role in ((1, "listen"), (2, "connect"))
        ]
        try:
            texts = [end.communicate(timeout=LIMIT_S)[0] for end in ends]
        finally:
            for end in ends:
                end.kill()
                end.wait()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"hosts need root, ip, tc, unshare and network namespaces: {getattr(error, 'stderr', '') or error}")
    finally:
        hosts.remove()
    return [max(pair) for pair in zip(*map(json.loads, texts), strict=True)]


def be_end(address: str, size_bytes: int, rounds: int, role: str) -> None:
    """Be one of the two hosts; print how long each exchange took."""
    connection = _connect(address, role)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    content, times = bytes(CHUNK_BYTES), []
    for number in range(rounds + 1):  # the first one opens the window of TCP, and is not counted
        connection.sendall(b"!")
        _receive(connection, 1)
        begun_s = time.perf_counter()
        sender = threading.Thread(target=_send, args=(connection, content, size_bytes))
        sender.start()
        _receive(connection, size_bytes)
        sender.join()
        if number:
            times.append(1e3 * (time.perf_counter() - begun_s))
    print(json.dumps(times))


def _connect(address: str, role: str) -> socket.socket:
    if role == "listen":
        with socket.create_server((address, PORT)) as server:
            server.settimeout(LIMIT_S)
            return server.accept()[0]
    end_s = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=LIMIT_S)
        except ConnectionRefusedError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)


def _send(connection: socket.socket, content: bytes, size_bytes: int) -> None:
    for at in range(0, size_bytes, len(content)):
        connection.sendall(content[: size_bytes - at])


def _receive(connection: socket.socket, size_bytes: int) -> None:
    buffer = bytearray(CHUNK_BYTES)
    while size_bytes:
        got = connection.recv_into(buffer, min(size_bytes, len(buffer)))
        if not got:
            raise EOFError("the other host has closed the connection")
        size_bytes -= got


def main() -> None:
    """Measure one of them, print the table."""
    parser = command_line(
        __doc__,
        rounds=7,
        rate=("1gbit", "wire: of each link, as tc takes it"),
        megabytes=(34.0, "wire: sent in each direction"),
    )
    parser.add_argument("part", choices=("processes", "wire"))
    parser.add_argument("--names", nargs="+", choices=[*COMMANDS], default=[*COMMANDS], help="processes: which")
    options = parser.parse_args()
    if options.part == "processes":
        values, unit = time_processes(options.rounds, options.names), "s"
    else:
        size_bytes = int(options.megabytes * 1e6)
        values, unit = {"wire": time_wire(options.rate, size_bytes, options.rounds)}, "ms"
    rows = [[name, *(f"{spread(times)[key]:.3f}" for key in ("p50", "min", "max"))] for name, times in values.items()]
    print(table(f"{options.part}, {options.rounds} rounds; {unit}", ["what", "median", "min", "max"], rows))
    write_json(options.json, settings=vars(options), values=values)


if __name__ == "__main__":
    if sys.argv[1:2] == ["end"]:
        be_end(*json.loads(sys.argv[2]), role=sys.argv[3])
    else:
        main()
