"""What commands print as JSON is JSON to every reader."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import NoReturn

from holdfast.cli.tables import in_json


@dataclasses.dataclass
class Found:
    loss: float
    values: tuple[float, ...]


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def test_what_json_has_no_number_for_is_a_word():
    found = {"a": Found(math.nan, (1.0, math.inf)), "b": [-math.inf, None]}

    read = json.loads(in_json(found), parse_constant=refuse)

    assert read == {"a": {"loss": "nan", "values": [1.0, "inf"]}, "b": ["-inf", None]}
