"""The pages: self-contained, deterministic, and telling everything that the report says."""

import dataclasses
import functools
import itertools
import json
import os
import pickle
import random
import re
import statistics
import subprocess
import sys

import pytest
from made_up_runs import KILLS, STEPS, made_up_demo, made_up_report, made_up_run
from matplotlib.text import Text

from holdfast.cli.report import report as report_command
from holdfast.errors import ConfigError
from holdfast.observe.page import curves, figures, pages
from holdfast.observe.page.canvas import Canvas
from holdfast.observe.page.html import render_run, write_page
from holdfast.observe.page.timeline import stretches
from holdfast.records.run_model import model_of
from holdfast.records.types import (
    FailureSeen,
    Finished,
    JobRestarted,
    Left,
    Recovered,
    RunStarted,
    SamplesLost,
    StepCommitted,
    WorkerFenced,
)
from holdfast.summary.build import build_report
from holdfast.summary.files import write_report, write_results
from holdfast_lab.pages.demo import demo_rows, demo_table, render_demo


def texts(page):
    return re.findall(r">([^<>]+)</text>", page)


@functools.cache
def made_up_page():
    return render_run(*made_up_report())


@pytest.fixture
def _no_figures(monkeypatch):
    """Pages of words alone; figures take most of the time."""
    monkeypatch.setattr(figures, "timeline_of", lambda report, _, draw=figures.timeline_of: draw(report, ()))
    monkeypatch.setattr(curves, "curves_of", lambda _, draw=curves.curves_of: draw([]))


def test_a_page_of_a_run_needs_no_network():
    page = made_up_page()

    assert page.startswith("<!doctype html>")
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', page)
    assert not re.search(r"<script\s|<link|@import|url\((?!#)|https?://(?!www\.w3\.org/)", page)
    assert page.count("<script>") == 1, "that of the buttons below figures"
    assert "&lt;svg" not in page
    assert page.count("<svg") == 3


def test_a_page_of_a_run_shows_every_worker_and_every_failure():
    report, records = made_up_report(strategy="forward", workers=8, kills=((1, 31, "allreduce"), (7, 114, "optimizer")))

    page = render_run(report, records)

    assert {f"worker {rank}" for rank in range(8)} <= set(texts(page))
    assert {"step 31, allreduce", "step 114, optimizer"} <= set(texts(page))
    assert report["replicas"]["sha256"] in page
    assert report["command"] in page
    assert "2 of 8 workers were killed" in page
    assert " ".join(map(str, report["lost"][0]["ids"])) in page


def test_the_first_recovery_is_enlarged():
    page = made_up_page()

    assert any(text.startswith("milliseconds since the fault") for text in texts(page))
    assert {"✕ lost", "● detected, the first after 6.9 ms"} <= set(texts(page)), "each mark is explained"
    assert any(text.startswith("◆ decided, the last after 3") for text in texts(page))
    assert any(text.startswith("┊ step committed, the next after 8") for text in texts(page))


def test_no_line_goes_through_text(monkeypatch):
    kept = []
    monkeypatch.setattr(Canvas, "svg", lambda page, label: kept.append(page.figure) or "")
    figures.timeline(*made_up_report())
    (figure,) = kept
    figure.draw_without_rendering()
    enlarged = figure.axes[1]
    names = [t.get_window_extent() for t in enlarged.texts if re.fullmatch(r"step \d+", t.get_text())]
    lines = [
        line.get_window_extent() for line in enlarged.lines if len({*line.get_xdata()}) == 1 < len(line.get_xdata())
    ]

    assert len(names) >= 2
    assert len(lines) >= len(names)
    assert not [1 for name in names for line in lines if name.y0 < line.y1 and name.x0 <= line.x0 <= name.x1]
    assert all(one.x1 < other.x0 for one, other in itertools.pairwise(sorted(names, key=lambda name: name.x0)))

    ties = [line.get_window_extent() for line in figure.artists]
    texts = [text.get_window_extent() for axes in figure.axes for text in axes.findobj(Text) if text.get_text()]

    assert len(ties) == 2
    assert len(texts) > 20
    assert not [1 for tie in ties for text in texts if tie.y0 < text.y1 and text.y0 < tie.y1]


def made_up_ddp_run(kills=KILLS, steps=STEPS):
    """The same run by a script that speaks to torch.distributed, which knows less."""
    nothing = {
        RunStarted: {"steps_planned": 0, "samples_planned": 0, "num_buckets": 0, "parameters": 0},
        StepCommitted: {"samples": 0, "metrics": {}},
        Finished: {
            "step": steps, "sha256": "", "state_sha256": "", "planned": 0, "committed": 0, "lost": 0, "metrics": {},
        },
    }  # fmt: skip
    left_out = (SamplesLost,) if steps else (SamplesLost, StepCommitted)
    records, wall_s = made_up_run(strategy="forward", kills=kills)
    records = [dataclasses.replace(r, **nothing.get(type(r), {})) for r in records if not isinstance(r, left_out)]
    return build_report(records, started=range(4), wall_s=wall_s, seed=0), records


def test_an_undisturbed_run_enlarges_nothing():
    page = render_run(*made_up_report(kills=()))

    assert not any("● detected" in text for text in texts(page))
    assert "until detected" not in page


def words_of(page):
    """What a reader sees outside of the pictures, in one line."""
    page = re.sub(r"<svg.*?</svg>|<style>.*?</style>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


@pytest.mark.usefixtures("_no_figures")
def test_the_key_number_of_what_was_learned_says_of_what_it_is():
    records, wall_s = made_up_run()
    steps = [record for record in records if isinstance(record, StepCommitted)]

    def said(metrics):
        own = [dataclasses.replace(r, metrics=metrics) if isinstance(r, Finished) else r for r in records]
        return words_of(render_run(build_report(own, started=range(4), wall_s=wall_s, seed=0), own))

    mean = statistics.fmean(step.metrics["accuracy"] for step in steps[-20:])
    assert f"{100 * mean:.2f} % accuracy mean of the last 20 mini-batches" in said(steps[-1].metrics)
    assert "97.00 % accuracy logged at the end" in said(steps[-1].metrics | {"accuracy": 0.97})
    assert "91.00 % test accuracy logged at the end" in said(steps[-1].metrics | {"test_accuracy": 0.91})
    assert "% accuracy of the last mini-batch" in words_of(render_run(made_up_report()[0]))


def test_a_page_of_a_torch_distributed_run_claims_nothing_that_is_not_known():
    page = render_run(*made_up_ddp_run())
    said = words_of(page)

    assert "torch.distributed on ulfm</p>" in page
    assert "<h1>2 of 4 ranks were killed; training resumed after" in page
    assert "The two survivors finished." in said
    assert "2 of 4 ranks finished ranks 0 and 2" in said
    assert "Only the script knows which samples counted, and whether the replicas ended with the same bits" in said
    for claim in ("in the weights", "sha256", "hold the same bits", "Seed", "Parameters", "Slices", "Samples lost"):
        assert claim not in said
    assert {f"rank {rank}" for rank in range(4)} <= set(texts(page))
    assert not any(text.startswith("worker") for text in texts(page))
    assert page.count("<svg") == 1


@pytest.mark.usefixtures("_no_figures")
def test_a_death_in_the_last_step_of_torch_distributed_is_not_held_against_it():
    report, records = made_up_ddp_run(kills=((1, STEPS - 1, "allreduce"),))

    said = words_of(render_run(report, records))

    assert "no later step continue" in said
    assert "no step followed" not in said


def test_a_torch_distributed_run_without_steps_has_a_page_without_a_picture():
    report, records = made_up_ddp_run(kills=(), steps=0)

    page = render_run(report, records)

    assert "<h1>4 ranks ran, without a step of DistributedDataParallel, and none was lost</h1>" in page
    assert "All four finished." in page
    assert "<svg" not in page
    assert "a step" not in words_of(page).replace("a step of", "")


def test_the_same_records_make_the_same_page_whatever_the_order_of_sets(tmp_path):
    report, records = made_up_report()
    given = tmp_path / "given"
    given.write_bytes(pickle.dumps((report, records)))
    code = (
        "import pickle, sys; from pathlib import Path; from holdfast.observe.page.html import render_run; "
        "sys.stdout.write(render_run(*pickle.loads(Path(sys.argv[1]).read_bytes())))"
    )

    env = os.environ | {"PYTHONHASHSEED": "1"}
    again = subprocess.run([sys.executable, "-c", code, str(given)], env=env, capture_output=True, check=True)

    assert "<svg" in made_up_page()
    assert again.stdout.decode() == made_up_page()


def test_what_a_script_says_cannot_become_markup():
    report, records = made_up_report()
    report |= {"command": "<script>alert(1)</script>", "strategy": "<b>$x$"}

    page = render_run(report, records, title="<i>&amp;")

    assert "<script>alert" not in page
    assert "<b>$x$" not in page
    assert "<i>" not in page


def test_a_metric_may_have_any_name():
    records, wall_s = made_up_run()
    commits = [r for r in records if isinstance(r, StepCommitted)]
    odd = [
        StepCommitted(
            t_s=r.t_s, rank=0, step=r.step, epoch=0, samples=1, workers=4, metrics={'$a_1 <"&': r.metrics["loss"]}
        )
        for r in commits
    ]

    page = render_run(build_report(odd, started=range(4), wall_s=wall_s, seed=0), odd)

    assert "$a_1 &lt;" in page


@pytest.mark.parametrize("kept", [0, 5, 60])
def test_a_run_that_broke_off_anywhere_still_has_a_page(kept):
    records = made_up_run()[0][:kept]

    page = render_run(build_report(records, started=range(4), wall_s=3.0, seed=0), records)

    assert "The run failed after" in page


def test_a_restarted_job_is_drawn_through_the_restart():
    first, _ = made_up_run(kills=())
    cut = [r for r in first if r.t_s < 4.0]
    again = JobRestarted(t_s=4.2, rank=-1, step=-1, restart=1, workers=(0, 2, 3), reason="lost")
    rest = [r for r in made_up_run(kills=((1, 0, "start"),))[0] if r.rank != 1]
    later = [r for r in rest if isinstance(r, RunStarted | StepCommitted | Finished)]
    moved = [type(r)(**{**{f: getattr(r, f) for f in r.__dataclass_fields__}, "t_s": r.t_s + 4.3}) for r in later]
    records = [*cut, again, *moved]

    report = build_report(records, started=range(4), wall_s=13.0, seed=0)
    page = render_run(report, records)

    assert [(f["rank"], f["decision"]) for f in report["failures"]] == [(1, "restart")]
    assert "the job was restarted" in page


def with_comings():
    """The made-up run with a spare that never works, a newcomer, a worker that leaves and one that is fenced."""
    records, wall_s = made_up_run(kills=KILLS[:1])
    start = next(r for r in records if isinstance(r, RunStarted))
    middle_s = wall_s * 0.6
    records += [
        dataclasses.replace(start, rank=4),
        FailureSeen(t_s=3.0, rank=4, step=31, phase="allreduce"),
        Recovered(
            t_s=middle_s, rank=0, step=60, lost=(), survivors=(0, 2, 3, 4, 5), decision="grow", redone_steps=0,
            generation=2, joined=(5,), held_s=0.04,
        ),
        dataclasses.replace(start, t_s=middle_s, rank=5, step=60),
        Left(t_s=middle_s + 1, rank=2, step=80),
        WorkerFenced(t_s=middle_s + 1.5, rank=3, step=90, silent_s=0.4, reason="no sign of life"),
        Recovered(
            t_s=middle_s + 1.6, rank=0, step=90, lost=(2, 3), survivors=(0, 4, 5), decision="redo", redone_steps=1,
            generation=3,
        ),
    ]  # fmt: skip
    return build_report(records, started=range(4), wall_s=wall_s, seed=0), records, wall_s


def test_a_page_shows_who_came_and_who_went():
    report, records, _ = with_comings()

    page = render_run(report, records)

    for words in (
        "spare 4",
        "▭ waiting as a spare",
        "worker 5",
        "▶ joined",
        "◀ left after SIGTERM",
        "╌ no sign of life",
    ):
        assert f">{words}<" in page
    assert "worker 5 joined at step 60; the other workers waited 40 ms" in page
    assert "worker 2 left before step 80, after SIGTERM" in page
    assert "hang; ended by the launcher after 400 ms without a sign of life" in page


@pytest.mark.usefixtures("_no_figures")
def test_a_page_says_how_many_began_and_how_many_waited_beside_them():
    report, records = made_up_report()
    alone = render_run(report, records)
    with_spares = render_run(report | {"workers": report["workers"] | {"spares": 2}, "nodes": 3}, records)

    assert f"<dt>Workers at the start</dt><dd>{report['workers']['started']}</dd>" in alone
    assert "Spares" not in alone
    assert "Nodes" not in alone
    assert "<dt>Spares at the start</dt><dd>2</dd>" in with_spares
    assert "<dt>Nodes at the start</dt><dd>3</dd>" in with_spares


def test_the_lane_of_a_newcomer_begins_where_it_joined_and_that_of_a_leaver_ends_where_it_left():
    _, records, wall_s = with_comings()

    lanes = {s.rank: s for s in stretches(model_of(records, range(4)), wall_s)}

    assert lanes[5].from_s == wall_s * 0.6
    assert (lanes[2].to_s, lanes[2].open) == (wall_s * 0.6 + 1, False)


def test_the_lane_of_a_spare_shows_until_when_it_waited():
    _, records, wall_s = with_comings()
    takes_over = next(r for r in records if isinstance(r, Recovered) and 4 in r.survivors)

    lanes = {s.rank: s for s in stretches(model_of(records, range(4)), wall_s)}
    without = [r for r in records if r is not takes_over and getattr(r, "generation", 0) != 3]
    waits = {s.rank: s for s in stretches(model_of(without, range(4)), wall_s)}[4]

    assert lanes[4].from_s + lanes[4].waits_s == pytest.approx(takes_over.t_s)
    assert {rank for rank, stretch in lanes.items() if stretch.waits_s} == {4, 5}, "with the spare there are enough"
    assert waits.from_s + waits.waits_s == pytest.approx(waits.to_s), "its place never got free"


def test_a_spare_of_whom_only_the_recovery_says_that_it_is_there_has_a_lane():
    """Of workers that one process plays the lowest alone says that it begins."""
    _, records, _ = with_comings()
    records = [r for r in records if not (isinstance(r, RunStarted) and r.rank == 4)]

    assert 4 in model_of(records, range(4)).ranks


def test_a_page_where_nobody_came_or_went_does_not_speak_of_it():
    assert not any(
        words in made_up_page() for words in ("joined", "left after SIGTERM", "no sign of life", "Other events")
    )


def test_many_workers_still_fit():
    report, records = made_up_report(workers=64)

    page = render_run(report, records)

    assert len([text for text in texts(page) if text.startswith("worker ")]) < 80


def test_a_page_of_a_demo_opens_with_the_cost_of_failures_and_shows_every_run():
    results, records = made_up_demo()

    page = render_demo(results, records)

    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', page)
    again = next(row for row in results["rows"] if row["name"] == "restart")["steps_redone"]
    assert again > 2
    assert page.index(f"Steps computed again: none with forward, {again} with restart") < page.index("<table>")
    assert "Samples lost: none with rollback and restart, 60 with forward" in page
    assert {"rollback", "forward", "restart"} <= set(texts(page))
    assert page.count("<svg") == 8
    assert "verhead" not in page, "with fewer cores than workers the time of a whole run says nothing"
    assert "With rollback and restart the final weights are bit-identical to those of the failure-free run" in page
    assert page.count('class="same"') == 2


def test_a_demo_without_records_or_accuracy_has_its_table():
    records, wall_s = made_up_run(kills=())
    records = [r for r in records if isinstance(r, RunStarted)]
    report = build_report(records, started=range(4), wall_s=wall_s, seed=0)

    page = render_demo(demo_rows([("undisturbed", report), ("other", report)]))

    assert "<svg" not in page
    assert "<td><b>other</b>" in page


def test_report_writes_the_page_of_a_demo(tmp_path):
    results, records = made_up_demo()
    write_results(results, tmp_path)
    write_report(records["rollback"], tmp_path / "rollback", started=range(4), wall_s=9.0, seed=0)

    page = write_page(tmp_path).read_text()

    assert page.count('aria-label="Timeline of') == 1


def nested(value, path=()):
    """Every place in a report below its first level."""
    if isinstance(value, dict | list):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            if path:
                yield (*path, key)
            yield from nested(below, (*path, key))


def test_a_report_that_was_damaged_anywhere_has_its_page_or_one_clear_line(tmp_path):
    records, wall_s = made_up_run()
    write_report(records, tmp_path, started=range(4), wall_s=wall_s, seed=0)
    whole, complaints = (tmp_path / "report.json").read_text(), []
    for place in random.Random(3).sample(list(nested(json.loads(whole))), 6):
        damaged = json.loads(whole)
        functools.reduce(lambda value, key: value[key], place[:-1], damaged)[place[-1]] = {"no": "thing"}
        (tmp_path / "report.json").write_text(json.dumps(damaged))
        try:
            write_page(tmp_path)
        except ConfigError as error:
            complaints.append(str(error))

    assert complaints
    assert not any("ConfigError" in said for said in complaints), "said twice"
    assert all(
        "not in the form that Holdfast writes, " in said and said.endswith("edited, or cut?") for said in complaints
    )


def test_report_of_nothing_is_a_wrong_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no report\.json in"):
        report_command([tmp_path])


def test_the_table_on_the_terminal_says_whose_bits_are_the_same():
    table = demo_table(made_up_demo()[0])

    assert table.row_count == 4
    assert [cell.split(" ", 1)[1] for cell in table.columns[-1]._cells] == [
        "reference",
        "[green]same bits[/]",
        "[yellow]other bits[/]",
        "[green]same bits[/]",
    ]


def test_results_of_the_lab_are_refused_in_one_line_where_the_lab_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(pages.DRAWN_BY, "study", "holdfast_not_installed.pages:page_of")
    (tmp_path / "results.json").write_text(json.dumps({"study": "exact", "settings": {}, "rows": [], "claims": []}))

    with pytest.raises(ConfigError, match=r"results.json was written by the lab, .* pip install 'holdfast\[lab\]'"):
        write_page(tmp_path)


def written(folder, **how):
    records, wall_s = made_up_run(**how)
    write_report(records, folder, started=range(4), wall_s=wall_s, seed=0)
    return folder


def test_several_runs_are_shown_in_the_same_axes_and_compared_with_the_first(tmp_path):
    folders = [
        written(tmp_path / "undisturbed", kills=()),
        written(tmp_path / "killed"),
        written(tmp_path / "forward", strategy="forward"),
    ]

    report_command(folders)
    page = (tmp_path / "undisturbed" / "comparison.html").read_text()

    assert "<h1>killed ended with the bits of undisturbed; forward did not</h1>" in page
    assert {"undisturbed", "killed", "forward"} <= set(texts(page)), "the legend"
    assert re.search(r"forward differs from step \d+ on", page)
    assert "run,step,loss" in page
    assert "killed,0,2." in page


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["one", "one"], "a run was given twice"),
        (["one"] * 9, "a comparison takes 2 to 8 runs, got 9"),
        (["one", "gone"], r"there is no report\.json in .*gone"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(names, message, tmp_path):
    written(tmp_path / "one")

    with pytest.raises(ConfigError, match=message):
        report_command([tmp_path / name for name in names])


def test_a_page_of_one_run_has_its_place(tmp_path):
    with pytest.raises(ConfigError, match=r"--out is for the page of several runs; .*index\.html"):
        report_command([written(tmp_path / "one")], out=tmp_path / "page.html")


def test_a_page_may_show_an_argument_that_is_no_text_and_is_utf_8_in_every_locale(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.observe.page.html.draw_results", lambda directory: "· \udcff")
    monkeypatch.setattr("locale.getencoding", lambda: "ascii")

    assert write_page(tmp_path).read_bytes() == "· \\udcff".encode()
