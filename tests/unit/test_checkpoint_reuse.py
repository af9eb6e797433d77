"""Blocks that did not change are not written again, and no checkpoint depends on another for its life."""

from __future__ import annotations

import pytest
import torch
from checkpoint_bytes import data_dir, fields_of, flip, seal, step_dir
from checkpoint_chain import Chain, copy_of, files_of, small_blocks

from holdfast.checkpoint import find_damage, load, read_manifest, steps, take, verify
from holdfast.checkpoint import reuse as reuses
from holdfast.checkpoint.manifest import parse
from holdfast.checkpoint.storage import open_storage
from holdfast.checkpoint.store import CheckpointStore
from holdfast.checkpoint.writer import CheckpointWriter
from holdfast.config import Settings
from holdfast.errors import CheckpointCorrupt
from holdfast.state.manager import CheckpointManager
from holdfast.tools.checkpoints.convert import convert
from holdfast.tools.checkpoints.source import saved_source


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small_blocks(monkeypatch)


@pytest.fixture
def chain(tmp_path):
    return Chain(tmp_path)


def test_only_what_changed_is_written(chain):
    saves = [chain.save([step]) for step in range(6)]

    sizes = [saved.new_bytes for saved in saves]
    assert chain.check() == []
    assert all(2 * size < sizes[0] for size in sizes[2:]), sizes
    # A block of 4 rows for each of the last two steps, the dense part, and the header with the manifest.
    manifest = read_manifest(chain.root, 6)
    assert sum(p.size_bytes for p in manifest.tensors["embedding"].pieces if not p.file.startswith("kept")) <= 2 * 128
    assert all(piece.file.startswith("kept") for piece in manifest.tensors["frozen"].pieces)
    assert not any(piece.file.startswith("kept") for piece in manifest.tensors["dense"].pieces)
    assert manifest.size_bytes == pytest.approx(read_manifest(chain.root, 1).size_bytes, rel=0.1)


def test_if_everything_changes_nothing_is_compared_for_a_while(chain, monkeypatch):
    compared = []
    real = reuses._digest_all
    monkeypatch.setattr(reuses, "_digest_all", lambda boxes: compared.append(len(boxes)) or real(boxes))
    for _ in range(8):
        chain.state["frozen"] += 1
        assert chain.save(range(64)).new_bytes == read_manifest(chain.root, chain.step).size_bytes + len(
            (step_dir(chain.root, chain.step) / "manifest.json").read_bytes()
        )

    assert sum(compared[:6]) > 0
    assert sum(compared[-4:]) == 0


def test_every_sixteenth_checkpoint_of_a_chain_is_full(chain):
    full = [chain.step for _ in range(70) if chain.save().new_bytes > 6000]

    assert full == [1, 2, 33, 34, 65, 66]


def test_the_files_of_a_removed_checkpoint_live_on_where_they_are_shared(chain):
    for row in range(5):
        chain.save([row])
    assert files_of(chain.root, 3).keys() & files_of(chain.root, 5).keys()

    for step in (1, 2, 3, 4):
        chain.store.remove(step)

    assert steps(chain.root) == [5]
    assert chain.check() == []


def test_damage_of_a_shared_file_is_reported_for_every_checkpoint_that_uses_the_bytes(chain):
    for _ in range(6):
        chain.save()
    (piece,) = read_manifest(chain.root, 1).tensors["frozen"].pieces
    flip(data_dir(chain.root, 1) / piece.file, piece.offset + 5)

    for step in (1, 3, 5):
        (damage,) = find_damage(chain.root, step)[1]
        assert damage.tensor == "frozen"
    assert chain.check() == [1, 3, 5]
    assert verify(chain.root, 6).step == 6


def test_a_checkpoint_that_shares_nothing_can_be_read_by_older_versions_and_another_names_its_schema(chain):
    for _ in range(4):
        chain.save()

    schemas = [fields_of(chain.root, step)["schema"] for step in steps(chain.root)]
    assert schemas == [2, 2, 3, 3]
    fields = fields_of(chain.root, 4)
    fields["schema"] = 2
    with pytest.raises(CheckpointCorrupt, match="rest_xxh3: must be of type str, is None"):
        parse(seal(fields))
    fields["schema"] = 4
    with pytest.raises(
        CheckpointCorrupt, match="schema: must be 2 or 3, is 4; another version of holdfast may read it"
    ):
        parse(seal(fields))


def test_converting_makes_a_checkpoint_of_its_own(chain, tmp_path):
    for row in range(4):
        chain.save([row])

    convert(saved_source(chain.store.storage, 4), open_storage(tmp_path / "full"), "safetensors")

    assert fields_of(tmp_path / "full", 4)["schema"] == 2
    loaded = load(tmp_path / "full", 4).state
    assert all(torch.equal(loaded[name], tensor) for name, tensor in chain.saved[4].items())


def test_a_storage_without_links_gets_full_checkpoints(tmp_path):
    class Linkless(open_storage(tmp_path).__class__):
        asked = 0

        def link(self, path, name):
            self.asked += 1
            return False

    chain = Chain(tmp_path, Linkless)
    sizes = [chain.save().new_bytes for _ in range(8)]

    assert max(sizes) - min(sizes) < 100
    assert chain.check() == []
    assert chain.store.storage.asked == 1, "it is not asked again for a while"


def test_nothing_is_compared_for_an_object_store(tmp_path, monkeypatch):
    class ObjectStore(open_storage(tmp_path).__class__):
        has_links = False

    monkeypatch.setattr(reuses, "_digest_all", no_memory)
    chain = Chain(tmp_path, ObjectStore)
    sizes = [chain.save().new_bytes for _ in range(4)]

    assert max(sizes) - min(sizes) < 100
    assert not open_storage("memory://run").has_links


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_that_cannot_be_remembered_is_complete_and_the_next_ones_are_full(
    tmp_path, monkeypatch, caplog, background
):
    chain = Chain(tmp_path)
    chain.writer = CheckpointWriter(chain.store, background=background, incremental=True)
    save_all(chain, 2)
    with monkeypatch.context() as patch:
        patch.setattr(reuses, "_digest_all", no_memory)
        patch.setattr(reuses.BlockReuse, "plan", lambda *_: None)
        (third,) = save_all(chain, 1)
    rest = save_all(chain, 3)
    chain.writer.close(5)

    assert third.error is None
    assert [each.saved.new_bytes > 6000 for each in rest] == [True, True, False]
    assert "the blocks of checkpoint 3 were not remembered, the next one is full: MemoryError: no room" in caplog.text
    assert chain.check() == []


def save_all(chain, number):
    """Save this many checkpoints and return their outcomes."""
    for _ in range(number):
        chain.step += 1
        chain.saved[chain.step] = copy_of(chain.state)
        chain.writer.begin(chain.step, take(chain.state), {})
        chain.writer.commit(0)
        chain.writer.wait()
    return chain.writer.poll()


def no_memory(_):
    """Fail as a digest does without memory."""
    raise MemoryError("no room")


@pytest.mark.parametrize("format", ["npz", "hdf5"])
def test_other_formats_share_their_files_too(tmp_path, format):
    store = CheckpointStore(tmp_path, format)
    writer = CheckpointWriter(store, background=True, incremental=True)
    frozen = torch.arange(5000.0)
    for step in range(1, 5):
        writer.begin(step, take({"frozen": frozen, "step": torch.tensor(step)}), {})
        writer.commit(0)
        writer.wait()
    writer.close(5)

    assert files_of(tmp_path, 2).keys() & files_of(tmp_path, 4).keys()
    assert torch.equal(load(tmp_path, 4).state["frozen"], frozen)
    assert load(tmp_path, 4).state["step"] == 4


def several(root, **settings):
    """Two workers that write a part each."""
    return [CheckpointManager(Settings(checkpoint_dir=str(root), **settings), background=False) for _ in range(2)]


def save_together(managers, step, state):
    everyone = [(rank,) for rank in range(len(managers))]
    for manager, me in reversed([*zip(managers, everyone, strict=True)]):
        manager.begin(step, state, {}, everyone, me, 0)
        manager.publish(step - 1, 0, is_lead=me == (0,))
    outcomes = [manager.finish() for manager in managers]
    return outcomes[0][0].saved


def test_several_writers_share_what_each_of_them_wrote(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.state.manager.SHARED_BYTES", 8)
    managers = several(tmp_path, keep_last=2)
    state = {"a": torch.arange(3000.0).reshape(300, 10), "b": torch.zeros(40, 10)}

    saves = []
    for step in range(1, 8):
        state["b"] += 1
        state["a"][7 * step] += 1
        saves.append(save_together(managers, step, state))
        loaded = load(tmp_path, step).state
        assert all(torch.equal(loaded[name], state[name]) for name in state)

    assert steps(tmp_path) == [6, 7]
    kept = [name for name in read_manifest(tmp_path, 7).files if name.startswith("kept")]
    assert {name.split("-")[1] for name in kept} == {"00000", "00001"}
    assert saves[-1].new_bytes < saves[0].new_bytes / 2


def test_full_checkpoints_are_written_on_request(tmp_path, monkeypatch):
    (manager,) = several(tmp_path, incremental_checkpoints=False)[:1]

    assert [
        fields_of(tmp_path, save_together([manager], step, {"a": torch.zeros(999)}).step)["schema"]
        for step in range(1, 5)
    ] == [2] * 4
