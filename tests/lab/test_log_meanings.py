"""What a log's rows and words mean: unknown words are refused, not dropped or counted as failures."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast_lab.simulate.logs.options import parse_words
from holdfast_lab.simulate.logs.reading import FailureLog, read_log

BEGIN = datetime(2025, 3, 1, tzinfo=UTC)


def read(folder: Path, text: str, *words: str, is_of_job: bool = False) -> FailureLog:
    path = folder / "log.csv"
    path.write_text(text)
    return read_log(path, replace(parse_words(words), is_of_job=is_of_job))


def at(hours: float) -> str:
    return (BEGIN + timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%S")


def mean_h(log: FailureLog) -> float:
    return log.lifetimes.total_s / log.lifetimes.failures / 3600


def jobs(states: list[str], header: str = "Id|Elapsed|State") -> tuple[str, float]:
    """Return jobs of random lengths with these states, and the hours of all."""
    draw = random.Random(4)
    seconds = [int(draw.expovariate(1 / 7200)) + 1 for _ in states]
    rows = [
        f"{k}|{s // 3600:02}:{s % 3600 // 60:02}:{s % 60:02}|{state}"
        for k, (s, state) in enumerate(zip(seconds, states, strict=True))
    ]
    return "\n".join([header, *rows]), sum(seconds) / 3600


SLURM = (
    ["NODE_FAIL"] * 7 + ["COMPLETED"] * 60 + ["TIMEOUT", "PENDING", "CANCELLED by 1001", "CANCELLED by 7", "CANCELLED+"]
)
LSF = ["EXIT"] * 7 + ["DONE"] * 60 + ["RUN", "PEND", "SSUSP", "PSUSP", "USUSP"]
TRUTH = ["1.0"] * 7 + ["0.0"] * 65
HELIOS = ["FAILED"] * 7 + ["Pass"] * 30 + ["succeeded"] * 35


@pytest.mark.parametrize("states", [SLURM, LSF, TRUTH, HELIOS], ids=["slurm", "lsf", "truth", "helios"])
@pytest.mark.parametrize("header", ["Id|Elapsed|State", "Id|walltime|Status"])
def test_only_states_of_failures_are_failures(tmp_path, states, header):
    text, hours = jobs(states, header)

    assert mean_h(read(tmp_path, text)) == pytest.approx(hours / 7)


def test_the_line_counts_what_was_taken_for_what_by_word(tmp_path):
    text, _ = jobs(SLURM)

    assert (
        "ended in 'State' (failed: NODE_FAIL 7, censored: COMPLETED 60, CANCELLED by ... 2, TIMEOUT 1, PENDING 1, "
        "CANCELLED+ 1); 72 rows used"
    ) in read(tmp_path, text).said[0]


def test_one_unknown_state_is_refused_and_can_be_given_a_meaning(tmp_path):
    text, hours = jobs([*SLURM, "GRES_LOST by root", "gres_lost", "ON FIRE"])

    with pytest.raises(
        ConfigError, match=r"'State' mean: GRES_LOST by ... 1, gres_lost 1, ON FIRE 1; known: failed: NODE"
    ) as refused:
        read(tmp_path, text)
    assert "--log failed=WORD,..." in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="mean: ON FIRE 1;"):
        read(tmp_path, text, "failed=GRES_LOST")
    assert mean_h(read(tmp_path, text, "failed=GRES_LOST", "censored=on_fire")) == pytest.approx(hours / 9)
    assert mean_h(read(tmp_path, text, "censored=GRES_LOST,on fire")) == pytest.approx(hours / 7)
    assert mean_h(read(tmp_path, text, "failed=*")) == pytest.approx(hours / 10)
    assert len(read(tmp_path, text, "ignored=*").lifetimes) == 72


def test_exit_statuses_say_which_jobs_failed_and_the_state_is_preferred(tmp_path):
    text, hours = jobs(["0"] * 20 + ["1", "271", "-3"], "Id|walltime|Exit_status")
    assert mean_h(read(tmp_path, text)) == pytest.approx(hours / 3)
    assert mean_h(read(tmp_path, text, "censored=271")) == pytest.approx(hours / 2)

    text, hours = jobs(["0:0"] * 20 + ["0:9", "1:0"], "Id|Elapsed|ExitCode")
    assert mean_h(read(tmp_path, text)) == pytest.approx(hours / 2)

    text, hours = jobs(["0:0|NODE_FAIL"] * 2 + ["1:0|COMPLETED"] * 20, "Id|Elapsed|ExitCode|State")
    assert mean_h(read(tmp_path, text)) == pytest.approx(hours / 2)


def test_a_column_is_known_by_its_words_where_its_name_says_nothing(tmp_path):
    text, hours = jobs(SLURM, "Id|Elapsed|How it went")

    assert mean_h(read(tmp_path, text)) == pytest.approx(hours / 7)


def test_cells_without_a_word_are_lifetimes_in_which_nothing_happened(tmp_path):
    rows = [("ECC", 10), ("", 20), ("", 30), ("fire", 40)]
    text = "part,uptime_h,event\n" + "".join(f"p{k},{h},{word}\n" for k, (word, h) in enumerate(rows))

    with pytest.raises(ConfigError, match="these words in 'event' mean: ECC 1, fire 1:"):
        read(tmp_path, text)
    log = read(tmp_path, text, "failed=ECC,fire")
    assert mean_h(log) == 50
    assert "censored: (empty) 2" in log.said[0]
    assert mean_h(read(tmp_path, "part,uptime_h,censored\na,10,1\nb,20,\nc,30,\n")) == 30


def test_steps_are_no_jobs(tmp_path):
    rows = ["JobID|State|Elapsed"]
    for job in range(40):
        state = "COMPLETED" if job % 4 else "NODE_FAIL"
        rows += [f"{job}|{state}|02:00:00", f"{job}.batch|{state}|02:00:00", f"{job}.extern|COMPLETED|02:00:01"]
        rows += [f"{job}.0|{state}|00:30:00"]
    rows += ["77_3.batch|NODE_FAIL|02:00:00", "77_3.0|NODE_FAIL|01:00:00"]

    log = read(tmp_path, "\n".join(rows))
    assert (len(log.lifetimes), mean_h(log)) == (41, 82 / 11)
    assert "121 steps of jobs (such as 123.batch) left out" in log.said[0]


def failures(count: int = 120) -> list[tuple[float, str]]:
    draw = random.Random(6)
    return sorted((draw.uniform(0, 500), f"{k % 4}") for k in range(count))


def test_a_list_of_failures_has_machines_that_are_repaired_at_once(tmp_path):
    text = "time,node,event\n" + "".join(
        f"{at(h)},{node},crash\n".replace("crash", "crashed") for h, node in failures()
    )
    first_h = int(failures()[0][0] * 3600) / 3600

    log = read(tmp_path, text, "span=500h")
    assert log.lifetimes.failures == 119  # the first is the begin of the log
    assert log.lifetimes.total_s == pytest.approx(4 * 500 * 3600)
    assert (
        "no event says that a machine is up again: each is repaired at once (--log repair=TIME says when)"
        in log.said[0]
    )
    assert log.trace is not None
    assert len(log.trace.spells) == 120
    assert {end - start for _, start, end in log.trace.spells} == {0}
    assert first_h < 500

    slow = read(tmp_path, text, "span=500h", "repair=30min")
    assert slow.trace is not None
    times = [[h for h, of in failures() if of == node] for node in "0123"]
    within = sum(b - a < 0.5 for of_node in times for a, b in pairwise(of_node))
    assert within > 0  # a failure within the repair of another is one with it
    assert slow.lifetimes.failures == 119 - within


def test_each_row_is_a_failure_if_the_log_is_said_to_be_of_failures(tmp_path):
    text = "when,rack,slot,part\n" + "".join(
        f"{at(h)},r{int(node) // 2},{int(node) % 2},GPU\n" for h, node in failures()
    )

    with pytest.raises(ConfigError, match="give --log as=failures if each row is a failure of a machine"):
        read(tmp_path, text)
    with pytest.raises(ConfigError, match="which column holds the node: give --log node=NAME"):
        read(tmp_path, text, "as=failures")
    log = read(tmp_path, text, "as=failures", "node=rack+slot", "span=500h")
    assert log.said[1].startswith("123 lifetimes of 4 machines")
    assert mean_h(log) == pytest.approx(4 * 500 / 119)
    job = read(tmp_path, text, "as=failures", is_of_job=True)
    span_h = failures()[-1][0] - failures()[0][0]
    assert mean_h(job) == pytest.approx(span_h / 119, rel=1e-3)
    without = "\n".join(line.replace(",", ";").partition(";")[0] + ";x;y" for line in text.splitlines())
    assert mean_h(read(tmp_path, without, "as=failures", is_of_job=True)) == pytest.approx(mean_h(job))


def test_several_columns_name_a_machine_without_a_header_too(tmp_path):
    text = "".join(
        f"{at(h)} {kind} c{node} {node}\n"
        for h, node, kind in [(0, 1, "up"), (0, 2, "up"), (3, 1, "down"), (9, 2, "up")]
    )

    assert sorted(read(tmp_path, text, "node=3+4").lifetimes.seconds) == [3 * 3600, 9 * 3600]


def line(hours: float, text: str) -> str:
    return f"[{at(hours)}.123] {text}\n"


def test_a_missed_ping_is_no_failure_and_a_machine_that_stays_silent_is(tmp_path):
    begin = "".join(line(0, f"Node n{node} now responding") for node in range(4))
    flaps = "".join(
        line(h, f"error: Nodes n{h % 4} not responding") + line(h + 0.05, f"Node n{h % 4} now responding")
        for h in range(1, 41)
    )
    down = line(50, "error: Nodes n[0-1] not responding") + line(
        50.1, "error: Nodes n[0-1] not responding, setting DOWN"
    )
    back = line(52.1, "Node n0 now responding") + line(52.1, "node n1 returned to service")
    silent = line(90, "error: Nodes n2 not responding") + line(91, "error: Nodes n2 not responding")

    log = read(tmp_path, begin + flaps + down + back + silent + line(100, "Node n3 now responding"))
    assert log.lifetimes.failures == 3
    assert mean_h(log) == pytest.approx((2 * (50.1 + 47.9) + 90 + 100) / 3)
    assert "missed answers: not responding 43" in log.said[0]


def test_lines_about_jobs_on_a_machine_are_not_about_the_machine(tmp_path):
    text = "".join(
        line(h, f"job 7{h} on node n1 failed") + line(h, f"step started on node n1, job {h}") for h in range(1, 9)
    )
    text = line(0, "Node n1 now responding") + text + line(10, "requeue job 3 due to failure of node n1")

    assert list(read(tmp_path, text).lifetimes.seconds) == [10 * 3600]


def test_machines_that_are_not_ready_are_down(tmp_path):
    text = line(0, "node n1 is ready") + line(5, "node n1 is not ready") + line(6, "node n1 is ready")

    assert read(tmp_path, text).lifetimes.failures == 1


def test_lines_of_a_journal_are_of_their_host_by_words_that_are_given(tmp_path):
    text = "".join(
        f"{at(h)}+0000 gpu{h % 2} kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
        f"{at(h)}+0000 gpu{h % 2} systemd[1]: Started Session {h} of user root.\n"
        for h in range(0, 44, 4)
    ) + "".join(f"{at(h)}+0000 gpu1 kernel: NVRM: Xid 79\n" for h in (1, 5))

    with pytest.raises(ConfigError, match="not a form that is recognised"):
        read(tmp_path, text)
    log = read(tmp_path, text, "down=Xid")
    assert "failed: xid 13" in log.said[0]
    assert log.lifetimes.failures == 12
    assert mean_h(log) == pytest.approx(2 * 40 / 12)


def test_an_outage_without_an_end_is_a_failure(tmp_path):
    rows = ["NodeName|TimeStart|TimeEnd|State", f"|{at(0)}|Unknown|"]
    rows += [f"begin|{at(0)}|{at(1)}|DOWN", f"begin|{at(99)}|{at(100)}|FAIL"]
    rows += [f"n{k}|{at(10 + k)}|{'Unknown' if k % 2 else at(20 + k)}|DOWN*" for k in range(6)]
    rows += [f"n0|{at(50)}|{at(60)}|DRAIN", f"n1|{at(50)}|{at(60)}|IDLE+DRAIN", f"n1|{at(70)}|None|DOWN"]

    log = read(tmp_path, "\n".join(rows))
    up = [98, 10, 30, 40, 11, 39, 10, 12, 78, 13, 14, 76, 15]
    assert log.lifetimes.failures == 8
    assert log.lifetimes.total_s == pytest.approx(3600 * sum(up))
    assert "state in 'State' (failed: DOWN* 6, FAIL 1, DOWN 2, planned: DRAIN 1, IDLE+DRAIN 1)" in log.said[0].replace(
        "DOWN 2, FAIL 1", "FAIL 1, DOWN 2"
    )
    assert "1 outages without an end (the machine failed again later) are repaired at once" in log.said[0]
    assert "3 outages without an end last to the end of the log" in log.said[0]
    with pytest.raises(ConfigError, match="these words in 'State' mean: SULKING 1: give"):
        read(tmp_path, "\n".join([*rows, f"n5|{at(90)}|{at(91)}|SULKING"]))


def test_outages_of_which_none_has_an_end_are_a_list_of_failures(tmp_path):
    text = "node,down_from,down_to\n" + "".join(f"{node},{at(h)},\n" for h, node in failures())

    log = read(tmp_path, text, "span=500h")
    assert mean_h(log) == pytest.approx(4 * 500 / 119)
    assert "120 outages without an end (no outage has one) are repaired at once" in log.said[0]


def test_a_table_of_fixed_width_is_read_by_its_ruled_header(tmp_path):
    rows = [
        f"{'Node':>10} {'TimeStart':>19} {'TimeEnd':>19} {'State':>5} {'Reason':>20} ",
        "---------- ------------------- ------------------- ----- -------------------- ",
    ]
    rows += [
        f"{f'n{k}':>10} {at(5 + k):>19} {at(7 + k):>19} {'DOWN*':>5} {reason:>20} "
        for k, reason in enumerate(("Not responding", "bad", "", "GPU off the bus"))
    ]

    log = read(tmp_path, "\n".join(rows))
    assert log.form == "outages"
    assert log.lifetimes.total_s == 3600 * (0 + 3 + 1 + 2 + 2 + 1 + 3)
    assert "4 rows used, none ignored" in log.said[0]


def test_lives_end_as_their_state_says(tmp_path):
    rows = ["id,start,end,state"]
    rows += [f"{k},{at(k)},{at(k + 5)},{'NODE_FAIL' if k < 3 else 'COMPLETED'}" for k in range(30)]
    rows += [f"r,{at(10)},Unknown,RUNNING", f"x,{at(10)},hello,COMPLETED"]

    log = read(tmp_path, "\n".join(rows), "as=lives")
    assert mean_h(log) == pytest.approx((30 * 5 + 24) / 3)
    assert "1 with no begin or end" in log.said[0]
    with pytest.raises(ConfigError, match="these words in 'state' mean: WHAT 1"):
        read(tmp_path, "\n".join([*rows, f"y,{at(1)},{at(2)},WHAT"]), "as=lives")


def kubernetes(kind: str, name: str, hours: float, reason: str, **more: object) -> dict[str, object]:
    seen = {"firstTimestamp": at(hours) + "Z", "lastTimestamp": at(hours) + "Z", "count": 1}
    return {"reason": reason, "involvedObject": {"kind": kind, "name": name}, **seen, **more}


def test_events_about_pods_are_not_about_machines(tmp_path):
    items = []
    for node in range(3):
        items += [kubernetes("Node", f"n{node}", hours, "NodeReady") for hours in (0, 21)]
        items += [kubernetes("Node", f"n{node}", 0, reason) for reason in ("Starting", "NodeHasSufficientMemory")]
        items += [kubernetes("Pod", f"p{pod}", 20, "NodeNotReady") for pod in range(40)]
        items += [kubernetes("Node", f"n{node}", 20, "NodeNotReady")]

    log = read(tmp_path, json.dumps({"items": items}))
    assert mean_h(log) == 20
    assert "events about others left out (Pod 120)" in log.said[0]
    pods = [item for item in items if item["involvedObject"]["kind"] == "Pod"]
    with pytest.raises(
        ConfigError, match=r"no event about a node, .* \(Pod 120\): .* --log where=involvedObject.kind=Pod"
    ):
        read(tmp_path, json.dumps(pods))


def test_an_event_that_occurred_several_times_counts_as_often(tmp_path):
    several = {"count": 5, "lastTimestamp": at(90) + "Z"}
    items = [
        kubernetes("Node", "n", 0, "NodeReady"),
        kubernetes("Node", "n", 10, "NodeNotReady", **several),
        kubernetes("Node", "n", 11, "NodeReady", **several | {"lastTimestamp": at(91) + "Z"}),
        kubernetes(
            "Node", "n", 100, "NodeReady", firstTimestamp=None, lastTimestamp=None, eventTime=at(100) + ".000000Z"
        ),
    ]

    log = read(tmp_path, json.dumps(items))
    assert mean_h(log) == pytest.approx((10 + 4 * 19 + 9) / 5)
    assert "2 rows stand for several events each" in log.said[0]


def drives() -> tuple[str, int, int]:
    draw, rows, days, dead = random.Random(2), [], 0, 0
    for drive in range(30):
        age, end = draw.randrange(5000), draw.randrange(5, 60) if drive % 3 == 0 else 40
        for day in range(min(end, 40)):
            fails = int(day + 1 == end and end < 40)
            rows.append((day, f"{(BEGIN + timedelta(days=day)).date()},S{drive},M,{fails},{age + 24 * day}\n"))
            days, dead = days + 1, dead + fails
    return "date,serial_number,model,failure,power_on\n" + "".join(text for _, text in sorted(rows)), days, dead


def test_daily_rows_of_each_machine_are_snapshots(tmp_path):
    text, days, dead = drives()

    log = read(tmp_path, text)
    assert (log.form, log.lifetimes.failures) == ("snapshots", dead)
    assert mean_h(log) == pytest.approx(24 * days / dead)
    assert log.trace is not None
    with pytest.raises(
        ConfigError,
        match=r"1,\d+ rows of 30 machines \('serial_number'\), with 'power_on' rising .* --log as=snapshots",
    ):
        read(tmp_path, text, "lifetime=power_on", "unit=h")


def test_a_machine_that_failed_and_came_back_lives_again_in_snapshots(tmp_path):
    marks = "0001100010"
    text = "date,host,failed\n" + "".join(
        f"{(BEGIN + timedelta(days=day)).date()},h,{mark}\n" for day, mark in enumerate(marks)
    )

    log = read(tmp_path, text)
    assert sorted(zip(log.lifetimes.seconds / 86_400, log.lifetimes.ended, strict=True)) == [
        (1, False),
        (4, True),
        (4, True),
    ]


def test_several_lifetimes_of_one_machine_are_read_as_such(tmp_path):
    draw = random.Random(3)
    hours = [draw.randrange(1, 100) for _ in range(60)]
    text = "node,ttf_h\n" + "".join(f"n{k % 5},{h}\n" for k, h in enumerate(hours))

    assert mean_h(read(tmp_path, text)) == sum(hours) / 60


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("".join(f"{at(k)} n{k % 2} {'up' if k < 2 else 'down'}\n" for k in range(9)), [], "5 of 9 rows are not understood .5 with 'down' of a machine that was down.: .*as=failures"),
        ("time,node,what\n" + "".join(f"{at(k)},n,{w}\n" for k, w in enumerate(["up", "down", "a b", "a b", "c"])), ["event=what"], "3 of 5 rows are not understood .2 with event 'a b', 1 with event 'c'.: .*--log failed=WORD,..., up=, censored=, ignored="),
        ("uptime_h,failed\n1,1\n,1\n,1\n", [], "2 of 3 rows are not understood .2 with no lifetime."),
        ("time,node,state\n" + "".join(f"{at(k)},n,{w}\n" for k, w in enumerate(["idle", "down*", "mixed", "odd", "idle+drain"])), [], "these words in 'state' mean: odd 1: .*--log ignored=WORD"),
    ],
)  # fmt: skip
def test_a_log_of_which_most_rows_are_not_understood_is_refused(tmp_path, text, words, message):
    with pytest.raises(ConfigError, match=message.replace("+", r"\+")) as refused:
        read(tmp_path, text, *words)
    assert "\n" not in str(refused.value)


def test_rows_left_out_by_the_options_are_not_missed(tmp_path):
    text = "time,node,what\n" + "".join(f"{at(k)},n,{w}\n" for k, w in enumerate(["up", "down", "a b", "a c", "c"]))

    assert read(tmp_path, text, "event=what", "ignored=a,c").lifetimes.failures == 1


def test_polled_states_that_stay_the_same_are_understood(tmp_path):
    states = ["idle", "alloc", "mix", "idle", "idle", "down*", "idle", "allocated", "idle+drain", "drain", "idle"]
    text = "time,node,state\n" + "".join(f"{at(k)},n,{state}\n" for k, state in enumerate(states))

    assert sorted(zip(read(tmp_path, text).lifetimes.seconds, [True] * 3, strict=False)) == [
        (2 * 3600, True),
        (5 * 3600, True),
    ]
