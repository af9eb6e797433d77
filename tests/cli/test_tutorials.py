"""What the tutorials show is what a reader gets: every script and console block of theirs is executed."""

from pathlib import Path

import pytest
from tutorials import Command, comparable, executed

PAGES = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.md"))
ELSEWHERE = ("index", "from-accelerate", "from-lightning", "from-transformers")
"""Pages without blocks, and those that tests/integrations execute where their framework is installed."""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in ELSEWHERE], ids=lambda page: page.stem)
def test_a_tutorial_shows_what_its_commands_print(page: Path, tmp_path: Path):
    done = executed(page.read_text(), tmp_path)

    assert done
    for command, printed in done:
        assert comparable(printed) == comparable(command.printed), f"$ {command.line}\n{printed}"


def test_an_output_that_differs_in_more_than_times_is_noticed():
    page = "```console\n$ echo lost rank 1 after 12 ms\nlost rank 2 after 13 ms\n```\n"

    ((command, printed),) = executed(page, Path("/"))

    assert command == Command("echo lost rank 1 after 12 ms", "lost rank 2 after 13 ms\n")
    assert comparable(printed) != comparable(command.printed)
    assert comparable(printed) == comparable("lost rank 1 after 99 ms")
    late = "holdfast: after 30 s: waiting for 1 of 2 workers: importing torch\nholdfast: step 3 of 9 after 1 min 0 s\n"
    late += "holdfast: rank 0 is slow: it takes 2.5 times as long as the other workers\nworker 0 was slow at step 6\n"
    assert comparable(late + "lost rank 1 after 99 ms") == comparable("lost rank 1 after 12 ms")
