"""The results of a campaign: one line of JSON for each plan, and a summary."""

from __future__ import annotations

import json
import subprocess
import threading
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

from campaign.judge import MISSED, RIGHT
from campaign.plan import Plan


@dataclass(frozen=True)
class Result:
    """The result of a plan.

    Args:
        plan: The plan, as JSON.
        verdict: Class of the verdict.
        text: What happened, or what is wrong.
        seconds: How long its runs took together.
        kinds: Kinds of its attacks, with whether each landed.
        commit: The commit that was tested.
        shrunk: The smallest plan that fails in the same way, as JSON; "" if the plan is right, or was not shrunk.
    """

    plan: str
    verdict: str
    text: str
    seconds: float
    kinds: list[tuple[str, bool]] = field(default_factory=list)
    commit: str = ""
    shrunk: str = ""

    @property
    def seed(self) -> int | None:
        return Plan.from_json(self.plan).seed


class Results:
    """The file ``results.jsonl`` of a folder, to which each result is added at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "results.jsonl"
        self._lock = threading.Lock()

    def add(self, result: Result) -> None:
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def all(self) -> list[Result]:
        if not self._path.exists():
            return []
        lines = self._path.read_text().splitlines()
        return [Result(**json.loads(line)) for line in lines if line.endswith("}")]  # the last one may be torn

    def newest(self) -> list[Result]:
        """The results with the newest commit, of each plan the last one."""
        found = self.all()
        return list({each.plan: each for each in found if each.commit == found[-1].commit}.values())

    def seeds_of(self, commit: str) -> set[int]:
        """Seeds of the plans that were run with a commit."""
        return {result.seed for result in self.all() if result.commit == commit and result.seed is not None}


def commit_of(root: Path) -> str:
    """The commit of a checkout, with "+" if files differ from it; "" outside a checkout."""
    words = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def summary(results: list[Result]) -> str:
    """A table in Markdown: for each kind of attack, how many landed, and the verdicts of the plans with it."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    seeds: dict[str, list[str]] = defaultdict(list)
    for result in results:
        for name, landed in result.kinds:
            kinds[name]["landed" if landed else "missed"] += 1
        for name in {name for name, _ in result.kinds}:
            kinds[name]["plans"] += 1
            if result.verdict not in (RIGHT, MISSED):
                kinds[name]["wrong"] += 1
                seeds[name].append(f"{result.seed} ({result.verdict})")
    lines = ["| attack | plans | landed | missed | wrong | seeds of those |", "|---|---|---|---|---|---|"]
    for name, counts in sorted(kinds.items()):
        figures = " | ".join(str(counts[word]) for word in ("plans", "landed", "missed", "wrong"))
        lines.append(f"| `{name}` | {figures} | {', '.join(seeds[name])} |")
    verdicts = Counter(result.verdict for result in results)
    said = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    took_s = sum(result.seconds for result in results) / max(1, len(results))
    drawn = sorted(result.seed for result in results if result.seed is not None)
    span = f", seeds {drawn[0]} to {drawn[-1]}" if drawn else ""
    return "\n".join([*lines, "", f"{len(results)} plans{span}: {said or 'none'}; {took_s:.1f} s a plan."])
