"""What the certificate costs: the same session with it and without.

    python benchmarks/certificate.py [--workers 2] [--models mlp] [--blocks 30] [--steps 256] [--json FILE]

=======  ==============================================================================================================
variant  what runs besides the training
=======  ==============================================================================================================
without  nothing
with     a window of the weights, of the optimizer's state and of the buffers is hashed in each step, everything once in 256
=======  ==============================================================================================================

Both write their records to a file, as under the launcher, train in the same processes and take turns, block by block, in another
order each time. A block is as long as it takes to hash everything once, and counts by its mean step. The ratio is taken within a
round; the interval is that of the median of these ratios.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from turns import connect_each, leave, make_parser, run_jobs, show_turns, take_turns, train

VARIANTS = ("without", "with")
WARM_UP_STEPS = 20


def main() -> None:
    """Start the jobs, print their tables."""
    options = make_parser(__doc__, steps=256).parse_args()
    if options.work:
        work(options)
    for model, workers, found in run_jobs(options):
        show_turns(model, workers, found["blocks"], dict.fromkeys(VARIANTS, "without"))


def work(options: argparse.Namespace) -> None:
    """Train both in turns; the first worker writes what it found."""
    (name,) = options.models
    comms, running = connect_each(VARIANTS), {}
    for variant, comm in comms.items():
        run_dir = Path(options.work).with_name(variant)
        run_dir.mkdir(exist_ok=True)
        certifies = variant == "with"
        running[variant] = train(
            name, comm, guard="off", certificate=certifies, run_dir=str(run_dir), hang_timeout_s=0.0
        )
    leave(options, comms["with"], {"blocks": take_turns(options, running, comms, WARM_UP_STEPS)})


if __name__ == "__main__":
    main()
