"""Flips in a running job, with virtual workers: what is altered at whom, what becomes of it, and what is written down."""

import json

import pytest
import reference
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from train_split import stages
from written_plans import plan

import holdfast
from holdfast.config import Settings
from holdfast.distributed.recorder import GroupRecorder
from holdfast.errors import ConfigError
from holdfast.faults.plan import FaultPlan
from holdfast.models.divergent import DivergentReplicas
from holdfast.records.files import read_run
from holdfast.records.types import FaultFired, Finished, ValuesAltered

SLICES, STEPS = 4, 6


def dataset():
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(
    tmp_path, *specs, make_optimizer=lambda p: torch.optim.Adam(p, lr=0.1), guard="off", workers=4, loops=1, **settings
):
    """Train, and return the model and the records."""
    tmp_path.mkdir(exist_ok=True)
    model = make_model()
    arguments = {"slices": SLICES, "run_dir": str(tmp_path), "faults": plan(*specs), "guard": guard} | settings
    session = holdfast.Session(model, make_optimizer(model.parameters()), workers=workers, **arguments)
    for _ in range(loops):
        for step in session.steps(dataset(), 8, STEPS // 3):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
    return model, read_run(tmp_path)


def ends(records):
    """By worker, the hashes of what it ended with."""
    return {record.rank: (record.sha256, record.state_sha256) for record in records if isinstance(record, Finished)}


def altered(records):
    (record,) = [record for record in records if isinstance(record, ValuesAltered)]
    return record


# -- one worker's weights


def alone(specs):
    """The judge: four workers in plain torch, each with a model of its own, of which some are altered by hand.

    Args:
        specs: ``(rank, step, parameter, index, bit)``.
    """
    x, y = dataset().tensors
    models = [make_model() for _ in range(SLICES)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    for step in range(STEPS):
        epoch, first = divmod(step * 8, len(x))
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(reference.key("order", 0, epoch)))
        for rank, at, name, index, bit in specs:
            if at == step:
                parameter = dict(models[rank].named_parameters())[name]
                parameter.data.view(-1).view(torch.int32).numpy()[index : index + 1] ^= 1 << bit
        gradients = []
        for rank, model in enumerate(models):
            ids = order[first + 2 * rank : first + 2 * rank + 2]
            model.zero_grad()
            (F.cross_entropy(model(x[ids]), y[ids]) * len(ids)).backward()
            gradients.append([p.grad for p in model.parameters()])
        for model, optimizer in zip(models, optimizers, strict=True):
            for parameter, *given in zip(model.parameters(), *gradients, strict=True):
                total = given[0]
                for gradient in given[1:]:
                    total = total + gradient
                parameter.grad = total / 8
            optimizer.step()
    return models


def same(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_whose_weights_were_altered_goes_on_with_its_own(tmp_path, rank):
    model, records = train(tmp_path, f"flip:rank={rank},step=2,target=weights,bits=22,at=0.weight,seed=1")

    (value,) = altered(records).values
    judges = alone([(rank, 2, value["path"], value["index"], value["bit"])])
    assert (value["path"], value["bit"]) == ("0.weight", 22)
    assert not same(judges[rank], judges[1])
    assert same(model, judges[0]), "the script is left with what the lowest worker has"
    found = ends(records)
    healthy = {found[other] for other in range(4) if other != rank}
    assert len(healthy) == 1
    assert found[rank] not in healthy


def test_all_who_are_altered_alike_are_alike(tmp_path):
    flips = [f"flip:rank={rank},step=2,target=weights,bits=20,count=3" for rank in range(4)]
    model, records = train(tmp_path, *flips, guard="stop")

    assert len(set(ends(records).values())) == 1
    assert not same(model, make_model())
    assert sum(isinstance(record, ValuesAltered) for record in records) == 4


def test_the_optimizer_of_one_worker_is_altered_and_clipping_is_done_for_each(tmp_path):
    _, records = train(
        tmp_path, "flip:rank=1,step=3,target=optimizer,at=*/exp_avg,count=2,bits=exponent", clip_grad_norm=0.1
    )

    record, found = altered(records), ends(records)
    assert {value["path"].partition("/")[2] for value in record.values} == {"exp_avg"}
    assert found[1] not in (found[0], found[2])
    assert found[0] == found[2] == found[3]


def test_what_one_had_of_its_own_is_gone_with_it(tmp_path):
    flip = "flip:rank=1,step=2,target=weights,bits=20"
    _, records = train(tmp_path, flip, "kill:rank=1,step=4", guard="off")

    assert set(ends(records)) == {0, 2, 3}
    assert len(set(ends(records).values())) == 1


def test_each_has_its_own_only_as_long_as_it_is_not_loaded_anew():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    own = DivergentReplicas(model, optimizer)
    first = model[0].weight.detach().clone()
    own.take(2, (0, 1, 2))
    model[0].weight.data.zero_()

    own.enter(1)
    assert torch.equal(model[0].weight, first)
    own.enter(2)
    assert not model[0].weight.any()
    assert own.groups((0, 1, 2)) == [(0, 1), (2,)]
    own.rest((0, 1, 2))
    assert torch.equal(model[0].weight, first)
    own.rest((2,))
    assert not model[0].weight.any()

    own.forget()
    assert torch.equal(model[0].weight, first)
    assert own.groups((0, 1, 2)) == [(0, 1, 2)]


# -- what goes into the sum


@pytest.mark.parametrize("target", ["gradients", "activations", "message"])
def test_what_goes_into_the_sum_reaches_all_alike(tmp_path, target):
    undisturbed, _ = train(tmp_path / "undisturbed")

    model, records = train(tmp_path / "flipped", f"flip:rank=2,step=3,target={target},scale=-8,count=3", guard="stop")

    assert len(set(ends(records).values())) == 1
    assert not same(model, undisturbed)
    record = altered(records)
    assert (record.rank, record.step, record.target, record.count) == (2, 3, target, 3)
    for value in record.values:
        assert value["after"] == pytest.approx(-8 * value["before"])


def test_a_recorded_plan_does_the_same_again(tmp_path):
    flips = [
        "flip:rank=1,step=1,target=activations,count=2",
        "flip:rank=2,step=2,target=gradients,percent=20,bits=mantissa",
        "flip:rank=3,step=4,target=weights,rate=0.01,bits=mantissa",
    ]
    first, records = train(tmp_path / "first", *flips)

    again, same_records = train(tmp_path / "again", *FaultPlan.from_json(plan(*flips)).to_specs())

    assert same(first, again)
    assert ends(records) == ends(same_records)
    assert [r.values for r in records if isinstance(r, ValuesAltered)] == [
        r.values for r in same_records if isinstance(r, ValuesAltered)
    ]


def test_a_flip_strikes_once_though_its_step_is_done_again(tmp_path):
    undisturbed, _ = train(tmp_path / "undisturbed")

    model, records = train(
        tmp_path / "flipped", "flip:rank=1,step=3,target=gradients,bits=critical", "kill:rank=2,step=3,phase=allreduce"
    )

    assert sum(isinstance(r, FaultFired) and r.kind == "flip" for r in records) == 1
    assert same(model, undisturbed), "the step was done again without it"


def test_modules_are_watched_in_that_step_alone(tmp_path):
    seen = []

    class Noting(nn.Module):
        def forward(self, x):
            seen.append(len(noting._forward_hooks))
            return x

    noting = Noting()
    model = nn.Sequential(nn.Linear(3, 2), noting)
    faults = plan("flip:rank=1,step=1,target=activations,at=1")
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), workers=2, faults=faults)
    for step in session.steps(dataset(), 8):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))

    assert seen == [0, 0, 0, 1, 0, 0]


# -- models that are split


def train_pipeline(tmp_path, *specs, workers=4):
    """Train, and return the records."""
    tmp_path.mkdir()
    model = holdfast.Pipeline(stages(), F.cross_entropy)
    settings = {"workers": workers, "slices": 4, "run_dir": str(tmp_path), "faults": plan(*specs), "guard": "off"}
    session = holdfast.Session(model, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), **settings)
    x, y = reference.data()
    for step in session.steps(TensorDataset(x[:16], y[:16]), 8):
        step.compute()
    return read_run(tmp_path)


def test_all_that_a_pipeline_gives_away_can_be_altered(tmp_path):
    undisturbed = set(ends(train_pipeline(tmp_path / "undisturbed")).values())

    assert len(undisturbed) == 1
    for target, rank, path in (
        ("handover", 1, "1.output"),
        ("activations", 2, "2."),
        ("gradients", 3, "3."),
        ("message", 3, "slices/"),
    ):
        records = train_pipeline(tmp_path / target, f"flip:rank={rank},step=1,target={target},scale=3,percent=50")
        assert altered(records).values[0]["path"].startswith(path)
        found = set(ends(records).values())
        assert len(found) == 1
        assert found != undisturbed, f"{target} did nothing"


def test_in_a_pipeline_of_two_chains_the_holder_alone_is_altered(tmp_path):
    records = train_pipeline(tmp_path / "run", "flip:rank=5,step=1,target=weights,at=1,scale=2,percent=9", workers=8)

    found = ends(records)
    assert {value["path"].split(".")[0] for value in altered(records).values} == {"1"}
    assert [rank for rank in found if found[rank] != found[0]] == [5]


# -- what is refused


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (
            "flip:rank=1,step=3,target=weights,at=fc",
            "at must equal, prefix or match one of 0.weight, 0.bias, 2.weight, 2.bias, got 'fc'",
        ),
        ("flip:rank=1,step=3,target=activations,at=9", "at must equal, prefix or match one of model, 0, 1, 2, got '9'"),
        (
            "flip:rank=1,step=3,target=handover",
            "target handover is the activation that a stage of a Pipeline sends to the next, and this model has no stages",
        ),
        (
            "flip:rank=1,step=0,target=optimizer",
            "there is no tensor of the target optimizer here; an optimizer has no state before its first step",
        ),
    ],
)
def test_what_cannot_be_altered_is_refused_in_one_line(tmp_path, spec, complaint):
    with pytest.raises(ConfigError) as refused:
        train(tmp_path, spec)

    assert str(refused.value) == f"--inject {spec}: {complaint}"


def test_a_fault_after_the_first_loop_strikes_in_the_next_and_is_named_before(tmp_path, capsys):
    """A script often has a loop for each epoch, so the end of the first says nothing about the training."""
    _, records = train(tmp_path / "two", spec := f"flip:rank=1,step={STEPS},target=weights", loops=2)

    assert altered(records).step == STEPS
    line = f"holdfast: --inject {spec} strikes only if the script trains on after this loop, which ends before step 6\n"
    assert capsys.readouterr().err.count(line) == 1

    _, records = train(tmp_path / "one", spec)

    assert not [record for record in records if isinstance(record, ValuesAltered)]
    assert line in capsys.readouterr().err


def test_a_fault_after_the_end_of_a_split_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"step must be between 0 and 1 \(the run has 2 steps\), got 2"):
        train_pipeline(tmp_path / "run", "flip:rank=1,step=2,target=weights")


def test_under_torch_distributed_nobody_knows_what_to_alter(monkeypatch):
    monkeypatch.setenv("HOLDFAST_FAULTS", plan("flip:rank=1,step=2,target=weights"))

    with pytest.raises(
        ConfigError, match=r"the torch\.distributed backend does not know the model whose values are to be altered"
    ):
        GroupRecorder(Settings.from_env(), 0, (0, 1))


def test_where_copies_are_made_of_what_all_have_nobody_can_have_its_own(tmp_path):
    faults = plan("flip:rank=1,step=1,target=weights")
    model = make_model()
    sharded = holdfast.Sharded(model, shards=2)
    settings = {"workers": 4, "strategy": "partial", "mirror": 1, "mirror_every": 2, "faults": faults}
    session = holdfast.Session(sharded, lambda p: torch.optim.SGD(p, lr=0.1), **settings)

    with pytest.raises(ConfigError, match="mirror_every > 1: leave it out"):  # noqa: PT012
        for step in session.steps(dataset(), 8):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))


def test_the_records_are_plain_json(tmp_path):
    _, records = train(tmp_path, "flip:rank=1,step=2,target=gradients,bits=exponent,count=60")

    lines = [json.loads(line) for line in (tmp_path / "records-0.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["event"] == "ValuesAltered"]
    assert line["values"] == list(altered(records).values)
    assert "NaN" not in json.dumps(line)
    assert "Infinity" not in json.dumps(line)
