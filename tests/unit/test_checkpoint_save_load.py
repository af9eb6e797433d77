from __future__ import annotations

import errno
import os
import shutil
import socket

import pytest
import torch
from checkpoint_bytes import all_names, data_dir, data_files, flip, manifest_file, same, step_dir

from holdfast.checkpoint import (
    CheckpointStore,
    find_damage,
    load,
    load_box,
    load_newest,
    newest_intact,
    read_manifest,
    steps,
    verify,
    write_tensors,
)
from holdfast.checkpoint.blocks import BLOCK_BYTES
from holdfast.checkpoint.save import remove
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing, ConfigError
from holdfast.faults import points
from holdfast.tools.checkpoints.listing import examine_all

ATTEMPT = {"token": "1a-0"}


def saved(root, step, value, generation=0):
    return write_tensors(root, step, {"w": torch.full((4,), float(value))}, {"value": value}).commit(generation)


def value_of(root, step):
    loaded = load(root, step)
    assert loaded.state["w"].tolist() == [float(loaded.info["value"])] * 4
    return loaded.info["value"]


def tensor_file(root, step):
    (file,) = data_files(root, step)
    return file


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    points.arm(None)


# --------------------------------------------------------------------------------------------- saving


def test_a_checkpoint_counts_when_it_is_committed_and_not_before(tmp_path):
    pending = write_tensors(tmp_path, 20, {"w": torch.ones(2)}, {"seed": 3})

    before = steps(tmp_path), newest_intact(tmp_path), load_newest(tmp_path)
    done = pending.commit(generation=4)
    loaded = load(tmp_path, 20)

    assert before == ([], None, None)
    assert steps(tmp_path) == [20]
    assert (loaded.step, loaded.info, loaded.generation) == (20, {"seed": 3}, 4)
    assert done.path == str(tmp_path / "step-00000020")
    assert done.size_bytes == sum(file.stat().st_size for file in step_dir(tmp_path, 20).rglob("*") if file.is_file())


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    weights, info = torch.ones(2), {"ids": [1]}

    pending = write_tensors(tmp_path, 1, {"w": weights}, info)
    weights.zero_()
    info["ids"].append(2)
    pending.commit(0)

    assert load(tmp_path, 1).state["w"].tolist() == [1.0, 1.0]
    assert load(tmp_path, 1).info == {"ids": [1]}


def test_tensors_that_share_memory_keep_their_values(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    state = {
        "base": base,
        "again": torch.nn.Parameter(base),
        "views": [base.t(), base[1], base[:, 1], base[:2], base.view(torch.int32), base[::2]],
        "expanded": torch.tensor([7.0]).expand(5),
        "conjugate": [numbers, numbers.conj(), numbers.conj().imag, torch._neg_view(base)],
    }

    write_tensors(tmp_path, 1, state, {}).commit(0)
    back = load(tmp_path, 1).state

    assert same(state, back)
    assert back["again"] is back["base"]
    assert all(view.is_contiguous() and view is not back["base"] for view in back["views"])
    back["base"].zero_()
    assert same(back["views"][1], base[1])


def test_tied_weights_are_stored_once_and_train_on_as_one(tmp_path):
    shared = torch.nn.Linear(64, 64, bias=False)
    model = torch.nn.Sequential(shared, torch.nn.ReLU(), shared)

    write_tensors(tmp_path, 1, model.state_dict(), {}).commit(0)
    back = load(tmp_path, 1).state

    assert list(read_manifest(tmp_path, 1).tensors) == ["0.weight"]
    assert tensor_file(tmp_path, 1).stat().st_size < 2 * 64 * 64 * 4
    assert back["0.weight"] is back["2.weight"]


def test_a_second_attempt_at_a_step_takes_the_place_of_the_first(tmp_path):
    first = write_tensors(tmp_path, 5, {"w": torch.zeros(2)}, {})
    second = write_tensors(tmp_path, 5, {"w": torch.ones(2)}, {})

    second.commit(0)
    with pytest.raises(CheckpointError, match=r"cannot complete the checkpoint of step 5: .* any more"):
        first.commit(0)
    first.abandon()

    assert load(tmp_path, 5).state["w"].tolist() == [1.0, 1.0]


def test_an_abandoned_checkpoint_leaves_nothing(tmp_path):
    pending = write_tensors(tmp_path, 5, {"w": torch.zeros(2)}, {})

    pending.abandon()
    pending.abandon()

    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match=r"cannot be committed after abandon\(\)"):
        pending.commit(0)


def test_committing_twice_or_abandoning_what_was_committed_changes_nothing(tmp_path):
    pending = write_tensors(tmp_path, 5, {"w": torch.zeros(2)}, {})

    assert pending.commit(0) == pending.commit(0)
    pending.abandon()

    assert newest_intact(tmp_path) == 5


def test_a_token_names_the_attempt_and_cannot_be_used_for_what_is_complete(tmp_path):
    write_tensors(tmp_path, 5, {"w": torch.zeros(2)}, {}, **ATTEMPT).abandon()
    write_tensors(tmp_path, 5, {"w": torch.ones(2)}, {}, **ATTEMPT).commit(0)

    with pytest.raises(CheckpointError, match="step 5 was completed with the token '1a-0' already"):
        write_tensors(tmp_path, 5, {"w": torch.zeros(2)}, {}, **ATTEMPT)

    assert data_dir(tmp_path, 5).name == "data-1a-0"
    assert load(tmp_path, 5).state["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("token", ["../x", "A", "-a", "a/b", "a\0", "a" * 65])
def test_a_token_that_is_no_plain_name_is_refused(tmp_path, token):
    with pytest.raises(ConfigError, match="token must be at most 64 lower-case letters"):
        write_tensors(tmp_path, 5, {}, {}, token=token)

    assert all_names(tmp_path) == []


def test_leftovers_of_the_dead_go_when_a_later_step_is_complete(tmp_path):
    saved(tmp_path, 5, 5)
    for name in ("step-00000005/data-dead", "step-00000010/data-a", "step-00000015/data-b", "step-00000030/data-c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "part-00000.safetensors").write_text("half")
    for name in ("step-00000015/notes.txt", "step-00000010/manifest.json.tmp", "step-00000007"):
        (tmp_path / name).write_text("mine")

    saved(tmp_path, 20, 1)

    attempts = [name for name in all_names(tmp_path) if not name.startswith(("step-00000020", "step-00000005"))]
    assert attempts == [
        "step-00000007",
        "step-00000015",
        "step-00000015/notes.txt",
        "step-00000030",
        "step-00000030/data-c",
        "step-00000030/data-c/part-00000.safetensors",
    ]
    assert not (tmp_path / "step-00000005" / "data-dead").exists()
    assert value_of(tmp_path, 5) == 5


def test_leftovers_beside_a_damaged_checkpoint_stay_until_it_is_saved_again(tmp_path):
    saved(tmp_path, 5, 5)
    manifest_file(tmp_path, 5).write_text("damaged")
    (step_dir(tmp_path, 5) / "data-other").mkdir()

    saved(tmp_path, 20, 1)
    kept = len(list(step_dir(tmp_path, 5).iterdir()))
    saved(tmp_path, 5, 2)

    assert kept == 3
    assert len(list(step_dir(tmp_path, 5).iterdir())) == 2


def test_what_a_checkpoint_costs_does_not_grow_with_how_many_there_are(tmp_path, monkeypatch):
    looked = []
    names = LocalStorage.names
    monkeypatch.setattr(LocalStorage, "names", lambda self, folder: looked.append(folder) or names(self, folder))
    engine = CheckpointStore(tmp_path)
    counts = []
    for step in range(1, 31):
        looked.clear()
        engine.write_tensors(step, {"w": torch.ones(1)}, {}).commit(0)
        assert engine.steps(engine.clean) == list(range(1, step + 1))
        counts.append(len(looked))

    assert counts[-1] == counts[1]


def test_leftovers_go_from_a_step_that_was_clean_before_and_is_begun_again(tmp_path):
    engine = CheckpointStore(tmp_path)
    engine.write_tensors(5, {"w": torch.ones(1)}, {}).commit(0)
    engine.write_tensors(10, {"w": torch.ones(1)}, {}).commit(0)
    engine.write_tensors(5, {"w": torch.zeros(1)}, {})  # and who wrote it never completes it
    assert len(list(step_dir(tmp_path, 5).iterdir())) == 3

    engine.write_tensors(15, {"w": torch.ones(1)}, {}).commit(0)

    assert len(list(step_dir(tmp_path, 5).iterdir())) == 2
    assert engine.steps(engine.clean) == engine.steps() == [5, 10, 15]


def test_a_step_that_was_removed_and_begun_by_another_writer_does_not_count_as_complete(tmp_path):
    engine = CheckpointStore(tmp_path)
    for step in (5, 10):
        engine.write_tensors(step, {"w": torch.ones(1)}, {}).commit(0)
    engine.remove(5)
    write_tensors(tmp_path, 5, {"w": torch.zeros(1)}, {})  # and never completes it

    assert engine.steps(engine.clean) == [10]


def test_a_state_that_cannot_be_saved_leaves_nothing_behind(tmp_path):
    saved(tmp_path, 1, 1)

    with pytest.raises(CheckpointError, match="the state cannot be saved: model/odd has type object"):
        write_tensors(tmp_path, 2, {"model": {"odd": object()}}, {})
    with pytest.raises(CheckpointError, match="info/a must be plain JSON"):
        write_tensors(tmp_path, 2, {}, {"a": object()})

    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def test_a_script_that_changes_its_directory_meanwhile_changes_nothing(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    engine = CheckpointStore("here")
    pending = engine.write_tensors(3, {"w": torch.ones(1)}, {})

    monkeypatch.chdir("elsewhere")
    pending.commit(0)

    assert engine.newest_intact() == newest_intact(tmp_path / "here") == 3
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert engine.url == "here"


def test_a_root_that_is_a_file_is_an_error_that_says_so(tmp_path):
    root = tmp_path / "file"
    root.write_text("")

    with pytest.raises(CheckpointError, match=f"{root}.*choose a directory, not a file"):
        write_tensors(root, 1, {}, {})
    with pytest.raises(CheckpointError, match="cannot list the checkpoints"):
        steps(root)


def test_leftovers_that_cannot_be_removed_are_a_warning(tmp_path):
    class Sticky(LocalStorage):
        def remove(self, path):
            raise CheckpointError(f"cannot remove {path}")

    (tmp_path / "step-00000000" / "data-old").mkdir(parents=True)
    pending = write_tensors(Sticky(tmp_path), 1, {}, {})

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

    write_tensors(root, 1, {"w": torch.ones(3)}, {}, **ATTEMPT).commit(0)

    assert log == [
        ("fsync", tmp_path.name),
        ("fsync", "new"),
        ("fsync", "step-00000001"),
        ("fsync", "part-00000.safetensors"),
        ("fsync", "data-1a-0"),
        ("fsync", "manifest.json.tmp"),
        ("replace", "manifest.json"),
        ("fsync", "step-00000001"),
    ]


def test_arguments_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="step must be at least 0, got -1"):
        write_tensors(tmp_path, -1, {}, {})
    with pytest.raises(ConfigError, match="generation must be at least 0, got -1"):
        write_tensors(tmp_path, 1, {}, {}).commit(-1)
    with pytest.raises(ConfigError, match=r"format of checkpoints must be one of safetensors.*, got 'zip'"):
        write_tensors(tmp_path, 1, {}, {}, format="zip")


# --------------------------------------------------------------------------------------------- loading


def test_only_complete_steps_are_listed(tmp_path):
    for step in (100_000_000, 3, 20):
        saved(tmp_path, step, step % 7)
    for name in ("step-00000040", "step-4", "step-000000005"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000000005" / "manifest.json").write_text("")
    for name in ("other.txt", "step-00000050"):
        (tmp_path / name).write_text("")
    (tmp_path / "step-00000060").symlink_to("step-00000060")

    assert steps(tmp_path) == [3, 20, 100_000_000]
    assert newest_intact(tmp_path) == 100_000_000


def test_where_nothing_was_saved_there_is_nothing(tmp_path):
    assert steps(tmp_path / "none") == []
    assert newest_intact(tmp_path / "none") is None
    with pytest.raises(CheckpointMissing, match=r"no complete checkpoint of step 5 in .*, nor of any other"):
        load(tmp_path / "none", 5)

    saved(tmp_path, 3, 1)
    with pytest.raises(CheckpointMissing, match=r"step 5 in .*, there is step 3; choose one that exists"):
        load(tmp_path, 5)


def test_loaded_tensors_have_memory_of_their_own(tmp_path):
    saved(tmp_path, 1, 7)
    weights = load(tmp_path, 1).state["w"]

    tensor_file(tmp_path, 1).write_bytes(b"")
    weights += 1

    assert weights.tolist() == [8.0] * 4


def test_damage_in_a_large_tensor_is_known_to_its_block(tmp_path):
    write_tensors(tmp_path, 8, {"big": torch.zeros(BLOCK_BYTES + 1000, dtype=torch.uint8)}, {}).commit(0)
    begin = read_manifest(tmp_path, 8).tensors["big"].pieces[0].offset
    flip(tensor_file(tmp_path, 8), begin + BLOCK_BYTES)

    (damage,) = find_damage(tmp_path, 8)[1]

    assert (damage.tensor, damage.file) == ("big", "part-00000.safetensors")
    assert (damage.start, damage.end) == (begin + BLOCK_BYTES, begin + BLOCK_BYTES + 1000)


def test_all_damage_is_found_and_that_of_no_tensor_too(tmp_path):
    state = {"a": torch.zeros(2), "b": torch.zeros(3, 2), "c": torch.zeros(1)}
    write_tensors(tmp_path, 8, state, {}).commit(0)
    tensors = read_manifest(tmp_path, 8).tensors
    for position in (tensors["a"].pieces[0].offset, tensors["c"].pieces[0].offset + 3, 20):
        flip(tensor_file(tmp_path, 8), position)

    manifest, damage = find_damage(tmp_path, 8)

    assert manifest == read_manifest(tmp_path, 8)
    assert [(d.tensor, d.end - d.start) for d in damage[:2]] == [("a", 8), ("c", 4)]
    assert (damage[2].tensor, damage[2].start, damage[2].end) == (
        "",
        0,
        min(t.pieces[0].offset for t in tensors.values()),
    )
    with pytest.raises(CheckpointCorrupt, match="3 places are damaged in all"):
        verify(tmp_path, 8)


def _grow(path):
    path.write_bytes(path.read_bytes() + b"\0")


def _pipe(path):
    path.unlink()
    os.mkfifo(path)


def _directory(path):
    path.unlink()
    path.mkdir()


def _loop(path):
    path.unlink()
    path.symlink_to(path.name)


def _dangling(path):
    path.unlink()
    path.symlink_to("nowhere")


def _device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def _socket(path):
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(path.parent, os.O_RDONLY)  # a socket's name may have only 107 characters
        server.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


@pytest.mark.parametrize("which", ["tensors", "manifest"])
@pytest.mark.parametrize(
    "damage", [_grow, _pipe, _directory, _loop, _dangling, _device, _socket], ids=lambda f: f.__name__.removeprefix("_")
)
def test_a_file_that_is_not_what_it_was_is_damage_and_is_named(tmp_path, which, damage):
    saved(tmp_path, 10, 1)
    saved(tmp_path, 20, 2)
    file = tensor_file(tmp_path, 20) if which == "tensors" else manifest_file(tmp_path, 20)
    damage(file)

    with pytest.raises(CheckpointCorrupt, match=f"{file.name}|manifest, "):
        verify(tmp_path, 20)

    assert newest_intact(tmp_path) == 10


def test_a_file_that_moved_and_left_a_symbolic_link_is_followed(tmp_path):
    saved(tmp_path / "a", 10, 1)
    file = tensor_file(tmp_path / "a", 10)
    elsewhere = file.rename(tmp_path / "elsewhere")
    file.symlink_to(elsewhere)

    read = value_of(tmp_path / "a", 10)
    remove(tmp_path / "a", 10)

    assert read == 1
    assert elsewhere.exists()


def test_a_tensor_file_that_is_gone_is_damage_and_a_manifest_that_is_gone_is_no_checkpoint(tmp_path):
    saved(tmp_path, 10, 1)
    tensor_file(tmp_path, 10).unlink()

    with pytest.raises(CheckpointCorrupt, match=r"part-00000\.safetensors cannot be read: No such file"):
        load(tmp_path, 10)
    manifest_file(tmp_path, 10).unlink()
    with pytest.raises(CheckpointMissing):
        load(tmp_path, 10)


def test_a_checkpoint_under_the_name_of_another_step_is_damage(tmp_path):
    saved(tmp_path, 10, 1)
    shutil.copytree(step_dir(tmp_path, 10), step_dir(tmp_path, 20))

    with pytest.raises(CheckpointCorrupt, match="says 10, but its directory is that of step 20"):
        load(tmp_path, 20)


def test_a_reader_who_is_overtaken_by_a_new_save_reads_the_new_one(tmp_path):
    saved(tmp_path, 10, 1)

    for read in (lambda s: load(s, 10).info["value"], lambda s: load_box(s, 10, "w", (1,), (1,)).item()):
        storage = _Overtaken(tmp_path, ".safetensors", lambda: saved(tmp_path, 10, 2))
        assert read(storage) == 2


def test_a_reader_whose_step_is_removed_while_it_reads_finds_the_newer_one(tmp_path):
    def complete_another():
        saved(tmp_path, 20, 2)
        remove(tmp_path, 10)

    saved(tmp_path, 10, 1)
    told = []
    for file in ("manifest.json", ".safetensors"):
        loaded = load_newest(_Overtaken(tmp_path, file, complete_another), lambda step, _: told.append(step))
        assert loaded.step == 20
        remove(tmp_path, 20)
        saved(tmp_path, 10, 1)

    assert told == []


def test_who_looks_for_damage_finds_none_where_a_writer_was_faster(tmp_path):
    saved(tmp_path, 10, 1)

    manifest, damage = find_damage(_Overtaken(tmp_path, ".safetensors", lambda: saved(tmp_path, 10, 2)), 10)

    assert (manifest.info["value"], damage) == (2, [])
    with pytest.raises(CheckpointMissing, match="there is no complete checkpoint of step 10"):
        find_damage(_Overtaken(tmp_path, ".safetensors", lambda: remove(tmp_path, 10)), 10)


def test_what_is_removed_while_all_are_looked_at_is_left_out(tmp_path):
    saved(tmp_path, 10, 1)
    saved(tmp_path, 20, 2)

    found = examine_all(_Overtaken(tmp_path, ".safetensors", lambda: remove(tmp_path, 10)), lambda step: None)

    assert [(one.step, one.damage) for one in found] == [(20, ())]


class _Overtaken(LocalStorage):
    """A storage in which something happens just before a file is opened, once."""

    def __init__(self, root, suffix, act):
        super().__init__(root)
        self._suffix, self._act = suffix, act

    def reader(self, path):
        if self._act is not None and path.endswith(self._suffix):
            act, self._act = self._act, None
            act()
        return super().reader(path)


# ------------------------------------------------------------------------------ into memory that is there


def test_values_are_read_into_given_tensors_that_fit(tmp_path):
    state = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3), "p": torch.ones(2)}
    write_tensors(tmp_path, 1, state, {}).commit(0)
    given = {"w": torch.zeros(2, 3), "b": torch.tensor(0), "p": torch.nn.Parameter(torch.zeros(2))}

    back = load(tmp_path, 1, into=given).state

    assert same(back, state)
    assert {key: back[key].data_ptr() for key in back} == {key: given[key].data_ptr() for key in given}
    assert given["p"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "given",
    [
        {"other": torch.zeros(2, 3)},
        {"w": torch.zeros(3, 2)},
        {"w": torch.zeros(6)},
        {"w": torch.zeros(2, 3, dtype=torch.int32)},
        {"w": torch.zeros(3, 2).t()},
        {"w": torch.zeros(1, 3).expand(2, 3)},
        {"w": torch._neg_view(torch.zeros(2, 3))},
        {"w": 1.0},
        {},
    ],
    ids=["path", "shape", "flat", "dtype", "strides", "expanded", "negative", "number", "nothing"],
)
def test_given_tensors_that_do_not_fit_are_left_alone(tmp_path, given):
    state = {"w": torch.arange(1.0, 7).reshape(2, 3)}
    write_tensors(tmp_path, 1, state, {}).commit(0)

    back = load(tmp_path, 1, into=given).state

    assert same(back, state)
    assert all(not value.any() for value in given.values() if isinstance(value, torch.Tensor))


def test_given_tensors_that_share_memory_do_not_overwrite_each_other(tmp_path):
    state = {"a": torch.ones(4), "b": torch.full((2,), 2.0), "c": torch.full((4,), 3.0)}
    write_tensors(tmp_path, 1, state, {}).commit(0)
    memory = torch.zeros(6)

    back = load(tmp_path, 1, into={"a": memory[:4], "b": memory[3:5], "c": memory[2:]}).state

    assert same(back, state)


def test_given_tensors_that_are_tied_become_two_where_two_were_saved(tmp_path):
    write_tensors(tmp_path, 1, {"a": torch.ones(4), "b": torch.zeros(4)}, {}).commit(0)
    tied = torch.full((4,), 5.0)

    back = load(tmp_path, 1, into={"a": tied, "b": tied}).state

    assert back["a"].data_ptr() == tied.data_ptr()
    assert (back["a"].tolist(), back["b"].tolist()) == ([1.0] * 4, [0.0] * 4)


def test_a_file_of_another_size_is_damage_before_given_memory_is_touched(tmp_path):
    saved(tmp_path, 1, 7)
    _grow(tensor_file(tmp_path, 1))
    given = {"w": torch.zeros(4)}

    with pytest.raises(CheckpointCorrupt, match=r"part-00000.safetensors has \d+ bytes, the manifest says \d+"):
        load(tmp_path, 1, into=given)

    assert given["w"].tolist() == [0.0] * 4


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_at_the_last_moment_leaves_the_old_checkpoint_and_no_draft(tmp_path, monkeypatch, number):
    """That a rename fails cannot be had from a real disk at will; the rest of it is real in the chaos tests."""
    saved(tmp_path, 20, 1)

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    pending = write_tensors(tmp_path, 20, {"w": torch.full((4,), 2.0)}, {"value": 2})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(CheckpointError, match="The checkpoints that were complete are untouched") as refused:
            pending.commit(0)
    pending.abandon()

    assert os.strerror(number) in str(refused.value)
    assert value_of(tmp_path, 20) == 1
    assert len(list(step_dir(tmp_path, 20).iterdir())) == 2


def test_a_file_system_that_forgets_a_rename_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *_: None)

    with pytest.raises(CheckpointError, match=r"the file system says that .* was written, but it was not"):
        saved(tmp_path, 20, 1)
