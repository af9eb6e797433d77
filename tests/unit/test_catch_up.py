"""What lets a newcomer catch up: streams of live memory, the update of a step repeated elsewhere, and the difference."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import holdfast
from holdfast.base.clock import SystemClock
from holdfast.comm.memory import as_bytes
from holdfast.config import Settings
from holdfast.errors import StoreLost
from holdfast.membership import Hub, StateRequests, open_store
from holdfast.membership.acts import encode_members
from holdfast.membership.state_requests import StateRequest, StreamSecrets
from holdfast.membership.store import derive_key
from holdfast.models.optimizers import options_of, set_options
from holdfast.models.overlap import OverlapCost
from holdfast.models.training_state import clone
from holdfast.state.admission import Admission
from holdfast.state.catch_up import EarlyTransfer, Follower, can_catch_up, join_training, tensors_of
from holdfast.state.live_bytes import LiveBytes
from holdfast.state.stream_wire import receive_body, receive_header, send_message
from holdfast.state.streams import StateStream, StateStreams

LIMIT_S = 30.0


# -- live memory


def taken(live, count=100):
    """Everything that is left, in portions."""
    room, pieces = torch.empty(count, dtype=torch.uint8), []
    while got := live.take(room):
        pieces.append(room[:got].clone())
    return torch.cat(pieces)


@pytest.mark.parametrize("before", [0, 3, 10, 11])
@pytest.mark.parametrize("settles", [True, False])
def test_bytes_are_those_of_before_a_change_only_if_they_were_settled(before, settles):
    memory = [
        torch.arange(250, dtype=torch.uint8),
        torch.arange(17, dtype=torch.uint8),
        torch.ones(1000, dtype=torch.uint8),
    ]
    given = torch.cat(memory)
    live = LiveBytes(memory)
    first = [live.take(room := torch.empty(100, dtype=torch.uint8)) and room for _ in range(before)]

    if settles:
        live.settle()
    for tensor in memory:
        tensor += 1
    rest = taken(live)

    sizes = [min(100, n) for n in (100, 100, 50, 17, *[100] * 10)][:before]
    got = torch.cat([*(room[:size] for room, size in zip(first, sizes, strict=True)), rest])
    assert len(got) == live.size_bytes == len(given)
    assert torch.equal(got, given) is settles


# -- the update of a step, repeated elsewhere

KINDS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9, nesterov=True), {}),
    "adamw, clipped": (lambda p: torch.optim.AdamW(p, lr=0.01), {"clip_grad_norm": 0.1}),
    "amsgrad, scaled": (lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True), {"scaler": True}),
    "rmsprop, averaged": (lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True), {"average": True}),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.01), {}),
    "early": (lambda p: torch.optim.Adam(p, lr=0.01), {"overlap_optimizer": True}),
    "items": (lambda p: torch.optim.Adam(p, lr=0.01), {"clip_grad_norm": 0.1}),
}


def make(kind, **settings):
    """A session of three virtual workers whose model has batch norm and an unused parameter."""
    torch.manual_seed(2)
    layers = [nn.Linear(6, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 80), nn.Linear(80, 1)]
    model = nn.Sequential(*layers)
    model.unused = nn.Parameter(torch.ones(3))
    build, extra = KINDS[kind]
    optimizer = build(model.parameters())
    extra = dict(extra)
    if extra.pop("scaler", False):
        extra["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    if extra.pop("average", False):
        extra["average"] = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    session = holdfast.Session(model, optimizer, scheduler=scheduler, workers=3, fabric="virtual", seed=1, **extra)
    return model, session


def train(kind, monkeypatch, before_step=None, before_update=None):
    """Train for eight steps, and return the model as the loop sees it."""
    model, session = make(kind)
    monkeypatch.setattr(Admission, "before_step", lambda _: before_step and before_step(session))
    monkeypatch.setattr(Admission, "before_update", lambda _, batch: before_update and before_update(session, batch))
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(4))
    data = torch.utils.data.TensorDataset(x, x.prod(1, keepdim=True))
    for step in session.steps(data, batch_size=8):
        for xs, ys in step:
            step.backward(nn.functional.mse_loss(model(xs), ys), items=len(xs) ** 2 if kind == "items" else None)
    return session._trainable


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [0, 3])
def test_a_step_that_is_repeated_gives_the_bits_of_the_step(kind, start, monkeypatch):
    states, steps = [], []

    def note(session, batch):
        model = session._trainable.whole
        sums = [result.clone() for result in model.gradients.sums]
        steps.append((sums, list(model.gradients.summed_slices), len(batch.ids), options_of(model.optimizer)))

    trained = train(kind, monkeypatch, lambda session: states.append(clone(session._trainable.state_dict())), note)
    assert len(states) == len(steps) == 8
    repeated = make(kind)[1]._trainable
    repeated.load_state_dict(states[start], keeps=True)
    for *sums, options in steps[start:]:
        set_options(repeated.optimizer, options)
        repeated.repeat_step(*sums)

    for name, thing in trained.state_dict().items():
        if name != "scheduler":  # comes with the admission, as all that is no tensor
            got = tensors_of(repeated.state_dict()[name])
            assert got.keys() == tensors_of(thing).keys()
            assert all(torch.equal(got[path], tensor) for path, tensor in tensors_of(thing).items()), name


def test_a_step_is_repeated_also_once_the_loop_of_a_newcomer_has_begun(monkeypatch):
    """From then on it updates buckets early in its own steps."""
    start, steps = [], []

    def note(session, batch):
        model = session._trainable.whole
        sums = [s.clone() for s in model.gradients.sums]
        steps.append((sums, list(model.gradients.summed_slices), len(batch.ids)))

    trained = train("early", monkeypatch, lambda session: start.append(clone(session._trainable.state_dict())), note)
    repeated = make("early")[1]._trainable
    repeated.load_state_dict(start[7])
    repeated.overlap_optimizer(SystemClock(), OverlapCost(), beside=False)
    repeated.repeat_step(*steps[7])

    pairs = zip(trained.model.parameters(), repeated.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_one_wrong_bit_in_a_gradient_gives_other_bits(monkeypatch):
    """The tests above would see it."""
    start, sums = [], []

    def note(session, batch):
        model = session._trainable.whole
        mine = [s.clone() for s in model.gradients.sums]
        sums.append((mine, list(model.gradients.summed_slices), len(batch.ids)))

    trained = train("sgd", monkeypatch, lambda session: start.append(clone(session._trainable.state_dict())), note)
    repeated = make("sgd")[1]._trainable
    repeated.load_state_dict(start[7])
    as_bytes(sums[7][0][0])[6] ^= 64
    repeated.repeat_step(*sums[7])

    pairs = zip(trained.model.parameters(), repeated.model.parameters(), strict=True)
    assert sum(not torch.equal(a, b) for a, b in pairs) == 1


# -- a stream


def key_for(name):
    return derive_key("a token", name)


def with_key(address):
    """The address of a stream with its key, as a newcomer has it that knows the token."""
    host, port, name = address.split(" ")
    return f"{host} {port} {key_for(name).hex()}"


class Requests:
    """Requests that come from the test."""

    own_address = "127.0.0.1"

    def __init__(self):
        self.new, self.address, self.known_dead = [StateRequest(newcomer=3, giver=0, loop=0, number=0)], "", set()

    def take_new(self, _):
        new, self.new = self.new, []
        return new

    def answer(self, _, address):
        self.address = address and with_key(address)

    def key_for(self, name):
        return key_for(name)

    def dead(self):
        return self.known_dead


@contextlib.contextmanager
def streaming(monkeypatch):
    """Follow a training from its third step; the follower starts when that step begins."""
    here = SimpleNamespace(
        requests=Requests(), streams=None, follower=None, follow=Follower, model=make("adamw, clipped")[1]._trainable
    )

    def before_step(session):
        if here.streams is None and session.step == 2:
            comm = SimpleNamespace(state_requests=here.requests)
            job = SimpleNamespace(comm=comm, settings=Settings(), loop=0, step=session.step)
            here.streams = StateStreams(job, session._trainable.whole)
        if here.streams is not None:
            here.streams.before_step()
            if here.follower is None:
                here.follower = here.follow(here.model, here.requests.address)

    here.train = lambda: train(
        "adamw, clipped",
        monkeypatch,
        before_step,
        lambda _, batch: here.streams and here.streams.before_update(batch),
    )
    yield here
    here.streams.hang_up()
    here.follower.stop()


def wait_until(is_so):
    ends_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def test_a_follower_ends_with_the_bits_of_the_training_that_it_follows(monkeypatch):
    with streaming(monkeypatch) as here:
        trained = here.train()
        here.streams.end((3,))
        wait_until(lambda: not here.follower.is_running)

        assert here.follower.is_complete
        assert here.follower.why == ""
        assert (here.follower.first_step, here.follower.steps) == (2, 6)
        got, wanted = tensors_of(here.model.model.state_dict()), tensors_of(trained.model.state_dict())
        assert all(torch.equal(got[path], wanted[path]) for path in wanted)


def test_a_follower_whose_stream_ends_says_why(monkeypatch):
    with streaming(monkeypatch) as here:
        here.train()
        here.streams.hang_up()
        wait_until(lambda: not here.follower.is_running)

        assert not here.follower.is_complete
        assert here.follower.why.startswith("the stream ended: ")


def test_a_stranger_and_a_newcomer_that_is_too_slow_hold_nothing(monkeypatch):
    """The stranger connects first, without the proof; then nothing reads."""
    with streaming(monkeypatch) as here:
        here.follow = lambda *_: SimpleNamespace(stop=lambda: None)
        monkeypatch.setattr("holdfast.state.streams._MOST_WAITING", 1.5)
        here.train()
        assert here.streams._streams == {}  # what waited was too much, so the stream was dropped
        host, port, _ = here.requests.address.split(" ")
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((host, int(port)), LIMIT_S)


def test_a_stream_sends_nothing_without_the_proof(monkeypatch):
    with streaming(monkeypatch) as here:
        stranger = []

        def stranger_first(model, address):
            host, port, _ = address.split(" ")
            connection = socket.create_connection((host, int(port)), LIMIT_S)
            connection.sendall(bytes(32))
            stranger.append(connection)
            return Follower(model, address)

        here.follow = stranger_first
        here.train()
        assert stranger[0].recv(1) == b""
        stranger[0].close()
        here.streams.end((3,))
        wait_until(lambda: not here.follower.is_running)
        assert here.follower.is_complete


@pytest.mark.parametrize("change", [None, "another key", "a repeated header", "another header"])
def test_a_newcomer_takes_headers_of_the_worker_that_it_asked_alone(change):
    """A program that the newcomer reaches instead of that worker, or that alters what is sent."""
    sender, newcomer = socket.socketpair()
    with sender, newcomer:
        secrets = StreamSecrets(key_for("another" if change == "another key" else "stream"))
        send_message(sender, {"step": 5}, LiveBytes(()), secrets)
        send_message(sender, {"step": 6}, LiveBytes(()), secrets)
        sender.shutdown(socket.SHUT_WR)
        sent = newcomer.recv(1000)
    half = len(sent) // 2
    told = {"a repeated header": sent[:half] * 2, "another header": sent.replace(b"6", b"7")}.get(change, sent)
    giver, taker = socket.socketpair()
    with giver, taker:
        giver.sendall(told)
        mine = StreamSecrets(key_for("stream"))
        if change is None:
            assert [receive_header(taker, mine) for _ in range(2)] == [{"step": 5}, {"step": 6}]
            return
        with pytest.raises(ConnectionError, match="changed on its way, or sent by another program"):
            [receive_header(taker, mine) for _ in range(2)]


def refuses(address):
    host, port, _ = address.split(" ")
    try:
        socket.create_connection((host, int(port)), LIMIT_S).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_stream_to_a_newcomer_that_died_before_it_connected_holds_nothing(monkeypatch):
    with streaming(monkeypatch) as here:
        here.follow = lambda *_: here.requests.known_dead.add(3) or SimpleNamespace(stop=lambda: None)
        here.train()
        assert here.streams._streams == {}
        wait_until(lambda: refuses(here.requests.address))


@pytest.mark.parametrize(
    ("call", "error"),
    [("socket.create_server", OSError(24, "no more files")), ("threading.Thread", RuntimeError("none"))],
)
def test_a_member_that_cannot_open_a_stream_says_so_and_trains_on(monkeypatch, call, error):
    def fail(*_, **__):
        raise error

    with streaming(monkeypatch) as here:
        here.follow = lambda *_: SimpleNamespace(stop=lambda: None)
        here.requests.address = "none yet"
        monkeypatch.setattr(f"holdfast.state.streams.{call}", fail)
        trained = here.train()
        assert here.requests.address == ""
        assert here.streams._streams == {}
        assert all(p.isfinite().all() for p in trained.model.parameters())


def test_what_waits_to_be_sent_is_counted_after_the_body():
    """While the large state is on its way, three steps follow."""
    stream = StateStream("127.0.0.1", key_for, 1 << 30)
    state = LiveBytes([torch.zeros(32 << 20, dtype=torch.uint8)])
    stream.send({"step": 5}, state)
    host, port, key = with_key(stream.address).split(" ")
    secrets = StreamSecrets(bytes.fromhex(key))
    with socket.create_connection((host, int(port)), LIMIT_S) as connection:
        connection.sendall(secrets.proof)
        assert receive_header(connection, secrets) == {"step": 5}
        for number in range(5, 8):
            stream.send({"step": number}, LiveBytes(()))
        receive_body(connection, [torch.empty(state.size_bytes, dtype=torch.uint8)])
        said = [receive_header(connection, secrets) for _ in range(7)]
    stream.hang_up()

    assert [header["behind"] for header in said if "behind" in header][::3] == [3, 0]
    assert [header["step"] for header in said if "step" in header] == [5, 6, 7]


def test_a_newcomer_is_current_only_once_it_has_repeated_what_came_while_it_loaded(monkeypatch):
    with streaming(monkeypatch) as here:
        may_load, was_current = threading.Event(), []
        load, repeat = here.model.load_state_dict, here.model.repeat_step

        def load_late(*state, **options):
            assert may_load.wait(LIMIT_S)
            load(*state, **options)

        def repeat_noted(*results):
            was_current.append(here.follower.is_current)
            repeat(*results)

        here.model.load_state_dict, here.model.repeat_step = load_late, repeat_noted
        here.train()
        wait_until(lambda: not any(stream._messages.qsize() for stream in here.streams._streams.values()))
        may_load.set()
        wait_until(lambda: here.follower.is_current)

        assert was_current == [False] * 6


# -- a newcomer


class Answers:
    """A store in which the members answer a newcomer as the test says."""

    def __init__(self, members, answer=""):
        self.members, self.answer, self.is_withdrawn = members, answer, False

    def living_members(self):
        return self.members

    def ask(self, _):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def can_give(self, _):
        return True

    def withdraw(self):
        self.is_withdrawn = True


def newcomer(answers, joins=lambda _: True):
    comm = SimpleNamespace(state_requests=answers, local_ranks=(3,), join=joins)
    job = SimpleNamespace(comm=comm, clock=SystemClock(), loop=0)
    return job, EarlyTransfer(job, make("sgd")[1]._trainable)


@pytest.mark.parametrize(
    ("members", "why"),
    [((), "no member of the job was alive"), ((0, 2), "worker 2 could not send its state, or has ended")],
)
def test_a_newcomer_that_received_nothing_says_why(members, why):
    _, catch_up = newcomer(Answers(members))
    catch_up.run()

    assert catch_up.record(0).why == why
    assert catch_up.record(0).steps == 0


def refused(_):
    return False


def without_store(_):
    raise StoreLost("the store is lost")


@pytest.mark.parametrize("joins", [refused, without_store])
def test_a_newcomer_that_is_not_admitted_leaves_the_model_alone(monkeypatch, joins):
    with streaming(monkeypatch) as here:
        here.train()
        job, catch_up = newcomer(Answers((0,)), joins)
        catch_up._follower = here.follower
        assert here.follower.is_running
        with contextlib.suppress(StoreLost):
            assert not join_training(job, catch_up)

        assert not here.follower.is_running


def test_a_newcomer_that_loses_the_store_while_it_catches_up_leaves_the_model_alone():
    stream = StateStream("127.0.0.1", key_for, 1 << 20)
    answers = Answers((0,), with_key(stream.address))
    answers.can_give = without_store
    _, catch_up = newcomer(answers)
    with pytest.raises(StoreLost):
        catch_up.run()

    assert not catch_up._follower.is_running
    stream.hang_up()


# -- requests


@pytest.fixture
def stores():
    with Hub("token") as hub, contextlib.ExitStack() as closing:
        made = [open_store(f"holdfast://{hub.address}/job", "token") for _ in range(2)]
        for store in made:
            closing.callback(store.close)
        made[0].put("g/0/members", encode_members((0, 1, 2)))
        made[0].put("g/1/members", encode_members((0, 2)))
        yield made


def asked(store, answers):
    """Ask in a thread, as a newcomer does; return the requests, the request and what came of it."""
    requests, request = StateRequests(store, 3), StateRequest(newcomer=3, giver=2, loop=0, number=1)
    thread = threading.Thread(target=lambda: answers.append(requests.ask(request)))
    thread.start()
    return thread, request


def test_a_request_is_taken_once_by_the_member_that_is_asked_and_answered(stores):
    answers = []
    thread, request = asked(stores[1], answers)
    mine, others = StateRequests(stores[0], 2), StateRequests(stores[0], 0)
    wait_until(lambda: stores[0].get("state-for/3") is not None)

    assert others.take_new(0) == []
    assert mine.take_new(0) == [request]
    assert mine.take_new(0) == []
    mine.answer(StateRequest(newcomer=3, giver=2, loop=0, number=0), "too late")
    mine.answer(request, "127.0.0.1 7 name")
    thread.join(LIMIT_S)
    assert answers == [f"127.0.0.1 7 {mine.key_for('name').hex()}"]
    assert mine.key_for("name") != mine.key_for("another")


@pytest.mark.parametrize(
    ("key", "value"), [("dead/2", "killed"), ("loop", "1"), ("g/2/members", encode_members((0, 3)))]
)
def test_a_request_ends_when_the_member_is_gone_or_the_loop_is_over(stores, key, value):
    answers = []
    thread, _ = asked(stores[1], answers)
    assert not answers
    stores[0].put(key, value)
    thread.join(LIMIT_S)
    assert answers == [""]


@pytest.mark.parametrize(
    ("least", "pauses", "expected"), [(0, False, True), (-1, False, False), (1 << 30, False, False), (0, True, False)]
)
def test_where_newcomers_catch_up(least, pauses, expected):
    job = SimpleNamespace(settings=Settings(catch_up_bytes=least), comm=SimpleNamespace(state_requests=object()))
    trainable = make("sgd")[1]._trainable

    assert can_catch_up(job, trainable, pauses=pauses) is expected
    job.comm.state_requests = None
    assert not can_catch_up(job, trainable, pauses=pauses)


def test_the_loop_calls_both_hooks_once_a_step(monkeypatch):
    calls = []
    train("sgd", monkeypatch, lambda _: calls.append("step"), lambda _, batch: calls.append(batch.step))

    assert calls == [call for number in range(8) for call in ("step", number)]
