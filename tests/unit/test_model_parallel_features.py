"""What the training of a split model may have besides: the same bits after deaths, and others where it depends on the worker."""

import planned
import pytest
import reference
import soak
import torch
import train_split
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import holdfast

KILLS = planned.faults("kill:rank=1,step=3,phase=backward", "kill:rank=0,step=7,phase=optimizer")
CASES = [(kind, feature) for kind in soak.SPLIT for feature in soak.FEATURES[kind] if feature != "loaders"]


class NoiseOfMany(reference.Noisy):
    """Noise that is as large as there are workers."""

    def __init__(self, training):
        self.training = training

    def __getitem__(self, number):
        x, y = super().__getitem__(number)
        return x + 0.01 * self.training.session.world_size, y


class Training:
    """One training of a split model, by workers that one process plays.

    Args:
        kind: ``"pipeline"`` or ``"sharded"``.
        features: Of it.
        broken: One of them that is made to depend on who is there.
        faults: That strike it.
    """

    def __init__(self, kind, features, broken="", faults=""):
        self.features, self.broken = features, broken
        self.module = reference.make_model("cnn")
        train_split.Stage.features = features
        kinds = {
            "pipeline": lambda: holdfast.Pipeline(train_split.stages(), self.loss),
            "sharded": lambda: holdfast.Sharded(self.module, shards=4),
        }
        self.ema = reference.make_ema(self.module) if "ema" in features else None
        with_them = train_split.trained_with(features) | self.broken_ones()
        settings = {"workers": 4, "slices": 4, "seed": reference.SEED, "bucket_bytes": 4096, "faults": faults}
        self.session = holdfast.Session(kinds[kind](), self.make_optimizer, **with_them, **settings)
        if self.ema is not None and broken != "ema":
            self.session.register(ema=self.ema)

    def few(self):
        return self.session.world_size < 4

    def broken_ones(self):
        def average(averages, weights, count):
            get_ema_multi_avg_fn(0.5 if self.few() else 0.9)(averages, weights, count)

        ones = {
            "clip": {"clip_grad_norm": None},
            "scheduler": {
                "scheduler": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda _: 0.5 if self.few() else 1.0)
            },
            "average": {"average": lambda module: AveragedModel(module, multi_avg_fn=average)},
        }
        return ones.get(self.broken, {})

    def make_optimizer(self, parameters):
        parameters = list(parameters)
        for parameter in parameters if self.broken == "clip" else ():
            parameter.register_hook(
                lambda grad: grad.clamp(-0.01 * self.session.world_size, 0.01 * self.session.world_size)
            )
        return torch.optim.Adam(parameters, lr=1e-3)

    def loss(self, output, labels):
        value = F.cross_entropy(output, labels)
        return value * (1 + 1 / self.session.world_size) if self.broken == "scaler" else value

    def data(self):
        if "augment" not in self.features:
            return TensorDataset(*reference.data())
        return NoiseOfMany(self) if self.broken == "augment" else reference.Noisy()

    def evaluate(self, step):
        data = TensorDataset(*reference.data())
        if isinstance(step, holdfast.models.step.StagedStep):
            step.evaluate(data, 16)
            modules = [held.model for held in self.session._trainable.resident.held.values()]
        else:
            with torch.no_grad():
                self.module.eval()(data.tensors[0])
            self.module.train()
            modules = [self.module]
        if self.broken == "evaluate" and self.few():
            for module in modules:
                module.eval()

    def compute(self, step):
        if isinstance(step, holdfast.models.step.StagedStep):
            step.compute()
            return
        for x, y in step:
            with reference.lower_precision(self.features):
                value = self.loss(self.module(x), y)
            step.backward(value)

    def end(self):
        """Train, and return the hash of all weights, averages and optimizers."""
        for step in self.session.steps(
            self.data(), reference.BATCH, reference.EPOCHS, num_workers=1 if "loaders" in self.features else 0
        ):
            if self.ema is not None and step.number:
                self.ema.update_parameters(self.module)
            if "evaluate" in self.features and step.number % 3 == 0:
                self.evaluate(step)
            self.compute(step)
        return self.session._trainable._sha256s, None if self.ema is None else reference.ema_hash(self.ema)


pytestmark = pytest.mark.filterwarnings(
    "ignore:Detected call of `lr_scheduler.step"
)  # the scaler skips the first steps


@pytest.mark.parametrize("kind", soak.SPLIT)
def test_deaths_change_no_bit_whatever_a_training_has(kind):
    features = soak.FEATURES[kind]

    assert Training(kind, features, faults=KILLS).end() == Training(kind, features).end()


@pytest.mark.parametrize(("kind", "feature"), CASES, ids=map("-".join, CASES))
def test_deaths_change_the_bits_of_what_depends_on_who_is_there(kind, feature):
    """The negative controls, one a feature."""
    assert Training(kind, (feature,), feature, faults=KILLS).end() != Training(kind, (feature,), feature).end()
