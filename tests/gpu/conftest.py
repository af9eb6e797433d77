"""Lets tests import the benchmarks for GPUs; behind everything else, because names of benchmarks are common ones."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
