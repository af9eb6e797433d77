"""Giving the state to newcomers: the members are threads of one process, over the real group of the gloo fabric."""

from __future__ import annotations

import concurrent.futures
import contextlib

import pytest
import torch
from lagging import lagging

from holdfast.checkpoint.write_plan import take
from holdfast.comm.c10d import C10dCommunicator
from holdfast.comm.device import Wait
from holdfast.errors import CheckpointError, PeerFailed
from holdfast.membership import Hub, open_store
from holdfast.state import transfer as welcome
from holdfast.state.transfer import receive_state, send_state

LIMIT_S = 60


def meet(parts, kind=C10dCommunicator):
    """Let each rank do its part, as each worker does in its process; return what came of it, errors too."""

    def member(rank, store):
        comm = kind(store, rank, tuple(parts), timeout_s=LIMIT_S)
        try:
            return parts[rank](comm)
        except (CheckpointError, PeerFailed) as error:
            # Its frames hold the group, whose end may wait for its peers: nobody knows in which thread it would end.
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
        except Death:
            store.put(f"dead/{rank}", "killed by SIGKILL")  # as its launcher would
            return "died"
        finally:
            comm._drop_group()

    with Hub("token") as hub, contextlib.ExitStack() as closing:
        stores = {rank: open_store(f"holdfast://{hub.address}/job", "token") for rank in parts}
        for store in stores.values():
            closing.callback(store.close)
        with concurrent.futures.ThreadPoolExecutor(len(parts)) as threads:
            running = {rank: threads.submit(member, rank, store) for rank, store in stores.items()}
            return {rank: future.result(LIMIT_S) for rank, future in running.items()}


class Death(Exception):
    """A member stops where it is."""


def die(comm):
    """Connect, and be gone."""
    comm.barrier()
    raise Death


def state(seed=0, large=300_000):
    """Tensors of many sizes and types, and what is around them."""
    generator = torch.Generator().manual_seed(seed)
    noise = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    weight = noise(large)
    return {
        "model": {"weight": weight, "tied": weight, "bias": noise(7), "turned": noise(30, 50).t(), "one": noise(1, 1)},
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "half": noise(5).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "small": [noise(3) for _ in range(5)],
        "group": {"lr": 0.1, "betas": (0.9, 0.999), "name": "adam", "nothing": None},
    }


def check_equal(got, given):
    assert type(got) is type(given)
    if isinstance(given, torch.Tensor):
        assert got.dtype == given.dtype
        assert got.shape == given.shape
        assert torch.equal(got, given)
    elif isinstance(given, dict):
        assert list(got) == list(given)
        for key in given:
            check_equal(got[key], given[key])
    elif isinstance(given, list | tuple):
        for one, other in zip(got, given, strict=True):
            check_equal(one, other)
    else:
        assert got == given


@pytest.mark.parametrize(("givers", "newcomers"), [((0,), (1,)), ((1, 2), (0, 3)), ((5, 9), (4,))])
@pytest.mark.parametrize("piece_bytes", [8 << 20, 1 << 16])
def test_newcomers_get_every_bit_from_however_many_givers(monkeypatch, givers, newcomers, piece_bytes):
    monkeypatch.setattr(welcome, "PIECE_BYTES", piece_bytes)
    give = lambda comm: send_state(comm, newcomers, state(), {"step": 7, "from": comm.local_ranks[0]})  # noqa: E731
    take = lambda comm: receive_state(comm, newcomers)  # noqa: E731

    came = meet({rank: take if rank in newcomers else give for rank in sorted({*givers, *newcomers})})

    for rank in newcomers:
        got, info = came[rank]
        check_equal(got, state())
        assert got["model"]["weight"] is got["model"]["tied"]
        assert info == {"step": 7, "from": min(givers)}


@pytest.mark.parametrize("given", [{}, {"a": 1}, {"a": torch.empty(0)}, {"a": torch.ones(3)}])
def test_a_state_may_be_small(given):
    came = meet({0: lambda comm: send_state(comm, [1], given, {}), 1: lambda comm: receive_state(comm, [1])})

    check_equal(came[1][0], given)


def test_what_was_given_is_a_copy():
    mine = state()

    came = meet({0: lambda comm: send_state(comm, [1], mine, {}), 1: lambda comm: receive_state(comm, [1])})
    mine["model"]["weight"].zero_()

    check_equal(came[1][0], state())


class BadWire(C10dCommunicator):
    """A way on which a bit turns."""

    def sendrecv(self, send, receive):
        if len(send) > 1:
            place, piece = send[0]
            turned = piece.clone()
            turned[-1] ^= 1
            send = [(place, turned), *send[1:]]
        super().sendrecv(send, receive)


def test_damage_on_the_way_is_found_and_its_giver_named():
    parts = {0: lambda comm: send_state(comm, [1], state(), {}), 1: lambda comm: receive_state(comm, [1])}

    came = meet(parts, BadWire)

    assert isinstance(came[1], CheckpointError)
    assert str(came[1]) == "the state received from worker 0 is damaged: its digests do not match"


@pytest.mark.parametrize("dies", [0, 1, 2])
def test_a_death_meanwhile_fails_everybody_and_nobody_waits(dies):
    def part(rank):
        if rank == dies:
            return die
        deed = (lambda c: receive_state(c, [2])) if rank == 2 else (lambda c: send_state(c, [2], state(), {}))
        return lambda comm: (comm.barrier(), deed(comm))

    came = meet({rank: part(rank) for rank in range(3)})

    assert came.pop(dies) == "died"
    assert isinstance(came[2 if dies != 2 else 0], PeerFailed)


def test_each_giver_of_a_state_copies_the_pieces_that_it_sends():
    given = state(1)

    with lagging(longest_s=0.001) as made:
        give = lambda comm: send_state(comm, (2,), given, {})  # noqa: E731
        got = meet({0: give, 1: give, 2: lambda comm: receive_state(comm, (2,))[0]})
        for device in made:  # two threads may have made one each
            device.settle()

    check_equal(got[2], given)
    assert sum(device.bytes_to_host for device in made) == take(given).size_bytes


def test_a_state_that_has_not_arrived_in_host_memory_is_not_sent():
    """The negative control of the test above."""
    given = state(1)

    with lagging(longest_s=0.05, skips={Wait.COPIED}):
        got = meet({0: lambda comm: send_state(comm, (1,), given, {}), 1: lambda comm: receive_state(comm, (1,))[0]})

    assert isinstance(got[1], CheckpointError) or not torch.equal(got[1]["model"]["weight"], given["model"]["weight"])
