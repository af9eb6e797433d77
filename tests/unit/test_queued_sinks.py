"""A sink that is slow, full, gone or broken holds nothing, and what it missed is counted."""

import math
import threading
import time

import pytest
from usual_records import committed as step

from holdfast.records.queued import NotTaken, QueuedSink, SinkCount, close_all
from holdfast.records.types import Left


def left(number):
    return Left(t_s=float(number), rank=1, step=number)


class Sink:
    name, trouble, pause_s, longest_s = "test", "nothing is shown", 0.0, math.inf

    def __init__(self):
        self.records, self.calls, self.end_s = [], 0, None

    def take(self, records):
        self.calls += 1
        self.records += records

    def close(self, end_s):
        self.end_s = end_s


class Blocked(Sink):
    """Takes nothing until it is released."""

    def __init__(self):
        super().__init__()
        self.began, self.released = threading.Event(), threading.Event()

    def take(self, records):
        self.began.set()
        assert self.released.wait(30)
        super().take(records)


def test_all_records_arrive_in_order_and_then_the_end():
    sink, said = Sink(), []
    queue = QueuedSink(sink, said.append)
    for number in range(1000):
        queue.write(step(number))

    assert queue.close(7.5) == SinkCount(name="test", taken=1000, dropped=0)
    assert [record.step for record in sink.records] == list(range(1000))
    assert (sink.end_s, said) == (7.5, [])
    queue.write(step(1000))
    assert queue.close(8.0).dropped == 1, "what comes after the end"


def test_a_full_queue_drops_steps_first_and_counts_what_it_drops():
    sink = Blocked()
    queue = QueuedSink(sink, print, capacity=10)
    queue.write(step(0))
    assert sink.began.wait(30)
    begin_s = time.monotonic()
    for number in range(1, 101):
        queue.write(step(number))
    for number in range(3):
        queue.write(left(number))
    wrote_s = time.monotonic() - begin_s
    assert queue.count() == SinkCount(name="test", taken=0, dropped=93)
    sink.released.set()

    assert wrote_s < 5, "the sink would block for 30 s"
    assert queue.close(1.0) == SinkCount(name="test", taken=11, dropped=93)
    assert [record.step for record in sink.records] == [*range(10), 0]


def test_a_sink_that_hangs_holds_the_end_for_three_seconds(monkeypatch):
    monkeypatch.setattr("holdfast.records.queued.LAST_S", 0.05)
    sink, said = Blocked(), []
    queue = QueuedSink(sink, said.append)
    queue.write(step(0))
    assert sink.began.wait(30)
    queue.write(step(1))
    count = queue.close(1.0)
    sink.released.set()

    assert count == SinkCount(name="test", taken=0, dropped=2)
    assert said == ["nothing is shown: it does not answer within 0.05 s; training is not affected"]


def test_sinks_that_hang_hold_the_end_together_not_one_after_the_other():
    sinks, said = [Blocked() for _ in range(5)], []
    queues = [QueuedSink(sink, said.append, last_s=30.0) for sink in sinks]
    for sink, queue in zip(sinks, queues, strict=True):
        queue.write(step(0))
        assert sink.began.wait(30)
    begin_s = time.monotonic()
    counts = close_all(queues, 1.0, patience_s=0.5)
    took_s = time.monotonic() - begin_s
    for sink in sinks:
        sink.released.set()

    assert 0.5 <= took_s < 2.0, "one after the other it would be 2.5 s"
    assert counts == [SinkCount(name="test", taken=0, dropped=1)] * 5
    assert said == ["nothing is shown: it does not answer within 0.5 s; training is not affected"] * 5


@pytest.mark.parametrize("holds", [0, 3])
def test_what_a_sink_still_holds_at_the_end_is_not_taken(holds):
    class Holding(Blocked):
        num_held = holds

        def take(self, records):
            Sink.take(self, records)

        def close(self, end_s):
            self.began.set()
            assert self.released.wait(30)

    sink = Holding()
    queue = QueuedSink(sink, print, last_s=0.5)
    for number in range(10):
        queue.write(step(number))
    count = queue.close(1.0)
    assert sink.began.is_set()
    sink.released.set()

    assert count == SinkCount(name="test", taken=10 - holds, dropped=holds)


@pytest.mark.parametrize(("error", "why"), [(NotTaken("it is gone"), "it is gone"), (KeyError("x"), "KeyError: 'x'")])
def test_a_sink_that_fails_says_so_once_and_its_records_are_dropped(error, why):
    class Broken(Sink):
        def take(self, records):
            raise error

    said = []
    queue = QueuedSink(Broken(), said.append)
    for number in range(20):
        queue.write(step(number))
        time.sleep(0.001)

    assert queue.close(1.0) == SinkCount(name="test", taken=0, dropped=20)
    assert said == [f"nothing is shown: {why}; training is not affected"]


def test_a_sink_is_called_no_more_often_than_it_wants_but_also_without_records():
    sink = Sink()
    sink.pause_s, sink.longest_s = 0.2, 0.05
    queue = QueuedSink(sink, print)
    end_s = time.monotonic() + 0.5
    while time.monotonic() < end_s:
        queue.write(step(0))
        time.sleep(0.005)
    assert sink.calls <= 4
    calls = sink.calls
    time.sleep(0.7)
    assert sink.calls > calls
    queue.close(1.0)
