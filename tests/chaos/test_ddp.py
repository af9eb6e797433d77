"""torch.distributed over Holdfast while ranks are really killed."""

import itertools
import json
import re
from collections import defaultdict

import pytest
import reference
from jobs import ROOT, assert_landed, exit_codes, inject, run_report

pytestmark = pytest.mark.chaos

EXAMPLE = ROOT / "examples" / "06_unmodified_ddp.py"
PLAYS = ROOT / "tests" / "support" / "dist_plays.py"
FOLDER = "DIST_PLAYS_FOLDER"
JOB_S = 150
SEED = 20

FABRICS = ("ulfm", "gloo")
RAISE = {"HOLDFAST_EMPTY_SEATS": "raise"}
every_fabric = pytest.mark.parametrize("fabric", FABRICS)


class Seen:
    """What the ranks of a job wrote down, by thing and by rank, and the job's report."""

    def __init__(self, folder, report):
        self.report = report
        self._lines = defaultdict(dict)
        for path in sorted(folder.glob("rank-*.jsonl")):
            for line in map(json.loads, path.read_text().splitlines()):
                self._lines[line["thing"]].setdefault(line["rank"], []).append(line)

    def all(self, thing):
        """By rank, the lines about ``thing``."""
        return self._lines[thing]

    def one(self, thing, ranks):
        """The only line of each of ``ranks`` about ``thing``, in which nobody else has a say."""
        lines = self._lines[thing]
        assert sorted(lines) == sorted(ranks), f"{thing}: {lines}"
        assert all(len(said) == 1 for said in lines.values())
        return [lines[rank][0] for rank in sorted(ranks)]


def run(folder, workers, *play, fabric="ulfm", specs=(), exit_code=0, env=None):
    """Run a play and return what was seen."""
    said = folder / "said"
    said.mkdir()
    report = run_report(
        folder,
        "-n", workers, "--fabric", fabric, *inject(*specs), PLAYS, *play,
        exit_code=exit_code, timeout=JOB_S, env={FOLDER: str(said)} | (env or {}),
    )  # fmt: skip
    return Seen(said, report)


def assert_ended(seen, killed, workers):
    """SIGKILL ended these, and the others ended well."""
    codes = exit_codes(seen.report)
    assert codes == {rank: -9 if rank in killed else 0 for rank in range(workers)}


# -- unmodified DDP


def printed(report):
    """What the example prints: by rank, the loss and the hash of the weights."""
    lines = re.findall(r"rank (\d+): .*loss (\S+), .*weights (\w+)", report["_stdout"])
    return {int(rank): (float(loss), weights) for rank, loss, weights in lines}


def check_example(report, survivors):
    said = printed(report)
    assert sorted(said) == survivors
    assert len({weights for _, weights in said.values()}) == 1, said
    assert all(0 <= loss < 1 for loss, _ in said.values()), said


@pytest.mark.parametrize(
    ("fabric", "specs"),
    [
        ("ulfm", ("kill:rank=0,step=40,phase=allreduce", "kill:rank=2,step=90,phase=backward")),
        ("gloo", ("kill:rank=3,step=0,phase=backward", "kill:rank=0,step=1,phase=allreduce")),
    ],
)
def test_an_unmodified_script_goes_on_when_two_of_four_die(tmp_path, fabric, specs):
    killed = [int(spec[10]) for spec in specs]

    report = run_report(tmp_path, "-n", 4, "--fabric", fabric, *inject(*specs), EXAMPLE, exit_code=1, timeout=JOB_S)

    check_example(report, sorted({0, 1, 2, 3} - set(killed)))
    assert_landed(report, *killed)
    assert "rank 0 was lost: what the script does under" in report["_stderr"], "it may have left its output to rank 0"


def test_a_sum_of_ddp_that_fails_without_recovery_raises_in_the_script_and_ends_the_job(tmp_path):
    """The negative control: DDP's sums fail like any other collective."""
    report = run_report(
        tmp_path,
        "-n", 4, "--max-restarts", 0, *inject("kill:rank=0,step=40,phase=allreduce"),
        PLAYS, "without_recovery", EXAMPLE,
        exit_code=1, timeout=JOB_S, env={FOLDER: str(tmp_path)},
    )  # fmt: skip

    codes = exit_codes(report)
    assert codes.pop(0) == -9
    assert not {0, -11} & set(codes.values()), "0: a rank went on; -11: the reducer took the error for tensors"
    assert printed(report) == {}
    assert "RuntimeError: Got the following error" in report["_stderr"]
    assert "rank 0 has failed; alive: 1, 2, 3" in report["_stderr"]


def test_the_mean_is_over_the_survivors_from_the_bucket_on_in_which_somebody_died(tmp_path):
    """Buckets that were complete keep the mean over all; the last parameter's comes first."""
    seen = run(
        tmp_path, 4, "gradients", 9,
        specs=(
            "kill:rank=3,step=2,phase=allreduce",
            "kill:rank=0,step=4,phase=allreduce,bucket=0",
            "kill:rank=2,step=6,phase=allreduce,bucket=1",
        ),
    )  # fmt: skip

    assert_landed(seen.report, 0, 2, 3)
    steps = defaultdict(list)
    for lines in seen.all("gradients").values():
        for line in lines:
            steps[line["step"]].append((line["fits"], line["weights"], tuple(line["after"])))
    assert all(len({str(rank) for rank in said}) == 1 for said in steps.values()), "the survivors differ"
    means = [said[0][0] for _, said in sorted(steps.items())]
    assert means == [
        *[[["0123"]] * 3] * 2,
        [["012"]] * 3,
        [["012"]] * 3,
        [["12"], ["12"], ["012"]],
        [["12"]] * 3,
        [["1"], ["12"], ["12"]],
        *[[["1"]] * 3] * 2,
    ]


def check_reducer(seen, kind, survivors):
    lines = seen.one(kind, survivors)
    assert [line.get("error") for line in lines] == [None] * len(survivors)
    assert [line["wrong"] for line in lines] == [[]] * len(survivors)
    assert {line["compared"] for line in lines} == {18 if kind == "unused" else 9}
    assert [line["alive"] for line in lines] == [survivors] * len(survivors)
    assert len({line["weights"] for line in lines}) == 1


@every_fabric
def test_every_kind_of_reducer_goes_on(tmp_path, fabric):
    """In the step of the death, and in the next one, gradients are those computed by hand over the survivors.

    Buffers are those of the lowest survivor.
    """
    seen = run(tmp_path, 7, "reducers", fabric=fabric)

    assert_ended(seen, range(5), 7)
    for victim, kind in enumerate(["unused", "no_sync", "static_graph", "bucket_view"], start=1):
        check_reducer(seen, kind, list(range(victim + 1, 7)))
    lines = seen.one("buffers", range(1, 7))
    assert [line.get("error") for line in lines] == [None] * 6
    assert {tuple(line["used"]) for line in lines} == {(100, 101, 202, 203)}
    assert [line["given"] for line in lines] == [[100 * (rank + 1) + step for step in range(4)] for rank in range(1, 7)]
    assert len({line["weights"] for line in lines}) == 1


@pytest.mark.parametrize(("play", "kind", "fabric"), [("hooked", "bf16", "ulfm"), ("sparse", "sparse", "gloo")])
def test_a_reducer_with_a_hook_that_compresses_or_a_sparse_gradient_goes_on(tmp_path, play, kind, fabric):
    seen = run(tmp_path, 3, play, fabric=fabric)

    check_reducer(seen, kind, [0, 1])
    assert_ended(seen, [2], 3)


# -- the script's own collectives


def gathered(alive):
    return [[float(rank)] * 2 for rank in alive]


AGAIN = {
    "all_reduce": lambda alive: {rank: [float(sum(alive) + len(alive))] * 5 for rank in alive},
    "all_gather": lambda alive: dict.fromkeys(alive, gathered(alive)),
    "broadcast": lambda alive: dict.fromkeys(alive, [1.0] * 3),
    "broadcast from the dead": None,
    "barrier": lambda alive: dict.fromkeys(alive),
    "reduce_scatter": lambda alive: {rank: [float(10 * sum(alive) + len(alive) * rank)] * 2 for rank in alive},
    "gather": lambda alive: {rank: gathered(alive) if rank == 1 else [] for rank in alive},
    "scatter": lambda alive: {rank: [float(rank)] * 2 for rank in alive},
    "all_to_all": lambda alive: {rank: [float(10 * sender + rank) for sender in alive] for rank in alive},
    "gather at the dead": None,
}
"""What each gives when it is called once more, over those alive; None: it needs the dead."""

DEATHS = {
    "collectives_one": {"all_reduce": 6, "all_gather": 5, "broadcast": 4, "broadcast from the dead": 0, "barrier": 3},
    "collectives_two": {"reduce_scatter": 0, "gather": 6, "scatter": 2, "all_to_all": 3, "gather at the dead": 5},
}


@pytest.mark.parametrize(("play", "fabric"), [("collectives_one", "gloo"), ("collectives_two", "ulfm")])
def test_a_collective_raises_once_at_every_survivor_and_works_again(tmp_path, play, fabric):
    """Five deaths, each in the middle of another one; also at the survivor who comes late, after others have seen the death."""
    seen = run(tmp_path, 7, play, fabric=fabric, env=RAISE)

    assert_ended(seen, DEATHS[play].values(), 7)
    for call in DEATHS[play]:
        check_collective(seen, play, call)
    if play == "collectives_one":
        for line in seen.one("new group", [1, 2]):
            assert (line["sum"], line["alive"], line["size"]) == (3.0, [1, 2], 2), "made after the death of rank 0"


def check_collective(seen, play, call):
    names = list(DEATHS[play])
    dead = sorted(DEATHS[play][name] for name in names[: names.index(call) + 1])
    survivors = [rank for rank in range(7) if rank not in dead]
    lines = seen.one(call, survivors)
    for line in lines:
        assert line["first"]["kind"] == "RanksLost"
        assert (line["first"]["dead"], line["first"]["survivors"]) == (dead, survivors)
        assert "did not complete" in line["first"]["says"]
        assert ("Use a root that is alive" in line["first"]["says"]) == call.endswith("the dead")
        assert line["alive"] == survivors
        assert line["works"]["result"] == {
            "sum": [float(sum(survivors) + len(survivors))] * 5,
            "max": float(max(survivors)),
            "gathered": gathered(survivors),
            "broadcast": [float(survivors[0])] * 3,
            "size": 7,
            "rank": line["rank"],
            "alive": survivors,
        }
    if AGAIN[call] is not None:
        assert {line["rank"]: line["again"]["result"] for line in lines} == AGAIN[call](survivors)
    else:
        assert {line["again"]["kind"] for line in lines} == {"RanksLost"}
        assert all(f"needs rank {DEATHS[play][call]}, which has failed" in line["again"]["says"] for line in lines)


@every_fabric
def test_whoever_a_completed_collective_fails_at_has_its_result_too(tmp_path, fabric):
    seen = run(tmp_path, 4, "completed_elsewhere", fabric=fabric)

    for call in (
        "all_reduce",
        "broadcast",
        "barrier",
        "all_gather",
        "gather",
        "reduce_scatter",
        "scatter",
        "all_to_all",
    ):
        expected = AGAIN[call]([0, 1, 2, 3]) if call != "broadcast" else dict.fromkeys(range(4), [0.0] * 3)
        assert {line["rank"]: line.get("result", line) for line in seen.one(call, range(4))} == expected, call
    for line in seen.one("with a death", [0, 1, 2]):
        assert line["answer"] == {"result": None}
        assert line["given"] == gathered([0, 1, 2, 3]), "with what the dead gave before"
        assert line["works"]["result"]["alive"] == [0, 1, 2]


ALWAYS_LOST = ("parameters", "view", "reduce_scatter", "all_to_all")


def place_of(dead, source):
    return [source if rank in dead else rank for rank in range(4)]


def test_gathers_of_metrics_take_the_lowest_survivors_value_for_the_dead(tmp_path):
    """Also in the gather in which a rank dies; and the report says so."""
    seen = run(tmp_path, 4, "empty_seats", fabric="ulfm")

    for victim, survivors in ((1, [0, 2, 3]), (0, [2, 3])):
        places = place_of({0, 1, 2, 3} - {*survivors}, survivors[0])
        for line in seen.one(f"without {victim}", survivors):
            at_root = line["rank"] == 2
            assert line["first"] == line["all_gather"] == line["into_tensor"] == {"result": places}
            assert line["gather"] == {"result": places if at_root else []}
            assert line["objects"] == {"result": [{"rank": rank, "more": "x" * rank} for rank in places]}
            assert line["gather_object"] == {"result": [["rank", rank] for rank in places] if at_root else None}
            assert line["alive"] == {"result": gathered(survivors)}
            for call in ALWAYS_LOST:
                assert line[call]["kind"] == "RanksLost", call
                assert line[call]["survivors"] == survivors
    filled = {(f["collective"], *f["seats"]): (f["sources"], f["count"]) for f in seen.report["seats_filled"]}
    assert filled == {
        ("all_gather", 1): ([0], 1),  # rank 0 has died before it could write how many there were
        ("all_gather_into_tensor", 1): ([0], 1),
        ("gather", 1): ([0], 2),
        ("all_gather", 0, 1): ([2, 2], 5),
        ("all_gather_into_tensor", 0, 1): ([2, 2], 1),
        ("gather", 0, 1): ([2, 2], 2),
    }


def test_objects_are_whole_if_a_rank_dies_between_their_sizes_and_their_bytes(tmp_path):
    seen = run(tmp_path, 3, "between_sizes_and_bytes", fabric="gloo")

    for line in seen.one("longer", [0, 2]):
        assert line["result"] == ["x" * 31, "x", "x"]
    (line,) = seen.one("shorter", [2])
    assert (line["kind"], line["dead"]) == ("RanksLost", [0, 1])
    assert "the object of failed rank 0, 1 is lost, and that of each survivor is larger" in line["says"]


def test_messages_to_the_dead_fail_and_the_living_go_on(tmp_path):
    seen = run(tmp_path, 6, "messages", fabric="ulfm")

    assert_ended(seen, [5], 6)
    (waits, sends, between) = seen.one("in flight", [0, 1, 2])
    assert (waits["kind"], waits["dead"], waits["survivors"]) == ("RanksLost", [5], [0, 1, 2, 3, 4])
    assert (sends["kind"], sends["dead"]) == ("RanksLost", [5])
    assert between["kind"] == "RanksLost", "nobody knows whether it was sent before the death"
    receiver, sender = seen.one("repeated", [2, 3])
    assert (receiver["result"], sender["result"]) == ([7.0], None)
    for line in seen.one("to the dead", range(5)):
        for error in (line["send"], line["receive"]):
            assert (error["kind"], error["dead"]) == ("RanksLost", [5])
            assert "needs rank 5, which has failed" in error["says"]
    assert all(line["works"]["result"]["alive"] == [0, 1, 2, 3, 4] for line in seen.one("works", range(5)))


def test_a_death_fails_in_groups_that_held_the_dead_and_in_no_other(tmp_path):
    seen = run(tmp_path, 6, "groups", fabric="gloo")

    assert_ended(seen, [4], 6)
    by_rank = {line["rank"]: line for line in seen.one("one group", [0, 1, 2, 3, 5])}
    for rank in (0, 1, 2):
        assert by_rank[rank]["failed"] == []
        assert by_rank[rank]["results"] == [6.0]
        assert by_rank[rank]["again"] == {"result": 6.0}
        assert by_rank[rank]["alive"] == [[0, 1, 2, 3, 5], [0, 1, 2]]
    for rank in (3, 5):
        (failed,) = by_rank[rank]["failed"]
        assert (failed["kind"], failed["dead"], failed["survivors"]) == ("RanksLost", [4], [3, 5])
        assert by_rank[rank]["again"] == {"result": 10.0}
        assert by_rank[rank]["alive"] == [[0, 1, 2, 3, 5], [3, 5]]
    assert by_rank[0]["between"] == by_rank[3]["between"] == {"result": 5.0}


@every_fabric
def test_all_survivors_raise_at_the_same_calls_whenever_ranks_die(tmp_path, fabric):
    """A long row of collectives; the first two of three deaths come at once."""
    print(f"seed {SEED}")

    seen = run(tmp_path, 5, "at_random", SEED, 3, fabric=fabric, env=RAISE)

    (line,) = {json.dumps({k: v for k, v in lines[0].items() if k != "rank"}) for lines in _survivors(seen).values()}
    told = json.loads(line)
    assert_ended(seen, told["victims"], 5)
    assert 2 <= len(told["seen"]) <= 3
    assert [error["kind"] for _, error in told["seen"]] == ["RanksLost"] * len(told["seen"])
    heard = [error["dead"] for _, error in told["seen"]]
    assert heard == sorted(heard, key=len)
    assert all(set(one) < set(more) for one, more in itertools.pairwise(heard)), heard
    assert heard[-1] == told["victims"]
    assert told["calls"] >= 300


def _survivors(seen):
    lines = seen.all("row")
    assert len(lines) == 2
    for said in lines.values():
        assert said[0]["works"]["result"].pop("rank") == said[0]["rank"]
    return lines


def test_who_comes_late_after_two_deaths_hears_of_both(tmp_path):
    seen = run(tmp_path, 4, "two_deaths_while_one_is_late", fabric="ulfm", env={"DIST_PLAYS_PATIENCE_S": "10"} | RAISE)

    first, late = (line["seen"] for line in seen.one("late", [0, 1]))
    assert [answer.get("dead") for answer in first] == [[3], [2, 3], None, None]
    assert [answer.get("kind") for answer in late] == ["RanksLost", "RanksLost", None, None]
    assert [answer.get("result") for answer in late] == [None, None, [3.0] * 5, [3.0] * 5]


def test_a_list_made_before_a_second_death_raises_like_everybody_elses(tmp_path):
    seen = run(tmp_path, 4, "a_list_from_before", fabric="gloo", env={"DIST_PLAYS_PATIENCE_S": "10"} | RAISE)

    lines = seen.one("list", [0, 1])
    assert [line["size"] for line in lines] == [3, 3]
    assert [line["first"]["kind"] for line in lines] == ["RanksLost", "RanksLost"]
    assert [line["again"] for line in lines] == [{"result": gathered([0, 1])}] * 2


def test_a_death_that_a_small_group_finds_is_told_to_the_whole_world(tmp_path):
    seen = run(tmp_path, 4, "later_world", fabric="gloo", env=RAISE)

    lines = seen.one("world", [0, 2, 3])
    assert [line["first"].get("dead") for line in lines] == [[1]] * 3, "a sum without rank 1, and nobody was told"
    assert [line["again"] for line in lines] == [{"result": [8.0] * 5}] * 3


EARLY = """
import os, pathlib, signal, sys
import torch
import torch.distributed as dist
import holdfast.distributed
if os.environ["RANK"] == sys.argv[2] and not (died := pathlib.Path(sys.argv[1])).exists():
    died.touch()
    os.kill(os.getpid(), signal.SIGKILL)
dist.init_process_group("holdfast")
total = torch.ones(1)
for _ in range(2):
    try:
        dist.all_reduce(total)
        break
    except holdfast.distributed.RanksLost as error:
        print("raised for", *error.ranks)
group = dist.new_group(holdfast.distributed.alive())
dist.barrier(group)
print("sum", total.item(), "of", dist.get_world_size())
if holdfast.distributed.is_lead():
    print("the lead has nothing to save")
"""


@pytest.mark.parametrize(("fabric", "victim"), [("gloo", 0), ("ulfm", 1)])
def test_a_rank_that_dies_before_the_group_is_made_does_not_hold_the_others(tmp_path, fabric, victim):
    """torch would wait for it for half an hour. Over Open MPI the job restarts, over Gloo it begins without the rank."""
    script = tmp_path / "early.py"
    script.write_text(EARLY)

    report = run_report(tmp_path, "-n", 3, "--fabric", fabric, script, tmp_path / "died", victim, timeout=JOB_S)

    assert report["restarts"] == (1 if fabric == "ulfm" else 0)
    assert "raised for" not in report["_stdout"]
    # without the rank, a sum of three ones is as large as if it were there
    assert report["_stdout"].count(f"sum {'2.0 of 2' if fabric == 'ulfm' else '3.0 of 3'}\n") == 2
    assert {rank for rank, code in exit_codes(report).items() if code == 0} == {0, 1, 2} - {victim}


STEPS = """
import pathlib, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
came = pathlib.Path(sys.argv[1])
dist.init_process_group("holdfast")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
left, end = 30, time.monotonic() + 90
while left and time.monotonic() < end:
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(0.2)
    left -= came.exists()
print("rank", dist.get_rank(), "of", dist.get_world_size(), "ends")
"""


def test_over_gloo_a_job_that_all_ranks_left_restarts_with_other_numbers(tmp_path):
    """The launcher's numbers of the ranks then differ from those of torch."""
    script, came = tmp_path / "steps.py", tmp_path / "came"
    script.write_text(STEPS)
    came.touch()
    specs = [f"{kind}:rank={rank},step=3,phase=backward" for rank, kind in enumerate(("kill", "segfault", "segfault"))]

    report = run_report(
        tmp_path,
        "-n", 3, "--fabric", "gloo", *inject(*specs), script, came,
        timeout=JOB_S,
    )  # fmt: skip

    assert report["restarts"] == 1
    assert report["workers"]["ranks_finished"] == [3]
    assert "rank 0 of 1 ends" in report["_stdout"]


# -- with other things


def test_a_session_and_collectives_live_in_one_script_and_a_death_changes_no_bit_of_the_session(tmp_path):
    seen = run(tmp_path, 4, "mixed", fabric="gloo", specs=["kill:rank=1,step=4,phase=allreduce,bucket=0"])

    assert_ended(seen, [1], 4)
    for line in seen.one("mixed", [0, 2, 3]):
        assert line["state"] == reference.train("cnn", "sgd")
        assert line["before"] == {"result": [10.0] * 5}
        assert line["first"] == line["again"] == {"result": [pytest.approx(8.0 * 4 / 3)] * 5}, "scaled"
        assert line["works"]["result"]["alive"] == [0, 2, 3]


# -- wrong use


@pytest.fixture(scope="module")
def misuse(tmp_path_factory):
    return run(tmp_path_factory.mktemp("misuse"), 3, "misuse", env={"HOLDFAST_DEBUG": "1"})


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        ("calls", "ScriptError", ["rank 0: barrier", "rank 1: all_reduce(SUM)", "rank 2: all_reduce(SUM)"]),
        ("shapes", "ScriptError", ["rank 0: all_reduce(SUM) torch.float32 (3,)", "torch.float32 (4,)"]),
        ("dtypes", "ScriptError", ["rank 0: all_reduce(SUM) torch.float64 (3,)", "torch.float32 (3,)"]),
        ("roots", "ScriptError", ["(3,) root 0", "(3,) root 1", "(3,) root 2"]),
        ("operations", "ScriptError", ["rank 0: all_reduce(MAX)", "rank 1: all_reduce(SUM)"]),
        ("meta", "ConfigError", ["the holdfast backend takes tensors on cpu or cuda, got one on meta"]),
        ("average of integers", "WrongArgument", ["AVG needs a floating-point dtype, got torch.int64"]),
        ("bits of floats", "WrongArgument", ["BAND is not defined for torch.float32"]),
    ],
)
def test_wrong_calls_are_named_at_every_rank_and_the_group_goes_on(misuse, call, kind, words):
    for line in misuse.one(call, range(3)):
        assert line["kind"] == kind
        assert all(word in line["says"] for word in words), line["says"]
        assert line["works"]["result"]["sum"] == [6.0] * 5


def test_sums_of_different_lengths_or_types_are_refused(tmp_path):
    seen = run(tmp_path, 2, "unlike", env={"DIST_PLAYS_PATIENCE_S": "10"})

    for thing, words in (("lengths", "different lengths, in rank order [3, 4]"), ("far lengths", "different lengths")):
        for line in seen.one(thing, [0, 1]):
            assert (line["kind"], words in line["says"]) == ("ScriptError", True), line
            assert line["works"]["result"]["sum"] == [3.0] * 5
    for line in seen.one("dtypes", [0, 1]):
        assert line.get("kind") == "ScriptError", line["given"]
        assert line["given"] == [1, 1, 1]
