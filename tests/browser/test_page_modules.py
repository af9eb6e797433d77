"""The page's modules alone: merging of changes, the parser of the stream, words from numbers."""

import looks
import page_states
import pytest
from page_server import PageServer

from holdfast.base import formatting

pytest.importorskip("playwright", reason="not installed: run make browser")


@pytest.fixture
def page(visit):
    with PageServer({"run-1": page_states.small()}) as server:
        yield visit(server.url)


def test_changes_are_merged_by_id(page):
    found = page.evaluate("""async () => {
      const { fromFull, merge, rows } = await import("/state.js");
      const state = fromFull({ version: 5, now_s: 1, state: { level: "good" }, workers: [{ id: 0, step: 1 }, { id: 1, step: 1 }], unknown: 3 });
      const changed = merge(state, { version: 6, now_s: 2, workers: [{ id: 1, step: 9 }, { id: 2, step: 0 }] });
      const idle = merge(state, { version: 6, now_s: 3 });
      const old = merge(state, { version: 4, now_s: 0.5 });
      return { changed: [...changed], idle: [...idle], old: [...old], now: state.now_s, version: state.version, workers: rows(state.workers), level: state.state.level, unknown: "unknown" in state };
    }""")
    assert found == {
        "changed": ["now_s", "workers"],
        "idle": ["now_s"],
        "old": [],
        "now": 3,
        "version": 6,
        "workers": [{"id": 0, "step": 1}, {"id": 1, "step": 9}, {"id": 2, "step": 0}],
        "level": "good",
        "unknown": False,
    }


def test_workers_that_are_dropped_leave_the_page(page):
    found = page.evaluate("""async () => {
      const { fromFull, merge, rows } = await import("/state.js");
      const state = fromFull({ version: 1, workers: [{ id: 0 }, { id: 7 }], lanes: [{ id: 7 }] });
      const changed = merge(state, { version: 2, dropped: [7, 8] });
      return [[...changed], rows(state.workers), rows(state.lanes)];
    }""")
    assert found == [["workers", "lanes"], [{"id": 0}], []]


def test_the_last_300_events_are_kept(page):
    ids = page.evaluate("""async () => {
      const { fromFull, merge, rows } = await import("/state.js");
      const state = fromFull({ version: 1, events: Array.from({ length: 290 }, (_, id) => ({ id })) });
      merge(state, { version: 2, events: Array.from({ length: 20 }, (_, i) => ({ id: 290 + i })) });
      return rows(state.events).map(({ id }) => id);
    }""")
    assert ids == list(range(10, 310))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_stream_may_be_cut_anywhere(page, size):
    text = 'event: full\r\ndata: {"a":\ndata: 1}\n\n: keep-alive\n\nevent: change\ndata: {"é": 2}\n\ndata: x\n'
    events = page.evaluate(
        """async ([text, size]) => {
      const { eventParser } = await import("/connection.js");
      const found = [];
      const parse = eventParser((event, data) => found.push([event, data]));
      for (let i = 0; i < text.length; i += size) parse(text.slice(i, i + size));
      return found;
    }""",
        [text, size],
    )
    assert events == [["full", '{"a":\n1}'], ["change", '{"é": 2}']]


def test_patience_grows_up_to_a_limit(page):
    waits = page.evaluate(
        "async () => { const { waitMs } = await import('/connection.js'); return [0, 1, 2, 3, 9].map(waitMs); }"
    )
    assert waits == [500, 1000, 2000, 4000, 15000]


def test_numbers_read_as_in_the_reports(page):
    values = [None, 0.0041, 0.0523, 0.9, 1.3, 12.34, 125.0, 3700.0, 90000.0]
    shown = page.evaluate(
        "async (v) => { const { seconds } = await import('/format.js'); return v.map(seconds); }", values
    )
    assert list(map(looks.plain, shown)) == [formatting.seconds(value) for value in values]
    sizes = [None, 12, 999, 12_345_678, 5e12]
    shown = page.evaluate("async (v) => { const { size } = await import('/format.js'); return v.map(size); }", sizes)
    assert list(map(looks.plain, shown)) == [formatting.DASH, *(formatting.size(value) for value in sizes[1:])]


def test_ranges_and_ticks(page):
    found = page.evaluate("""async () => {
      const { ranges, ticks, tick, listing } = await import("/format.js");
      return [ranges([0, 1, 2, 5]), ranges([]), ticks(0, 10, 4), ticks(3, 3, 4), tick(-120000), listing([1, 2, 3]), listing([1, 2, 3], 2)];
    }""")
    assert found == [
        f"0{formatting.DASH}2, 5",
        "",
        [0, 5, 10],
        [3],
        f"{formatting.MINUS}120k",
        "1, 2 and 3",
        "1, 2 and 1 more",
    ]
