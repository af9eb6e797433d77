"""Seats of a torch.distributed job: who takes which, what a newcomer does alone, and what register refuses."""

import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast.distributed
from holdfast.comm.seated import SeatedCommunicator
from holdfast.distributed import registering
from holdfast.distributed.comm_thread import CommThread
from holdfast.distributed.group import NewcomerGroup
from holdfast.distributed.group_base import GroupBase
from holdfast.distributed.joining import Joining
from holdfast.distributed.long_waits import LongWaits
from holdfast.distributed.members import WORLD, GroupMembers, GroupReducer
from holdfast.distributed.seating import NEVER, SeatRow, decide
from holdfast.distributed.tasks import Collective, CollectiveCall
from holdfast.errors import ConfigError, ScriptError

# -- the decision of a regrouping


def seated(seat, passed=5, **more):
    return SeatRow(seat=seat, passed=passed, **more)


def test_a_row_is_sent_as_integers_and_comes_back():
    row = SeatRow(seat=2, offered=-1, ready=True, passed=7, stopped=True, received=8, ends=True)

    assert SeatRow.unpack(row.pack()) == row


def test_workers_without_a_seat_are_given_the_empty_ones_the_lowest_first():
    rows = {0: seated(0), 3: SeatRow(), 4: SeatRow(), 5: SeatRow()}

    decided = decide(rows, 3)

    assert decided.offered == {3: 1, 4: 2}
    assert (decided.awaits, decided.join_at) == ((), NEVER)


def test_a_seat_that_was_offered_is_not_offered_again():
    rows = {0: seated(0), 2: SeatRow(), 3: SeatRow(offered=1)}

    assert decide(rows, 3).offered == {2: 2, 3: 1}


def test_all_stop_at_the_first_boundary_that_none_has_passed():
    rows = {0: seated(0, 5), 2: seated(2, 6), 3: SeatRow(offered=1, ready=True)}

    decided = decide(rows, 3)

    assert (decided.awaits, decided.giver, decided.join_at) == ((3,), 0, 7)
    assert decided.seated == ()


def test_a_newcomer_with_the_state_is_seated_once_all_have_stopped_there():
    rows = {0: seated(0, 5, stopped=True), 2: seated(2, 5), 3: SeatRow(offered=1, ready=True, received=6)}

    assert decide(rows, 3).seated == ()
    rows[2].stopped = True
    decided = decide(rows, 3)

    assert decided.seated == (3,)
    assert decided.holders == {0: 0, 1: 3, 2: 2}
    assert (decided.awaits, decided.join_at) == ((), NEVER)


def test_the_state_of_an_earlier_boundary_seats_no_newcomer():
    rows = {0: seated(0, 6, stopped=True), 3: SeatRow(offered=1, ready=True, received=6)}

    decided = decide(rows, 2)

    assert decided.seated == ()
    assert decided.join_at == 7


def test_a_newcomer_that_has_not_taken_over_its_state_does_not_give_it():
    fresh = seated(0, 5, stopped=True, received=6)
    rows = {3: fresh, 4: SeatRow(offered=1, ready=True)}

    decided = decide(rows, 2)

    assert (decided.giver, decided.awaits, decided.join_at) == (-1, (), NEVER)


def test_the_job_ends_when_one_seat_knows_that_all_have_come_to_the_end():
    rows = {0: seated(0), 1: seated(1), 2: SeatRow()}

    assert not decide(rows, 2).ends
    rows[1].ends = True
    assert decide(rows, 2).ends


# -- boundaries, on two threads


def joining_of(holders=(0, 1)):
    base = SimpleNamespace(local_ranks=(0,), members=holders, processes=tuple((w,) for w in holders))
    return Joining(SeatedCommunicator(base, holders))


def test_a_boundary_is_passed_at_once_while_all_seats_are_taken():
    joining = joining_of()

    for _ in range(3):
        joining.arrive(pytest.fail, 0.0)

    assert joining.at == 3


def test_a_rank_that_arrives_during_a_regrouping_waits_for_its_decision():
    joining, met = joining_of(), []
    joining.begin()
    thread = threading.Thread(
        target=joining.arrive, args=(lambda: met.append(joining.settle(rows(received=1, stopped=True))), 10)
    )

    def rows(**last):
        mine = SeatRow(seat=0, passed=0, stopped=last.get("stopped", False))
        return {0: mine, 1: SeatRow(offered=1, ready=True, received=last.get("received", -1))}

    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    assert not met
    joining.settle(rows())  # the other worker waits at boundary 1
    thread.join(10)

    assert not thread.is_alive()
    assert len(met) == 1
    assert joining.seating.holders == {0: 0, 1: 1}
    assert (joining.at, joining.is_stopped, joining.num_seated) == (1, False, 1)


class Played:
    """Ranks 0 and 2 of 3 make steps on threads of their own, while worker 3 comes, and others regroup at any time.

    Each worker has a communication thread, too, as in the product; messages between them are a table and a barrier.
    """

    STEPS = 60
    WAIT_S = 20

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.workers = (0, 2, 3)
        self.table, self.wanted, self.over = {}, 0, False
        self.all_here = threading.Barrier(len(self.workers))
        self.changed = threading.Condition()
        self.meeting, self.seated_at = set(), {}
        self.joinings = {worker: Joining(self._world_of(worker)) for worker in self.workers}
        self.done = dict.fromkeys(self.workers, 0)

    def _world_of(self, me):
        def allgather(part, out):
            self.table[me] = part
            self.all_here.wait(self.WAIT_S)
            out.copy_(torch.stack([self.table[worker] for worker in self.workers]))
            self.all_here.wait(self.WAIT_S)

        processes = tuple((worker,) for worker in self.workers)
        base = SimpleNamespace(local_ranks=(me,), members=self.workers, processes=processes, allgather=allgather)
        return SeatedCommunicator(base, (0, 1, 2))

    def _nap(self):
        time.sleep(self.chance.random() / 2000)

    def regroup_often(self, me):
        """The communication thread of one worker."""
        joining = self.joinings[me]
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.wanted > self.done[me] or self.over, self.WAIT_S)
                if self.wanted == self.done[me]:
                    return
            self._nap()
            joining.begin()
            self._nap()
            rows = joining.share()
            self._nap()
            joining.settle(rows)
            with self.changed:
                self.done[me] += 1
                self.changed.notify_all()

    def want_regrouping(self):
        with self.changed:
            if len(set(self.done.values())) == 1 and self.wanted == min(self.done.values()):
                self.wanted += 1
                self.changed.notify_all()

    def meet(self, me):
        """Wait at a boundary for the others and the newcomer; all together regroup, which seats it."""
        joining, newcomer = self.joinings[me], self.joinings[3]
        self.meeting.add(me)
        while joining.must_meet:
            if self.meeting >= {0, 2}:
                newcomer._row.received = joining.seating.join_at
                self.want_regrouping()
            self._nap()
        self.meeting.discard(me)

    def train(self, me):
        """The script's thread of one rank."""
        joining = self.joinings[me]
        for _ in range(self.STEPS):
            self._nap()
            known = joining.num_seated
            joining.arrive(lambda: self.meet(me), self.WAIT_S)
            if joining.num_seated > known:
                self.seated_at[me] = joining.at

    def run(self):
        threads = [threading.Thread(target=self.regroup_often, args=(worker,)) for worker in self.workers]
        ranks = [threading.Thread(target=self.train, args=(rank,)) for rank in (0, 2)]
        for thread in (*threads, *ranks):
            thread.start()
        came = self.chance.randrange(5)
        while any(rank.is_alive() for rank in ranks):
            if self.done[0] >= came:
                self.joinings[3].be_ready()
            if self.chance.random() < 0.5:
                self.want_regrouping()
            self._nap()
        with self.changed:
            self.over = True
            self.changed.notify_all()
        for thread in threads:
            thread.join(self.WAIT_S)


@pytest.mark.parametrize("seed", range(6))
def test_all_ranks_stop_for_a_newcomer_at_the_same_boundary_whenever_they_regroup(seed):
    played = Played(seed)

    played.run()

    assert played.seated_at.keys() == {0, 2}, "the newcomer was not seated"
    assert set(played.seated_at.values()) == {played.joinings[3].at}
    assert {joining.seating.holders[1] for joining in played.joinings.values()} == {3}


@pytest.mark.parametrize(
    ("shared", "before", "lost"),
    [
        (6, (0, 2), ()),  # the script has not heard of the death of rank 1
        (-1, (0, 2), ()),  # it has
        (6, (0, 2), (2,)),  # another rank dies while the newcomer is seated
        (9, (0, 1, 2), ()),  # another newcomer has taken a seat, and the next collective fails
    ],
)
def test_the_same_collectives_fail_on_a_newcomer_as_on_the_others(shared, before, lost):
    """Its own view, of the deaths since it came, is another one."""
    failed = []
    for is_seated in (True, False):
        thread = CommThread.__new__(CommThread)
        thread.joining, thread._history = SimpleNamespace(is_seated=is_seated), []
        its = {shared} - {-1} if is_seated else {0, 3}
        thread._groups = {WORLD: SimpleNamespace(key=WORLD, ranks=(0, 1, 2), failed=its, broken=False)}
        thread._settle([(WORLD, 9, 0, shared), (WORLD, 9, 0, shared), (WORLD, 0, 0, -1)], before, lost)
        failed.append(thread._groups[WORLD].failed)

    assert failed[0] == failed[1]


def test_a_wait_is_shown_with_the_number_of_its_collective_though_the_group_has_gone_on():
    shown = []
    waits = LongWaits(lambda wait, seats: shown.append((wait.what, wait.number)))
    group = SimpleNamespace(key=WORLD, completed=13, alive=(0, 1))

    call = CollectiveCall("barrier", [], lambda: None)
    waits.look(Collective(group, call, None, begun_s=time.monotonic() - 60, number=12))

    assert shown == [("barrier", 12)]


# -- collectives by seat


class Base:
    """A communicator of workers 0, 2 and 5, as worker 0 sees it; what it exchanges is told by the other's number."""

    members, local_ranks, generation, num_processes = (0, 2, 5), (0,), 1, 3
    processes = ((0,), (2,), (5,))

    def allgather(self, part, out):
        out.copy_(torch.tensor(self.members).view(3, 1) * part)

    def alltoall(self, send, out):
        out.copy_(send * 100 + torch.tensor(self.members).view(3, 1))


def test_rows_come_in_the_order_of_seats_not_of_workers():
    comm = SeatedCommunicator(Base(), (5, 0, 2))
    gathered, exchanged = torch.empty(3, 1), torch.empty(3, 1)

    comm.allgather(torch.ones(1), gathered)
    comm.alltoall(torch.tensor([[1.0], [2.0], [3.0]]), exchanged)

    assert (comm.members, comm.local_ranks) == ((0, 1, 2), (1,))
    assert gathered.flatten().tolist() == [5, 0, 2]
    assert exchanged.flatten().tolist() == [105, 200, 302]


def test_a_failed_worker_leaves_its_seat_empty_until_another_is_arranged_there():
    base = Base()
    comm = SeatedCommunicator(base, (0, 1, 2))

    assert comm.members == (0, 2)
    assert comm.unseated == (5,)
    comm.arrange({0: 0, 1: 5, 2: 2})
    assert comm.members == (0, 1, 2)
    assert comm.holders == {0: 0, 1: 5, 2: 2}
    assert comm.unseated == ()


# -- alone


class Outside(BaseException):
    """The newcomer's script trains without having registered."""


@pytest.fixture
def newcomer():
    """The group of a newcomer that will be rank 1 of 3."""

    def stay_outside():
        raise Outside

    engine = SimpleNamespace(
        joining=SimpleNamespace(is_seated=False),
        meeting=SimpleNamespace(stay_outside=stay_outside),
        recorder=SimpleNamespace(settings=SimpleNamespace(empty_seats="fill")),
    )
    comm = SimpleNamespace(members=(0, 2))
    group = NewcomerGroup(engine, GroupMembers(WORLD, (0, 1, 2), comm, GroupReducer(comm), GroupReducer(comm)), 1, 5.0)
    yield group
    group.guard.remove()


def test_a_newcomer_builds_ddp_alone_and_keeps_its_weights(newcomer):
    layers = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = [p.detach().clone() for p in layers.parameters()]

    model = DistributedDataParallel(layers, process_group=newcomer)

    assert all(map(torch.equal, before, model.parameters()))


def test_its_own_values_stand_for_those_of_all_ranks(newcomer):
    mine, outs, whole = torch.tensor([3.0, 4.0]), [torch.zeros(2) for _ in range(3)], torch.zeros(6)
    root = dist.BroadcastOptions()
    root.rootRank = 0

    assert newcomer.broadcast([mine], root).wait()
    assert newcomer.allreduce([mine]).wait()
    assert newcomer.allgather([outs], [mine]).wait()
    assert newcomer.all_gather_single(whole, mine).wait()
    assert newcomer.barrier().wait()

    assert mine.tolist() == [3, 4]
    assert [out.tolist() for out in outs] == [[3, 4]] * 3
    assert whole.tolist() == [3, 4] * 3


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda group: group.send([torch.ones(1)], 0, 0), "send to rank 0"),
        (lambda group: group.recv_anysource([torch.ones(1)], 0), "recv from any rank"),
        (lambda group: group.alltoall([torch.ones(1)] * 3, [torch.ones(1)] * 3), "all_to_all"),
        (lambda group: group.reduce_scatter_single(torch.ones(1), torch.ones(3)), "reduce_scatter_tensor"),
    ],
)
def test_what_needs_the_others_is_refused_with_one_line(newcomer, call, what):
    with pytest.raises(ConfigError) as refused:
        call(newcomer)

    assert str(refused.value) == (
        f"{what} is not possible on a newcomer before holdfast.distributed.register(...), because the other ranks do not"
        " call it"
    )


def test_a_script_that_trains_alone_is_stopped_before_its_first_update(newcomer):
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)

    with pytest.raises(Outside):
        torch.optim.SGD([weight], lr=1.0).step()

    assert weight.item() == 1


# -- register


@pytest.fixture
def model(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(2, 1))
    dist.destroy_process_group()


def test_only_models_of_this_backend_are_registered(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(ConfigError, match=r'the group of all ranks, of init_process_group\("holdfast"\)'):
        holdfast.distributed.register(model, optimizer, {})
    with pytest.raises(ConfigError, match="model must be a DistributedDataParallel, or several, got Linear"):
        holdfast.distributed.register(model.module, optimizer, {})


class Position:
    epoch = 1

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


@pytest.mark.parametrize("part", [{"epoch": 1}, Position(), (lambda: {"epoch": 1}, lambda state: None)])
def test_a_position_is_a_dict_an_object_with_a_state_or_a_pair_of_functions(part):
    state, load = registering._accessors("position", part)

    assert state() == {"epoch": 1}
    load({"epoch": 2})
    assert state() == {"epoch": 1 if isinstance(part, tuple) else 2}


def test_any_other_position_or_a_state_that_cannot_be_sent_is_refused_at_the_start():
    line = (
        r"must be a dict, an object with state_dict and load_state_dict, or a pair of functions \(get, set\), got int$"
    )
    with pytest.raises(ConfigError, match=line):
        registering._accessors("position", 7)
    with pytest.raises(ConfigError, match="the state of position must consist of plain values and tensors"):
        registering._check_plain("position", {"loader": iter([1])})


def test_a_group_that_was_destroyed_refuses_what_the_others_would_wait_for():
    dropped = []
    group = GroupBase.__new__(GroupBase)
    group._engine, group._members = SimpleNamespace(drop_group=dropped.append), "its members"

    group.shutdown()

    assert dropped == ["its members"]
    with pytest.raises(ScriptError, match="all-reduce: its process group was destroyed by destroy_process_group"):
        group._submit(CollectiveCall("all-reduce", [], lambda: None))
