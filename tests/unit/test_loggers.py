"""Each committed step is logged once: in any order of records, with failing logs, and however often the launcher dies."""

import contextlib
import dataclasses
import itertools
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import usual_records
from usual_records import recovered

from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.launch.command_line import command_line
from holdfast.launch.job import Job
from holdfast.observe.loggers.leftovers import Leftovers, RunRecords, mark_run
from holdfast.observe.loggers.log_to import LoggerDisplay
from holdfast.observe.loggers.mlflow import metric_name
from holdfast.observe.loggers.recoveries import RecoveryTrace
from holdfast.observe.loggers.sink import GAP_S, MOST_UNWRITTEN, LoggerSink
from holdfast.observe.loggers.steps import MOST_WAITING
from holdfast.observe.loggers.targets import LOGGERS, parse_targets
from holdfast.records.files import FileRecorder
from holdfast.records.paths import records_path
from holdfast.records.queued import NotTaken
from holdfast.records.types import (
    FailureSeen,
    JobRestarted,
    WorkerEnded,
)

KINDS = tuple(LOGGERS)


def commit(step, rank=0, **metrics):
    return usual_records.committed(step, rank=rank, metrics=metrics or {"loss": step / 8, "mean": float(step)})


def start_at(step, t_s=0.0):
    return usual_records.started(step=step, t_s=t_s)


def finished(rank=0, **metrics):
    return usual_records.finished(rank, metrics=metrics)


class Log:
    """What a store keeps of a log: ``kept`` outlives the launcher. A batch may be torn at any value."""

    def __init__(self):
        self.kept = []

    def last(self):
        found = {}
        for step, name, _ in self.kept:
            found[name] = max(step, found.get(name, -1))
        return found


class Logger:
    """Writes value by value; ``fails`` says of each value whether the store fails before it."""

    name, shows = "test", frozenset()

    def __init__(self, log, fails=lambda: False):
        self._log, self._fails, self.is_done = log, fails, None

    def open(self):
        return self._log.last()

    def write(self, steps):
        for step in steps:
            for name, value in step.metrics.items():
                if self._fails():
                    raise OSError("gone")
                self._log.kept.append((step.step, name, value))

    def close(self, *, is_done):
        self.is_done = is_done


class Records(RunRecords):
    """The record files of a run, without files."""

    found = ()

    def read(self):
        return list(self.found)


def run_of(records=()):
    run = Records(run_dir=Path("/nowhere"), epoch_s=0.0)
    object.__setattr__(run, "found", tuple(records))
    return run


def values_of(steps):
    return [(step, name, value) for step in steps for name, value in (("loss", step / 8), ("mean", float(step)))]


def test_steps_are_logged_in_order_and_once():
    log, logger = Log(), None
    logger = Logger(log)
    sink = LoggerSink(logger, run_of())

    sink.take([start_at(0), commit(0), commit(2), commit(2, rank=1)])
    assert log.kept == values_of([0])
    sink.take([commit(1), commit(1, rank=1), start_at(1), commit(1), commit(2), commit(3)])
    sink.close(9.0)

    assert log.kept == values_of(range(4))
    assert logger.is_done is False


def test_the_first_value_of_a_step_stands_also_where_a_job_resumes_into_an_empty_log():
    log = Log()
    sink = LoggerSink(Logger(log), run_of())

    sink.take([start_at(7), commit(7, loss=1.0)])
    sink.take([commit(7, loss=2.0), commit(8, loss=3.0)])

    assert log.kept == [(7, "loss", 1.0), (8, "loss", 3.0)]


def test_the_value_of_an_earlier_start_stands():
    log = Log()
    sink = LoggerSink(Logger(log), run_of(), [run_of([commit(1, loss=1.0), commit(2, loss=1.0)])])

    sink.take([start_at(2), commit(2, loss=2.0), commit(3, loss=2.0)])

    assert log.kept == [(1, "loss", 1.0), (2, "loss", 1.0), (3, "loss", 2.0)]


def test_metrics_after_training_belong_to_the_last_step_and_are_logged_once():
    log = Log()
    for _ in range(2):  # the second start finds nothing left to do
        sink = LoggerSink(logger := Logger(log), run_of())
        sink.take([start_at(0), commit(0, loss=1.0), finished(rank=1, loss=1.0, accuracy=0.5)])
        sink.take([finished(rank=0, loss=1.0), finished(rank=0, loss=1.0, accuracy=0.75)])
        sink.close(9.0)

    assert log.kept == [(0, "loss", 1.0), (0, "accuracy", 0.75)]
    assert logger.is_done is True


def test_a_step_that_never_arrives_is_read_from_the_record_files():
    log, now = Log(), [0.0]
    sink = LoggerSink(Logger(log), run_of(map(commit, range(6))), now_s=lambda: now[0])

    sink.take([start_at(0), commit(0), commit(4)])
    now[0] = 0.9 * GAP_S
    sink.take([])
    assert log.kept == values_of([0])
    now[0] = 1.1 * GAP_S
    sink.take([commit(5)])

    assert log.kept == values_of(range(6))


def test_a_step_without_any_record_is_left_out_and_counted():
    log = Log()
    sink = LoggerSink(Logger(log), run_of([commit(0), commit(4)]))
    sink.take([start_at(0), commit(0), commit(4)])

    with pytest.raises(NotTaken, match="3 steps from step 1 on have no record") as found:
        sink.close(9.0)

    assert log.kept == values_of([0, 4])
    assert found.value.dropped == 3


def test_while_a_log_cannot_be_written_steps_wait_and_nothing_is_repeated():
    log, fails = Log(), iter([False, False, False, True, True, True])
    sink = LoggerSink(Logger(log, lambda: next(fails, False)), run_of())
    sink.take([start_at(0), commit(0)])

    for step in (1, 2, 3):
        with pytest.raises(NotTaken, match="OSError: gone") as found:
            sink.take([commit(step)])
        assert found.value.dropped == 0
    assert sink.pause_s > 1
    sink.take([commit(4)])

    assert log.kept == values_of(range(5))
    assert sink.pause_s == 1


def test_what_could_not_be_written_at_the_end_is_counted():
    log = Log()
    sink = LoggerSink(logger := Logger(log, lambda: True), run_of())
    for records in ([start_at(0), commit(0), commit(1)], [commit(2)]):
        with pytest.raises(NotTaken):
            sink.take(records)

    with pytest.raises(NotTaken, match="gone") as found:
        sink.close(9.0)

    assert (found.value.dropped, log.kept, logger.is_done) == (3, [], False)


def test_an_error_while_the_log_is_closed_does_not_hide_what_is_lost():
    class Gone(Logger):
        def close(self, *, is_done):
            raise ConnectionError("no route")

    for fails, dropped, why in ((True, 2, "OSError: gone; "), (False, 0, "^")):
        sink = LoggerSink(Gone(Log(), lambda fails=fails: fails), run_of())
        with contextlib.suppress(NotTaken):
            sink.take([start_at(0), commit(0), commit(1)])
        assert sink.num_held == dropped

        with pytest.raises(NotTaken, match=f"{why}the log was not closed: ConnectionError: no route") as found:
            sink.close(9.0)
        assert found.value.dropped == dropped


def test_more_steps_than_may_wait_are_read_from_the_record_files():
    log, steps = Log(), range(MOST_WAITING + 50)
    is_down = [True]
    sink = LoggerSink(Logger(log, lambda: is_down[0]), run_of(map(commit, steps)))
    with pytest.raises(NotTaken):
        sink.take([start_at(0), commit(0)])
    with pytest.raises(NotTaken):
        sink.take([commit(step) for step in steps[1:]])

    is_down[0] = False
    sink.close(9.0)

    assert log.kept == values_of(steps)


def test_a_write_that_always_fails_is_repeated_ever_more_rarely_with_few_steps():
    class Refusing(Logger):
        tried = ()

        def write(self, steps):
            self.tried = (*self.tried, len(steps))
            raise ValueError("a name")

    sink = LoggerSink(logger := Refusing(Log()), run_of())
    pauses = []
    for start in range(0, 5000, 500):
        with pytest.raises(NotTaken, match="a name"):
            sink.take([start_at(0), *map(commit, range(start, start + 500))])
        pauses.append(sink.pause_s)

    assert logger.tried == (500, *[MOST_UNWRITTEN] * 9)
    assert pauses == [2, 4, 8, 16, 32, *[60] * 5]


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("acc@1", "acc_1"),
        ("val/loss: a-b.c", "val/loss: a-b.c"),
        ("a//b", "a__b"),
        ("a/../b", "a_.._b"),
        ("/a", "_a"),
        ("..", "_."),
        ("a/", "a_"),
        ("", "_"),
        (300 * "x", 250 * "x"),
    ],
)
def test_a_name_that_mlflow_refuses_is_changed(name, there):
    assert metric_name(name) == there


class Launchers:
    """A random history of a job: leads die, the job is started again, the launcher is killed and resumes.

    Workers write records to files, which outlive a launcher. The launcher reads each file from time to time. A log may
    fail at any value, and a launcher may die within a write.
    """

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.log = Log()
        self.files = {}
        self.runs = []
        self.deaths = 0

    def play(self, steps):
        step, saved = 0, 0
        while True:
            self.files = {"start": [start_at(step)]}
            lead, last = 0, None
            sink, read = self._sink(), dict.fromkeys(("start", 0, 1, 2, 3), 0)
            is_alive = True
            while step < steps and is_alive:
                self.files.setdefault(lead, []).append(commit(step, rank=lead))
                last, step = commit(step), step + 1
                if self.rng.random() < 0.3:
                    saved = step
                if self.rng.random() < 0.2:  # the next lead repeats the last step
                    lead += 1
                    self.files.setdefault(lead, []).append(dataclasses.replace(last, rank=lead))
                if self.rng.random() < 0.1:  # a restart of the whole job
                    step, lead = saved, lead + 1
                if self.rng.random() < 0.5:
                    is_alive = self._poll(sink, read)
            if is_alive and self._poll(sink, read, last=True):
                return
            self.deaths += 1
            self.runs.append(run_of(itertools.chain.from_iterable(self.files.values())))
            step = saved

    def _sink(self):
        return LoggerSink(Logger(self.log, self._fails), LiveRecords(self), tuple(self.runs))

    def _fails(self):
        drawn = self.rng.random()
        if drawn < 0.02:
            raise Killed
        return drawn < 0.1

    def _poll(self, sink, read, *, last=False):
        """Read some files, as far as they are written, in any order; return whether the launcher is alive."""
        new = []
        for name, records in self.rng.sample(sorted(self.files.items(), key=str), len(self.files)):
            if last or self.rng.random() < 0.6:
                new += records[read.get(name, 0) :]
                read[name] = len(records)
        try:
            for end in range(20 if last else 1):
                with contextlib.suppress(Waits):
                    take(sink, new if not end else [])
            if last:
                sink.close(99.0)
        except NotTaken:
            return False
        except Killed:
            return False
        return True


class Waits(Exception):
    """The log fails; its steps are kept."""


def take(sink, records):
    try:
        sink.take(records)
    except NotTaken as error:
        if error.dropped:
            raise
        raise Waits from error


class Killed(BaseException):
    """The launcher is killed."""


class LiveRecords:
    """The record files of the run that lasts."""

    epoch_s, run_dir = 0.0, Path("/nowhere")

    def __init__(self, history):
        self._history = history

    def read(self):
        return list(itertools.chain.from_iterable(self._history.files.values()))


def test_any_history_logs_each_value_once_and_in_order():
    deaths = 0
    for seed in range(60):
        history = Launchers(seed)
        history.play(30)

        assert sorted(history.log.kept) == values_of(range(30)), seed
        for name in ("loss", "mean"):
            steps = [step for step, found, _ in history.log.kept if found == name]
            assert steps == sorted(steps), seed
        deaths += history.deaths
    assert deaths > 60


def test_a_gap_in_what_is_read_back_would_be_found(monkeypatch):
    """A negative control: without the records of earlier launchers, steps are lost."""
    lost = 0
    for seed in range(60):
        history = Launchers(seed)
        monkeypatch.setattr(history, "_sink", lambda h=history: LoggerSink(Logger(h.log, h._fails), LiveRecords(h)))
        try:
            history.play(30)
        except AssertionError:
            lost += 1
            continue
        lost += sorted(history.log.kept) != values_of(range(30))

    assert lost > 10


# --- records of earlier launchers


def write_run(folder, job, steps):
    folder.mkdir()
    mark_run(folder, job, 7.0)
    recorder = FileRecorder(records_path(folder, "0"))
    for step in steps:
        recorder.write(commit(step))


def test_records_of_a_dead_launcher_are_found_and_kept(tmp_path, monkeypatch):
    from holdfast.base.temporary import TemporaryFolder, sweep

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = TemporaryFolder.make("holdfast-1-", tmp_path)
    mark_run(mine.path, "/jobs/a", 7.0)
    FileRecorder(records_path(mine.path, "0")).write(commit(3))
    marker = mine.path / ".holdfast-temporary"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"started": 1}))  # of a process that has ended
    os.close(mine.lock)
    write_run(tmp_path / "holdfast-2-x", "/jobs/b", [5])

    found = Leftovers("/jobs/a")
    sweep("holdfast-", tmp_path)
    assert [(run.epoch_s, [record.step for record in run.read()]) for run in found.runs] == [(7.0, [3])]
    found.close()
    sweep("holdfast-", tmp_path)

    assert not mine.path.exists()
    assert found.runs[0].read() == []
    assert Leftovers("").runs == ()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"job": "/jobs/a"}', '{"job": "/jobs/a", "epoch_s": "x"}', "\xff"])
def test_a_damaged_mark_is_not_one(tmp_path, monkeypatch, text):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "holdfast-1-x").mkdir()
    (tmp_path / "holdfast-1-x" / "logged.json").write_text(text, encoding="latin-1")

    assert Leftovers("/jobs/a").runs == ()


# --- options


def job(*targets, **settings):
    return Job(script=Path("s.py"), settings=Settings(**settings), log_to=targets)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "tensorbord:x",
            r"--log-to must be one of tensorboard:DIR, wandb\[:PROJECT\], mlflow\[:URI\] or otel\[:ENDPOINT\], got 'tensorbord:x'",
        ),
        ("tensorboard", "--log-to tensorboard needs a folder: --log-to tensorboard:DIR"),
        ("tensorboard:", "--log-to tensorboard needs a folder"),
    ],
)
def test_a_wrong_target_is_refused(target, message):
    with pytest.raises(ConfigError, match=message):
        parse_targets([target])


def test_a_target_is_given_once():
    with pytest.raises(ConfigError, match="--log-to wandb is given twice"):
        parse_targets(["wandb", "tensorboard:x", "wandb"])


@pytest.mark.parametrize("kind", KINDS)
def test_without_its_package_the_message_says_how_to_get_it(monkeypatch, kind):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=rf"--log-to {kind} needs a package: pip install 'holdfast\[{kind}\]'"):
        LoggerDisplay().check(job(f"{kind}:x"))


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


@pytest.mark.usefixtures("installed")
def test_a_folder_with_the_log_of_another_run_and_a_target_that_cannot_be_are_refused(tmp_path):
    (tmp_path / "events.out.tfevents.1.host.1.0").touch()
    LoggerDisplay().check(job(f"tensorboard:{tmp_path}", resume=True, checkpoint_dir="c"))

    for target, line in (
        ("tensorboard:/dev/null/x", "--log-to tensorboard:/dev/null/x: the folder /dev/null/x cannot be written: "),
        ("otel:localhost", "--log-to otel:localhost: the endpoint must be a URL, such as otel:http://"),
    ):
        with pytest.raises(ConfigError, match=line):
            LoggerDisplay().check(job(target))
    with pytest.raises(ConfigError, match="has the event files of an earlier run; continue that run with --resume, or"):
        LoggerDisplay().check(job(f"tensorboard:{tmp_path}"))


THREE = "holdfast://127.0.0.1:29400,127.0.0.1:29401,127.0.0.1:29402"


def node(rank, folder, **settings):
    given = job(f"tensorboard:{folder}", **settings)
    return dataclasses.replace(given, nnodes=3, node_rank=rank, rdzv=THREE)


def opened(job, run_dir, say, *, is_late=False):
    paths = SimpleNamespace(run_dir=run_dir)
    view, fleet = SimpleNamespace(print_line=say), SimpleNamespace(is_late=is_late)
    return LoggerDisplay().open(SimpleNamespace(job=job, paths=paths, clock=None, view=view, fleet=fleet))


@pytest.mark.usefixtures("installed")
def test_a_node_that_comes_back_to_its_log_is_not_refused(tmp_path):
    (tmp_path / "events.out.tfevents.1.host.1.0").touch()
    for rank in range(3):
        LoggerDisplay().check(node(rank, tmp_path))
    run_id, said = tmp_path / ".holdfast-run-id", []
    run_id.write_text("first\n")
    back = node(0, tmp_path, checkpoint_dir=str(tmp_path))

    assert opened(back, tmp_path, said.append, is_late=True) == []
    assert (run_id.read_text(), said) == (
        "first\n",
        ["nothing is logged until the job is resumed: it had begun before this launcher arrived (--log-to)"],
    )
    assert opened(node(1, tmp_path), tmp_path, print, is_late=True) == []
    with pytest.raises(ConfigError, match="has the event files of an earlier run"):
        opened(back, tmp_path, print)


@pytest.mark.usefixtures("installed")
def test_a_job_without_a_key_for_wandb_is_refused(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.chdir(tmp_path)
    line = "--log-to wandb:x: W&B has no API key: run wandb login, or set WANDB_API_KEY"
    with pytest.raises(ConfigError, match=line):
        LoggerDisplay().check(job("wandb:x"))
    LoggerDisplay().check(dataclasses.replace(job("wandb:x"), nnodes=2, node_rank=1))

    for name, value in (("WANDB_API_KEY", "x"), ("WANDB_MODE", "offline")):
        with monkeypatch.context() as given:
            given.setenv(name, value)
            LoggerDisplay().check(job("wandb:x"))
    for file, text in (
        ("netrc", "machine api.wandb.ai login user password x"),
        (".config/wandb/settings", "[default]\nmode = offline\n"),
    ):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        LoggerDisplay().check(job("wandb:x"))
        path.write_text("nonsense")
        with pytest.raises(ConfigError, match="no API key"):
            LoggerDisplay().check(job("wandb:x"))


@pytest.mark.parametrize(
    ("target", "variable", "what"),
    [
        ("mlflow", "", "MLflow's default place is a database"),
        ("mlflow:sqlite:///m.db", "", "sqlite:///m.db is a database"),
        ("mlflow", "postgresql+psycopg2://host/m", "postgresql.psycopg2://host/m is a database"),
        ("mlflow:mlruns", "sqlite:///m.db", None),
        ("mlflow", "http://host:5000", None),
    ],
)
def test_a_database_of_mlflow_needs_the_full_package(monkeypatch, target, variable, what):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "sqlalchemy" else name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", variable)

    line = f"{what}, which needs the full package: pip install mlflow; or name a folder"
    with pytest.raises(ConfigError, match=line) if what else contextlib.nullcontext():
        LoggerDisplay().check(job(target))


@pytest.mark.usefixtures("installed")
def test_a_run_whose_checkpoints_are_remote_needs_an_id_to_resume(monkeypatch):
    remote = job("mlflow", resume=True, checkpoint_dir="s3://bucket/run")
    line = "--log-to mlflow cannot find out which run to resume.*: set HOLDFAST_RUN_ID to"
    with pytest.raises(ConfigError, match=line):
        LoggerDisplay().check(remote)

    monkeypatch.setenv("HOLDFAST_RUN_ID", "run-7")
    LoggerDisplay().check(remote)
    monkeypatch.setenv("HOLDFAST_RUN_ID", "run 7")
    with pytest.raises(ConfigError, match="HOLDFAST_RUN_ID must have 1 to 64 letters, digits, - and _, got 'run 7'"):
        LoggerDisplay().check(remote)


def test_the_command_that_resumes_logs_to_the_same_targets():
    assert "--log-to tensorboard:runs --log-to wandb" in command_line(job("tensorboard:runs", "wandb"))


def test_nothing_is_looked_for_without_a_logger(tmp_path):
    given = job(resume=True, checkpoint_dir=str(tmp_path))

    loggers = LoggerDisplay()
    loggers.prepare(given)
    assert loggers._earlier.runs == ()
    assert opened(given, tmp_path, print) == []
    assert list(tmp_path.iterdir()) == []


# --- recoveries


LOST = {"lost": (0,), "survivors": (1, 2), "redone_steps": 1}


def spans_of(records, end_s=20.0):
    trace = RecoveryTrace()
    for record in records:
        trace.take(record)
    return [*trace.settle(end_s), *trace.close(end_s)]


def test_a_recovery_is_a_span_whose_parts_follow_each_other():
    records = [start_at(0, 1.0), *(commit(step) for step in (2, 3))]
    records += [
        WorkerEnded(t_s=3.5, rank=0, step=4, exit_code=-9, pid=1),
        FailureSeen(t_s=4.5, rank=1, step=4, phase="allreduce"),
    ]
    records += [
        recovered(1, t_s=5.5, step=4, **LOST, times_s={"Shrink": 0.25}),
        dataclasses.replace(commit(4), t_s=6.0),
    ]

    (span,) = spans_of(records)

    assert spans_of([start_at(0, 1.0), *map(commit, range(2, 9))]) == []
    assert (span.begin_s, span.end_s) == (4.0, 5.5), "until 4.0 survivors computed their slices"
    assert [(part.name, part.begin_s, part.end_s) for part in span.parts] == [
        ("detection", 4.0, 4.5),
        ("agreement", 4.5, 5.25),
        ("rebuild", 5.25, 5.5),
    ]
    assert span.attributes["holdfast.lost"] == (0,)
    assert span.attributes["holdfast.step"] == 4
    assert span.attributes["holdfast.decision"] == "redo"
    assert span.redone_s == pytest.approx(1.0)


def test_a_restart_of_the_job_is_one_span():
    records = [start_at(0, 1.0), commit(2), commit(3)]
    records += [WorkerEnded(t_s=3.5, rank=0, step=4, exit_code=-9, pid=1)]
    records += [JobRestarted(t_s=4.0, rank=-1, step=4, restart=1, workers=(0,), reason="rank 0 killed")]
    records += [start_at(2, 6.0), dataclasses.replace(commit(2), t_s=7.0)]

    (span,) = spans_of(records)

    assert span.end_s == 6.0
    assert [part.name for part in span.parts][-1] == "restart"
    assert sum(part.end_s - part.begin_s for part in span.parts) == pytest.approx(span.end_s - span.begin_s)
    assert span.attributes["holdfast.decision"] == "restart"
    assert span.attributes["holdfast.restart"] == 1
