"""Private names of torch are used in one place, which says what torch it was tried with; and torch finds the backend."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer

from holdfast.base.torch_private import TRIED, rebuild_reducer, untried

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"
FILES = sorted(set(SOURCE.rglob("*.py")) - {SOURCE / "base" / "torch_private.py"})
MINOR = tuple(map(int, torch.__version__.split(".")[:2]))


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


PRIVATE = {
    name
    for thing in (
        torch.zeros(1),
        torch.UntypedStorage(),
        nn.Linear(1, 1),
        nn.Linear(1, 1).weight,
        torch.optim.SGD([torch.zeros(1)]),
        optimizer,
        torch,
        dist,
        dist.distributed_c10d,
        dist.ProcessGroup,
        dist.ProcessGroupGloo,
        dist.ProcessGroupGloo._Options,
        DistributedDataParallel,
    )
    for name in dir(thing)
    if is_private(name)
} - {"_name", "_replace", "_encode"}


def private_names(source):
    """Return the private names of torch that a file imports, or looks up in something that is not of its own class."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
            found += [n for n in names if n.split(".")[0] == "torch" and any(map(is_private, n.split(".")))]
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE and ast.unparse(node.value) not in OWN:
            found.append(ast.unparse(node))
        if isinstance(node, ast.Constant) and node.value in PRIVATE:
            found.append(node.value)
    return found


OWN = {"self", "cls", "super()"}


def test_private_names_of_torch_are_used_in_one_place():
    assert {str(path.relative_to(SOURCE)): names for path in FILES if (names := private_names(path.read_text()))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils._pytree import tree_map",
        "import torch._subclasses.fake_tensor",
        "from torch._C import _distributed_c10d",
        "task = torch._C._current_graph_task_id()",
        "module._buffers['mean'] = mean",
        "options = dist.ProcessGroupGloo._Options()",
        "offset = getattr(tensor, '_version', -1)",
    ],
)
def test_the_check_above_can_fail(line):
    assert private_names(line)


@pytest.mark.parametrize("version", ["2.9.0", "2.13.0+cpu", TRIED, "2.14.9+cu130"])
def test_nothing_is_said_of_a_torch_that_was_tried_or_is_older(version):
    assert untried(version) == ""


@pytest.mark.parametrize("version", ["2.15.0", "2.15.0.dev20261101+cpu", "2.16.0a0+git1234", "3.0.0", "10.0"])
def test_a_newer_torch_is_named_beside_the_one_that_was_tried(version):
    assert untried(version) == (
        f"torch {version} is newer than {TRIED}, the newest that Holdfast was tested with; if something breaks, install that one"
    )


TRAIN = """
import torch
torch.__version__ = "2.99.0"
import holdfast
from torch.utils.data import TensorDataset
for _ in range(2):
    model = torch.nn.Linear(3, 1)
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), fabric="virtual", workers=3)
    for step in session.steps(TensorDataset(torch.ones(6, 3)), batch_size=6):
        for (x,) in step:
            step.backward(model(x).sum())
"""


def test_training_goes_on_with_a_newer_torch_and_one_line():
    done = python(TRAIN)

    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [f"holdfast: {untried('2.99.0')}"]


INIT = """
import torch.distributed as dist
try:
    dist.init_process_group("holdfast", init_method="file://{path}", rank=5, world_size=7)
except Exception as error:
    print(type(error).__module__, error)
print(dist.Backend.backend_list.count("holdfast"))
"""


LOOKS_FOR_BACKENDS = pytest.mark.skipif(MINOR < (2, 14), reason="torch looks for no backend before 2.14")


@pytest.mark.parametrize("autoload", ["1", pytest.param("0", marks=LOOKS_FOR_BACKENDS)])
def test_a_script_that_names_the_backend_gets_it(tmp_path, autoload):
    done = python(INIT.format(path=tmp_path / "store"), TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)

    said, times = done.stdout.splitlines()
    assert said.startswith("holdfast.errors the ulfm fabric needs Open MPI's launcher: ")  # so it was asked
    assert times == "1"


def python(code, **variables):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=env | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# -- a new reducer for a model that trains

KINDS = [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: next(iter(kind), "plain"))
def test_a_reducer_is_replaced_in_the_middle_of_training_and_no_hook_of_the_old_one_is_left(tmp_path, kind):
    buckets = []

    def note(_, bucket):
        buckets.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 3)), bucket_cap_mb=0.001, **kind
        )
        model.register_comm_hook(None, note)
        same = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 3))
        same.load_state_dict(model.module.state_dict())
        counts = []
        for step in range(6):
            if step == 3:
                rebuild_reducer(model)
            buckets.clear()
            for one in (model, same):
                one.zero_grad()
                one(torch.ones(2, 4) * step).square().sum().backward()
            counts.append(len(buckets))
            for mine, its in zip(model.parameters(), same.parameters(), strict=True):
                assert torch.equal(mine.grad, its.grad)
                mine.data -= 0.001 * mine.grad
                its.data -= 0.001 * its.grad
    finally:
        dist.destroy_process_group()

    assert counts[3:] == counts[:3], "each bucket is reduced once, as when the model was new"
    assert max(counts) > 1
