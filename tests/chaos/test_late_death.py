"""Workers that are killed after training, before their script has ended: whether the trained model is there."""

import hashlib
import json

import pytest
import torch
from jobs import exit_codes, run_report

pytestmark = pytest.mark.chaos

SCRIPT = """
import collections, os, pathlib, signal, sys, time
import torch
import holdfast
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

how, victim, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])


class Struck:
    def __reduce__(self):
        if loader.session.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return collections.OrderedDict, ()


torch.manual_seed(0)
x = torch.randn(48, 8)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = holdfast.prepare(model, optimizer, DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 12))
for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
loader.finish()
session = loader.session
if how == "save":
    session.save(folder / "model.pt", {"model": model.state_dict(), "struck": Struck()})
    session.save(folder / "model.safetensors")
else:
    is_writer = session.is_lead if how == "lead" else True
    if session.rank == victim:
        if is_writer:
            (folder / "model.pt").write_bytes(b"PK")  # the beginning of a file
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"through-{session.rank}").touch()
"""


def run(folder, how, victim, exit_code):
    script = folder / "train.py"
    script.write_text(SCRIPT)
    report = run_report(folder, "-n", 3, "--fabric", "gloo", script, how, victim, folder, exit_code=exit_code)
    assert exit_codes(report) == {rank: -9 if rank == victim else 0 for rank in range(3)}
    assert report["workers"]["ranks_finished"] == [rank for rank in range(3) if rank != victim]
    assert [failure["rank"] for failure in report["failures"]] == [victim]
    assert "none was lost" not in report["_stdout"]
    assert "2 of 3 workers finished" in report["_stdout"]
    return report


def declared(report):
    return {e["how"] for e in report["_events"] if e["event"] == "WriterDeclared"}


def test_what_session_save_writes_is_there_though_a_worker_dies_in_the_middle_of_it(tmp_path):
    report = run(tmp_path, "save", 0, exit_code=0)

    assert declared(report) == {"save"}
    saved = torch.load(tmp_path / "model.pt")
    assert report["replicas"]["sha256"] == hashlib.sha256(_in_path_order(saved["model"])).hexdigest()
    assert saved["struck"] == {}
    header = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    assert set(json.loads(header[8 : 8 + size])) - {"__metadata__"} == {"weight", "bias"}


def _in_path_order(state):
    return b"".join(state[name].numpy().tobytes() for name in sorted(state))


def test_a_lead_that_dies_while_it_writes_the_model_leaves_a_job_that_is_not_done(tmp_path):
    report = run(tmp_path, "lead", 0, exit_code=1)

    last = report["_stderr"].splitlines()[-1]
    assert "worker 0 was lost after training" in last
    assert "session.save(path)" in last
    assert (report["outcome"], report["error"]["rank"]) == ("failed", -1)


def test_where_the_lead_writes_another_worker_that_dies_late_costs_nothing(tmp_path):
    report = run(tmp_path, "lead", 2, exit_code=0)

    assert report["outcome"] == "done"
    assert declared(report) == {"is_lead"}


def test_where_each_worker_writes_the_last_one_may_have_left_half_a_file(tmp_path):
    report = run(tmp_path, "each", 1, exit_code=1)

    assert "may be missing or incomplete" in report["_stderr"].splitlines()[-1]
    assert (tmp_path / "model.pt").stat().st_size == 2, "which nobody would have been told"
