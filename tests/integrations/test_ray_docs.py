"""The page about Ray: its script runs, and prints what the page says."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

from jobs import clean_env
from tutorials import FENCE

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "ray.md"

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def test_the_script_of_the_page_prints_what_the_page_says(tmp_path):
    blocks = list(FENCE.finditer(PAGE.read_text()))
    [script] = [block for block in blocks if block["caption"] == "fit.py"]
    printed = next(block["text"] for block in blocks if block["language"] == "text" and "steps" in block["text"])
    (tmp_path / "fit.py").write_text(script["text"])

    done = subprocess.run(
        [sys.executable, "fit.py"],
        cwd=tmp_path,
        env=clean_env(RAY_ADDRESS="local"),  # not a cluster that another test has started
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert printed.strip() == done.stdout.splitlines()[-1]
    assert list((tmp_path / "runs" / "sums" / "checkpoints").glob("step-*"))
    assert (tmp_path / "runs" / "sums" / "report" / "report.json").is_file()
