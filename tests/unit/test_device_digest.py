"""The digest of what is on a device: its definition, in Python; and how the fingerprint uses it. No device is needed."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from holdfast.integrity import device_digest, fingerprint
from holdfast.integrity.device_digest import mixed_sum, num_words, read
from holdfast.integrity.fingerprint import EVERYTHING, RotatingDigest, digests_of
from holdfast.integrity.recompute_check import RecomputeCheck

MASK = (1 << 64) - 1


def reference(data: bytes, first: int = 0) -> int:
    """The definition, word by word."""
    data += bytes(-len(data) % 8)
    total = 0
    for i in range(len(data) // 8):
        word = int.from_bytes(data[8 * i : 8 * i + 8], "little")
        x = (word + (first + i + 1) * 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        total += x ^ (x >> 31)
    return total & MASK


def bytes_of(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tensors():
    generator = torch.Generator().manual_seed(1)
    real = torch.randn(37, 13, generator=generator)
    yield from (real, real.double(), real.bfloat16(), real.half(), real.t(), real[3:9], real[1:, 1:], real[0, :1])
    yield from (real > 0, (real * 99).to(torch.int8), real.to(torch.complex64), torch.tensor(3.0), real[:0])
    yield from (torch.tensor([float("nan"), -0.0, 0.0, float("inf")]), torch.full((4,), -1, dtype=torch.int64))
    yield torch.arange(100, dtype=torch.uint8)[3:]  # its words are not aligned
    yield torch.arange(96, dtype=torch.uint8)[4:36]


@pytest.mark.parametrize("tensor", list(tensors()), ids=lambda t: f"{t.dtype}{tuple(t.shape)}")
@pytest.mark.parametrize("first", [0, 12345])
def test_the_digest_is_what_its_definition_says(tensor, first):
    assert read([mixed_sum(tensor, first)]) == [reference(bytes_of(tensor), first)]
    assert num_words(tensor) == -(-len(bytes_of(tensor)) // 8)


def test_parts_add_up_in_any_order_and_chunks_are_parts(monkeypatch):
    words = torch.randint(-(1 << 62), 1 << 62, (1000,), generator=torch.Generator().manual_seed(2))
    whole = mixed_sum(words)

    assert torch.equal(mixed_sum(words[600:], 600) + mixed_sum(words[:600]), whole)
    monkeypatch.setattr(device_digest, "_CHUNK", 7)
    assert torch.equal(mixed_sum(words), whole)


def test_every_flipped_bit_and_every_exchange_of_two_words_is_found():
    words = torch.randint(-(1 << 62), 1 << 62, (16,), generator=torch.Generator().manual_seed(3))
    digests = {int(mixed_sum(words))}
    for place in range(16):
        for bit in range(64):
            other = words.clone()
            other[place] ^= -(1 << 63) if bit == 63 else 1 << bit
            digests.add(int(mixed_sum(other)))
    for i in range(16):
        for j in range(i):
            other = words.clone()
            other[i], other[j] = words[j], words[i]
            digests.add(int(mixed_sum(other)))

    assert len(digests) == 1 + 16 * 64 + 16 * 15 // 2


def test_on_a_gpu_the_host_reads_nothing_until_the_end():
    """A fake GPU raises wherever the host would read a value, as reading the digests does."""
    with FakeTensorMode():
        tensor = torch.empty(33, 7, dtype=torch.bfloat16, device="cuda")
        total = mixed_sum(tensor)
        assert (total.device.type, total.dtype, total.shape) == ("cuda", torch.int64, ())
        with pytest.raises(DataDependentOutputException):
            read([total])


# -- in the fingerprint


@contextlib.contextmanager
def counted_reads(monkeypatch):
    """Count how often the host reads a tensor, with every tensor taken for one on a device."""
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(fingerprint, "is_on_device", lambda tensor: True)
    monkeypatch.setattr(fingerprint, "raw", lambda tensor: pytest.fail("all bytes were copied"))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.numel()) or tolist(self))
    yield reads


@pytest.fixture
def trained():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 700))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 40)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_step_copies_two_numbers_and_a_whole_hash_one_a_tensor(trained, monkeypatch):
    model, optimizer = trained
    digest = RotatingDigest(model, optimizer, buffers=model.named_buffers())
    named = list(digest.tensors())

    with counted_reads(monkeypatch) as reads:
        taken = [digest.take(step) for step in range(3)]
        everything = digests_of(named)

    assert reads == [2, 2, 2, len(named)]
    assert len(set(taken)) == 3
    assert everything == {name: f"{reference(bytes_of(tensor)):016x}" for name, tensor in named}


def test_replicas_with_equal_bits_have_equal_digests_and_one_flipped_bit_changes_them(trained, monkeypatch):
    model, optimizer = trained
    with counted_reads(monkeypatch):
        digest = RotatingDigest(model, optimizer)
        before = digest.of_step(EVERYTHING), digest.of_step(EVERYTHING, ("weights",)), digest.take(0)
        assert before == (digest.of_step(EVERYTHING), digest.of_step(EVERYTHING, ("weights",)), digest.take(0))

        model[0].weight.data.view(torch.int32)[3, 3] ^= 1

        assert digest.of_step(EVERYTHING) != before[0]
        assert digest.of_step(EVERYTHING, ("optimizer",)) != digest.of_step(EVERYTHING, ("weights",)) != before[1]


def test_a_state_in_part_on_the_cpu_is_covered_whole(trained, monkeypatch):
    """Adam keeps its number of steps on the CPU."""
    model, optimizer = trained
    monkeypatch.setattr(fingerprint, "is_on_device", lambda tensor: tensor.dim() > 0)
    digest = RotatingDigest(model, optimizer)
    before = digest.of_step(EVERYTHING)

    optimizer.state[model[0].weight]["step"] += 1
    after = digest.of_step(EVERYTHING)
    optimizer.state[model[0].weight]["exp_avg"][0, 0] += 1

    assert len({before, after, digest.of_step(EVERYTHING)}) == 3


def test_gradients_that_are_computed_again_are_compared_on_the_device(monkeypatch):
    monkeypatch.setattr("holdfast.integrity.recompute_check.is_on_device", lambda tensor: True)
    check, gradient = RecomputeCheck(), torch.randn(50)

    assert check.note(3, 0, [gradient]) is False
    check.go_back(3)
    assert check.note(3, 0, [gradient.clone()]) is False
    check.go_back(3)
    assert check.note(3, 0, [gradient + 1]) is True
