"""Whatever happens to incremental checkpoints, every one that is listed has its bits, or says that it has not."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from checkpoint_bytes import flip
from checkpoint_chain import ROWS, Chain, files_of, small_blocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import newest_intact, steps
from holdfast.checkpoint.save import remove
from holdfast.checkpoint.storage import open_storage
from holdfast.tools.checkpoints.listing import prune

few = settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
rows = st.lists(st.integers(0, ROWS - 1), max_size=4)
acts = st.one_of(
    st.tuples(st.just("save"), rows),
    st.tuples(st.just("save"), rows),
    st.tuples(st.just("abandon"), rows),
    st.tuples(st.just("kill"), rows, st.integers(0, 12)),
    st.tuples(st.just("resume")),
    st.tuples(st.just("prune"), st.integers(2, 4)),
    st.tuples(st.just("remove"), st.integers(0, 8)),
)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small_blocks(monkeypatch)
    monkeypatch.setattr("os.fsync", lambda number: None)  # nothing here loses its page cache


def carry_out(chain, act, *args):
    if act == "save":
        chain.save(args[0])
    elif act == "abandon":
        chain.save(args[0], commits=False)
    elif act == "kill":
        chain.save(args[0], dies_after=args[1])
    elif act == "resume":
        chain.resume()
    elif act == "prune":
        prune(open_storage(chain.root), args[0])
    elif there := steps(chain.root):
        remove(chain.root, there[args[0] % len(there)])


@few
@given(st.lists(acts, min_size=4, max_size=14))
def test_every_checkpoint_keeps_its_bits_whatever_becomes_of_the_others(plan):
    with tempfile.TemporaryDirectory() as folder:
        chain = Chain(Path(folder))
        for act in plan:
            carry_out(chain, *act)
            assert chain.check() == []
            if act[0] == "save" and len(there := steps(chain.root)) > 1:
                one, other = (files_of(chain.root, step).keys() for step in there[-2:])
                assert not one & other, "the newest two checkpoints share a file"


@few
@given(st.lists(rows, min_size=5, max_size=9), st.data())
def test_damage_of_a_file_leaves_one_of_the_newest_two_checkpoints_intact(changes, data):
    with tempfile.TemporaryDirectory() as folder:
        chain = Chain(Path(folder))
        for changed in changes:
            chain.save(changed)
        *_, last, newest = steps(chain.root)
        files = files_of(chain.root, newest) | files_of(chain.root, last)
        path = files[data.draw(st.sampled_from(sorted(files)))]
        share = data.draw(st.floats(0, 1, exclude_max=True))  # not the place: sizes and order of the files vary
        flip(path, int(share * path.stat().st_size), 1 << data.draw(st.integers(0, 7)))

        damaged = chain.check()

        assert not {last, newest} <= {*damaged}
        assert newest_intact(chain.root) in (last, newest)
