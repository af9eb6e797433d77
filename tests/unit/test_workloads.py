from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import holdfast
from holdfast.workloads import DATASETS, MODELS, OPTIMIZERS, load_dataset, make_model, make_optimizer
from holdfast.workloads.data import digits, fashion_mnist, read_idx
from holdfast.workloads.train import accuracy


@pytest.fixture
def torch_as_it_was():
    yield
    torch.use_deterministic_algorithms(False)


def write_idx(path: Path, array: np.ndarray, *, kind: int = 8, cut: int = 0) -> Path:
    """Write ``array`` as a gzip-compressed idx file that lacks its last ``cut`` bytes."""
    head = bytes((0, 0, kind, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    content = head + array.tobytes()
    path.write_bytes(gzip.compress(content[: len(content) - cut]))
    return path


@pytest.fixture
def fashion_dir(tmp_path):
    rng = np.random.default_rng(0)
    for part, count in (("train", 5), ("t10k", 3)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.arange(count, dtype=np.uint8))
    return tmp_path


def test_digits_are_scaled_images_of_every_class():
    train, test = digits()

    assert (len(train), len(test)) == (1497, 300)
    x, y = train.tensors
    assert x.shape == (1497, 1, 8, 8)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert (x.min(), x.max()) == (0, 1)
    assert set(y.tolist()) == set(test.tensors[1].tolist()) == set(range(10))


def test_digits_are_held_out_in_proportion():
    train, test = digits()

    share = test.tensors[1].bincount() / (train.tensors[1].bincount() + test.tensors[1].bincount())

    assert (share - 1 / 6).abs().max() < 0.005


def test_every_digit_is_in_one_set_and_they_are_those_of_scikit_learn():
    images, labels = load_digits(return_X_y=True)
    ours = [torch.cat([x.flatten(1) * 16, y.unsqueeze(1)], dim=1) for x, y in (part.tensors for part in digits())]

    expected = np.column_stack([images, labels])

    assert sorted(map(tuple, torch.cat(ours).tolist())) == sorted(map(tuple, expected.tolist()))


def test_digits_are_the_same_if_scikit_learn_moves_its_file(monkeypatch):
    usual = digits()
    monkeypatch.setattr(Path, "is_file", lambda _: False)

    for one, other in zip(usual, digits(), strict=True):
        assert torch.equal(one.tensors[0], other.tensors[0])
        assert torch.equal(one.tensors[1], other.tensors[1])


def test_digits_without_scikit_learn_say_how_to_get_them(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(holdfast.ConfigError, match=r"pip install 'holdfast\[study\]'"):
        digits()


def test_fashion_mnist_reads_the_original_files(fashion_dir):
    train, test = fashion_mnist(fashion_dir)

    assert train.tensors[0].shape == (5, 1, 28, 28)
    assert 0 <= train.tensors[0].min() <= train.tensors[0].max() <= 1
    assert test.tensors[1].tolist() == [0, 1, 2]


def test_idx_keeps_every_byte(tmp_path):
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)

    assert np.array_equal(read_idx(write_idx(tmp_path / "a.gz", array), dimensions=3), array)


def test_a_missing_file_is_named_with_its_companions(tmp_path):
    with pytest.raises(
        holdfast.ConfigError, match=r"train-images-idx3-ubyte\.gz does not exist; expected in .*t10k-labels"
    ):
        fashion_mnist(tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = write_idx(tmp_path / "a.gz", np.zeros((2, 2), np.uint8), kind=13)

    with pytest.raises(
        holdfast.ConfigError, match=r"a\.gz is not an idx file: it starts with 00 00 0d 02, expected 00 00 08 02"
    ):
        read_idx(path, dimensions=2)


def test_too_little_data_is_refused(tmp_path):
    path = write_idx(tmp_path / "a.gz", np.zeros((2, 5), np.uint8), cut=3)

    with pytest.raises(holdfast.ConfigError, match=r"a\.gz holds 7 bytes of data, expected 10 for shape \(2, 5\)"):
        read_idx(path, dimensions=2)


def test_a_header_without_its_sizes_is_refused(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes((0, 0, 8, 1, 0))))

    with pytest.raises(holdfast.ConfigError, match="its header has 5 bytes, expected 8"):
        read_idx(tmp_path / "a.gz", dimensions=1)


@pytest.mark.parametrize("keep", [0, 1, 12, -20, -9, -4])
def test_a_file_cut_anywhere_is_refused(tmp_path, keep):
    path = write_idx(tmp_path / "a.gz", np.arange(200, dtype=np.uint8))
    path.write_bytes(path.read_bytes()[:keep])

    with pytest.raises(holdfast.ConfigError, match=r"a\.gz"):
        read_idx(path, dimensions=1)


def test_a_file_that_is_not_compressed_is_refused(tmp_path):
    (tmp_path / "a.gz").write_bytes(b"not a gzip file")

    with pytest.raises(holdfast.ConfigError, match=r"cannot read .*a\.gz as a gzip file"):
        read_idx(tmp_path / "a.gz", dimensions=1)


def test_a_flipped_bit_in_the_compressed_data_is_found(tmp_path):
    path = write_idx(tmp_path / "a.gz", np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8))
    damaged = bytearray(path.read_bytes())
    damaged[500] ^= 1
    path.write_bytes(damaged)

    with pytest.raises(holdfast.ConfigError, match=r"a\.gz"):
        read_idx(path, dimensions=1)


def test_images_without_labels_of_their_own_are_refused(fashion_dir):
    write_idx(fashion_dir / "t10k-labels-idx1-ubyte.gz", np.zeros(4, np.uint8))

    with pytest.raises(holdfast.ConfigError, match=r"holds 3 images, but .* holds 4 labels"):
        fashion_mnist(fashion_dir)


def test_limit_keeps_the_first_training_samples():
    everything, _ = load_dataset("digits")
    train, test = load_dataset("digits", limit=10)

    assert torch.equal(train.tensors[0], everything.tensors[0][:10])
    assert len(test) == 300


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_dataset("mnist"), "dataset must be one of digits, fashion, got 'mnist'"),
        (lambda: load_dataset("digits", limit=0), "limit must be at least 1, got 0"),
        (lambda: load_dataset("fashion"), "say in which directory"),
        (lambda: make_model("gpt", (1, 8, 8)), "model must be one of mlp, cnn, got 'gpt'"),
        (lambda: make_optimizer("adamw", []), "optimizer must be one of sgd, adam, got 'adamw'"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_ones(call, message):
    with pytest.raises(holdfast.ConfigError, match=message):
        call()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28)])
def test_a_model_is_the_same_for_the_same_seed(name, shape):
    one, same, other = (make_model(name, shape, seed=seed) for seed in (3, 3, 4))

    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_making_a_model_draws_no_random_number_of_the_script(name):
    before = torch.get_rng_state()

    make_model(name, (1, 8, 8), seed=3)

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28)])
def test_a_model_can_be_trained_on_one_sample(name, shape):
    """The last slice of an epoch may hold no more."""
    model = make_model(name, shape)

    loss = model(torch.rand(1, *shape)).sum()
    loss.backward()

    assert torch.isfinite(loss)


def test_the_models_are_as_large_as_they_say():
    sizes = {name: sum(p.numel() for p in make_model(name, (1, 8, 8)).parameters()) for name in MODELS}

    assert sizes == {"mlp": 26122, "cnn": 55114}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_changes_what_it_is_given(name):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = make_optimizer(name, [weight])

    weight.sum().backward()
    optimizer.step()

    assert (weight < 1).all()


def test_accuracy_is_the_share_of_right_answers_and_leaves_the_mode():
    scores = torch.eye(10)
    model = torch.nn.Identity().train()
    test = TensorDataset(scores.repeat(250, 1), torch.arange(10).where(torch.arange(10) < 7, 0).repeat(250))

    assert accuracy(model, test) == pytest.approx(0.7)
    assert model.training


@pytest.mark.usefixtures("torch_as_it_was")
def test_the_workload_trains_as_one_worker(monkeypatch):
    from holdfast.workloads import train

    sessions = []
    make = holdfast.Session
    monkeypatch.setattr(holdfast, "Session", lambda *args, **kw: sessions.append(make(*args, **kw)) or sessions[-1])

    train.main(["--epochs", "3", "--model", "mlp", "--batch-size", "64"])

    assert sessions[0].step == 3 * 24
    assert sessions[0].metrics["loss"] < 1.0


def test_every_name_is_offered():
    assert (DATASETS, MODELS, OPTIMIZERS) == (("digits", "fashion"), ("mlp", "cnn"), ("sgd", "adam"))
