"""What a forward pass changes besides gradients: buffers, parameters; and layers that would need other workers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from written_plans import plan

import holdfast
from holdfast.errors import ConfigError, ScriptError
from holdfast.models.training_state import model_sha256
from holdfast.session import gradient_hook

SAMPLES, BATCH = 48, 12
DEATHS = ("kill:rank=1,step=1,phase=backward", "kill:rank=3,step=2,phase=allreduce")


def data():
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


class Normaliser(nn.Module):
    """Statistics of all samples so far, as of an agent's observations, and the newest ones."""

    def __init__(self, rows=24):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("newest", torch.zeros(rows, 4))
        self.register_buffer("filled", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        if self.training:
            at = int(self.filled) % len(self.newest)
            self.newest[at : at + len(x)] = x
            self.filled += len(x)
            self.seen += len(x)
            self.total += x.sum(0)
        return self.layer(x - self.total / self.seen.clamp(min=1))


CHOICES = {"seen": "sum", "tot*": "sum", "newest": "first", "filled": "first"}


def train(model, *, slices=4, workers=4, epochs=1, buffers=None, faults="", **settings):
    session = holdfast.Session(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        **({"buffers": buffers} if buffers else {}),
        **{"fabric": "virtual", "workers": workers, "slices": slices, "faults": faults, **settings},
    )
    for step in session.steps(data(), BATCH, epochs, shuffle=False):
        for x, y in step:
            step.backward(F.mse_loss(model(x), y))
    return model


def made(build=Normaliser):
    torch.manual_seed(0)
    return build()


def test_each_buffer_ends_as_it_was_chosen():
    x = data().tensors[0]

    model = train(made(), buffers=CHOICES)

    assert int(model.seen) == SAMPLES
    torch.testing.assert_close(model.total, x.sum(0))
    firsts = torch.cat([x[step * BATCH :][: BATCH // 4] for step in range(4)])
    assert torch.equal(model.newest[:BATCH], firsts), "the first slice of each of the four steps, bit for bit"
    assert int(model.filled) == BATCH


def test_choices_do_not_depend_on_who_computes_which_slice():
    undisturbed = model_sha256(train(made(), buffers=CHOICES, workers=1))

    assert model_sha256(train(made(), buffers=CHOICES, faults=plan(*DEATHS))) == undisturbed
    assert model_sha256(train(made(), workers=1)) != undisturbed, "the means are others"


def test_a_module_may_choose_for_its_own_buffers():
    class Chosen(Normaliser):
        holdfast_buffers = {"seen": "sum", "total": "sum", "newest": "first", "filled": "first"}  # noqa: RUF012

    assert model_sha256(train(made(Chosen))) == model_sha256(train(made(), buffers=CHOICES))


def test_without_a_choice_buffers_are_named_once_with_what_becomes_of_them(capsys):
    train(made(), epochs=2)

    said = capsys.readouterr().err
    assert said.count("the forward pass changes the buffers seen, total, newest, filled, which") == 1
    assert 'buffers={"seen": "mean"}' in said


def quiet_layers():
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    older = nn.utils.spectral_norm(nn.Linear(4, 4))
    return nn.Sequential(spectral, nn.BatchNorm1d(4), older, nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (quiet_layers, {}),
        (Normaliser, {"buffers": {"*": "mean"}}),
        (Normaliser, {"slices": 1, "workers": 1}),
        (lambda: Normaliser().eval(), {}),
    ],
    ids=["layers of torch", "chosen", "one slice", "not changed"],
)
def test_nothing_is_said_of_what_is_right(build, arguments, capsys):
    train(made(build), **arguments)

    assert "the forward pass" not in capsys.readouterr().err


def test_a_large_buffer_may_change_by_choice():
    undisturbed = train(made(lambda: Normaliser(1 << 15)), buffers={"newest": "first", "*": "mean"})
    model = train(made(lambda: Normaliser(1 << 15)), buffers={"newest": "first", "*": "mean"}, faults=plan(*DEATHS))

    assert model_sha256(model) == model_sha256(undisturbed)
    assert torch.equal(model.newest[:3], data().tensors[0][:3])
    with pytest.raises(ScriptError, match=r'newest of 131072 elements.*pass buffers={"newest": "mean"}'):
        train(made(lambda: Normaliser(1 << 15)))


@pytest.mark.parametrize(
    ("buffers", "said"),
    [({"seen": "max"}, "must be one of mean, sum, first, got 'max'"), ({"sen": "sum"}, "matches no buffer")],
)
def test_a_choice_that_does_not_exist_is_refused(buffers, said):
    with pytest.raises(ConfigError, match=said):
        train(made(), buffers=buffers)


def test_a_stage_of_a_pipeline_has_choices_by_its_number():
    class Kept(Normaliser):
        def forward(self, x):
            super().forward(x)
            return x * self.layer.weight.sum()

    def train_split(buffers):
        torch.manual_seed(0)
        model = holdfast.Pipeline([Kept, lambda: nn.Linear(4, 1)], F.mse_loss)
        session = holdfast.Session(
            model, lambda p: torch.optim.SGD(p, lr=0.01), buffers=buffers, fabric="virtual", workers=2, slices=4
        )
        for step in session.steps(data(), BATCH, shuffle=False):
            step.compute()
        return model.module[0]

    stage = train_split({"0.seen": "sum", "0.newest": "first", "0.*": "mean"})

    assert int(stage.seen) == SAMPLES
    assert torch.equal(stage.newest[9:12], data().tensors[0][36:39]), "the mean of what is filled is 3 rows a step"


# -- parameters


class Student(nn.Module):
    """A student and its teacher, which has no gradient."""

    def __init__(self, move=None):
        super().__init__()
        self.student, self.move = nn.Linear(4, 1), move
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def follow(self):
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                MOVES[self.move or "in place"](slow, fast)

    def forward(self, x):
        if self.move:
            self.follow()
        return self.student(x) + self.teacher(x)


def assign(slow, fast):
    slow.data = slow.data * 0.9 + fast.data * 0.1


MOVES = {
    "in place": lambda slow, fast: slow.mul_(0.9).add_(fast, alpha=0.1),
    "data in place": lambda slow, fast: slow.data.mul_(0.9).add_(fast.data, alpha=0.1),
    "assigned": assign,
}


@pytest.mark.parametrize(("move", "workers"), [("in place", 1), *((move, 4) for move in MOVES)])
def test_a_teacher_that_forward_moves_is_refused_in_the_first_step(move, workers):
    model = made(lambda: Student(move))
    with torch.no_grad():
        model.student.weight += 1.0

    with pytest.raises(ScriptError, match=r"the forward pass changed the parameter teacher\.weight, which has no"):
        train(model, workers=workers)


@pytest.mark.parametrize("move", ["in place", "assigned"])
def test_a_teacher_that_forward_moves_later_is_refused_then(move):
    class Late(Student):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 9:
                self.follow()
            return self.student(x) + self.teacher(x)

    model = made(lambda: Late())
    model.move = move

    with pytest.raises(ScriptError, match=r"the parameter teacher\.weight, which has no gradient"):
        train(model)


def test_a_frozen_weight_that_is_written_with_its_own_values_is_no_change():
    class Clamped(Student):
        def forward(self, x):
            with torch.no_grad():
                self.teacher.weight.clamp_(-9.0, 9.0)
            return self.student(x) + self.teacher(x)

    train(made(Clamped), epochs=2)


class Taught(nn.Module):
    """A student, and a teacher whose tensors were made in inference mode: they have no version."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(4, 1)
        with torch.inference_mode():
            self.teacher = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1)).requires_grad_(False).eval()

    def forward(self, x):
        with torch.inference_mode():
            target = self.teacher(x)
        return self.student(x) + target.clone()


def test_a_teacher_that_was_made_in_inference_mode_is_kept_and_restored(tmp_path):
    def taught(**arguments):
        model = made(Taught)
        sgd = torch.optim.SGD(model.student.parameters(), lr=0.1)
        session = holdfast.Session(model, sgd, fabric="virtual", workers=4, slices=4, **arguments)
        for step in session.steps(data(), BATCH, 2, shuffle=False):
            for x, y in step:
                step.backward(F.mse_loss(model(x), y))
        return model_sha256(model)

    undisturbed, kept = taught(), {"checkpoint_dir": str(tmp_path)}
    assert taught(faults=plan(*DEATHS)) == undisturbed
    with pytest.raises(SystemExit):
        taught(stop_after=2, **kept)
    assert taught(resume=True, **kept) == undisturbed


def moved_in_a_session(**arguments):
    model = made(Student)
    session = holdfast.Session(
        model,
        torch.optim.SGD(model.student.parameters(), lr=0.1),
        **{"fabric": "virtual", "workers": 4, "slices": 4, **arguments},
    )
    for step in session.steps(data(), BATCH, 2, shuffle=False):
        if step.number > 0 and step.attempt == 0:
            model.follow()
        for x, y in step:
            step.backward(F.mse_loss(model(x), y))
    return model_sha256(model)


def test_a_teacher_that_moves_between_steps_has_the_same_bits_after_deaths():
    assert moved_in_a_session(faults=plan(*DEATHS)) == moved_in_a_session()


def test_a_teacher_that_moves_after_the_slices_is_refused_because_the_step_may_be_computed_again():
    model = made(Student)
    sgd = torch.optim.SGD(model.student.parameters(), lr=0.1)
    session = holdfast.Session(model, sgd, fabric="virtual", workers=2, slices=2)

    def trains():
        for step in session.steps(data(), BATCH, 2, shuffle=False):
            for x, y in step:
                step.backward(F.mse_loss(model(x), y))
            model.follow()

    with pytest.raises(
        ScriptError, match=r"the loop changed the parameter teacher\.weight.* before the slices of the next"
    ):
        trains()


@pytest.mark.parametrize("asks", [True, False])
def test_in_a_prepared_loop_a_teacher_moves_where_the_step_is_committed(asks):
    def moved(**arguments):
        model = made(Student)
        sgd = torch.optim.SGD(model.student.parameters(), lr=0.1)
        settings = {"fabric": "virtual", "workers": 4, "slices": 4, **arguments}
        model, sgd, loader = holdfast.prepare(model, sgd, DataLoader(data(), BATCH), **settings)
        for x, y in loader:
            sgd.zero_grad()
            F.mse_loss(model(x), y).backward()
            sgd.step()
            if loader.committed or not asks:
                model.follow()
        return model_sha256(model)

    if asks:
        assert moved(faults=plan(*DEATHS)) == moved()
    else:  # four virtual workers of one process: its loop has four slices a step, as after deaths
        with pytest.raises(ScriptError, match=r"the loop changed the parameter teacher\.weight.*loader\.committed"):
            moved()
        gradient_hook.forget()


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x + self.table(x.abs().sum(1).long() % 8))


class Initialised(nn.Module):
    """A layer whose scale comes from the first samples that it sees, in a way that torch does not count."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale, self.is_new = nn.Linear(4, 1), nn.Parameter(torch.ones(4)), True

    def forward(self, x):
        if self.is_new:
            self.scale.data.copy_(x.std(0))
            self.is_new = False
        return self.layer(x * self.scale)


@pytest.mark.parametrize(("build", "name"), [(Renormed, "table.weight"), (Initialised, "scale")])
def test_weights_that_forward_changes_itself_are_named(build, name, capsys):
    train(made(build))

    assert capsys.readouterr().err.count(f"a slice changes the weights {name} themselves") == 1


# -- layers


class OwnSyncBatchNorm(nn.BatchNorm1d):
    """As some libraries have one."""


@pytest.mark.parametrize("layer", [nn.SyncBatchNorm, OwnSyncBatchNorm])
@pytest.mark.parametrize("how", ["session", "prepare", "sharded", "pipeline"])
def test_a_batch_norm_over_all_workers_is_refused(layer, how):
    model = nn.Sequential(nn.Linear(4, 4), layer(4), nn.Linear(4, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"fabric": "virtual", "workers": 2}

    def begin():
        if how == "session":
            holdfast.Session(model, sgd, **settings)
        elif how == "prepare":
            holdfast.prepare(model, sgd, DataLoader(data(), BATCH), **settings)
        elif how == "sharded":
            holdfast.Session(holdfast.Sharded(model), lambda p: torch.optim.SGD(p, lr=0.1), **settings)
        else:
            split = holdfast.Pipeline([lambda: model, lambda: nn.Linear(1, 1)], F.mse_loss)
            session = holdfast.Session(split, lambda p: torch.optim.SGD(p, lr=0.1), **settings)
            next(iter(session.steps(data(), BATCH)))

    with pytest.raises(ConfigError, match=rf"1 is a {layer.__name__}, which would act as BatchNorm of each slice"):
        begin()
