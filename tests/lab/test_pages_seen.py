"""The line above a figure says what is seen in it, from the rows that it shows."""

import pytest

from holdfast_lab.pages.seen import seen_in

ROWS = [
    {"name": "a", "kind": "x", "s": 1.0, "b": 2.0, "share": 0.5, "text": "one\nmore"},
    {"name": "b", "kind": "x", "s": 4.0, "b": 3.0, "share": 0.25, "text": "one\nless"},
]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"kind": "bars", "by": ["name", "kind"], "values": [["s", "save"], ["b", "back"]], "unit": "s"}, "From 3 s (a) to 7 s (b)"),
        ({"kind": "bars", "by": ["name"], "values": [["s", "save"]], "unit": "% of the time", "whole": 100}, "Save in % of the time: from 1 (a) to 4 (b)"),
        ({"kind": "lines", "series": ["name"], "x": ["s", "s"], "y": ["share", "share of the time"]}, "Share of the time: from 25 % (b) to 50 % (a)"),
        ({"kind": "points", "series": ["kind"], "x": ["s", "s"], "y": ["b", "goodput, %"]}, "Goodput: from 2 % to 3 %"),
        ({"kind": "intervals", "by": ["name"], "series": ["kind"], "x": ["s", "steps lost"]}, "Steps lost: from 1 (a) to 4 (b)"),
        ({"kind": "map", "text": "text"}, "Of 2 cells: one in 2"),
        ({"kind": "survival", "log": {"survival": {"t_s": [0.0, 60.0, 7200.0], "alive": [1.0, 0.9, 0.4]}}}, "Half of the machines failed within 2 h"),
        ({"kind": "survival", "log": {"survival": {"t_s": [0.0, 86400.0], "alive": [1.0, 0.8]}}}, "80 % of the machines are still up after 24 h"),
        ({"kind": "table"}, ""),
    ],
)  # fmt: skip
def test_the_ends_are_named_with_their_unit(section, said):
    assert seen_in(section, ROWS) == said


def test_equal_values_are_said_once_and_missing_ones_not_at_all():
    section = {"kind": "points", "series": ["name"], "x": ["s", "s"], "y": ["b", "goodput, %"]}

    assert seen_in(section, [row | {"b": 2.0} for row in ROWS]) == "Goodput: 2 %"
    assert seen_in(section, [row | {"b": None} for row in ROWS]) == ""
