"""Imports run one way; this table says which. docs/explanation/architecture.md shows the same one."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast

SOURCE = Path(__file__).parents[2] / "src"
RUNTIME, LAB = "holdfast", "holdfast_lab"

ROOMS = {
    "base": ("errors", "base"),
    "config": ("setting_choices", "setting_checks", "config"),
    "records": ("records", "summary"),
    "recovery": ("recovery",),
    "membership": ("membership",),
    "comm": ("comm",),
    "checkpoint": ("checkpoint",),
    "faults": ("faults",),
    "data": ("data",),
    "state": ("state", "integrity"),
    "engine": ("models", "engine"),
    "session": ("session",),
    "launch": ("launch",),
    "doors": ("distributed", "integrations"),
    "observe": ("observe",),
    "tools": ("tools", "testing"),
}
"""Room of the runtime: its top-level folders and modules. At most 16; docs/explanation/architecture.md has a row for each."""

MAY_IMPORT = {
    "base": set(),
    "config": {"recovery.registry", "comm.fabrics", "checkpoint.files.registry"},
    "records": {"recovery.decisions"},
    "recovery": set(),
    "membership": set(),
    "comm": {"recovery.messages", "faults.points", "membership"},
    "checkpoint": {"faults.points", "comm.device"},
    "faults": set(),
    "data": set(),
    "state": {"config", "records", "recovery", "comm", "checkpoint", "faults.process", "data"},
    "engine": {"config", "records", "recovery", "comm", "checkpoint", "faults", "data", "state"},
    "session": {"config", "records", "recovery", "comm", "faults.points", "data", "state", "engine"},
    "launch": {"config", "records", "recovery", "comm.fabrics", "membership", "faults.plan", "engine.start_rank"},
    "doors": {
        "config",
        "records",
        "recovery",
        "membership",
        "comm",
        "checkpoint.format",
        "faults",
        "data.seeds",
        "state",
        "engine",
        "session",
        "launch",
        "observe.terminal",
    },
    "observe": {"records", "data.assignment", "launch"},
    "tools": {
        "config",
        "records",
        "recovery",
        "comm",
        "checkpoint",
        "data",
        "state",
        "engine",
        "launch",
        "observe.report_text",
        "observe.terminal",
    },
    # The laboratory: it imports the runtime, never the reverse.
    "lab.workloads": {"holdfast"},  # the public names of the package
    "lab.inject": {"checkpoint", "faults", "tools.formats"},
    "lab.simulate": {
        "records",
        "checkpoint.interval",
        "recovery",
        "faults.plan",
    },
    "lab.virtual_ddp": {
        "records",
        "config",
        "recovery",
        "faults.plan",
        "data",
        "models",
    },
    "lab.counting": {"comm"},
    "lab.memory": {"comm", "models.part"},
    "lab.pages": {
        "records",
        "observe.page",
        "observe.report_text",
    },
    "lab.studies": {
        "holdfast",
        "records",
        "recovery",
        "tools.against",
        "tools.iteration_cost",
        "checkpoint",
        "comm",
        "faults",
        "session",
        "models",
        "tools.formats",
        "lab.workloads",
        "lab.inject",
        "lab.simulate",
        "lab.virtual_ddp",
        "lab.pages",
    },
}
"""Room: what it may import besides itself and ``base``: rooms, or modules of one. ``cli``, ``lab.commands``, ``__init__`` and ``__main__`` may import everything of their package."""

EVERYTHING = {"cli", "lab.commands", "__init__", "__main__", "lab.__init__"}

OUTER = {"doors", "observe", "tools"}
"""Rooms around the core."""

WITHOUT_TORCH = (
    "errors",
    "base.clock",
    "base.device_errors",
    "base.formatting",
    "base.lazy",
    "base.notice",
    "base.on_import",
    "base.options",
    "base.orders",
    "base.phases",
    "base.registered",
    "base.rules",
    "base.side_work",
    "base.slurm",
    "base.system_errors",
    "base.temporary",
    "checkpoint.files.registry",
    "checkpoint.interval",
    "comm.launchers",
    "config",
    "engine.start_rank",
    "records",
    "membership",
    "recovery",
    "observe",
    "tools.against",
    "tools.certificate",
    "tools.debug",
    "tools.divergence",
    "tools.iteration_cost",
    "tools.replay",
    "launch",
    "cli",
    "faults.points",
    "faults.plan",
    "integrity.hash_chain",
    "integrations.ray.configs",
    "integrations.ray.function",
    "integrations.ray.jobs",
    "integrations.ray.node",
    "state.platform",
    "state.gpu_platform",
    "state.hash_seed",
    "lab.simulate",
    "lab.pages",
    "lab.commands",
)


ROOM_OF = {folder: room for room, folders in ROOMS.items() for folder in folders}


def room_of(path: Path) -> str:
    return room_of_parts(*path.relative_to(SOURCE).parts[:2])


def room_of_parts(package: str, folder: str) -> str:
    folder = folder.removesuffix(".py")
    return f"lab.{folder}" if package == LAB else ROOM_OF.get(folder, folder)


@functools.cache
def imports_of(source: str) -> tuple[tuple[int, str], ...]:
    """Return line and full name of everything of the two packages that a file with this text imports."""
    return tuple(imports_in(ast.parse(source)))


def imports_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
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
            if name.split(".")[0] in (RUNTIME, LAB):
                yield node.lineno, name


def full(name: str) -> set[str]:
    """Return the full names of what a row names: the folders of a room, or one folder or module; of the runtime, if nothing else is said."""
    if name.startswith("lab."):
        return {f"{LAB}.{name.removeprefix('lab.')}"}
    return {RUNTIME} if name == RUNTIME else {f"{RUNTIME}.{folder}" for folder in ROOMS.get(name, (name,))}


def is_allowed(imported: str, allowed: set[str]) -> bool:
    if RUNTIME in allowed and imported in (RUNTIME, *(f"{RUNTIME}.{name}" for name in holdfast.__all__)):
        return True
    return any(imported == name or imported.startswith(f"{name}.") for name in allowed - {RUNTIME})


def forbidden_imports(source: str, room: str) -> list[str]:
    allowed = set().union(*map(full, MAY_IMPORT[room] | {room, "base"}))  # base: the ground of every room
    return [f"line {line}: {name}" for line, name in imports_of(source) if not is_allowed(name, allowed)]


FILES = sorted(SOURCE.rglob("*.py"))


def test_a_file_imports_only_what_its_room_may():
    found = {}
    for path in FILES:
        room = room_of(path)
        if room in EVERYTHING:
            continue
        assert room in MAY_IMPORT, (
            f"{path} lies in no room: give its folder a place in ROOMS and in docs/explanation/architecture.md"
        )
        if wrong := forbidden_imports(path.read_text(), room):
            found[str(path.relative_to(SOURCE))] = wrong

    assert found == {}


def outward_imports(source: str, room: str) -> list[str]:
    """Return the imports of an outer ring in a file of ``room``; none if the room may reach all rings, or stands in one."""
    if room in EVERYTHING | OUTER or room.startswith("lab."):
        return []
    return [name for _, name in imports_of(source) if rooms_imported(f"import {name}") & OUTER]


def test_the_core_imports_no_outer_ring():
    outward = {
        str(path.relative_to(SOURCE)): names
        for path in FILES
        if (names := outward_imports(path.read_text(), room_of(path)))
    }

    assert outward == {}
    assert not any(name.split(".")[0] in OUTER for room in ROOMS.keys() - OUTER for name in MAY_IMPORT[room])


@pytest.mark.parametrize(
    ("room", "line", "is_outward"),
    [
        ("launch", "def f():\n    from holdfast.observe.page.html import write_page", True),
        ("session", "from holdfast import distributed", True),
        ("launch", "from holdfast.summary.build import build_report", False),
        ("cli", "from holdfast.observe.page.html import write_page", False),
        ("tools", "from holdfast.observe.page.html import write_page", False),
    ],
)
def test_an_outward_import_is_found(room, line, is_outward):
    assert bool(outward_imports(line, room)) is is_outward


def test_the_runtime_imports_nothing_of_the_laboratory():
    found = {
        str(path.relative_to(SOURCE)): name
        for path in FILES
        if not room_of(path).startswith("lab.")
        for _, name in imports_of(path.read_text())
        if name.split(".")[0] == LAB
    }

    assert found == {}


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("recovery", "from holdfast.comm.base import Communicator"),
        ("recovery", "import holdfast"),
        ("faults", "from holdfast.checkpoint import save"),
        ("lab.workloads", "from holdfast.session.session import Session"),
        ("membership", "from holdfast.comm.base import Communicator"),
        ("engine", "from holdfast.membership import open_store"),
        ("records", "def f():\n    from holdfast.config import Settings"),
        ("records", "from holdfast_lab.pages.study import figures"),
        ("base", "from holdfast import events"),
        ("state", "from holdfast.models.trainable import Trainable"),
        ("state", "from holdfast.engine.loop import TrainingLoop"),
        ("engine", "from holdfast.session.session import Session"),
    ],
)
def test_the_check_above_can_fail(room, line):
    assert len(forbidden_imports(line, room)) == 1


def test_the_architecture_page_has_a_row_for_each_room_and_its_folders():
    """The page says what a room is for; what it may import stands here alone."""
    text = (SOURCE.parent / "docs" / "explanation" / "architecture.md").read_text().partition("## The interfaces")[0]
    rows = [
        re.findall(r"`([\w/.]+)`", cell)
        for cell in re.findall(r"^\| (`[^|]+) \|[^|]+\|[^|]+\|$", text, flags=re.MULTILINE)
    ]
    folders = [{name.removesuffix(".py").rstrip("/").replace("holdfast_lab/", "lab.") for name in row} for row in rows]
    expected = [set(ROOMS[room]) if room in ROOMS else {room} for room in MAY_IMPORT]
    assert [row - EVERYTHING for row in folders if row != {"lab.commands"}] == expected


def test_there_are_at_most_16_rooms():
    assert len(ROOMS) <= 16
    assert set(ROOMS) == {room for room in MAY_IMPORT if not room.startswith("lab.")}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return what imports each other in a circle, one list a circle; late imports and those for types count."""

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            new = imports.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen

    reach = {name: reached(name) for name in imports}
    return sorted({tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in imports if a in reach[a]})


def test_no_modules_import_each_other_in_a_circle():
    modules = {module_of(path) for path in FILES}
    imports = {}
    for path in FILES:
        own = module_of(path)
        found = {name if name in modules else name.rpartition(".")[0] for _, name in imports_of(path.read_text())}
        # A package and what lies in it may know each other: importing the second imports the first.
        imports[own] = {
            name for name in found & modules if name not in (own, RUNTIME, LAB) and not own.startswith(f"{name}.")
        }

    assert circles(imports) == []


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [("a", "b", "c")]


def rooms_imported(source: str) -> set[str]:
    """Return the rooms that ``source`` imports; names of the packages themselves are no rooms."""
    names = (name.split(".") for _, name in imports_of(source))
    return {room_of_parts(*parts[:2]) for parts in names if len(parts) > 1} & set(MAY_IMPORT)


def imports_of_rooms() -> dict[str, set[str]]:
    imports = defaultdict(set)
    for path in FILES:
        imports[room_of(path)] |= rooms_imported(path.read_text()) - {room_of(path)}
    return imports


def test_no_rooms_import_each_other_in_a_circle():
    assert circles(imports_of_rooms()) == []


def test_a_model_that_imports_the_session_closes_a_circle_of_rooms():
    imports = imports_of_rooms()
    imports["engine"] |= rooms_imported("def f():\n    from holdfast.session.session import Session")

    assert ("engine", "session") in circles(imports)


BEFORE_A_COMMAND = ("errors", "base", "config", "launch.job")
"""What commands need at once: their options, and what says in one line that no more files may be opened."""


@pytest.mark.parametrize("path", sorted((SOURCE / RUNTIME / "cli").glob("*.py")), ids=lambda path: path.name)
def test_a_command_imports_the_package_only_when_it_runs(path: Path):
    at_import = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]

    found = {name for node in at_import for _, name in imports_of(node)}

    assert [
        name
        for name in found
        if not is_allowed(
            name,
            {f"{RUNTIME}.{part}" for part in (*BEFORE_A_COMMAND, "cli")},
        )
    ] == []


def python_without_torch(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where importing torch or mpi4py raises."""
    block = "import sys\nfor name in ('torch', 'mpi4py'): sys.modules[name] = None\n"
    return subprocess.run(
        [sys.executable, "-c", block + code],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def modules_of(room: str) -> list[str]:
    places = [SOURCE.joinpath(*name.split(".")) for name in sorted(full(room))]
    files = [path for place in places for path in (sorted(place.rglob("*.py")) or [place.with_suffix(".py")])]
    return [name for name in map(module_of, files) if not name.endswith("__main__")]


def test_rooms_without_torch_load_where_there_is_none():
    modules = [name for room in WITHOUT_TORCH for name in modules_of(room)]

    done = python_without_torch("import importlib\nfor name in " + repr(modules) + ": importlib.import_module(name)")

    assert done.returncode == 0, done.stderr


def test_planning_needs_no_torch():
    start = "import runpy, holdfast_lab.simulate; sys.argv = ['holdfast', 'plan', '--help']; runpy.run_module('holdfast', run_name='__main__')"

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

    assert done.stdout.strip() == "['holdfast.base', 'holdfast.base.lazy'] 1"


def is_elsewhere(name):
    """Return whether a module needs another environment: scripts of studies, and what belongs to one framework."""
    return ".workers." in name or name.startswith("holdfast.integrations.") or name.endswith(".ordered_add_kernel")


def test_importing_every_room_starts_no_thread():
    before = threading.active_count()

    for room in MAY_IMPORT:
        for name in modules_of(room):
            if not is_elsewhere(name):
                importlib.import_module(name)

    assert threading.active_count() == before


def test_all_names_what_is_there():
    wrong = {}
    for name in map(module_of, FILES):
        if name.endswith("__main__") or is_elsewhere(name):
            continue
        module = importlib.import_module(name)
        exported = getattr(module, "__all__", [])
        assert len(set(exported)) == len(exported)  # ruff sorts them
        if missing := [wanted for wanted in exported if not hasattr(module, wanted)]:
            wrong[name] = missing

    assert wrong == {}


def test_the_front_door_offers_what_it_says():
    assert set(holdfast.__all__) == set(holdfast._WHERE) | {"__version__"}
    assert dir(holdfast) == sorted(holdfast.__all__)
    for name, module in holdfast._WHERE.items():
        assert getattr(holdfast, name) is getattr(importlib.import_module(module), name)


def test_a_name_that_is_not_there_is_refused_by_name():
    with pytest.raises(AttributeError, match="module 'holdfast' has no attribute 'Sesion'"):
        holdfast.Sesion  # noqa: B018


@pytest.mark.parametrize("first", ["holdfast.distributed", "torch", "holdfast"])
def test_the_backend_may_be_imported_before_torch(first):
    code = f"import {first}, torch.distributed as dist; print('holdfast' in dist.Backend.backend_list)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert (done.stdout.strip(), done.stderr) == ("True", "")


def test_no_two_public_classes_have_the_same_name():
    places = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(SOURCE)))

    assert len(places) > 300
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


AROUND_THE_CORE = {"distributed", "integrations", "observe", "tools"}
MOST_LINES = {"core": 55_250, "runtime": 75_200, "laboratory": 35_900}
"""Budgets. A room that is full is redrawn: growth in one place needs a deletion in another."""
OF_RUNTIME = [path for path in FILES if path.is_relative_to(SOURCE / RUNTIME)]
MOST_LINES_OF_FILE, MOST_LINES_OF_FUNCTION, MOST_PARAMETERS, MOST_LOOSE_MODULES = 500, 60, 10, 4


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_the_source_keeps_to_its_budgets_of_lines():
    of_core = [path for path in OF_RUNTIME if path.relative_to(SOURCE).parts[1] not in AROUND_THE_CORE]
    lines = {
        "core": sum(map(lines_of, of_core)),
        "runtime": sum(map(lines_of, OF_RUNTIME)),
        "laboratory": sum(map(lines_of, FILES)) - sum(map(lines_of, OF_RUNTIME)),
    }

    assert {name: count for name, count in lines.items() if count > MOST_LINES[name]} == {}


def test_no_file_and_no_function_is_longer_than_can_be_read_at_once():
    long = {str(path.relative_to(SOURCE)): lines_of(path) for path in OF_RUNTIME if lines_of(path) > MOST_LINES_OF_FILE}
    for path in OF_RUNTIME:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size, parameters = node.end_lineno - node.lineno + 1, len(node.args.args) + len(node.args.kwonlyargs)
                if size > MOST_LINES_OF_FUNCTION or parameters > MOST_PARAMETERS:
                    long[f"{path.relative_to(SOURCE)}:{node.name}"] = (size, parameters)

    assert long == {}


def test_few_modules_stand_beside_the_folders():
    loose = {path.name for path in (SOURCE / RUNTIME).glob("*.py")} - {"__init__.py", "__main__.py"}

    assert len(loose) <= MOST_LOOSE_MODULES, loose
