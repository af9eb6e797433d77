"""Workers that keep a start of the job from beginning, by signs and times that are made up."""

import pytest

from holdfast.base.phases import Phase
from holdfast.launch.health.starting import WARN_AFTER_S, StartupMonitor, StartupStatus

LIMIT_S = 20.0
ABSENT = StartupStatus()
TRAINS = StartupStatus("forward", pulse=1, beats=5)
WAITS = StartupStatus("connect", pulse=1, beats=2)
STOPPED = StartupStatus("launch", pulse=1, beats=1, is_stopped=True)


def prepares(now_s):
    """The script runs, and has not asked for the others."""
    return StartupStatus("launch", pulse=int(now_s), beats=1)


def trains(now_s):
    return StartupStatus("forward", pulse=int(now_s), beats=int(now_s))


def look_until(end_s, signs, starting=None, **also):
    """Look every second; return what was found, with the time."""
    starting = starting or StartupMonitor(LIMIT_S, "train.py")
    found = []
    for now_s in range(int(end_s) + 1):
        seen = {rank: sign(now_s) if callable(sign) else sign for rank, sign in signs.items()}
        finding = starting.poll(seen, float(now_s), **also)
        found += [(now_s, "stuck", stuck.rank, stuck.reason) for stuck in finding.stuck]
        found += [(now_s, "lost", finding.lost)] if finding.lost else []
        found += [(now_s, "warning", finding.warning)] if finding.warning else []
    return found


def of_kind(found, kind):
    return [one for one in found if one[1] == kind]


def test_a_missing_pulse_alone_is_for_long_no_sign_of_a_stuck_worker():
    """An import that takes minutes keeps Python's lock."""
    silent = StartupStatus("launch", pulse=1, beats=1)
    limit_s = Phase.SILENT_IMPORT.limit_s({"--start-timeout": LIMIT_S})

    assert look_until(limit_s, {0: silent, 1: silent}) == []
    found = look_until(limit_s + 1, {0: silent, 1: prepares})
    assert [one[:3] for one in found] == [(limit_s + 1, "stuck", 0)]
    assert "without a sign of life" in found[0][3]


def test_without_a_heartbeat_that_could_be_missing_an_import_has_no_limit():
    assert look_until(1000, {0: StartupStatus("launch", beats=1), 1: prepares}) == []


def test_a_worker_that_is_not_connected_as_the_others_are_is_given_up():
    connected = StartupStatus("start", pulse=1, beats=3, waits=True)
    found = look_until(60, {0: connected, 1: WAITS, 2: connected})

    assert [one[:3] for one in of_kind(found, "stuck")] == [(LIMIT_S + 1, "stuck", 1)]
    assert of_kind(found, "lost") == []


@pytest.mark.parametrize("sign", [ABSENT, STOPPED], ids=["never started", "stopped"])
def test_a_worker_without_a_sign_of_life_is_given_up_once_at_the_limit(sign):
    found = of_kind(look_until(60, {0: WAITS, 1: sign}), "stuck")

    (one,) = found
    assert one[:3] == (LIMIT_S + 1, "stuck", 1)
    assert one[3].startswith("is stopped for" if sign.is_stopped else "has not started for")


def test_a_worker_that_is_alive_but_keeps_another_waiting_is_given_up_and_told_what_to_set():
    (one,) = of_kind(look_until(60, {0: WAITS, 1: prepares}), "stuck")

    assert one[:3] == (LIMIT_S + 1, "stuck", 1)
    assert "preparing in train.py" in one[3]
    assert "--start-timeout" in one[3]


def test_a_script_takes_as_long_as_it_likes_while_no_worker_waits():
    assert look_until(1000, {0: prepares, 1: prepares}) == []


def test_a_newcomer_that_prepares_keeps_no_worker_waiting_that_trains():
    assert look_until(1000, {0: trains, 1: trains, 2: prepares}) == []


def test_a_worker_of_another_node_may_be_the_one_that_waits():
    """Over gloo a worker that has arrived is connected at once, and waits for the others in training."""
    here, there = StartupMonitor(LIMIT_S, "train.py"), StartupMonitor(LIMIT_S, "train.py")
    found = []
    for now_s in range(60):
        here.poll({0: StartupStatus("start", pulse=now_s, beats=2, waits=True)}, now_s)
        finding = there.poll({1: prepares(now_s)}, now_s, elsewhere=here.keeps_waiting)
        found += [(now_s, stuck.rank) for stuck in finding.stuck]
        found += [(now_s, finding.warning)] if finding.warning else []

    assert [one[0] for one in found] == [WARN_AFTER_S, LIMIT_S + 1]
    assert "rank 1 is still importing or preparing in train.py" in found[0][1]
    assert found[1][1] == 1


def test_a_newcomer_that_prepares_is_left_alone_though_workers_wait_for_each_other():
    stays = StartupStatus("allreduce", pulse=1, beats=5, waits=True)

    assert look_until(1000, {0: stays, 1: stays, 2: prepares}, has_begun=True) == []
    assert of_kind(look_until(60, {0: stays, 2: STOPPED}, has_begun=True), "stuck")


def test_a_standstill_of_the_whole_machine_counts_for_nothing():
    starting = StartupMonitor(LIMIT_S, "train.py")
    look_until(5, {0: WAITS, 1: prepares}, starting)

    assert not starting.poll({0: WAITS, 1: prepares(5)}, 305.0).stuck
    assert not starting.poll({0: WAITS, 1: prepares(6)}, 306.0).stuck


def test_the_limit_follows_what_the_slowest_arrival_took():
    starting = StartupMonitor(LIMIT_S, "train.py")

    found = look_until(200, {0: lambda now_s: WAITS if now_s >= 50 else prepares(now_s), 1: prepares}, starting)

    assert starting.limit_s == 150
    assert [one[:3] for one in of_kind(found, "stuck")] == []
    assert of_kind(look_until(280, {0: WAITS, 1: prepares}, starting), "stuck")


def test_a_stopped_worker_gets_no_more_time_because_others_were_slow():
    starting = StartupMonitor(LIMIT_S, "train.py")
    look_until(60, {0: lambda now_s: WAITS if now_s >= 50 else prepares(now_s)}, starting)
    starting.begin()

    (found,) = of_kind(look_until(60, {0: prepares, 1: STOPPED}, starting), "stuck")
    assert found[:3] == (LIMIT_S + 1, "stuck", 1)


def test_a_worker_that_is_stopped_for_a_moment_in_a_long_import_is_left_alone():
    """As by a tool that reads its stack."""
    stopped, silent = STOPPED, StartupStatus("launch", pulse=1, beats=1)

    found = look_until(100, {0: lambda now_s: stopped if now_s == 90 else silent, 1: prepares})
    assert of_kind(found, "stuck") == []


def test_a_start_in_which_all_wait_to_be_connected_is_lost():
    found = look_until(40, {0: WAITS, 1: WAITS})

    line = "the workers were not connected within 20 s, although all of them had requested it"
    assert of_kind(found, "stuck") == []
    assert of_kind(found, "lost")[0] == (LIMIT_S + 1, "lost", line)


def test_a_stopped_worker_is_to_blame_where_all_wait_to_be_connected():
    found = look_until(40, {0: WAITS, 1: StartupStatus("connect", pulse=1, beats=2, is_stopped=True)})

    assert of_kind(found, "lost") == []
    assert [one[2] for one in of_kind(found, "stuck")] == [1]


def test_a_connected_worker_that_is_stopped_before_it_trains_is_given_up():
    stopped = StartupStatus("start", pulse=1, beats=3, is_stopped=True)

    assert [one[2] for one in of_kind(look_until(40, {0: trains, 1: stopped}), "stuck")] == [1]


def test_one_line_says_for_which_workers_the_others_wait():
    found = of_kind(look_until(19, {0: WAITS, 1: ABSENT, 2: STOPPED, 3: ABSENT}), "warning")

    line = "the job has not begun after 10 s: each of ranks 1, 3 has not started; rank 2 is stopped"
    assert found == [(WARN_AFTER_S, "warning", line)]


def test_nothing_is_said_or_given_up_once_all_are_connected_or_without_a_timeout():
    assert look_until(500, {0: TRAINS, 1: TRAINS}) == []
    assert look_until(500, {0: WAITS, 1: ABSENT}, StartupMonitor(0.0, "train.py")) == []


def test_a_new_start_begins_to_count_anew():
    starting = StartupMonitor(LIMIT_S, "train.py")
    look_until(15, {0: WAITS, 1: ABSENT}, starting)

    starting.begin()

    assert look_until(9, {0: WAITS, 1: ABSENT}, starting) == []
