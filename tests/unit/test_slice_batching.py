"""Slices that go through the model at once: the bits of a loop over them, and one by one wherever that is not so."""

import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

import holdfast
from holdfast.engine.run_log import RunLog
from holdfast.errors import ScriptError
from holdfast.faults.plan import FaultPlan, parse
from holdfast.models import slice_batching as at_once
from holdfast.models import slice_runner
from holdfast.models.slice_batching import TRIALS, BatchingTrial

SAMPLES, EPOCHS, SIDE, WORDS = 96, 3, 6, 11


def data(kind="numbers"):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, SIDE, 16, generator=generator)
    if kind == "words":
        x = torch.randint(0, WORDS, (SAMPLES, SIDE), generator=generator)
    return TensorDataset(x, torch.randint(0, 10, (SAMPLES,), generator=generator))


class Rows(nn.Module):
    """Layers whose rows do not mix: each sample by itself, though with all of its positions."""

    def __init__(self, **options):
        super().__init__()
        self.words = nn.Embedding(WORDS, 16) if options.get("words") else None
        self.norm = nn.LayerNorm(16, bias=options.get("norm_bias", True))
        self.middle = nn.Linear(16, 32)
        self.end = nn.Linear(32 * SIDE, 10, bias=options.get("bias", True))
        self.options = options

    def forward(self, x):
        x = x if self.words is None else self.words(x)
        x = F.relu(self.middle(self.norm(x)), inplace=self.options.get("in_place", False))
        return self.end(x.flatten(1))


def loss(output, y):
    return F.cross_entropy(output, y), {"accuracy": (output.argmax(1) == y).float().mean()}


def train(
    model, *, compute=True, dataset=None, batch=32, slices=4, calls=None, of=loss, collate=None, before=None, **settings
):
    """Train, by ``step.compute`` or by a loop; return the weights, and the figures of all steps."""
    settings = {"workers": 1, "seed": 3, "order": "fold"} | settings
    session = holdfast.Session(
        model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad]), slices=slices, **settings
    )
    figures = []
    for step in session.steps(data() if dataset is None else dataset, batch, EPOCHS, collate=collate):
        figures.append(session.metrics)
        if before is not None:
            before(step.number)
        if compute:
            step.compute(calls or model, of)
            continue
        for x, y in step:
            value, more = of((calls or model)(x), y)
            step.backward(value)
            step.log(**more)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, [*figures, session.metrics]


def same(got, expected):
    return got[1] == expected[1] and all(torch.equal(got[0][name], value) for name, value in expected[0].items())


@pytest.fixture
def seen(monkeypatch):
    """What sessions found; whichever way is faster, as long as the bits are the same slices go at once."""
    found = types.SimpleNamespace(tried=[], at_once=0)
    add, told, compute = BatchingTrial.add, RunLog.slices_tried, at_once.SliceBatching.compute

    def count(self, tried, *arguments):
        is_known = tried.is_over
        made = compute(self, tried, *arguments)
        found.at_once += is_known and made
        return made

    def tell(self, tried):
        found.tried.append(tried)
        told(self, tried)

    monkeypatch.setattr(BatchingTrial, "add", lambda self, *_, same: add(self, 0.0, 1.0, same=same))
    monkeypatch.setattr(RunLog, "slices_tried", tell)
    monkeypatch.setattr(at_once.SliceBatching, "compute", count)
    return found


def made(make):
    torch.manual_seed(2)
    return make()


class Frozen(Rows):
    def __init__(self):
        super().__init__()
        self.middle.weight.requires_grad_(False)
        self.norm.requires_grad_(False)


@pytest.fixture(autouse=True)
def in_double_precision():
    """On some processors float32 rows have other bits among others than alone, and slices then rightly go one by one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


SEPARABLE = {
    "linear, norm": (Rows, "numbers"),
    "words": (lambda: Rows(words=True), "words"),
    "without biases": (lambda: Rows(norm_bias=False, bias=False), "numbers"),
    "partly frozen": (Frozen, "numbers"),
}


@pytest.mark.parametrize("case", SEPARABLE)
def test_slices_go_at_once_with_the_bits_of_a_loop(seen, case):
    make, kind = SEPARABLE[case]
    dataset = data(kind)

    got = train(made(make), dataset=dataset)

    assert same(got, train(made(make), dataset=dataset, compute=False))
    assert [(tried.sizes, tried.why_not, tried.times) for tried in seen.tried] == [((8, 8, 8, 8), "", TRIALS)]
    assert seen.at_once == EPOCHS * 3 - TRIALS


def test_in_single_precision_the_bits_are_those_of_a_loop_too_whichever_way_this_processor_allows(seen):
    torch.set_default_dtype(torch.float32)

    assert same(train(made(Rows)), train(made(Rows), compute=False))
    (tried,) = seen.tried
    assert tried.why_not in ("", "the bits differ")
    assert seen.at_once == (EPOCHS * 3 - TRIALS if tried.why_not == "" else 0)


def test_slices_of_other_sizes_are_looked_at_by_themselves(seen):
    got = train(made(Rows), batch=42, slices=5)  # 8 and 9 samples; of the last mini-batch 2 and 3

    assert same(got, train(made(Rows), batch=42, slices=5, compute=False))
    whole = [tried for tried in seen.tried if sorted(tried.sizes) == [8, 8, 8, 9, 9]]
    assert whole
    # Whether 8 and 9 rows give a loop's bits in one pass is up to the kernels for this CPU.
    assert {tried.why_not for tried in whole} <= {"", "the bits differ"}
    assert seen.at_once >= 2 * any(not tried.why_not for tried in whole)
    assert seen.at_once == 0 or any(not tried.why_not for tried in seen.tried)


class Mixing(Rows):
    """What batch norm does, without a layer of that name."""

    def forward(self, x):
        return super().forward(x) - x.mean(0).sum()


class Dropping(Rows):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.1))


class Twice(Rows):
    def forward(self, x):
        return super().forward(self.norm(x))


class Unused(Rows):
    def __init__(self):
        super().__init__()
        self.more = nn.Linear(3, 3)


class ForNothing(Rows):
    def __init__(self):
        super().__init__()
        self.more = nn.Linear(16, 3)

    def forward(self, x):
        self.more(x)
        return super().forward(x)


class Places(Rows):
    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(SIDE, 16)

    def forward(self, x):
        return super().forward(x + self.places(torch.arange(SIDE)))


class Tied(Rows):
    def __init__(self):
        super().__init__()
        self.more = nn.Linear(16, 16)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.more.weight

    def forward(self, x):
        return super().forward(self.again(self.more(x)))


class OfEight(Rows):
    def forward(self, x):
        return super().forward(x.view(8, SIDE, 16))


class Hooked(Rows):
    def __init__(self):
        super().__init__()
        self.end.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class InPlace(Rows):
    """What comes out of a layer is a view of another tensor here, and autograd forgets where its gradient came by."""

    def __init__(self):
        super().__init__(in_place=True)


class Convolving(Rows):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(SIDE, SIDE, 1)

    def forward(self, x):
        return super().forward(self.first(x))


class Counting(Rows):
    """A buffer that a forward pass changes: each slice's is another at once."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().forward(x)


class Renorming(Rows):
    def __init__(self):
        super().__init__()
        self.more = nn.Embedding(3, 16, max_norm=1.0)

    def forward(self, x):
        return super().forward(x + self.more(torch.zeros(x.shape[:2], dtype=torch.int64)))


class Reusing(Rows):
    """A way from a layer's weights to the loss that is not the layer's, though nothing comes by it."""

    def forward(self, x):
        return super().forward(x) + 0.0 * self.end.weight.sum()


class Pruned(Rows):
    """Its weights are made of others on the way forward, in a layer of the same class."""

    def __init__(self):
        super().__init__()
        prune.l1_unstructured(self.end, "weight", 0.5)


INSEPARABLE = {
    Reusing: "a parameter enters the loss other than through its layer",
    Renorming: "more changes its weights in the forward pass, for max_norm",
    Mixing: "the bits differ",
    Counting: "the bits differ",
    Dropping: "the model draws random numbers",
    Twice: "an nn.LayerNorm is used more than once",
    Unused: "not every layer is used",
    ForNothing: "the parameters that enter the loss are not the ones that were trainable at first",
    Pruned: "an nn.Linear has weight_orig instead of a weight and a bias",
    InPlace: "the output of a layer does not enter the loss, or is modified in place",
    Places: "the input of an nn.Embedding does not have one row per sample",
    Tied: "again shares a parameter with another layer",
    OfEight: "in one batch it raises RuntimeError: shape",
    Hooked: "a parameter has a hook",
    Convolving: "first is a Conv1d, not Linear, LayerNorm, Embedding",
}


@pytest.mark.parametrize("make", INSEPARABLE)
def test_slices_go_one_by_one_where_the_bits_would_be_others(seen, make):
    got = train(made(make))

    assert same(got, train(made(make), compute=False))
    assert [tried.why_not.startswith(INSEPARABLE[make]) for tried in seen.tried] == [True], seen.tried
    assert seen.at_once == 0


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_comes_later_is_called_for_each_slice(seen, kind):
    def train_hooked(**more):
        model, called = made(Rows), []

        def hook(step):
            if step == TRIALS + 1:
                getattr(model.end.weight, kind)(lambda _: called.append(step))

        return train(model, before=hook, **more), called

    (got, called), (expected, calls) = train_hooked(), train_hooked(compute=False)

    assert same(got, expected)
    assert seen.at_once == 1
    assert len(called) == len(calls) == 4 * (3 * EPOCHS - TRIALS - 1)
    assert [tried.why_not for tried in seen.tried][1:] == ["a parameter has a hook"]


def freeze(model):
    model.middle.weight.requires_grad_(False)


def prune_half(model):
    prune.l1_unstructured(model.end, "weight", 0.5)


def drop_more(model):
    model.rate = 0.3


class Rising(Rows):
    """Dropout that draws nothing as long as its rate is 0."""

    rate = 0.0

    def forward(self, x):
        return super().forward(F.dropout(x, self.rate))


LATER = {
    freeze: "the parameters that enter the loss are not the ones that were trainable at first",
    prune_half: "an nn.Linear has weight_orig instead of a weight and a bias",
    drop_more: "the model draws random numbers",
}


@pytest.mark.parametrize("change", LATER)
def test_what_changes_after_the_trial_is_seen(seen, change):
    def train_changed(**more):
        model = made(Rising)
        return train(model, before=lambda step: change(model) if step == TRIALS + 1 else None, **more)[1]

    got = train_changed()

    assert got == train_changed(compute=False)
    assert got != train(made(Rising))[1]
    assert seen.at_once == 1 + 3 * EPOCHS - TRIALS, "the one of the step before it, and all that did not change"
    assert seen.tried[1].why_not.startswith(LATER[change])


def test_a_penalty_that_begins_later_counts(seen):
    """The trial has not seen it; gradients of layers alone would leave it out."""

    def train_held(**more):
        model, now = made(Rows), []

        def of(output, y):
            value, figures = loss(output, y)
            if now[-1] > TRIALS:
                value = value + 0.1 * model.end.weight.square().sum()
            return value, figures

        return train(model, of=of, before=now.append, **more)

    got = train_held()

    assert same(got, train_held(compute=False))
    assert not same(got, train(made(Rows)))
    assert seen.at_once == 1 + 3 * EPOCHS - TRIALS, "the one of the step before it, and all without a penalty"
    assert "other than through its layer" in seen.tried[1].why_not


def test_without_the_comparison_the_bits_are_others(seen, monkeypatch):
    monkeypatch.setattr(slice_runner, "has_bits", lambda *_: True)

    got = train(made(Mixing))

    assert seen.at_once
    assert not same(got, train(made(Mixing), compute=False))


def test_slices_go_one_by_one_where_that_is_faster():
    tried = BatchingTrial((8, 8))
    for at_once_s, one_by_one_s in ((9.0, 2.0), (0.95, 1.0), (5.0, 1.1)):
        assert not tried.is_over
        tried.add(at_once_s, one_by_one_s, same=True)

    assert (tried.is_over, tried.why_not) == (True, "batching is slower, or hardly faster")
    assert (tried.at_once_s, tried.one_by_one_s) == (0.95, 1.0)


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 10)

    def forward(self, x):
        return self.layer(x).mean(1)


class Texts:
    """Of as many positions as their numbers say."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        x, y = data()[number]
        return x[: 1 + number % SIDE], y


def padded(samples):
    return nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True), torch.stack([y for _, y in samples])


def test_shapes_that_change_from_step_to_step_are_left_alone(seen):
    texts = {"dataset": Texts(), "collate": padded, "batch": 6, "slices": 2}

    got = train(made(Pooled), **texts)

    assert same(got, train(made(Pooled), compute=False, **texts))
    assert [tried.why_not for tried in seen.tried] == ["sample shapes differ between slices, or between steps"]


FAULTS = {
    "deaths": (
        "kill:rank=1,step=3,phase=forward",
        "kill:rank=0,step=4,phase=backward",
        "kill:rank=2,step=5,phase=allreduce",
    ),
    "flips": ("flip:rank=1,step=5,target=activations,bits=20", "flip:rank=0,step=6,target=gradients,bits=20"),
}


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("order", ["fold", "tree"])
def test_faults_do_the_same_at_once(seen, faults, order):
    plan = FaultPlan(tuple(map(parse, FAULTS[faults]))).to_json()
    settings = {"workers": 4, "order": order, "slices": 8, "batch": 32, "faults": plan}

    got = train(made(Rows), **settings)

    assert seen.at_once
    assert same(got, train(made(Rows), compute=False, **settings))
    undisturbed, _ = train(made(Rows), **settings | {"faults": ""})
    assert all(torch.equal(got[0][name], value) for name, value in undisturbed.items()) == (faults == "deaths")


def test_a_scaler_and_an_average_and_clipping(seen):
    def train_with(**more):
        model = made(Rows)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        return train(
            model, scaler=scaler, clip_grad_norm=0.1, average=torch.optim.swa_utils.AveragedModel(model), **more
        )

    assert same(train_with(), train_with(compute=False))
    assert seen.at_once


def test_lower_precision_goes_one_by_one(seen):
    torch.set_default_dtype(torch.float32)  # autocast leaves double precision as it is

    def low(model):
        def forward(x):
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)

        return forward

    model, other = made(Rows), made(Rows)
    assert same(train(model, calls=low(model)), train(other, calls=low(other), compute=False))
    assert [tried.why_not for tried in seen.tried] == [
        "an nn.Linear changes the dtype, or its output requires no gradient"
    ]


def test_what_is_wrong_is_said():
    model = made(Rows)

    with pytest.raises(ScriptError, match="the loss must return a scalar, the mean over its slice"):
        train(model, of=lambda output, y: F.cross_entropy(output, y, reduction="none"))
    with pytest.raises(ScriptError, match="need a dataset of tuples, the model's input first, got Tensor"):
        train(model, dataset=torch.randn(SAMPLES, SIDE, 16))
    with pytest.raises(ZeroDivisionError):
        train(model, of=lambda output, y: 1 / 0)
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), 0.1), slices=2)
    step = next(session.steps(data(), 8))
    for _ in step:
        with pytest.raises(ScriptError, match=r"call it instead of `for \.\.\. in step`"):
            step.compute(model, loss)
        break


def test_a_pipeline_has_its_stages_and_its_loss():
    pipeline = holdfast.Pipeline([lambda: nn.Sequential(nn.Flatten(), nn.Linear(96, 10))], F.cross_entropy)
    session = holdfast.Session(pipeline, lambda parameters: torch.optim.SGD(parameters, 0.1), slices=2)

    with pytest.raises(ScriptError, match=r"call step\.compute\(\) without arguments"):
        next(session.steps(data(), 8)).compute(pipeline, F.cross_entropy)
