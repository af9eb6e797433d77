"""Failure scenarios for torch.distributed over Holdfast: ``dist_plays.py PLAY [ARGS]...``, started by ``holdfast run``.

Each rank writes its observations, one JSON line each, for the tests to compare. A failing observation is recorded with
its error, and the rank continues with the next one if it can.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import holdfast.distributed
import holdfast.distributed.group
from holdfast.comm.allreduce.shm import SharedMemoryReduce
from holdfast.distributed.parts import Fate
from holdfast.errors import PeerFailed

FOLDER = "DIST_PLAYS_FOLDER"
"""Environment variable with the folder for the observations."""

PATIENCE = timedelta(seconds=float(os.environ.get("DIST_PLAYS_PATIENCE_S", "40")))
"""Time limit of every wait, in seconds."""

PLAYS = {}


def play(function):
    """Add ``function(*args)`` to the plays."""
    PLAYS[function.__name__] = function
    return function


def note(thing, **fields):
    """Record an observation of this rank."""
    path = Path(os.environ[FOLDER], f"rank-{dist.get_rank()}.jsonl")
    with path.open("a") as out:
        out.write(json.dumps({"thing": thing, "rank": dist.get_rank()} | fields) + "\n")


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def sha256(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def alive():
    return list(holdfast.distributed.alive())


def me():
    return dist.get_rank()


def told(error):
    """The information that a script gets from an error."""
    ranks, survivors = getattr(error, "ranks", ()), getattr(error, "survivors", ())
    return {"kind": type(error).__name__, "says": str(error), "dead": list(ranks), "survivors": list(survivors)}


def tried(call):
    """The result of ``call()``, or the exception that it raised."""
    try:
        return {"result": call()}
    except Exception as error:
        return told(error)


# ---------------------------------------------------------------------------------------------
# DDP

SMALL_BUCKETS = 1e-4
"""Small enough that every parameter is a bucket."""


def batch(rank, step, features=12):
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, features, generator=source), torch.randn(6, 4, generator=source)


def layers(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, 10, bias=False), nn.Tanh(), nn.Linear(10, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)
    )


def loss_of(model, rank, step):
    x, y = batch(rank, step)
    return (model(x) - y).square().mean()


def gradients_of(model, rank, step, loss=loss_of):
    """The gradients of one rank, computed here in plain torch."""
    own = copy.deepcopy(model)
    for parameter in own.parameters():
        parameter.grad = None
    loss(own, rank, step).backward()
    return [None if p.grad is None else p.grad.to_dense() for p in own.parameters()]


def whose_mean(given, candidates, tolerance=1e-5):
    """The ranks whose mean gradient ``given`` is: the keys of the ``candidates`` that fit."""
    return [
        key
        for key, value in candidates.items()
        if torch.allclose(given, value, rtol=tolerance, atol=tolerance * float(value.abs().max()))
    ]


def means(per_rank, groups):
    """The mean gradient of each group, by name."""
    return {
        "".join(map(str, group)): [
            torch.stack(parts).mean(0) for parts in zip(*(per_rank[r] for r in group), strict=True)
        ]
        for group in groups
    }


@play
def gradients(steps):
    """The ranks in each parameter's mean gradient, in every step; the kills come from the fault plan."""
    model = DistributedDataParallel(layers(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(int(steps)):
        before = alive()
        local = {rank: gradients_of(model.module, rank, step) for rank in before}
        optimizer.zero_grad()
        loss_of(model, me(), step).backward()
        expected = means(local, {tuple(before), tuple(alive())})
        given = [p.grad for p in model.parameters()]
        fits = [
            whose_mean(grad, {ranks: grads[i] for ranks, grads in expected.items()}) for i, grad in enumerate(given)
        ]
        optimizer.step()
        note("gradients", step=step, before=before, after=alive(), fits=fits, weights=sha256(model.parameters()))


class Branches(nn.Module):
    """A model of which a rank uses one branch or the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.common, self.left, self.right = nn.Linear(12, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x, use_left):
        return (self.left if use_left else self.right)(torch.tanh(self.common(x)))


def branch_loss(model, rank, step):
    x, y = batch(rank, step)
    return (model(x, (rank + step) % 2 == 0) - y).square().mean()


def normed():
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def kill_in_sum(victim, after=0):
    """Let ``victim`` die in the middle of the all-reduce that follows ``after`` others."""
    if me() != victim:
        return
    recorder = dist.group.WORLD._engine.recorder
    left = iter(range(after + 1))

    def reach(step, bucket):
        if next(left, None) == after:
            die()

    recorder.reach_in_sum = reach


def train(name, victim, make, loss, *, hook=None, micro=1, tolerance=1e-5, **options):
    """Three steps, with a failure in the middle of the second; gradients are compared with those computed by hand."""
    plain = make()
    model = DistributedDataParallel(plain, bucket_cap_mb=SMALL_BUCKETS, **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    fits = []
    for step in range(3):
        before = alive()
        # Micro-batches of a step are numbered 10 * step, 10 * step + 1, ...
        local = {}
        for rank in before:
            parts = [gradients_of(plain, rank, 10 * step + i, loss) for i in range(micro)]
            kinds = [[g for g in grads if g is not None] for grads in zip(*parts, strict=True)]
            local[rank] = [sum(g) if g else torch.zeros_like(p) for g, p in zip(kinds, plain.parameters(), strict=True)]
        optimizer.zero_grad()
        if step == 1 and hook is None:
            kill_in_sum(victim)
        elif step == 1 and me() == victim:
            die_at_barrier(1)
        for i in range(micro - 1):
            with model.no_sync():
                loss(model, me(), 10 * step + i).backward()
        loss(model, me(), 10 * step + micro - 1).backward()
        expected = means(local, {tuple(alive())})
        given = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in plain.parameters()]
        fits += [
            (step, i, bool(whose_mean(grad, {ranks: grads[i] for ranks, grads in expected.items()}, tolerance)))
            for i, grad in enumerate(given)
        ]
        optimizer.step()
    note(
        name,
        wrong=[list(f) for f in fits if not f[2]],
        compared=len(fits),
        weights=sha256(plain.parameters()),
        alive=alive(),
    )


def buffers_follow(victim):
    """Before every forward pass the buffers are those of the lowest rank alive, whatever other ranks had."""
    plain = normed()
    model = DistributedDataParallel(plain, bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    norm, used, given = plain[1], [], []

    def look(module, inputs):
        used.append(round(module.running_mean[0].item()))

    norm.register_forward_pre_hook(look)
    for step in range(4):
        if step == 1:
            kill_in_sum(victim)
        norm.running_mean.fill_(100 * (me() + 1) + step)
        given.append(round(norm.running_mean[0].item()))
        optimizer.zero_grad()
        loss_of(model, me(), step).backward()
        optimizer.step()
    note("buffers", used=used, given=given, alive=alive(), weights=sha256(plain.parameters()))


def compress_to_bf16(state, bucket):
    """torch's hook, under a name that torch does not associate with CUDA."""
    return default_hooks.bf16_compress_hook(state, bucket)


@play
def reducers():
    """DDP in all configurations, with one failure in each; seven ranks."""
    dist.barrier()
    things = {
        "buffers": lambda: buffers_follow(0),
        "unused": lambda: train("unused", 1, Branches, branch_loss, find_unused_parameters=True),
        "no_sync": lambda: train("no_sync", 2, layers, loss_of, micro=3),
        "static_graph": lambda: train("static_graph", 3, layers, loss_of, static_graph=True),
        "bucket_view": lambda: train("bucket_view", 4, layers, loss_of, gradient_as_bucket_view=True),
    }
    for name, thing in things.items():
        try:
            thing()
        except Exception as error:
            note(name, error=traceback.format_exc()[-2000:], **told(error))


class Words(nn.Module):
    """A model whose first gradient is sparse: rows of an embedding, other ones in each rank and step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.words, self.out = nn.Embedding(9, 8, sparse=True), nn.Linear(8, 4)

    def forward(self, numbers):
        return self.out(torch.tanh(self.words(numbers)))


def words_loss(model, rank, step):
    numbers = torch.tensor([rank, rank, step % 3 + 3, 7])
    return (model(numbers) - batch(rank, step)[1][:4]).square().mean()


@play
def sparse():
    """DDP with a sparse gradient; rank 2 dies in its all-reduce. Three ranks."""
    dist.barrier()
    train("sparse", 2, Words, words_loss)


@play
def hooked():
    """DDP with one of torch's communication hooks; rank 2 dies. Three ranks."""
    dist.barrier()
    train("bf16", 2, layers, loss_of, hook=compress_to_bf16, tolerance=3e-2)


@play
def without_recovery(script):
    """The negative control: DDP's all-reduce fails like any other collective."""
    import runpy

    submit = holdfast.distributed.group.HoldfastGroup._submit

    def submit_once(group, call):
        return submit(group, dataclasses.replace(call, fate=Fate()))

    holdfast.distributed.group.HoldfastGroup._submit = submit_once
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


# ---------------------------------------------------------------------------------------------
# The script's own collectives


def at_barrier(number, before=None, after=None):
    """Act at this rank's ``number``-th barrier from now on: each ends or halves a collective."""
    comm, meeting = dist.group.WORLD._members.comm, []
    left = iter(range(number))

    def pass_barrier(barrier):
        if meeting:  # an MPI barrier within that of an all-reduce is the same barrier
            barrier()
            return
        is_due = next(left, None) == number - 1
        if is_due and before is not None:
            before()
        meeting.append(barrier)
        barrier()
        meeting.clear()
        if is_due and after is not None:
            after()

    plain = functools.partial(type(comm).barrier, comm)
    comm.barrier = lambda: pass_barrier(plain)
    SharedMemoryReduce._barrier = lambda add: pass_barrier(lambda: MEET(add))


MEET = SharedMemoryReduce._barrier


def die_at_barrier(number):
    """Let this rank die when it enters that barrier."""
    at_barrier(number, before=die)


def fail_here():
    raise PeerFailed("the barrier failed here, and has completed elsewhere")


def all_reduce():
    given = torch.full((5,), float(me() + 1))
    dist.all_reduce(given)
    return given.tolist()


def all_gather():
    given = [torch.zeros(2) for _ in alive()]
    dist.all_gather(given, torch.full((2,), float(me())))
    return [t.tolist() for t in given]


def broadcast(root):
    given = torch.full((3,), float(me()))
    dist.broadcast(given, src=root)
    return given.tolist()


def reduce_scatter():
    given = torch.zeros(2)
    dist.reduce_scatter(given, [torch.full((2,), float(10 * me() + to)) for to in alive()])
    return given.tolist()


def gather(root):
    given = [torch.zeros(2) for _ in alive()] if me() == root else None
    dist.gather(torch.full((2,), float(me())), given, dst=root)
    return [t.tolist() for t in given or ()]


def scatter(root):
    given = torch.zeros(2)
    dist.scatter(given, [torch.full((2,), float(to)) for to in alive()] if me() == root else None, src=root)
    return given.tolist()


def all_to_all():
    given = [torch.zeros(1) for _ in alive()]
    dist.all_to_all(given, [torch.full((1,), float(10 * me() + to)) for to in alive()])
    return [t.item() for t in given]


def barrier():
    dist.barrier()


def works():
    """The results of collectives over the survivors."""
    given = torch.tensor([float(me())])
    dist.all_reduce(given, dist.ReduceOp.MAX)
    dist.barrier()
    return {
        "sum": all_reduce(),
        "max": given.item(),
        "gathered": all_gather(),
        "broadcast": broadcast(alive()[0]),
        "size": dist.get_world_size(),
        "rank": dist.get_rank(),
        "alive": alive(),
    }


def lose(name, call, victim, *, at_barrier=1, late=None):
    """A rank dies within ``call``, at its ``at_barrier``-th barrier; rank ``late`` enters after the failure."""
    dist.barrier()
    if me() == victim:
        die_at_barrier(at_barrier)
    if me() == late:
        time.sleep(0.6)
    first = tried(call)
    note(name, first=first, again=tried(call), works=tried(works), alive=alive())


@play
def collectives_one():
    """A failure in the middle of each collective, at different points; seven ranks."""
    lose("all_reduce", all_reduce, 6, at_barrier=2, late=3)  # after its own addition
    lose("all_gather", all_gather, 5)
    lose("broadcast", lambda: broadcast(1), 4, at_barrier=1, late=2)
    lose("broadcast from the dead", lambda: broadcast(0), 0, at_barrier=2)
    lose("barrier", barrier, 3)
    group = dist.new_group(alive())  # rank 0, which hosted torch's store, has failed
    given = torch.tensor([float(me())])
    dist.all_reduce(given, group=group)
    note("new group", sum=given.item(), alive=list(holdfast.distributed.alive(group)), size=dist.get_world_size(group))


def later(act):
    """Act once the other ranks are past the barrier: if no survivor were past it, the failure would not count."""
    time.sleep(0.5)
    act()


@play
def completed_elsewhere():
    """The last barrier of each collective fails only at rank 1, when all have passed it. Four ranks."""
    calls = {
        "all_reduce": (all_reduce, 2),
        "broadcast": (lambda: broadcast(0), 2),
        "barrier": (barrier, 1),
        "all_gather": (all_gather, 1),
        "gather": (lambda: gather(1), 1),
        "reduce_scatter": (reduce_scatter, 1),
        "scatter": (lambda: scatter(0), 1),
        "all_to_all": (all_to_all, 1),
    }
    dist.barrier()
    for name, (call, last) in calls.items():
        if me() == 1:
            at_barrier(last, after=fail_here)
        note(name, **tried(call))
    dist.barrier()
    if me() == 1:
        at_barrier(1, after=lambda: later(fail_here))
    if me() == 3:
        at_barrier(1, after=lambda: later(die))
    given = [torch.zeros(2) for _ in range(4)]
    answer = tried(lambda: dist.all_gather(given, torch.full((2,), float(me()))))
    tried(barrier)  # raises if it was in progress when the failure was detected
    note("with a death", answer=answer, given=[t.tolist() for t in given], works=tried(works))


@play
def collectives_two():
    """The remaining collectives; seven ranks."""
    lose("reduce_scatter", reduce_scatter, 0, late=4)
    lose("gather", lambda: gather(1), 6)
    lose("scatter", lambda: scatter(1), 2)
    lose("all_to_all", all_to_all, 3)
    lose("gather at the dead", lambda: gather(5), 5)


def gathers(size):
    """Every gather with one place for each of ``size`` ranks, and what cannot be filled."""
    mine, some = torch.full((2,), float(me())), torch.zeros(2)
    listed, whole = [torch.zeros(2) for _ in range(size)], torch.zeros(2 * size)
    weight = nn.Parameter(torch.zeros(2 * size))
    rooted = [torch.zeros(2) for _ in range(size)] if me() == 2 else None
    objects, at_root = [None] * size, [None] * size if me() == 2 else None
    return {
        "all_gather": tried(lambda: dist.all_gather(listed, mine) or [int(t[1]) for t in listed]),
        "into_tensor": tried(lambda: dist.all_gather_into_tensor(whole, mine) or whole[::2].int().tolist()),
        "gather": tried(lambda: dist.gather(mine, rooted, dst=2) or [int(t[0]) for t in rooted or ()]),
        "objects": tried(lambda: dist.all_gather_object(objects, {"rank": me(), "more": "x" * me()}) or objects),
        "gather_object": tried(lambda: dist.gather_object(("rank", me()), at_root, dst=2) or at_root),
        "parameters": tried(lambda: dist.all_gather_into_tensor(weight, mine)),
        "view": tried(lambda: dist.all_gather(list(weight.detach().chunk(size)), weight[:2])),
        "reduce_scatter": tried(lambda: dist.reduce_scatter(some, [mine] * size)),
        "all_to_all": tried(lambda: dist.all_to_all(listed, [mine] * size)),
        "alive": tried(all_gather),
    }


@play
def empty_seats():
    """Gathers with one place for each rank of the start, while ranks 1 and then 0 die in one. Four ranks."""
    dist.barrier()
    whole = [torch.zeros(2) for _ in range(4)]
    for victim in (1, 0):
        if me() == victim:
            die_at_barrier(1)
        first = tried(lambda: dist.all_gather(whole, torch.full((2,), float(me()))) or [int(t[0]) for t in whole])
        note(f"without {victim}", first=first, **gathers(4))


@play
def between_sizes_and_bytes():
    """A rank dies after the sizes of objects are gathered, and before their bytes are. Three ranks."""
    dist.barrier()
    objects = [None] * 3
    if me() == 1:
        die_at_barrier(2)
    # The object of rank 0 is longer than that of rank 1, and would be cut in its seat: that of rank 2 stands in.
    note("longer", **tried(lambda: dist.all_gather_object(objects, "x" * (31, 30, 1)[me()]) or objects))
    if me() == 0:
        die_at_barrier(2)
    # All survivors have a longer one than the dead.
    note("shorter", **tried(lambda: dist.all_gather_object(objects, "x" * (30 * me())) or objects), works=tried(works))


def send(to, value):
    return lambda: dist.send(torch.full((70_000,), float(value)), dst=to)


def receive(source):
    def call():
        given = torch.zeros(70_000)
        dist.recv(given, src=source)
        return sorted(set(given.tolist()))

    return call


@play
def messages():
    """Rank 5 dies; other ranks send to it, wait for it, or wait for each other. Six ranks."""
    dist.barrier()
    calls = {0: receive(5), 1: send(5, 1), 2: receive(3)}
    if me() == 5:
        time.sleep(0.4)
        die()
    if me() == 3:
        time.sleep(1.2)  # rank 2 waits for a message that was never sent
    if me() in calls:
        note("in flight", **tried(calls[me()]))
    tried(dist.barrier)  # fails at all ranks if any was in it already
    dist.barrier()
    if me() in (2, 3):  # the message between survivors is repeated
        note("repeated", **tried(receive(3) if me() == 2 else send(2, 7)))
    note("to the dead", send=tried(send(5, 1)), receive=tried(receive(5)))
    note("works", works=tried(works))


def any_rank(says, group=None):
    """Whether any rank says yes."""
    said = torch.tensor([float(says)])
    dist.all_reduce(said, dist.ReduceOp.MAX, group=group)
    return bool(said.item())


@play
def groups():
    """Ranks 0, 1, 2 and 3, 4, 5 and 0, 3 are groups; rank 4 dies while 0, 1 and 2 continue. Six ranks."""
    low, high, pair = dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5]), dist.new_group([0, 3])

    def over(group):
        given = torch.tensor([float(me() + 1)])
        dist.all_reduce(given, group=group)
        return given.item()

    mine = low if me() < 3 else high
    dist.barrier()
    if me() == 4:
        time.sleep(0.3)
        die()
    # The group of the dead rank waits for it; meanwhile the other group runs many all-reduces.
    end = time.monotonic() + 1.0
    rounds = [tried(lambda: over(mine))]
    while me() < 3:
        rounds.append(tried(lambda: over(mine)))
        if any_rank(time.monotonic() > end, low):
            break
    again = tried(lambda: over(mine))
    between = tried(lambda: over(pair)) if me() in (0, 3) else None
    note(
        "one group",
        failed=[r for r in rounds if "result" not in r],
        results=sorted({r["result"] for r in rounds if "result" in r}),
        again=again,
        between=between,
        alive=[alive(), list(holdfast.distributed.alive(mine))],
    )


@play
def later_world():
    """A failure that a smaller group detects: the whole world learns of it at its next collective. Four ranks."""
    pair = dist.new_group([0, 1])
    dist.barrier()
    if me() == 1:
        die()
    seen = tried(lambda: dist.barrier(group=pair)) if me() == 0 else None
    time.sleep(1.0)
    note("world", pair=seen, first=tried(all_reduce), again=tried(all_reduce))


@play
def two_deaths_while_one_is_late():
    """Rank 1 enters its next collective after two failures, which its peers detected one by one. Four ranks."""
    dist.barrier()
    if me() == 3:
        die()
    if me() == 1:
        time.sleep(2.0)
    seen = [tried(all_reduce)]
    if me() == 2:
        time.sleep(0.5)  # rank 0 waits in the next one by now
        die()
    seen += [tried(all_reduce) for _ in range(3)]
    note("late", seen=seen)


@play
def a_list_from_before():
    """Rank 1 made its list before its peers detected the second failure, and calls with it afterwards. Four ranks."""
    dist.barrier()
    if me() == 3:
        die()
    tried(all_reduce)
    given = [torch.zeros(2) for _ in alive()]
    if me() == 2:
        die()
    if me() == 1:
        time.sleep(1.0)
    note("list", size=len(given), first=tried(lambda: dist.all_gather(given, torch.ones(2))), again=tried(all_gather))


@play
def at_random(seed, deaths):
    """Many collectives in which ranks die at random, the first two simultaneously; every rank pauses at times."""
    plan = random.Random(int(seed))
    victims = plan.sample(range(dist.get_world_size()), int(deaths))
    due, at = {}, 0
    for order, victim in enumerate(victims):
        at += 0 if order == 1 else plan.randrange(50, 90)
        due[victim] = (at, 0.0 if order < 2 else plan.uniform(0, 0.03))
    rest = random.Random(int(seed) + 1000 * me())
    calls = [all_reduce, all_gather, barrier, reduce_scatter, all_to_all, lambda: broadcast(alive()[0])]
    seen, number, last = [], 0, 300
    while True:
        number += 1
        if rest.random() < 0.02:
            time.sleep(rest.uniform(0, 0.03))
        call, delay = due.get(me(), (0, 0.0))
        if number == call:
            threading.Timer(delay, die).start() if delay else die()
        answer = tried(calls[number % len(calls)])
        if "result" not in answer:
            seen.append([number, answer])
        if number % 20 == 0:  # all ranks stop at the same one
            all_dead = len(alive()) == dist.get_world_size() - len(victims)
            answer = tried(functools.partial(any_rank, number >= last and all_dead))
            if "result" not in answer:
                seen.append([number + 0.5, answer])
            elif answer["result"]:
                break
    note("row", seen=seen, calls=number, victims=sorted(victims), works=tried(works))


# ---------------------------------------------------------------------------------------------
# Other things


@play
def mixed(*kills):
    """A session trains and the script runs its own collectives; ``kills`` are given to ``holdfast run``."""
    import reference
    from train_reference import train as train_session

    dist.barrier()
    before = tried(all_reduce)
    session, state = train_session("cnn", "sgd")
    note("mixed", state=state, before=before, first=tried(all_reduce), again=tried(all_reduce), works=tried(works))
    assert session._job.step == reference.STEPS


@play
def misuse():
    """Different calls at different ranks; with HOLDFAST_DEBUG=1. Three ranks."""
    first = me() == 0

    def dtypes():
        dist.all_reduce(torch.ones(3, dtype=torch.float64 if first else torch.float32))

    things = {
        "calls": lambda: dist.barrier() if first else dist.all_reduce(torch.ones(3)),
        "shapes": lambda: dist.all_reduce(torch.ones(3 if first else 4)),
        "dtypes": dtypes,
        "roots": lambda: dist.broadcast(torch.ones(3), src=me()),
        "operations": lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if first else dist.ReduceOp.SUM),
        "meta": lambda: dist.all_reduce(torch.ones(3, device="meta")),
        "average of integers": lambda: dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.AVG),
        "bits of floats": lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND),
        "sparse": lambda: dist.all_gather([torch.ones(3).to_sparse()] * 3, torch.ones(3).to_sparse()),
    }
    for name, thing in things.items():
        note(name, **tried(thing), works=tried(works))


@play
def unlike():
    """All-reduces of different lengths, and of equal lengths with another dtype, without HOLDFAST_DEBUG. Two ranks.

    One of the far lengths needs more memory than exists, and allocates it.
    """
    for thing, more in (("lengths", 1), ("far lengths", 100_000)):
        note(thing, **tried(lambda: dist.all_reduce(torch.ones(3 + more * me()))), works=tried(works))  # noqa: B023
    given = torch.full((3,), 1, dtype=torch.int32 if me() else torch.float32)
    note("dtypes", **tried(lambda: dist.all_reduce(given)), given=given.tolist(), works=tried(works))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] != "without_recovery":  # whose script makes its own
        dist.init_process_group("holdfast", timeout=PATIENCE)
    PLAYS[sys.argv[1]](*sys.argv[2:])
    if dist.is_initialized():
        holdfast.distributed.is_lead()  # each rank notes what it saw: nothing is left to rank 0
        dist.destroy_process_group()
