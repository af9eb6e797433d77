"""Several writers share one checkpoint; a reader takes any part of any tensor."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from checkpoint_bytes import all_names, data_dir, same, save_parts, step_dir

from holdfast.checkpoint import Shard, load, load_box, newest_intact, read_manifest, steps, take, write, write_tensors
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing, ConfigError

TOKEN = {"token": "shared"}

ODD = {
    "wide": torch.arange(35.0).reshape(7, 5),
    "one row": torch.arange(11.0).reshape(1, 11),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "empty": torch.ones(0, 3),
    "bytes": torch.arange(13, dtype=torch.uint8),
    "strided": torch.arange(24.0).reshape(4, 6).t(),
    "lr": 0.1,
}


def grid(whole, rows, columns):
    """Cut a tensor of two dimensions at these places; return the shard of each box."""
    cuts = itertools.product(
        itertools.pairwise([0, *rows, whole.shape[0]]), itertools.pairwise([0, *columns, whole.shape[1]])
    )
    return [Shard(whole[a:b, c:d], (a, c), tuple(whole.shape)) for (a, b), (c, d) in cuts]


# --------------------------------------------------------------------------------------------- sharing


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [[1], [5, 3], [1000, 1, 1], [7] * 9, [0, 4, 0]], ids=str)
def test_every_row_has_one_writer_and_writers_have_about_the_same_to_write(parts, rows):
    state = [torch.full((n, 3), float(i)) for i, n in enumerate(rows)]

    boxes = [box for part in range(parts) for box in take(state, part, parts).boxes]
    sizes = [take(state, part, parts).size_bytes for part in range(parts)]

    for i, n in enumerate(rows):
        mine = sorted((box.start[0], box.tensor.shape[0]) for box in boxes if box.path == str(i))
        assert [row for start, count in mine for row in range(start, start + count)] == list(range(n))
        assert n or mine == [(0, 0)]
    assert max(sizes) - min(sizes) <= 2 * 3 * 4


def test_shards_are_written_by_who_holds_them(tmp_path):
    whole = torch.arange(42.0).reshape(6, 7)
    shards = grid(whole, [1], [3, 4])

    save_parts(tmp_path, 1, [{"w": shard, "all": torch.ones(9)} for shard in shards])

    pieces = read_manifest(tmp_path, 1).tensors["w"].pieces
    assert {p.file: p.start for p in pieces} == {f"part-{i:05d}.safetensors": s.start for i, s in enumerate(shards)}
    assert same(load(tmp_path, 1).state, {"w": whole, "all": torch.ones(9)})


def test_shards_that_hold_nothing_are_allowed(tmp_path):
    whole = torch.arange(4.0)
    shards = [Shard(whole[:0], (0,), (4,)), Shard(whole, (0,), (4,)), Shard(whole[4:], (4,), (4,))]

    save_parts(tmp_path, 1, [[shard] for shard in shards])

    assert same(load(tmp_path, 1).state, [whole])


def test_values_from_many_boxes_are_read_into_given_memory(tmp_path):
    whole = torch.arange(42.0).reshape(6, 7)
    save_parts(tmp_path, 1, [[shard] for shard in grid(whole, [2, 3], [5])])
    given = [torch.zeros(6, 7)]

    back = load(tmp_path, 1, into=given).state

    assert same(back, [whole])
    assert back[0].data_ptr() == given[0].data_ptr()


def test_a_path_that_looks_like_the_name_of_a_box_does_not_clash(tmp_path):
    state = {"a@0": torch.ones(1), "a": torch.arange(8.0), "a@5": torch.ones(3)}

    for parts in (1, 2, 3):
        save_parts(tmp_path, parts, [state] * parts)
        assert same(load(tmp_path, parts).state, state)


def test_descriptions_of_parts_go_when_the_checkpoint_is_complete(tmp_path):
    save_parts(tmp_path, 1, [ODD] * 3)

    assert all_names(tmp_path) == [
        "step-00000001",
        "step-00000001/data-parts",
        *[f"step-00000001/data-parts/part-{i:05d}.safetensors" for i in range(3)],
        "step-00000001/manifest.json",
    ]


@pytest.mark.parametrize(("part", "parts"), [(-1, 2), (2, 2), (0, 0)])
def test_a_part_that_there_is_not_is_refused(part, parts):
    with pytest.raises(ConfigError, match=f"got part {part} of {parts}"):
        take({}, part, parts)


# --------------------------------------------------------------------------------------------- what does not fit


def pend(root, states, step=5, formats=("safetensors",) * 9):
    parts = len(states)
    return [
        write(root, step, take(state, i, parts), {}, format=form, **TOKEN)
        for i, (state, form) in enumerate(zip(states, formats, strict=False))
    ]


def test_a_part_that_is_missing_is_waited_for_and_then_an_error(tmp_path):
    save_parts(tmp_path, 1, [ODD])
    first = write(tmp_path, 5, take(ODD, 0, 3), {}, **TOKEN)
    write(tmp_path, 5, take(ODD, 2, 3), {}, **TOKEN)
    start_s = time.monotonic()

    with pytest.raises(CheckpointError, match="step 5: part 1 of 3 was not written in time"):
        first.commit(0, wait_s=0.2)

    assert 0.2 <= time.monotonic() - start_s < 30
    assert steps(tmp_path) == [1]
    first.abandon()
    assert all_names(tmp_path) == [name for name in all_names(tmp_path) if name.startswith("step-00000001")]


def test_a_part_that_comes_late_is_waited_for(tmp_path):
    first = write(tmp_path, 5, take(ODD, 0, 2), {}, **TOKEN)
    second = threading.Timer(0.2, lambda: write(tmp_path, 5, take(ODD, 1, 2), {}, **TOKEN))
    second.start()

    first.commit(0, wait_s=60)
    second.join()

    assert same(load(tmp_path, 5).state, ODD)


class _Slow(LocalStorage):
    """Does something between putting a file in its place and looking whether it is there."""

    def __init__(self, root, meanwhile):
        super().__init__(root)
        self.meanwhile = meanwhile

    def _check_put(self, whole, data):
        self.meanwhile()
        super()._check_put(whole, data)


def test_a_part_is_no_failure_that_was_taken_and_tidied_up_before_its_writer_looked(tmp_path):
    first = write(tmp_path, 5, take(ODD, 0, 2), {}, **TOKEN)

    second = write(_Slow(tmp_path, lambda: first.commit(0)), 5, take(ODD, 1, 2), {}, **TOKEN)

    assert second.part == 1
    assert same(load(tmp_path, 5).state, ODD)
    assert not [name for name in all_names(tmp_path) if name.endswith(("part-00001.json", ".tmp"))]


def test_a_part_is_a_failure_that_is_gone_and_was_not_taken(tmp_path):
    first = write(tmp_path, 5, take(ODD, 0, 2), {}, **TOKEN)

    with pytest.raises(CheckpointError, match=r"part-00001.json was written, but it was not"):
        write(_Slow(tmp_path, first.abandon), 5, take(ODD, 1, 2), {}, **TOKEN)


_SHARD = Shard(torch.ones(2), (0,), (4,))


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        ([Shard(torch.ones(2), (0,), (4,))], [Shard(torch.ones(2), (2,), (5,))], "hold different tensors '0'"),
        ([_SHARD], [Shard(torch.ones(2, dtype=torch.int32), (2,), (4,))], "hold different tensors '0'"),
        ([_SHARD], [Shard(torch.ones(2), (1,), (4,))], "tensors/0: has pieces that overlap"),
        ([_SHARD], [Shard(torch.ones(1), (2,), (4,))], "tensors/0: has 4 values, its 2 pieces hold 3"),
        ([_SHARD], [_SHARD], "tensors/0: has pieces that overlap"),
        ([_SHARD], [], "tensors/0: has 4 values, its 1 pieces hold 2"),
        ([_SHARD], [Shard(torch.ones(2), (2,), (4,)), _SHARD], "tensors/1: has 4 values, its 1 pieces hold 2"),
        ([], [Shard(torch.ones(4), (0,), (4,))], "does not say where tensor '0' belongs"),
        ([torch.ones(6)], [torch.ones(4)], "hold different tensors '0'"),
        ([torch.ones(6)], [torch.ones(6), torch.ones(9)], "tensors/0: has 6 values"),
        ([torch.ones(6), torch.ones(2)], [torch.ones(6)], "the skeleton is damaged|has 6 values"),
        ({"a": torch.ones(6)}, {"b": torch.ones(6)}, "tensors/a: has 6 values"),
    ],
    ids=range(12),
)
def test_parts_that_do_not_fit_together_do_not_become_a_checkpoint(tmp_path, one, other, what):
    save_parts(tmp_path, 1, [ODD])
    pending = pend(tmp_path, [one, other])

    with pytest.raises(CheckpointError, match=what):
        pending[0].commit(0, wait_s=0)
    with pytest.raises(CheckpointError, match=what):
        pending[1].commit(0, wait_s=0)

    assert steps(tmp_path) == [1]
    assert newest_intact(tmp_path) == 1


def test_writers_of_different_formats_do_not_become_a_checkpoint(tmp_path):
    pending = pend(tmp_path, [ODD, ODD], formats=("safetensors", "npz"))

    with pytest.raises(CheckpointError, match="do not write the same checkpoint"):
        pending[0].commit(0, wait_s=0)

    assert steps(tmp_path) == []


def test_a_part_that_was_abandoned_is_missing(tmp_path):
    first, second = pend(tmp_path, [ODD, ODD])

    second.abandon()
    second.abandon()

    with pytest.raises(CheckpointError, match="part 1 of 2 was not written in time"):
        first.commit(0, wait_s=0)
    left = sorted(path.name for path in (step_dir(tmp_path, 5) / "data-shared").iterdir())
    assert left == ["part-00000.json", "part-00000.safetensors"]


def test_what_a_part_describes_is_there_as_long_as_the_description(tmp_path):
    removed = []

    class Logged(LocalStorage):
        def remove(self, path):
            removed.append(path.rpartition("/")[2])
            super().remove(path)

    write(Logged(tmp_path), 5, take(ODD, 1, 2), {}, **TOKEN).abandon()

    assert removed[:2] == ["part-00001.json", "part-00001.safetensors"]
    assert all_names(tmp_path) == ["step-00000005", "step-00000005/data-shared"]


def test_the_first_who_abandons_removes_all_and_the_others_nothing_more(tmp_path):
    first, second = pend(tmp_path, [ODD, ODD])

    first.abandon()
    second.abandon()

    assert all_names(tmp_path) == []
    with pytest.raises(CheckpointError, match="cannot be committed after abandon"):
        second.commit(0, wait_s=0)


def test_nobody_can_abandon_what_another_has_completed(tmp_path):
    first, second = pend(tmp_path, [ODD, ODD])

    second.commit(0, wait_s=0)
    first.abandon()
    second.abandon()

    assert same(load(tmp_path, 5).state, ODD)


def test_a_file_of_another_part_that_is_gone_is_found_before_it_counts(tmp_path):
    first, _ = pend(tmp_path, [ODD, ODD])
    (step_dir(tmp_path, 5) / "data-shared" / "part-00001.safetensors").unlink()

    with pytest.raises(CheckpointError, match=r"part-00001\.safetensors is not in"):
        first.commit(0, wait_s=0)

    assert steps(tmp_path) == []


def test_two_parts_that_name_the_same_file_do_not_become_a_checkpoint(tmp_path):
    first, _ = pend(tmp_path, [ODD, ODD])
    folder = step_dir(tmp_path, 5) / "data-shared"
    (folder / "part-00001.json").write_bytes((folder / "part-00000.json").read_bytes())

    with pytest.raises(CheckpointError, match=r"do not write the same checkpoint: one writes \['part-00000"):
        first.commit(0, wait_s=0)


def test_a_description_that_is_damaged_does_not_become_a_checkpoint(tmp_path):
    first, _ = pend(tmp_path, [ODD, ODD])
    description = step_dir(tmp_path, 5) / "data-shared" / "part-00001.json"
    description.write_bytes(description.read_bytes()[:-1])

    with pytest.raises(CheckpointCorrupt):
        first.commit(0, wait_s=0)

    assert steps(tmp_path) == []


# --------------------------------------------------------------------------------------------- any part of it


def test_a_box_of_a_scalar_and_of_nothing_can_be_read(tmp_path):
    write_tensors(tmp_path, 1, {"s": torch.tensor(7), "e": torch.ones(0, 3)}, {}).commit(0)

    assert load_box(tmp_path, 1, "s", (), ()).item() == 7
    assert load_box(tmp_path, 1, "e", (0, 1), (0, 2)).shape == (0, 2)


@pytest.mark.parametrize(
    ("start", "shape"),
    [
        ((0,), (4, 5)),
        ((0, 0), (4,)),
        ((), ()),
        ((0, 0), (5, 5)),
        ((-1, 0), (1, 1)),
        ((4, 0), (1, 1)),
        ((2, 0), (-1, 1)),
    ],
)
def test_a_box_outside_the_tensor_is_refused(tmp_path, start, shape):
    write_tensors(tmp_path, 1, {"w": torch.ones(4, 5)}, {}).commit(0)

    with pytest.raises(CheckpointError, match=r"lies outside 'w', which has shape \[4, 5\]"):
        load_box(tmp_path, 1, "w", start, shape)


def test_a_box_of_what_is_not_there_is_refused(tmp_path):
    write_tensors(tmp_path, 1, {"w": torch.ones(4, 5)}, {}).commit(0)

    with pytest.raises(CheckpointError, match=r"there is no tensor 'v' in the checkpoint of step 1; there are \['w'\]"):
        load_box(tmp_path, 1, "v", (), ())
    with pytest.raises(CheckpointMissing):
        load_box(tmp_path, 2, "w", (0, 0), (1, 1))


def test_a_box_is_checked_and_damage_elsewhere_does_not_matter(tmp_path):
    whole = torch.arange(20.0).reshape(4, 5)
    save_parts(tmp_path, 1, [{"w": shard} for shard in grid(whole, [2], [])])
    file = data_dir(tmp_path, 1) / "part-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")

    assert same(load_box(tmp_path, 1, "w", (0, 0), (2, 5)), whole[:2])
    with pytest.raises(CheckpointCorrupt, match=r"tensor 'w' .* of part-00001\.safetensors"):
        load_box(tmp_path, 1, "w", (1, 0), (2, 5))


def test_a_file_of_another_size_is_damage_before_memory_is_set_aside_for_a_box(tmp_path):
    write_tensors(tmp_path, 1, {"w": torch.ones(4, 5)}, {}).commit(0)
    file = data_dir(tmp_path, 1) / "part-00000.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")

    with pytest.raises(CheckpointCorrupt, match=r"part-00000\.safetensors has \d+ bytes, the manifest says"):
        load_box(tmp_path, 1, "w", (0, 0), (1, 1))
