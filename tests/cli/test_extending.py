"""Strategies, fabrics and formats of other packages: a package from outside registers one by an entry point, and a job runs on it."""

import json
import sys
import textwrap

import jobs
import pytest
from exact import SCRIPT as REFERENCE
from exact import reference_hash

from holdfast.cli import main

SCRIPT = (REFERENCE, "mlp", "sgd")

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
    """A package as pip would install it, for jobs and for this process: a module, and the metadata of its distribution."""
    place = tmp_path / "site"
    info = place / "outside-1.0.dist-info"
    info.mkdir(parents=True)
    (place / "outside.py").write_text(textwrap.dedent(PACKAGE))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(ENTRY_POINTS))
    monkeypatch.setenv("PYTHONPATH", f"{place}:{jobs.ROOT / 'src'}")
    monkeypatch.syspath_prepend(place)
    yield
    sys.modules.pop("outside", None)


def run(folder, *options, code=0):
    done = jobs.holdfast("run", "-n", 3, "--report", folder, "--no-page", *options, *SCRIPT)
    assert done.returncode == code, done.stderr
    return json.loads((folder / "report.json").read_text()), done.stdout


@pytest.mark.chaos
def test_a_strategy_a_format_and_a_fabric_from_outside_the_package_carry_a_job_to_the_same_bits(outside, tmp_path):
    saved = tmp_path / "saved"
    options = ["--fabric", "gloo", "--strategy", "again", "--inject", "kill:rank=1,step=4,phase=allreduce"]
    checkpoints = ["--checkpoint-dir", saved, "--checkpoint-format", "again", "--stop-after", 6]
    first, _ = run(tmp_path / "first", *options, *checkpoints, code=4)
    second, output = run(tmp_path / "second", "--fabric", "toy", "--checkpoint-dir", saved, "--resume")

    assert first["strategy"] == "again"
    assert [failure["decision"] for failure in first["failures"]] == ["redo"]
    assert '"format": "again"' in min(saved.glob("step-*/manifest.json")).read_text()
    assert second["fabric"] == "toy"
    assert "toy connects 3" in output
    assert second["replicas"]["state_sha256"] == reference_hash("mlp", "sgd")


def refusal(capsys, tmp_path, option, name):
    with pytest.raises(SystemExit) as ended:
        main(["run", "-n", "2", "--report", str(tmp_path / "out"), f"--{option}", name, *map(str, SCRIPT)])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "name", "names"),
    [
        ("checkpoint-format", "again", "safetensors, hdf5, npz, dcp"),
        ("strategy", "again", "rollback, forward, restart, reinit, partial"),
        ("fabric", "toy", "ulfm, gloo, virtual"),
    ],
)
def test_without_that_package_there_is_no_such_name(tmp_path, capsys, option, name, names):
    assert refusal(capsys, tmp_path, option, name) == f"error: --{option} must be one of {names}, got {name!r}\n"


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("strategy", "wrong", "the entry point 'wrong' of holdfast.strategies must name a subclass of "),
        ("fabric", "wrong", "the entry point 'wrong' of holdfast.fabrics must name a subclass of "),
        ("checkpoint-format", "wrong", "the entry point 'wrong' of holdfast.formats must name a subclass of "),
        ("strategy", "unsure", "--strategy 'unsure' (<class 'outside.Unsure'>) must set its class attribute exact"),
    ],
)
def test_an_entry_point_that_is_none_or_says_too_little_is_refused_in_one_line(
    outside, tmp_path, capsys, option, name, message
):
    said = refusal(capsys, tmp_path, option, name)

    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1
