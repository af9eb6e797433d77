"""The command line of the campaign."""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import shlex
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from campaign import jobs
from campaign.attacks import KINDS
from campaign.draw import draw, what_lacks
from campaign.judge import NOT_JUDGED, Verdict, judge
from campaign.plan import Plan
from campaign.results import Result, Results, commit_of, summary
from campaign.runner import KEPT, Outcome, ended_afterwards, run
from campaign.shrink import shrink

DEFAULT_OUT = "campaign-out"


def main(words: list[str] | None = None) -> int:
    """Run a campaign, or one plan; return 0 if nothing is wrong, 1 otherwise, 2 if it cannot be run, 130 after Ctrl-C."""
    options = _parse(words)
    results = Results(options.out)
    if options.summary:
        print(summary(results.newest()))
        return 0
    kinds = _usable(options.only) if not options.plan else frozenset(KINDS)
    if not kinds:
        print("error: none of the attacks of --only can be done on this machine", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    campaign = Campaign(results, options)
    done = campaign.run(_plans(options, results, campaign.commit, kinds))
    print(summary(done))
    return 130 if campaign.is_stopped else int(any(result.verdict not in ("right", "missed") for result in done))


def _parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m campaign", description=__doc__)
    parser.add_argument("--runs", type=_count, help="number of plans; one, if no time is given")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the first plan; a plan depends on what the machine can do, too"
    )
    parser.add_argument("--jobs", type=_count, default=2, help="plans at a time")
    parser.add_argument("--minutes", type=float, help="minutes after which no plan is started")
    parser.add_argument("--only", default="", help="kinds of attacks, separated by commas")
    parser.add_argument(
        "--plan", type=_given_plans, help="one plan, as JSON, or the path of a file with plans, one a line"
    )
    parser.add_argument("--no-shrink", action="store_true", help="leave failing plans as they were drawn")
    parser.add_argument("--keep", action="store_true", help="keep the folders of failing plans")
    parser.add_argument("--again", action="store_true", help="also run seeds of which the folder has a result")
    parser.add_argument(
        "--summary", action="store_true", help="print the summary of the folder's results with the newest commit"
    )
    parser.add_argument("--out", type=Path, default=Path(DEFAULT_OUT), help="folder of the results")
    options = parser.parse_args(words)
    options.only = frozenset(filter(None, options.only.split(",")))
    if unknown := options.only - KINDS.keys():
        parser.error(f"no such kind of attack: {', '.join(sorted(unknown))}; there are {', '.join(sorted(KINDS))}")
    return options


def _count(text: str) -> int:
    """Read a number of which zero makes no sense."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, got {text!r}")
    return int(text)


def _given_plans(text: str) -> list[Plan]:
    """Read plans from their JSON, or from a file that has one in each line."""
    try:
        lines = text if text.lstrip().startswith("{") else Path(text).read_text()
        plans = [Plan.from_json(line) for line in lines.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not plans:
        raise argparse.ArgumentTypeError(f"no plan is in {text!r}")
    if unknown := {each.kind for plan in plans for each in plan.attacks} - KINDS.keys():
        raise argparse.ArgumentTypeError(f"no such kind of attack: {', '.join(sorted(unknown))}")
    for each in (each for plan in plans for each in plan.attacks):
        if lacks := what_lacks(each):
            raise argparse.ArgumentTypeError(
                f"an attack of kind {each.kind!r} needs {lacks}, which {text[:200]!r} lacks"
            )
    return plans


def _usable(asked: frozenset[str]) -> frozenset[str]:
    """The kinds, of those asked for or of all, that can be done on this machine; say which cannot, and why."""
    missing = {name: why for name in sorted(asked or KINDS) if (why := KINDS[name].missing())}
    for name, why in missing.items():
        print(f"without {name}: {why}", flush=True)
    return frozenset(asked or KINDS) - missing.keys()


def _plans(options: argparse.Namespace, results: Results, commit: str, kinds: frozenset[str]) -> Iterator[Plan]:
    """Yield the plans to run."""
    if options.plan:
        yield from options.plan
        return
    runs = options.runs or (1 if options.minutes is None else 1 << 30)
    is_known = bool(commit) and not commit.endswith("+")  # files that differ from the commit may have changed since
    known = results.seeds_of(commit) if is_known and not options.again else set()
    ends_s = time.monotonic() + 60 * (options.minutes or 1e9)
    for seed in range(options.seed, options.seed + runs):
        if time.monotonic() > ends_s:
            return
        if seed not in known:
            yield draw(seed, kinds)


class Campaign:
    """Runs plans, several at a time, and says what became of each."""

    def __init__(self, results: Results, options: argparse.Namespace) -> None:
        self.results, self.options = results, options
        self.commit = commit_of(jobs.ROOT)
        self.cache = options.out / "undisturbed"
        self.is_stopped = False
        self._count = itertools.count(1)
        self._print_lock = threading.Lock()

    def run(self, plans: Iterator[Plan]) -> list[Result]:
        """Run plans until there are no more, or until Ctrl-C or SIGTERM, which wait for those that run."""
        done: list[Result] = []
        with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool:
            running: set[concurrent.futures.Future[Result]] = set()
            try:
                for plan in plans:
                    running.add(pool.submit(self.run_one, plan))
                    if len(running) >= self.options.jobs:
                        done += self._finished(running)
            except KeyboardInterrupt:
                self.is_stopped = True
                self._say("stopping: waiting for the plans that run")
            while running:
                done += self._finished(running)
        return done

    def _finished(self, running: set[concurrent.futures.Future[Result]]) -> list[Result]:
        ended, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
        running -= ended
        return [each.result() for each in ended]

    def run_one(self, plan: Plan) -> Result:
        """Run, judge and, if it fails, shrink a plan."""
        outcome, verdict = self._try(plan, keeps=self.options.keep)
        shrunk = ""
        if verdict.is_wrong and outcome and not self.options.no_shrink and not self.is_stopped:
            self._say(f"seed {plan.seed}: {verdict.kind}; shrinking it\n{verdict.text}")
            smallest = shrink(plan, lambda other: self._try(other)[1].kind == verdict.kind)
            shrunk = smallest.to_json() if smallest != plan else ""
        landed = outcome.landed if outcome else [False] * len(plan.attacks)
        kinds = list(zip((each.kind for each in plan.attacks), landed, strict=True))
        took_s = round(outcome.took_s, 2) if outcome else 0.0
        result = Result(plan.to_json(), verdict.kind, verdict.text[:4000], took_s, kinds, self.commit, shrunk)
        self.results.add(result)
        self._say_result(plan, result)
        return result

    def _try(self, plan: Plan, *, keeps: bool = False) -> tuple[Outcome | None, Verdict]:
        """Run and judge a plan once."""
        folder = Path(tempfile.mkdtemp(prefix="campaign-"))
        outcome = None
        with ended_afterwards(folder):
            try:
                outcome = run(plan, folder)
                verdict = judge(outcome, self.cache)
            except Exception:  # the other plans go on; the campaign ends with exit code 1
                verdict = Verdict(NOT_JUDGED, traceback.format_exc())
            if keeps and verdict.is_wrong:
                (folder / KEPT).touch()
                self._say(f"seed {plan.seed}: kept in {folder}")
        return outcome, verdict

    def _say_result(self, plan: Plan, result: Result) -> None:
        wrong = result.verdict not in ("right", "missed")
        what = ", ".join(
            f"{each}{'' if landed else ' (missed)'}"
            for each, (_, landed) in zip(plan.attacks, result.kinds, strict=True)
        )
        job = f"{plan.job.fabric} {plan.job.script} {plan.job.model} {plan.job.strategy} n={plan.job.workers}"
        line = f"{next(self._count)}: seed {plan.seed}, {job}: {what}: {result.verdict}, {result.seconds:.1f} s"
        if wrong:
            line = f"FAILED {line}\n{result.text}\nagain: {command_for(result.shrunk or result.plan)}"
        elif result.text:
            line = f"{line}: {result.text}"
        self._say(line)

    def _say(self, text: str) -> None:
        with self._print_lock:
            print(text, flush=True)


def command_for(plan: str) -> str:
    """The command that runs a plan again."""
    return f"make chaos PLAN={shlex.quote(plan)}"


if __name__ == "__main__":
    sys.exit(main())
