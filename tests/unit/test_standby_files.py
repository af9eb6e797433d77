"""The copies that backups write to the disk: when, how many are kept, what is believed, and what a part comes back from."""

from __future__ import annotations

import shutil
import threading
from types import SimpleNamespace

import planned
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast
from holdfast.checkpoint import CheckpointStore, steps, verify
from holdfast.checkpoint.format import flatten
from holdfast.checkpoint.storage import open_storage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.comm import VirtualCommunicator
from holdfast.config import Settings
from holdfast.models.standby_files import StandbyFiles
from holdfast.models.training_state import clone
from holdfast.records.files import read_run
from holdfast.records.types import PartRestored, Recovered
from holdfast.tools.checkpoints.listing import attempts, prune

PATIENCE_S = 60.0
PART = 2


# -- what is written


def world(root, comm=None, token=77):
    settings = Settings(strategy="partial", mirror_every=4, checkpoint_dir=str(root))
    return SimpleNamespace(
        settings=settings, checkpoints=SimpleNamespace(token=token), loop=0, comm=comm or VirtualCommunicator(2)
    )


def state(step):
    return {"rows": torch.full((3, 2), float(step)), "layout": [["model/w", 0, 0, [3]]]}


def go_on(copies, first, last):
    """Go through steps as the loop does."""
    for step in range(first, last + 1):
        copies.publish(step)
        copies.write(PART, step, lambda step=step: state(step))


def folder(root, part=PART):
    return root / "copies" / f"part-{part}"


def spoil(root, step):
    (path,) = (root / f"step-{step:08d}").glob("data-*/*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def said():
    return []


@pytest.fixture
def copies(tmp_path, said):
    made = StandbyFiles(world(tmp_path), said.append)
    made.expect([PART])
    return made


def test_a_copy_counts_when_the_step_in_which_it_was_begun_is_closed(copies):
    go_on(copies, 0, 0)
    copies.publish(0)  # the step is done again
    assert copies.newest(PART) is None

    copies.publish(1)

    found = copies.newest(PART)
    assert (found.step, found.info["part"]) == (0, PART)
    assert torch.equal(found.state["rows"], state(0)["rows"])
    assert found.state["layout"] == state(0)["layout"]


def test_one_is_written_every_so_many_steps_and_the_two_newest_are_kept_intact(copies, tmp_path, said):
    go_on(copies, 0, 18)

    assert steps(folder(tmp_path)) == [12, 16]
    assert [verify(folder(tmp_path), step).step for step in (12, 16)] == [12, 16]
    assert [path.name for path in (tmp_path / "copies").iterdir()] == [f"part-{PART}"]
    assert said == []


def test_when_homes_change_the_next_one_is_written_at_once_or_by_somebody_else(copies, tmp_path):
    go_on(copies, 0, 2)
    copies.expect([PART])
    go_on(copies, 3, 4)  # the one of step 4 is begun, and does not count yet
    copies.expect([])
    go_on(copies, 5, 12)

    assert steps(folder(tmp_path)) == [0, 3]
    assert attempts(open_storage(folder(tmp_path))) == []


def test_without_a_place_nothing_is_written_or_read(tmp_path, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    copies = StandbyFiles(world(""), said.append)
    copies.expect([PART])

    go_on(copies, 0, 9)

    assert copies.newest(PART) is None
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_slow_holds_nobody_and_misses_some(tmp_path, monkeypatch, said):
    gate, asked, prepare = threading.Event(), threading.Event(), LocalStorage.prepare

    def wait(self, path):
        asked.set()
        assert gate.wait(PATIENCE_S), "the test forgot to open the gate"
        return prepare(self, path)

    monkeypatch.setattr(LocalStorage, "prepare", wait)
    copies = StandbyFiles(world(tmp_path, SimpleNamespace(generation=0)), said.append)
    copies.expect([PART])
    go_on(copies, 0, 9)  # returns with the gate shut
    assert asked.wait(PATIENCE_S)
    writer = copies._slots[PART].writer
    assert writer.step == 0

    gate.set()
    writer._job.done.wait(PATIENCE_S)
    go_on(copies, 10, 10)
    writer.commit(0)
    writer._job.done.wait(PATIENCE_S)

    assert steps(folder(tmp_path)) == [0, 10]
    copies.close()
    assert not writer._thread.is_alive()
    assert said == []


def test_a_disk_that_takes_nothing_costs_one_warning_until_it_does_again(copies, tmp_path, said):
    (tmp_path / "copies").write_text("a file where a directory is to be")
    go_on(copies, 0, 12)
    assert len(said) == 1
    assert "cannot write the copy of part 2 before step 0" in said[0]
    assert "Training continues" in said[0]

    (tmp_path / "copies").unlink()
    go_on(copies, 13, 21)
    (tmp_path / "copies").rename(tmp_path / "moved")
    (tmp_path / "copies").write_text("")
    go_on(copies, 22, 25)

    assert steps(tmp_path / "moved" / f"part-{PART}") == [16, 20]
    assert len(said) == 2


# -- what is believed


def test_what_is_damaged_is_named_and_passed_over(copies, tmp_path, said):
    go_on(copies, 0, 5)
    spoil(folder(tmp_path), 4)

    assert copies.newest(PART).step == 0

    assert len(said) == 1
    assert "skipped the damaged copy of part 2 before step 4" in said[0]
    assert "tensor 'rows'" in said[0]


@pytest.mark.parametrize("other", [{"token": 78}, {"loop": 1}])
def test_what_is_not_of_this_beginning_of_the_job_is_never_read_and_makes_room(tmp_path, said, other):
    theirs = world(tmp_path)
    theirs.checkpoints.token, theirs.loop = other.get("token", 77), other.get("loop", 0)
    old = StandbyFiles(theirs, said.append)
    old.expect([PART])
    go_on(old, 20, 26)
    ours = StandbyFiles(world(tmp_path), said.append)
    ours.expect([PART])
    assert steps(folder(tmp_path)) == [20, 24]
    assert ours.newest(PART) is None
    (folder(tmp_path) / "step-00000024" / "manifest.json").write_text("nobody knows whose this is")

    go_on(ours, 0, 9)

    assert ours.newest(PART).step == 8
    assert steps(folder(tmp_path)) == [4, 8, 24]


# -- what a part comes back from. Stage 1 is held by worker 1, and worker 2 keeps its copy; workers are virtual

STAGES = [
    lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU()),
    lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
    lambda: nn.Linear(8, 3),
]
HOLDER, BACKUP = 1, 2
SAMPLES, BATCH = 40, 4


def dataset():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 12, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    )


def train(run_dir, *faults, dead_at=None, each=lambda step, held: None, look=lambda backups: None, **settings):
    """Train ten steps; return what was restored."""
    run_dir.mkdir()
    both = [f"kill:rank={rank},step={dead_at}" for rank in (HOLDER, BACKUP)] if dead_at is not None else []
    plan = planned.faults(*both, *faults)
    settings = {"strategy": "partial", "mirror_every": 4, "workers": 4, "slices": 4, "seed": 3} | settings
    model = holdfast.Pipeline(STAGES, lambda output, labels: (F.cross_entropy(output, labels), {}))
    adam = lambda p: torch.optim.Adam(p, lr=1e-2)  # noqa: E731
    session = holdfast.Session(model, adam, faults=plan, run_dir=str(run_dir), **settings)
    for step in session.steps(dataset(), BATCH):
        each(step, session._trainable.resident.held)
        look(session._trainable.backups)
        step.compute()
    return [record for record in read_run(run_dir) if isinstance(record, PartRestored)]


def same(a, b):
    a, b = flatten(a)[0], flatten(b)[0]
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[path]), torch.as_tensor(b[path])) for path in a)


def found(restored):
    return {record.part: (record.source, record.ages) for record in restored}


def test_a_part_that_nobody_has_in_memory_comes_back_as_its_backup_wrote_it(tmp_path):
    weights = {}

    def note(step, held):
        parameters = [p.detach().clone() for p in held[1].model.parameters()]
        state = held[1].optimizer.state_dict()["state"]
        weights[step.number] = [*parameters, *(state[i]["exp_avg"].clone() for i in state)]

    restored = train(
        tmp_path / "r", dead_at=7, each=note, checkpoint_dir=str(tmp_path / "c"), checkpoint_every=4, mirror_every=5
    )

    assert found(restored) == {1: ("copy", (2,)), 2: ("backup", (2,))}
    assert len(weights[5]) == 4
    assert all(map(torch.equal, weights[7], weights[5]))


@pytest.mark.parametrize(
    ("fault", "age"),
    [("kill:rank=1,step=7,phase=backward", 0), ("kill:rank=1,step=7,phase=mirror", 1)],  # the latter while it is sent
)
def test_an_optimizer_that_is_kept_comes_back_as_it_was_though_the_parameters_are_older(tmp_path, fault, age):
    seen = {}

    def note(step, held):
        seen.setdefault(step.number, {})[step.attempt] = clone(held[1].state_dict())

    (restored,) = train(tmp_path / "r", fault, each=note, mirror_optimizer="kept")

    assert (restored.source, restored.ages, restored.optimizer, restored.optimizer_age) == ("backup", (3,), "kept", age)
    *_, after = seen[7].values()
    newest, saved = seen[7 - age][0], seen[4][0]
    assert same(after["optimizer"]["state"], newest["optimizer"]["state"])
    assert same(after["model"], saved["model"])
    assert not same(newest["optimizer"]["state"], saved["optimizer"]["state"])
    assert not same(newest["model"], saved["model"])


@pytest.mark.parametrize(
    ("how", "source", "age"),
    [
        ({"checkpoint_every": 6}, "checkpoint", 1),
        ({"checkpoint_every": 4}, "checkpoint", 3),  # as old as the copy: of one age, and exact
        ({"checkpoint_every": 3, "dead_at": 5}, "copy", 1),
        ({"mirror_predictor": "line", "mirror_codec": "int8"}, "copy", 3),
        ({"mirror_optimizer": "kept", "mirror_predictor": "calibrated"}, "copy", 3),
        ({"checkpoint_format": "npz"}, "copy", 3),
        ({"dead_at": 4}, "copy", 4),  # the one that was begun then does not count yet
    ],
)
def test_what_is_younger_is_taken(tmp_path, how, source, age):
    restored = train(tmp_path / "r", **{"dead_at": 7, "checkpoint_dir": str(tmp_path / "c")} | how)

    assert found(restored)[1] == (source, (age,))


def test_who_holds_a_part_and_its_backup_have_the_same_bits_of_what_was_saved(tmp_path):
    shares = []

    def look(backups):
        for part, copy in backups._copies.items():
            owner, peer = backups._own[part][1].state_dict(), copy.rows.state_dict()
            assert same(owner, peer)
            shares.append(owner["share"])

    how = {"mirror_predictor": "calibrated", "mirror_codec": "int8", "mirror_distance": "scaled"}
    train(tmp_path / "r", look=look, mirror_fraction=0.25, **how)

    assert len(shares) == 3 * 10
    assert any(0 < share < 1 for share in shares)


def test_what_copies_take_is_told_with_an_optimizer_that_is_kept(tmp_path):
    copies, optimizers = {}, {}

    def look(backups):
        leaves = [
            leaf
            for held in backups._resident.held.values()
            for leaf in flatten(held.optimizer.state_dict())[0].values()
        ]
        optimizers[policy] = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        copies[policy] = backups.bytes_held()

    for policy in ("reset", "kept"):
        train(tmp_path / policy, look=look, mirror_optimizer=policy)

    assert optimizers["kept"] > 0
    assert copies["kept"] == copies["reset"] + optimizers["kept"]


def test_blocks_of_a_copy_have_ages_of_their_own(tmp_path):
    saving = {"checkpoint_dir": str(tmp_path / "c"), "checkpoint_every": 5}
    restored = train(tmp_path / "r", dead_at=9, mirror_fraction=0.5, mirror_choice="round-robin", **saving)

    assert found(restored)[1] == ("copy", (1, 3))


def test_where_the_newest_checkpoint_is_damaged_the_one_before_it_is_compared(tmp_path, capsys):
    def each(step, held):
        if (step.number, step.attempt) == (7, 0):
            spoil(tmp_path / "c", 6)

    restored = train(tmp_path / "r", "kill:rank=1,step=7,phase=backward", "kill:rank=2,step=7,phase=backward", each=each,
                     checkpoint_dir=str(tmp_path / "c"), checkpoint_every=3)  # fmt: skip

    assert found(restored)[1] == ("copy", (3,))  # and not the checkpoint of step 3
    assert "skipped step 6" in capsys.readouterr().err


def test_what_another_job_left_is_not_believed_and_gone_when_there_is_something_newer(tmp_path):
    where = tmp_path / "c"
    train(tmp_path / "first", checkpoint_dir=str(where))
    assert steps(folder(where, 1)) == [4, 8]

    written = CheckpointStore(folder(where, 1))
    old = written.info(8)["token"]

    for checkpoint in where.glob("step-*"):  # the copies alone are left
        shutil.rmtree(checkpoint)
    at_once = train(tmp_path / "second", dead_at=0, checkpoint_dir=str(where))
    for checkpoint in where.glob("step-*"):
        shutil.rmtree(checkpoint)
    later = train(tmp_path / "third", dead_at=2, checkpoint_dir=str(where))

    assert found(at_once)[1] == ("beginning", (0,))
    assert found(later)[1] == ("copy", (2,))
    assert written.steps() == [4, 8]
    assert written.info(4)["token"] == written.info(8)["token"] != old


def test_copies_are_in_nobodys_way_where_checkpoints_are(tmp_path):
    where = tmp_path / "c"
    train(tmp_path / "r", checkpoint_dir=str(where), checkpoint_every=2)

    assert steps(where) == [2, 4, 6, 8, 10]
    assert attempts(open_storage(where)) == []
    assert prune(open_storage(where), 2).kept == (8, 10)
    for part in range(3):
        assert steps(folder(where, part)) == [4, 8]
        assert CheckpointStore(folder(where, part)).load(8).info["part"] == part
        assert attempts(open_storage(folder(where, part))) == []
    train(tmp_path / "again", checkpoint_dir=str(where), checkpoint_every=2, resume=True)


def test_a_fault_that_is_planned_for_a_checkpoint_does_not_strike_while_a_copy_is_written(tmp_path):
    train(tmp_path / "r", "kill:rank=0,step=0,phase=checkpoint", checkpoint_dir=str(tmp_path / "c"), checkpoint_every=4)

    assert [record for record in read_run(tmp_path / "r") if isinstance(record, Recovered)] == []
    assert steps(folder(tmp_path / "c", 0)) == [4, 8]
