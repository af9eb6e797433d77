"""What decides a worker's bits beside the script: found out, compared, and told where it differs."""

from __future__ import annotations

import errno
import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from train_kinds import train
from usual_records import started

from holdfast.config import Settings
from holdfast.records.types import WorkerRefused
from holdfast.state import platform_check
from holdfast.state.context import JobContext, LiveSettings, PlatformState
from holdfast.state.platform import FIELDS, between, difference, number_of, promises_bits
from holdfast.state.platform_check import compare_platforms, compare_with_others, cpu_model, platform_of_worker
from holdfast.summary.build import build_report

AVX512 = {"capability": "AVX512", "cpu": "A 1", "torch": "2.0", "threads": "1", "kernels": "77"}
AVX2 = AVX512 | {"capability": "AVX2", "kernels": "88"}


def test_workers_of_one_kind_do_not_differ():
    assert difference({0: AVX512, 1: dict(AVX512), 5: AVX512}) is None
    assert number_of(AVX512) == number_of(dict(reversed(AVX512.items())))
    assert number_of(AVX512) != number_of(AVX2)
    assert 0 <= number_of(AVX2) < 1 << 62  # so that its complement fits, too


def test_a_worker_that_may_open_no_file_does_not_claim_another_cpu(monkeypatch):
    def refuse(_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refuse)
    cpu_model.cache_clear()

    with pytest.raises(OSError, match="Too many open files"):
        platform_of_worker()


@pytest.mark.parametrize(
    ("kinds", "what", "advice"),
    [
        (
            {0: AVX2, 1: AVX512, 2: AVX512},  # the most say what is usual, not the first
            "worker 0 has CPU capability AVX2, the others AVX512",
            "set ATEN_CPU_CAPABILITY=avx2 everywhere",
        ),
        (
            {0: AVX512, 1: AVX512 | {"threads": "4", "kernels": "9"}},
            "worker 1 has number of threads 4, worker 0 1",
            "set OMP_NUM_THREADS to the same number everywhere",
        ),
        (
            {0: AVX512 | {"numpy": "2.4.0"}, 1: AVX512 | {"numpy": "2.4.0"}, 2: AVX512 | {"numpy": "1.26.4"}},
            "worker 2 has NumPy 1.26.4, the others 2.4.0",
            "install the same NumPy everywhere: samples may be drawn with it",
        ),
        (
            {0: AVX512, 1: AVX512, 2: AVX512, 4: AVX512 | {"kernels": "9"}, 5: AVX512 | {"kernels": "9"}},
            "workers 4, 5 have results of the same kernels 9, the others 77",
            FIELDS["kernels"].advice,
        ),
    ],
)
def test_what_differs_is_named_with_what_to_set(kinds, what, advice):
    found = difference(kinds)

    assert (found.what, found.advice) == (what, advice)


def test_what_an_older_version_did_not_write_down_is_no_difference():
    now = AVX512 | {"numpy": "2.4.0", "python": "3.11"}

    assert between(now, AVX512, worker="worker 0 has", others="the others") is None
    assert between(now, AVX2, worker="worker 0 has", others="the others") is not None


def test_a_kind_has_the_versions_with_which_samples_are_drawn(monkeypatch):
    monkeypatch.setattr(numpy, "__version__", "1.0")

    assert platform_of_worker()["numpy"] == "1.0"
    assert platform_of_worker()["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_a_kind_tells_threads_and_flags_of_this_process():
    before, threads = platform_of_worker(), torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads + 1)
    torch.use_deterministic_algorithms(not is_deterministic)
    try:
        after = platform_of_worker()
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(is_deterministic)

    assert {name for name in before if before[name] != after[name]} >= {"threads", "flags"}
    assert before == platform_of_worker()
    assert before.keys() == {name for name in FIELDS if not name.startswith("gpu_")}  # those only of a model on a GPU


@pytest.mark.parametrize(("place", "told"), [("mkldnn", "matmul bf16/none"), ("cuda", "matmul none/tf32")])
def test_a_kind_tells_the_precision_of_each_backend_where_a_script_sets_that(place, told):
    matmul = getattr(torch.backends, place).matmul
    before, precision = platform_of_worker(), matmul.fp32_precision
    matmul.fp32_precision = "bf16" if place == "mkldnn" else "tf32"
    try:
        after = platform_of_worker()
    finally:
        matmul.fp32_precision = precision

    assert told in after["flags"].split(", ")
    assert "matmul highest" in before["flags"].split(", ")
    assert before == platform_of_worker()


@pytest.mark.parametrize(
    ("setting", "promised"),
    [({}, True), ({"strategy": "forward"}, False), ({"split": "even"}, False), ({"batch": "local"}, False)],
)
def test_who_promises_bits(setting, promised):
    settings = Settings(**setting)

    assert promises_bits(settings.strategy, settings.split, settings.batch) is promised


# -- a newcomer


def newcomer(**settings):
    """A world whose members are of another kind than this worker; and what it wrote down."""
    written = []
    world = SimpleNamespace(
        comm=SimpleNamespace(
            local_ranks=(4,), wanted_platform=lambda: '{"platform": {"capability": "AVX512", "threads": "1"}}'
        ),
        platform=PlatformState({"capability": "AVX2", "threads": "1"}),
        settings=Settings(**settings),
        live=LiveSettings.of(Settings(**settings)),
        log=SimpleNamespace(write=written.append),
    )
    world.warn = functools.partial(JobContext.warn, world)
    return world, written


def test_a_newcomer_of_another_kind_ends_and_says_why(capsys):
    world, written = newcomer()

    with pytest.raises(SystemExit) as end:
        compare_with_others(world)

    assert end.value.code == 0  # it is no failure that is answered by starting another one
    assert [type(record) for record in written] == [WorkerRefused]
    assert "worker 4 has CPU capability AVX2, the others AVX512: it may not join" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"require_same_platform": False}, "not exact: worker 4 has CPU capability AVX2, the others AVX512"),
        ({"strategy": "forward"}, "worker 4 has"),
    ],
)
def test_where_any_may_come_or_no_bits_are_promised_it_goes_in_and_says_so(settings, said, capsys):
    world, written = newcomer(**settings)

    compare_with_others(world)

    assert written == []
    assert world.platform.given_up == (said if settings == {"require_same_platform": False} else "")
    assert capsys.readouterr().err.startswith(f"holdfast: worker 4: {said}")


@pytest.mark.parametrize(("theirs", "differs"), [("AVX512", True), ("AVX2", False)])
@pytest.mark.parametrize("settings", [{"require_same_platform": False}, {"strategy": "forward"}])
def test_workers_know_that_platforms_differ_whatever_is_promised(settings, theirs, differs, monkeypatch):
    """Samples that are decoded there may have other bits, and are not compared."""
    world, _ = newcomer(**settings)
    platforms = {3: {"capability": theirs, "threads": "1"}, 4: world.platform.properties}
    mine, other = number_of(platforms[4]), number_of(platforms[3])
    world.is_lead, world.comm.processes, world.comm.members = False, ((3,), (4,)), (3, 4)
    world.comm.maximum = lambda numbers: (max(mine, other), max(~mine, ~other), *numbers[2:])
    monkeypatch.setattr(
        platform_check, "broadcast_bytes", lambda comm, data, rank: json.dumps(platforms[rank]).encode()
    )

    compare_platforms(world)

    assert world.platform.differs == differs


# -- the report


def of(rank, platform, **fields):
    return started(rank, workers=2, platform=platform, **fields)


def kinds_of(*records):
    """What the report says of the kinds."""
    return build_report(records, started=range(2), wall_s=1.0, seed=0)["platforms"]


def test_the_report_says_what_was_given_up_and_who_was_refused():
    refused = WorkerRefused(t_s=1.0, rank=2, step=-1, why="worker 2 has", platform=AVX2)

    found = kinds_of(of(0, AVX512), of(1, AVX2, given_up="not exact: so"), refused)

    assert found["of"] == [{"ranks": [0], "platform": AVX512}, {"ranks": [1], "platform": AVX2}]
    assert found["given_up"] == "not exact: so"
    assert found["refused"] == [{"rank": 2, "t_s": 1.0, "why": "worker 2 has"}]
    assert kinds_of(of(0, AVX512), of(1, AVX512))["given_up"] == ""
    assert kinds_of(of(0, {})) is None


def test_going_on_from_a_checkpoint_of_another_kind_is_said_and_written_down(tmp_path, monkeypatch, capsys):
    given = {"fabric": "virtual", "workers": 2, "checkpoint_dir": str(tmp_path)}
    train(checkpoint_every=2, **given)
    assert capsys.readouterr().err == ""

    elsewhere = AVX2 | {"capability": "VSX"}  # of no machine that runs this test
    monkeypatch.setattr("holdfast.session.session.platform_of_worker", lambda device: elsewhere)
    session = train(resume=True, **given)

    assert session._job.platform.given_up.startswith(
        "not exact: worker 0 has CPU capability VSX, the writer of the checkpoint "
    )
    assert capsys.readouterr().err.count(session._job.platform.given_up) == 1
