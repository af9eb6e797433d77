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

_TABLE = """
errors:
base: errors
setting_choices: recovery.registry comm.fabrics checkpoint.files.registry
setting_checks: setting_choices recovery.registry
config: errors setting_choices setting_checks recovery.registry comm.fabrics checkpoint.files.registry
records: errors
membership: errors
recovery: errors
comm: errors recovery.messages faults.points membership
checkpoint: errors faults.points comm.device
faults: errors
data: errors
state: errors setting_choices config records recovery comm checkpoint faults.process data
integrity: errors config records.certified recovery comm checkpoint data state.context state.run_log
models: errors config records recovery comm checkpoint faults data state.context state.run_log state.transfer
    integrity
engine: errors config records recovery comm checkpoint faults data state integrity models
session: errors config records recovery comm faults.points data state models engine
distributed: errors config engine.start_rank records comm membership faults engine recovery checkpoint.format
    state.transfer
integrations: errors config engine.start_rank records membership comm.launchers data.seeds session state.manager
    distributed launch observe.terminal
summary: errors recovery.decisions records
observe: errors records summary data.assignment launch
tools: errors recovery comm data integrity.hash_chain models state engine.reinit_context records config checkpoint
    summary.files launch observe.report_text observe.terminal
launch: errors comm.fabrics recovery setting_choices config engine.start_rank records membership faults.plan summary
testing: errors recovery.messages comm
lab.workloads: holdfast holdfast.errors
lab.inject: holdfast.errors holdfast.checkpoint holdfast.faults holdfast.tools.formats
lab.simulate: holdfast.errors holdfast.records holdfast.checkpoint.interval holdfast.recovery holdfast.faults.plan
lab.virtual_ddp: holdfast.errors holdfast.records holdfast.config holdfast.recovery holdfast.faults.plan holdfast.data
    holdfast.models
lab.counting: holdfast.comm
lab.memory: holdfast.comm holdfast.models.part
lab.pages: holdfast.errors holdfast.records holdfast.summary.files holdfast.observe.page holdfast.observe.report_text
lab.studies: holdfast holdfast.errors holdfast.records holdfast.recovery holdfast.summary.files holdfast.tools.against
    holdfast.tools.iteration_cost holdfast.checkpoint holdfast.comm holdfast.faults holdfast.session holdfast.models
    holdfast.tools.formats lab.workloads lab.inject lab.simulate lab.virtual_ddp lab.pages
"""
MAY_IMPORT = {
    room: set(names.split()) for room, names in re.findall(r"^(\S+):((?:.*\n    )*.*)$", _TABLE, re.MULTILINE)
}
"""Room: what it may import besides itself. ``cli``, ``lab.commands``, ``__init__`` and ``__main__`` may import everything of their package."""

EVERYTHING = {"cli", "lab.commands", "__init__", "__main__", "lab.__init__"}

OUTER = {"distributed", "integrations", "observe", "tools"}
"""Rooms around the core: doors, displays and tools."""

WITHOUT_TORCH = """
errors base.clock base.device_errors base.formatting base.lazy base.notice base.on_import base.options base.orders
base.phases base.registered base.rules base.side_work base.slurm base.system_errors base.temporary
checkpoint.files.registry checkpoint.interval comm.launchers setting_choices setting_checks config engine.start_rank
records membership recovery summary observe tools.against tools.certificate tools.debug tools.divergence
tools.iteration_cost tools.replay launch cli faults.points faults.plan integrity.hash_chain integrations.ray.configs
integrations.ray.function integrations.ray.jobs integrations.ray.node state.platform state.gpu_platform
state.hash_seed lab.simulate lab.pages lab.commands
"""


def room_of(path: Path) -> str:
    package, room = path.relative_to(SOURCE).parts[:2]
    return ("lab." if package == LAB else "") + room.removesuffix(".py")


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


def full(name: str, room: str) -> str:
    """Return the full name of what a row of the table names: of the runtime if nothing else is said."""
    if name.startswith("lab."):
        return f"{LAB}.{name.removeprefix('lab.')}"
    return name if room.startswith("lab.") and name.split(".")[0] == RUNTIME else f"{RUNTIME}.{name}"


def is_allowed(imported: str, allowed: set[str]) -> bool:
    if RUNTIME in allowed and imported in (RUNTIME, *(f"{RUNTIME}.{name}" for name in holdfast.__all__)):
        return True
    return any(imported == name or imported.startswith(f"{name}.") for name in allowed - {RUNTIME})


def forbidden_imports(source: str, room: str) -> list[str]:
    allowed = {RUNTIME if name == RUNTIME else full(name, room) for name in MAY_IMPORT[room]} | {full(room, room)}
    allowed |= {f"{RUNTIME}.base"}  # the ground of every room
    return [f"line {line}: {name}" for line, name in imports_of(source) if not is_allowed(name, allowed)]


FILES = sorted(SOURCE.rglob("*.py"))


def test_a_file_imports_only_what_its_room_may():
    found = {}
    for path in FILES:
        room = room_of(path)
        if room in EVERYTHING:
            continue
        assert room in MAY_IMPORT, (
            f"{room} is a new room: give it a row in MAY_IMPORT and in docs/explanation/architecture.md"
        )
        if wrong := forbidden_imports(path.read_text(), room):
            found[str(path.relative_to(SOURCE))] = wrong

    assert found == {}


def outward_imports(source: str, room: str) -> list[str]:
    """Return the imports of an outer ring in a file of ``room``; none if the room may reach all rings, or stands in one."""
    if room in EVERYTHING | OUTER or room.startswith("lab."):
        return []
    return [name for _, name in imports_of(source) if OUTER.intersection(name.split(".")[1:2])]


def test_the_core_imports_no_outer_ring():
    outward = {path: names for path in FILES if (names := outward_imports(path.read_text(), room_of(path)))}

    assert outward == {}
    assert not any(name.split(".")[0] in OUTER for room in MAY_IMPORT.keys() - OUTER for name in MAY_IMPORT[room])


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
    files = [path for path in FILES if not room_of(path).startswith("lab.")]

    assert [path for path in files for _, name in imports_of(path.read_text()) if name.split(".")[0] == LAB] == []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("recovery", "from holdfast.comm.base import Communicator"),
        ("recovery", "import holdfast"),
        ("faults", "from holdfast.checkpoint import save"),
        ("lab.workloads", "from holdfast.session.session import Session"),
        ("membership", "from holdfast.comm.base import Communicator"),
        ("engine", "from holdfast.membership import open_store"),
        ("summary", "def f():\n    from holdfast.config import Settings"),
        ("summary", "from holdfast_lab.pages.study import figures"),
        ("errors", "from holdfast import events"),
        ("state", "from holdfast.models.trainable import Trainable"),
        ("models", "from holdfast.engine.loop import TrainingLoop"),
        ("engine", "from holdfast.session.session import Session"),
    ],
)
def test_the_check_above_can_fail(room, line):
    assert len(forbidden_imports(line, room)) == 1


def rows_of_the_page() -> dict[str, set[str]]:
    """Return what docs/explanation/architecture.md says that each room may import."""
    text = (SOURCE.parent / "docs" / "explanation" / "architecture.md").read_text()
    rows = {}
    for name, cell in re.findall(r"^\| `([\w/.]+)` \|.*\| ([^|]+) \| [^|]+ \|$", text, flags=re.MULTILINE):
        room = name.removesuffix(".py").rstrip("/").replace("holdfast_lab/", "lab.")
        if room in MAY_IMPORT:
            rows[room] = set(re.split(r"[,;] ", cell)) - {"nothing"}
    return rows


def said_of(room: str) -> set[str]:
    words = {name.removeprefix("holdfast.") for name in MAY_IMPORT[room]}
    if room == "lab.studies":
        words = {word for word in words if not word.startswith("lab.")} | {"all rooms above"}
    return {"the public names of `holdfast`" if word == "holdfast" else word for word in words}


def test_the_architecture_page_shows_the_same_table():
    assert rows_of_the_page() == {room: said_of(room) for room in MAY_IMPORT}


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
    rooms = {("lab." if package == LAB else "") + rest[0] for package, *rest in names if rest}
    return rooms & set(MAY_IMPORT)


def imports_of_rooms() -> dict[str, set[str]]:
    imports = defaultdict(set)
    for path in FILES:
        imports[room_of(path)] |= rooms_imported(path.read_text()) - {room_of(path)}
    return imports


def test_no_rooms_import_each_other_in_a_circle():
    assert circles(imports_of_rooms()) == []


def test_a_model_that_imports_the_session_closes_a_circle_of_rooms():
    imports = imports_of_rooms()
    imports["models"] |= rooms_imported("def f():\n    from holdfast.session.session import Session")

    assert ("engine", "models", "session") in circles(imports)


BEFORE_A_COMMAND = ("errors", "base", "config", "launch.job")
"""What commands need at once: their options, and what says in one line that no more files may be opened."""


@pytest.mark.parametrize("path", sorted((SOURCE / RUNTIME / "cli").glob("*.py")), ids=lambda path: path.name)
def test_a_command_imports_the_package_only_when_it_runs(path: Path):
    at_import = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]

    found = {name for node in at_import for _, name in imports_of(node)}

    allowed = {f"{RUNTIME}.{part}" for part in (*BEFORE_A_COMMAND, "cli")}
    assert [name for name in found if not is_allowed(name, allowed)] == []


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
    place = SOURCE.joinpath(*full(room, room).split("."))
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    return [name for name in map(module_of, files) if not name.endswith("__main__")]


def test_rooms_without_torch_load_where_there_is_none():
    modules = [name for room in WITHOUT_TORCH.split() for name in modules_of(room)]

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


def test_importing_everything_starts_no_thread_and_all_names_what_is_there():
    before, wrong = threading.active_count(), {}
    for name in map(module_of, FILES):
        if name.endswith("__main__") or is_elsewhere(name):
            continue
        module = importlib.import_module(name)
        exported = getattr(module, "__all__", [])
        assert len(set(exported)) == len(exported)  # ruff sorts them
        if missing := [wanted for wanted in exported if not hasattr(module, wanted)]:
            wrong[name] = missing

    assert wrong == {}
    assert threading.active_count() == before


def test_the_front_door_offers_what_it_says():
    assert set(holdfast.__all__) == set(holdfast._WHERE) | {"__version__"}
    assert dir(holdfast) == sorted(holdfast.__all__)
    for name, module in holdfast._WHERE.items():
        assert getattr(holdfast, name) is getattr(importlib.import_module(module), name)


def test_a_name_that_is_not_there_is_refused_by_name():
    with pytest.raises(AttributeError, match="module 'holdfast' has no attribute 'Sesion'"):
        holdfast.Sesion  # noqa: B018


@pytest.mark.parametrize("first", ["holdfast.distributed", "torch"])
def test_the_backend_may_be_imported_before_torch(first):
    code = f"import {first}, torch.distributed as dist; print('holdfast' in dist.Backend.backend_list)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert (done.stdout.strip(), done.stderr) == ("True", "")


def test_no_two_public_classes_have_the_same_name():
    places = defaultdict(list)
    for path in FILES:
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(), re.MULTILINE):
            places[name].append(str(path.relative_to(SOURCE)))

    assert len(places) > 300
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
