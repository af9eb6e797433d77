"""Imports run one way; this table says which. docs/architecture.md shows the same one."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"

MAY_IMPORT = {
    "errors": set(),
    "points": set(),
    "notice": set(),
    "events": {"errors"},
    "clock": {"errors"},
    "interval": {"errors"},
    "kinds": set(),
    "links": set(),
    "temporary": set(),
    "settings": {"errors"},
    "torch_private": set(),
    "records": {"errors", "events"},
    "membership": {"errors"},
    "recovery": {"errors", "events"},
    "comm": {"errors", "events", "clock", "points", "membership", "torch_private"},
    "checkpoint": {"errors", "events", "clock", "points", "interval", "temporary", "torch_private"},
    "guard": {"errors", "events", "comm"},
    "simulate": {"errors", "events", "records", "clock", "interval", "recovery", "faults.plan"},
    "faults": {
        "errors",
        "events",
        "clock",
        "points",
        "checkpoint.format",
        # Where values lie in a file, and the digests of what is altered there.
        "checkpoint.blocks",
        "checkpoint.foreign",
        "checkpoint.load",
        "checkpoint.manifest",
        "checkpoint.pour",
        "checkpoint.storage",
    },
    "train": {
        "errors",
        "events",
        "clock",
        "points",
        "notice",
        "kinds",
        "links",
        "settings",
        "torch_private",
        "records",
        "recovery",
        "comm",
        "checkpoint",
        "faults",
        "guard",
    },
    "probe": {"errors", "train", "torch_private"},
    "dist": {
        "errors",
        "events",
        "clock",
        "points",
        "notice",
        "settings",
        "torch_private",
        "records",
        "comm",
        "faults",
        "train",
    },
    "workloads": {"", "errors"},  # the public names of the package, and what it raises
    "report": {"errors", "events", "links", "records"},
    "study": {
        "",
        "errors",
        "events",
        "torch_private",
        "recovery",
        "testing",
        "workloads",
        "report",
        "checkpoint",
        "faults",
        "simulate",
        "train.batched",
        "train.session",
    },
    "launch": {
        "errors",
        "events",
        "clock",
        "notice",
        "settings",
        "records",
        "membership",
        "temporary",
        "faults.plan",
        "report",
    },
    "testing": {
        "errors",
        "events",
        "clock",
        "points",
        "settings",
        "torch_private",
        "records",
        "recovery",
        "comm",
        "checkpoint",
        "faults",
        "guard",
        "train",
    },
}
"""Room: what it may import of the package besides itself. ``cli``, ``__init__`` and ``__main__`` may import everything."""

EVERYTHING = {"cli", "__init__", "__main__"}

WITHOUT_TORCH = (
    "errors",
    "points",
    "notice",
    "events",
    "clock",
    "interval",
    "kinds",
    "links",
    "temporary",
    "settings",
    "records",
    "membership",
    "recovery",
    "simulate",
    "report",
    "launch",
    "cli",
    "faults.plan",
)


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(tree: ast.AST, package: str = "holdfast") -> Iterator[tuple[int, str]]:
    """Yield line and name, below the package, of everything of the package that ``tree`` imports; "" is the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports are not used here"
            # `from holdfast.faults import plan` may name a module or a thing in one: the name decides.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == package:
                yield node.lineno, name.partition(".")[2]


def is_allowed(imported: str, allowed: set[str]) -> bool:
    if "" in allowed and imported in ("", *holdfast.__all__):
        return True
    return any(imported == name or imported.startswith(f"{name}.") for name in allowed if name)


def forbidden_imports(source: str, room: str) -> list[str]:
    allowed = MAY_IMPORT[room] | {room}
    return [f"line {line}: {name}" for line, name in imports_of(ast.parse(source)) if not is_allowed(name, allowed)]


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(SOURCE)) for path in FILES])
def test_a_file_imports_only_what_its_room_may(path: Path):
    room = room_of(path)
    if room in EVERYTHING:
        return

    assert room in MAY_IMPORT, f"{room} is a new room: give it a row in MAY_IMPORT and in docs/architecture.md"
    assert forbidden_imports(path.read_text(), room) == []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("recovery", "from holdfast.comm.base import Communicator"),
        ("recovery", "import holdfast"),
        ("faults", "from holdfast.checkpoint import save"),
        ("workloads", "from holdfast.train.session import Session"),
        ("membership", "from holdfast.comm.base import Communicator"),
        ("train", "from holdfast.membership import open_store"),
        ("report", "def f():\n    from holdfast.settings import Settings"),
        ("errors", "from holdfast import events"),
    ],
)
def test_the_check_above_can_fail(room, line):
    assert len(forbidden_imports(line, room)) == 1


@pytest.mark.parametrize("path", sorted((SOURCE / "cli").glob("*.py")), ids=lambda path: path.name)
def test_a_command_imports_the_package_only_when_it_runs(path: Path):
    at_import = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]

    found = {name for node in at_import for _, name in imports_of(node)}

    assert [name for name in found if name and not is_allowed(name, {"errors", "settings", "cli"})] == []


def python_without_torch(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where importing torch or mpi4py raises."""
    block = "import sys\nfor name in ('torch', 'mpi4py'): sys.modules[name] = None\n"
    return subprocess.run(
        [sys.executable, "-c", block + code],
        env=os.environ | {"PYTHONPATH": str(SOURCE.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def modules_of(room: str) -> list[str]:
    place = SOURCE.joinpath(*room.split("."))
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    names = [".".join(("holdfast", *file.relative_to(SOURCE).with_suffix("").parts)) for file in files]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def test_rooms_without_torch_load_where_there_is_none():
    modules = [name for room in WITHOUT_TORCH for name in modules_of(room)]

    done = python_without_torch("import importlib\nfor name in " + repr(modules) + ": importlib.import_module(name)")

    assert done.returncode == 0, done.stderr


def test_planning_needs_no_torch():
    start = "import runpy, holdfast.simulate; sys.argv = ['holdfast', 'plan', '--help']; runpy.run_module('holdfast', run_name='__main__')"

    done = python_without_torch(start)

    assert done.returncode == 0, done.stderr
    assert "plan" in done.stdout


def test_blocking_torch_does_block_it():
    done = python_without_torch("import holdfast.comm.base")

    assert "import of torch halted" in done.stderr


def test_importing_the_package_loads_nothing_heavy_and_starts_nothing():
    code = (
        "import sys, threading; before = set(sys.modules); import holdfast; after = set(sys.modules);"
        "print(sorted(n for n in after - before if n.split('.')[0] in"
        "  ('torch', 'numpy', 'mpi4py', 'typer', 'rich', 'matplotlib') or n.startswith('holdfast.')), threading.active_count())"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "[] 1"


def test_importing_every_room_starts_no_thread():
    before = threading.active_count()

    for name in (
        n
        for room in MAY_IMPORT
        if (SOURCE / room).exists() or (SOURCE / f"{room}.py").exists()
        for n in modules_of(room)
    ):
        importlib.import_module(name)

    assert threading.active_count() == before


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(SOURCE)) for path in FILES])
def test_all_names_what_is_there(path: Path):
    name = ".".join(("holdfast", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    if name.endswith("__main__"):
        return
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])

    assert len(set(exported)) == len(exported)  # ruff sorts them
    assert [wanted for wanted in exported if not hasattr(module, wanted)] == []


def test_the_front_door_offers_what_it_says():
    assert set(holdfast.__all__) == set(holdfast._WHERE) | {"__version__"}
    assert dir(holdfast) == sorted(holdfast.__all__)
    for name, module in holdfast._WHERE.items():
        assert getattr(holdfast, name) is getattr(importlib.import_module(module), name)


def test_a_name_that_is_not_there_is_refused_by_name():
    with pytest.raises(AttributeError, match="module 'holdfast' has no attribute 'Sesion'"):
        holdfast.Sesion  # noqa: B018
