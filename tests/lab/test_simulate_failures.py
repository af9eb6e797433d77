"""Who is down and when: drawn, or read from traces."""

import gzip
import itertools
import json
import lzma

import numpy as np
import pytest

from holdfast.errors import ConfigError
from holdfast_lab.simulate import (
    Bathtub,
    Cluster,
    Constant,
    Exponential,
    Failures,
    FailureTrace,
    LogNormal,
    Source,
    Weibull,
    make_distribution,
    read_interruptions,
    read_trace,
)
from holdfast_lab.simulate.reading import OutageSpan

DAY_S = 86_400
KINDS = [
    Exponential(100.0),
    Weibull(100.0, 0.7),
    Weibull(100.0, 3.0),
    LogNormal(100.0, 1.2),
    Bathtub(90.0, 4000.0, 150.0),
]


def test_the_mean_is_the_one_that_was_asked_for():
    for kind in KINDS:
        drawn = kind.draw(np.random.default_rng(1), 200_000)

        assert drawn.min() >= 0, kind
        assert drawn.mean() == pytest.approx(kind.mean_s, abs=5 * drawn.std() / 200_000**0.5), kind


def test_what_is_old_lasts_as_long_as_what_came_so_far():
    """Times left are compared with those of new ones that reached the age: Kolmogorov and Smirnov's distance."""
    for kind, age_s in itertools.product(KINDS, (20.0, 150.0)):
        rng = np.random.default_rng(2)

        left = np.sort(kind.draw(rng, 40_000, age_s))

        new = kind.draw(rng, 400_000)
        reached = np.sort(new[new > age_s] - age_s)
        at = np.concatenate((left, reached))
        apart = np.searchsorted(left, at, "right") / left.size - np.searchsorted(reached, at, "right") / reached.size
        limit = 1.95 * (1 / left.size + 1 / reached.size) ** 0.5  # 1 in 1000
        assert np.abs(apart).max() < limit, (kind, age_s)


def test_machines_fail_and_are_repaired_at_the_rates_of_their_source():
    cluster = Cluster(workers=1000, workers_per_node=4, nodes_per_rack=5)
    failures = Failures((Source("node", Exponential(900.0), Exponential(100.0)), Source("rack", Exponential(5000.0))))

    outages = failures.draw(cluster, 100_000.0, (1, 0))

    nodes = outages.width == 4
    assert nodes.sum() == pytest.approx(250 * 100, rel=0.02)
    assert (outages.end - outages.start)[nodes].mean() / 1e9 == pytest.approx(100, rel=0.03)
    assert set(outages.width[~nodes].tolist()) == {20}
    assert (~nodes).sum() == pytest.approx(50 * 20, rel=0.1)
    assert failures.mtbf_s(cluster) == pytest.approx(1 / (250 / 1000 + 50 / 5000))
    assert (np.diff(outages.start) >= 0).all()
    assert (outages.first + outages.width <= 1000).all()


def test_same_seed_same_outages():
    failures, cluster = Failures((Source("worker", Weibull(500.0, 0.7)),)), Cluster(workers=50)

    first, again, other = (failures.draw(cluster, 1000.0, seed).start.tolist() for seed in ((3, 0), (3, 0), (3, 1)))

    assert first == again != other


def test_the_last_rack_may_not_be_full():
    outages = Failures((Source("rack", Constant(10.0)),)).draw(
        Cluster(workers=5, workers_per_node=2, nodes_per_rack=2), 15.0, (0, 0)
    )

    assert list(zip(outages.first.tolist(), outages.width.tolist(), strict=True)) == [(0, 4), (4, 1)]


def test_a_trace_is_laid_over_a_larger_cluster_and_a_longer_time():
    trace = FailureTrace((OutageSpan(0, 10, 20), OutageSpan(2, 50, 130)), units=3, span_s=100.0)

    outages = FailureTrace(trace.spells, 3, 100.0, replayed=True).draw(Cluster(workers=5), 120.0, (0, 0))

    found = [
        (int(f), int(s) // 10**9, int(e) // 10**9)
        for f, s, e in zip(outages.first, outages.start, outages.end, strict=True)
    ]
    assert sorted(found) == [(0, 10, 20), (0, 110, 120), (2, 50, 130), (3, 10, 20), (3, 110, 120)]
    shares = [trace.draw(Cluster(workers=3), 100.0, (0, r)) for r in range(400)]
    down_s = np.mean([((np.minimum(o.end, 100 * 10**9) - o.start) / 1e9).sum() for o in shares])
    assert down_s == pytest.approx(90, rel=0.08)  # wherever it begins, one is down 10 s, the other 80 s of each 100


def test_who_is_down_when_the_trace_is_entered_is_down_from_the_begin():
    trace = FailureTrace((OutageSpan(0, 90, 100),), units=1, span_s=100.0)

    starts = [trace.draw(Cluster(workers=1), 50.0, (0, r)) for r in range(200)]

    inside = [outages for outages in starts if len(outages) and outages.start[0] == 0]
    assert 5 < len(inside) < 40
    assert all(0 < outages.end[0] <= 10 * 10**9 for outages in inside)


def test_in_the_next_turn_of_a_trace_a_machine_that_is_up_stays_so_until_it_fails():
    spells = (
        OutageSpan(0, 0, 40),
        OutageSpan(1, 0, 30),
        OutageSpan(1, 60, 100),
        OutageSpan(2, 10, 20),
        OutageSpan(3, 90, 115),
    )

    outages = FailureTrace(spells, units=4, span_s=100.0, replayed=True).draw(Cluster(workers=4), 300.0, (0, 0))

    found = {}
    for unit, start, end in zip(outages.first, outages.start // 10**9, outages.end // 10**9, strict=True):
        found.setdefault(int(unit), []).append((int(start), int(end)))
    assert found[0] == [(0, 40)]  # up at the end, so that it is no failure that the file begins without it
    assert found[1] == [(0, 30), (60, 100), (100, 130), (160, 200), (200, 230), (260, 300)]  # down at the end
    assert found[2] == [(10, 20), (110, 120), (210, 220)]
    assert found[3] == [(90, 115), (190, 215), (290, 315)]


def test_machines_that_come_and_go_do_not_all_vanish_where_a_trace_begins_again(tmp_path):
    """Ten come one after another and two go; in the second turn eight are there from its begin."""
    path = tmp_path / "spot.csv"
    came = [f"{1000 * (10 + i)},add,m{i}" for i in range(10)]
    path.write_text("\n".join([*came, "50000,remove,m3", "60000,remove,m7"]) + "\n")
    trace = read_trace(path, "spot", span_s=100.0, level="worker", replayed=True)

    outages = trace.draw(Cluster(workers=10), 200.0, (0, 0))

    def up(at_s):
        down = outages.first[(outages.start <= at_s * 1e9) & (outages.end > at_s * 1e9)]
        return 10 - len(set(down.tolist()))

    assert [up(at_s) for at_s in (5, 30, 55, 99.5, 100.5, 105, 130, 155, 199.5)] == [0, 10, 9, 8, 8, 8, 10, 9, 8]


def test_machines_of_a_group_do_not_change_places_where_a_trace_begins_again(tmp_path):
    path = tmp_path / "sizes.txt"
    sizes = [3, 2, 3, 1, 3, 2]
    path.write_text("".join(f"2021-12-11, 11:00:{10 * i:02}, {size}\n" for i, size in enumerate(sizes)))
    trace = read_trace(path, "sizes", replayed=True)

    outages = trace.draw(Cluster(workers=3), 2 * trace.span_s, (0, 0))

    def up(at_s):
        return set(range(3)) - set(outages.first[(outages.start <= at_s * 1e9) & (outages.end > at_s * 1e9)].tolist())

    assert [len(up(10 * i + 5)) for i in range(5)] == sizes[:5]
    assert up(trace.span_s - 0.5) == up(trace.span_s + 0.5)


def test_a_quiet_end_belongs_to_a_trace(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("unit,start_s,end_s\n" + "".join(f"m{i},{100 + 200 * i},{180 + 200 * i}\n" for i in range(4)))

    trace = read_trace(path, "table", span_s=3600.0)

    assert trace.span_s == 3600
    assert trace.mtbf_s(Cluster(workers=4)) == 900
    outages = FailureTrace(trace.spells, 4, 3600.0, replayed=True).draw(Cluster(workers=4), 3600.0, (0, 0))
    assert len(outages) == 4


@pytest.mark.parametrize(
    ("kind", "text", "last"),
    [
        ("spot", "0,add,a\n0,add,b\n7500,remove,a\n", "7.5 s"),
        ("table", "unit,start_s,end_s\na,1,2\na,7.5,90\n", "7.5 s"),
    ],
)
def test_a_file_that_does_not_say_how_long_it_was_watched_needs_a_span_behind_its_last_event(
    tmp_path, kind, text, last
):
    path = tmp_path / "trace.csv"
    path.write_text(text)

    with pytest.raises(ConfigError) as missing:
        read_trace(path, kind)
    with pytest.raises(ConfigError) as short:
        read_trace(path, kind, span_s=7.0)

    does_not_say = f"{path} does not say how long its machines were observed"
    assert str(missing.value) == f"{does_not_say}: give span_s, at least {last}, the time of its last event"
    assert str(short.value) == f"span_s must be at least {last}, the time of the last event of {path}, got 7 s"
    assert read_trace(path, kind, span_s=8.0).span_s == 8.0
    for odd in (float("nan"), 2e9):
        with pytest.raises(ConfigError, match="span_s must be"):
            read_trace(path, kind, span_s=odd)


def test_a_system_that_was_in_use_to_the_end_of_the_records_was_watched_until_then(tmp_path):
    path = tmp_path / "lanl.csv"
    head = "System,nodes,nodenumz,node decom,Prob Started,Prob Fixed"
    rows = [
        "1,4,1,current,6/1/2005 00:00,6/1/2005 01:00",
        "2,4,2,5-Jun,6/1/2005 00:00,6/1/2005 01:00",
        "3,4,3,current,6/2/2005 00:00,6/11/2005 00:00",
    ]
    path.write_text("\n".join([head, *rows]) + "\n")

    assert read_trace(path, "lanl", system=1).span_s == 10 * DAY_S + 1
    assert read_trace(path, "lanl", system=2).span_s == 3601


def test_drives_of_a_room_were_watched_as_long_as_those_of_all(tmp_path):
    path = tmp_path / "ssd.csv"
    rows = ["2018-01-01 00:00:00,70,8,1", "2018-01-03 00:00:00,71,8,2", "2018-01-11 00:00:00,50,9,1"]
    path.write_text("failure_time,node_id,rack_id,machine_room_id\n" + "\n".join(rows) + "\n")

    trace = read_trace(path, "ssd", room=2, repair_s=60)

    assert trace.spells == ((0, 2 * DAY_S, 2 * DAY_S + 60),)
    assert trace.span_s == 10 * DAY_S + 61


def fault(node, day, what):
    return {"node_id": node, "event_time": day, "event_type": f"fault_{what}", "fault_type": {"Class": "GPU"}}


def test_gpu_faults_are_read(tmp_path):
    path = tmp_path / "trace.json.gz"
    events = [fault("a", 1.0, "start"), fault("b", 2.0, "start"), fault("a", 3.0, "end")]
    path.write_bytes(gzip.compress(json.dumps(events).encode()))

    trace = read_trace(path, "infinitehbd", units=5)

    assert (trace.units, trace.span_s) == (5, 348 * DAY_S)
    assert trace.spells == ((0, DAY_S, 3 * DAY_S), (1, 2 * DAY_S, 348 * DAY_S))  # nobody saw the end of the second


def test_outages_of_one_system_are_read(tmp_path):
    path = tmp_path / "lanl.csv.xz"
    lines = [
        "System,machine type,nodes,nodenumz,Prob Started,Prob Fixed,Down Time",
        "2,cluster,49,0,6/21/2005 10:54,6/21/2005 11:00,6",
        "2,cluster,49,7,6/22/2005 10:54,,",
        "3,cluster,128,1,6/21/2005 10:54,6/21/2005 11:00,6",
        "2,cluster,49,3,6/21/2005 11:54,6/22/2005 10:54,1380",
    ]
    path.write_bytes(lzma.compress("\n".join(lines).encode()))

    trace = read_trace(path, "lanl", system=2)

    assert (trace.units, trace.spells) == (49, ((0, 0, 360), (3, 3600, DAY_S)))
    with pytest.raises(ConfigError, match=r"contains no outage where \{'system': 9\}"):
        read_trace(path, "lanl", system=9)


def test_spot_machines_come_and_go(tmp_path):
    path = tmp_path / "spot.csv"
    path.write_text("0,add,a\n0,add,b\n5000,add,c\n7000,remove,a\n9000,add,d\n10000,remove,c\n20000,remove,b\n")

    trace = read_trace(path, "spot", level="worker", span_s=60.0)

    assert (trace.units, trace.span_s, trace.level) == (3, 60.0, "worker")
    # d has the place of a; that of c is free until it is given again, five seconds after the trace has begun again
    assert sorted(trace.spells) == [(0, 7, 9), (1, 20, 60), (2, 0, 5), (2, 10, 65)]


def test_sizes_of_a_group_of_machines_are_read(tmp_path):
    path = tmp_path / "sizes.txt"
    path.write_text("2021-12-11, 11:00:00, 2\n2021-12-11, 11:00:10, 3\n2021-12-11, 11:00:30, 2\n")

    trace = read_trace(path, "sizes")

    assert trace.spells == ((2, 0, 10), (0, 30, 31))


def test_drives_that_fail_are_read_rack_by_rack(tmp_path):
    path = tmp_path / "ssd.csv"
    rows = [
        "2018-01-01 00:00:00,70,8,1",
        "2018-01-03 00:00:00,71,8,1",
        "2018-01-02 00:00:00,50,9,1",
        "2018-01-02 00:00:00,1,1,2",
    ]
    path.write_text("failure_time,node_id,rack_id,machine_room_id\n" + "\n".join(rows) + "\n")

    trace = read_trace(path, "ssd", room=1, repair_s=60, nodes_per_rack=4)

    assert trace.units == 8
    assert sorted(trace.spells) == [(0, 0, 60), (1, 2 * DAY_S, 2 * DAY_S + 60), (4, DAY_S, DAY_S + 60)]


def test_interruptions_are_counted_by_cause(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("component,category,count\nFaulty GPU,GPU,148\nNIC,Host,7\n")

    counts = read_interruptions(path)

    assert counts == {"Faulty GPU": 148, "NIC": 7}
    failures = Failures.of_count(419, span_s=54 * DAY_S, units=2048)
    assert failures.mtbf_s(Cluster(workers=16384, workers_per_node=8)) == pytest.approx(54 * DAY_S / 419)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("spot", "0,add,a\n1,vanish,a\n", "line 2: vanish a: only an absent machine can be added, and only a present one removed"),
        ("spot", "5,add,a\n1,add,b\n", "line 2: the time is before that of the previous line"),
        ("spot", "0,add,a\n1,remove\n", "line 2: it must be milliseconds,add|remove,name, got '1,remove'"),
        ("spot", "0,add,a,b\n", "line 1: it must be milliseconds,add|remove,name, got '0,add,a,b'"),
        ("spot", "0,add,a\nnan,add,b\n", "line 2: 'nan' is not a time"),
        ("table", "unit,start_s,end_s\nx,1,inf\n", "line 2: 'inf' is not a time"),
        ("table", f"unit,start_s,end_s\nx,{'9' * 140_000},2\n", "line 2: field larger than field limit"),
        ("table", f"{'9' * 140_000}\n", "line 1: field larger than field limit"),
        ("infinitehbd", "[" * 100_000, "is not a list of fault starts and ends: its brackets are nested too deep"),
        ("sizes", "2021-12-11 11:00:00, 2\n", "line 1: it must be date, time, machines, got '2021-12-11 11:00:00, 2'"),
        ("sizes", "2021-12-11, 11:00:00, 2\n2021-12-11, 10:00:00, 2\n", "line 2: the time is before that of the previous line"),
        ("sizes", "2021-12-11, 11:00:00, 1\n2021-12-11, 12:00:00, -1\n", "line 2: -1 machines"),
        ("sizes", "2021-12-11, 11:00:00, 2\n2021-12-11, 12:00:00+01:00, 2\n", "line 2: 2021-12-11 12:00:00+01:00 has a time zone"),
        ("lanl", "System,nodes,nodenumz,Prob Started,Prob Fixed\n20,4,1,1/2/2003 10:00,1/1/2003 10:00\n", "contains no outage"),
        ("lanl", "a,b\n", "has no column System, nodes"),
        ("table", "unit,start_s,end_s\nx,one,2\n", "line 2: could not convert"),
        ("infinitehbd", "{", "is not a list of fault starts and ends"),
        ("table", "unit,start_s,end_s\n", "contains no outage"),
        ("weather", "", "kind of trace must be one of infinitehbd, lanl, spot, sizes, ssd, table, got 'weather'"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(tmp_path, kind, text, says):
    path = tmp_path / "trace"
    path.write_text(text)

    with pytest.raises(ConfigError) as refused:
        read_trace(path, kind)

    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_packed_trace_that_is_damaged_within_is_refused(tmp_path):
    path = tmp_path / "trace.gz"
    packed = bytearray(gzip.compress(b"unit,start_s,end_s" * 100))
    packed[10:14] = b"\xff\xff\xff\xff"  # behind the header
    path.write_bytes(packed)

    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(path, "table", span_s=1.0)


def test_what_a_reader_does_not_take_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="a trace of kind spot takes span_s, got system"):
        read_trace(tmp_path / "x", "spot", system=3)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "x", "spot")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (lambda: make_distribution("gamma", 3.0), "distribution must be one of constant, exponential"),
        (lambda: Exponential(0.0), "mean_s must be more than 0, got 0"),
        (lambda: Weibull(1.0, 99.0), "shape must be at least 0.05 and at most 50"),
        (lambda: Source("node", Constant(0.0)), "the mean lifetime of a node must be more than 0"),
        (lambda: Source("city", Constant(1.0)), "level must be one of worker, node, rack, got 'city'"),
        (lambda: Failures.of_count(0, span_s=1, units=1), "number of failures must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(kind, says):
    with pytest.raises(ConfigError, match=says):
        kind()
