"""The certificate: the same links whatever happened, what its records prove, and where two runs part."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import reference
import torch
import torch.nn.functional as F
import train_flip
import train_split
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset
from train_reference import train
from written_plans import plan

import holdfast
from holdfast.checkpoint import CheckpointStore
from holdfast.cli import main
from holdfast.comm import VirtualCommunicator
from holdfast.errors import ConfigError
from holdfast.integrity.hash_chain import GENESIS, digest_of_ids, digest_of_parts, link_of
from holdfast.launch.provenance import note
from holdfast.models.replicated import ReplicatedModel, WholeFingerprint
from holdfast.records.files import read_run
from holdfast.records.types import Finished, Recovered, RunStarted, StateHashed, StepCommitted
from holdfast.summary.files import write_report
from holdfast.tools.certificate import CertifiedSteps
from holdfast.tools.divergence import compare_runs


def records_of(folder, **how):
    folder.mkdir(exist_ok=True)
    train("cnn", "adam", run_dir=str(folder), **how)
    return read_run(folder)


def links(records):
    return {record.step: record.link for record in records if isinstance(record, StepCommitted)}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """The records of an undisturbed run."""
    return records_of(tmp_path_factory.mktemp("quiet"), workers=4)


# -- the same links, whatever happened

KILLS = ("kill:rank=0,step=3,phase=allreduce,bucket=2", "kill:rank=2,step=7,phase=optimizer")
HISTORIES = {
    "three and a spare": {"workers": 3, "spares": 1, "faults": plan("kill:rank=1,step=5")},
    "eager, killed": {"workers": 4, "overlap_optimizer": True, "faults": plan(*KILLS)},
    "restart": {"workers": 4, "strategy": "restart", "faults": plan(*KILLS)},
}


@pytest.mark.parametrize("history", HISTORIES)
def test_links_do_not_depend_on_who_computed_what_nor_on_what_failed(tmp_path, quiet, capsys, history):
    found = records_of(tmp_path / "run", **HISTORIES[history])

    assert links(found) == links(quiet)
    assert len(links(found)) == reference.STEPS
    assert CertifiedSteps(found, "it").check() == CertifiedSteps(found, "it").check_workers() == []
    code, out = run_command(capsys, "diff-runs", write(tmp_path / "a", quiet), write(tmp_path / "b", found))
    assert code == 0
    assert f"identical to the last step ({reference.STEPS} steps, sha256 " in out


def test_a_run_that_goes_on_from_a_checkpoint_goes_on_with_its_links(tmp_path, quiet):
    saving = {"checkpoint_dir": str(tmp_path / "c"), "checkpoint_every": 4}
    with pytest.raises(SystemExit) as stopped:
        records_of(tmp_path / "first", workers=4, stop_after=9, **saving)
    first = read_run(tmp_path / "first")
    second = records_of(tmp_path / "second", workers=1, resume=True, **saving)

    assert stopped.value.code == 4
    assert sorted(links(first)) == list(range(10)), "it stopped when step 9 was committed"
    assert links(first) | links(second) == links(quiet)
    assert min(links(second)) == 10
    assert CheckpointStore(tmp_path / "c").info(8)["link"] == links(quiet)[7]


def test_links_begin_anew_where_the_state_that_is_loaded_has_none(tmp_path, quiet):
    saving = {"checkpoint_dir": str(tmp_path / "c"), "checkpoint_every": 4}
    with pytest.raises(SystemExit):
        records_of(tmp_path / "first", workers=4, stop_after=7, certificate=False, **saving)
    second = records_of(tmp_path / "second", workers=4, resume=True, **saving)
    run = CertifiedSteps(second, "second")

    assert "link" not in CheckpointStore(tmp_path / "c").info(8)
    assert set(links(read_run(tmp_path / "first")).values()) == {""}
    assert (run.first, run.begins_anew, run.check()) == (8, True, [])
    assert links(second)[8] != links(quiet)[8]
    assert compare_runs(CertifiedSteps(quiet, "a"), run).divergence is None, "steps are compared by what they were"


def test_healing_goes_back_in_the_links_too(tmp_path):
    """Steps are committed twice then: wrong, as long as nobody has noticed, and right."""
    found = {}
    for name, flips in {"quiet": "", "healed": plan("flip:rank=1,step=6,target=weights,at=1.weight,bits=28")}.items():
        (tmp_path / name).mkdir()
        train_flip.train(faults=flips, workers=2, guard="heal", run_dir=str(tmp_path / name))
        found[name] = read_run(tmp_path / name)
    healed = CertifiedSteps(found["healed"], "healed")

    assert links(found["healed"]) == links(found["quiet"])
    assert [finding.what for finding in healed.twice()][:1] == ["step 6 was committed again, with different metrics"]
    assert healed.check() == healed.check_workers() == []


def test_a_script_with_two_loops_has_one_certificate(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    session = holdfast.Session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), slices=2, run_dir=str(tmp_path), fabric="virtual"
    )
    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
    for _ in range(2):
        for step in session.steps(data, batch_size=8):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
    found = read_run(tmp_path)

    assert [record.link for record in found if isinstance(record, RunStarted)] == [GENESIS, links(found)[1]]
    assert sorted(links(found)) == [0, 1, 2, 3]
    assert CertifiedSteps(found, "it").check() == []


class OfWorker1(WholeFingerprint):
    """Certifies what worker 1 has of a model, as it does itself where each worker is a process."""

    def _certify(self, digests):
        self.state = f"{digests[1]:016x}"


@pytest.mark.parametrize("target", ["weights", "optimizer"])
def test_a_lowest_bit_that_flips_at_who_does_not_lead_is_found_or_nothing_is_left_of_it(tmp_path, monkeypatch, target):
    """It takes steps to hash all that there is, and until then a bit may be rounded away."""
    monkeypatch.setattr(
        ReplicatedModel, "fingerprint", lambda replica, comm, settings: OfWorker1(replica, comm, settings)
    )

    def train_flipped(name, flip):
        folder = tmp_path / name
        folder.mkdir()
        train_flip.train(faults=flip, workers=2, guard="off", run_dir=str(folder), epochs=2)
        found = read_run(folder)
        return links(found), {(r.sha256, r.state_sha256) for r in found if isinstance(r, Finished)}

    undisturbed, end = train_flipped("quiet", "")
    flips = [plan(f"flip:rank=1,step=9,target={target},bits=0,seed={seed}") for seed in range(6)]
    flipped = [train_flipped(str(number), flip) for number, flip in enumerate(flips)]

    assert len(end) == 1
    assert any(len(ends) == 2 for _, ends in flipped), "of one something is left to the end"
    assert [ends for made, ends in flipped if made == undisturbed and ends != end] == []


def test_the_state_is_hashed_in_turn_and_all_of_it_at_the_ends(quiet):
    steps = [record for record in quiet if isinstance(record, StepCommitted)]
    wholes = [record for record in quiet if isinstance(record, StateHashed)]

    assert [step.whole for step in steps] == [True] + [False] * (reference.STEPS - 1)
    assert [record.step for record in wholes] == [0, reference.STEPS]
    assert {"0.weight", "5.bias", "1.running_mean", "1.num_batches_tracked"} <= wholes[0].tensors.keys()
    assert {"0.weight/exp_avg", "0.weight/step"} <= wholes[1].tensors.keys() - wholes[0].tensors.keys()
    assert "1.num_batches_tracked[0:1] .. 1.running_var[0:8]" in steps[3].where, "buffers, too"


@pytest.mark.parametrize("kind", ["whole", "pipeline", "sharded"])
def test_an_average_that_the_session_keeps_is_hashed_with_what_it_is_of(tmp_path, kind):
    runs = []
    for decay in (0.9, 0.90001):

        def average(module, decay=decay):
            return AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))

        of_split(tmp_path / str(decay), kind, average=average)
        runs.append(CertifiedSteps(read_run(tmp_path / str(decay)), str(decay)))

    parting = compare_runs(*runs).divergence

    assert (parting.what, parting.metrics) == (("state",), {}), "the weights are the same"
    assert all("average/" in name for name in parting.tensors), "and each has its own name"
    assert parting.tensors
    assert runs[0].check() == runs[0].check_workers() == []


def of_split(folder, kind, **how):
    folder.mkdir()
    module = reference.make_model("cnn")
    model = holdfast.Sharded(module, shards=3)
    if kind == "pipeline":
        model = holdfast.Pipeline(train_split.stages(), train_split.loss)
    settings = {"slices": 4, "workers": 4, "run_dir": str(folder)} | how
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.05)  # noqa: E731
    if kind == "whole":
        model, optimizer, settings["average"] = module, optimizer(module.parameters()), settings["average"](module)
    session = holdfast.Session(model, optimizer, **settings)
    for step in session.steps(TensorDataset(*reference.data()), reference.BATCH):
        if kind == "pipeline":
            step.compute()
            continue
        for x, y in step:
            step.backward(F.cross_entropy(module(x), y))
    return read_run(folder)


@pytest.fixture(scope="module", params=["pipeline", "sharded"])
def split(request, tmp_path_factory):
    """The kind of a split model, and the records of an undisturbed run of it."""
    return request.param, of_split(tmp_path_factory.mktemp("split") / "run", request.param)


@pytest.mark.parametrize(
    "history",
    [{"workers": 1}, {"faults": plan("kill:rank=1,step=4,phase=optimizer", "kill:rank=0,step=6,phase=allreduce")}],
    ids=["alone", "killed"],
)
def test_links_of_a_split_model_do_not_depend_on_who_holds_what(tmp_path, split, history):
    kind, quiet = split
    found = of_split(tmp_path / "run", kind, **history)
    run = CertifiedSteps(found, "it")

    assert links(found) == links(quiet)
    assert all(line.state and line.where for line in run.steps.values())
    assert run.steps[0].whole
    assert run.check() == run.check_workers() == []
    assert run.wholes == CertifiedSteps(quiet, "quiet").wholes


@pytest.fixture(scope="module")
def flipped_in_a_part(tmp_path_factory):
    """Records of a run of a pipeline and of one with a flip. Worker 3 computes nothing with stage 2: it is a mirror."""
    faults = ("", plan("flip:rank=3,step=3,target=weights,at=2.2.weight,bits=0"))
    folder = tmp_path_factory.mktemp("flipped")
    return [of_split(folder / str(bool(flip)), "pipeline", guard="off", faults=flip) for flip in faults]


def test_a_bit_that_flips_in_a_part_is_seen_where_the_part_is_hashed_though_nothing_comes_of_it(flipped_in_a_part):
    """No metric tells."""
    runs = [
        CertifiedSteps(records, name) for records, name in zip(flipped_in_a_part, ("quiet", "flipped"), strict=True)
    ]

    parting = compare_runs(*runs).divergence

    assert (parting.step, parting.what, parting.metrics) == (6, ("state",), {}), "each fourth step is of stage 2"
    assert (parting.same_until, parting.tensors, parting.tensors_step) == (2, ("2.2.weight",), 7)
    assert "part 2: " in parting.where
    assert parting.workers == (), "of the first run all were right"
    assert compare_runs(*reversed(runs)).divergence.workers == (3,)
    assert runs[1].check() == [], "that is how it was"
    assert runs[1].check_workers()[0].what == (
        "before step 7 workers 2, 3, which hold part 2, had different values in 2.2.weight"
    )


def test_of_a_part_that_the_lead_does_not_hold_its_number_is_said_and_who_differs_whoever_writes_last(
    flipped_in_a_part,
):
    quiet, flipped = flipped_in_a_part
    at = max(record.step for record in flipped if isinstance(record, StateHashed))
    first_s = min(record.t_s for record in flipped if isinstance(record, StateHashed) and record.step == at)
    runs = []
    for records in (flipped, quiet):
        told = [
            dataclasses.replace(r, where="") if isinstance(r, StepCommitted) and not r.whole else r for r in records
        ]
        odd = [isinstance(r, StateHashed) and (r.step, r.rank) == (at, 3) for r in told]
        told = [
            dataclasses.replace(r, t_s=first_s - 1e-9) if is_odd else r for r, is_odd in zip(told, odd, strict=True)
        ]
        runs.append(CertifiedSteps(told, "it"))

    parting = compare_runs(*runs).divergence

    assert (parting.step, parting.where, parting.same_until) == (6, "part 2", 0)
    assert (parting.tensors, parting.workers) == (("2.2.weight",), (3,))


@pytest.mark.parametrize("heard", [True, False], ids=["told", "not told"])
def test_who_missed_the_closing_sum_of_a_split_model_makes_the_same_link(tmp_path, monkeypatch, split, heard):
    """This process plays those whom the sum of step 4 does not reach: worker 3 died in it, and it reached worker 0."""
    kind, quiet = split
    late, said = VirtualCommunicator, []
    maximum, share_progress = late.maximum, late.share_progress

    def missed(comm, values):
        if not said and 4 in values and values[values.index(4) + 1] == ~4:
            said.extend(values[values.index(4) - 2 : values.index(4)])
            comm.fail(3)
        return maximum(comm, list(values))

    def told(comm, progress):
        closed = dataclasses.replace(
            progress, completed=progress.completed + 1, heard=digest_of_parts(said) if heard else 0
        )
        return {**share_progress(comm, progress), 0: closed}

    monkeypatch.setattr(late, "maximum", missed)
    monkeypatch.setattr(late, "share_progress", told)
    found = of_split(tmp_path / "run", kind)

    recovered = next(record for record in found if isinstance(record, Recovered))
    assert (recovered.step, recovered.redone_steps) == (5, 0), "it caught up"
    assert len(said) == 2
    assert (links(found) == links(quiet)) == heard
    assert links(found)[3] == links(quiet)[3]


def test_digests_of_the_tensors_of_a_split_model_are_checked_part_by_part(split):
    _, quiet = split
    first = next(record for record in quiet if isinstance(record, StateHashed))
    odd = dataclasses.replace(first, tensors={**first.tensors, next(iter(first.tensors)): "0" * 16})
    altered, twice, fewer = (
        [each for record in quiet for each in (instead if record is first else [record])]
        for instead in ([odd], [first, dataclasses.replace(odd, rank=7)], [])
    )

    assert first.parts > 1
    assert [finding.what for finding in CertifiedSteps(altered, "it").check()] == [
        "step 0: the digests of its tensors do not match the digest of its state"
    ]
    assert (
        CertifiedSteps(twice, "it")
        .check_workers()[0]
        .what.startswith(f"before step 0 workers {first.rank}, 7, which hold part 0, had different values in ")
    )
    assert CertifiedSteps(fewer, "it").check() == [], "its only holder died before it had written it"


# -- what the records prove


def altered(records, step, **fields):
    return [dataclasses.replace(r, **fields) if isinstance(r, StepCommitted) and r.step == step else r for r in records]


FIELDS = {
    "epoch": {"epoch": 7},
    "samples": {"samples": 31},
    "ids": {"ids": "0" * 32},
    "state": {"state": "0" * 16},
    "link": {"link": "0" * 32},
    "figures": {"figures": "0" * 32},
    "loss": {"metrics": {"loss": 2.5}},
    "a metric more": {},
}


@pytest.mark.parametrize("step", [0, 5, reference.STEPS - 1])
@pytest.mark.parametrize("field", FIELDS)
def test_a_line_that_was_altered_is_found_and_its_step_named(quiet, field, step):
    line = next(r for r in quiet if isinstance(r, StepCommitted) and r.step == step)
    fields = {"metrics": line.metrics | {"accuracy": 1.0}} if field == "a metric more" else FIELDS[field]

    found = CertifiedSteps(altered(quiet, step, **fields), "it").check()

    assert found[0].step == step
    assert f"step {step}: " in found[0].what


@pytest.mark.parametrize("step", [0, 5, reference.STEPS - 1])
@pytest.mark.parametrize("how", ["dropped", "repeated"])
def test_a_line_that_was_dropped_or_repeated_is_found(quiet, how, step):
    line = next(record for record in quiet if isinstance(record, StepCommitted) and record.step == step)
    records = [record for record in quiet if record is not line] if how == "dropped" else [*quiet, line]

    found = CertifiedSteps(records, "it").check()

    assert f"step {step}: " in found[0].what, found
    word = "repeated" if how == "repeated" else "no lines" if step == reference.STEPS - 1 else "missing"
    assert word in found[0].what


def test_a_worker_that_had_another_state_is_named_though_nothing_came_of_it(quiet):
    ends = [record for record in quiet if isinstance(record, Finished)]
    odd = [dataclasses.replace(r, link="0" * 32) if r is ends[2] else r for r in quiet]

    assert CertifiedSteps(odd, "it").check() == []
    (found,) = CertifiedSteps(odd, "it").check_workers()
    assert found.what.startswith("worker 2 had a state that dif")


def test_a_run_without_a_certificate_is_refused(tmp_path):
    found = records_of(tmp_path / "run", workers=1, certificate=False)

    with pytest.raises(ConfigError, match=r"the steps of it have no certificate: .*--no-certificate"):
        CertifiedSteps(found, "it")


@pytest.mark.parametrize("ids", [[1, 2, 4], [1, 2, 3, 3], [2, 1, 3], []])
def test_a_sample_that_is_altered_repeated_swapped_or_dropped_makes_another_digest(ids):
    def digest(*slices):
        return digest_of_ids((n, b"".join(i.to_bytes(8, "little") for i in one)) for n, one in enumerate(slices))

    assert digest([0], ids) != digest([0], [1, 2, 3])
    assert digest([0, 1], [2, 3]) != digest([0], [1, 2, 3]), "in which slice it is counts"


# -- where two runs part


def forged(records, step, **fields):
    """Return the records with a step altered, and all links made anew from there."""
    before, found = None, []
    for record in records:
        if isinstance(record, StepCommitted) and record.step >= step:
            record = dataclasses.replace(record, **(fields if record.step == step else {}))
            before = before or links(records)[step - 1]
            names = ("step", "epoch", "samples", "ids", "figures", "state")
            before = link_of(before, **{name: getattr(record, name) for name in names})
            record = dataclasses.replace(record, link=before)
        elif isinstance(record, Finished):
            record = dataclasses.replace(record, link=before)
        found.append(record)
    return found


def test_links_that_were_made_anew_from_altered_samples_differs_from_what_is_done_again(quiet):
    made = CertifiedSteps(forged(quiet, 5, ids="0" * 32), "forged")

    parting = compare_runs(made, CertifiedSteps(quiet, "again")).divergence

    assert (parting.step, parting.what) == (5, ("samples",))
    assert made.check() == [], "by themselves they hold"


def write(folder, records):
    write_report(records, folder, started=range(4), wall_s=1.0, seed=0)
    return folder


def run_command(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda quiet, ends: [r for r in quiet if not (isinstance(r, StepCommitted) and r.step == 5)], "B  step 5: its line is missing"),
        (
            lambda quiet, ends: [dataclasses.replace(r, sha256="0" * 64) if r is ends[2] else r for r in quiet],
            f"B  step {reference.STEPS}: workers 0, 1, 2, 3 ended with different states",
        ),
        (lambda quiet, ends: [dataclasses.replace(r, link="0" * 32) if r is ends[2] else r for r in quiet], "B  worker 2 had a state that differs"),
    ],
    ids=["gap", "other end", "other state"],
)  # fmt: skip
def test_runs_whose_records_do_not_hold_are_not_called_the_same(tmp_path, quiet, capsys, harm, said):
    ends = [record for record in quiet if isinstance(record, Finished)]
    folders = write(tmp_path / "a", quiet), write(tmp_path / "b", harm(quiet, ends))

    code, out = run_command(capsys, "diff-runs", *folders)
    told = json.loads(run_command(capsys, "diff-runs", *folders, "--json")[1])

    assert code == 3
    assert said in out
    assert "according to these records: identical to " in out
    assert told["same"] is False
    assert [bool(found) for found in told["findings"]] == [False, True]


def test_runs_with_different_seeds_part_at_the_first_step(tmp_path, quiet, capsys):
    other = records_of(tmp_path / "run", workers=4, seed=8)

    code, out = run_command(capsys, "diff-runs", write(tmp_path / "a", quiet), write(tmp_path / "b", other))

    assert code == 1
    assert "different seed: 7 / 8" in out
    assert "they diverge at step 0: the samples, the metrics" in out


def test_the_first_step_tensor_and_index_that_differ_are_named_with_both_values(tmp_path, quiet, capsys):
    """A bit flips in a weight of the lowest worker before step 5."""
    saving = {"checkpoint_every": 3, "workers": 2}
    runs = [
        records_of(tmp_path / "one", checkpoint_dir=str(tmp_path / "c1"), **saving),
        records_of(
            tmp_path / "two",
            checkpoint_dir=str(tmp_path / "c2"),
            guard="off",
            faults=plan("flip:rank=0,step=5,target=weights,at=5.weight,seed=2,bits=20"),
            **saving,
        ),
    ]

    code, out = run_command(
        capsys, "diff-runs", *(write(tmp_path / name, run) for name, run in zip("ab", runs, strict=True))
    )

    assert code == 1
    assert "identical to step 4\nthey diverge at step 5: the state before it, the metrics\n" in out
    assert "the state differs in 0.bias[0:8] .. 5.weight[0:10]" in out
    assert "it was the same before step 4" in out
    states = [CheckpointStore(tmp_path / name).load(6).state["replica"] for name in ("c1", "c2")]
    named = out.splitlines()[-1].removeprefix("saved before step 6, first difference: ")
    path, _, values = named.partition("[")
    index, _, values = values.partition("]: ")
    one, other = (state["model"][path.removeprefix("model/")] for state in states)
    at = tuple(map(int, index.split(",")))
    assert [float(value) for value in values.split(" / ")] == [one[at].item(), other[at].item()]
    assert one[at] != other[at]
    first = int((one != other).reshape(-1).nonzero()[0])
    assert list(at) == [int(i) for i in torch.unravel_index(torch.tensor(first), one.shape)]


# -- what is run again

STRANGE = "open('it_ran', 'w').write(' '.join(__import__('sys').argv[1:]))\n"
JOB = {"args": ["--epochs", "3"], "settings": {"workers": 4}, "threads": "1"}


@pytest.fixture
def unpacked(tmp_path, quiet, monkeypatch):
    """A report folder that came from elsewhere, with the script that it names and the script's sha256."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "strange.py"
    script.write_text(STRANGE)
    sha256 = hashlib.sha256(script.read_bytes()).hexdigest()
    job = JOB | {"path": str(script), "sha256": sha256}
    write_report(quiet, tmp_path / "report", started=range(4), wall_s=1.0, seed=0, job=job)
    return job


def say_of_job(folder, **job):
    """Alter what the report says of the job."""
    path = folder / "report.json"
    report = json.loads(path.read_text())
    path.write_text(json.dumps(report | {"job": report["job"] | job}))


@pytest.mark.parametrize("path", ["absolute", "strange.py"])
def test_a_script_that_a_report_from_elsewhere_names_is_shown_and_not_run(tmp_path, unpacked, capsys, path):
    say_of_job(tmp_path / "report", path=unpacked["path"] if path == "absolute" else path)

    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path / "report")])

    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1), said
    assert f"{tmp_path}/strange.py --epochs 3, which this user has not run here" in said
    assert "--script FILE, or --trust" in said
    assert not Path("it_ran").exists()


@pytest.mark.parametrize("how", ["run here", "trusted", "named"])
def test_a_script_that_was_run_here_or_is_trusted_or_named_is_run(tmp_path, unpacked, capsys, how):
    if how == "run here":
        note(unpacked)
    words = {"run here": [], "trusted": ["--trust"], "named": ["--script", unpacked["path"]]}[how]

    with pytest.raises(SystemExit):
        main(["verify", str(tmp_path / "report"), *words])

    assert Path("it_ran").read_text() == "--epochs 3", capsys.readouterr().err


@pytest.mark.parametrize(
    "job", [{"path": 5}, {"args": "rm"}, {"args": [1]}, {"sha256": None}, {"settings": 3}, {"threads": 4}], ids=str
)
def test_a_job_that_no_run_writes_is_refused_in_one_line(tmp_path, unpacked, capsys, job):
    say_of_job(tmp_path / "report", **job)

    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path / "report")])

    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1), said
    assert "does not describe the job" in said
