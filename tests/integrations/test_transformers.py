"""``holdfast.integrations.transformers``: the Trainer computes what Transformers' own computes, and survives failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

from hf_tiny import LENGTH, VOCABULARY, arguments, sha256, tiny_model, tokens  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

from holdfast.config import RESPAWNS, Settings  # noqa: E402
from holdfast.errors import ConfigError  # noqa: E402
from holdfast.faults.kinds import parse  # noqa: E402
from holdfast.faults.plan import FaultPlan  # noqa: E402
from holdfast.integrations import transformers_checks as checks  # noqa: E402
from holdfast.integrations.folders import complete_folder  # noqa: E402
from holdfast.integrations.transformers import HoldfastCallback, Seq2SeqTrainer, Trainer  # noqa: E402
from holdfast.integrations.transformers_files import read_job  # noqa: E402
from holdfast.session.session import Session  # noqa: E402

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore")]  # Transformers warns


@pytest.fixture
def three(monkeypatch):
    """Three workers in this process."""
    monkeypatch.setenv("HOLDFAST_FABRIC", "virtual")
    monkeypatch.setenv("HOLDFAST_WORKERS", "3")
    return monkeypatch


class Tagger(nn.Module):
    """Classifies each token; its loss is the mean over the labels, whatever Transformers counts."""

    config = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def summed(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (lambda: tiny_model(dropout=0.0), {}),
        (lambda: tiny_model(dropout=0.0), {"label_smoothing_factor": 0.1}),
        (Tagger, {}),
        (Tagger, {"label_smoothing_factor": 0.1}),
        (Tagger, {"compute_loss_func": summed}),
    ],
    ids=["causal", "causal-smoothed", "tagger", "tagger-smoothed", "loss-function"],
)
def test_the_loss_is_the_mean_over_the_labels_of_the_mini_batch(three, tmp_path, model, more):
    """Slices have 15 to 39 labels: a mean of slice means would be another number."""
    keywords = {name: more[name] for name in more if name == "compute_loss_func"}
    given = {name: more[name] for name in more if name not in keywords}
    args = {"max_steps": 3, "train_sampling_strategy": "sequential", "logging_strategy": "steps", "logging_steps": 1}
    trainers = [
        kind(
            model=model(),
            args=arguments(tmp_path, **args, **given),
            train_dataset=tokens(24, ragged=True),
            **keywords,
        )
        for kind in (Trainer, transformers.Trainer)
    ]

    for trainer in trainers:
        trainer.train()

    ours, theirs = (trainer.state.log_history for trainer in trainers)
    assert [row["loss"] for row in ours[:3]] == pytest.approx([row["loss"] for row in theirs[:3]], rel=1e-5)
    assert [row["grad_norm"] for row in ours[:3]] == pytest.approx([row["grad_norm"] for row in theirs[:3]], rel=1e-4)


@pytest.mark.parametrize("model", [lambda: tiny_model(dropout=0.0), Tagger], ids=["causal", "tagger"])
def test_a_slice_without_a_label_counts_for_nothing(three, tmp_path, model):
    dataset = tokens(6, ragged=True)
    for sample in dataset[2:4]:  # the second of three slices
        sample["labels"] = torch.full_like(sample["labels"], -100)
    models = [model(), model()]
    for kind, one in zip((Trainer, transformers.Trainer), models, strict=True):
        args = arguments(tmp_path, max_steps=2, train_sampling_strategy="sequential", optim="sgd")
        kind(model=one, args=args, train_dataset=dataset).train()

    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())


def test_a_mean_over_samples_counts_samples(three, tmp_path):
    """The last mini-batch has five samples, and its slices two, two and one."""

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 1)

        def forward(self, x, labels=None):
            return {"loss": F.mse_loss(self.layer(x)[:, 0], labels)}

    torch.manual_seed(2)
    dataset = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(11)]
    models = [Regression(), Regression()]
    for kind, model in zip((Trainer, transformers.Trainer), models, strict=True):
        args = arguments(tmp_path, num_train_epochs=2, train_sampling_strategy="sequential", optim="sgd")
        kind(model=model, args=args, train_dataset=dataset).train()

    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())


def trained(folder: Path, **given) -> tuple[str, Trainer]:
    given = {"max_steps": 5} | given
    trainer = Trainer(
        model=tiny_model(), args=arguments(folder, **given), train_dataset=tokens(24), eval_dataset=tokens(4)
    )
    trainer.train()
    return sha256(trainer.model), trainer


def test_accumulated_batches_are_one_mini_batch(three, tmp_path):
    whole, _ = trained(tmp_path)
    accumulated, trainer = trained(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=3)

    assert accumulated == whole
    assert trainer.args.gradient_accumulation_steps == 3
    assert trainer.state.epoch == 1.25


def test_with_more_accumulation_than_workers_slices_stay_as_small_as_a_batch(monkeypatch, tmp_path):
    _, trainer = trained(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=3, max_steps=1)

    assert trainer.holdfast_loop.session.num_slices == 3


def test_no_worker_needs_to_survive_for_the_bits(three, tmp_path):
    undisturbed, _ = trained(tmp_path)
    plan = FaultPlan((parse("kill:rank=1,step=1,phase=allreduce"), parse("kill:rank=0,step=3,phase=forward")))
    three.setenv("HOLDFAST_FAULTS", plan.to_json())
    disturbed, trainer = trained(tmp_path)

    assert trainer.holdfast_loop.session.world_size == 1
    assert disturbed == undisturbed
    three.delenv("HOLDFAST_FAULTS")
    three.setenv("HOLDFAST_SLICES", "2")
    assert trained(tmp_path)[0] != undisturbed


def test_workers_fail_in_an_evaluation_and_while_saving(three, tmp_path):
    given = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4}
    undisturbed, _ = trained(tmp_path, **given)
    plan = FaultPlan((parse("kill:rank=1,step=2,phase=evaluate"), parse("kill:rank=0,step=4,phase=save")))
    three.setenv("HOLDFAST_FAULTS", plan.to_json())
    disturbed, trainer = trained(tmp_path, **given)

    assert trainer.holdfast_loop.session.world_size == 1
    assert disturbed == undisturbed


def test_without_a_framework_a_fault_in_an_evaluation_is_refused(three):
    plan = FaultPlan((parse("kill:rank=1,step=0,phase=evaluate"),))
    model = nn.Linear(2, 1)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), faults=plan.to_json())

    with pytest.raises(ConfigError, match="exist only for the Trainer"):
        next(session.steps(torch.utils.data.TensorDataset(torch.zeros(6, 2)), batch_size=6))


def test_a_second_trainer_in_a_process_of_a_job_is_refused(monkeypatch):
    monkeypatch.setattr(checks, "_started", [])
    checks.check_alone(Settings(fabric="virtual"))
    checks.check_alone(Settings(fabric="virtual"))

    with pytest.raises(ConfigError, match="a job of its own"):
        checks.check_alone(Settings(fabric="gloo"))


def test_training_continues_from_a_checkpoint_with_the_same_bits_on_fewer_workers(three, tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 3, "max_steps": 7}
    whole, _ = trained(tmp_path, **saves)
    three.setenv("HOLDFAST_WORKERS", "2")
    trainer = Trainer(model=tiny_model(), args=arguments(tmp_path, **saves), train_dataset=tokens(24))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))

    assert trainer.holdfast_loop.session.num_slices == 3
    assert sha256(trainer.model) == whole
    assert trainer.state.global_step == 7
    with pytest.raises(ConfigError, match="first call of train"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def test_training_continues_from_a_checkpoint_of_the_session(three, tmp_path):
    whole, _ = trained(tmp_path / "whole", max_steps=11)
    three.setenv("HOLDFAST_CHECKPOINT_DIR", str(tmp_path / "kept"))
    three.setenv("HOLDFAST_STOP_AFTER", "6")
    with pytest.raises(SystemExit, match="4"):
        trained(tmp_path / "stopped", max_steps=11, logging_strategy="steps", logging_steps=1)
    three.delenv("HOLDFAST_STOP_AFTER")
    three.setenv("HOLDFAST_RESUME", "1")
    resumed, trainer = trained(tmp_path / "resumed", max_steps=11, logging_strategy="steps", logging_steps=1)

    assert resumed == whole
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == list(range(1, 12))
    with pytest.raises(ConfigError, match="leave out one of them"):
        trainer.train(resume_from_checkpoint=str(tmp_path))


def test_the_best_model_is_loaded_although_its_checkpoint_is_gone(three, tmp_path):
    each = {"save_steps": 1, "save_strategy": "steps", "eval_steps": 1, "eval_strategy": "steps", "max_steps": 4}
    given = arguments(tmp_path, **each, load_best_model_at_end=True, greater_is_better=True, save_total_limit=2)
    trainer = Trainer(model=tiny_model(), args=given, train_dataset=tokens(24), eval_dataset=tokens(4))
    trainer.train()

    losses = {row["step"]: row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row}
    best = max(losses, key=losses.get)
    assert best < 4, "training must make the loss smaller"
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    kept = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / f"checkpoint-{best}")
    assert sha256(kept) == sha256(trainer.model)
    assert read_job(tmp_path / "checkpoint-4")["slices"] == 3


class StopsAfter(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop |= state.global_step == self.step


def test_a_callback_that_stops_training_is_heard_by_all_after_the_next_step(three, tmp_path):
    trainer = Trainer(
        model=tiny_model(), args=arguments(tmp_path, max_steps=9), train_dataset=tokens(24), callbacks=[StopsAfter(3)]
    )

    assert trainer.train().global_step == 4
    assert trainer.train().global_step == 4


def test_a_metric_stops_training_at_once(three, tmp_path):
    args = arguments(
        tmp_path,
        max_steps=9,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        greater_is_better=True,  # the loss only becomes smaller
    )
    trainer = Trainer(
        model=tiny_model(),
        args=args,
        train_dataset=tokens(24),
        eval_dataset=tokens(4),
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=2)],
    )

    assert trainer.train().global_step == 3
    assert trainer.state.best_global_step == 1


def test_training_again_continues_with_the_same_session(three, tmp_path):
    first, trainer = trained(tmp_path, max_steps=2)
    output = trainer.train()

    assert output.global_step == 2
    assert trainer.holdfast_loop.session.step == 4
    assert sha256(trainer.model) != first


def test_a_sequence_to_sequence_trainer_generates_in_evaluation(three, tmp_path):
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=6,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        predict_with_generate=True,
        generation_max_length=4,
    )
    found = []

    def lengths(prediction) -> dict[str, float]:
        found.append(prediction.predictions.shape)
        return {}

    trainer = Seq2SeqTrainer(
        model=transformers.T5ForConditionalGeneration(config),
        args=args,
        train_dataset=tokens(12),
        eval_dataset=tokens(4),
        compute_metrics=lengths,
    )
    trainer.train()
    trainer.evaluate()

    assert trainer.state.global_step == 2
    assert [shape[0] for shape in found] == [4]


def test_tokens_and_operations_are_those_of_the_whole_mini_batch(three, tmp_path):
    _, ours = trained(tmp_path, include_num_input_tokens_seen="all", max_steps=2)
    theirs = transformers.Trainer(
        model=tiny_model(),
        args=arguments(tmp_path, include_num_input_tokens_seen="all", max_steps=2),
        train_dataset=tokens(24),
    )
    theirs.train()

    assert ours.state.num_input_tokens_seen == theirs.state.num_input_tokens_seen == 2 * 6 * LENGTH
    assert ours.state.total_flos == pytest.approx(theirs.state.total_flos)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fp16": True}, "use bf16=True"),
        ({"torch_compile": True}, "torch_compile is not supported"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is not supported"),
        ({"push_to_hub": True, "hub_token": "x"}, "call trainer.push_to_hub"),
        ({"save_on_each_node": True}, "only the lead saves"),
        ({"optim": "adalomo"}, "before the step is committed"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_argument_that_cannot_be_used_is_refused_in_one_line(tmp_path, given, said):
    with pytest.raises(ConfigError, match=said) as refused:
        Trainer(model=tiny_model(), args=arguments(tmp_path, **given), train_dataset=tokens(6))

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("HOLDFAST_STRATEGY", "restart", "use rollback or forward"),
        ("HOLDFAST_GUARD", "heal", "use --guard stop"),
        ("HOLDFAST_BATCH", "local", "has counted the steps"),
        (RESPAWNS, "3", "use --spares"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_in_one_line(monkeypatch, tmp_path, variable, value, said):
    monkeypatch.setenv(variable, value)

    with pytest.raises(ConfigError, match=said) as refused:
        Trainer(model=tiny_model(), args=arguments(tmp_path), train_dataset=tokens(6))

    assert "\n" not in str(refused.value)


def test_samples_in_an_order_of_their_own_are_refused(tmp_path):
    args = arguments(tmp_path, max_steps=1, train_sampling_strategy="group_by_length")
    trainer = Trainer(model=tiny_model(), args=args, train_dataset=tokens(6))

    with pytest.raises(ConfigError, match="LengthGroupedSampler is not supported"):
        trainer.train()


def test_searching_hyperparameters_is_refused(tmp_path):
    trainer = Trainer(model=tiny_model(), args=arguments(tmp_path), train_dataset=tokens(6))

    with pytest.raises(ConfigError, match="a job for each trial"):
        trainer.hyperparameter_search()


def test_the_callback_names_the_backend_that_it_needs(tmp_path):
    trainer = transformers.Trainer(
        model=tiny_model(), args=arguments(tmp_path), train_dataset=tokens(6), callbacks=[HoldfastCallback()]
    )

    with pytest.raises(ConfigError, match=r'init_process_group\("holdfast"\)'):
        trainer.train()


def test_a_folder_appears_once_it_is_complete(tmp_path):
    def write(folder: Path, text: str, *, fails: bool = False) -> None:
        with complete_folder(folder, replaces=True) as part:
            (part / "state.json").write_text(text)
            if fails:
                raise InterruptedError

    write(tmp_path / "checkpoint-1", "one")
    with pytest.raises(InterruptedError):
        write(tmp_path / "checkpoint-2", "two", fails=True)

    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-1")
    write(tmp_path / "checkpoint-2", "two")
    write(tmp_path / "checkpoint-1", "1")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-2"}
    assert (tmp_path / "checkpoint-1" / "state.json").read_text() == "1"


def test_files_are_moved_into_a_folder_that_holds_others(tmp_path):
    (tmp_path / "out" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "out" / "config.json").write_text("old")
    with complete_folder(tmp_path / "out") as part:
        (part / "config.json").write_text("new")
        assert (tmp_path / "out" / "config.json").read_text() == "old"

    assert (tmp_path / "out" / "config.json").read_text() == "new"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-1", "config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_another_run_replaces_the_checkpoints_of_an_earlier_one(three, tmp_path):
    given = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trained(tmp_path, **given)
    weights, _ = trained(tmp_path, seed=1, **given)

    assert sha256(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-2")) == weights


def test_the_arguments_are_saved_as_the_script_gave_them(three, tmp_path):
    trained(tmp_path, gradient_accumulation_steps=2, save_strategy="steps", save_steps=2, max_steps=2)

    saved = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert saved.gradient_accumulation_steps == 2
    assert json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2
