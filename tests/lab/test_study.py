from __future__ import annotations

import ast
import csv
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import typing
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError
from holdfast.observe.page.html import write_page
from holdfast_lab.pages.study import claim_lines, render_study, shown_section
from holdfast_lab.studies import STUDIES, carry_out
from holdfast_lab.studies.base import (
    JOURNAL,
    MEASURED,
    NOT_RUN,
    SHARE,
    Claim,
    Options,
    Task,
    check_parts,
    parts_left_out,
)
from holdfast_lab.studies.checkpoint_cost.claims import hold_claims
from holdfast_lab.studies.checkpoint_cost.page import sections
from holdfast_lab.studies.checkpoint_cost.study import EVERY, STUDY
from holdfast_lab.studies.checkpoint_cost.workers.measure import TrainedFramework
from holdfast_lab.studies.frameworks import FRAMEWORKS, WORKERS, Framework, WorkerFailed
from holdfast_lab.studies.pace import Pace
from holdfast_lab.studies.pool import WorkerPool
from holdfast_lab.studies.stats import bootstrap, median, share_interval, wilson

# ---------------------------------------------------------------------------------------------
# Carrying out a study


class Counting:
    """A study of three tasks that notes which it does, and can be interrupted in one of them."""

    name, title, paper, intervals = "counting", "Counting", "nobody", "Intervals are counted."
    task_s, quick_task_s = 100.0, 10.0

    def __init__(self, stop_in: str = "", breaks: str = "", derived: str = "") -> None:
        self.done: list[str] = []
        self.stop_in, self.breaks, self.derived = stop_in, breaks, derived

    def plan(self, options: Options) -> Any:
        return self

    def settings(self) -> dict[str, Any]:
        return {}

    def tasks(self) -> list[Task]:
        def task(key: str) -> Task:
            def run(known: Any) -> list[dict[str, Any]]:
                if key == self.stop_in:
                    raise KeyboardInterrupt
                self.done.append(key)
                row = {"task": key, "before": len(known)}
                if key == self.breaks:
                    Path(__file__, "nowhere").read_text()  # raises NotADirectoryError
                return [row]

            return Task(key, run, derived=key == self.derived)

        return [task(key) for key in ("one", "two", "three")]

    def left_out(self) -> list[str]:
        return []

    def claims(self, rows: Any, seed: int) -> list[Claim]:
        alone = [row for row in rows if row["task"] == "two"]
        of_two = Claim(claim="two is there", source="us", ours=len(alone) or None, found="not checked", parts=("two",))
        of_four = Claim(claim="four is there", source="us", found="not checked", parts=("four",))
        whole = Claim(claim="there are three rows", source="us", paper=3, ours=len(rows), holds=len(rows) == 3)
        return [whole, of_two, of_four]

    def page(self, rows: Any) -> list[dict[str, Any]]:
        return []


def test_an_interrupted_study_goes_on_where_it_was(tmp_path):
    interrupted = Counting(stop_in="two")
    with pytest.raises(KeyboardInterrupt):
        carry_out(interrupted, Options(out=tmp_path))
    partial = json.loads((tmp_path / "results.json").read_text())
    again = Counting()

    results = carry_out(again, Options(out=tmp_path))

    assert interrupted.done == ["one"]
    assert partial["left_out"] == ["Not measured yet, because the study was interrupted: two, three."]
    assert again.done == ["two", "three"]
    assert results["rows"] == [{"task": key, "before": place} for place, key in enumerate(("one", "two", "three"))]


def journal_of(out: Path) -> dict[str, dict[str, Any]]:
    return {entry["task"]: entry for entry in map(json.loads, (out / JOURNAL).read_text().splitlines()[1:])}


def test_a_task_that_raises_is_noted_as_failed_the_others_are_done_and_it_is_measured_again(tmp_path):
    told: list[str] = []
    broken, again = Counting(breaks="two"), Counting()

    first = carry_out(broken, Options(out=tmp_path), told.append)
    noted = journal_of(tmp_path)
    second = carry_out(again, Options(out=tmp_path), told.append)

    [failure] = first["failed"]
    assert (failure["task"], failure["why"].split(":")[0]) == ("two", "NotADirectoryError")
    assert broken.done == ["one", "two", "three"]
    assert noted["two"]["failed"] == failure["why"]
    assert "test_study.py" in noted["two"]["traceback"]
    assert noted["one"]["failed"] == noted["three"]["failed"] == ""
    assert f"two: failed: {failure['why']}" in told
    assert "measured again, because it failed: two" in told
    assert again.done == ["two"]
    assert (second["failed"], len(second["rows"])) == ([], 3)
    assert journal_of(tmp_path)["two"]["failed"] == ""


def test_a_claim_without_a_number_says_which_of_its_parts_failed_and_the_others_are_not_checked(tmp_path):
    results = carry_out(Counting(breaks="two"), Options(out=tmp_path))

    page, lines = write_page(tmp_path).read_text(), claim_lines(results)

    why = results["failed"][0]["why"]
    _, of_two, of_four = results["claims"]
    assert (of_two["failed"], of_two["found"]) == (True, f"failed: two: {why}")
    assert (of_four["failed"], of_four["found"]) == (False, "not checked")
    assert any(line.startswith("failed ") and "two is there" in line for line in lines)
    assert "Parts that failed" in page
    assert f"failed: {why}" in page.replace("&#39;", "'")


def test_what_is_computed_from_a_failed_task_is_computed_again_and_no_other_is_measured_twice(tmp_path):
    carry_out(Counting(breaks="one", derived="three"), Options(out=tmp_path))
    again = Counting(derived="three")

    results = carry_out(again, Options(out=tmp_path))

    assert again.done == ["one", "three"]
    assert results["failed"] == []


def test_a_task_whose_line_was_cut_off_is_done_again(tmp_path):
    carry_out(Counting(), Options(out=tmp_path))
    journal = tmp_path / JOURNAL
    journal.write_text(journal.read_text()[:-20])
    again = Counting()

    results = carry_out(again, Options(out=tmp_path))

    assert again.done == ["three"]
    assert len(results["rows"]) == 3
    assert all(json.loads(line) for line in journal.read_text().splitlines())


def test_rows_of_other_settings_are_not_mixed_in(tmp_path):
    carry_out(Counting(), Options(out=tmp_path, seed=1))

    with pytest.raises(ConfigError, match=r"seed = 1, requested 2; give another --out"):
        carry_out(Counting(), Options(out=tmp_path, seed=2))


def test_at_its_start_a_study_says_how_long_it_will_take_and_how_it_knows(tmp_path):
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        carry_out(Counting(stop_in="two"), Options(out=tmp_path), told.append)
    again: list[str] = []
    journal = tmp_path / JOURNAL
    text = journal.read_text()
    journal.write_text(text.replace(re.search(r'"took_s": [0-9.]+', text)[0], '"took_s": 600'))

    carry_out(Counting(), Options(out=tmp_path), again.append)

    assert told[0] == "3 tasks, 3 left, about 5 min, estimated from a run on two cores"
    assert again[0] == "3 tasks, 2 left, about 12 min (3 min to 20 min), estimated from the 1 finished"
    assert again[-1].startswith("[3/3] three; about ")


@pytest.mark.parametrize(
    ("took_s", "keys", "told"),
    [
        ({"cost: a": 60, "spread: a": 3600}, ["cost: b", "cost: c"], "about 2 min, estimated from the 2 finished"),
        ({"cost: a": 70, "cost: b": 80}, ["cost: c"], "about 75 s, estimated from the 2 finished"),
        (
            {"cost: a": 600, "cost: b": 1800},
            ["cost: c"],
            "about 20 min (10 min to 30 min), estimated from the 2 finished",
        ),
        (
            {"81": 4860, "70": 4200, "63": 3780},
            ["explained", "alone"],
            "about 109 min (9 min to 162 min), estimated from the 3 finished",
        ),
        ({"cost: a": 5 * 3600}, ["cost: b"], "about 5 h, estimated from the 1 finished"),
    ],
)
def test_what_is_left_goes_by_tasks_of_the_same_kind_and_by_bounds_where_that_says_little(took_s, keys, told):
    assert Pace(280.0, took_s).left(keys) == told


def test_the_more_is_known_of_a_kind_the_nearer_the_bounds():
    few = {f"cost: {n}": 100.0 + 300 * (n % 2) for n in range(2)}
    many = {f"cost: {n}": 100.0 + 300 * (n % 2) for n in range(100)}
    keys = [f"cost: {n}" for n in range(1000, 1100)]

    assert Pace(280.0, few).left(keys) == "about 7 h (167 min to 11 h), estimated from the 2 finished"
    assert Pace(280.0, many).left(keys) == "about 7 h, estimated from the 100 finished"


def test_the_page_says_where_the_intervals_of_its_study_come_from(tmp_path):
    results = carry_out(Counting(), Options(out=tmp_path))

    page = render_study(results)

    assert "Intervals are counted." in page
    assert "Clopper" not in page


def test_a_bar_is_named_by_what_is_not_the_same_in_all():
    rows = [{"network": "mlp", "workers": workers, "step_s": 1.5} for workers in (11, 12)]
    section: dict[str, Any] = {"kind": "bars", "title": "Steps", "where": {}, "by": ["network", "workers"]}
    section |= {"values": [["step_s", "step"]], "unit": "s"}

    def names(shown: dict[str, Any] | None) -> set[str]:
        assert shown is not None
        return {text for text in re.findall(r">([^<>]+)</text>", shown["svg"]) if "1" in text and "." not in text}

    assert names(shown_section(section, rows)) == {"11", "12"}
    assert names(shown_section(section, rows[:1])) == {"mlp 11"}, "one alone has its whole name"


@pytest.mark.parametrize("name", STUDIES)
def test_without_rows_a_study_claims_nothing(name):
    assert {(claim.holds, claim.ours) for claim in STUDIES[name].claims([], 0)} == {(None, None)}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("checkpoint-cost", {"only": ("caffe",)}, "--only must be one of torch, .*, got 'caffe'"),
        ("checkpoint-cost", {"model": "lenet"}, "--network must be one of alexnet, .*, got 'lenet'"),
        ("exact", {"only": ("imagined",)}, "--only must be one of cost, memory, goodput, spread, got 'imagined'"),
        ("exact", {"model": "vgg16"}, "--network must be one of mlp, cnn, gpt, got 'vgg16'"),
        ("exact", {"repetitions": 1}, "--repetitions must be at least 2"),
        ("guard", {"only": ("cnn",)}, "--only must be one of flips, clean, cost"),
        ("guard", {"model": "mlp"}, "--network"),
        ("parallelism", {"only": ("voting",)}, "--only must be one of replicated, .*, got 'voting'"),
        ("parallelism", {"model": "lenet"}, "--network must be one of cnn, .*, got 'lenet'"),
        ("resilience", {"only": ("imagined",)}, "--only must be one of simulated, modes, real, got 'imagined'"),
        ("resilience", {"model": "vgg16"}, r"--network must be one of mlp, cnn \(more with --data\), got 'vgg16'"),
        (
            "resilience",
            {"model": "vgg16", "data": Path()},
            "one of mlp, cnn, alexnet-narrow, resnet18-narrow, gpt-small, alexnet, resnet18, gpt, got",
        ),
        ("resilience", {"repetitions": 1}, "--repetitions must be at least 2"),
        ("scar", {"only": ("mlr",)}, "--only must be one of mlr-covertype, .*, got 'mlr'"),
        ("scar", {"only": ("mlr-fashion",)}, "mlr-fashion needs data from files: .* --data"),
        ("scar", {"model": "cnn"}, "--network cannot be used with this study, got 'cnn'"),
        ("soft-errors", {"only": ("horovod",)}, "must be one of ddp, pipeline, .*, crossed, .*, networks, got 'horovod'"),
        ("soft-errors", {"only": ("bursts",), "quick": True}, "one of ddp, pipeline, hybrid, session, got 'bursts'"),
        ("soft-errors", {"only": ("session", "bursts")}, "--only session --only bursts leaves nothing to run: .* add --only ddp"),
        ("soft-errors", {"model": "gpt"}, "--network must be one of mlp, cnn, resnet18, resnet50, got 'gpt'"),
        ("soft-errors", {"data": Path("/nowhere")}, "--data must be a directory with the files of one of cifar100, "),
    ],
)  # fmt: skip
def test_what_a_study_does_not_have_is_refused_in_one_line(name, options, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as refused:
        STUDIES[name].plan(Options(out=tmp_path, **options)).tasks()
    assert "\n" not in str(refused.value)


def test_a_part_that_is_not_there_is_refused_and_those_not_asked_for_are_said():
    with pytest.raises(ConfigError, match="--only must be one of cost, spread, got 'goodput'"):
        check_parts(("cost", "goodput"), ("cost", "spread"))
    check_parts((), ("cost", "spread"))

    assert parts_left_out(("cost",), ("cost", "spread", "memory")) == ["Parts: spread, memory."]
    assert parts_left_out((), ("cost", "spread")) == []


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"ours": 12.5, "unit": "%", "ci": (3.0, 20.0)}, "12.5 %, 95 % interval 3 to 20, expected 10 %"),
        ({"ours": 0.5, "paper": 1.0, "unit": SHARE}, "50 %, expected 100 %"),
        ({"ours": 0.5, "unit": SHARE, "ci": (-math.inf, 0.9)}, "95 % interval -∞ to 90 %"),
        ({"ours": 2.0}, "2, expected 10)"),
    ],
)
def test_numbers_of_a_claim_stand_with_their_unit_and_an_end_that_there_is_not_is_said(said, shown):
    claim = Claim(**{"claim": "it is so", "source": "us", "paper": 10.0, **said})
    written = json.loads(json.dumps(claim.to_dict(), allow_nan=False))

    assert shown in claim_lines({"claims": [written]})[-1]


def judged(**said):
    """What ``results.json`` says of a claim that its study judged to hold."""
    return Claim(**{"claim": "it is so", "source": "us", "ours": 1.0, "holds": True, **said}).to_dict()["holds"]


@pytest.mark.parametrize("interval", [share_interval, wilson])
def test_what_was_so_in_the_only_run_is_undecided_and_so_it_is_until_the_interval_tells(interval):
    in_all = [judged(ci=interval(n, n), unit=SHARE) for n in range(1, 10)]
    in_percent = [judged(ci=tuple(100 * end for end in interval(n, n)), unit="%") for n in range(1, 10)]
    in_none = [judged(ci=interval(0, n), unit=SHARE) for n in range(1, 10)]

    assert in_all[:3] == [None] * 3
    assert in_all[5:] == [True] * 4
    assert in_all == in_percent == in_none


def test_what_was_not_so_in_the_only_run_is_against_a_claim_of_all_runs():
    assert judged(ci=share_interval(0, 1), unit=SHARE, holds=False) is False


@pytest.mark.parametrize(("runs", "undecided"), [(0, True), (1, True), (2, False), (30, False)])
def test_a_claim_on_one_run_is_undecided_whichever_way_it_went(runs, undecided):
    verdicts = [judged(ci=(2.0, 2.0), holds=holds, runs=runs) for holds in (True, False)]

    assert verdicts == ([None, None] if undecided else [True, False])


def test_a_wide_interval_that_is_not_of_a_share_of_runs_is_for_its_study_to_judge():
    assert judged(ci=(95.0, 210.0), unit="%") is True
    assert judged(ci=(1.2, 100.0), unit="times as long") is True


def test_an_undecided_claim_has_a_look_of_its_own_on_the_page():
    claims = [
        Claim(claim="one run", source="us", ours=1.0, ci=share_interval(1, 1), holds=True, unit=SHARE),
        Claim(claim="many runs", source="us", ours=1.0, ci=share_interval(30, 30), holds=True, unit=SHARE),
        Claim(claim="no run", source="us"),
    ]

    page = render_study({"study": "s", "settings": {}, "rows": [], "claims": [claim.to_dict() for claim in claims]})

    marks = re.findall(r'<td><span class="(\w+)">([\w ]+)</span></td>', page)
    assert marks == [("undecided", "undecided"), ("same", "holds"), ("dim", "not checked")]
    assert "\n.undecided {" in page


# ---------------------------------------------------------------------------------------------
# Processes

STARTED_AND_STOPPED = """
import signal, sys
from holdfast_lab.studies.pace import Pace
from holdfast_lab.studies.pool import WorkerPool

def stop(*_):
    raise KeyboardInterrupt

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    workers = WorkerPool(1, preload=["stops_its_parent"])
    try:
        workers.rows(str, [1])
    except KeyboardInterrupt:
        print("stopped")
"""


def test_who_is_stopped_while_a_process_is_starting_has_none_to_wait_for(monkeypatch):
    workers = WorkerPool(1)

    def stopped(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)  # until the signal comes

    monkeypatch.setattr(ForkServerProcess, "start", stopped)
    with pytest.raises(KeyboardInterrupt):
        workers.rows(str, [1])

    assert [worker.pid for worker in workers.free()] == [None]


@pytest.mark.soak
def test_sigterm_while_the_first_process_is_starting_ends_a_study_without_a_word(tmp_path):
    (tmp_path / "stops_its_parent.py").write_text(
        "import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(0.5)\n"
    )
    (tmp_path / "study.py").write_text(STARTED_AND_STOPPED)

    done = subprocess.run(
        [sys.executable, str(tmp_path / "study.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\n", "")


# ---------------------------------------------------------------------------------------------
# Statistics


def test_an_interval_holds_the_median_and_is_the_same_for_the_same_seed():
    values = [1.0, 1.1, 0.9, 1.2, 1.05, 0.95]

    low, high = bootstrap([values], lambda groups: median(groups[0]), seed=1)

    assert low < median(values) < high
    assert (low, high) == bootstrap([values], lambda groups: median(groups[0]), seed=1)


@pytest.mark.parametrize(
    ("successes", "tries", "low", "high"),
    [(0, 10, 0.0, 0.3085), (10, 10, 0.6915, 1.0), (5, 10, 0.1871, 0.8129), (1, 1, 0.025, 1.0)],
)
def test_the_interval_of_a_share_is_that_of_clopper_and_pearson(successes, tries, low, high):
    assert share_interval(successes, tries) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_an_interval_of_equal_values_is_a_point():
    assert bootstrap([[2.0, 2.0], [4.0]], lambda groups: groups[1][0] / groups[0][0], seed=0) == (2.0, 2.0)


# ---------------------------------------------------------------------------------------------
# Claims and page, from rows that were made up


def cost_row(**more: Any) -> dict[str, Any]:
    row = {
        "part": "cost",
        "framework": "torch",
        "way": "pt",
        "model": "resnet50",
        "optimizer": "none",
        "status": MEASURED,
    }
    times = {"save_s": 1.0, "blocked_s": 0.9, "gather_s": 0.1, "sync_s": 0.2, "load_s": 0.3, "load_cold_s": 0.4}
    parts = {"serialise_s": 0.2, "compress_s": 0.0, "write_s": 0.5, "undivided_s": None}
    rest = {
        "whole": True,
        "packed": False,
        "repetition": 0,
        "parameters": 1000,
        "bytes": 4010,
        "files": 1,
        "loads_equal": True,
    }
    return {**row, **times, **parts, **rest, **more}  # fmt: skip


def worker_row(**more: Any) -> dict[str, Any]:
    row = {"part": "workers", "framework": "torch", "model": "alexnet", "scheme": "root", "status": MEASURED}
    times = {"workers": 1, "repetition": 0, "save_s": 1.0, "step_s": 1.0, "wait_s": 0.0, "bytes": 100, "files": 1}
    return {**row, **times, **dict.fromkeys((f"share_{every}" for every in EVERY), 0.5), **more}


def run_row(run: str, left_out: str, *, same_bits: bool) -> dict[str, Any]:
    row = {"part": "determinism", "framework": "torch", "status": MEASURED, "run": run, "left_out": left_out}
    return {**row, "same_bits": same_bits, "distance": 0.0 if same_bits else 0.1}


def claim(rows: list[dict[str, Any]], words: str) -> Claim:
    return next(c for c in hold_claims(rows, 0) if words in c.claim)


@pytest.mark.parametrize(("size_bytes", "holds"), [(4010, True), (4100, False), (3900, False)])
def test_a_size_that_is_two_percent_off_is_reported(size_bytes, holds):
    found = claim([cost_row(bytes=size_bytes)], "without an optimizer")

    assert found.holds is holds
    assert found.ours == pytest.approx(size_bytes / 4000)


def test_formats_that_disagree_are_named():
    found = claim([cost_row(), cost_row(way="h5", bytes=4400)], "agree within 2 %")

    assert found.holds is False
    assert "torch pt 0.00 MB" in found.found
    assert "torch h5" in found.found


@pytest.mark.parametrize(
    ("saves_s", "holds"),
    [((1.0, 1.02, 0.98), True), ((3.0, 3.1, 2.9), False), ((0.4, 1.0, 2.5), None)],
    ids=["the same", "three times", "too noisy"],
)
def test_a_ratio_of_times_is_judged_by_its_interval(saves_s, holds):
    rows = [worker_row(save_s=save_s) for save_s in (1.0, 1.01, 0.99)]
    rows += [worker_row(workers=4, save_s=save_s) for save_s in saves_s]

    assert claim(rows, "the same time with any number").holds is holds


def test_two_repetitions_do_not_tell_about_times():
    rows = [worker_row(), worker_row(), worker_row(workers=2), worker_row(workers=2)]

    found = claim(rows, "the same time with any number")

    assert found.holds is None
    assert "fewer than 3 repetitions" in found.found


def test_a_run_that_is_the_same_though_something_was_left_out_refutes_the_claim():
    rows = [
        run_row("everything restored", "nothing", same_bits=True),
        run_row("without sampler", "sampler", same_bits=True),
    ]

    found = claim(rows, "if, and only if")

    assert found.holds is False
    assert "torch without sampler" in found.found


def test_extrapolated_rows_prove_nothing():
    rows = [worker_row(status="extrapolated", workers=count) for count in (1, 2, 4)]

    assert claim(rows, "the same time with any number").holds is None


def page_rows() -> list[dict[str, Any]]:
    mechanism = {"part": "mechanisms", "framework": "torch", "way": "pt", "status": MEASURED, "kept": 7}
    return [
        cost_row(optimizer="momentum", bytes=8010),
        worker_row(workers=2),
        worker_row(workers=64, status="extrapolated"),
        run_row("without sampler", "sampler", same_bits=False),
        {**mechanism, "killed": "3x nothing", "damage": "not detected: loads wrong values"},
        {"part": "cost", "framework": "orbax", "model": "resnet50", "status": NOT_RUN, "why": "<it> is not there"},
    ]


def test_every_sentence_on_the_page_leads_to_its_row():
    rows = page_rows()
    results = {"study": "s", "settings": {}, "rows": rows, "claims": [c.to_dict() for c in hold_claims(rows, 0)]}

    page = render_study({**results, "page": sections(rows)})

    links = re.findall(r'href="#([^"]+)"', page)
    assert len(links) >= 5
    assert [link for link in links if f'id="{link}"' not in page] == []
    assert "&lt;it&gt; is not there" in page
    assert "extrapolated" in page


def test_holdfast_report_draws_a_study_too(tmp_path):
    carry_out(Counting(), Options(out=tmp_path))

    page = write_page(tmp_path).read_text()

    assert "there are three rows" in page


def test_figures_lie_beside_the_page_with_the_rows_that_they_show(tmp_path):
    rows = page_rows()
    results = {
        "study": "s",
        "title": "s",
        "paper": "p",
        "settings": {},
        "rows": rows,
        "claims": [],
        "page": sections(rows),
    }
    (tmp_path / "results.json").write_text(json.dumps(results))

    page = write_page(tmp_path).read_text()

    shown = [{key: str(value) for key, value in row.items() if value not in (None, "")} for row in rows]
    drawn = sorted(path.stem for path in (tmp_path / "figures").glob("*.svg"))
    assert len(drawn) == page.count("<svg ") > 0
    for name in drawn:
        assert (tmp_path / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        with (tmp_path / "figures" / f"{name}.csv").open(newline="") as file:
            kept = list(csv.DictReader(file))
        assert kept
        assert all({key: text for key, text in line.items() if text} in shown for line in kept)
    assert "var(--" in page, "the page has other colours in the dark"
    assert all("var(--" not in path.read_text() for path in (tmp_path / "figures").glob("*.svg"))


# ---------------------------------------------------------------------------------------------
# Workers


def test_a_framework_that_is_not_installed_says_how_to_get_it():
    missing = Framework(name="torch", environment=".venv-study-nowhere")

    assert "make study-peers" in missing.why_not()
    with pytest.raises(WorkerFailed, match=r"\.venv-study-nowhere does not exist"):
        missing.run({"do": "describe", "seed": 0}, 10.0)


def test_a_study_without_its_frameworks_has_rows_that_say_why(tmp_path, monkeypatch):
    monkeypatch.setitem(FRAMEWORKS, "orbax", Framework(name="orbax", environment=".venv-study-nowhere"))

    results = carry_out(STUDY, Options(out=tmp_path, only=("orbax",), model="tiny"))

    assert {row["status"] for row in results["rows"]} == {NOT_RUN}
    assert all("make study-peers" in row["why"] for row in results["rows"])
    assert not (tmp_path / "scratch").exists()


@pytest.mark.chaos
def test_a_worker_that_fails_says_why_in_one_line():
    with pytest.raises(WorkerFailed, match="KeyError: 'no such thing'"):
        FRAMEWORKS["torch"].run({"do": "no such thing", "seed": 0}, 60.0)


@pytest.mark.chaos
def test_a_worker_that_takes_too_long_is_ended():
    with pytest.raises(WorkerFailed, match=r"did not finish within 0\.01 s"):
        FRAMEWORKS["torch"].run({"do": "describe", "seed": 0}, 0.01)


@pytest.mark.chaos
def test_damage_that_torch_does_not_notice_holdfast_does(tmp_path):
    """The probe is real: the same flipped bits, the same state, two readers."""
    layer = {"kind": "linear", "inputs": 100, "outputs": 1000, "bias": True}
    task = {"do": "damage", "seed": 0, "layers": [layer], "optimizer": "none", "folder": str(tmp_path / "scratch")}

    torch_found = FRAMEWORKS["torch"].run({**task, "ways": ["pt"]}, 60.0)
    holdfast_found = FRAMEWORKS["holdfast"].run({**task, "ways": ["safetensors"]}, 60.0)

    assert torch_found == [{"way": "pt", "found": "other", "kept": None}]
    assert holdfast_found == [{"way": "safetensors", "found": "nothing (CheckpointCorrupt)", "kept": 2}]


def test_what_was_recorded_with_chainer_is_said_and_not_measured_again(tmp_path):
    wanted = Options(out=tmp_path, model="tiny", only=("torch",))

    assert STUDY.plan(wanted).left_out()[-1].startswith("chainer: recorded result, no longer run")
    with pytest.raises(
        ConfigError, match=r"chainer: recorded result, no longer run; .* 30 times the time \(22 to 39\)"
    ):
        STUDY.plan(Options(out=tmp_path, only=("chainer",))).tasks()
    compressing = claim([], "Compressing a network's weights")
    assert compressing.ours is None
    assert "recorded with Chainer" in compressing.found


def names_used(of: str) -> set[str]:
    """Return the attributes of a variable that ``measure.py`` uses."""
    nodes = ast.walk(ast.parse((WORKERS / "measure.py").read_text()))
    return {
        n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == of
    }


@pytest.mark.parametrize("name", ["torch", "tensorflow", "holdfast", "orbax"])
def test_each_framework_defines_what_is_called(name: str):
    """The scripts run in other environments, where no test looks; they import their framework only when they are called."""
    script = importlib.import_module(f"holdfast_lab.studies.checkpoint_cost.workers.with_{name}")
    trains = isinstance(script, TrainedFramework)

    own = {"pieces", "saved_by_default", "training", "share", "load_together"}
    assert names_used("framework") - own == {"versions", "make", "parameters", "values", "ways"}
    assert names_used("framework") & own == own
    assert [used for used in names_used("framework") - own if not callable(getattr(script, used, None))] == []
    assert trains == (name in ("torch", "tensorflow"))
    if trains:
        made = typing.get_type_hints(script.training)["return"]
        assert [used for used in names_used("job") if not callable(getattr(made, used, None))] == []


OF_PEERS = [path for path in WORKERS.glob("*.py") if path.name in ("measure.py", "__init__.py") or "with_" in path.name]


@pytest.mark.parametrize("path", sorted(set(OF_PEERS) - {WORKERS / "with_holdfast.py"}), ids=lambda path: path.name)
def test_a_worker_runs_where_there_is_no_holdfast(path: Path):
    allowed = {"importlib", "numpy", "torch", *sys.stdlib_module_names}

    names = {alias.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import) for alias in node.names}  # fmt: skip
    names |= {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}

    assert {name.split(".")[0] for name in names} <= allowed
