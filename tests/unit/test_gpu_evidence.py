"""The page of results on GPUs says what files say, and that there are none where there are none."""

from __future__ import annotations

import json

import pytest
from generate import EVIDENCE, gpu_evidence

RESULT = {
    "benchmark": "sum", "command": "python benchmarks/gpu_cluster.py", "card": "NVIDIA X", "cards": 2, "driver": "1.2",
    "torch": "2.13.0+cu130", "commit": "0123456789abcdef", "date": "2030-01-31", "figures": {"4 MiB": "3 ms", "8 MiB": "5 ms"},
}  # fmt: skip


def test_without_a_result_the_page_says_so(tmp_path):
    assert "nothing of Holdfast was run on a GPU" in gpu_evidence(tmp_path)


def test_each_figure_is_a_row_with_the_card_that_it_was_measured_on(tmp_path):
    (tmp_path / "gpu-sum.json").write_text(json.dumps(RESULT))
    (tmp_path / "cpu-sum.json").write_text("{}")

    rows = gpu_evidence(tmp_path).splitlines()[2:]

    assert rows == [
        f"| sum | {figure} | `python benchmarks/gpu_cluster.py` | 2 x NVIDIA X, driver 1.2, torch 2.13.0+cu130 | 012345678, 2030-01-31 |"
        for figure in ("4 MiB: 3 ms", "8 MiB: 5 ms")
    ]


@pytest.mark.parametrize("name", [*EVIDENCE, "figures"])
def test_a_result_that_does_not_say_what_it_was_measured_on_is_refused(tmp_path, name):
    (tmp_path / "gpu-sum.json").write_text(json.dumps({key: value for key, value in RESULT.items() if key != name}))

    with pytest.raises(ValueError, match=f"^gpu-sum.json must say {name}$"):
        gpu_evidence(tmp_path)
