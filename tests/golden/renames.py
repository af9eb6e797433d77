"""Gives recorded runs and the golden record today's names: ``python tests/golden/renames.py FILE...``, in place.

FILE is JSON (``report.json``, ``record.json``) or JSON lines (records of workers and launchers). What has today's names stays as it is.
"""

import json
import re
import sys
from pathlib import Path

NAMES = {
    "ActDone": "Done",
    "BucketSummed": "BucketReduced",
    "CloseStep": "VoteStep",
    "Install": "AdoptState",
    "MakeChanges": "ApplyConfig",
    "Parted": "LeftGroup",
    "RanOut": "DataExhausted",
    "Rehome": "MoveParts",
    "Settle": "AdoptPlacement",
    "StepClosed": "StepVoted",
    "SumBucket": "ReduceBucket",
    "TakeChanges": "FetchConfig",
    "UpdatedEagerly": "OptimizerOverlapped",
    "Welcome": "SendState",
}
"""Today's name of an action, an event or a record, by its old one."""
_NAME = re.compile(rf"\b({'|'.join(NAMES)})\b(?! [a-z])")  # "Install it" is a sentence


def renamed(value):
    """Return a JSON value with today's names."""
    if isinstance(value, str):
        return _NAME.sub(lambda found: NAMES[found[0]], value)
    if isinstance(value, list):
        return [renamed(each) for each in value]
    if not isinstance(value, dict):
        return value
    new = {renamed(key): renamed(each) for key, each in value.items()}
    if new.get("update") in ("lazy", "eager"):
        new["overlap_optimizer"] = new.pop("update") == "eager"
    if "eager" in new and isinstance(new["eager"], list):
        new["optimizer_overlap"] = new.pop("eager")
    if isinstance(new.get("kinds"), dict) and "given_up" in new["kinds"]:
        new["platforms"] = new.pop("kinds")
    if isinstance(new.get("kind"), dict):  # that of a fault is a word
        new["platform"] = new.pop("kind")
    return new


def rename(path):
    """Rename within one file."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(renamed(json.loads(line))) + "\n" for line in text.splitlines()))
    else:
        path.write_text(json.dumps(renamed(json.loads(text)), indent=1) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        rename(Path(name))
