"""Writers that each hold another part of a state write one checkpoint, and a reader takes its part of it."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_bytes import all_names, any_bits, data_dir, fields_of, flip, same

from holdfast.checkpoint import FORMATS, Shard, all_but, load, steps, take, verify, write, write_tensors
from holdfast.checkpoint.parts import pick
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.config import Settings
from holdfast.errors import CheckpointCorrupt, CheckpointError, ConfigError
from holdfast.faults import points
from holdfast.state.manager import CheckpointManager

TOKEN = {"token": "split"}


def stage(number):
    weight = any_bits(torch.float32, (3, 5), number)
    return {
        "model": {"fc.weight": weight, "again": weight, "steps": torch.tensor(number)},
        "optimizer": {"state": {0: {"exp_avg": weight + number}}, "param_groups": [{"lr": 0.1 * number}]},
    }


def whole(parts=4):
    """The state of a model that is split into stages, as a single process would have it."""
    return {
        "replica": {"parts": {str(n): stage(n) for n in range(parts)}, "registered.mean": torch.ones(7)},
        "ledger": {"row": torch.arange(4)},
        "generators": [b"".hex(), float("inf")],
    }


def split(state, holders):
    """Return what each writer has: the first also what all have."""
    given = [{"replica": {"parts": {n: state["replica"]["parts"][n] for n in mine}}} for mine in holders]
    first = state | {"replica": state["replica"] | given[0]["replica"]}
    return [first, *given[1:]]


def write_split(root, step, given, format="safetensors"):
    """Write what each writer has; complete nothing."""
    parts = len(given)
    return [
        write(root, step, take(mine, i, parts, distinct=True), {"by": i}, format=format, **TOKEN)
        for i, mine in enumerate(given)
    ]


def told(entry):
    """What a manifest says of a tensor, but for the files in which its values are."""
    pieces = [{name: piece[name] for name in ("start", "shape", "bytes", "blocks")} for piece in entry["pieces"]]
    return entry | {"pieces": pieces}


HOLDERS = [["01", "2", "3"], ["03", "12"], ["3", "2", "1", "0"], ["", "0123"], ["0123", ""], ["02", "", "13"]]


@pytest.mark.parametrize("holders", HOLDERS, ids=str)
@pytest.mark.parametrize(("format", "committer"), [("safetensors", 0), ("hdf5", -1), ("npz", -1)])
def test_distinct_parts_become_the_checkpoint_that_a_single_writer_would_write(tmp_path, format, holders, committer):
    state = whole()
    write_tensors(tmp_path / "one", 3, state, {"by": 0}, format=format).commit(2)

    write_split(tmp_path / "many", 3, split(state, holders), format)[committer].commit(2, wait_s=0)

    one, many = fields_of(tmp_path / "one", 3), fields_of(tmp_path / "many", 3)
    assert json.dumps(many["skeleton"]) == json.dumps(one["skeleton"])
    assert (many["info"], many["generation"]) == (one["info"], one["generation"])
    assert [(p, told(t)) for p, t in many["tensors"].items()] == [(p, told(t)) for p, t in one["tensors"].items()]
    assert len(many["files"]) == len(holders)
    verify(tmp_path / "many", 3)
    assert same(load(tmp_path / "many", 3).state, state)
    assert not [name for name in all_names(tmp_path / "many") if name.endswith("part-00001.json")]


def test_shards_of_a_tensor_are_not_the_same_value_twice(tmp_path):
    tall = torch.arange(12.0).reshape(6, 2)
    given = [
        {"common": 1, "parts": {"0": {"w": Shard(tall[:2], (0, 0), (6, 2))}}},
        {"parts": {"0": {"w": Shard(tall[2:], (2, 0), (6, 2))}, "1": {}}},
    ]

    write_split(tmp_path, 1, given)[0].commit(0, wait_s=0)

    assert same(load(tmp_path, 1).state, {"common": 1, "parts": {"0": {"w": tall}, "1": {}}})


def test_an_empty_dict_keeps_the_place_of_what_another_gives(tmp_path):
    write_split(tmp_path, 1, [{"a": {}, "b": 1}, {"a": {"1": 1, "0": torch.ones(2)}}])[0].commit(0, wait_s=0)

    assert same(load(tmp_path, 1).state, {"a": {"1": 1, "0": torch.ones(2)}, "b": 1})


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        ({"a": {"w": torch.ones(2)}}, {"a": {"w": torch.ones(2)}}, "part 1 of .* step 5 holds 'a/w', and so does"),
        ({"lr": 0.1}, {"lr": 0.1}, "holds 'lr', and so does a part before it"),
        ({"lr": None}, {"lr": {}}, "holds 'lr', and so does"),
        ({"l": [1]}, {"l": [2]}, "holds 'l', and so does"),
        ({"w": torch.ones(2)}, {"w": {"x": 1}}, "holds 'w', and so does"),
        ({"w": Shard(torch.ones(2), (0,), (3,))}, {"w": Shard(torch.ones(2), (1,), (3,))}, "holds 'w', and so does"),
        ({"w": Shard(torch.ones(1), (0,), (3,))}, {"w": Shard(torch.ones(1), (2,), (3,))}, "w: has 3 values, its 2"),
        ({"w": torch.ones(2)}, {"w": torch.ones(3)}, "hold different tensors 'w'"),
        ({"p": {0: torch.ones(2)}}, {"p": {"0": torch.ones(2)}}, "holds 'p/0', and so does"),
    ],
    ids=range(9),
)
def test_a_value_that_two_writers_give_does_not_become_a_checkpoint(tmp_path, one, other, what):
    pending = write_split(tmp_path, 5, [one, other])

    for committer in pending:
        with pytest.raises(CheckpointError, match=what):
            committer.commit(0, wait_s=0)

    assert steps(tmp_path) == []


def test_a_part_of_a_shared_state_beside_a_distinct_one_does_not_become_a_checkpoint(tmp_path):
    first = write(tmp_path, 5, take({"a": torch.ones(2)}, 0, 3, distinct=True), {}, **TOKEN)
    write(tmp_path, 5, take({"b": 1}, 1, 3, distinct=True), {}, **TOKEN)
    write(tmp_path, 5, take({"a": torch.ones(2)}, 2, 3), {}, **TOKEN)

    with pytest.raises(CheckpointError, match=r"part 2 of .* step 5 is not distinct, but other parts are"):
        first.commit(0, wait_s=0)

    assert steps(tmp_path) == []


def test_a_distinct_part_must_be_a_dict():
    with pytest.raises(ConfigError, match="must be a dict, got list; name its values by their keys"):
        take([1], 0, 2, distinct=True)


# --------------------------------------------------------------------------------------------- reading a part


ONLY_2 = all_but("replica/parts", "replica/parts/2")


def without(state, *left_out):
    parts = {n: part for n, part in state["replica"]["parts"].items() if n not in left_out}
    return state | {"replica": state["replica"] | {"parts": parts}}


@pytest.mark.parametrize("format", FORMATS)
def test_a_part_is_read_without_the_others(tmp_path, format):
    state = whole()
    write_tensors(tmp_path, 1, state, {"seed": 1}, format=format).commit(4)

    loaded = load(tmp_path, 1, only=ONLY_2)

    assert same(loaded.state, without(state, "0", "1", "3"))
    assert (loaded.step, loaded.info, loaded.generation) == (1, {"seed": 1}, 4)


def test_all_but_names_places_and_not_beginnings_of_names():
    state = {"parts": {"1": 1, "10": {"x": 2, "y": 3}, "2": [{"deep": 4}]}, "parts more": {"1": 5}, "a/b": {"c": 6}}

    assert pick(state, all_but("parts", "parts/1")) == state | {"parts": {"1": 1}}
    assert pick(state, all_but("parts", "parts/10/y", "parts/2")) == state | {
        "parts": {"10": {"y": 3}, "2": [{"deep": 4}]}
    }
    assert pick(state, all_but("parts")) == state | {"parts": {}}
    assert pick(state, all_but("a~1b"))["a/b"] == {}


@pytest.mark.parametrize(("left_out", "damaged"), [("0", 0), ("1", 1), ("3", 1)])
def test_nothing_of_another_part_is_read_and_damage_in_ones_own_is_named(tmp_path, left_out, damaged):
    state = whole()
    write_split(tmp_path, 1, split(state, ["02", "13"]))[0].commit(0, wait_s=0)
    entry = fields_of(tmp_path, 1)["tensors"][f"replica/parts/{left_out}/model/fc.weight"]
    file = data_dir(tmp_path, 1) / entry["pieces"][0]["file"]
    assert file.name == f"part-0000{damaged}.safetensors"
    flip(file, entry["pieces"][0]["offset"])
    flip(file, 9)  # its header

    assert same(load(tmp_path, 1, only=ONLY_2).state, without(state, "0", "1", "3"))
    own = all_but("replica/parts", f"replica/parts/{left_out}")
    with pytest.raises(CheckpointCorrupt, match=f"tensor 'replica/parts/{left_out}/model/fc.weight' .* of {file.name}"):
        load(tmp_path, 1, only=own)


def test_no_byte_that_is_not_wanted_is_read(tmp_path):
    write_split(tmp_path, 1, split(whole(), ["0", "1", "23"]))[0].commit(0, wait_s=0)
    read: list[tuple[str, int, int]] = []

    class Watched(LocalStorage):
        @contextmanager
        def reader(self, path):
            with super().reader(path) as file:
                yield SimpleNamespace(
                    size_bytes=file.size_bytes,
                    part_bytes=file.part_bytes,
                    read_into=lambda first, out: (
                        read.append((Path(path).name, first, first + len(out))) or file.read_into(first, out)
                    ),
                )

    load(Watched(tmp_path), 1, only=ONLY_2)

    wanted = {
        (piece["file"], piece["offset"], piece["offset"] + piece["bytes"])
        for path, entry in fields_of(tmp_path, 1)["tensors"].items()
        for piece in entry["pieces"]
        if not path.startswith("replica/parts/") or path.startswith("replica/parts/2/")
    }
    assert sorted(entry for entry in read if entry[0] != "manifest.json") == sorted(wanted)
    assert {file for file, _, _ in wanted} == {"part-00000.safetensors", "part-00002.safetensors"}


def test_files_of_other_parts_may_be_gone(tmp_path):
    state = whole()
    write_split(tmp_path, 1, split(state, ["02", "13"]))[0].commit(0, wait_s=0)
    (data_dir(tmp_path, 1) / "part-00001.safetensors").unlink()

    assert same(load(tmp_path, 1, only=ONLY_2).state, without(state, "0", "1", "3"))
    with pytest.raises(CheckpointCorrupt):
        load(tmp_path, 1)


def test_what_is_tied_to_a_part_that_is_left_out_is_read_all_the_same(tmp_path):
    head = torch.arange(6.0)
    state = {"parts": {"0": {"embedding": head}, "1": {"head": head, "again": head}}}
    write_tensors(tmp_path, 1, state, {}).commit(0)

    back = load(tmp_path, 1, only=all_but("parts", "parts/1")).state

    assert same(back, {"parts": {"1": {"head": head, "again": head}}})
    assert back["parts"]["1"]["head"] is back["parts"]["1"]["again"]


def test_a_part_is_read_into_given_memory(tmp_path):
    write_tensors(tmp_path, 1, whole(), {}).commit(0)
    given = {"replica": {"parts": {"2": {"model": {"fc.weight": torch.zeros(3, 5)}}}}}

    back = load(tmp_path, 1, into=given, only=ONLY_2).state

    own = back["replica"]["parts"]["2"]["model"]["fc.weight"]
    assert own.data_ptr() == given["replica"]["parts"]["2"]["model"]["fc.weight"].data_ptr()
    assert same(own, stage(2)["model"]["fc.weight"])


# --------------------------------------------------------------------------------------------- the keeper


@pytest.fixture
def keepers(tmp_path):
    """The keepers of three workers; of a split model each has its own part."""
    made = [CheckpointManager(Settings(checkpoint_dir=str(tmp_path)), background=True) for _ in range(3)]
    for keeper in made:
        keeper.start_over(7, 0)
    yield made
    points.arm(None)


def save(keepers, step, writers=(0, 1, 2), value=0.0):
    """All begin, all publish; return what becomes of it at the first of the writers, and the state."""
    state = whole(3)
    state["ledger"]["row"] = torch.full((4,), value)
    given = dict(zip(writers, split(state, [str(rank) for rank in writers]), strict=True))
    for rank, keeper in enumerate(keepers):
        mine = given.get(rank, {"not": object()})  # who gives nothing is not even asked what it has
        keeper.note_alive((0, 1, 2))
        keeper.begin(step, mine, {"by": rank}, [(rank,) for rank in writers], (rank,), 0, distinct=True)
    for rank, keeper in enumerate(keepers):
        keeper.publish(step - 1, 0, is_lead=rank == writers[0])
    (outcome,) = keepers[writers[0]].finish()
    return outcome, state


def test_all_who_hold_a_part_write_whatever_the_size(keepers, tmp_path):
    outcome, state = save(keepers, 4)

    assert outcome.error is None
    assert len(verify(tmp_path, 4).files) == 3
    assert same(load(tmp_path, 4).state, state)


def test_who_is_not_among_the_writers_writes_nothing(keepers, tmp_path):
    outcome, state = save(keepers, 4, writers=(2, 0))

    assert outcome.error is None
    assert len(verify(tmp_path, 4).files) == 2
    assert load(tmp_path, 4).info == {"by": 2}
    assert keepers[1].finish() == []
    assert same(load(tmp_path, 4).state["replica"]["parts"], without(state, "1")["replica"]["parts"])


def test_one_writer_of_all_parts_needs_no_others(tmp_path):
    keeper = CheckpointManager(Settings(checkpoint_dir=str(tmp_path), checkpoint_format="dcp"), background=False)
    keeper.start_over(7, 0)

    keeper.begin(4, whole(), {}, [(1,)], (1,), 0, distinct=True)
    keeper.publish(3, 0, is_lead=True)

    assert keeper.finish()[0].error is None
    assert same(load(tmp_path, 4).state, whole())


def test_distinct_parts_in_a_format_of_one_writer_are_refused_at_all_workers(tmp_path):
    for rank in range(3):
        keeper = CheckpointManager(Settings(checkpoint_dir=str(tmp_path), checkpoint_format="dcp"), background=True)
        with pytest.raises(
            ConfigError, match=r"dcp can be written by one worker only, .* held by 2; choose safetensors"
        ):
            keeper.begin(4, {}, {}, [(0,), (1,)], (rank,), 0, distinct=True)

    assert all_names(tmp_path) == []


def damage(root, step):
    file = data_dir(root, step) / "part-00002.safetensors"
    flip(file, file.stat().st_size - 1)


def test_the_newest_intact_step_is_found_without_holding_its_state(keepers, tmp_path, monkeypatch):
    for step in (4, 8, 12):
        save(keepers, step, value=float(step))
    damage(tmp_path, 12)
    reader, passed = CheckpointManager(Settings(checkpoint_dir=str(tmp_path), keep_last=2), background=False), []
    sizes = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **more: (sizes.append(size), empty(*size, **more))[1])

    step = reader.newest(lambda step, error: passed.append((step, str(error))), keep=False)
    info = reader.info(step)
    held = [size for size in sizes if size not in ((0,), (1,))]
    loaded = reader.load(step, only=ONLY_2)

    assert (step, info) == (8, {"by": 0})
    assert held == [], "no memory was set aside for values"
    ((where, why),) = passed
    assert where == 12
    assert "part-00002.safetensors" in why
    assert loaded.state["ledger"]["row"].tolist() == [8.0] * 4
    assert list(loaded.state["replica"]["parts"]) == ["2"]
    reader.start_over(9, 0)
    reader.begin(9, whole(), {}, [(0,)], (0,), 0, distinct=True)
    reader.publish(8, 0, is_lead=True)
    assert reader.finish()[0].error is None
    assert steps(tmp_path) == [8, 9, 12], "what was found damaged pushed nothing intact out"


@pytest.mark.parametrize("keep", [True, False])
def test_a_part_is_the_same_whether_the_whole_was_kept_or_not(keepers, tmp_path, keep):
    _, state = save(keepers, 4)
    reader = CheckpointManager(Settings(checkpoint_dir=str(tmp_path)), background=False)

    step = reader.newest(pytest.fail, keep=keep)

    assert step == 4
    assert reader.info(step) == {"by": 0}
    assert same(reader.load(step, ONLY_2).state, without(state, "0", "1"))
    assert same(reader.load(step).state, state)
