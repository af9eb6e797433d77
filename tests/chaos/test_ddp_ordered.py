"""Sums under torch.distributed are in the order of ranks: an unmodified script has the same bits in every run."""

import multiprocessing

import pytest
import torch
import train_ddp
from jobs import ROOT, holdfast

pytestmark = pytest.mark.chaos

SCRIPT = ROOT / "tests" / "support" / "train_ddp.py"


def run(tmp_path, ranks, *options, inject=(), env=None):
    """What each rank that is left ended with."""
    specs = [word for spec in inject for word in ("--inject", spec)]
    done = holdfast("run", "-n", ranks, *specs, SCRIPT, tmp_path, *options, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return {int(path.stem): torch.load(path) for path in sorted(tmp_path.glob("*.pt"))}


@pytest.mark.parametrize("ranks", [4, *(pytest.param(few, marks=pytest.mark.soak) for few in (2, 3))])
def test_the_bits_are_those_of_adding_rank_by_rank_whoever_comes_late(tmp_path, ranks):
    ended = run(tmp_path, ranks, "--naps", *(["--control"] if ranks == 4 else []))
    expected = train_ddp.by_hand(ranks)

    assert sorted(ended) == list(range(ranks))
    for rank in ended:
        assert torch.equal(ended[rank]["weights"], expected)
        assert torch.equal(ended[rank]["weights with naps"], expected)
    if ranks < 4:
        return
    assert not torch.equal(train_ddp.by_hand(4, order=(3, 2, 1, 0)), expected), "the order shows"
    in_order = train_ddp.numbers(0)
    for rank in (1, 2, 3):
        in_order += train_ddp.numbers(rank)
    assert torch.equal(ended[0]["holdfast"], in_order)
    assert not torch.equal(ended[0]["gloo"], in_order), "Gloo adds in an order of its own"


def test_messages_and_a_death_keep_the_order(tmp_path):
    """From the step on in which somebody died it is the mean over the survivors, in the order of their ranks."""
    kill = "kill:rank=1,step=2,phase=backward"
    ended = run(tmp_path, 4, inject=[kill], env={"HOLDFAST_SHARED_BYTES": "0"})
    expected = train_ddp.by_hand(4, dead=1, dies_in=2)

    assert sorted(ended) == [0, 2, 3]
    for rank in ended:
        assert torch.equal(ended[rank]["weights"], expected)
    assert not torch.equal(train_ddp.by_hand(4, order=(3, 2, 0, 1), dead=1, dies_in=2), expected), "the order shows"
    assert not torch.equal(train_ddp.by_hand(4), expected), "it is another result than without the death"


def test_a_death_in_a_backward_pass_that_autograd_runs_in_a_thread_of_its_own_as_on_a_gpu(tmp_path):
    with multiprocessing.get_context("spawn").Pool(1) as fresh:  # autograd must have no thread where others fork
        frames = fresh.apply(train_ddp.frames_below_a_deep_hook)
    assert frames == [None], "there is a Python frame: this torch takes another thread at another depth"

    ended = run(tmp_path, 3, "--deep", inject=["kill:rank=1,step=2,phase=backward"])
    expected = train_ddp.by_hand(3, dead=1, dies_in=2)

    assert sorted(ended) == [0, 2]
    for rank in ended:
        assert torch.equal(ended[rank]["weights"], expected)
