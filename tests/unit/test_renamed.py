"""Public classes that were renamed answer to their old names, and no two public classes have the same name."""

import ast
import importlib
from collections import defaultdict
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.errors import ConfigError
from holdfast.recovery.messages import Note, Progress, ProgressKnown
from holdfast.recovery.strategy import ProgressView

SOURCE = Path(__file__).parents[2] / "src"

OLD_NAMES = {
    "holdfast.checkpoint": {
        "Checkpoints": "CheckpointStore",
        "Content": "WritePlan",
        "Damage": "DamagedBytes",
        "Loaded": "LoadedCheckpoint",
        "Piece": "TensorPiece",
    },
    "holdfast.comm": {
        "Mail": "Mailbox",
        "Mean": "MeanDivisor",
        "OrderedSum": "OrderedAllReduce",
        "Span": "SlotSpan",
        "share_bytes": "broadcast_bytes",
    },
    "holdfast.membership": {"Heard": "Agreement", "Vote": "RosterVote"},
    "holdfast.recovery": {"View": "ProgressView"},
    "holdfast_lab.inject.files": {"Target": "InjectionTarget"},
    "holdfast_lab.simulate": {"Job": "SimulatedJob", "Replayed": "ReplayedRecovery", "Trace": "FailureTrace"},
    "holdfast_lab.virtual_ddp.training": {
        "Batched": "VirtualDdp",
        "Change": "MembershipChange",
        "Decision": "MembershipDecision",
        "Snapshot": "VirtualSnapshot",
    },
    "holdfast_lab.workloads.data": {"Part": "DatasetPart"},
    "holdfast_lab.workloads.models": {"Layout": "NetworkLayout"},
}


MESSAGES = {
    "ActDone": "Done",
    "BucketSummed": "BucketReduced",
    "CloseStep": "VoteStep",
    "Install": "AdoptState",
    "MakeChanges": "ApplyConfig",
    "Parted": "LeftGroup",
    "RanOut": "DataExhausted",
    "Rehome": "MoveParts",
    "Settle": "AdoptPlacement",
    "StepClosed": "StepVoted",
    "SumBucket": "ReduceBucket",
    "TakeChanges": "FetchConfig",
    "Welcome": "SendState",
}
OLD_NAMES |= {"holdfast.recovery.messages": MESSAGES, "holdfast.events": MESSAGES}


@pytest.mark.parametrize(("module", "old"), [(module, old) for module in OLD_NAMES for old in OLD_NAMES[module]])
def test_a_renamed_class_answers_to_its_old_name(module, old):
    package = importlib.import_module(module)

    assert getattr(package, old) is getattr(package, OLD_NAMES[module][old])


def test_a_name_that_never_was_is_refused():
    with pytest.raises(AttributeError, match=r"module 'holdfast\.membership' has no attribute 'Herd'"):
        _ = importlib.import_module("holdfast.membership").Herd


def test_no_two_public_classes_have_the_same_name():
    places = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(SOURCE)))

    assert len(places) > 300
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ([], "update", "lazy"),
        (["--overlap-optimizer"], "update", "eager"),
        (["--update", "eager"], "update", "eager"),
        (["--update", "lazy"], "update", "lazy"),
        ([], "kinds", "same"),
        (["--no-require-same-platform"], "kinds", "any"),
        (["--kinds", "any"], "kinds", "any"),
    ],
)
def test_a_renamed_option_works_under_its_old_name(monkeypatch, tmp_path, words, name, value):
    script, jobs = tmp_path / "train.py", []
    script.write_text("")

    def launch(job, view):
        jobs.append(job)
        raise ConfigError("not launched")

    monkeypatch.setattr("holdfast.launch.launcher.launch", launch)

    with pytest.raises(SystemExit):
        main(["run", *words, str(script)])

    assert getattr(jobs[0].settings, name) == value


def test_help_lists_an_option_under_its_new_name_only(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help-all"])

    said = capsys.readouterr().out
    assert "--overlap-optimizer" in said
    assert "--no-require-same-platform" in said
    assert "--update" not in said
    assert "--kinds" not in said


def test_a_strategy_of_another_package_may_read_the_old_name_of_a_planned_regrouping():
    view = ProgressView.of(ProgressKnown({0: Progress(4, computed=False, flags=Note.PLANNED)}, 1))

    assert view.calm
    assert view.is_planned
