"""The ordered addition on a device: the kernel, in Triton's interpreter and as PTX, has the bits of the additions by torch.

Triton comes with wheels of torch for CUDA, so these tests of the kernel run where such a torch is installed, without a GPU.
"""

import importlib
import importlib.metadata
import itertools
import math
import random
import re
import sys
import warnings

import pytest
import torch

from holdfast.comm import MeanDivisor
from holdfast.comm.allreduce import adding, ordered_add
from holdfast.comm.allreduce.checksums import ChecksummedVector

needs_triton = pytest.mark.skipif(not ordered_add.HAS_TRITON, reason="needs Triton: make test-torch VERSION=2.14.1")
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)  # the interpreter's


def triton_version():
    return tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])


KERNEL = "holdfast.comm.allreduce.ordered_add_kernel"
DTYPES = (torch.float32, torch.bfloat16)
SLICES = ((0, 1), (0, 1, 2, 3, 4), (1, 2, 5, 6, 7, 12), tuple(range(16)), (3, 9, 10, 11, 30, 31, 63))
SPECIAL = (
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1.0,
    -1.0,
    1e-45,
    -1e-45,
    1.1754942e-38,
    3.4e38,
    -3.4e38,
    2.0**-133,
)


@pytest.fixture
def kernel(monkeypatch):
    """The module of the kernel, made for Triton's interpreter."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    return fresh(monkeypatch)


@pytest.fixture
def compiled(monkeypatch):
    """The module of the kernel, made for the compiler."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    return fresh(monkeypatch)


def fresh(monkeypatch):
    monkeypatch.delitem(sys.modules, KERNEL, raising=False)
    module = importlib.import_module(KERNEL)
    monkeypatch.setattr("holdfast.comm.allreduce.ordered_add_kernel", module, raising=False)
    return module


def bits(tensor):
    """The bits; every NaN has the same."""
    return torch.where(tensor.isnan(), torch.nan, tensor).view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def random_terms(numbers, dtype, length=1500, seed=0):
    """Normal, huge, denormal numbers of both signs, whose sums cancel and overflow, and pairs of all special values."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for k, number in enumerate(numbers):
        term = torch.randint(-(2**31), 2**31, (length,), generator=generator).to(torch.int32).view(torch.float32)
        term[:500] = torch.randn(500, generator=generator)
        term[500:600] *= 2.0**-120
        pairs = [pair[k % 2] for pair in itertools.product(SPECIAL, repeat=2)]
        term[600 : 600 + len(pairs)] = torch.tensor(pairs)
        made.append((number, term.to(dtype)))
    return made


def reference(terms, order, mean=None):
    out = torch.empty_like(terms[0][1])
    adding.TiledSum([(n, ChecksummedVector(t)) for n, t in terms], ChecksummedVector(out), 0, order)(mean)
    return out


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ordered_add.KERNEL_ORDERS)
def test_the_kernel_has_the_bits_of_the_additions_one_by_one(kernel, dtype, order):
    for seed, numbers in enumerate(SLICES):
        terms = random_terms(numbers, dtype, seed=seed)
        for mean in (None, MeanDivisor(300, 1400), MeanDivisor(7.0, 10**6)):
            out = torch.full_like(terms[0][1], 77)
            ordered_add.add_by_kernel(terms, out, order, mean)

            assert torch.equal(bits(out), bits(reference(terms, order, mean))), (numbers, mean)


@needs_triton
def test_an_order_that_is_not_the_one_asked_for_is_noticed(kernel):
    terms = random_terms(range(5), torch.float32)
    out = torch.empty_like(terms[0][1])

    ordered_add.add_by_kernel(terms, out, "fold")

    assert not torch.equal(bits(out), bits(reference(terms, "tree")))


@needs_triton
def test_the_kernel_writes_no_element_beyond_its_vector(kernel):
    for length in (1, 15, 1023, 1024, 1025):
        memory = torch.full((2048,), 77.0)
        terms = [(n, torch.full((length,), float(n))) for n in range(3)]

        ordered_add.add_by_kernel(terms, memory[:length], "fold", MeanDivisor(3.0, length))

        assert memory.tolist() == [1.0] * length + [77.0] * (2048 - length)


def ptx(module, dtype, order, capability, num_terms=8):
    """The code of the kernel for a GPU that need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointer = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}[dtype]
    signature = {"terms": (pointer,) * num_terms, "out": pointer, "n": "i64", "divisor": "fp32", "divided": "i64"}
    constants = {
        "MERGES": ordered_add.merges(range(num_terms), order), "STEPWISE": order != "wide", "DIVIDE": True, "BLOCK": 1024,
    }  # fmt: skip
    aligned = {(0, k): [["tt.divisibility", 16]] for k in range(num_terms)} | {(1,): [["tt.divisibility", 16]]}
    source = ASTSource(
        fn=module.add_terms, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants,
        attrs=aligned,
    )  # fmt: skip
    options = {"enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ordered_add.KERNEL_ORDERS)
def test_the_code_for_a_gpu_only_adds_in_float32_and_divides_correctly_rounded(compiled, dtype, order, capability):
    if triton_version() < (3, 8):
        pytest.skip("Triton before 3.8 was not looked at; 3.5 flushes denormal quotients, so torch adds there")
    code = ptx(compiled, dtype, order, capability)
    used = set(re.findall(r"^\s+(?:@!?%p\d+\s+)?([a-z]\w*(?:\.\w+)+)", code, re.M))
    of_floats = {name for name in used if re.search(r"\.(f16|bf16|f32|f64|bf16x2|f16x2)\b", name)}

    expected = {"add.rn.f32", "div.rn.f32"}
    assert {name for name in of_floats if not name.startswith(("cvt.", "mov.", "setp.", "selp."))} == expected
    assert not re.search(r"\bfma\b|\bmad\b.*f|\.ftz|\.approx|\.full|\brcp\b", code)
    assert re.search(r"ld\.global\.v[48]\.b32|ld\.global\.v4\.b32", code), "elements are loaded one at a time"


def test_the_program_of_an_order_adds_like_the_order():
    """On what cannot be added in another order: terms are texts of their own additions."""

    class Text(str):
        def __add__(self, other):
            return Text(f"({self!s}+{other!s})")

    def by_program(numbers, order):
        sums = []
        for number, count in zip(numbers, ordered_add.merges(numbers, order), strict=True):
            sums.append(Text(number))
            for _ in range(count):
                right = sums.pop()
                sums.append(sums.pop() + right)
        (whole,) = sums
        return whole

    def by_tree(numbers):
        level = [(n, Text(n)) for n in numbers]
        while len(level) > 1:
            paired = []
            for n, text in level:
                if paired and paired[-1][0] == n // 2:
                    paired[-1] = (n // 2, paired[-1][1] + text)
                else:
                    paired.append((n // 2, text))
            level = paired
        return level[0][1]

    rng = random.Random(0)
    assert by_program([0, 1, 2, 3], "tree") == "((0+1)+(2+3))"
    assert by_program([0, 1, 2, 3], "fold") == "(((0+1)+2)+3)"
    for _ in range(200):
        numbers = sorted(rng.sample(range(100), rng.randint(1, 40)))
        assert by_program(numbers, "tree") == by_tree(numbers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_division_on_another_device_is_that_of_the_host(dtype, monkeypatch):
    numbers = torch.cat([term for _, term in random_terms(range(2), dtype)])
    here, there = numbers.clone(), numbers.clone()
    here.div_(300)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)

    ordered_add.divide(there, 300)

    assert torch.equal(bits(there), bits(here))


def flushing(terms, out, order, mean):
    """Add right, but with denormal quotients flushed to zero, as Triton 3.5 does."""
    ordered_add.add_by_torch(terms, out, order, mean)
    divided = out[: mean.numbers]
    divided[divided.abs() < torch.finfo(torch.float32).tiny] = 0.0


@pytest.mark.parametrize(
    ("by_kernel", "said"),
    [
        (lambda terms, out, order, mean: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda terms, out, order, mean: out.fill_(1), "it has other bits than torch"),
        (flushing, "it has other bits than torch"),
        (ordered_add.add_by_torch, ""),
    ],
    ids=["it fails", "other bits", "flushes denormals", "it works"],
)
def test_the_kernel_is_tried_once_before_it_is_used(monkeypatch, by_kernel, said):
    monkeypatch.setattr(ordered_add, "add_by_kernel", by_kernel)
    works = ordered_add.kernel_works.__wrapped__

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert works(torch.device("cpu")) is (not said)

    expected = [f"gradients on cpu are added by torch, which is slower than the kernel: {said}"] if said else []
    assert [str(one.message) for one in warned] == expected


def test_a_device_that_is_lost_while_the_kernel_is_tried_is_not_taken_for_a_kernel_that_fails(monkeypatch):
    def lose(terms, out, order, mean):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(ordered_add, "add_by_kernel", lose)

    with pytest.raises(RuntimeError, match="ECC"):
        ordered_add.kernel_works.__wrapped__(torch.device("cpu"))


def test_terms_that_the_kernel_does_not_take_are_added_by_torch(monkeypatch):
    monkeypatch.setattr(ordered_add, "HAS_TRITON", True)
    few = random_terms((0, 1), torch.float32)
    many = random_terms(range(65), torch.float32, length=800)

    def fits(terms, order="fold"):
        return ordered_add._fits_kernel(terms, torch.empty_like(terms[0][1]), order)

    assert fits(few)
    assert fits(many[:64])
    assert not fits(many), "more terms than it adds in one pass"
    assert not fits(few[:1]), "one term is copied"
    assert not fits(few, "max")
    assert not fits([(n, term.double()) for n, term in few])
    assert not fits([(n, term[::2]) for n, term in few])
    for terms in (many, few[:1]):
        out = torch.empty_like(terms[0][1])
        ordered_add.ordered_add(terms, out, "tree", MeanDivisor(3.0, 100))
        assert torch.equal(bits(out), bits(reference(terms, "tree", MeanDivisor(3.0, 100))))
