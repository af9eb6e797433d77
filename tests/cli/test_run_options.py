"""Options of ``holdfast run`` that no other test of real workers passes: each changes what it says, and no bit."""

import json
import tarfile

import pytest
from jobs import assert_landed, holdfast, run_report

pytestmark = pytest.mark.chaos

# The first layer is frozen, and large enough that checkpoints share its bytes unless each is written in full.
SCRIPT = """
import torch
from torch.utils.data import TensorDataset
import holdfast
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 4096).requires_grad_(False), torch.nn.ReLU(), torch.nn.Linear(4096, 4))
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
session = holdfast.Session(model, optimizer, slices=4)
for step in session.steps(TensorDataset(torch.randn(96, 8), torch.randint(4, (96,))), 8):
    for x, y in step:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        step.backward(loss)
        step.log(loss=loss.item())
"""
SAVES = ("--fabric", "gloo", "--checkpoint-every", 2)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, script):
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, run_report(folder, "-n", 2, *SAVES, "--checkpoint-dir", folder / "ckpt", "--overlap", "off", script)


def test_options_of_the_output_and_of_checkpoints_do_what_they_say_and_a_kill_changes_no_bit(
    tmp_path, script, undisturbed
):
    quiet_folder, quiet = undisturbed
    options = (
        *("--checkpoint-dir", tmp_path / "ckpt", "--full-checkpoints", "--no-certificate", "--debug-handlers"),
        *("--debug-bundles", tmp_path / "bundles", "--baseline", quiet_folder / "report", "--overlap", "on"),
        *("--preload", "--between-hosts", "fabric", "--log-dir", tmp_path / "logs", "--json", "--page"),
        *("--stragglers", "warn", "--straggler-factor", 50),
    )

    report = run_report(tmp_path, "-n", 3, *SAVES, *options, "--inject", "kill:rank=1,step=5", script, page=True)

    assert_landed(report, 1)
    assert report["replicas"]["state_sha256"] == quiet["replicas"]["state_sha256"]
    assert (bool(digests(quiet)), digests(report)) == (True, []), "--no-certificate"
    assert (bool(shared(quiet_folder / "ckpt")), shared(tmp_path / "ckpt")) == (True, []), "--full-checkpoints"
    assert [each["job"]["settings"]["overlap"] for each in (quiet, report)] == ["off", "on"]
    assert report["iteration_cost"]["undisturbed"] == str(quiet_folder / "report")
    assert json.loads(report["_stdout"])["steps"] == 12, "--json: nothing else on stdout"
    assert (tmp_path / "report" / "index.html").read_text().startswith("<!doctype html>")
    assert {path.name for path in (tmp_path / "logs").glob("rank-*")} == {f"rank-{rank}.log" for rank in range(3)}
    assert "debug-0.sock" in report["_stderr"], "--debug-handlers: where torch says that it listens"
    (bundle,) = (tmp_path / "bundles").iterdir()
    with tarfile.open(bundle) as files:
        assert any(name.endswith("records/records-0.jsonl") for name in files.getnames())


def test_holdfast_report_draws_the_page_of_a_run_that_has_none(undisturbed):
    folder = undisturbed[0] / "report"
    assert not (folder / "index.html").exists()

    done = holdfast("report", folder)

    assert (done.returncode, done.stdout.strip()) == (0, str(folder / "index.html")), done.stderr
    assert undisturbed[1]["replicas"]["sha256"] in (folder / "index.html").read_text()


def digests(report):
    """Return the digests of the weights that records of steps hold."""
    return [event["state"] for event in report["_events"] if event["event"] == "StepCommitted" and event["state"]]


def shared(folder):
    """Return the files that checkpoints have in common with earlier ones."""
    return sorted(path.name for path in folder.rglob("kept-*"))
