"""What is documented is there, and what is there is documented."""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from generate import GENERATED, HELP_MODULE, help_module, options, rewritten
from jobs import clean_env, holdfast

from holdfast.cli import lab, main

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FOLDERS = "src/holdfast|tests|examples|docs|benchmarks|deploy"
SOURCE = ROOT / "src" / "holdfast"
ROOMS = {"holdfast_lab", *(path.name for path in SOURCE.iterdir() if list(path.glob("*.py")))}
TEXT = (".py", ".md", ".toml", ".html", ".css", ".yml", "Makefile", "run", ".gitignore")

# Written in two parts, so that this file does not name what it forbids.
FORBIDDEN = ["/" + "work/", "/" + "root/", "/" + "home/", "/" + "tmp/bash", "TODO" + ":", "FIX" + "ME"]


@functools.cache
def commands() -> dict[str, Any]:
    from holdfast.cli import app

    group = typer.main.get_command(app)
    return {name: group.get_command(None, name) for name in group.list_commands(None)}


@functools.cache
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
def test_every_command_is_documented_with_its_options_and_has_an_example(name):
    command = commands()[name]
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    section = page[page.index(f"## holdfast {name}") :].split("\n## ")[0]
    written = set(re.findall(r"`(-{1,2}[a-z][a-z-]*)", section))
    flags = {flag for p in command.params if not getattr(p, "hidden", False) for flag in p.opts if flag.startswith("-")}

    assert flags - {"--help"} <= written, "not in docs/reference/cli.md"
    assert re.search(rf"Example: .*holdfast {name}", command.help)


def test_no_option_is_documented_that_there_is_not():
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    known = {flag for command in commands().values() for p in command.params for flag in p.opts}

    rows = re.findall(r"^\| `(--?[a-z-]+)", page, flags=re.MULTILINE)

    assert rows
    assert set(rows) <= known


@functools.cache
def anchors_of(page: Path) -> set[str]:
    """Return where a link into a page may lead, by GitHub's rule."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_a_page_lead_somewhere_and_files_that_it_names_are_there():
    wrong = set()
    for page in PAGES:
        text = page.read_text()
        files = {page.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)}
        files |= {ROOT / name for name in re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", text)}
        if page.parent.name == "explanation":
            named = [name for name in re.findall(r"`((?:\w+/)+\w+\.py)`", text) if name.split("/")[0] in ROOMS]
            files |= {SOURCE / ("." if (SOURCE / name).exists() else "..") / name for name in named}
        wrong |= {(page, file) for file in files if not file.exists()}
        links = re.findall(r"\]\(([^)#:]*\.md)?#([^)]+)\)", text)
        wrong |= {
            (page, link) for link in links if link[1] not in anchors_of(page.parent / link[0] if link[0] else page)
        }

    assert wrong == set()


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_part_of_a_page_is_what_the_code_says(name):
    page = (ROOT / "docs" / "reference" / GENERATED[name][0]).read_text()

    assert page == rewritten(page, name), "python docs/generate.py"


def test_the_help_that_needs_no_command_is_that_of_the_commands():
    assert HELP_MODULE.read_text() == help_module(), "python docs/generate.py"


def test_the_help_and_the_version_load_no_command():
    code = (
        "import contextlib, sys; from holdfast.cli import main\n"
        "for words in (['--help'], ['--version']):\n"
        "    with contextlib.suppress(SystemExit): main(words)\n"
        "loaded = {'typer', 'rich', 'numpy', 'holdfast.cli.app'} & set(sys.modules)\n"
        "sys.exit(str(loaded) if loaded else 0)"
    )
    environment = os.environ | {"COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "  debug-bundle  Collect what helps" in done.stdout


@pytest.mark.parametrize("word", ["--help", "--version"])
@pytest.mark.parametrize(
    ("to", "said"),
    [("/dev/full", "error: cannot write to stdout: No space left on device; send it elsewhere\n"), ("", "")],
)
def test_an_answer_that_stdout_does_not_take_gives_no_traceback(word, to, said):
    if to:
        stdout = os.open(to, os.O_WRONLY)
    else:  # a pipe that nothing reads
        reads, stdout = os.pipe()
        os.close(reads)
    command = [sys.executable, "-m", "holdfast", word]
    environment = os.environ | {"COLUMNS": "80"}

    done = subprocess.run(
        command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )

    os.close(stdout)
    assert (done.returncode, done.stderr) == (1, said)


def test_in_a_narrow_terminal_the_help_fits(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")

    with pytest.raises(SystemExit):
        main(["--help"])

    said = capsys.readouterr().out
    assert "  run " in said
    assert max(map(len, said.splitlines())) <= 60


HELP = """
import contextlib
from holdfast.cli import main
for flag in ("--help", "--help-all"):
    with contextlib.suppress(SystemExit):
        main(["run", flag])
    print("\\f")
"""


@pytest.fixture(scope="module")
def run_help() -> tuple[str, str]:
    """What ``holdfast run --help`` and ``--help-all`` print."""
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    basic, whole, _ = done.stdout.split("\f")
    return basic, whole


def flags_in(text: str) -> list[str]:
    """Return the main name of each option that a help text lists."""
    return re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, flags=re.MULTILINE)


def test_help_lists_the_basic_options_and_help_all_every_one(run_help):
    from holdfast.cli.run import OPTIONS

    basic, whole = map(flags_in, run_help)
    known = [each.flag for each in OPTIONS]

    assert len(basic) < 20
    assert set(basic) == {each.flag for each in OPTIONS if each.option.is_basic} | {"--help", "--help-all"}
    assert [flag for flag in whole if flag not in ("--help", "--help-all")] == known
    assert {"--help", "--help-all"} < set(whole)


def test_the_groups_of_help_all_are_those_of_the_reference_page(run_help):
    from holdfast.base.options import GROUPS

    headings = re.findall(r"^(\w.*):$", run_help[1], flags=re.MULTILINE)

    assert headings == ["Arguments", "Options", *GROUPS]
    assert re.findall(r"^### (.+)$", options(), flags=re.MULTILINE) == list(GROUPS)


def test_the_commands_of_the_lab_are_where_the_core_says_they_are():
    declared_there = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "holdfast.commands"
    ]

    assert declared_there == {name: f"holdfast_lab.commands.{name}:{name}" for name in lab.COMMANDS}
    for name, said in lab.COMMANDS.items():
        assert commands()[name].help.replace("\n", " ").startswith(said.split(",")[0].rstrip("."))


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


OF_LAUNCHER = [path for path in EXAMPLES if "init_process_group" in path.read_text()]
"""A script of torch.distributed looks for a launcher's variables, whatever its backend is."""
EACH_IN_A_FORK = """
import os, runpy, sys, holdfast.session.session
for path in sys.argv[1:]:
    print(path, flush=True)
    if (child := os.fork()) == 0:
        sys.argv = [path]
        runpy.run_path(path, run_name="__main__")
        break
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(code)
"""


@pytest.mark.chaos
@pytest.mark.parametrize("paths", [[path for path in EXAMPLES if path not in OF_LAUNCHER]], ids=["all"])
def test_examples_run_as_one_worker(paths: list[Path], tmp_path: Path):
    """Forked from one process, which has imported torch."""
    command = [sys.executable, "-W", "error", "-c", EACH_IN_A_FORK, *map(str, paths)]

    done = subprocess.run(
        command, cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    said = [done.stdout.partition(f"{path}\n")[2].partition(f"{ROOT}/")[0] for path in paths]
    assert all("steps" in text for text in said), said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.chaos
@pytest.mark.parametrize("path", OF_LAUNCHER, ids=lambda path: path.name)
def test_an_example_of_torch_distributed_runs_as_one_worker(path: Path, tmp_path: Path):
    done = holdfast("run", "-n", 1, path, cwd=tmp_path)

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


def test_one_list_of_tools_for_contributors(tmp_path):
    """The Makefile reads the list from pyproject.toml: it names the tool that is put there, and none of its own."""
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(project.replace('"hypothesis>=6.100"', '"another-tool>=1"'))
    code = re.search(r"^DEV := (.*)$", makefile, flags=re.MULTILINE)[1]

    read = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    tools = tomllib.loads(project)["dependency-groups"]["dev"]
    assert set(read.splitlines()) == {"another-tool>=1", *tools} - {"hypothesis>=6.100"}
    assert makefile.count("$(DEV)") == makefile.count("--editable '.[all]'") > 1, "each environment gets the tools"
    assert [tool for tool in tools if tool.split(";")[0] in makefile] == []


def test_the_license_is_whole():
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()

    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30", "not the text of apache.org"


@pytest.mark.parametrize("failing", [None, "setup", "test", "test-torch", "integrations"])
def test_continuous_integration_runs_the_tests_fails_with_them_and_says_what_each_part_took(failing, tmp_path):
    from holdfast.base.torch_private import TRIED

    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\ntest "$1" != "{failing}"\n')
    make.chmod(0o755)

    ended = subprocess.run(
        [ROOT / ".ci" / "run"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )

    called = (tmp_path / "called").read_text().splitlines()
    parts = ["setup", "test", f"test-torch VERSION={TRIED}", "integrations ONLY=core", "integrations ONLY=slurm"]
    assert called == parts[: {"setup": 1, "test": 2, "test-torch": 3, "integrations": 4}.get(failing, 5)]
    assert (ended.returncode == 0) == (failing is None)
    times = [re.sub(r"\d+ s$", "T", line) for line in ended.stdout.splitlines()]
    assert times == [f"make {each}: {'failed after ' if each.split()[0] == failing else ''}T" for each in called]


def test_the_glossary_has_one_meaning_for_each_word_in_alphabetical_order_and_each_is_used():
    page = ROOT / "docs" / "reference" / "glossary.md"
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", page.read_text(), flags=re.MULTILINE)
    texts = [path.read_text().lower() for path in own_files() if path != page and path.suffix in (".md", ".py")]

    assert len(words) > 80
    assert words == sorted(set(words), key=str.lower)
    assert [word for word in words if not any(word.lower() in text for text in texts)] == []
