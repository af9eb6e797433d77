"""How long commands take to start: the package, the help, the simulator and ``holdfast plan`` do not load torch.

    python benchmarks/launch/start.py [--rounds 10] [--names "import holdfast" "import torch"] [--json FILE]

Each runs in its own process, from its start to its end, in turns and in a different order each time. Targets, including
the interpreter: less than 80 ms for ``holdfast --help``, less than 0.3 s for the others of Holdfast, which are the default.
Peers that are not installed (``make bench-peers``) are left out.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import PYTHONS, cells, command_line, processor_s, table, take_turns, timed, write_json

OWN = {
    "the interpreter": ("-c", "pass"),
    "import holdfast": ("-c", "import holdfast"),
    "import holdfast_lab.simulate": ("-c", "import holdfast_lab.simulate"),
    "holdfast --help": ("-m", "holdfast", "--help"),
    "holdfast --version": ("-m", "holdfast", "--version"),
    "holdfast status --help": ("-m", "holdfast", "status", "--help"),
    "holdfast plan --help": ("-m", "holdfast", "plan", "--help"),
}
COMMANDS = {name: (sys.executable, *words) for name, words in OWN.items()} | {
    "import torch": (sys.executable, "-c", "import torch"),
    "torchrun --help": (sys.executable, "-m", "torch.distributed.run", "--help"),
    "import torchft": (str(PYTHONS["peers"]), "-c", "import torchft"),
    "ray --help": (str(PYTHONS["ray"].with_name("ray")), "--help"),
}
LIMIT_S = 120.0
"""Time limit of one process, in seconds."""


def main() -> None:
    """Start each of them repeatedly, print the table."""
    options = command_line(__doc__, rounds=10, names=([*OWN], "which", [*COMMANDS])).parse_args()
    there = [name for name in options.names if Path(COMMANDS[name][0]).exists()]
    # The first round reads files, and may write compiled files.
    turns = take_turns({name: lambda name=name: time_command(COMMANDS[name]) for name in there}, options.rounds)
    wall, processor = ({name: [pair[i] for pair in pairs] for name, pairs in turns.items()} for i in (0, 1))
    rows = [
        [
            name,
            *cells(wall[name], 0, scale=1e3, keys=("p50", "min", "max")),
            *cells(processor[name], 0, scale=1e3, keys=["p50"]),
        ]
        for name in there
    ]
    head = ["what", "median", "min", "max", "processor time"]
    print(table(f"From the start of a process to its end, {options.rounds} times each; ms", head, rows))
    write_json(options.json, settings=vars(options), values=wall, processor_s=processor)


def time_command(words: Sequence[str]) -> tuple[float, float]:
    """Return the elapsed time and the processor time in seconds."""
    before_s = processor_s()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    taken_s = timed(lambda: subprocess.run(words, check=True, timeout=LIMIT_S, **quiet))
    return taken_s, processor_s() - before_s


if __name__ == "__main__":
    main()
