"""The memory of training, counted to the byte from the tensors that exist, in real workers."""

import json
import re

import pytest
from jobs import ROOT, holdfast

pytestmark = pytest.mark.chaos

SCRIPT = ROOT / "tests" / "support" / "train_memory.py"
DOCS = ROOT / "docs" / "how-to" / "limit-memory.md"
WIDTH, WORKERS = 256, 2
NUMBERS = 4 * WIDTH**2 + WIDTH
LAST = WIDTH**2 + 1 + 2 * 16  # the longest bucket: a weight, its presence and the metrics
CASES = [
    ("tree", 2, "messages"), ("tree", 4, "messages"), ("tree", 16, "messages"), ("fold", 16, "messages"),
    ("fold", 2, "shared"), ("tree", 4, "shared"), ("tree", 16, "shared"), ("fold", 4, "shared"), ("fold", 16, "shared"),
]  # fmt: skip
ROWS = {("tree", 1): (1, 1), ("tree", 2): (2, 2), ("tree", 8): (3, 3)}
ROWS |= {("fold", 1): (1, 1), ("fold", 2): (2, 2), ("fold", 8): (1, 8)}
"""Rows of each of the two workers, by order and slices of a worker."""
APART = {("tree", 8): (1, 1), ("fold", 8): (1, 0)}
"""Whether the last slice of each worker is in no row."""


def lines(numbers):
    """Bytes of float32 numbers, to the end of the cache line."""
    return -(-4 * numbers // 64) * 64


def messages(order, slices, rank):
    """Bytes of the buffer of the longest bucket: what is received, sums of two slices to send, and the result."""
    share = -(-LAST // (WORKERS * 16)) * 16
    mine, other = (share, LAST - share)[:: 1 - 2 * rank]
    adds_two = slices == 2 and (order == "tree" or rank == 0)
    sent_here = 1 if order == "tree" or rank == 1 or slices == 1 else slices  # by the other worker
    return sent_here * lines(mine) + adds_two * lines(other) + lines(LAST)


@pytest.fixture(scope="module")
def counted():
    """What the workers count, by case and rank."""
    given = [str(word) for case in CASES for word in case]
    done = holdfast("run", "-n", WORKERS, SCRIPT, *given, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in re.findall(r"\{.*\}", done.stdout)]
    return {(*line["case"], line["rank"]): line for line in found}


def test_every_byte_is_known(counted):
    assert len(counted) == len(CASES) * WORKERS
    for (order, slices, path, rank), line in counted.items():
        case = (order, slices // WORKERS)
        assert line["memory"] == {
            "parameters": 4 * NUMBERS,
            "buffers": 0,
            "optimizer": 8 * NUMBERS + 5 * 4,  # and the step of each parameter
            "rows": ROWS[case][rank] * line["row"],
            "gradients": 4 * NUMBERS * APART.get(case, (0, 0))[rank],
            "result": 0 if path == "messages" else line["row"] + WORKERS * 40 * 8,
            "messages": messages(*case, rank) if path == "messages" else 0,
            "copies": 0,
        }, (case, path, rank)
        assert line["row"] - 4 * NUMBERS <= 5 * 64 + 4 * 2 * 16, "presences and metrics"


def test_no_other_tensor_of_the_process_has_more_than_a_page(counted):
    """Of the first case: later ones find the memory of the earlier ones."""
    for rank in range(WORKERS):
        line = counted[(*CASES[0], rank)]
        assert line["all"] == sum(line["memory"].values()) - 20 - 4 * WIDTH * 3, "without scalars and the biases"


def test_the_table_in_the_docs_has_these_figures(counted):
    table = re.findall(r"^\| (\d) \| (\d+) \| (\d+) \| (\d+) \|$", DOCS.read_text(), re.MULTILINE)

    expected = []
    for slices in (1, 2, 8):
        by_case = {
            (order, rank): sum(line["memory"][what] for what in ("parameters", "optimizer", "rows", "gradients"))
            / NUMBERS
            for (order, of_all, _, rank), line in counted.items()
            if of_all == slices * WORKERS
        }
        expected.append((slices, *(round(by_case[key]) for key in (("tree", 0), ("fold", 0), ("fold", 1)))))
    assert [tuple(map(int, row)) for row in table] == expected
    assert expected[0] == (1, 16, 16, 16)
