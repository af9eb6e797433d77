"""Logs of failures: each form is recognised, what is open is refused, and lifetimes come out as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast_lab.simulate.logs.options import parse_words
from holdfast_lab.simulate.logs.reading import FailureLog, read_log


def read(folder: Path, text: str, *words: str) -> FailureLog:
    path = folder / "log.csv"
    path.write_text(text)
    return read_log(path, parse_words(words))


def lengths(log: FailureLog) -> list[tuple[float, bool]]:
    return sorted(zip(log.lifetimes.seconds.tolist(), log.lifetimes.ended.tolist(), strict=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("3\n5\n", ["unit=h"]),
        ("lifetime_h\n3\n5\n", []),
        ("name;Lifetime (hours)\na;3\nb;5\n", []),
        ("# comment\nhost uptime\na 3h\nb 0-05:00:00\n", []),
        ("node,x,y\na,1,10800000\nb,2,18000000\n", ["lifetime=y", "unit=ms"]),
        ("180\n300\n", ["as=lifetimes", "unit=min"]),
    ],
)
def test_a_column_of_lifetimes(tmp_path, text, words):
    log = read(tmp_path, text, *words)

    assert log.form == "lifetimes"
    assert lengths(log) == [(3 * 3600, True), (5 * 3600, True)]
    assert log.trace is None


@pytest.mark.parametrize(
    "text",
    [
        "lifetime_s,failed\n10,1\n20,0\n,1\n-5,1\n",
        "lifetime_s,censored\n10,0\n20,1\nno,0\n-5,1\n",
        "runtime_s,status\n10,preempted\n20,running\nx,preempted\n-5,failed\n",
    ],
)
def test_a_mark_says_which_lifetimes_are_censored_and_other_rows_are_counted(tmp_path, text):
    log = read(tmp_path, text)

    assert lengths(log) == [(10, True), (20, False)]
    assert log.said == (
        f"log.csv: lifetimes, lifetime in {log.said[0].split(' in ')[1].split(' (')[0]} (s), ended in "
        f"{log.said[0].split('ended in ')[1].split(';')[0]}; 2 rows used, 1 with no lifetime, 1 with a negative lifetime "
        "ignored",
        "2 lifetimes: 1 ended in a failure, 1 right-censored",
    )


def test_events_by_machine(tmp_path):
    text = "0,add,a\n0,add,b\n60,remove,a\n100,pending,c\n100,add,c\n100,add,c\n160,remove,b\n"
    log = read(tmp_path, text, "unit=s", "span=200")

    assert lengths(log) == [(60, True), (100, False), (160, True)]
    assert (
        "1 with 'up' of a machine that was up, 1 with event 'pending' ignored"
        in " ".join(sorted(log.said[0].split("used, ")[1:]))
        or "1 with event 'pending', 1 with 'up' of a machine that was up ignored" in log.said[0]
    )
    assert log.trace is not None
    assert log.trace.units == 2  # a third machine takes the place of the first
    assert sorted(log.trace.spells) == [(0, 60, 100), (1, 160, 200)]


def test_machines_that_were_up_before_the_log_count_as_running_unless_they_were_new(tmp_path):
    text = "2024-01-01T00:00:00Z n1 up\n2024-01-01T01:00:00Z n2 down\n2024-01-01T02:00:00Z n2 up\n"
    log = read(tmp_path, text, "nodes=3")

    assert sorted(zip(log.lifetimes.seconds.tolist(), log.lifetimes.running.tolist(), strict=True)) == [
        (3600, True),
        (7200, False),
        (7200, True),
    ]
    assert not read(tmp_path, text, "nodes=3", "begin=new").lifetimes.running.any()


def test_lines_of_slurm(tmp_path):
    log = read(
        tmp_path,
        "[2024-01-05T10:00:00.000] node node01 returned to service\n"
        "[2024-01-05T10:00:00.000] Node node02 now responding\n"
        "[2024-01-05T10:30:00.000] sched: Allocate JobId=5\n"
        "[2024-01-05T11:00:00.000] error: Nodes node[01-02] not responding, setting DOWN\n",
    )

    assert lengths(log) == [(3600, True), (3600, True)]
    assert log.said[0].endswith("3 rows used, 1 with no time, machine or known event ignored")


def test_events_of_kubernetes(tmp_path):
    def event(time: str, reason: str) -> dict:
        return {"lastTimestamp": time, "reason": reason, "involvedObject": {"kind": "Node", "name": "w1"}}

    items = [event("2024-01-05T10:00:00Z", "NodeReady"), event("2024-01-05T12:00:00Z", "NodeNotReady")]
    log = read(tmp_path, json.dumps({"kind": "List", "items": items}))

    assert lengths(log) == [(7200, True)]


@pytest.mark.parametrize(
    "text",
    [
        "System,nodenumz,Prob Started,Prob Fixed\n2,0,6/21/2005 10:00,6/21/2005 11:00\n2,0,6/21/2005 13:00,6/21/2005 14:00\n",
        "Cluster|NodeName|TimeStart|TimeEnd|State\nc|n|2005-06-21T10:00:00|2005-06-21T11:00:00|DOWN\n"
        "c|n|2005-06-21T13:00:00|2005-06-21T14:00:00|DOWN\nc||2005-06-21T13:00:00|Unknown|\n",
    ],
)
def test_outages(tmp_path, text):
    log = read(tmp_path, text)

    assert log.form == "outages"
    assert lengths(log) == [(7200, True)]
    assert log.trace is not None
    assert log.trace.spells == ((0, 0, 3600), (0, 3 * 3600, 4 * 3600))


def test_lives_of_machines(tmp_path):
    log = read(tmp_path, "id,launch_time,termination_time\na,2024-01-01T00:00,2024-01-01T05:00\nb,2024-01-01T01:00,\n")

    assert lengths(log) == [(4 * 3600, False), (5 * 3600, True)]


def test_sizes_over_time_say_the_mean_alone_unless_it_is_assumed_which_machine_leaves(tmp_path):
    text = "2021-12-10, 13:00:00, 2\n2021-12-10, 14:00:00, 3\n2021-12-10, 15:00:00, 2\n2021-12-10, 16:00:00, 2\n"

    log = read(tmp_path, text)
    assert not log.lifetimes.has_shape
    assert (log.lifetimes.total_s, log.lifetimes.failures) == (7 * 3600, 1)
    assert lengths(read(tmp_path, text, "leaves=oldest"))[-1] == (3 * 3600, False)
    assert lengths(read(tmp_path, text, "leaves=oldest"))[0] == (2 * 3600, False)
    assert lengths(read(tmp_path, text, "leaves=newest"))[0] == (3600, True)


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("", [], "is empty"),
        ("3\n5\n", [], "plain numbers from 3 to 5 without a unit: give --log unit=s"),
        ("0,4\n9,3\n", [], "column 1 has plain numbers from 0 to 9 without a unit"),
        ("start,end\n2024-01-01,2024-01-02\n", [], "give --log as=lives or --log as=outages"),
        ("03/04/2024,5\n03/05/2024,4\n", [], "give --log dates=mdy .month first. or --log dates=dmy"),
        ("13/04/2024,5\n03/13/2024,4\n", [], "no order fits all rows"),
        ("1 1\n2 0\n3 1\n", ["unit=h"], "give --log as=lifetimes or --log as=sizes"),
        ("2024-01-02,5\n2024-01-01,4\n", [], "line 2: its time is before that of line 1; .* --log order=sort"),
        ("2024-01-01,5\n2024-01-02,5\n", [], "no lifetime that ends in a failure"),
        ("one,two\n1,2\n3,4\n", [], "not a form that is recognised: give --log as=failures if .* --log as=lifetimes"),
        ("a,b,c\n1,2,3\n1,2,3\n", ["as=lifetimes"], "which column holds the lifetime: give --log lifetime=NAME"),
        ("lifetime\n3h\n4h\n", ["lifetime=age"], "no column 'age' for lifetime: it has columns lifetime"),
        ("lifetime\n3h\n", ["where=a=1"], "no column 'a'"),
        ("a,lifetime\n2,3h\n", ["where=a=1"], "no row where a is '1'; it has 2"),
        ("0 a down\n", ["unit=s"], "no lifetime that ends in a failure"),
        ("0 a up\n9 a down\n", ["unit=s", "span=5s"], "give --log span=9s or more"),
        ("0 a up\n9 b down\n", ["unit=s", "nodes=1"], "the log names 2 machines: give --log nodes=2 or more, got 1"),
        ("lifetime\n3h\n", ["unti=h"], "did you mean unit?"),
        ("lifetime\n3h\n", ["unit"], "--log must be KEY=VALUE"),
        ("lifetime\n3h\n", ["nodes=-1"], "nodes must be a whole number"),
        ('{"a": 1}', [], "is JSON, but not a list of objects"),
        ("a\0b", [], "is not a text file"),
    ],
)  # fmt: skip
def test_what_is_open_or_wrong_is_refused_in_one_line(tmp_path, text, words, message):
    with pytest.raises(ConfigError, match=message) as refused:
        read(tmp_path, text, *words)

    assert "\n" not in str(refused.value)


def test_a_log_of_several_systems_says_so(tmp_path):
    text = "system,node,failed_at,repaired\n" + "".join(
        f"{system},n,2024-01-0{day}T00:00,2024-01-0{day}T01:00\n" for system in "ab" for day in (1, 3, 5)
    )

    log = read(tmp_path, text)
    assert (
        "2 values of system count as observed for all of that time (--log where=system=... selects one)" in log.said[0]
    )
    assert len(lengths(log)) == 2 * len(lengths(read(tmp_path, text, "where=system=a")))
