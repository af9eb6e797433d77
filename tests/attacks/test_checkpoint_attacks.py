"""A checkpoint that chance or somebody hostile has altered: it is refused, by name, and harms nobody.

Whoever can write into a directory can compute digests too. So seals are made right here where they would stop the attack
early: what is left must still be refused, or be harmless.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_bytes import (
    all_names,
    data_dir,
    data_files,
    fields_of,
    flip,
    lie,
    manifest_file,
    same,
    save_parts,
    seal,
    step_dir,
)

from holdfast.checkpoint import (
    Shard,
    find_damage,
    load,
    load_box,
    load_newest,
    newest_intact,
    read_manifest,
    steps,
    take,
    verify,
    write,
    write_tensors,
)
from holdfast.checkpoint.blocks import BLOCK_BYTES, digest
from holdfast.checkpoint.save import remove
from holdfast.errors import CheckpointCorrupt, CheckpointError

FILE = "part-00000.safetensors"
TOKEN = {"token": "known"}


def state_of(value):
    shared = torch.full((7,), float(value))
    return {
        "w": torch.arange(40.0).reshape(8, 5) + value,
        "b": torch.tensor(value),
        "e": torch.ones(0, 2),
        "tied": [shared, shared],
        "lr": 0.1 * value,
    }


@pytest.fixture
def root(tmp_path):
    """Steps 10 and 20, three writers each; 20 is there to be attacked."""
    for step in (10, 20):
        save_parts(tmp_path, step, [state_of(step)] * 3, {"seed": step})
    return tmp_path


def refused(root, step=20):
    """Every way to read the step refuses it; return why."""
    box = {"path": "w", "start": (0, 0), "shape": (8, 5)}
    said = []
    for read in (verify, load, lambda *at: load_box(*at, **box), lambda *at: load(*at, into=state_of(0))):
        with pytest.raises(CheckpointCorrupt) as error:
            read(root, step)
        said.append(str(error.value))
    assert newest_intact(root) == load_newest(root).step == 10
    assert all(text.isprintable() and len(text) < 2000 for text in said)
    return said[0]


# --------------------------------------------------------------------------------------------- chance


def test_flipped_bits_are_each_found_and_named(root):
    chance = random.Random(20)
    files = [manifest_file(root, 20), *data_files(root, 20)]
    manifest = read_manifest(root, 20)
    missed = []
    for _ in range(500):
        file = chance.choice(files)
        position, mask = chance.randrange(file.stat().st_size), 1 << chance.randrange(8)
        flip(file, position, mask)
        try:
            verify(root, 20)
            missed.append((file.name, position, mask))
        except CheckpointCorrupt as error:
            if whose(manifest, file.name, position) not in str(error):
                missed.append((file.name, position, str(error)))
        flip(file, position, mask)

    assert missed == []
    assert same(load(root, 20).state, state_of(20))


def whose(manifest, file, position):
    """What a message must say when this byte is wrong."""
    for path, entry in manifest.tensors.items():
        for piece in entry.pieces:
            if piece.file == file and piece.offset <= position < piece.offset + piece.size_bytes:
                return f"tensor {path!r} ({entry.dtype}, shape {list(entry.shape)}), bytes {piece.offset} to"
    return "manifest, " if file == "manifest.json" else f"the bytes of {file} that hold no values"


def test_a_file_cut_or_lengthened_by_any_amount_is_found_and_named(root):
    for file in data_files(root, 20):
        whole = file.read_bytes()
        for size in (*range(0, len(whole), 37), len(whole) - 1):
            os.truncate(file, size)
            assert f"{file.name} has {size} bytes, the manifest says {len(whole)}" in refused(root)
            file.write_bytes(whole)
        file.write_bytes(whole + b"\0" * 8)
        assert f"{file.name} has {len(whole) + 8} bytes" in refused(root)
        file.write_bytes(whole)
    verify(root, 20)


def test_what_was_cut_off_is_named(root):
    file = data_files(root, 20)[0]
    pieces = read_manifest(root, 20).tensors["w"].pieces
    os.truncate(file, pieces[0].offset + 8)

    _, damage = find_damage(root, 20)

    assert [(d.tensor, d.file) for d in damage] == [("", file.name), ("w", file.name)]
    assert damage[1].what.endswith("the file ends after 8 of them")


@pytest.mark.parametrize("other", [(20, 1), (10, 0)], ids=["of another writer", "of another step"])
def test_files_that_changed_places_are_found(root, other):
    step, number = other
    one, two = data_files(root, 20)[0], data_files(root, step)[number]
    one.rename(root / "aside")
    two.rename(one)
    (root / "aside").rename(two)

    with pytest.raises(CheckpointCorrupt, match=r"part-0000[01]\.safetensors"):
        verify(root, 20)


def test_a_read_error_names_the_file_that_cannot_be_read(root, monkeypatch):
    real = os.preadv

    def broken(number, *args):
        if os.readlink(f"/proc/self/fd/{number}").endswith("part-00001.safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(number, *args)

    monkeypatch.setattr(os, "preadv", broken)

    with pytest.raises(CheckpointCorrupt, match=r"part-00001\.safetensors cannot be read: Input/output error"):
        verify(root, 20)


# --------------------------------------------------------------------------------------------- absurd sizes


def _huge(fields, size_bytes):
    """The manifest says that w has so many bytes, and is right in everything else."""
    name = fields["tensors"]["w"]["pieces"][0]["file"]
    rows = size_bytes // 20
    blocks = -(-20 * rows // BLOCK_BYTES)
    piece = {"file": name, "offset": 1 << 12, "start": [0, 0], "shape": [rows, 5], "bytes": 20 * rows}
    fields["tensors"]["w"] = {
        "dtype": "float32",
        "shape": [rows, 5],
        "pieces": [piece | {"blocks": ["0" * 16] * blocks}],
    }
    fields["files"][name]["bytes"] = (1 << 12) + 20 * rows


@pytest.mark.parametrize("size_bytes", [1 << 30, 1 << 37])
def test_no_memory_is_set_aside_for_values_that_are_not_in_the_file(root, size_bytes):
    lie(root, 20, lambda fields: _huge(fields, size_bytes))
    before = _peak_bytes()

    assert f"{FILE} has" in refused(root)

    assert _peak_bytes() - before < 256 << 20


def _peak_bytes():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("size_bytes", [1 << 30, (1 << 63) - 1])
def test_a_file_that_is_said_to_be_huge_is_refused_without_reading_to_its_end(root, size_bytes):
    lie(root, 20, lambda fields: fields["files"][FILE].update(bytes=size_bytes))

    assert f"{FILE} has" in refused(root)


def test_a_place_far_behind_the_end_of_the_file_is_refused(root):
    def far(fields):
        fields["tensors"]["w"]["pieces"][0]["offset"] = (1 << 63) - 4096
        fields["files"][FILE]["bytes"] = (1 << 63) - 1

    lie(root, 20, far)

    assert f"{FILE} has" in refused(root)


def test_a_manifest_of_a_terabyte_is_not_read_into_memory(root):
    os.truncate(manifest_file(root, 20), 1 << 40)

    assert "manifest.json has 1099511627776 bytes" in refused(root)


def test_a_tensor_that_is_there_and_larger_than_memory_is_an_error_and_no_crash(root):
    rows = (1 << 46) // 20
    lie(root, 20, lambda fields: _huge(fields, rows * 20) if rows * 20 < 1 << 41 else _huge(fields, 1 << 41))
    try:
        os.truncate(data_dir(root, 20) / FILE, read_manifest(root, 20).files[FILE].size_bytes)
    except OSError:
        pytest.skip("this file system has no files of two terabytes")
    if "1" in Path("/proc/sys/vm/overcommit_memory").read_text():
        pytest.skip("this machine promises any amount of memory")

    with pytest.raises(CheckpointError, match=r"tensor 'w' of shape \[\d+, 5\] does not fit into memory"):
        load(root, 20)


# --------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("folder", ["..", "../data-parts", "/etc", "data-parts/../../x", "data-\0", "", "data-PARTS"])
def test_a_folder_elsewhere_is_not_looked_at(root, folder):
    (root / "data-parts").mkdir()
    lie(root, 20, lambda fields: fields.update(folder=folder))

    assert "manifest, folder: must be the plain name of a folder beside the manifest" in refused(root)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "..", "a/b", "a\0", "a\n", "\x1b[2J", "", "\u202e"])
def test_a_file_elsewhere_is_not_looked_at(root, name):
    def point(fields):
        fields["files"][name] = fields["files"].pop(FILE)
        for tensor in fields["tensors"].values():
            for piece in tensor["pieces"]:
                piece["file"] = name if piece["file"] == FILE else piece["file"]

    (root / "secret").write_bytes((data_dir(root, 20) / FILE).read_bytes())
    lie(root, 20, point)

    assert "must be the plain name of a file" in refused(root)


def test_files_that_are_named_and_not_there_are_refused(root):
    lie(root, 20, lambda f: f["files"].update({f"x{i}": {"bytes": 0, "rest_xxh3": "0" * 16} for i in range(3000)}))

    with pytest.raises(CheckpointCorrupt, match="x0 cannot be read: No such file"):
        verify(root, 20)


def test_a_link_out_of_the_folder_gives_nothing_away(root, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"S3CRET" * 20)
    file = data_dir(root, 20) / FILE
    file.unlink()
    file.symlink_to(secret)
    lie(root, 20, lambda fields: fields["files"][FILE].update(bytes=120))

    why = refused(root)

    assert "S3CRET" not in why


# --------------------------------------------------------------------------------------------- nothing is executed


class _Bomb:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def test_a_pickle_in_the_place_of_anything_is_never_loaded(root, tmp_path):
    canary = tmp_path / "canary"
    bomb = pickle.dumps(_Bomb(canary))
    file = data_dir(root, 20) / FILE
    values = read_manifest(root, 20).tensors["w"].pieces[0]
    whole = file.read_bytes()
    file.write_bytes(bomb.ljust(values.offset, b"\0") + whole[values.offset :])
    rest = b"".join(_rest(root, file))
    lie(root, 20, lambda fields: fields["files"][FILE].update(rest_xxh3=digest(rest)))

    loaded = load(root, 20)  # all digests are right: the header is of no interest to this reader
    manifest_file(root, 20).write_bytes(bomb)
    refused(root)

    assert same(loaded.state, state_of(20))
    assert not canary.exists()


def _rest(root, file):
    pieces = [
        p for t in read_manifest(root, 20).tensors.values() for p in t.pieces if p.file == file.name and p.size_bytes
    ]
    end = 0
    for piece in sorted(pieces, key=lambda p: p.offset):
        yield file.read_bytes()[end : piece.offset]
        end = piece.offset + piece.size_bytes
    yield file.read_bytes()[end:]


@pytest.mark.parametrize(
    "skeleton",
    [
        {"object": ["os", "system", "true"]},
        {"dict": [["__class__", {"type": "os.system"}]]},
        {"tuple": {"py/reduce": []}},
        {"__reduce__": []},
    ],
)
def test_no_skeleton_names_anything_that_could_be_called(root, skeleton):
    lie(root, 20, lambda fields: fields.update(skeleton=skeleton))

    assert "the skeleton is damaged" in refused(root)


# --------------------------------------------------------------------------------------------- traps for the writer


def test_a_link_in_the_place_of_a_draft_does_not_lead_the_writer_elsewhere(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    root = tmp_path / "root"
    step_dir(root, 1).mkdir(parents=True)
    (step_dir(root, 1) / "manifest.json.tmp").symlink_to(victim)
    pending = write_tensors(root, 1, {"w": torch.ones(2)}, {})

    pending.commit(0)

    assert victim.read_text() == "precious"
    assert newest_intact(root) == 1


def test_a_link_in_the_place_of_a_manifest_is_replaced_and_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    root = tmp_path / "root"
    step_dir(root, 1).mkdir(parents=True)
    manifest_file(root, 1).symlink_to(victim)

    write_tensors(root, 1, {"w": torch.ones(2)}, {}).commit(0)

    assert victim.read_text() == "precious"
    assert newest_intact(root) == 1


def test_what_a_link_points_to_is_not_removed_with_it(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    root = tmp_path / "root"
    write_tensors(root, 1, {"w": torch.ones(2)}, {}).commit(0)
    (data_dir(root, 1) / "link").symlink_to(outside)
    (step_dir(root, 1) / "data-link").symlink_to(outside)
    step_dir(root, 0).symlink_to(outside)

    write_tensors(root, 1, {"w": torch.ones(2)}, {}).commit(0)
    remove(root, 1)

    assert (outside / "precious").exists()


def test_a_description_of_a_part_that_lies_does_not_become_complete(tmp_path):
    """Its digests are taken on trust, so the checkpoint is damaged; but nothing outside of it is touched."""
    first, second = (write(tmp_path, 5, take({"w": torch.ones(8)}, i, 2), {}, **TOKEN) for i in range(2))
    description = step_dir(tmp_path, 5) / "data-known" / "part-00001.json"
    fields = json.loads(description.read_bytes())
    fields["files"]["../../../x"] = fields["files"].pop("part-00001.safetensors")
    description.write_bytes(seal(fields))

    with pytest.raises(CheckpointCorrupt, match=r"files/\.\./\.\./\.\./x: must be the plain name of a file"):
        first.commit(0, wait_s=0)
    second.abandon()

    assert steps(tmp_path) == []


def test_a_state_with_hostile_names_is_saved_and_stays_in_its_folder(tmp_path):
    names = ["../../x", "/etc/passwd", "..", "a\0b", "\x1b[2J", "a" * 5000, "\u202e", "@0", "~1", ".json", "\n"]
    state = {name: torch.full((3,), float(i)) for i, name in enumerate(names)}

    save_parts(tmp_path / "root", 1, [state] * 2)

    assert same(load(tmp_path / "root", 1).state, state)
    assert {name.split("/")[0] for name in all_names(tmp_path)} == {"root"}
    assert len(all_names(tmp_path)) == 6


def test_shards_that_are_said_to_be_of_an_absurd_whole_are_refused(tmp_path):
    shard = Shard(torch.ones(2), (0,), (1 << 62,))
    first, _ = (write(tmp_path, 5, take({"w": shard}, i, 2), {}, **TOKEN) for i in range(2))

    with pytest.raises(CheckpointError, match="tensors/w: has 4611686018427387904 values"):
        first.commit(0, wait_s=0)


# --------------------------------------------------------------------------------------------- permissions


def unprivileged(do):
    """Return what ``do`` says when nobody in particular does it: root may read everything."""
    if os.getuid() != 0:
        return do()
    read, write_ = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            said = do()
        except BaseException as error:  # it must not go on as a second pytest
            said = f"{type(error).__name__}: {error}"
        os.write(write_, said.encode())
        os._exit(0)
    os.close(write_)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def outcome_of(do, *args):
    try:
        return f"fine: {do(*args)}"
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture
def public():
    """A directory that everybody may enter, with the steps 10 and 20."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # noqa: S103
        for step in (10, 20):
            write_tensors(folder, step, state_of(step), {}).commit(0)
        yield Path(folder)
        for path in [Path(folder), *Path(folder).rglob("*")]:
            os.chmod(path, 0o755)  # noqa: S103


@pytest.mark.parametrize("what", ["tensors", "manifest", "folder", "step", "root"])
def test_what_may_not_be_read_is_no_damage_and_no_older_step_is_taken_for_it(public, what):
    path = {
        "tensors": data_dir(public, 20) / FILE,
        "manifest": manifest_file(public, 20),
        "folder": data_dir(public, 20),
        "step": step_dir(public, 20),
        "root": public,
    }[what]
    os.chmod(path, 0)

    said = unprivileged(lambda: outcome_of(newest_intact, public))

    assert said.startswith("CheckpointError: cannot ")
    assert "Permission denied" in said
    assert "that this user may read" in said


def test_where_nothing_may_be_written_nothing_changes_and_the_error_says_what_to_do(public):
    before = all_names(public)

    said = unprivileged(lambda: outcome_of(lambda: write_tensors(public, 30, {"w": torch.ones(2)}, {})))

    assert said.startswith("CheckpointError: cannot write to ")
    assert "choose a directory that this user may read and write" in said
    assert all_names(public) == before


def test_a_permission_lost_between_the_two_acts_is_an_error_and_the_step_does_not_count(public):
    os.chmod(public, 0o777)  # noqa: S103

    def play():
        pending = write_tensors(public, 30, {"w": torch.ones(2)}, {})
        os.chmod(step_dir(public, 30), 0o555)  # noqa: S103
        said = outcome_of(pending.commit, 0)
        os.chmod(step_dir(public, 30), 0o755)  # noqa: S103
        pending.abandon()
        return said

    said = unprivileged(play)

    assert said.startswith("CheckpointError: cannot write ")
    assert "Permission denied" in said
    assert newest_intact(public) == 20
    assert not step_dir(public, 30).exists()


def test_the_helper_forges_what_only_this_test_refuses(root):
    """Negative control: an unaltered manifest under a new seal is as good as before."""
    lie(root, 20, lambda _: None)

    assert fields_of(root, 20)["step"] == 20
    assert newest_intact(root) == 20
