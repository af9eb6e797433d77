"""Strategies, fabrics and formats of other packages: a package from outside registers one by an entry point, and a job runs on it."""

import json
import textwrap

import jobs
import pytest

SCRIPT = (jobs.ROOT / "tests" / "support" / "train_reference.py", "mlp", "sgd")

PACKAGE = """
    from typing import ClassVar

    from holdfast.checkpoint.files.safetensors import Safetensors
    from holdfast.comm.fabrics.base import Endpoint, Fabric
    from holdfast.comm.virtual import VirtualCommunicator
    from holdfast.recovery.messages import Action, CatchUp, DiscardStep, Event, ProgressKnown
    from holdfast.recovery import Strategy, ProgressView


    class AgainAndAgain(Strategy):
        exact: ClassVar[bool] = True

        def __init__(self, *, min_workers: int = 1) -> None:
            self.min_workers = min_workers

        def handle(self, event: Event) -> list[Action]:
            if not isinstance(event, ProgressKnown):
                return []
            view = ProgressView.of(event)
            behind = [CatchUp(view.step - 1)] if view.behind and view.next_sum == 0 else []
            return [*behind, DiscardStep(view.step)]


    class Unsure(AgainAndAgain):
        exact = None


    class Toy(Fabric):
        name = "toy"
        one_process = True

        def connect(self, endpoint: Endpoint) -> VirtualCommunicator:
            print("toy connects", endpoint.workers)
            return VirtualCommunicator(endpoint.workers if endpoint.ranks is None else endpoint.ranks)


    class Again(Safetensors):
        name = "again"
"""

ENTRY_POINTS = """
    [holdfast.strategies]
    again = outside:AgainAndAgain
    wrong = outside:Toy
    unsure = outside:Unsure

    [holdfast.fabrics]
    toy = outside:Toy
    wrong = outside:AgainAndAgain

    [holdfast.formats]
    again = outside:Again
    wrong = outside:AgainAndAgain
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A package as pip would install it: a module, and the metadata of its distribution."""
    place = tmp_path / "site"
    info = place / "outside-1.0.dist-info"
    info.mkdir(parents=True)
    (place / "outside.py").write_text(textwrap.dedent(PACKAGE))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(ENTRY_POINTS))
    monkeypatch.setenv("PYTHONPATH", f"{place}:{jobs.ROOT / 'src'}")


def run(folder, *options, code=0):
    done = jobs.holdfast("run", "-n", 3, "--seed", 5, "--report", folder, "--no-page", *options, *SCRIPT)
    assert done.returncode == code, done.stderr
    return json.loads((folder / "report.json").read_text()), done.stdout


@pytest.mark.chaos
def test_a_strategy_from_outside_the_package_decides_what_survivors_do(outside, tmp_path):
    undisturbed, _ = run(tmp_path / "undisturbed", "--fabric", "virtual")
    report, _ = run(tmp_path / "again", "--strategy", "again", "--inject", "kill:rank=1,step=4,phase=allreduce")

    assert report["strategy"] == "again"
    assert [failure["decision"] for failure in report["failures"]] == ["redo"]
    assert report["replicas"]["sha256"] == undisturbed["replicas"]["sha256"]


@pytest.mark.chaos
def test_a_job_runs_on_a_fabric_from_outside_the_package(outside, tmp_path):
    report, said = run(tmp_path / "toy", "--fabric", "toy", "--inject", "kill:rank=2,step=3")

    assert "toy connects 3" in said
    assert report["fabric"] == "toy"
    assert len(report["failures"]) == 1


@pytest.mark.chaos
def test_checkpoints_in_a_format_from_outside_the_package_are_written_and_loaded(outside, tmp_path):
    options = ["--fabric", "virtual", "--checkpoint-dir", tmp_path / "saved"]
    undisturbed, _ = run(tmp_path / "undisturbed", "--fabric", "virtual")
    run(tmp_path / "first", *options, "--checkpoint-format", "again", "--stop-after", 4, code=4)
    report, _ = run(tmp_path / "second", *options, "--resume")

    manifest = min((tmp_path / "saved").glob("step-*/manifest.json"))
    assert '"format": "again"' in manifest.read_text()
    assert report["replicas"]["sha256"] == undisturbed["replicas"]["sha256"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--checkpoint-format", "again"],
            "--checkpoint-format must be one of safetensors, hdf5, npz, dcp, got 'again'",
        ),
        (["--strategy", "again"], "--strategy must be one of rollback, forward, restart, reinit, partial, got 'again'"),
        (["--fabric", "toy"], "--fabric must be one of ulfm, gloo, virtual, got 'toy'"),
    ],
)
def test_without_that_package_there_is_no_such_name(tmp_path, options, message):
    done = jobs.holdfast("run", "-n", 2, "--report", tmp_path, *options, *SCRIPT)

    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


@pytest.mark.parametrize("option", ["strategy", "fabric", "checkpoint-format"])
def test_what_is_none_is_refused_in_one_line(outside, tmp_path, option):
    done = jobs.holdfast("run", "-n", 2, "--report", tmp_path, f"--{option}", "wrong", *SCRIPT)

    assert done.returncode == 2
    assert done.stderr.startswith("error: the entry point 'wrong' of holdfast.")
    assert done.stderr.count("\n") == 1


def test_a_strategy_that_does_not_say_whether_it_is_exact_is_refused_in_one_line(outside, tmp_path):
    done = jobs.holdfast("run", "-n", 2, "--report", tmp_path, "--strategy", "unsure", *SCRIPT)

    assert done.returncode == 2
    assert "must set its class attribute exact" in done.stderr
    assert done.stderr.count("\n") == 1
