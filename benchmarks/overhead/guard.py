"""The cost of the guard in a run without corruption: the same session with ``--guard heal``, ``stop`` and ``off``.

    python benchmarks/overhead/guard.py [--workers 2] [--models mlp] [--blocks 30] [--steps 70] [--json FILE]

=======  ==============================================================================================================
variant  what runs in addition to the training
=======  ==============================================================================================================
off      nothing
stop     64 KiB of the weights and 64 KiB of the optimizer's state are hashed in each step
heal     a 64th of both is hashed and checked, and of the gradients; all is copied in memory once a rotation
=======  ==============================================================================================================

All train in the same processes and take turns, block by block, in a different order each time (``turns.py``). Blocks are
longer than a rotation, so that each block of ``heal`` includes a copy of the whole state.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from overhead.turns import make_parser, run_jobs, show_turns, train, train_in_turns

VARIANTS = ("off", "stop", "heal")
WARM_UP_STEPS = 70
"""Warm-up steps: until the memory of two copies has been touched once."""


def main() -> None:
    """Start the jobs, print their tables."""
    options = make_parser(__doc__, steps=70).parse_args()
    if options.work:
        train_in_turns(options, lambda guard, name, comm: train(name, comm, guard=guard), VARIANTS, WARM_UP_STEPS)
    for model, workers, found in run_jobs(options):
        show_turns(model, workers, found["blocks"], dict.fromkeys(VARIANTS, "off"))


if __name__ == "__main__":
    main()
