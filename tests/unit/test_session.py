"""The session, with virtual workers: what a script may rely on, and what it is told when it errs."""

import gc
import weakref

import numpy as np
import pytest
import torch
from planned import faults
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast
from holdfast.comm import VirtualCommunicator
from holdfast.engine import exits
from holdfast.errors import CheckpointError, ConfigError, ScriptError, TooFewWorkers
from holdfast.session.session import at_exit
from holdfast_lab.counting import CountingCommunicator

SAMPLES = 50


def make(lr=0.1, **arguments):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return model, optimizer, holdfast.Session(model, optimizer, **({"workers": 4} | arguments))


def dataset():
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


def train(model, session, batch_size=8, epochs=2, each=lambda step: None, **arguments):
    for step in session.steps(dataset(), batch_size, epochs, **arguments):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        each(step)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def account(session):
    total = session._job.loops.totals
    return total.planned, total.committed, total.lost, total.repeated


# -- what is sent


def test_nothing_is_sent_but_the_gradient_sums_and_one_closing_sum_of_under_100_bytes(monkeypatch):
    monkeypatch.setattr(exits, "end_job_on_errors", lambda check: None)  # the job is this process
    comm = CountingCommunicator(VirtualCommunicator(4))
    model, _, session = make(comm=comm, bucket_bytes=16)
    before = {}

    def note(step):
        if step.number == 1:
            before.update(calls=comm.calls.copy(), sent=comm.sent_bytes.copy())

    train(model, session, each=note)

    steps, buckets = 14 - 1, 2
    calls, sent = comm.calls - before["calls"], comm.sent_bytes - before["sent"]
    assert calls == {"barrier": 2 * steps * buckets, "maximum": steps, "agree": 2}
    assert sent["maximum"] / steps < 100
    assert sent["agree"] == 0


# -- figures


def test_figures_are_means_over_the_samples_of_the_step():
    model, _, session = make(slices=3)
    seen = []
    for step in session.steps(dataset(), 10, shuffle=False):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
            step.log(first=x[:, 0].mean(), ones=1.0)
        seen.append(dict(session.metrics))

    expected = dataset().tensors[0][-10:, 0].mean().item()
    assert session.metrics["first"] == pytest.approx(expected, abs=1e-6)
    assert session.metrics["ones"] == 1.0
    assert set(session.metrics) == {"loss", "first", "ones"}
    assert seen[0] == {}, "nothing is committed before the loop asks for the next step"


def test_the_loop_may_be_run_again_and_epochs_count_on():
    model, _, session = make()
    once, _, whole = make()
    train(once, whole, epochs=3)

    epochs = []
    train(model, session, epochs=1, each=lambda step: epochs.append(step.epoch))
    train(model, session, epochs=2, each=lambda step: epochs.append(step.epoch))

    assert sorted(set(epochs)) == [0, 1, 2]
    assert torch.equal(weights(model), weights(once))
    assert account(session) == account(whole) == (150, 150, 0, 0)


# -- what is not the model


def test_a_plateau_scheduler_sees_the_loss():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    session = holdfast.Session(model, optimizer, scheduler=scheduler, schedule="epoch", workers=2)
    x, y = dataset()[:]
    loss = F.cross_entropy(model(x), y).item()

    train(model, session, SAMPLES, epochs=4)  # nothing is learnt, and each epoch is one step with all samples

    assert scheduler.last_epoch == 4
    assert scheduler.best == pytest.approx(loss)


def test_a_gradient_scaler_leaves_out_a_step_without_any_gradient():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = holdfast.Session(model, optimizer, scaler=torch.amp.GradScaler("cpu"), workers=2, clip_grad_norm=1.0)
    start = weights(model).clone()

    for step in session.steps(TensorDataset(torch.ones(4, 3)), 2, epochs=1):
        for (x,) in step:
            step.backward(x.requires_grad_().mean())

    assert session.step == 2
    assert torch.equal(weights(model), start)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_pass_that_makes_a_graph_gives_the_same_gradients():
    trained = []
    for makes_graph in (False, True):
        model, _, session = make(slices=4)
        for step in session.steps(dataset(), 8, 1):
            for x, y in step:
                half = F.cross_entropy(model(x), y) * len(x) / 2
                half.backward(create_graph=makes_graph)
                step.backward(F.cross_entropy(model(x), y) / 2)
        trained.append(weights(model))

    assert torch.equal(*trained)


FUSED = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_gradients_lie_in_memory_like_their_parameters(name, overlap):
    """A fused optimizer goes through the memory of both, and would mix up the numbers of a layer in channels_last."""

    def conv():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten()).to(memory_format=torch.channels_last)

    x = torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, torch.arange(8))
    plain, model = conv(), conv()
    optimizer = FUSED[name](plain.parameters())
    for part in torch.arange(8).split(4):
        optimizer.zero_grad()
        F.cross_entropy(plain(x[part]), part).backward()
        optimizer.step()

    session = holdfast.Session(model, FUSED[name](model.parameters()), slices=1, overlap_optimizer=overlap)
    for step in session.steps(data, 4, shuffle=False):
        for inputs, labels in step:
            step.backward(F.cross_entropy(model(inputs), labels))

    assert not model[0].weight.is_contiguous()
    assert torch.equal(model[0].weight, plain[0].weight)


def test_a_parameter_without_gradient_is_left_alone():
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    before = model["unused"].weight.detach().clone()
    session = holdfast.Session(model, optimizer, workers=2)

    train(model["used"], session, epochs=1)

    assert torch.equal(model["unused"].weight, before)
    assert len(optimizer.state) == 2


def test_a_parameter_that_only_one_slice_uses_gets_that_gradient():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = holdfast.Session(model, optimizer, workers=2, slices=2)
    before = model["b"].weight.detach().clone()
    uses = iter([True, False])

    for step in session.steps(dataset(), SAMPLES):
        for x, y in step:
            out = model["a"](x) + (model["b"](x) if next(uses) else 0)
            step.backward(F.cross_entropy(out, y))

    assert not torch.equal(model["b"].weight, before)


# -- policies


def test_forward_keeps_what_was_summed_and_divides_by_the_survivors_samples():
    def one_step(rescale, *specs):
        model, _, session = make(
            bucket_bytes=8, strategy="forward", rescale=rescale, faults=faults(*specs) if specs else ""
        )
        start = weights(model)
        train(model, session, batch_size=SAMPLES, epochs=1, shuffle=False)
        return weights(model) - start, session

    kill = "kill:rank=3,step=0,phase=allreduce,bucket=0"
    whole, _ = one_step("survivors")
    mean, session = one_step("survivors", kill)
    scaled, _ = one_step("original", kill)

    assert torch.equal(mean[6:], whole[6:]), "the bias was summed by all before the death"
    lost = SAMPLES - 3 * SAMPLES // 4
    assert account(session) == (SAMPLES, SAMPLES - lost, lost, 0)
    assert torch.allclose(scaled[:6], mean[:6] * (SAMPLES - lost) / SAMPLES, rtol=1e-5)
    assert not torch.allclose(mean[:6], whole[:6], rtol=1e-3)


def test_too_few_workers_save_and_stop_and_the_run_can_go_on(tmp_path):
    whole, _, session = make()
    train(whole, session)
    directory = str(tmp_path / "ckpt")
    model, _, session = make(
        min_workers=3,
        checkpoint_dir=directory,
        faults=faults("kill:rank=0,step=3", "kill:rank=1,step=5,phase=backward"),
    )
    with pytest.raises(TooFewWorkers, match="2 of at least 3 workers are alive; the state before step 5 is in"):
        train(model, session)

    model, _, session = make(workers=2, checkpoint_dir=directory, resume=True)
    train(model, session)

    assert torch.equal(weights(model), weights(whole))
    assert account(session) == (100, 100, 0, 0)


def test_a_run_goes_on_from_a_checkpoint_of_its_second_loop(tmp_path):
    whole, _, session = make()
    for _ in range(3):
        train(whole, session, epochs=1)
    directory = str(tmp_path / "ckpt")
    model, _, session = make(checkpoint_dir=directory, checkpoint_every=5, total_steps=21)
    train(model, session, epochs=1)
    train(model, session, epochs=1)

    model, _, session = make(workers=2, checkpoint_dir=directory, resume=True)
    for _ in range(3):
        train(model, session, epochs=1)

    assert torch.equal(weights(model), weights(whole))
    assert account(session) == (150, 150, 0, 0)


# -- what a script is told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "hope"}, "strategy must be one of rollback, forward, restart, reinit, partial, got 'hope'"),
        ({"slices": -1}, "slices must be at least 0, got -1"),
        ({"schedule": "year"}, "schedule must be 'step', 'epoch' or 'script', got 'year'"),
        ({"speed": 3}, "unknown setting 'speed'"),
        ({"fabric": "ulfm", "workers": 1}, "start with `holdfast run"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        make(**arguments)[2].steps(dataset(), 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((dataset(), 0), "batch_size must be at least 1, got 0"),
        ((dataset(), 8, 0), "epochs must be at least 1, got 0"),
        ((TensorDataset(torch.empty(0, 3)), 8), r"len\(dataset\) must be at least 1, got 0"),
        ((5, 8), "dataset must have len and"),
        ((iter([1]), 8), "a list_iterator can be read only once"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make()[2].steps(*arguments)


def test_drop_last_must_leave_something_and_slices_may_be_more_than_samples():
    with pytest.raises(ConfigError, match=r"batch_size must be at most len\(dataset\) \(50\), got 51"):
        make()[2].steps(dataset(), 51, drop_last=True)
    model, _, session = make(workers=3, slices=12)
    train(model, session, epochs=1)
    assert session.step == 7


def test_a_foreign_optimizer_is_refused():
    with pytest.raises(ConfigError, match="parameters that are not the model's"):
        holdfast.Session(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0))


def loop(session, body, each_slice=lambda step, x, y: None):
    for step in session.steps(dataset(), 8):
        body(step)
        for x, y in step:
            each_slice(step, x, y)


def test_a_slice_without_backward_is_named():
    _, _, session = make()
    with pytest.raises(ScriptError, match=r"slice 0 of step 0 ended without step.backward\(loss\)"):
        loop(session, lambda step: None)


def test_a_slice_that_was_left_out_is_named():
    _, _, session = make()
    for step in (steps := session.steps(dataset(), 8)):
        next(iter(step))
        with pytest.raises(ScriptError, match="slice 0 of step 0 was not computed"):
            next(steps)
        break


def test_backward_outside_the_slices_is_named():
    _, _, session = make()
    with pytest.raises(ScriptError, match="must be called inside"):
        loop(session, lambda step: step.backward(torch.zeros(())))


def test_leaving_the_loop_early_is_found_out_at_the_end():
    model, _, session = make()
    for step in session.steps(dataset(), 8):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        if step.number == 2:
            break

    with pytest.raises(ScriptError, match=r"left at step 2 before its end; to end it early call step.stop\(\)"):
        session.check_finished()


ODD = "half of a \ud83d"


def test_a_figure_whose_name_is_no_text_is_refused_by_name():
    def odd(output, y):
        return F.cross_entropy(output, y), {ODD: 1.0}

    model, _, session = make()
    with pytest.raises(ConfigError, match=r"half of a \\ud83d' has a lone surrogate"):
        loop(session, lambda step: [step.log(**{ODD: 1.0}) for _ in step])

    model, _, session = make()
    with pytest.raises(ConfigError, match="lone surrogate"):
        loop(session, lambda step: step.compute(model, odd))

    model, _, session = make()
    train(model, session, epochs=1)
    with pytest.raises(ConfigError, match="lone surrogate"):
        session.log(**{ODD: 1.0})


@pytest.mark.parametrize("slices", [65537, 99999999999999])
def test_more_slices_than_a_job_may_have_workers_are_refused_before_anything_is_made_of_them(slices):
    model, _, session = make(slices=slices)

    with pytest.raises(ConfigError, match=f"slices must be at most 65536, or batch_size if that is more, got {slices}"):
        train(model, session)


def train_and_forget(*, leave_early):
    """Train in a function of its own, and return what tells whether its model is gone."""
    model, _, session = make()
    for step in session.steps(dataset(), 8):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        if leave_early:
            break
    return weakref.ref(model)


def test_a_session_whose_loop_has_ended_is_not_kept():
    model = train_and_forget(leave_early=False)

    gc.collect()

    assert model() is None
    at_exit()


def test_leaving_the_loop_of_a_session_that_is_gone_is_found_out_at_the_end():
    train_and_forget(leave_early=True)

    gc.collect()

    with pytest.raises(ScriptError, match="left at step 0 before its end"):
        at_exit()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 3), nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("part", self.encoder.bias.detach()[:2])


def test_tied_weights_are_saved_as_safetensors_under_both_names(tmp_path):
    model = Tied()
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), workers=2)

    session.save(tmp_path / "model.safetensors")

    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(("name", "error"), [("a.safetensors", AttributeError), ("taken", CheckpointError)])
def test_a_file_that_cannot_be_written_leaves_no_draft(tmp_path, name, error):
    _, _, session = make()
    (tmp_path / "taken").mkdir()

    with pytest.raises(error):
        session.save(tmp_path / name, {"weight": torch.zeros(2), "words": "no tensor"})

    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


# -- models and scripts that are not as simple as they look


class Running(nn.Module):
    """Keeps an average in a buffer, in a way that torch allows and batch norm does not use."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.linear = nn.Linear(3, 2)
        self.register_buffer("average", torch.zeros(3), persistent=how != "transient")
        self.register_buffer("count", torch.tensor(1 << 25))
        self.register_buffer("fresh", torch.tensor(True))
        self.register_buffer("odd", torch.tensor([float("nan"), 0.1, -0.0]))

    def forward(self, x):
        mean = 0.9 * self.average + x.detach().mean(0)
        if self.how == "reassigned":
            self.average = mean
        else:
            self.average.copy_(mean)
        self.count += 1
        self.fresh.fill_(False)
        return self.linear(x + self.average)


def train_running(how, **arguments):
    torch.manual_seed(0)
    model = Running(how)
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)
    train(model, session)
    return model, session._job.loops.finished[0].state_sha256


@pytest.mark.parametrize("how", ["in place", "reassigned", "transient"])
@pytest.mark.parametrize("strategy", ["rollback", "restart"])
def test_buffers_of_any_kind_are_averaged_and_taken_back(how, strategy, tmp_path):
    model, undisturbed = train_running("in place" if how == "reassigned" else how, workers=1, slices=4)

    model, disturbed = train_running(
        how,
        workers=4,
        strategy=strategy,
        checkpoint_dir=str(tmp_path / "ckpt"),
        checkpoint_every=3,
        faults=faults("kill:rank=1,step=4,phase=backward", "kill:rank=3,step=8,phase=allreduce"),
    )

    assert disturbed == undisturbed
    assert model.count.item() == (1 << 25) + 14, "integers are counted as integers"
    assert not model.fresh
    assert model.odd.isnan().tolist() == [True, False, False]
    assert model.odd[1] == torch.tensor(0.1)
    assert torch.signbit(model.odd[2])


def test_a_large_buffer_must_stay_constant():
    class Changing(nn.Linear):
        def __init__(self, change):
            super().__init__(3, 2)
            self.change = change
            self.register_buffer("mask", torch.ones(300, 300, dtype=torch.bool))

        def forward(self, x):
            if self.change:
                self.mask[0, 0] = False
            return super().forward(x)

    constant = Changing(change=False)
    train(constant, holdfast.Session(constant, torch.optim.SGD(constant.parameters(), lr=0.1)), epochs=1)
    model = Changing(change=True)
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(ScriptError, match="changed the buffer mask of 90000 elements"):
        train(model, session, epochs=1)


def test_what_a_script_draws_outside_the_slices_does_not_depend_on_who_computed_what():
    def draws(**arguments):
        drawn = []
        model, _, session = make(slices=4, **arguments)
        for step in session.steps(dataset(), 8, 2):
            before = torch.rand(()).item()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            drawn.append((step.number, before, torch.rand(()).item()))
        return {number: rest for number, *rest in drawn}

    deaths = faults("kill:rank=0,step=3", "kill:rank=2,step=7,phase=optimizer")
    assert draws(workers=1) == draws(workers=4, faults=deaths)


def test_a_step_that_asked_to_stop_and_was_taken_back_may_think_again(tmp_path):
    model, _, session = make(strategy="restart", faults=faults("kill:rank=1,step=8,phase=allreduce"))

    train(model, session, each=lambda step: step.stop() if step.number == 8 else None)

    assert session.step == 9


def test_a_chosen_number_of_slices_is_chosen_once_for_the_job(tmp_path, capfd):
    """Whoever dies, and on however many workers it goes on; and it has the bits of that number."""
    directory = str(tmp_path / "ckpt")
    model, _, session = make(
        slices="auto", faults=faults("kill:rank=1,step=2"), checkpoint_dir=directory, checkpoint_every=1
    )
    train(model, session, batch_size=64, epochs=4)
    resumed, _, later = make(slices="auto:1", workers=2, checkpoint_dir=directory, resume=True)
    train(resumed, later, batch_size=64, epochs=6)
    said = capfd.readouterr().err
    expected, _, session = make(workers=1, slices=8)
    train(expected, session, batch_size=64, epochs=6)
    others, _, session = make(workers=1, slices=2)
    train(others, session, batch_size=64, epochs=6)

    assert "8 slices of a mini-batch: after the loss of 1 of 4 workers a step takes at most 13 % longer" in said
    assert said.count("slices of a mini-batch") == 1
    assert torch.equal(weights(resumed), weights(expected))
    assert not torch.equal(weights(resumed), weights(others)), "the number of slices shows in the bits"


def test_a_run_that_would_not_be_the_same_is_not_resumed_nor_its_checkpoints_taken_by_a_new_one(tmp_path):
    directory = str(tmp_path / "ckpt")
    model, _, session = make(checkpoint_dir=directory, checkpoint_every=5)
    train(model, session)

    for settings, options, message in (
        ({"resume": True, "seed": 1}, {}, "the checkpoint was made with seed=0 and this run has 1"),
        ({"resume": True}, {"shuffle": False}, "the checkpoint was made with shuffle="),
        ({"resume": True}, {"drop_last": True}, "the checkpoint was made with drop_last="),
        ({"checkpoint_every": 5}, {}, r"already holds a run up to step 10: resume it \(--resume\)"),
    ):
        model, _, session = make(checkpoint_dir=directory, **settings)
        with pytest.raises(ConfigError, match=message):
            train(model, session, **options)


def test_arrays_in_a_registered_state_go_back_too():
    class Histogram:
        def __init__(self):
            self.counts = np.zeros(2, dtype=int)

        def state_dict(self):
            return {"counts": self.counts}

        def load_state_dict(self, state):
            self.counts = state["counts"]

    histogram = Histogram()
    model, _, session = make(faults=faults("kill:rank=1,step=3,phase=allreduce"))
    session.register(histogram=histogram)

    def count(step):
        histogram.counts[0] += 1

    train(model, session, epochs=1, each=count)

    assert histogram.counts[0] == 7


def test_when_every_slice_of_a_step_is_lost_the_ledger_says_so_and_a_plateau_scheduler_waits():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    session = holdfast.Session(
        model, optimizer, scheduler=scheduler, workers=3, slices=1, strategy="forward",
        faults=faults("kill:rank=0,step=1,phase=backward"),
    )  # fmt: skip

    train(model, session, batch_size=SAMPLES, epochs=3)

    assert account(session) == (150, 100, 50, 0)
    assert scheduler.last_epoch == 2


def test_attempts_are_counted_from_0():
    attempts = []
    model, _, session = make(faults=faults("kill:rank=1,step=1,phase=allreduce"))

    train(model, session, epochs=1, each=lambda step: attempts.append((step.number, step.attempt)))

    assert attempts[:4] == [(0, 0), (1, 0), (1, 1), (2, 0)]


def test_slices_that_log_different_figures_are_found_out():
    _, _, session = make(workers=1, slices=2)
    names = iter("ab")
    with pytest.raises(ScriptError, match="every slice must log the same metrics; slice 1 of step 0"):
        loop(session, lambda step: None, lambda step, x, y: log_one(step, x, next(names)))


def log_one(step, x, name):
    step.backward(x.sum() * torch.ones((), requires_grad=True))
    step.log(**{name: 1.0})
