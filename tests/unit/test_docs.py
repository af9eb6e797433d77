"""What is documented is there, and what is there is documented."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TEXT = (".py", ".md", ".toml", ".html", ".css", ".yml", "Makefile", "run", ".gitignore")

# Written in two parts, so that this file does not name what it forbids.
FORBIDDEN = ["/" + "work/", "/" + "root/", "/" + "home/", "/" + "tmp/bash", "TODO" + ":", "FIX" + "ME"]


def commands() -> dict[str, Any]:
    from holdfast.cli import app

    group = typer.main.get_command(app)
    return dict(group.commands)


def own_files() -> list[Path]:
    """Return the project's text files: those that git tracks, or would."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file() and name.endswith(TEXT)]


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_is_documented_and_has_an_example(name):
    command = commands()[name]

    assert f"## holdfast {name}" in (ROOT / "docs" / "cli.md").read_text()
    assert command.help is not None
    assert re.search(rf"Example: .*holdfast {name}", command.help)


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_option_is_documented(name):
    page = (ROOT / "docs" / "cli.md").read_text()
    section = page[page.index(f"## holdfast {name}") :].split("\n## ")[0]
    written = set(re.findall(r"`(-{1,2}[a-z][a-z-]*)", section))

    options = {flag for p in commands()[name].params for flag in p.opts if flag.startswith("-")} - {"--help"}

    assert options <= written, "not in docs/cli.md"


def test_no_option_is_documented_that_there_is_not():
    page = (ROOT / "docs" / "cli.md").read_text()
    known = {flag for command in commands().values() for p in command.params for flag in p.opts}

    rows = re.findall(r"^\| `(--?[a-z-]+)", page, flags=re.MULTILINE)

    assert rows
    assert set(rows) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path):
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())

    assert [link for link in links if not (page.parent / link).exists()] == []


def anchors_of(page: Path) -> set[str]:
    """Return where a link into a page may lead, by GitHub's rule."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_a_page_lead_to_a_heading(page: Path):
    links = re.findall(r"\]\(([^)#:]*\.md)?#([^)]+)\)", page.read_text())

    assert [link for link in links if link[1] not in anchors_of(page.parent / link[0] if link[0] else page)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path):
    named = re.findall(r"`((?:src/holdfast|tests|examples|docs|benchmarks)/[\w./-]*)`", page.read_text())

    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_architecture_page_names_files_that_are_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = "membership|recovery|comm|train|checkpoint|faults|launch|report|cli|testing|workloads"

    named = re.findall(rf"`((?:{rooms})/\w+\.py)`", text)

    assert named
    assert [name for name in named if not (ROOT / "src" / "holdfast" / name).exists()] == []


def test_the_architecture_page_has_a_row_for_every_room():
    text = (ROOT / "docs" / "architecture.md").read_text()
    source = ROOT / "src" / "holdfast"
    rooms = [p.name + "/" for p in source.iterdir() if p.is_dir() and list(p.glob("*.py"))]
    rooms += [p.name for p in source.glob("*.py") if not p.name.startswith("__")]

    assert [room for room in sorted(rooms) if f"| `{room}` |" not in text] == []


def test_every_choice_of_a_setting_is_documented():
    from holdfast import config as settings

    page = (ROOT / "docs" / "cli.md").read_text()

    for choices in (
        settings.FABRICS,
        settings.STRATEGIES,
        settings.ORDERS,
        settings.SPLITS,
        settings.BATCHES,
        settings.RESCALES,
    ):
        assert "\\|".join(choices) in page


def test_the_example_in_the_readme_parses():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)

    assert blocks
    for block in blocks:
        ast.parse(block)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_says_what_it_shows_and_how_to_run_it(path: Path):
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""

    assert "What you will see:" in docstring
    assert f"examples/{path.name}" in docstring
    assert "*Covers:*" in docstring
    assert len(path.read_text().splitlines()) <= 100


@pytest.mark.chaos
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_as_one_worker(path: Path, tmp_path: Path):
    # A script of torch.distributed looks for a launcher's variables, whatever its backend is.
    launcher = ["-m", "holdfast", "run", "-n", "1"] if "init_process_group" in path.read_text() else []
    done = subprocess.run(
        [sys.executable, "-W", "error", *launcher, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "steps" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_no_file_names_a_place_on_the_machine_that_it_was_written_on():
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in own_files()
        for word in FORBIDDEN
        if word in path.read_text(errors="replace")
    ]

    assert found == []


def test_make_alone_lists_every_target():
    lines = (ROOT / "Makefile").read_text().splitlines()
    phony = next(line for line in lines if line.startswith(".PHONY:")).split()[1:]
    explained = [line.split(":")[0] for line in lines if re.match(r"[a-z0-9-]+:.*## ", line)]

    assert sorted(phony) == sorted(explained)
    assert {"setup", "demo", "test", "check", "chaos", "bench", "clean"} <= set(phony)


def test_one_list_of_tools_for_contributors():
    """The Makefile reads the list from pyproject.toml instead of having one of its own."""
    assert '["dependency-groups"]["dev"]' in (ROOT / "Makefile").read_text()
    assert "pytest>=" not in (ROOT / "Makefile").read_text()


def test_the_license_is_whole():
    text = (ROOT / "LICENSE").read_text()

    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_continuous_integration_runs_the_tests():
    from holdfast.torch_private import TRIED

    script = ROOT / ".ci" / "run"

    assert script.stat().st_mode & 0o111
    assert "make test" in script.read_text()
    assert f"make test-torch VERSION={TRIED}" in script.read_text()
