"""The dashboard in the launcher: an action happens at once or never, and no reader or defect holds up the launcher."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.base.clock import SystemClock
from holdfast.config import Settings
from holdfast.errors import ConfigError, StoreLost
from holdfast.launch.control import announce
from holdfast.launch.job import Job
from holdfast.launch.launcher import launch
from holdfast.observe.monitor import dashboard as of_dashboard
from holdfast.observe.monitor.dashboard import Dashboard
from holdfast.observe.monitor.feed import Refused
from holdfast.observe.monitor.token import NAME
from holdfast.records.progress import RunProgress


def a_job(folder, **options):
    settings = Settings(fabric="gloo", workers=2, checkpoint_dir=str(folder / "ck"))
    return Job(script=folder / "train.py", settings=settings, report_dir=folder / "out", **options)


@pytest.fixture
def said():
    return []


@pytest.fixture
def dashboard(tmp_path, said):
    job = a_job(tmp_path, dashboard="127.0.0.1:0")
    (tmp_path / "run").mkdir()
    running = announce(tmp_path / "run", job)
    paths = SimpleNamespace(run_dir=tmp_path / "run", log_dir=tmp_path)
    made = Dashboard(job, paths, running, SystemClock(0.0), said.append)
    yield made
    made.close(1.0)


class Launcher:
    """What the dashboard sees of a launcher; its job has two workers that live, and ``stop`` does what it is told."""

    def __init__(self, stop=lambda: None):
        job = SimpleNamespace(node_rank=0, is_virtual=False)
        self.noted = []
        self.attempt = SimpleNamespace(processes=(0, 1), pids=lambda ranks: {})
        self.run = SimpleNamespace(
            job=job,
            fleet=SimpleNamespace(ranks_of=lambda ranks: ()),
            state=SimpleNamespace(waiting=(), living=lambda: [0, 1]),
        )
        self.bus = SimpleNamespace(progress=RunProgress(), note=self.noted.append)
        self.stopping = SimpleNamespace(request=stop)

    def answer(self, dashboard):
        dashboard.answer(self.attempt, self.run, self.bus, self.stopping)


def outcome(dashboard, launcher, action, values=None):
    """What the launcher says to an action that it finds."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(dashboard.act, action, values or {})
        while not asked.done():
            launcher.answer(dashboard)
        return asked.result()


def test_an_action_that_was_given_up_is_never_carried_out(dashboard, monkeypatch):
    monkeypatch.setattr(of_dashboard, "_ANSWER_S", 0.05)
    launcher, stopped = Launcher(lambda: stopped.append(0)), []

    with pytest.raises(Refused, match=r"did not answer within 0\.05 s, so nothing was done"):
        dashboard.act("stop", {})
    launcher.answer(dashboard)

    assert (stopped, launcher.noted) == ([], [])
    assert "the job stops" in outcome(dashboard, launcher, "stop")
    assert stopped == [0]


def test_a_removed_start_directory_ends_no_job(dashboard, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "cwd", lambda: (_ for _ in ()).throw(FileNotFoundError("getcwd")))

    assert outcome(dashboard, Launcher(), "save") == "requested: save=True"
    assert '"save": true' in (tmp_path / "run" / "asked.jsonl").read_text()


def test_a_defect_is_refused_in_one_line_and_its_traceback_is_displayed_once(dashboard, said):
    def fail():
        raise RuntimeError("first line\nsecond line")

    launcher = Launcher(fail)
    for _ in range(2):
        with pytest.raises(Refused, match=r"^stop failed: RuntimeError: first line$"):
            outcome(dashboard, launcher, "stop")
    assert "\n".join(said).count("Traceback") == 1
    assert said[1] == "the dashboard: stop failed: RuntimeError: first line; training is not affected"


def test_a_lost_store_reaches_the_launcher():
    def fail():
        raise StoreLost("the store is gone")

    requested = of_dashboard._Requested("stop", {})
    made = object.__new__(Dashboard)
    made._look_s, made._requested = float("inf"), of_dashboard.queue.Queue()
    made._requested.put(requested)
    with pytest.raises(StoreLost):
        Launcher(fail).answer(made)
    assert (requested.is_done.is_set(), requested.refused) == (True, "the store is gone")


def test_the_launcher_waits_for_no_reader_of_the_state(dashboard):
    launcher, held, ends = Launcher(), threading.Event(), threading.Event()
    launcher.run.state.waiting = (7,)

    def read():
        with dashboard.live._lock:
            held.set()
            ends.wait(30)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert held.wait(10)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(launcher.answer, dashboard).result(10)
            pool.submit(dashboard.finish, 0, "done").result(10)
    finally:
        ends.set()
    reader.join(10)
    assert 7 not in [row["id"] for row in dashboard.live.full(1.0)["workers"]]
    launcher.answer(dashboard)
    assert 7 in [row["id"] for row in dashboard.live.full(1.0)["workers"]], "it tries again at the next call"
    dashboard.close(1.0)
    assert dashboard.live.full(1.0)["run"]["exit_code"] == 0


@pytest.mark.parametrize("earlier", [False, True])
def test_a_port_in_use_leaves_neither_a_token_nor_an_open_port(tmp_path, monkeypatch, earlier):
    pytest.importorskip("prometheus_client")
    (tmp_path / "train.py").write_text("")
    if earlier:  # of a launcher that died, or still runs
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / NAME).write_text("x" * 40)
        (tmp_path / "out" / NAME).chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        port, metrics = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        threads = set(threading.enumerate())
        with pytest.raises(ConfigError, match=f"--dashboard 127.0.0.1:{port} cannot be opened"):
            launch(a_job(tmp_path, dashboard=str(port), metrics_port=str(metrics), preload=False))

    assert (tmp_path / "out" / NAME).exists() is earlier
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", metrics), 5):
        pytest.fail("the port of the metrics is still open")
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("holdfast-")]
