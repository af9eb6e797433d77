"""The Lightning tutorial and example: what they show is what a reader gets, and one line of a script changes."""

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")

from jobs import clean_env
from tutorials import comparable, executed

ROOT = Path(__file__).parents[2]
PLAIN, SURVIVES = (ROOT / "examples" / "frameworks" / name for name in ("lightning_before.py", "lightning_after.py"))

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def code(path: Path) -> list[str]:
    """Return the lines of a script without its docstring."""
    return re.sub(r'\A""".*?"""\n', "", path.read_text(), flags=re.S).splitlines()


def test_one_line_of_a_lightning_script_changes():
    changed = [line for line in difflib.unified_diff(code(PLAIN), code(SURVIVES), n=0, lineterm="") if line[:2] != "@@"]

    assert [line[0] for line in changed] == ["-", "+", "-", "+"], "two lines name the files, one is removed, one added"
    assert changed[2][1:].replace('strategy="auto"', 'strategy="holdfast"') == changed[3][1:]


def test_the_lightning_tutorial_shows_what_its_commands_print(tmp_path):
    page = (ROOT / "docs" / "tutorials" / "from-lightning.md").read_text()

    done = executed(page, tmp_path)

    assert len(done) == 3
    for command, printed in done:
        assert comparable(printed) == comparable(command.printed), f"$ {command.line}\n{printed}"
    hashes = [re.search(r"weights ([0-9a-f]{64})", printed)[1] for _, printed in done]
    assert len(set(hashes)) == 1, "undisturbed, killed and in one process"


@pytest.mark.parametrize("path", [PLAIN, SURVIVES], ids=lambda path: path.name)
def test_an_example_runs_as_one_process(path, tmp_path):
    pytest.importorskip("sklearn")
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stderr
    assert re.search(r"100 steps, best accuracy 0\.\d{4}, weights [0-9a-f]{64}", done.stdout), done.stdout
