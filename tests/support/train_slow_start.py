"""The reference's training after a slow preparation: ``train_slow_start.py [--prepare S] [--hold RANK]``.

With ``--hold RANK`` that rank never enters the rendezvous, however long the other ranks wait.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

parser = argparse.ArgumentParser()
parser.add_argument("--prepare", type=float, default=0.0, help="seconds before the session is made")
parser.add_argument("--hold", type=int, default=-1, help="the rank that never enters the rendezvous")
parser.add_argument("--note", type=Path, help="folder in which each rank records that the script runs")
options = parser.parse_args()
if options.note:
    (options.note / f"runs-{os.environ['RANK']}").touch()
if int(os.environ["RANK"]) == options.hold and int(os.environ["WORLD_SIZE"]) > 2:
    time.sleep(3600)
time.sleep(options.prepare)

from train_reference import train  # noqa: E402 - torch is imported after the preparation, as a script may do

session, state = train("mlp", "sgd")
if session.is_lead:
    print(f"state {state}")
