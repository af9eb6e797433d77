"""What ``make test`` leaves out: never the only test of a command, a study, an example or an option of ``holdfast run``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from drawn import DRAWN, LONGEST_S, draw, is_whole_suite
from reach import words_of

ROOT = Path(__file__).resolve().parents[2]

RUN_BY = {
    "run": "chaos/test_exact_ulfm.py",
    "doctor": "unit/test_doctor.py",
    "status": "chaos/test_terminal.py",
    "top": "chaos/test_terminal.py",
    "scale": "chaos/test_rejoin.py",
    "set": "chaos/test_rejoin.py",
    "report": "cli/test_run_options.py",
    "dashboard": "unit/test_followed_runs.py",
    "diff-runs": "chaos/test_certificate.py",
    "verify": "chaos/test_certificate.py",
    "debug-bundle": "unit/test_debug_bundle.py",
    "ckpt ls": "cli/test_ckpt.py",
    "ckpt show": "cli/test_ckpt.py",
    "ckpt verify": "cli/test_ckpt.py",
    "ckpt diff": "cli/test_ckpt.py",
    "ckpt convert": "cli/test_ckpt.py",
    "ckpt prune": "cli/test_ckpt.py",
    "demo": "lab/cli/test_demo.py::test_the_demo_shows_that_rollback_keeps_every_bit",
    "rehearse": "lab/test_rehearsal.py::test_what_is_chosen_can_be_pasted_into_a_run",
    "study": "lab/cli/test_studies_tiny.py::test_every_part_of_a_study_measures_something",
    "simulate": "lab/cli/test_simulate.py",
    "plan": "lab/cli/test_plan.py",
    "inject": "lab/cli/test_inject.py",
}
"""By command: the beginning of the names, below ``tests/``, of tests that run it to its end, with results. Refusals do not count."""

NOT_HERE = {
    "--log-to": "needs packages that are in .venv-loggers alone: make loggers",
    "--network": "needs hosts with several networks: the parser's own tests, and make soak",
    "--run-dir": "stands for --checkpoint-dir where there is none: tests/unit/test_hosts.py",
}
"""Options that no test of real workers passes, and why."""

NOT_COUNTED = ("chaos/test_soak.py", "lab/")
"""Of options: the campaign's files name all and draw a few, and commands of the lab have some of the same names."""

FRAMEWORKS = "examples/frameworks/"
"""Their examples run in .venv-integrations, which ``.ci/run`` does as well."""


@pytest.fixture(scope="module")
def left_in(request):
    """The tests that are run, with the words that their source reaches, by name below ``tests/``."""
    if not is_whole_suite(request.config) or request.config.option.keyword:
        pytest.skip("judges the whole list: make test")
    drawn = request.config.stash.get(DRAWN, set())
    items = [item for item in request.session.items if item.nodeid not in drawn]
    return {item.nodeid.removeprefix("tests/"): (item, words_of(item)) for item in items}


def commands(group, before=()):
    """Yield the words of each command."""
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "list_commands"):
            yield from commands(command, (*before, name))
        else:
            yield (*before, name)


def test_every_command_is_run_by_a_test(left_in):
    from holdfast.cli import app

    known = {" ".join(words) for words in commands(typer.main.get_command(app))}
    without = {
        command
        for command, test in RUN_BY.items()
        if not any(name.startswith(test) and set(command.split()) <= words for name, (_, words) in left_in.items())
    }

    assert known == set(RUN_BY)
    assert without == set(), "no test of make test runs them"


def test_every_study_is_run_by_a_test(left_in):
    from holdfast_lab.studies import STUDIES

    run = {item.callspec.params["name"] for name, (item, _) in left_in.items() if name.startswith(RUN_BY["study"])}

    assert run == set(STUDIES)


def test_every_option_of_run_is_passed_to_real_workers_by_a_test(left_in):
    from holdfast.base.options import fields_of, variable
    from holdfast.cli.run import OPTIONS
    from holdfast.config import Settings

    real = [
        words
        for name, (item, words) in left_in.items()
        if item.get_closest_marker("chaos") and not name.startswith(NOT_COUNTED)
    ]
    passed = set().union(*real)
    variables = {each.name: variable(each.name) for each in fields_of(Settings)}  # which stand for the option
    names = {each.flag: {each.flag, *each.option.flags, variables.get(each.name, each.flag)} for each in OPTIONS}
    without = {flag for flag, same in names.items() if not same & passed}

    assert without == set(NOT_HERE), "not passed by any test of make test, or passed and still an exception"


def test_every_example_runs(left_in):
    """Scripts by real workers, scenarios by the simulator."""
    judges = {
        ".py": lambda name, item: item.get_closest_marker("chaos"),
        ".toml": lambda name, item: "test_simulate" in name,
    }
    without = []
    for suffix, runs_it in judges.items():
        reached = set().union(*(words for name, (item, words) in left_in.items() if runs_it(name, item)))
        names = {Path(word).name for word in reached}
        paths = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "examples").rglob(f"*{suffix}"))]
        assert paths
        without += [path for path in paths if not path.startswith(FRAMEWORKS) and Path(path).name not in names]

    assert without == []


def item(name, *marks):
    """Return what :func:`draw` asks of a collected test."""
    by_name = {mark.name: mark for mark in marks}
    return SimpleNamespace(nodeid=name, get_closest_marker=by_name.get)


SOAK, HOURS = pytest.mark.soak.mark, pytest.mark.timeout(LONGEST_S + 1).mark


def test_a_twentieth_is_drawn_and_the_same_with_the_same_seed():
    items = [item(f"a.py::test_{number}", SOAK) for number in range(40)]

    first = draw(items, 1)

    assert len(first) == 2
    assert draw(items[::-1], 1) == first
    assert {each.nodeid for seed in range(300) for each in draw(items, seed)} == {each.nodeid for each in items}


def test_of_many_parameters_one_is_drawn_and_of_hours_and_of_those_that_run_anyway_none():
    campaign = [item(f"a.py::test_random[{number}]", SOAK) for number in range(300)]

    assert len(draw(campaign, 1)) == 1
    assert draw([item("a.py::test_for_hours", SOAK, HOURS), item("a.py::test_short")], 1) == []
