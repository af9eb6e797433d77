from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace

import pytest
import safetensors.torch
import torch

import holdfast.checkpoint.save as save_module
from holdfast import points
from holdfast.checkpoint import (
    LocalCheckpoints,
    load,
    newest_intact,
    read_manifest,
    steps,
    storage,
    verify,
    write_tensors,
)
from holdfast.checkpoint.manifest import dump
from holdfast.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing, ConfigError


def saved(root, step, value, generation=0):
    return write_tensors(root, step, {"w": torch.full((4,), float(value))}, {"value": value}).commit(generation)


def value_of(root, step):
    loaded = load(root, step)
    assert loaded.state["w"].tolist() == [float(loaded.info["value"])] * 4
    return loaded.info["value"]


def tensor_file(root, step):
    return storage.step_dir(root, step) / read_manifest(root, step).file


def flip(path, position, mask=1):
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    points.arm(None)


# --------------------------------------------------------------------------------------------- saving


def test_a_checkpoint_counts_when_it_is_committed_and_not_before(tmp_path):
    pending = write_tensors(tmp_path, 20, {"w": torch.ones(2)}, {"seed": 3})

    before = steps(tmp_path), newest_intact(tmp_path)
    done = pending.commit(generation=4)
    loaded = load(tmp_path, 20)

    assert before == ([], None)
    assert steps(tmp_path) == [20]
    assert (loaded.step, loaded.info, loaded.generation) == (20, {"seed": 3}, 4)
    assert done.path == tmp_path / "step-00000020"
    assert done.size_bytes == sum(file.stat().st_size for file in done.path.iterdir())


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    weights, info = torch.ones(2), {"ids": [1]}

    pending = write_tensors(tmp_path, 1, {"w": weights}, info)
    weights.zero_()
    info["ids"].append(2)
    pending.commit(0)

    assert load(tmp_path, 1).state["w"].tolist() == [1.0, 1.0]
    assert load(tmp_path, 1).info == {"ids": [1]}


def test_the_tensor_file_can_be_read_by_the_safetensors_package(tmp_path):
    state = {"a": torch.randn(3, 2), "b": {"c": torch.tensor(True), "d": torch.ones(2, dtype=torch.bfloat16)}}
    write_tensors(tmp_path, 1, state, {}).commit(0)

    read = safetensors.torch.load_file(tensor_file(tmp_path, 1))

    assert read.keys() == {"a", "b/c", "b/d"}
    assert torch.equal(read["a"], state["a"])


def test_tensors_that_share_memory_are_each_saved(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tied = torch.nn.Parameter(base)
    state = [
        base,
        base,
        base.t(),
        base[1],
        base[:, 1],
        tied,
        torch.ones(1).expand(5),
        torch.ones(2).to(torch.complex64).conj(),
    ]

    write_tensors(tmp_path, 1, state, {}).commit(0)

    for before, after in zip(state, load(tmp_path, 1).state, strict=True):
        assert torch.equal(before, after)
        assert after.is_contiguous()


@pytest.mark.parametrize("elements", [0, 1])
def test_a_tensor_too_small_to_have_a_stride_is_saved_whatever_its_stride(tmp_path, elements):
    odd = torch.arange(3, 3 + 2 * elements, dtype=torch.float64)[::2]
    assert odd.stride() == (2,)

    write_tensors(tmp_path, 1, odd, {}).commit(0)

    assert torch.equal(load(tmp_path, 1).state, odd)


def test_loaded_tensors_have_memory_of_their_own(tmp_path):
    saved(tmp_path, 1, 7)
    weights = load(tmp_path, 1).state["w"]

    tensor_file(tmp_path, 1).write_bytes(b"")
    weights += 1

    assert weights.tolist() == [8.0] * 4


def test_a_step_that_is_saved_again_is_never_without_a_complete_checkpoint(tmp_path):
    saved(tmp_path, 20, 1)
    seen = []
    points.arm(lambda name: seen.append((name, value_of(tmp_path, 20))))

    saved(tmp_path, 20, 2)

    assert seen == [(name, 2 if name == "checkpoint.committed" else 1) for name in points.POINTS]
    assert len(list((tmp_path / "step-00000020").iterdir())) == 2


def test_saving_again_heals_a_damaged_step(tmp_path):
    saved(tmp_path, 20, 1)
    flip(tensor_file(tmp_path, 20), -1)

    saved(tmp_path, 20, 1)

    assert value_of(tmp_path, 20) == 1


def test_a_second_attempt_at_a_step_takes_the_place_of_the_first(tmp_path):
    first = write_tensors(tmp_path, 5, {"w": torch.zeros(2)}, {})
    second = write_tensors(tmp_path, 5, {"w": torch.ones(2)}, {})

    with pytest.raises(CheckpointError, match="its tensors are not in"):
        first.commit(0)
    first.abandon()
    second.commit(0)

    assert load(tmp_path, 5).state["w"].tolist() == [1.0, 1.0]


def test_an_abandoned_checkpoint_leaves_nothing(tmp_path):
    pending = write_tensors(tmp_path, 5, {"w": torch.zeros(2)}, {})

    pending.abandon()
    pending.abandon()

    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="can be committed once, and not after abandon"):
        pending.commit(0)


def test_abandoning_what_was_committed_changes_nothing(tmp_path):
    pending = write_tensors(tmp_path, 5, {"w": torch.zeros(2)}, {})
    pending.commit(0)

    pending.abandon()

    assert newest_intact(tmp_path) == 5


def test_leftovers_of_the_dead_go_when_a_later_step_is_complete(tmp_path):
    for name in ("step-00000010.tmp-1", "step-00000020.tmp-1", "step-00000030.tmp-1"):
        (tmp_path / name).mkdir()
    own = write_tensors(tmp_path, 15, {"w": torch.zeros(2)}, {})
    old = storage.step_dir(tmp_path, 20)
    old.mkdir()
    for name in ("tensors-0123456789abcdef.safetensors", "manifest.json.tmp", "notes.txt"):
        (old / name).write_text("half")

    saved(tmp_path, 20, 1)

    assert sorted(e.name for e in tmp_path.iterdir()) == sorted([own.attempt.name, old.name, "step-00000030.tmp-1"])
    assert sorted(e.suffix for e in old.iterdir()) == [".json", ".safetensors", ".txt"]


def test_a_state_that_cannot_be_saved_leaves_nothing_behind(tmp_path):
    saved(tmp_path, 1, 1)

    with pytest.raises(CheckpointError, match="the state cannot be saved: model/odd has type object"):
        write_tensors(tmp_path, 2, {"model": {"odd": object()}}, {})

    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "choose a directory on a disk that may be written")],
)
def test_a_disk_that_takes_no_more_is_an_error_that_leaves_the_old_checkpoint(
    tmp_path, monkeypatch, function, number, advice
):
    saved(tmp_path, 20, 1)

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, function, refuse)
        with pytest.raises(CheckpointError) as refused:
            saved(tmp_path, 20, 2)

    assert os.strerror(number) in str(refused.value)
    assert "The checkpoints that were complete are untouched" in str(refused.value)
    assert advice in str(refused.value)
    assert value_of(tmp_path, 20) == 1


def test_a_root_that_is_a_file_is_an_error_that_says_so(tmp_path):
    root = tmp_path / "file"
    root.write_text("")

    with pytest.raises(CheckpointError, match=f"{root}.*choose a directory, not a file"):
        write_tensors(root, 1, {}, {})
    with pytest.raises(CheckpointError, match="cannot list the checkpoints"):
        steps(root)


def test_leftovers_that_cannot_be_removed_are_a_warning(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "not permitted")

    pending = write_tensors(tmp_path, 1, {}, {})
    monkeypatch.setattr(save_module.storage, "remove_tree", refuse)

    with pytest.warns(RuntimeWarning, match="step 1 is complete, but leftovers"):
        pending.commit(0)

    assert newest_intact(tmp_path) == 1


def test_everything_is_on_the_disk_before_the_name_that_shows_it(tmp_path, monkeypatch):
    """A SIGKILL keeps the page cache, so only the order of the calls can show a missing fsync."""
    log = []

    def watch(name, describe):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args: (log.append((name, describe(*args))), real(*args))[1])

    watch("fsync", lambda number: os.path.basename(os.readlink(f"/proc/self/fd/{number}")))
    watch("replace", lambda _, target: os.path.basename(target))
    root = tmp_path / "new"

    write_tensors(root, 1, {"w": torch.ones(3)}, {}).commit(0)

    name = read_manifest(root, 1).file
    attempt = f"step-00000001.tmp-{os.getpid()}"
    assert log == [
        ("fsync", tmp_path.name),
        ("fsync", "part"),
        ("replace", name),
        ("fsync", attempt),
        ("fsync", "new"),
        ("replace", name),
        ("fsync", "step-00000001"),
        ("fsync", "manifest.json.tmp"),
        ("replace", "manifest.json"),
        ("fsync", "step-00000001"),
    ]


def test_numbers_below_zero_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="step must be at least 0, got -1"):
        write_tensors(tmp_path, -1, {}, {})
    with pytest.raises(ConfigError, match="generation must be at least 0, got -1"):
        write_tensors(tmp_path, 1, {}, {}).commit(-1)


# --------------------------------------------------------------------------------------------- loading


def test_only_complete_steps_are_listed(tmp_path):
    for step in (100_000_000, 3, 20):
        saved(tmp_path, step, step % 7)
    (tmp_path / "step-00000040").mkdir()
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-000000005").mkdir()
    (tmp_path / "other.txt").write_text("")

    assert steps(tmp_path) == [3, 20, 100_000_000]
    assert newest_intact(tmp_path) == 100_000_000


def test_where_nothing_was_saved_there_is_nothing(tmp_path):
    assert steps(tmp_path / "none") == []
    assert newest_intact(tmp_path / "none") is None
    with pytest.raises(CheckpointMissing, match=r"no complete checkpoint of step 5 in .*, there are none"):
        load(tmp_path / "none", 5)


def test_a_missing_step_is_answered_with_those_that_there_are(tmp_path):
    saved(tmp_path, 3, 1)

    with pytest.raises(CheckpointMissing, match=r"step 5 in .*, there are \[3\]; ask for one of these"):
        load(tmp_path, 5)


def test_a_damaged_tensor_is_named_with_its_bytes(tmp_path):
    state = {"a": torch.zeros(2), "b": torch.zeros(3, 2)}
    write_tensors(tmp_path, 8, state, {}).commit(0)
    begin = read_manifest(tmp_path, 8).header_bytes
    flip(tensor_file(tmp_path, 8), -1)

    with pytest.raises(CheckpointCorrupt) as damaged:
        load(tmp_path, 8)

    message = str(damaged.value)
    assert message.startswith(f"the checkpoint of step 8 in {tmp_path} is damaged: ")
    assert f"tensor 'b' (float32, shape [3, 2]), bytes {begin + 8} to {begin + 32}: they have the digest" in message
    assert "Load an older step" in message


def test_a_damaged_newest_is_told_and_the_next_older_taken(tmp_path):
    for step in (10, 20, 30, 40):
        saved(tmp_path, step, step)
    flip(tensor_file(tmp_path, 40), -1)
    flip(tmp_path / "step-00000030" / "manifest.json", 30)
    told = []

    step = newest_intact(tmp_path, lambda step, error: told.append((step, str(error))))

    assert step == 20
    assert [step for step, _ in told] == [40, 30]
    assert "tensor 'w'" in told[0][1]
    assert "manifest, xxh3" in told[1][1]


def _cut(path):
    os.truncate(path, path.stat().st_size - 1)


def _grow(path):
    path.write_bytes(path.read_bytes() + b"\0")


def _pipe(path):
    path.unlink()
    os.mkfifo(path)


def _directory(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("which", ["tensors", "manifest"])
@pytest.mark.parametrize("damage", [_cut, _grow, _pipe, _directory], ids=lambda f: f.__name__)
def test_a_file_that_is_not_what_it_was_is_damage(tmp_path, which, damage):
    saved(tmp_path, 10, 1)
    saved(tmp_path, 20, 2)
    damage(tensor_file(tmp_path, 20) if which == "tensors" else tmp_path / "step-00000020" / "manifest.json")

    with pytest.raises(CheckpointCorrupt):
        verify(tmp_path, 20)

    assert newest_intact(tmp_path) == 10


def test_a_tensor_file_that_is_gone_is_damage_and_a_manifest_that_is_gone_is_no_checkpoint(tmp_path):
    saved(tmp_path, 10, 1)
    tensor_file(tmp_path, 10).unlink()

    with pytest.raises(CheckpointCorrupt, match="cannot be read: No such file"):
        load(tmp_path, 10)
    (tmp_path / "step-00000010" / "manifest.json").unlink()
    with pytest.raises(CheckpointMissing):
        load(tmp_path, 10)


def test_a_checkpoint_under_the_name_of_another_step_is_damage(tmp_path):
    saved(tmp_path, 10, 1)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "step-00000020")

    with pytest.raises(CheckpointCorrupt, match="says 10, but its directory is that of step 20"):
        load(tmp_path, 20)


def test_a_disk_that_may_not_be_read_is_no_damage(tmp_path, monkeypatch):
    saved(tmp_path, 10, 1)
    real = os.open

    def refuse(name, *args, **kwargs):
        if str(name).endswith(".safetensors"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)

    with pytest.raises(CheckpointError, match="choose a directory that this user may read") as refused:
        newest_intact(tmp_path)

    assert not isinstance(refused.value, CheckpointCorrupt)


def test_a_reader_who_is_overtaken_by_a_new_save_reads_the_new_one(tmp_path, monkeypatch):
    saved(tmp_path, 10, 1)
    real = storage.opened
    calls = []

    def opened(path):
        calls.append(path.name)
        if len(calls) == 2:
            saved(tmp_path, 10, 2)
        return real(path)

    monkeypatch.setattr(storage, "opened", opened)

    assert value_of(tmp_path, 10) == 2


def test_a_header_that_lists_other_tensors_is_damage_although_all_digests_are_right(tmp_path):
    manifest = write_tensors(tmp_path, 10, {"a": torch.ones(1), "b": torch.ones(1)}, {}).manifest
    write_tensors(tmp_path, 10, {"a": torch.ones(1), "b": torch.ones(1)}, {}).commit(0)
    renamed = {"a": manifest.tensors["a"], "c": manifest.tensors["b"]}
    skeleton = json.loads(json.dumps(manifest.skeleton).replace('"tensor": "b"', '"tensor": "c"'))
    lying = dump(replace(manifest, tensors=renamed, skeleton=skeleton))
    (tmp_path / "step-00000010" / "manifest.json").write_bytes(lying)

    with pytest.raises(CheckpointCorrupt, match="the header and the manifest list different tensors"):
        load(tmp_path, 10)


def test_the_engine_does_what_the_functions_do(tmp_path):
    engine = LocalCheckpoints(tmp_path)

    engine.write_tensors(3, {"w": torch.ones(1)}, {}).commit(0)

    assert engine.steps() == [3]
    assert engine.newest_intact() == 3
    assert engine.load(3).state == {"w": torch.ones(1)}
