"""What a terminal and a log show of a job that begins and trains: what it waits for, its pace, its lines."""

from __future__ import annotations

import io
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
from clusters import until
from rich.console import Console
from usual_records import committed
from view_runs import begun

from holdfast.base.formatting import rough, speed, timer
from holdfast.launch.health.starting import StartupStatus, what_workers_wait_for
from holdfast.launch.run_view import RunStatus
from holdfast.observe.terminal import views as live
from holdfast.observe.terminal.views import LiveView, PlainView, _panel, make_view, progress_line
from holdfast.records.activity import current_activity
from holdfast.records.beacon import Beacon, Pulse
from holdfast.records.progress import RunProgress
from holdfast.records.types import JobRestarted

# -- what a job waits for


def waits(*signs, connecting="MPI_Init", node=""):
    return what_workers_wait_for(dict(enumerate(signs)), script="train.py", connecting=connecting, node=node)


IMPORTING = StartupStatus("launch", doing="importing torch")
CONNECTING = StartupStatus("connect")


@pytest.mark.parametrize(
    ("signs", "text"),
    [
        ([StartupStatus()] * 2, "waiting for 2 of 2 workers: starting"),
        ([IMPORTING, IMPORTING, CONNECTING, CONNECTING], "waiting for 2 of 4 workers: importing torch"),
        ([IMPORTING, StartupStatus("launch")] * 2 + [IMPORTING, CONNECTING],
         "waiting for 5 of 6 workers: importing torch (3), running train.py (2)"),
        ([CONNECTING, CONNECTING, StartupStatus("start")], "waiting for 2 of 3 workers: MPI_Init"),
        ([StartupStatus("start")], "waiting for the worker: preparing the first step"),
        ([StartupStatus("forward", doing="loading data"), StartupStatus("forward")],
         "waiting for 2 of 2 workers: loading data (1), the first step (1)"),
        ([CONNECTING, StartupStatus("start", is_stopped=True)], "waiting for 1 of 2 workers: stopped by a signal"),
        ([], ""),
    ],
)  # fmt: skip
def test_a_job_says_which_workers_it_waits_for_and_what_they_do(signs, text):
    assert waits(*signs) == text


def test_on_several_nodes_the_number_of_workers_is_that_of_the_node():
    assert waits(CONNECTING, connecting="the rendezvous of the workers", node=" of this node") == (
        "waiting for the worker: the rendezvous of the workers"
    )
    assert waits(CONNECTING, IMPORTING, node=" of this node").startswith("waiting for 1 of 2 workers of this node: ")


def test_what_a_worker_does_is_no_step_of_its_start():
    """A worker whose imports change, and nothing else, does not look as if it made progress in the rendezvous."""
    assert StartupStatus("connect", doing="importing mpi4py") == StartupStatus("connect")


# -- what a process is busy with


def test_an_import_is_seen_by_its_first_name(monkeypatch):
    module = ModuleType("heavy_package.models")
    module.__spec__ = SimpleNamespace(_initializing=True)
    assert current_activity() == ""

    monkeypatch.setitem(sys.modules, "heavy_package.models", module)

    assert current_activity() == "importing heavy_package"


def test_a_module_that_loads_itself_lazily_is_not_loaded_by_being_looked_at(monkeypatch):
    class Lazy(ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(f"{name} was looked up")

    monkeypatch.setitem(sys.modules, "lazy_package", Lazy("lazy_package"))

    assert current_activity() == ""


def test_a_module_that_answers_strangely_ends_no_pulse(monkeypatch):
    class Strange:
        def __getattr__(self, name):
            raise RuntimeError(name)

    module = ModuleType("strange_package")
    module.__spec__ = Strange()
    monkeypatch.setitem(sys.modules, "strange_package", module)

    assert current_activity() == ""


def test_the_main_thread_is_seen_to_load_data():
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            looker = threading.Thread(target=lambda: seen.append(current_activity()))
            looker.start()
            looker.join()
            return index

    seen = []
    list(DataLoader(Slow()))

    assert seen == ["loading data"]


def test_the_beacon_says_what_a_worker_does_until_its_first_step(tmp_path, monkeypatch):
    activity = SimpleNamespace(text="importing torch")
    monkeypatch.setattr("holdfast.records.beacon.current_activity", lambda: activity.text)
    beacon = Beacon(tmp_path / "beacon")
    beacon.mark("launch", -1)
    Pulse(beacon, 0.01)

    def await_text(text):
        until(lambda: Beacon.read(tmp_path / "beacon").doing == text, f"{text!r} in the beacon")

    await_text("importing torch")
    activity.text = "importing " + "x" * 50
    await_text("importing " + "x" * 30)
    activity.text = "a"
    await_text("a")
    beacon.mark("optimizer", 0)
    await_text("")


# -- the pace


def commits(*steps):
    return [committed(step, t_s=t_s) for step, t_s in steps]


def pace_of(*steps, planned=0):
    pace = RunProgress()
    for record in (*begun(0.0, [0], steps_planned=planned), *commits(*steps)):
        pace.apply(record)
    return pace


def test_the_pace_is_that_of_the_newest_steps():
    slow, fast = [(step, 1.0 * step) for step in range(5)], [(step, 4 + 0.1 * (step - 4)) for step in range(5, 80)]

    assert pace_of(*slow).steps_per_s == pytest.approx(1.0)
    assert pace_of(*slow, *fast).steps_per_s == pytest.approx(10.0)
    assert pace_of(*slow, *fast, planned=130).left_s == pytest.approx(5.0)


def test_one_long_recovery_hardly_changes_what_is_left_and_repeated_checkpoints_do():
    steps = [(step, 0.1 * step + (60.0 if step > 20 else 0.0)) for step in range(40)]
    saves = [(step, 0.1 * step + 0.9 * (step // 10)) for step in range(41)]

    assert 0.1 <= pace_of(*steps).step_s < 0.13  # with the whole recovery it would be 1.6
    assert pace_of(*saves).step_s == pytest.approx(0.19, rel=0.01)


def test_of_a_step_that_several_workers_report_the_first_counts():
    assert pace_of((0, 0.0), (0, 0.01), (1, 1.0), (1, 1.5), (2, 2.0)).steps_per_s == pytest.approx(1.0)


def test_a_restart_costs_no_step_its_time():
    pace = pace_of((0, 0.0), (1, 1.0), (2, 2.0))
    again = JobRestarted(t_s=3.0, rank=-1, step=2, restart=1, workers=(0,), reason="all are lost")
    for record in (again, *begun(89.0, [0], 1), *commits((1, 90.0), (2, 91.0), (3, 92.0))):
        pace.apply(record)

    assert pace.steps_per_s == pytest.approx(1.0)


@pytest.mark.parametrize("steps", [(), ((5, 1.0),), ((5, 1.0), (3, 2.0)), ((5, 1.0), (6, 1.0))])
def test_without_two_steps_that_took_time_there_is_no_pace(steps):
    assert pace_of(*steps).steps_per_s is None
    assert not pace_of(*steps, planned=10).left_s


# -- its words


@pytest.mark.parametrize(
    ("value", "words", "clock"),
    [(0.2, "0 s", "0:00"), (59.2, "59 s", "0:59"), (125.0, "2 min 5 s", "2:05"), (7300.0, "2 h 1 min", "2:01:40"),
     (3 * 86400.0 + 4000, "3 d 1 h", "73:06:40")],
)  # fmt: skip
def test_durations_are_whole(value, words, clock):
    assert (rough(value), timer(value)) == (words, clock)


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, ""), (9.87654, "9.88 steps/s"), (1234.5, "1,234 steps/s"), (0.08, "12.5 s a step"), (1.0, "1 steps/s")],
)
def test_a_speed_below_one_is_a_duration(value, words):
    assert speed(value) == words


TRAINING = RunStatus(
    step=120, planned=400, alive={0: 7, 2: 9}, metrics={"loss": 0.5}, workers=3, workers_alive=2, elapsed_s=65.4,
    steps_per_s=9.8, left_s=28.6,
)  # fmt: skip


def test_the_line_of_a_log_says_how_far_the_run_is():
    assert progress_line(TRAINING) == (
        "step 120 of 400 after 1 min 5 s, 9.8 steps/s, about 29 s left, loss 0.5, 2 of 3 workers"
    )
    starting = RunStatus(alive={}, metrics={}, elapsed_s=31.0, waits_for="waiting for node 1: rendezvous, 1 of 2 nodes")
    assert progress_line(starting) == "after 31 s: waiting for node 1: rendezvous, 1 of 2 nodes"
    assert progress_line(RunStatus(step=7, alive={}, metrics={})) == "step 7 after 0 s"


def test_without_a_terminal_there_is_a_line_every_half_minute_and_none_of_a_short_run(monkeypatch, capsys):
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(live.time, "monotonic", lambda: clock.now_s)
    view, printed = PlainView(), {}

    for clock.now_s in range(100, 200):
        view.show(TRAINING)
        if line := capsys.readouterr().err:
            printed[clock.now_s] = line

    assert list(printed) == [130, 160, 190]
    assert set(printed.values()) == {f"holdfast: {progress_line(TRAINING)}\n"}


# -- the terminal


def drawn(status, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(_panel(status, "lost rank 1; step 40 is computed again with ranks 0, 2", width))
    return console.file.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [18, 20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width):
    waiting = RunStatus(alive={}, metrics={}, waits_for="waiting for 2 of 4 workers: importing torch")
    lines = [*drawn(TRAINING, width), *drawn(waiting, width)]

    assert max(map(len, lines)) <= width
    assert "120/400" in "".join(line.strip() for line in lines)


def test_what_a_job_waits_for_is_folded_on_a_narrow_terminal_and_not_cut():
    waiting = RunStatus(alive={}, metrics={}, waits_for="waiting for 2 of 4 workers: importing torch")

    said = " ".join(" ".join(drawn(waiting, 30)).split())
    assert said.startswith("0:00 waiting for 2 of 4 workers: importing torch last")


def test_the_panel_has_all_that_is_known():
    text = "\n".join(drawn(TRAINING, 100))

    for part in (
        "30 %  120/400",
        "1:05  9.8 steps/s  about 29 s left  loss 0.5",
        "workers 2 of 3  0 (pid 7)  2 (pid 9)",
    ):
        assert part in text
    assert "━" in text
    assert "last    lost rank 1" in text


@pytest.mark.parametrize(("term", "kind"), [("xterm", LiveView), ("dumb", PlainView), ("unknown", PlainView)])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(term, kind, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", term)

    assert type(make_view(io.StringIO())) is kind
