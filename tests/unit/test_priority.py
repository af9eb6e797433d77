"""The running checkpoint: what it saves when, that it costs the same whatever the fraction, and what comes back."""

from __future__ import annotations

import itertools

import pytest
import torch

from holdfast.checkpoint import load, write_tensors
from holdfast.checkpoint import priority_codec as running_codec
from holdfast.checkpoint.priority import DISTANCES, PREDICTORS, PriorityPolicy, RunningCheckpoint
from holdfast.checkpoint.priority_choice import CHOICES, highest
from holdfast.checkpoint.priority_codec import CODECS
from holdfast.errors import ConfigError
from holdfast.setting_choices import MIRROR_CHOICES, MIRROR_CODECS, MIRROR_DISTANCES, MIRROR_PREDICTORS

EVERY = 16


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def walk(running, rows, steps, *, seed=0):
    """Let the rows wander at random, and save when it is due; yield each partial save."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        for row in rows:
            row += 0.1 * torch.randn(row.shape, generator=generator)
        if running.is_due(step):
            yield running.save(rows, step)


def distances(running, rows, step):
    everything = torch.arange(len(rows[0]))
    return (running.recover(everything, step)[0] - rows[0]).norm(dim=1)


# -- when, and how much


@pytest.mark.parametrize(("fraction", "period"), [(1, 16), (1 / 2, 8), (1 / 4, 4), (1 / 8, 2), (0.3, 5), (0.04, 1)])
def test_a_save_is_due_every_so_many_steps_and_never_twice(fraction, period):
    rows = [numbers(64, 4)]
    running = RunningCheckpoint(rows, PriorityPolicy(every=EVERY, fraction=fraction), step=period)

    due = []
    for step in range(4 * EVERY):
        if running.is_due(step):
            due.append(step)
            running.save(rows, step)
            assert not running.is_due(step)

    assert due == [step for step in range(4 * EVERY) if step % period == 0 and step > period]


SIZES = {
    "equal": None,
    "unequal": torch.randint(0, 900, (50,), generator=torch.Generator().manual_seed(1)),
    "one that is most of all": torch.tensor([9000, *range(49)]),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("choice", ["priority", "round-robin", "random"])
@pytest.mark.parametrize("fraction", [1, 1 / 4, 1 / 8, 0.3])
def test_over_any_c_steps_as_many_bytes_are_saved_as_there_are_whatever_the_fraction(fraction, choice, sizes):
    rows = [numbers(50, 3), numbers(50, 2, seed=1)]
    saving = PriorityPolicy(every=EVERY, fraction=fraction, choice=choice)
    running = RunningCheckpoint(rows, saving, block_bytes=sizes)
    taken = torch.full((50,), 20) if sizes is None else sizes
    per_step = torch.zeros(1 + 6 * EVERY, dtype=torch.int64)

    for saved in walk(running, rows, 6 * EVERY):
        per_step[saved.step] = taken[saved.blocks].sum()
        assert sizes is not None or per_step[saved.step] == saved.size_bytes()

    largest, full = int(taken.max()), int(taken.sum())
    so_far = per_step.cumsum(0)
    allowed = torch.arange(len(so_far)) // saving.period * saving.period * full / EVERY
    assert (so_far <= allowed).all()
    assert (so_far > allowed - largest).all()
    if EVERY % saving.period == 0:
        in_any_window = so_far[EVERY:] - so_far[:-EVERY]
        assert (in_any_window - full).abs().max() < largest


@pytest.mark.parametrize("fraction", [1 / 4, 1 / 8])
def test_int8_saves_more_blocks_of_the_same_bytes(fraction):
    rows = [numbers(400, 16)]
    running = RunningCheckpoint(rows, PriorityPolicy(every=EVERY, fraction=fraction, codec="int8"))

    saves = list(walk(running, rows, 6 * EVERY))

    assert all(saved.size_bytes() == len(saved.blocks) * (16 + 4) for saved in saves)
    assert sum(saved.size_bytes() for saved in saves) == pytest.approx(6 * 400 * 64, abs=20)
    assert len(saves[0].blocks) == int(400 * fraction * 64 / 20)


def test_room_that_nothing_can_use_is_not_kept_for_later():
    rows = [numbers(40, 16)]
    running = RunningCheckpoint(rows, PriorityPolicy(every=4, fraction=1 / 4))
    rows[0][1:] = torch.nan
    for step in range(1, 9):
        assert running.save(rows, step).blocks.tolist() == [0]
    rows[0][:] = 1

    assert len(running.save(rows, 9).blocks) <= 10 + 1


# -- what is chosen


def test_the_farthest_blocks_are_saved():
    rows = [torch.zeros(8, 2), torch.zeros(8, 1)]
    running = RunningCheckpoint(rows, PriorityPolicy(every=8, fraction=1 / 4))
    rows[0][:, 1] = torch.tensor([0.0, 3, -5, 1, 3, 0, 0.5, 3])
    rows[1][:] = 7

    assert running.save(rows, 2).blocks.tolist() == [1, 2]  # of those that are equally far, the lower number first
    assert running.save(rows, 4).blocks.tolist() == [4, 7]
    assert running.saved_at.tolist() == [0, 2, 2, 0, 4, 0, 0, 4]
    assert running.recover(torch.tensor([2, 3]), 5)[0].tolist() == [[0, -5], [0, 0]]
    assert running.recover(torch.tensor([2, 3]), 5)[1].tolist() == [[7], [0]]


SCORES = {
    "all different": lambda at, drawn: drawn,
    "few different": lambda at, drawn: (8 * drawn).floor(),
    "those looked at first the highest": lambda at, drawn: drawn + (at % 256 == 0),
    "those looked at first the lowest": lambda at, drawn: drawn + (at % 256 != 0),
    "few that can be taken": lambda at, drawn: torch.where(at % 100 == 0, drawn, -1),
    "some that are no numbers": lambda at, drawn: torch.where(at % 3 == 0, torch.nan, drawn),
    "some that are infinite": lambda at, drawn: torch.where(at % 50 == 0, torch.inf, drawn),
    "whole numbers": lambda at, drawn: (90_000 * drawn).long(),
}


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("count", [1, 2500, 30_000])
def test_of_many_blocks_those_are_taken_that_sorting_all_would_take(count, score):
    scores = score(torch.arange(20_000), torch.rand(20_000, generator=torch.Generator().manual_seed(count)))
    allowed = torch.where(scores.isfinite(), scores, -1)
    order = allowed.sort(descending=True, stable=True).indices[:count]

    found = highest(scores, torch.tensor([8]), 8 * count)

    assert torch.equal(found, order[allowed[order] >= 0].sort().values)


def test_a_distance_of_your_own_decides():
    rows = [torch.zeros(4, 2)]
    first = lambda a, b: (a[:, 0] - b[:, 0]).abs()  # noqa: E731
    running = RunningCheckpoint(rows, PriorityPolicy(every=4, fraction=1 / 4), distance=first)
    rows[0][:] = torch.tensor([[0.0, 9], [1, 0], [2, 0], [0, 9]])

    assert running.save(rows, 1).blocks.tolist() == [2]


def test_a_scaled_distance_counts_every_tensor_in_its_own_unit():
    small, large = torch.tensor([[0.001]] * 6), torch.tensor([[1000.0], [-1000.0]] * 3)
    changes = ((0, 1, 0.0004), (0, 2, 0.0008), (1, 4, 500.0), (1, 5, 900.0))
    chosen = {}
    for distance in DISTANCES:
        saving = PriorityPolicy(every=6, fraction=1 / 3, distance=distance)
        rows = [small.clone(), large.clone()]
        running = RunningCheckpoint(rows, saving)
        for which, block, change in changes:
            rows[which][block] += change
        rows.append(torch.zeros(6, 2))  # as an optimizer keeps it that has not moved yet: no unit can be told
        whole = RunningCheckpoint([small, large, torch.zeros(6, 2)], saving)
        chosen[distance] = running.save(rows[:2], 2).blocks.tolist()
        assert whole.save(rows, 2).blocks.tolist() == chosen[distance]

    assert chosen == {"euclidean": [1, 2], "scaled": [2, 5]}


def test_a_scaled_distance_is_not_misled_by_a_block_that_is_no_number():
    rows = [numbers(8, 4), numbers(8, 4, seed=1)]
    running = RunningCheckpoint(rows, PriorityPolicy(every=8, fraction=1 / 4, distance="scaled"))
    rows[1][3, 0] = torch.nan
    rows[0][5] += 1
    rows[1][6] += 1

    assert running.save(rows, 2).blocks.tolist() == [5, 6]


def test_round_robin_goes_round():
    rows = [numbers(10, 2)]
    running = RunningCheckpoint(rows, PriorityPolicy(every=10, fraction=0.3, choice="round-robin"))

    chosen = [running.save(rows, step).blocks.tolist() for step in (3, 6, 9, 12, 15)]

    assert chosen == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 9], [2, 3, 4]]


def test_a_random_choice_is_a_function_of_seed_and_step_alone():
    rows = [numbers(100, 2)]

    def chosen(seed, step, before=()):
        running = RunningCheckpoint(rows, PriorityPolicy(every=4, fraction=1 / 4, choice="random", seed=seed))
        for earlier in before:
            running.save(rows, earlier)
        return running.save(rows, step).blocks.tolist()

    assert chosen(1, 7) == chosen(1, 7, before=[3, 4])
    assert len({tuple(chosen(seed, step)) for seed, step in itertools.product(range(5), range(1, 6))}) == 25
    counts = torch.bincount(torch.tensor([chosen(0, step) for step in range(1, 201)]).flatten(), minlength=100)
    assert 25 <= counts.min() <= counts.max() <= 80  # 50 expected, standard deviation 6


@pytest.mark.parametrize("codec", ["exact", "int8"])
@pytest.mark.parametrize("choice", ["priority", "round-robin", "random"])
@pytest.mark.parametrize(("which", "bad"), [(0, torch.nan), (1, -torch.inf)])
def test_a_block_that_is_no_number_any_more_is_not_saved_and_the_next_has_its_place(which, bad, choice, codec):
    rows = [numbers(64, 4), numbers(64, 4, seed=1)]
    running = RunningCheckpoint(rows, PriorityPolicy(every=8, fraction=1 / 8, choice=choice, codec=codec))
    good = [row[:4].clone() for row in rows]
    rows[which][:4, 2] = bad
    chosen = torch.cat([saved.blocks for saved in walk(running, rows, 16)])

    assert chosen.min() >= 4
    assert all(map(torch.equal, running.recover(torch.arange(4), 9), good))
    assert len(chosen) == (2 * 64 if codec == "exact" else 2 * 64 * 16 // 8)


def test_a_distance_that_does_not_see_a_nan_saves_none():
    rows = [numbers(8, 4)]
    running = RunningCheckpoint(rows, PriorityPolicy(every=8, fraction=1 / 2), distance=lambda a, b: torch.arange(8.0))
    rows[0][6, 0] = torch.nan

    assert running.save(rows, 4).blocks.tolist() == [3, 4, 5, 7]


def test_choosing_makes_nothing_as_large_as_the_parameters():
    rows = [numbers(20_000, 16)]
    for predictor in ("last", "line"):
        running = RunningCheckpoint(rows, PriorityPolicy(every=16, fraction=1 / 16, predictor=predictor))
        running.take(rows, 1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            running.take(rows, 1)

        made = [event.cpu_memory_usage for event in seen.events()]
        assert 0 < max(made) <= rows[0].nbytes / 2


# -- what comes back


def test_what_it_was_made_of_is_what_it_starts_as_and_shares_no_memory():
    rows = [numbers(6, 2), numbers(6, 3, dtype=torch.bfloat16)]
    before = [row.clone() for row in rows]
    running = RunningCheckpoint(rows, PriorityPolicy())
    for row in rows:
        row += 1

    restored = running.recover(torch.tensor([5, 0]), 3)

    assert all(torch.equal(r, b[[5, 0]]) for r, b in zip(restored, before, strict=True))
    assert running.saved_at.tolist() == [0] * 6


def test_the_loop_goes_on_while_what_was_taken_is_put():
    rows = [numbers(6, 2)]
    running = RunningCheckpoint(rows, PriorityPolicy(every=1))
    before = running.recover(torch.arange(6), 1)[0]
    rows[0] += 1
    wanted = rows[0].clone()

    saved = running.take(rows, 1)
    rows[0] += 1

    assert torch.equal(running.recover(torch.arange(6), 1)[0], before)
    running.put(saved)
    assert torch.equal(running.recover(torch.arange(6), 1)[0], wanted)


def test_a_line_leads_through_the_last_two_saves():
    start, speed = numbers(12, 5), numbers(12, 5, seed=1)
    momentum = numbers(12, 5, seed=2)
    saving = PriorityPolicy(every=4, fraction=1 / 2, predictor="line", choice="round-robin")
    running = RunningCheckpoint([start, momentum], saving, step=10)
    once = running.recover(torch.arange(12), 30)

    for step in range(12, 20, 2):
        running.save([start + speed * (step - 10), momentum * step], step)

    assert torch.equal(once[0], start)  # saved once, it has no direction
    parameters, other = running.recover(torch.arange(12), 31)
    assert torch.allclose(parameters, start + speed * 21, atol=1e-4)
    assert torch.equal(other[:6], momentum[:6] * 16)  # what goes along stays as it was saved
    assert torch.equal(other[6:], momentum[6:] * 18)


def test_with_a_line_that_block_is_farthest_which_leaves_its_line():
    rows = [torch.zeros(3, 2)]
    running = RunningCheckpoint(rows, PriorityPolicy(every=3, fraction=1 / 3, predictor="line"))
    steady, restless, still = 0, 1, 2
    rows[0][steady] = 10
    assert running.save(rows, 1).blocks.tolist() == [steady]
    rows[0][steady] = 20
    rows[0][restless] = 0.5

    assert running.save(rows, 2).blocks.tolist() == [restless]
    assert distances(running, rows, 2)[steady] == 0
    assert distances(running, rows, 2)[still] == 0


def test_calibrated_goes_as_far_along_the_line_as_blocks_were_found_to_go():
    start, speed = numbers(40, 5), numbers(40, 5, seed=1)
    everything = torch.arange(40)
    running = RunningCheckpoint([start], PriorityPolicy(every=1, predictor="calibrated"))
    running.save([start + speed], 1)
    once = running.recover(everything, 3)[0]  # nobody knows yet how far blocks go
    rows = start + speed + 0.6 * speed
    rows[7] = torch.nan

    saved = running.take([rows], 2)
    assert torch.equal(running.recover(everything, 3)[0], once)
    running.put(saved)

    assert torch.equal(once, start + speed)
    assert saved.share == pytest.approx(0.6)
    expected = start + 1.6 * speed + 0.6 * 0.6 * speed * 3
    expected[7] = (start + speed + 0.6 * speed * 4)[7]  # its line is the one of before
    assert torch.allclose(running.recover(everything, 5)[0], expected, atol=1e-5)
    assert running.save([start - speed], 6).share == 0
    assert running.save([start - 10 * speed], 7).share == 1


def test_a_line_needs_numbers_that_can_be_divided():
    rows = [torch.arange(8).view(4, 2)]
    running = RunningCheckpoint(rows, PriorityPolicy(every=1, predictor="line", codec="int8"))
    rows[0] += 3

    saved = running.save(rows, 1)

    assert saved.size_bytes() == rows[0].nbytes
    assert torch.equal(running.recover(torch.arange(4), 9)[0], rows[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_int8_comes_back_within_half_a_step_and_the_rest_with_the_next_save(dtype):
    rows = [numbers(50, 16, dtype=dtype)]
    running = RunningCheckpoint([torch.zeros(50, 16, dtype=dtype)], PriorityPolicy(every=1, codec="int8"))
    step_length = rows[0].abs().amax(1, keepdim=True).double() / 127
    rounding = torch.finfo(dtype).eps * rows[0].double().abs().max()

    running.save(rows, 1)
    error = (running.recover(torch.arange(50), 1)[0].double() - rows[0].double()).abs()
    running.save(rows, 2)
    left = (running.recover(torch.arange(50), 2)[0].double() - rows[0].double()).abs()

    assert (error <= 0.5001 * step_length + rounding).all()
    assert error.max() > 0.3 * step_length.min()
    assert left.max() <= 0.51 * error.max() / 127 + rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_int8_makes_no_number_negative_zero_or_infinite_that_was_not(dtype):
    squares = numbers(200, 16, dtype=dtype).square() * torch.tensor([1.0] + [1e-3] * 15, dtype=dtype)
    largest = torch.full((200, 16), torch.finfo(dtype).max, dtype=dtype)
    largest[:, 0] /= -2
    before = numbers(200, 16).square().to(dtype)
    running = RunningCheckpoint([numbers(200, 16), before, largest.abs() / 2], PriorityPolicy(every=1, codec="int8"))

    running.save([numbers(200, 16), squares, largest.abs()], 1)

    parameters, mean_squares, huge = running.recover(torch.arange(200), 1)
    assert (parameters < 0).any()
    assert huge.isfinite().all()
    # Adam divides by their roots: a 0 in the place of a small one would make a step many thousand times too long.
    half_a_step = (squares.double() - before.double()).abs().amax(1, keepdim=True) / 254
    assert mean_squares.min() > 0
    assert ((mean_squares - squares).abs() <= 1.001 * half_a_step + torch.finfo(dtype).eps * squares).all()


# -- owner and peer


POLICIES = [
    *itertools.product(["priority", "round-robin", "random"], ["last", "line"], ["exact", "int8"]),
    *itertools.product(["priority"], ["calibrated"], ["exact", "int8"]),
]


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    tensors = [(a["saved_at"], b["saved_at"]), *zip(a["saved"], b["saved"], strict=True)]
    if a["slope"] is not None:
        tensors.append((a["slope"], b["slope"]))
    return (a["step"], a["credit"], a["share"]) == (b["step"], b["credit"], b["share"]) and all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in tensors
    )


@pytest.mark.parametrize(("choice", "predictor", "codec"), [("priority", "line", "int8"), *POLICIES[-2:]])
def test_a_peer_is_equal_bit_for_bit_after_many_saves(choice, predictor, codec):
    sizes = torch.randint(1, 500, (60,), generator=torch.Generator().manual_seed(5))
    rows = [numbers(60, 16), numbers(60, 16, seed=1), numbers(60, 5, seed=2, dtype=torch.float16)]
    saving = PriorityPolicy(fraction=1 / 16, choice=choice, predictor=predictor, codec=codec)
    owner, peer = (RunningCheckpoint(rows, saving, block_bytes=sizes) for _ in range(2))

    shares = set()
    for number, saved in enumerate(walk(owner, rows, 60)):
        peer.put(saved)
        shares.add(saved.share)
        if number in (0, 20, 59):
            assert same(owner, peer)

    assert number == 59
    assert (len(shares) > 4) == (predictor == "calibrated")
    heir = peer.save(rows, 61)  # it goes on as the owner would have
    assert torch.equal(heir.blocks, owner.save(rows, 61).blocks)


@pytest.mark.parametrize("predictor", ["last", "line"])
@pytest.mark.parametrize("codec", ["exact", "int8"])
def test_it_does_not_matter_how_many_blocks_are_computed_at_a_time(codec, predictor, monkeypatch):
    found = []
    for chunk in (running_codec.CHUNK_NUMBERS, 64):
        monkeypatch.setattr(running_codec, "CHUNK_NUMBERS", chunk)
        rows = [numbers(60, 16), numbers(60, 5, seed=1, dtype=torch.float16).abs(), numbers(60, 3, seed=2).abs()]
        rows[2][50:] *= -1  # only the last piece has a number that is negative
        saving = PriorityPolicy(every=4, predictor=predictor, codec=codec)
        running = RunningCheckpoint([row / 2 for row in rows], saving)
        for step in range(1, 6):
            rows[0] += numbers(60, 16, seed=10 + step)
            running.save(rows, step)
        found.append(running)

    assert same(*found)
    assert (found[1].recover(torch.arange(60), 5)[2][50:] < 0).any()


@pytest.mark.parametrize(("choice", "predictor", "codec"), POLICIES)
def test_it_is_sent_and_written_whole(choice, predictor, codec, tmp_path):
    rows = [numbers(30, 16), numbers(30, 2, seed=1)]
    saving = PriorityPolicy(every=8, fraction=1 / 8, choice=choice, predictor=predictor, codec=codec)
    owner = RunningCheckpoint(rows, saving)
    for _ in walk(owner, rows, 50):
        pass

    write_tensors(tmp_path, 50, {"running": owner.state_dict()}, info={}).commit(generation=0)
    peer = RunningCheckpoint([torch.zeros_like(row) for row in rows], saving)
    peer.load_state_dict(load(tmp_path, 50).state["running"])

    assert same(owner, peer)
    for row in rows:
        row += 1
    peer.put(owner.save(rows, 51))
    assert same(owner, peer)


# -- what is refused


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"every": 0}, "every must be at least 1 step, got 0; give "),
        ({"fraction": 0}, "fraction must be above 0 and at most 1, got 0; give 1, 0.5, 0.25 or 0.125"),
        ({"fraction": float("nan")}, "fraction must be above 0 and at most 1, got nan; "),
        ({"every": 4, "fraction": 0.1}, r"fraction must be so large that fraction \* every \(4\) rounds to at least 1 step, got 0.1; "),
        ({"choice": "first"}, "choice must be one of priority, round-robin, random, got 'first'; choose one of them"),
        ({"distance": "far"}, "distance must be one of euclidean, scaled, got 'far'"),
        ({"predictor": "curve"}, "predictor must be one of last, line, calibrated, got 'curve'"),
        ({"codec": "int4"}, "codec must be one of exact, int8, got 'int4'"),
    ],
)  # fmt: skip
def test_a_saving_that_cannot_be_is_refused(values, message):
    with pytest.raises(ConfigError, match="^" + message):
        PriorityPolicy(**values)


@pytest.mark.parametrize(
    ("start", "sizes", "message"),
    [
        ([], None, r"start must be tensors of shape \(blocks, width\) with the same number of blocks, got \[\]"),
        ([torch.zeros(3)], None, r"got \[\(3,\)\]; reshape them"),
        ([torch.zeros(3, 2), torch.zeros(4, 2)], None, r"got \[\(3, 2\), \(4, 2\)\]"),
        ([torch.zeros(3, 2)], torch.ones(2), "block_bytes must be 3 numbers of 0 or more, one per block, got 2"),
        ([torch.zeros(2, 2)], torch.tensor([8, -1]), "got 2 from -1 up; give the bytes that saving each block takes"),
    ],
)
def test_blocks_that_do_not_go_together_are_refused(start, sizes, message):
    with pytest.raises(ConfigError, match=message):
        RunningCheckpoint(start, PriorityPolicy(), block_bytes=sizes)


def test_a_save_that_is_out_of_order_or_of_something_else_is_refused():
    rows = [numbers(6, 2)]
    running, other = RunningCheckpoint(rows, PriorityPolicy(every=1)), RunningCheckpoint(rows, PriorityPolicy(every=2))
    saved = running.save(rows, 4)

    late = "a save of step 4 must come after the last one, which is of step 4; to roll back"
    with pytest.raises(ConfigError, match=late):
        running.put(saved)
    with pytest.raises(ConfigError, match=r"rows must have .*\(6, 2\).*got .*\(6, 3\)"):
        running.save([numbers(6, 3)], 5)
    with pytest.raises(ConfigError, match=r"kept with .*'every': 1.*, not with .*every=2"):
        other.load_state_dict(running.state_dict())


def test_a_run_may_be_asked_for_every_way_of_saving_and_for_no_other():
    asked = (MIRROR_CHOICES, MIRROR_DISTANCES, MIRROR_PREDICTORS, MIRROR_CODECS)
    assert asked == (CHOICES, DISTANCES, PREDICTORS, CODECS)
