"""A model that is spread over workers, here all of one process: the same bits as replicated, and what a script is told."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planned import faults
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.errors import CheckpointError, ConfigError, ScriptError, StateLost, TooFewWorkers

SAMPLES = 30


class Tied(nn.Module):
    """Its last layer has the weight of its first, and its second is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen = nn.Linear(13, 13), nn.Linear(13, 13)
        self.last = nn.Linear(13, 13)
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x):
        return self.last(self.frozen(self.first(x).relu()).relu())


class Mixed(nn.Module):
    """Parameters of three types of number, one without an element, and a buffer that is not in its state."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(13, 7), nn.Linear(7, 5).double()
        self.norm = nn.BatchNorm1d(7)
        self.c = nn.Linear(5, 3, bias=False).bfloat16()
        self.empty = nn.Parameter(torch.zeros(0))
        self.d = nn.Linear(3, 4)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.calls += 1
        x = self.b(self.norm(self.a(x)).relu().double())
        return self.d(self.c(x.bfloat16()).float()) + self.empty.sum()


class Sometimes(nn.Module):
    """One of its layers is used for some samples only."""

    def __init__(self):
        super().__init__()
        self.always, self.rare, self.never = nn.Linear(13, 4), nn.Linear(13, 4), nn.Linear(13, 4)

    def forward(self, x):
        out = self.always(x)
        return out + self.rare(x) if x[0, 0] > 0.5 else out


MODELS = {
    "odd": lambda: nn.Sequential(nn.Linear(13, 33), nn.Tanh(), nn.Dropout(0.2), nn.Linear(33, 7), nn.Linear(7, 5)),
    "tied": Tied,
    "mixed": Mixed,
    "sometimes": Sometimes,
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]()


def dataset():
    x = torch.randn(SAMPLES, 13, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


def train(model, session, each=lambda step: None, **arguments):
    """Train for two epochs of four steps, the last one of each smaller."""
    for step in session.steps(dataset(), 8, 2, **arguments):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        each(step)


def state_by_name(model, optimizers):
    """Weights, buffers and what the optimizers know, by name."""
    found = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    names = {id(p): name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            found |= {f"{names[id(parameter)]} {what}": torch.as_tensor(value) for what, value in state.items()}
    return found


def optimizers_of(session):
    return [part.optimizer for part in session._trainable.resident.held.values()]


def both(name, optimizer="adam", scheduler=None, shards=0, faults="", scaler=lambda: None, **settings):
    """Train replicated and in shards; return both states. The faults strike the shards."""
    settings = {"workers": 3, "slices": 3} | settings
    model = make(name)
    made = OPTIMIZERS[optimizer](model.parameters())
    session = holdfast.Session(model, made, scheduler=scheduler and scheduler(made), scaler=scaler(), **settings)
    train(model, session)
    whole = state_by_name(model, [made])

    model = make(name)
    spread = holdfast.Sharded(model, shards=shards)
    settings |= {"scheduler": scheduler, "scaler": scaler(), "faults": faults}
    session = holdfast.Session(spread, OPTIMIZERS[optimizer], **settings)
    train(model, session)
    return whole, state_by_name(model, optimizers_of(session))


def check_equal(whole, spread):
    """The same names, and behind each the same bits."""
    assert whole.keys() == spread.keys()
    different = [name for name in whole if not torch.equal(whole[name], spread[name])]
    assert different == []
    assert len(whole) > 4


# -- the same bits


@pytest.mark.parametrize(
    ("name", "optimizer"), [*((name, "adam") for name in MODELS), ("odd", "sgd"), ("tied", "adamw")]
)
def test_all_state_is_that_of_the_replicated_model(name, optimizer):
    check_equal(*both(name, optimizer))


@pytest.mark.parametrize(("workers", "shards"), [(1, 0), (2, 4), (4, 2), (4, 0)])
def test_the_numbers_of_workers_and_of_shards_change_no_bit(workers, shards):
    check_equal(*both("odd", workers=workers, shards=shards))


def test_the_norm_that_clips_is_that_of_all_shards_together():
    clipped, spread = both("odd", "sgd", clip_grad_norm=0.01)
    free, _ = both("odd", "sgd")

    check_equal(clipped, spread)
    assert not torch.equal(clipped["0.weight"], free["0.weight"])


def test_a_scaler_leaves_the_same_steps_out():
    made = []

    def scaler():
        made.append(torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_factor=1.7, growth_interval=2))
        return made[-1]

    settings = {"clip_grad_norm": 0.5, "faults": faults("kill:rank=1,step=0,phase=optimizer", "kill:rank=2,step=4")}
    scaled, spread = both("mixed", scaler=scaler, **settings)

    check_equal(scaled, spread)
    steps = {int(value) for name, value in scaled.items() if name.endswith(" step")}
    assert len(steps) == 1
    assert 1 <= steps.pop() < 7
    assert made[0].state_dict() == made[1].state_dict()


@pytest.mark.parametrize("name", ["mixed", "tied"])
def test_the_average_of_the_weights_is_that_of_the_replicated_model(tmp_path, name):
    def train_with(model, average, **settings):
        wraps, make_optimizer = isinstance(model, holdfast.Sharded), OPTIMIZERS["adam"]
        module = model.module if wraps else model
        optimizer = make_optimizer if wraps else make_optimizer(model.parameters())
        session = holdfast.Session(model, optimizer, average=average, workers=3, slices=3, **settings)
        train(module, session)
        return state_by_name(module, [])

    module = make(name)
    average = make_average(module)
    train_with(module, average)
    strikes = faults("kill:rank=1,step=2,phase=optimizer", "kill:rank=0,step=5,phase=backward")
    kept = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 3}
    spread = holdfast.Sharded(make(name), shards=2)
    with pytest.raises(TooFewWorkers):
        train_with(spread, make_average, faults=strikes, min_workers=2, **kept)
    spread = holdfast.Sharded(make(name), shards=2)
    train_with(spread, make_average, resume=True, **kept)

    module = make(name)
    plain = plainly_averaged(module, OPTIMIZERS["adam"](module.parameters()))
    check_equal(state_by_name(plain, []), state_by_name(average.module, []))
    check_equal(state_by_name(plain, []), state_by_name(spread.averaged, []))
    assert not torch.equal([*spread.averaged.parameters()][-1], [*spread.module.parameters()][-1])


def make_average(module):
    return AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def plainly_averaged(model, optimizer):
    """Train, and update an average where the script does it: in the loop, when the step before is committed."""
    average = make_average(model)
    session = holdfast.Session(model, optimizer, workers=3, slices=3)
    for step in session.steps(dataset(), 8, 2):
        if step.number:
            average.update_parameters(model)
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
    average.update_parameters(model)
    return average.module


@pytest.mark.parametrize("schedule", ["step", "epoch"])
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    ],
)
def test_every_shard_has_the_learning_rate_of_the_scheduler(scheduler, schedule):
    check_equal(*both("odd", scheduler=scheduler, schedule=schedule))


@pytest.mark.parametrize(
    "specs",
    [
        ("kill:rank=1,step=2,phase=handover", "kill:rank=0,step=5,phase=backward"),
        ("kill:rank=2,step=3,phase=allreduce,bucket=0", "kill:rank=0,step=3,phase=recovery"),
        ("kill:rank=0,step=3,phase=optimizer", "kill:rank=2,step=3,phase=rehome"),
    ],
)
def test_deaths_change_no_bit(specs):
    check_equal(*both("mixed", workers=4, bucket_bytes=256, faults=faults(*specs)))


# -- inside the loop, and after it


def test_the_model_can_be_evaluated_inside_the_loop_and_saved_after_it(tmp_path):
    model = make("odd")
    session = holdfast.Session(holdfast.Sharded(model), OPTIMIZERS["sgd"], workers=3)
    inputs, seen = dataset().tensors[0], []

    def evaluate(step):
        with torch.no_grad():
            seen.append(model.eval()(inputs).sum().item())
        model.train()

    train(model, session, evaluate)
    torch.save(model.state_dict(), tmp_path / "model.pt")

    assert len(set(seen)) == session.step == 8, "another model in each step"
    again = make("odd")
    again.load_state_dict(torch.load(tmp_path / "model.pt"))
    with torch.no_grad():
        assert torch.equal(again.eval()(inputs), model.eval()(inputs))
        assert again(inputs).sum().item() not in seen


def test_parameters_begin_where_memory_of_their_own_could():
    model = make("odd")
    session = holdfast.Session(holdfast.Sharded(model), OPTIMIZERS["sgd"], workers=2)

    train(model, session)

    assert [p.data_ptr() % 64 for p in model.parameters()] == [0] * 6
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 2, "they lie in a row a shard"


# -- cutting


def sizes_and_shards():
    sizes = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 5000)), min_size=1, max_size=25)
    return sizes.flatmap(lambda chosen: st.tuples(st.just(chosen), st.integers(1, len(chosen))))


@given(sizes_and_shards())
def test_a_cut_has_every_name_once_in_order_and_no_shard_is_empty_or_much_too_large(case):
    sizes, shards = case
    model = nn.ParameterDict({f"p{i:02}": nn.Parameter(torch.empty(size)) for i, size in enumerate(sizes)})

    groups = holdfast.Sharded(model).shard_names(shards)

    assert [name for group in groups for name in group] == list(dict(model.named_parameters()))
    assert len(groups) == shards
    assert all(groups)
    largest = max(sum(model[name].numel() for name in group) for group in groups)
    assert largest <= sum(sizes) / shards + max(sizes)


# -- bad input


def session_of(model=None, optimizer=OPTIMIZERS["sgd"], **arguments):
    return holdfast.Session(holdfast.Sharded(model or make("odd")), optimizer, **({"workers": 2} | arguments))


@pytest.mark.parametrize(
    ("said", "begin"),
    [
        ("shards must be from 1 to 6, .* or 0, got 7", lambda: holdfast.Sharded(make("odd"), shards=7)),
        ("shards must be from 1 to 6, .* or 0, got -1", lambda: holdfast.Sharded(make("odd"), shards=-1)),
        ("7 workers cannot each hold a shard of 6 parameter tensors.*shards=6", lambda: session_of(workers=7)),
        ("Sharded needs a function that returns an average.* got an average", lambda: session_of(average=make_average(make("odd")))),
        ("average must be a .*AveragedModel of the model, got function", lambda: holdfast.Session(make("odd"), OPTIMIZERS["sgd"](make("odd").parameters()), average=make_average)),
        ("needs a function .* got an optimizer", lambda: session_of(optimizer=OPTIMIZERS["sgd"](make("odd").parameters()))),
        ("strategy must be rollback, restart, reinit or partial for a Sharded model, got forward", lambda: session_of(strategy="forward")),
        (r"a Sharded model must be on cpu or cuda, got \S+ on meta: move it there", lambda: session_of(make("odd").to("meta"))),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_at_once(said, begin):
    with pytest.raises(ConfigError, match=said) as refused:
        begin()

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("said", "optimizer"),
    [
        ("the function that makes the optimizer of a shard must return .* got list", list),
        ("the optimizer has parameters that are not the model's", lambda p: OPTIMIZERS["sgd"](make("odd").parameters())),
    ],
)  # fmt: skip
def test_a_function_that_makes_something_else_is_refused(said, optimizer):
    model = make("odd")

    with pytest.raises(ConfigError, match=said):
        train(model, session_of(model, optimizer))


def test_it_is_trained_once():
    model = make("odd")
    session = session_of(model)
    train(model, session)

    with pytest.raises(ScriptError, match="trained in one call"):
        train(model, session)


# -- checkpoints


def trained(tmp_path, shards, workers, **arguments):
    """Train with a checkpoint after every third step; return the state."""
    model = make("odd")
    saving = {"checkpoint_dir": str(tmp_path / "c"), "checkpoint_every": 3}
    spread = holdfast.Sharded(model, shards=shards)
    session = holdfast.Session(spread, OPTIMIZERS["adam"], workers=workers, slices=3, **saving, **arguments)
    train(model, session)
    return state_by_name(model, optimizers_of(session))


def test_a_checkpoint_is_gone_on_from_by_any_number_of_workers(tmp_path):
    whole, _ = both("odd")
    with pytest.raises(SystemExit):
        trained(tmp_path, 3, 4, stop_after=4)

    spread = trained(tmp_path, 3, 2, resume=True)

    check_equal(whole, spread)


@pytest.mark.parametrize("shards", [2, 4])
def test_a_checkpoint_of_another_number_of_shards_is_refused(tmp_path, shards):
    trained(tmp_path, 3, 3)

    with pytest.raises(CheckpointError, match=rf"holds 3 shards, this session has {shards}: .*shards=3\)"):
        trained(tmp_path, shards, 3, resume=True)


def test_a_shard_that_nobody_holds_is_loaded_or_the_state_is_lost(tmp_path):
    both_holders = faults("kill:rank=1,step=5", "kill:rank=2,step=5")
    model = make("odd")

    with pytest.raises(StateLost, match="the job must start over"):
        train(model, session_of(model, workers=4, faults=both_holders))

    check_equal(trained(tmp_path / "a", 4, 4), trained(tmp_path / "b", 4, 4, faults=both_holders))
