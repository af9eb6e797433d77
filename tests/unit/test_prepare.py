"""``holdfast.prepare``: loops that the script owns, over the virtual fabric."""

import json
import subprocess
import sys

import planned
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.errors import ConfigError, ScriptError
from holdfast.models.training_state import model_sha256
from holdfast.session import gradient_hook

SAMPLES, BATCH = 96, 12
VIRTUAL = {"fabric": "virtual", "workers": 4, "slices": 4, "seed": 5}
DEATHS = ("kill:rank=1,step=2", "kill:rank=0,step=5,phase=allreduce", "kill:rank=3,step=9,phase=optimizer")


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was():
    before = torch.autograd.backward
    yield
    gradient_hook.forget()
    assert torch.autograd.backward is before


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 8, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    )


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def settings(*faults, **more):
    return VIRTUAL | {"faults": planned.faults(*faults)} | more


def loader(**options):
    return DataLoader(data(), **{"batch_size": BATCH, "shuffle": True} | options)


def plain_loop(*faults, epochs=2, clip=None, **more):
    """Train as scripts do; return the weights' sha256, the last metrics, and the loader."""
    model = net()
    adam = torch.optim.AdamW(model.parameters(), lr=0.05)
    steps = torch.optim.lr_scheduler.StepLR(adam, 3, 0.7)
    model, adam, batches, steps = holdfast.prepare(model, adam, loader(), steps, **settings(*faults, **more))
    for _ in range(epochs):
        for x, y in batches:
            adam.zero_grad()
            loss = F.cross_entropy(model(x), y)
            batches.log(correct=(model[0].weight.detach() * 0 + 1).mean())
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            adam.step()
            steps.step()
    return model_sha256(model), batches.metrics, batches, steps


def session_loop(*faults, epochs=2, clip=None):
    """Train the same with a session that runs optimizer, clipping and scheduler."""
    model = net()
    adam = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 3, 0.7)
    session = holdfast.Session(model, adam, scheduler=scheduler, clip_grad_norm=clip, **settings(*faults))
    for step in session.steps(data(), BATCH, epochs):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
    return model_sha256(model), session.metrics


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_bits_are_those_of_a_session_and_deaths_change_none(clip):
    expected, theirs = session_loop(clip=clip)
    sha, metrics, _, scheduler = plain_loop(clip=clip)
    killed, its, batches, _ = plain_loop(*DEATHS, clip=clip)

    assert sha == killed == expected
    assert metrics["loss"] == theirs["loss"]
    assert metrics["correct"] == 1
    assert its == metrics
    assert (batches.session.world_size, batches.step) == (1, 16)
    assert scheduler.get_last_lr() == [pytest.approx(0.05 * 0.7**5)], "16 steps, not the 64 iterations of the loop"


def test_gradients_in_the_loop_are_those_of_the_mini_batch_and_only_where_the_step_is_committed():
    model = nn.Linear(8, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, sgd, batches = holdfast.prepare(model, sgd, loader(shuffle=False, batch_size=SAMPLES), **settings())
    x, y = data().tensors
    expected = torch.autograd.grad(F.cross_entropy(model(x), y), [model.weight])[0]
    seen = []
    for a, b in batches:
        F.cross_entropy(model(a), b).backward()
        seen.append((batches.last, model.weight.grad))
        sgd.step()
        assert batches.committed == seen[-1][0]

    assert [last for last, _ in seen] == [False, False, False, True]
    assert [gradient for _, gradient in seen[:3]] == [None] * 3
    torch.testing.assert_close(seen[3][1], expected)


def test_a_scaler_skips_and_recovers_as_in_one_process():
    def train(*faults):
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=3)
        model, sgd, batches, scaler = holdfast.prepare(model, sgd, loader(), scaler=scaler, **settings(*faults))
        scales = []
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * (1e12 if batches.step == 4 else 1.0)).backward()
            scaler.unscale_(sgd)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(sgd)
            scaler.update()
            if batches.committed:
                scales.append(scaler.get_scale())
        return model_sha256(model), scales, batches.metrics["loss"]

    sha, scales, loss = train()
    assert train(*DEATHS[:2]) == (sha, scales, loss)
    assert len(scales) == 8
    assert 0 < loss < 10, "the logged loss is not scaled"
    assert scales[4] < scales[3], "step 4 overflowed and was skipped"


def test_an_average_takes_each_committed_step_once():
    def train(*faults):
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        average = AveragedModel(model)
        model, sgd, batches, average = holdfast.prepare(model, sgd, loader(), average=average, **settings(*faults))
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            sgd.step()
            average.update_parameters(model)
        return model_sha256(average.module), int(average.n_averaged)

    assert train() == train(*DEATHS)
    assert train()[1] == 8


def gan(*faults, **more):
    torch.manual_seed(3)
    generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    ours = torch.optim.Adam(generator.parameters(), lr=0.01), torch.optim.SGD(critic.parameters(), lr=0.01)
    models, (of_generator, of_critic), batches = holdfast.prepare(
        [generator, critic], list(ours), loader(), **settings(*faults, **more)
    )
    assert models == [generator, critic]
    for real, _ in batches:
        fake = generator(torch.randn(len(real), 4))
        of_critic.zero_grad()
        (critic(fake.detach()).mean() - critic(real).mean()).backward()
        if more.get("clips"):
            nn.utils.clip_grad_norm_(critic.parameters(), 0.1)
        of_critic.step()
        of_generator.zero_grad()
        (-critic(fake).mean()).backward()
        of_generator.step()
    return model_sha256(generator), model_sha256(critic)


def test_two_optimizers_with_two_losses_keep_their_bits():
    assert gan() == gan(*DEATHS)
    assert gan() == gan(workers=1)
    assert gan(clip_grad_norm=0.01) == gan(*DEATHS, clip_grad_norm=0.01) != gan()


def test_each_of_two_optimizers_gets_the_gradients_of_its_own_loss():
    torch.manual_seed(3)
    first, second = nn.Linear(8, 3), nn.Linear(3, 3)
    optimizers = [torch.optim.SGD(first.parameters(), lr=1.0), torch.optim.SGD(second.parameters(), lr=1.0)]
    x, y = data().tensors
    start = second.weight.detach().clone()
    expected = torch.autograd.grad(F.cross_entropy(second(first(x).detach()), y), [second.weight])[0]
    _, (of_first, of_second), batches = holdfast.prepare(
        [first, second], optimizers, loader(shuffle=False, batch_size=SAMPLES), **settings()
    )
    for a, b in batches:
        of_second.zero_grad()
        F.cross_entropy(second(first(a).detach()), b).backward()
        of_second.step()
        of_first.zero_grad()
        F.cross_entropy(second(first(a)), b).backward()  # leaves gradients in the second model, too
        of_first.step()

    torch.testing.assert_close(start - second.weight.detach(), expected)


def test_a_loop_that_is_left_after_a_step_ends_there():
    def train(*faults):
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        model, sgd, batches = holdfast.prepare(model, sgd, loader(), **settings(*faults))
        while batches.step < 12:
            for x, y in batches:
                F.cross_entropy(model(x), y).backward()
                sgd.step()
                if batches.committed and batches.step in (5, 12):
                    break
        batches.finish()
        return model_sha256(model), batches.step

    assert train() == train(*DEATHS)
    assert train()[1] == 12


def test_accumulation_divides_what_the_loss_was_multiplied_by():
    def train(parts):
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        model, sgd, batches = holdfast.prepare(model, sgd, loader(), accumulate=parts, **settings())
        for x, y in batches:
            (F.cross_entropy(model(x), y) / parts).backward()
            if batches.last:
                sgd.step()
        return model_sha256(model), batches.metrics["loss"]

    assert train(4) == train(1)


def start():
    model = net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_what_cannot_be_done_is_said_in_one_line():
    model, sgd = start()
    for wrong, message in (
        (lambda: holdfast.prepare(nn.Linear, sgd, loader()), "model must be a torch.nn.Module or a list"),
        (lambda: holdfast.prepare(model, lambda p: p, loader()), "optimizer must be a torch.optim.Optimizer"),
        (lambda: holdfast.prepare(model, [sgd, sgd], loader()), "optimizers 0 and 1 have a parameter in common"),
        (lambda: holdfast.prepare(model, sgd, loader(), clip_grad_norm=1.0), "with one optimizer call torch.nn.utils"),
        (lambda: holdfast.prepare(model, sgd, loader(), accumulate=0), "accumulate must be at least 1, got 0"),
        (
            lambda: holdfast.prepare(model, sgd, loader(), **settings(overlap_optimizer=True)),
            "--overlap-optimizer cannot be",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            wrong()


def iteration(batches, model):
    x, y = next(iter(batches))
    return F.cross_entropy(model(x), y)


def test_misuse_of_the_loop_is_said_where_it_happens():
    model, sgd = start()
    model, sgd, batches = holdfast.prepare(model, sgd, loader(), **settings(workers=1, slices=1))
    loss = iteration(batches, model)
    with pytest.raises(ScriptError, match=r"optimizer.step\(\) was called before loss.backward\(\) in step 0"):
        sgd.step()
    with pytest.raises(ScriptError, match="call backward on one scalar"):
        torch.autograd.backward([loss, loss])
    loss.backward()
    with pytest.raises(ScriptError, match="backward was called twice for a slice of step 0: add up the losses"):
        loss.backward()
    with pytest.raises(ScriptError, match="without a closure"):
        sgd.step(lambda: loss)
    sgd.step()
    with pytest.raises(ScriptError, match=r"optimizer.step\(\) was called twice in step"):
        sgd.step()
    with pytest.raises(ScriptError, match=r"create the scheduler before holdfast\.prepare"):
        torch.optim.lr_scheduler.StepLR(sgd, 1)


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (lambda loss, sgd: None, r"a slice of step 0 ended without loss.backward\(\)"),
        (lambda loss, sgd: loss.backward(), r"step 0 ended without optimizer.step\(\)"),
    ],
)
def test_an_iteration_that_leaves_something_out_is_named(does, message):
    model, sgd = start()
    model, sgd, batches = holdfast.prepare(model, sgd, loader(), **settings(workers=1, slices=1))

    def train():
        for x, y in batches:
            does(F.cross_entropy(model(x), y), sgd)

    with pytest.raises(ScriptError, match=message):
        train()


def test_clipping_the_gradient_of_a_slice_is_refused_with_several_optimizers():
    with pytest.raises(ScriptError, match=r"pass clip_grad_norm to holdfast\.prepare"):
        gan_with_clipping()


def gan_with_clipping():
    first, second = nn.Linear(8, 3), nn.Linear(3, 3)
    optimizers = [torch.optim.SGD(first.parameters(), lr=1.0), torch.optim.SGD(second.parameters(), lr=1.0)]
    _, (of_first, _), batches = holdfast.prepare([first, second], optimizers, loader(), **settings())
    for x, y in batches:
        F.cross_entropy(second(first(x)), y).backward()
        nn.utils.clip_grad_norm_(first.parameters(), 0.1)
        of_first.step()


def test_other_backward_passes_are_torchs_own():
    model, sgd = start()
    model, sgd, batches = holdfast.prepare(model, sgd, loader(), **settings(workers=1, slices=1))
    found = []
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()
        sgd.step()
        inputs = torch.ones(3, requires_grad=True)
        (inputs * 2).sum().backward()  # between two steps
        found.append(inputs.grad.tolist())
    assert found == [[2.0] * 3] * 8


def test_gradient_checkpointing_and_retained_graphs_work():
    model, sgd = start()
    model, sgd, batches = holdfast.prepare(model, sgd, loader(), **settings(workers=2, slices=2))
    for x, y in batches:
        hidden = torch.utils.checkpoint.checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)
        loss = F.cross_entropy(model[2:](hidden), y)
        loss.backward(retain_graph=True)
        assert torch.autograd.grad(loss, [hidden])[0].shape == hidden.shape
        sgd.step()
    assert batches.step == 8


def test_importing_holdfast_imports_no_torch_for_prepare():
    script = "import holdfast, sys; assert 'prepare' in dir(holdfast); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout.strip().lower()) is False


def test_a_worker_may_end_training_on_all():
    def train(*faults):
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        model, sgd, batches = holdfast.prepare(model, sgd, loader(), **settings(*faults))
        seen = []
        for _ in range(3):
            for x, y in batches:
                if batches.step == 10 and batches.last:
                    batches.stop()
                F.cross_entropy(model(x), y).backward()
                sgd.step()
            seen.append((batches.step, batches.stopped))
        return model_sha256(model), seen

    assert train() == train(*DEATHS)
    assert train()[1] == [(8, False), (11, True), (11, True)]
