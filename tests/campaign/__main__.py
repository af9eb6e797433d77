"""The campaign: ``make chaos [RUNS=2000] [SEED=1] [JOBS=2]``, or ``python -m campaign`` with ``tests`` in PYTHONPATH."""

from __future__ import annotations

import sys

from campaign.command import main

sys.exit(main())
