"""A pipeline, with virtual workers: the bits of a plain loop, what is lost and what comes back, and what errors say."""

import copy
import itertools

import numpy as np
import pytest
import torch
from planned import faults
from reference import key
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.checkpoint import steps
from holdfast.engine import loop as run
from holdfast.engine.restorer import StateRestorer
from holdfast.errors import CheckpointError, ConfigError, PeerFailed, ScriptError, TooFewWorkers
from holdfast.faults.process import Injector
from holdfast.launch.control import append
from holdfast.models.pipeline import PipelineModel
from holdfast.models.pipeline_scaler import ScaledStage
from holdfast.models.stages import StageRunner
from holdfast.records.files import read_run
from holdfast.records.paths import requests_path
from holdfast.records.types import PartRestored, Recovered, RunStarted
from holdfast.state.context import RecoveryContext

SAMPLES, BATCH, EPOCHS, SLICES, SEED = 23, 8, 2, 3, 5
STEPS = EPOCHS * 3


class Steep(nn.Module):
    """Changes nothing on the way forward; what goes back is a thousand times as large."""

    def forward(self, x):
        return x + 1000 * (x - x.detach())


STAGES = {
    "awkward": [
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        lambda: nn.Sequential(nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 8)),
        lambda: nn.Sequential(nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)),
    ],
    "one": [lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Dropout(0.5), nn.Linear(8, 3))],
    "layers": [
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8)),
        lambda: nn.BatchNorm1d(8),
        lambda: nn.Linear(8, 8),
        lambda: nn.Linear(8, 5),
        lambda: nn.Linear(5, 3),
    ],
    "steep": [
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)),
        lambda: nn.Sequential(Steep(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 8)),
        lambda: nn.Sequential(nn.ReLU(), nn.Linear(8, 3)),
    ],
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
}
SCHEDULERS = {
    "none": (None, "step"),
    "step": (lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5), "step"),
    "epoch": (lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5), "epoch"),
    "plateau": (
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.99),
        "epoch",
    ),
}


def dataset():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 1, 6, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    )


def made(stages, part):
    """A stage as it is at the beginning of training."""
    if isinstance(stages[part], nn.Module):
        return stages[part]
    torch.manual_seed(key("part", SEED, part))
    return stages[part]()


def make_scaler():
    """Of so large a scale that steps overflow, in the first stage if that is steep."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_factor=1.7, growth_interval=1)


def make_average(module):
    return AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def plainly(
    stages, make_optimizer, make_scheduler=None, schedule="step", largest_norm=None, scaler=None, averages=None
):
    """The judge: stages and optimizers, and ``averages`` of the stages, after training in plain torch, written without Holdfast."""
    x, y = dataset().tensors
    modules = [made(stages, part) for part in range(len(stages))]
    optimizers = [make_optimizer(module.parameters()) for module in modules]
    schedulers = [make_scheduler(optimizer) for optimizer in optimizers] if make_scheduler else []
    averages = [] if averages is None else averages
    averages += map(make_average, modules)
    step = 0
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(key("order", SEED, epoch)))
        for first in range(0, SAMPLES, BATCH):
            ids = order[first : first + BATCH]
            start = [[b.clone() for b in module.buffers()] for module in modules]
            ends = []
            loss_sum = 0.0
            for number in range(SLICES):
                mine = ids[number * len(ids) // SLICES : (number + 1) * len(ids) // SLICES]
                given, outputs = [x[mine]], []
                for part, module in enumerate(modules):
                    for buffer, begin in zip(module.buffers(), start[part], strict=True):
                        buffer.copy_(begin)
                    torch.manual_seed(key("slice", SEED, step, number, part))
                    outputs.append(module(given[-1]))
                    given.append(outputs[-1].detach().requires_grad_())
                loss = F.cross_entropy(outputs[-1], y[mine])
                loss_sum += loss.item() * len(mine)
                (loss * len(mine) if scaler is None else scaler.scale(loss * len(mine))).backward()
                for part in reversed(range(1, len(modules))):
                    outputs[part - 1].backward(given[part].grad)
                ends.append([[b.clone() for b in module.buffers()] for module in modules])
            for part, module in enumerate(modules):
                for i, (buffer, begin) in enumerate(zip(module.buffers(), start[part], strict=True)):
                    mean = torch.stack([end[part][i] for end in ends]).sum(0) / len(ends)
                    buffer.copy_(mean if buffer.is_floating_point() else begin + 1)
                for parameter in module.parameters():
                    parameter.grad /= len(ids)
            for optimizer in optimizers if scaler else ():
                scaler.unscale_(optimizer)
            if largest_norm is not None:
                gradients = [[p.grad for p in module.parameters()] for module in modules]
                norms = torch.stack([nn.utils.get_total_norm(of_stage).double() for of_stage in gradients])
                for module in modules:
                    nn.utils.clip_grads_with_norm_(module.parameters(), largest_norm, norms.norm())
            finite = all(p.grad.isfinite().all() for module in modules for p in module.parameters())
            for optimizer in optimizers:
                if scaler is None or finite:
                    optimizer.step()
                optimizer.zero_grad()
            if scaler is not None:
                scaler.update()
            step += 1
            for scheduler in schedulers if schedule == "step" or first + BATCH >= SAMPLES else ():
                plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(*([loss_sum / len(ids)] if plateau else []))
            for average, module in zip(averages, modules, strict=True):
                average.update_parameters(module)
    return modules, optimizers


def loss_of(output, labels):
    return F.cross_entropy(output, labels), {"accuracy": (output.argmax(1) == labels).float().mean()}


def begin(
    stages=STAGES["awkward"],
    optimizer="adam",
    scheduler="none",
    loss=loss_of,
    largest_norm=None,
    scaler=None,
    average=None,
    **settings,
):
    make_scheduler, schedule = SCHEDULERS[scheduler]
    model = holdfast.Pipeline(stages, loss)
    options = {"scheduler": make_scheduler, "schedule": schedule, "clip_grad_norm": largest_norm, "scaler": scaler}
    options["average"] = average
    settings = {"workers": 4, "slices": SLICES, "seed": SEED, "bucket_bytes": 512} | settings
    return model, holdfast.Session(model, OPTIMIZERS[optimizer], **options, **settings)


def train(session, each=lambda step: None, compute=lambda step: step.compute()):
    for step in session.steps(dataset(), BATCH, EPOCHS):
        compute(step)
        each(step)


def recovered(run_dir):
    """What was decided, once for each recovery, with what was lost."""
    said = [r for r in read_run(run_dir) if isinstance(r, Recovered)]
    return list(dict.fromkeys((r.decision, r.lost, r.redone_steps) for r in said))


def check_bits(
    model, session, stages=STAGES["awkward"], optimizer="adam", scheduler="none", largest_norm=None, scaler=None
):
    modules, optimizers = plainly(stages, OPTIMIZERS[optimizer], *SCHEDULERS[scheduler], largest_norm, scaler)
    expected = nn.Sequential(*modules).state_dict()
    got = model.module.state_dict()
    check_same(got, expected)
    held = session._trainable.resident.held
    for part, plain in enumerate(optimizers):
        mine, its = held[part].optimizer.state_dict(), plain.state_dict()
        assert mine["param_groups"] == its["param_groups"]
        for number, values in its["state"].items():
            for name, value in values.items():
                if value is not None:
                    assert torch.equal(torch.as_tensor(mine["state"][number][name]), torch.as_tensor(value)), name


# -- the bits


@pytest.mark.parametrize(
    ("stages", "optimizer", "scheduler", "workers"),
    [
        ("awkward", "adam", "none", 4),
        ("awkward", "sgd", "step", 7),
        ("one", "adam", "epoch", 3),
        ("layers", "sgd", "plateau", 2),
        ("layers", "adam", "none", 1),
    ],
)
def test_every_bit_is_that_of_a_plain_loop(stages, optimizer, scheduler, workers):
    model, session = begin(STAGES[stages], optimizer, scheduler, workers=workers)

    train(session)

    check_bits(model, session, STAGES[stages], optimizer, scheduler)
    assert session.metrics.keys() == {"loss", "accuracy"}


def test_the_gradient_is_clipped_by_the_norm_of_all_stages():
    model, session = begin(largest_norm=0.3, faults=faults("kill:rank=1,step=2,phase=backward"))

    train(session)

    check_bits(model, session, largest_norm=0.3)
    with pytest.raises(AssertionError):
        check_bits(model, session)


@pytest.mark.parametrize("largest_norm", [None, 0.3])
def test_all_stages_take_a_step_that_is_scaled_or_none_does(tmp_path, monkeypatch, largest_norm):
    mine, plain = make_scaler(), make_scaler()
    stages = STAGES["steep"]
    strikes = faults("kill:rank=1,step=0,phase=optimizer", "kill:rank=2,step=3,phase=backward")
    kept = {"largest_norm": largest_norm, "checkpoint_dir": str(tmp_path), "checkpoint_every": 4}
    _, session = begin(stages, **kept, scaler=make_scaler(), faults=strikes, min_workers=3)
    with pytest.raises(TooFewWorkers):
        train(session)

    model, session = begin(stages, **kept, scaler=mine, workers=2, resume=True)
    train(session)

    check_bits(model, session, stages, largest_norm=largest_norm, scaler=plain)
    assert mine.state_dict() == plain.state_dict()
    steps = {int(s["step"]) for o in session._trainable.resident.held.values() for s in o.optimizer.state.values()}
    assert len(steps) == 1
    assert 1 <= steps.pop() < STEPS - 1, "some overflow"

    def by_itself(stage):
        stage.scaling.skips = not all(gradient.isfinite().all() for gradient in stage._gradients())
        optimize(stage)

    optimize = ScaledStage.optimize
    monkeypatch.setattr(ScaledStage, "optimize", by_itself)
    model, session = begin(stages, largest_norm=largest_norm, scaler=make_scaler())
    train(session)
    with pytest.raises(AssertionError):
        check_bits(model, session, stages, largest_norm=largest_norm, scaler=make_scaler())


def test_the_average_of_the_weights_goes_where_the_stages_go(tmp_path, monkeypatch):
    strikes = faults("kill:rank=1,step=1,phase=optimizer", "kill:rank=2,step=3,phase=backward")
    kept = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 2, "average": make_average}
    _, session = begin(**kept, faults=strikes, min_workers=3)
    with pytest.raises(TooFewWorkers):
        train(session)

    model, session = begin(**kept, workers=2, resume=True)
    train(session)

    averages = []
    plainly(STAGES["awkward"], OPTIMIZERS["adam"], averages=averages)
    expected = nn.Sequential(*(average.module for average in averages)).state_dict()
    check_bits(model, session)
    check_same(model.averaged.state_dict(), expected)

    monkeypatch.setattr(ScaledStage, "_update_average", lambda stage: None)
    model, session = begin(average=make_average)
    train(session)
    with pytest.raises(AssertionError):
        check_same(model.averaged.state_dict(), expected)


# -- evaluation in between


def plain_figures(modules, batch_size):
    """Means over the samples, computed by one that has all stages."""
    x, y = dataset().tensors
    whole, totals = copy.deepcopy(nn.Sequential(*modules)).eval(), {"loss": 0.0, "accuracy": 0.0}
    with torch.no_grad():
        for inputs, labels in zip(x.split(batch_size), y.split(batch_size), strict=True):
            loss, more = loss_of(whole(inputs), labels)
            for name, value in {"loss": loss, **more}.items():
                totals[name] += float(value) * len(labels)
    return {name: total / SAMPLES for name, total in totals.items()}


@pytest.mark.parametrize("workers", [1, 7])
def test_an_evaluation_gives_the_figures_of_the_whole_model_and_leaves_no_trace(workers):
    model, session = begin(workers=workers, average=make_average)
    held, losses = session._trainable.resident.held, []

    for step in session.steps(dataset(), BATCH, EPOCHS):
        found = step.evaluate(dataset(), 2)
        averaged = step.evaluate(dataset(), 30, averaged=True)
        assert found == plain_figures([stage.model for stage in held.values()], 2)
        assert averaged == plain_figures([stage.average.module for stage in held.values()], 30)
        step.compute()
        assert step.evaluate(dataset(), 2) == found, "the step is not committed yet"
        losses += [found["loss"], averaged["loss"]]

    check_bits(model, session)
    assert all(module.training for stage in held.values() for module in stage.model.modules())
    assert len(set(losses)) > STEPS, "another model in each step, and another average"


def test_an_evaluation_that_cannot_be_is_refused():
    for said, evaluate in (
        ("at least 1 sample and batch_size >= 1, got 23 and 0", lambda step: step.evaluate(dataset(), 0)),
        ("at least 1 sample and batch_size >= 1, got 0 and 5", lambda step: step.evaluate([], 5)),
        ("must have len and \\[\\], got generator", lambda step: step.evaluate((x for x in dataset()), 5)),
        ("needs an average: pass the session average=", lambda step: step.evaluate(dataset(), 5, averaged=True)),
        ("need a dataset of tuples", lambda step: step.evaluate(torch.zeros(3, 1, 6, 6), 5)),
    ):
        _, session = begin()
        with pytest.raises((ConfigError, ScriptError), match=said):
            train(session, compute=evaluate)


def check_same(got, expected):
    assert got.keys() == expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []


@pytest.mark.parametrize("scheduler", ["step", "epoch", "plateau"])
def test_a_stage_that_was_just_saved_is_restored_to_the_bit(tmp_path, scheduler):
    model, session = begin(
        scheduler=scheduler,
        scaler=make_scaler(),
        strategy="partial",
        mirror_every=2,
        faults=faults("kill:rank=1,step=4"),
        run_dir=str(tmp_path),
    )

    train(session)

    assert [r.ages for r in read_run(tmp_path) if isinstance(r, PartRestored)] == [(0,)]
    check_bits(model, session, scheduler=scheduler, scaler=make_scaler())


@pytest.mark.parametrize("scheduler", ["step", "plateau"])
def test_a_stage_that_is_restored_as_it_was_goes_on_with_the_learning_rate_of_the_others(tmp_path, scheduler):
    _, session = begin(
        scheduler=scheduler,
        strategy="partial",
        mirror_every=3,
        faults=faults("kill:rank=1,step=5"),
        run_dir=str(tmp_path),
    )

    train(session)

    assert [r.ages for r in read_run(tmp_path) if isinstance(r, PartRestored)] == [(2,)]
    _, optimizers = plainly(STAGES["awkward"], OPTIMIZERS["adam"], *SCHEDULERS[scheduler])
    held = session._trainable.resident.held
    assert len({optimizer.param_groups[0]["lr"] for optimizer in optimizers}) == 1
    for part, plain in enumerate(optimizers):
        assert held[part].optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def test_stages_that_are_there_already_are_not_touched_and_give_the_same_bits():
    stages = [make() for make in STAGES["awkward"]]
    before = copy.deepcopy(nn.Sequential(*stages).state_dict())
    model, session = begin(stages)

    train(session)

    check_same(nn.Sequential(*stages).state_dict(), before)
    check_bits(model, session, stages)


def test_what_a_stage_draws_when_it_is_made_is_its_own_and_disturbs_nobody():
    drawn = []

    def make():
        drawn.append(np.random.rand())
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))

    np.random.seed(3)
    _, session = begin([make], workers=1)
    session.steps(dataset(), BATCH)
    np.random.seed(3)
    session._trainable._build(0)
    session._trainable._build(0)

    assert len(set(drawn)) == 1, "by the job's seed and the stage"
    assert np.random.rand() == np.random.RandomState(3).rand(), "and the script's generators go on as before"


# -- deaths


@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        *itertools.product(("forward", "handover,slice=1", "allreduce", "optimizer", "rehome"), (0, 4)),
        *itertools.product(("handover", "backward", "allreduce,bucket=1", "recovery"), (1, 2)),
    ],
)
def test_a_death_in_any_phase_of_any_stage_or_mirror_changes_no_bit_and_loads_nothing(phase, rank, tmp_path):
    first = ["kill:rank=3,step=2"] if phase in ("recovery", "rehome") else []
    model, session = begin(
        workers=5, mirror=2, run_dir=str(tmp_path), faults=faults(*first, f"kill:rank={rank},step=2,phase={phase}")
    )

    train(session)

    lost = {r for _, ranks, _ in recovered(tmp_path) for r in ranks}
    assert lost == {rank} | ({3} if first else set())
    assert {decision for decision, _, _ in recovered(tmp_path)} == {"redo"}
    check_bits(model, session)


def test_a_death_at_a_slice_strikes_when_those_before_it_were_handed_over(monkeypatch):
    happened = []
    reach, give = Injector.reach, StageRunner._send

    def note_phase(self, phase, step, rank, bucket=None):
        if (phase, step, rank) == ("handover", 2, 1):
            happened.append(bucket)
        reach(self, phase, step, rank, bucket)

    def note_message(self, batch, number, part, *more, back):
        if batch.step == 2 and not back:
            happened.append(f"slice {number} of stage {part}")
        give(self, batch, number, part, *more, back=back)

    monkeypatch.setattr(Injector, "reach", note_phase)
    monkeypatch.setattr(StageRunner, "_send", note_message)
    _, session = begin(workers=3, faults=faults("kill:rank=1,step=2,phase=handover,slice=1"))

    train(session)

    at = happened.index(1)
    assert happened[0] is None
    assert [what for what in happened[:at] if type(what) is str] == ["slice 0 of stage 0", "slice 0 of stage 1"]
    assert session.world_size == 2


@pytest.mark.parametrize(("every", "step"), [(0, 0), (2, 2)])
def test_a_stage_that_is_lost_with_its_mirror_takes_all_back_to_what_was_saved_and_the_run_says_so(
    every, step, tmp_path, capsys
):
    model, session = begin(
        run_dir=str(tmp_path),
        checkpoint_dir=str(tmp_path / "c"),
        checkpoint_every=every,
        faults=faults("kill:rank=1,step=3", "kill:rank=2,step=3"),  # of stage 1, and its mirror
    )

    train(session)

    assert recovered(tmp_path) == [("load", (1, 2), 4 - step)]
    line = f"no surviving worker holds part 1 of the model: all workers roll back to step {step}"
    assert line in capsys.readouterr().err
    check_bits(model, session)


@pytest.mark.parametrize("strategy", ["rollback", "restart"])
def test_without_mirrors_a_death_takes_all_back(strategy, tmp_path, capsys):
    model, session = begin(
        mirror=0,
        strategy=strategy,
        run_dir=str(tmp_path),
        checkpoint_dir=str(tmp_path / "c"),
        checkpoint_every=2,
        faults=faults("kill:rank=2,step=3,phase=allreduce"),
    )

    train(session)

    assert recovered(tmp_path) == [("load", (2,), 2)]
    assert "part 2 of the model" in capsys.readouterr().err
    check_bits(model, session)


def test_too_few_workers_save_the_whole_though_the_lowest_holder_of_a_stage_is_dead(tmp_path):
    kept = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 4}
    _, session = begin(**kept, min_workers=4, faults=faults("kill:rank=0,step=3,phase=backward"))
    with pytest.raises(TooFewWorkers):
        train(session)

    model, session = begin(**kept, workers=2, resume=True)
    numbers = []
    train(session, each=lambda step: numbers.append(step.number))

    assert numbers == [3, 4, 5]
    check_bits(model, session)


def test_where_a_stage_is_lost_and_too_few_are_left_the_checkpoint_is_what_remains(tmp_path):
    kept = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 2}
    _, session = begin(**kept, min_workers=3, faults=faults("kill:rank=1,step=3", "kill:rank=2,step=3"))
    with pytest.raises(TooFewWorkers, match="the state before step 2 is in"):
        train(session)

    model, session = begin(**kept, workers=3, resume=True)
    train(session)

    check_bits(model, session)


def test_what_is_to_be_saved_while_homes_are_among_the_dead_is_saved_by_all_when_there_are_new_ones(
    tmp_path, monkeypatch
):
    apply, save, saved = run.TrainingLoop._apply, StateRestorer.save, []

    def apply_as_one_who_is_behind(self, step):
        if step == 3:
            self._recovery.now = RecoveryContext(before=self._job.comm.members)
        apply(self, step)

    def note(self, **marks):
        saved.append((self._job.step, self._job.checkpoints.is_outdated(self._job.step, -2)))
        save(self, **marks)

    monkeypatch.setattr(run.TrainingLoop, "_apply", apply_as_one_who_is_behind)
    monkeypatch.setattr(StateRestorer, "save", note)
    _, session = begin(checkpoint_dir=str(tmp_path), checkpoint_every=2)

    train(session)

    assert saved[:3] == [(2, False), (4, True), (6, False)], "that of step 4 when it was put off"
    assert [step for step, _ in saved[3:]] == [6], "that of the end of training"
    assert steps(tmp_path) == [2, 4, 6]


def test_a_checkpoint_of_another_number_of_stages_is_refused(tmp_path):
    kept = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 4}
    train(begin(**kept)[1])

    for stages, number in (("one", 1), ("layers", 5)):
        _, session = begin(STAGES[stages], **kept, resume=True)
        with pytest.raises(CheckpointError, match=f"holds 3 stages, this Pipeline has {number}"):
            train(session)


def test_a_running_job_does_not_take_a_strategy_that_goes_on_without_a_stage(tmp_path, capsys):
    model, session = begin(run_dir=str(tmp_path), faults=faults("kill:rank=1,step=4,phase=backward"))
    ask = lambda step: append(requests_path(tmp_path), {"strategy": "forward"}) if step.number == 1 else None  # noqa: E731

    train(session, each=ask)

    assert "--strategy forward does not support a model that is split" in capsys.readouterr().err
    assert recovered(tmp_path) == [("redo", (1,), 1)]
    check_bits(model, session)


def test_a_death_while_all_are_given_the_whole_model_changes_no_bit(monkeypatch):
    finish, calls = PipelineModel.finish, []

    def dies_once(body):
        finish(body)
        calls.append(len(body._comm.members))
        if len(calls) == 1:
            body._comm.fail(2)
            raise PeerFailed("a death in finish")

    monkeypatch.setattr(PipelineModel, "finish", dies_once)
    model, session = begin()

    train(session)

    assert calls == [4, 3]
    check_bits(model, session)


def test_all_workers_know_the_size_of_the_whole(tmp_path):
    model, session = begin(run_dir=str(tmp_path))
    train(session)

    (record,) = [r for r in read_run(tmp_path) if isinstance(r, RunStarted)]
    assert record.parameters == sum(p.numel() for p in model.module.parameters())


# -- bad input


class Two(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class Cut(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)).detach()


class Deaf(nn.Linear):
    def forward(self, x):
        return super().forward(torch.ones(len(x), self.in_features))


flat = lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3))  # noqa: E731


@pytest.mark.parametrize(
    ("stages", "loss", "error", "says"),
    [
        ([flat], lambda o, y: o.sum(1), ScriptError, "the loss must return a scalar"),
        ([lambda: Two(6, 3), flat], loss_of, ScriptError, "a stage must return one tensor, stage 0 returned tuple"),
        ([flat, nn.ReLU], loss_of, ConfigError, "stage 1 of the Pipeline has no trainable parameters"),
        ([flat, lambda: 3], loss_of, ScriptError, "must be an nn.Module or a function that returns one, got int"),
        ([lambda: Cut(36, 3), flat], loss_of, ScriptError, "the output of stage 0 of a Pipeline requires no gradient"),
        ([flat, lambda: Deaf(3, 3)], loss_of, ScriptError, "stage 0 gets no gradient"),
        ([flat, lambda: nn.Linear(3, 3, device="meta")], loss_of, ConfigError, "on cpu or cuda, got weight on meta"),
    ],
)
def test_a_stage_or_a_loss_that_is_wrong_is_named(stages, loss, error, says):
    _, session = begin(stages, loss=loss)

    with pytest.raises(error, match=says):
        train(session)


def test_what_does_not_go_with_a_pipeline_is_refused_at_once():
    on_meta = nn.BatchNorm1d(2)
    on_meta.running_var = on_meta.running_var.to("meta")  # a device that is on every machine
    optimizer, made = OPTIMIZERS["sgd"], torch.optim.SGD(nn.Linear(2, 2).parameters())
    for stages, make_optimizer, options, says in (
        ([], optimizer, {}, "a Pipeline must have at least 1 stage, got none"),
        ([flat], made, {}, "a Pipeline needs a function that returns an optimizer"),
        ([flat], optimizer, {"strategy": "forward"}, "must be rollback, .* or partial for a Pipeline, got forward"),
        ([nn.Linear(2, 2), on_meta], optimizer, {}, r"stage 1 of a Pipeline must be .*, got running_var on meta: move"),
    ):
        with pytest.raises(ConfigError, match=says):
            holdfast.Session(holdfast.Pipeline(stages, loss_of), make_optimizer, **options)
    with pytest.raises(ConfigError, match=r"must return a torch\.optim\.Optimizer, got list"):
        train(holdfast.Session(holdfast.Pipeline([flat], loss_of), list))


def test_a_dataset_without_tuples_is_refused():
    _, session = begin([flat])

    with pytest.raises(ScriptError, match="need a dataset of tuples, the model's input first, got Tensor"):
        next(session.steps(torch.ones(8, 36), 4)).compute()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda step: list(step), r"call step\.compute\(\)"),
        (lambda step: (step.compute(), step.compute()), "step.compute was called twice in step 0"),
        (lambda step: None, r"step 0 was not computed: call step\.compute\(\)"),
        (lambda step: step.backward(torch.ones(())), r"call step\.compute\(\)"),
    ],
)
def test_a_loop_that_does_not_compute_a_step_once_is_told_how(wrong, says):
    _, session = begin()

    with pytest.raises(ScriptError, match=says):
        train(session, compute=wrong)


def test_a_pipeline_is_trained_in_one_call():
    _, session = begin()
    train(session)

    with pytest.raises(ScriptError, match=r"trained in one call of session\.steps"):
        train(session)


def test_a_phase_that_a_model_does_not_have_is_refused():
    whole = nn.Linear(36, 3)
    for model, optimizer, phase, says in (
        (whole, torch.optim.SGD(whole.parameters()), "handover", "handover, rehome, mirror exist only for a Pipeline"),
        (holdfast.Sharded(whole), OPTIMIZERS["sgd"], "handover,slice=1", "this model is not a Pipeline"),
        (
            holdfast.Pipeline([flat], loss_of),
            OPTIMIZERS["sgd"],
            "mirror",
            "needs --strategy partial and --mirror-every",
        ),
    ):
        given = faults(f"kill:rank=1,step=1,phase={phase}")
        session = holdfast.Session(model, optimizer, workers=2, faults=given)
        with pytest.raises(ConfigError, match=says):
            next(session.steps(dataset(), BATCH))
