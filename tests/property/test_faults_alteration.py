"""What is drawn: exactly so many, no bit twice, all of them alike, and never what was forbidden."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.faults import alteration
from holdfast.faults.alteration import LAWS, Alteration, ValuePosition, apply, draw
from holdfast.faults.formats import FORMATS


class Memory:
    """Values in memory, of any bits."""

    def __init__(self, *tensors, seed=0):
        rng = np.random.default_rng(seed)
        self.places = [ValuePosition(f"t{i}", FORMATS[name], shape) for i, (name, shape) in enumerate(tensors)]
        self.raw = [rng.integers(0, 1 << p.format.bits, p.count, p.format.raw) for p in self.places]

    def read(self, wanted):
        assert all(np.all(np.diff(index) > 0) for _, index in wanted), "indices must rise"
        assert len({place for place, _ in wanted}) == len(wanted), "places must be different"
        return [self.raw[place][index] for place, index in wanted]

    def write(self, changes):
        for change in changes:
            self.raw[change.place][change.index] = change.after

    def copy(self):
        return [raw.copy() for raw in self.raw]


def probability_of(hits):
    """The probability that hits that are all as likely differ as much as these."""
    from scipy.stats import chisquare  # takes a second to import

    return chisquare(hits).pvalue


def bits_flipped(changes):
    return sum(int(value).bit_count() for change in changes for value in (change.before ^ change.after).tolist())


def sites(changes):
    return [(change.place, i) for change in changes for i in change.index.tolist()]


tensors = st.lists(
    st.tuples(st.sampled_from(sorted(FORMATS)), st.lists(st.integers(0, 7), max_size=3).map(tuple)),
    min_size=1,
    max_size=4,
)


@given(tensors, st.sampled_from(LAWS), st.floats(0, 1), st.integers(0, 2**32))
def test_exactly_so_many_different_bits_are_flipped_and_once_more_takes_them_back(given_tensors, law, share, seed):
    memory = Memory(*given_tensors)
    total = sum(place.count * place.format.bits for place in memory.places)
    count = max(1, round(share * total))
    if not total:
        with pytest.raises(ConfigError, match="there is nothing to alter"):
            draw(memory, Alteration(count=count))
        return
    before = memory.copy()

    changes = draw(memory, Alteration(count=count, law=law, seed=seed))
    again = draw(memory, Alteration(count=count, law=law, seed=seed))
    apply(memory, changes)

    assert bits_flipped(changes) == count
    assert len(set(sites(changes))) == len(sites(changes))
    assert [c.after.tolist() for c in changes] == [c.after.tolist() for c in again]
    altered = sum(int(v).bit_count() for a, b in zip(before, memory.raw, strict=True) for v in (a ^ b).tolist())
    assert altered == count
    for change in changes:
        memory.raw[change.place][change.index] ^= change.before ^ change.after
    assert all(np.array_equal(a, b) for a, b in zip(before, memory.raw, strict=True))


@given(st.sampled_from(sorted(FORMATS)), st.integers(1, 100), st.integers(0, 2**32))
def test_a_percentage_is_of_values_and_alters_each_once(name, percent, seed):
    memory = Memory((name, (10, 20)))

    (change,) = draw(memory, Alteration(percent=percent, seed=seed))

    assert len(change) == bits_flipped([change]) == 2 * percent


@given(st.sampled_from(("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64")), st.integers(0, 2**32))
def test_values_that_were_finite_stay_so_and_signs_are_kept(name, seed):
    memory = Memory((name, (500,)), seed=seed)
    format = FORMATS[name]

    changes = draw(
        memory,
        Alteration(percent=60, bits="8:63" if format.bits > 8 else "all", finite=True, keep_sign=True, seed=seed),
    )

    (change,) = changes
    assert len(change) == 300
    assert format.is_finite(change.after)[format.is_finite(change.before)].all()
    assert not np.any((change.before ^ change.after) >> (format.bits - 1))


@given(st.integers(2, 16), st.integers(0, 2**32))
def test_a_burst_is_of_neighbours_inside_the_bits_that_are_allowed(burst, seed):
    memory = Memory(("float32", (64,)))

    (change,) = draw(memory, Alteration(count=20, burst=burst, bits="4:22", seed=seed))

    for flipped in (change.before ^ change.after).tolist():
        low = (flipped & -flipped).bit_length() - 1
        assert flipped >> low == (1 << burst) - 1
        assert 4 <= low <= 23 - burst


def test_a_mask_is_laid_wherever_it_fits():
    memory = Memory(("uint8", (4000,)))

    (change,) = draw(memory, Alteration(percent=100, mask="1011"))

    found = set((change.before ^ change.after).tolist())
    assert found == {0b1011 << shift for shift in range(5)}


def hits_of_bits(count, seeds, **options):
    """How often each bit of 30 float32 (the first 960) and of 20 float16 was hit."""
    memory = Memory(("float32", (30,)), ("float16", (20,)))
    hits = np.zeros(30 * 32 + 20 * 16)
    for seed in range(seeds):
        for change in draw(memory, Alteration(count=count, seed=seed, **options)):
            width = memory.places[change.place].format.bits
            for i, flipped in zip(change.index, change.before ^ change.after, strict=True):
                for bit in range(width):
                    hits[change.place * 960 + i * width + bit] += int(flipped) >> bit & 1
    return hits


@pytest.mark.parametrize("options", [{}, {"law": "bits"}])
def test_all_bits_are_alike_by_the_law_of_bits_which_is_the_default(options):
    """Of two tensors of different size and width, 40,000 flips: each bit is hit as often as any other."""
    hits = hits_of_bits(100, 400, **options)

    assert hits.sum() == 40_000
    assert probability_of(hits) > 1e-3


def test_all_values_are_alike_by_the_law_of_values_whatever_their_width():
    """Of a float32 half as many flips hit each bit as of a float16, and as many the value."""
    hits = hits_of_bits(10, 1000, law="values")

    by_value = [*hits[:960].reshape(30, 32).sum(axis=1), *hits[960:].reshape(20, 16).sum(axis=1)]
    assert hits.sum() == 10_000
    assert probability_of(by_value) > 1e-3
    assert probability_of(hits[:960]) > 1e-3
    assert probability_of(hits[960:]) > 1e-3


def test_the_law_of_bits_is_not_that_of_values():
    """The test above would see the difference."""
    hits = hits_of_bits(10, 1000, law="bits")

    by_value = [*hits[:960].reshape(30, 32).sum(axis=1), *hits[960:].reshape(20, 16).sum(axis=1)]
    assert probability_of(by_value) < 1e-12


def test_a_value_is_as_likely_however_many_of_its_bits_are_allowed():
    memory = Memory(("float32", (50,)), ("float8_e5m2", (50,)))
    bits = "4:31"  # 28 bits of the one, 4 of the other

    wide = sum(
        len(c) for s in range(400) for c in draw(memory, Alteration(bits=bits, law="values", seed=s)) if not c.place
    )

    assert 150 < wide < 250


@pytest.mark.parametrize("options", [{"percent": 30}, {"count": 20, "burst": 3}, {"count": 20, "scale": 2.0}])
def test_where_values_are_drawn_anyway_the_laws_of_bits_and_of_values_are_one(options):
    memory = Memory(("float32", (40,)), ("uint8", (90,)))

    first, second = (draw(memory, Alteration(law=law, seed=3, **options)) for law in ("bits", "values"))

    assert [(c.place, c.index.tolist(), c.after.tolist()) for c in first] == [
        (c.place, c.index.tolist(), c.after.tolist()) for c in second
    ]


def test_sparse_draws_are_alike_too_and_in_any_part_of_a_large_tensor():
    memory = Memory(("uint8", (100_000,)))

    (change,) = draw(memory, Alteration(count=100_000, seed=3))

    flipped = change.before ^ change.after
    by_part = np.histogram(change.index, 50, weights=[int(v).bit_count() for v in flipped])[0]
    by_bit = [np.count_nonzero(flipped >> bit & 1) for bit in range(8)]
    assert sum(by_bit) == 100_000
    assert probability_of(by_part) > 1e-3
    assert probability_of(by_bit) > 1e-3


@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("options", [{"count": 150}, {"count": 15, "bits": "3"}, {"percent": 30, "burst": 3}])
def test_how_much_is_worked_on_at_a_time_changes_nothing(monkeypatch, batch, options):
    memory = Memory(("float16", (40,)), ("uint8", (9,)))
    wanted = draw(memory, Alteration(**options))
    monkeypatch.setattr(alteration, "_BATCH", batch)

    found = draw(memory, Alteration(**options))

    assert [(c.place, c.index.tolist(), c.after.tolist()) for c in found] == [
        (c.place, c.index.tolist(), c.after.tolist()) for c in wanted
    ]


def test_by_the_other_law_all_tensors_are_alike_whatever_their_size():
    memory = Memory(("float32", (10_000,)), ("float32", (10,)))
    small = dict.fromkeys(LAWS, 0)

    for law in small:
        for seed in range(300):
            small[law] += sum(len(c) for c in draw(memory, Alteration(law=law, seed=seed)) if c.place == 1)

    assert small["bits"] < 10
    assert small["values"] < 10
    assert 110 < small["tensors"] < 190


def test_a_bit_error_rate_is_that_of_bits_and_a_probability_that_of_alterations():
    memory = Memory(("float32", (100_000,)))

    by_rate = bits_flipped(draw(memory, Alteration(rate=1e-3)))
    halved = bits_flipped(draw(memory, Alteration(rate=1e-3, probability=0.5)))

    assert 3000 < by_rate < 3400
    assert 1450 < halved < 1750


def test_scaling_multiplies_values():
    memory = Memory(("bfloat16", (50,)), ("int8", (50,)))
    memory.raw[0][:] = FORMATS["bfloat16"].raw_of(np.linspace(-3, 3, 50))
    memory.raw[1][:] = np.arange(-25, 25, dtype=np.int8).view(np.uint8)

    first, second = draw(memory, Alteration(percent=100, scale=-4))

    before, after = (FORMATS["bfloat16"].values(raw) for raw in (first.before, first.after))
    np.testing.assert_array_equal(after, -4 * before)
    assert second.after.view(np.int8).tolist() == [max(-128, min(127, -4 * v)) for v in range(-25, 25)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"count": 0}, "count of flips must be at least 1, got 0"),
        (
            {"count": 1, "rate": 0.1},
            "give only one of count of flips, percent and rate, got more; leave the others out",
        ),
        ({"percent": 101}, "percent must be above 0 and at most 100, got 101"),
        ({"percent": float("nan")}, "percent must be above 0 and at most 100, got nan"),
        ({"rate": 0}, "rate must be above 0 and at most 1, got 0"),
        ({"probability": 1.5}, "probability must be above 0 and at most 1, got 1.5"),
        (
            {"bits": "7:3"},
            "bits must be one of all, sign, exponent, mantissa, critical, a number from 0 to 63 or FIRST:LAST",
        ),
        ({"bits": "64"}, "counted from the least significant bit, got '64'"),
        ({"bits": "msb"}, "got 'msb'"),
        ({"burst": 0}, "burst must be at least 1, got 0"),
        ({"mask": "102"}, "mask must be zeros and ones with a one among them, as 1011, got '102'"),
        ({"mask": "00"}, "got '00'"),
        ({"burst": 2, "mask": "11"}, "burst and mask cannot be given together; choose one"),
        (
            {"burst": 2, "rate": 0.1},
            "rate applies to single bits and cannot be combined with burst; give count of flips or percent",
        ),
        (
            {"scale": float("inf")},
            "scale must be finite, got inf; to make values infinite, flip bits of their exponent",
        ),
        ({"scale": 2.0, "bits": "sign"}, "scale multiplies whole values and cannot be combined with bits or keep-sign"),
        ({"law": "layers"}, "law must be one of bits, values, tensors, got 'layers'"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_what_is_not_allowed_is_refused_in_one_line(options, said):
    with pytest.raises(ConfigError) as caught:
        Alteration(**options)

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"count": 321}, "count of flips must be at most 320, the bits that may be altered, got 321"),
        ({"count": 11, "burst": 2}, "count of flips must be at most 10, the values that may be altered, got 11"),
        ({"bits": "40:50"}, "there is nothing to alter: no value of 1 tensors has bits 40:50 wide enough for this"),
        ({"bits": "sign", "keep_sign": True}, "no value of 1 tensors has bits sign but the sign wide enough"),
        (
            {"bits": "critical", "finite": True},
            "almost every remaining alteration makes a value infinite or NaN",
        ),
    ],
)
def test_what_cannot_be_done_to_these_values_is_refused_in_one_line(options, said):
    memory = Memory(("float32", (10,)))
    memory.raw[0][:] = FORMATS["float32"].raw_of(np.ones(10))

    with pytest.raises(ConfigError) as caught:
        draw(memory, Alteration(**options))

    assert said in str(caught.value)
