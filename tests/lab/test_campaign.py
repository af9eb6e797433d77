from __future__ import annotations

import json
import os
import signal
import sqlite3
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from campaigns import (
    DEADLINE_S,
    Training,
    campaign_of,
    leave_open,
    prepare_toy,
    prepare_training,
    rows_of,
    toy,
    trial_of_training,
    trial_that_forgets_the_optimizer,
)

from holdfast.errors import ConfigError, InternalError, JobError
from holdfast_lab.studies.campaign import run_campaign
from holdfast_lab.studies.campaign_plan import Cell, StopRule, check_alone, found_by, seed_of
from holdfast_lab.studies.campaign_table import CampaignTable, as_json, read_rows
from holdfast_lab.studies.explain import explained, shares, spread
from holdfast_lab.studies.outcomes import (
    ACCR,
    NAN,
    RWC,
    TF,
    are_finite,
    digest,
    layer_errors,
    outcome_of,
    relative_error,
)
from holdfast_lab.studies.pool import WorkerPool
from holdfast_lab.studies.stats import wilson


def table(path: Path) -> list[dict]:
    """The rows, without the time they took."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in read_rows(path)]


def by_brute_force(campaign) -> list[dict]:
    """The rows as one would make them one after the other, with a new warm state for each."""
    rows = []
    ends = {*range(campaign.stop.batch, campaign.stop.most, campaign.stop.batch), campaign.stop.most}
    for cell in sorted(campaign.cells, key=lambda cell: cell.name):
        outcomes = []
        while not (len(outcomes) in ends and campaign.stop.is_enough(outcomes)):
            seed = seed_of(campaign.seed, cell.name, len(outcomes))
            found = json.loads(as_json(found_by(campaign.trial, campaign.prepare(cell.settings), seed)))
            rows.append(dict(cell.settings) | {"cell": cell.name, "number": len(outcomes), "seed": seed} | found)
            outcomes.append(found["outcome"])
    return rows


# --------------------------------------------------------------------------------------------- the table


def test_the_table_is_that_of_trials_made_one_after_the_other_without_the_cell_that_cannot_be_prepared(tmp_path):
    cells = {"a": {}, "b": {"raises": 0.3}, "nan": {"weights": [0, 0, 1]}, "sure": {"weights": [1, 0, 0]}}
    stop = {"width": 0.14, "most": 70}
    heard = []

    broken = run_campaign(
        campaign_of({"no": {"refuses": "there is no such data"}, **cells}, **stop),
        tmp_path / "rows.db",
        2,
        heard.append,
    )

    rows = table(tmp_path / "rows.db")
    assert broken == {"no": "ValueError: there is no such data"}
    assert rows == by_brute_force(campaign_of(cells, **stop))
    counts = {name: sum(row["cell"] == name for row in rows) for name in cells}
    assert counts["sure"] < counts["a"] < 70  # a sure thing is known early, and nothing takes all
    assert all(count % 10 == 0 for count in counts.values())
    assert {(row["outcome"], row["loss"]) for row in rows if row["cell"] == "nan"} == {(NAN, None)}
    assert any(line.startswith("b: training failed in trial ") and "RuntimeError: 0." in line for line in heard)
    assert f"sure: {counts['sure']} trials, RWC 100.0%" in "\n".join(heard)


def test_a_cell_ends_at_the_first_batch_that_says_enough():
    stop = StopRule(width=0.1, batch=10, least=20, most=65)
    mixed = [RWC, ACCR] * 40

    enough = {count: stop.is_enough(mixed[:count]) for count in (10, 20, 60, 65)}

    assert enough == {10: False, 20: False, 60: False, 65: True}
    assert not stop.is_enough([RWC] * 10)
    assert stop.is_enough([RWC] * 20)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"width": 1.5}, "width must be from 0 to 1, got 1.5"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"least": 40}, "least from 1 to most, got batch = 10, least = 40, most = 30"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        campaign_of({}, **wrong)


def test_the_seed_of_a_trial_is_the_same_everywhere():
    assert seed_of(7, "cell", 3) == 5177030177502001090
    assert len({seed_of(*parts) for parts in ((7, "cell", 4), (8, "cell", 3), (7, "cell3", 3), (7, "cell", 3))}) == 4


# --------------------------------------------------------------------------------------------- what goes wrong


def test_a_trial_that_kills_its_process_twice_has_failed_and_the_others_are_made(tmp_path):
    campaign = campaign_of({"a": {"dies": 0.2, "notes": str(tmp_path / "notes")}}, most=10)
    heard = []

    run_campaign(campaign, tmp_path / "rows.db", 2, heard.append)

    rows = read_rows(tmp_path / "rows.db")
    dead = {row["seed"] for row in rows if row["outcome"] == TF}
    tried = [int(line.split()[1]) for line in (tmp_path / "notes").read_text().splitlines()]
    assert len(rows) == 10
    assert dead
    assert {row["error"] for row in rows if row["outcome"] == TF} == {"the process died twice: SIGSEGV"}
    assert {seed: tried.count(seed) for seed in tried} == {row["seed"]: 1 + (row["seed"] in dead) for row in rows}
    assert sum("died (SIGSEGV)" in line for line in heard) == 2 * len(dead)


def test_a_process_that_a_stranger_kills_costs_a_repetition_and_changes_nothing(tmp_path):
    notes = tmp_path / "notes"
    campaign = campaign_of({"a": {"waits": True, "notes": str(notes)}}, least=2, most=2)
    seeds = [seed_of(campaign.seed, "a", number) for number in (0, 1)]

    def kill():
        for seed in seeds:  # whoever is at this trial, the first time
            end_s = time.monotonic() + DEADLINE_S
            while not (
                notes.exists() and (at := [line for line in notes.read_text().splitlines() if f" {seed}" in line])
            ):
                if time.monotonic() > end_s:
                    return
                time.sleep(0.02)
            os.kill(int(at[0].split()[0]), signal.SIGKILL)

    stranger = threading.Thread(target=kill)
    stranger.start()
    heard = []
    run_campaign(campaign, tmp_path / "rows.db", 1, heard.append)
    stranger.join()

    assert [line for line in heard if "died" in line] == [
        f"a: the process of trial {number} died (SIGKILL)" for number in (0, 1)
    ]
    assert len(notes.read_text().splitlines()) == 4
    assert table(tmp_path / "rows.db") == by_brute_force(campaign)


def test_a_trial_without_an_end_has_failed(tmp_path):
    campaign = campaign_of({"a": {"takes_s": DEADLINE_S}}, least=1, most=1, limit_s=0.5)

    run_campaign(campaign, tmp_path / "rows.db", 1)

    row = read_rows(tmp_path / "rows.db")[0]
    assert (row["outcome"], row["error"]) == (
        TF,
        "the process died twice: killed after 0.5 s without an answer",
    )


def trial_without_outcome(warm, seed):
    return {"outcome": "fine"}


def trial_that_finds_a_mistake_of_ours(warm, seed):
    msg = "other bits than before"
    raise InternalError(msg)


def trial_with_a_name_of_ours(warm, seed):
    return {"outcome": RWC, "share": 2, "seconds": 1}


@pytest.mark.parametrize(
    ("trial", "message"),
    [
        (trial_without_outcome, "must be one of RWC, AccR, NaN, TF, cell 'a' gave 'fine'"),
        (trial_that_finds_a_mistake_of_ours, "other bits than before"),
        (trial_with_a_name_of_ours, "cell 'a' return names that the table uses itself: seconds, share"),
    ],
)
def test_a_trial_that_returns_something_else_is_a_mistake_of_ours_and_no_outcome(trial, message, tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast_lab.studies.campaign.WorkerPool", Here)
    with pytest.raises(InternalError, match=message):
        run_campaign(campaign_of({"a": {"share": 1}}, trial=trial), tmp_path / "rows.db", 1)

    assert read_rows(tmp_path / "rows.db") == []


class Here(WorkerPool):
    """Does everything in this process, where functions of a test can be found."""

    def __init__(self, count, preload):
        super().__init__(count, preload)
        for worker in self._workers:
            worker.give = partial(self._call, worker)
        self.answers = []

    def _call(self, worker, key, limit_s, function, *arguments):
        from holdfast_lab.studies.pool import TrialAnswer

        self.answers.append(TrialAnswer(worker, key, function(*arguments)))

    def wait(self):
        come, self.answers = self.answers, []
        return come


def test_sigterm_ends_it_in_order_and_it_goes_on_to_the_same_table(tmp_path):
    notes = tmp_path / "notes"
    campaign = campaign_of({"a": {"takes_s": 0.02, "notes": str(notes)}, "b": {"takes_s": 0.02, "notes": str(notes)}})
    path = tmp_path / "rows.db"
    before = signal.getsignal(signal.SIGTERM)

    def stop():
        end_s = time.monotonic() + DEADLINE_S
        while not (path.exists() and notes.exists() and len(notes.read_text().splitlines()) > 8):
            if time.monotonic() > end_s:
                return
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_campaign(campaign, path, 2)
    thread.join()
    made = len(read_rows(path))
    pids = {int(line.split()[0]) for line in notes.read_text().splitlines()}
    heard = []
    run_campaign(campaign, path, 2, heard.append)

    assert signal.getsignal(signal.SIGTERM) == before
    assert 0 < made < 60
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert heard[0] == f"{made} trials are already in the file"
    assert table(path) == by_brute_force(campaign)


# --------------------------------------------------------------------------------------------- the file


def test_a_file_of_another_campaign_is_refused_and_one_with_more_cells_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast_lab.studies.campaign.WorkerPool", Here)
    path = tmp_path / "rows.db"
    run_campaign(campaign_of({"a": {"takes_s": 0}}, most=10), path, 1)

    with pytest.raises(ConfigError, match=r"another campaign: seed = 1, requested 2; give another file, or remove it"):
        run_campaign(campaign_of({"a": {"takes_s": 0}}, most=10, seed=2), path, 1)
    with pytest.raises(ConfigError, match=r"takes_s of cell 'a' = 0, requested 0\.1"):
        run_campaign(campaign_of({"a": {"takes_s": 0.1}}, most=10), path, 1)
    run_campaign(campaign_of({"a": {"takes_s": 0}, "b": {}}, most=10), path, 1)

    assert len(read_rows(path)) == 20


def test_a_file_that_is_something_else_is_refused_and_left_alone(tmp_path):
    text, base = tmp_path / "text", tmp_path / "other.db"
    text.write_text("no database at all, but long enough to be looked at " * 20)
    connection = sqlite3.connect(base)
    connection.execute("CREATE TABLE mine (x)")
    connection.close()
    before = text.read_bytes(), base.read_bytes()

    for path, message in (
        (text, "holds no campaign: file is not a database"),
        (base, "an SQLite database, but not of a campaign"),
    ):
        with pytest.raises(ConfigError, match=message):
            CampaignTable(path, {}, {})
        with pytest.raises(ConfigError, match=message):
            read_rows(path)

    assert (text.read_bytes(), base.read_bytes()) == before


def test_two_cannot_write_one_file(tmp_path):
    with CampaignTable(tmp_path / "rows.db", {}, {}), pytest.raises(ConfigError, match="in use by another process"):
        CampaignTable(tmp_path / "rows.db", {}, {})

    with CampaignTable(tmp_path / "rows.db", {}, {}):
        pass


def test_cells_must_have_names_of_their_own(tmp_path):
    campaign = campaign_of({})
    with pytest.raises(ConfigError, match="distinct names, got twice: a"):
        run_campaign(
            type(campaign)(
                name="toy",
                seed=1,
                cells=[Cell("a", {}), Cell("a", {"x": 1})],
                prepare=prepare_toy,
                trial=toy,
                stop=campaign.stop,
            ),
            tmp_path / "rows.db",
        )


# --------------------------------------------------------------------------------------------- processes


def test_processes_give_rows_in_order_and_pass_on_what_is_raised():
    with WorkerPool(2) as workers:
        assert workers.rows(rows_of, range(7)) == [{"value": number} for number in range(7) for _ in range(2)]
        with pytest.raises(ValueError, match="invalid literal") as raised:
            workers.rows(rows_of, ["no", 1])
        with pytest.raises(JobError, match=r"died \(exit status 3\); run the study again"):
            workers.rows(os._exit, [3])
        assert workers.rows(rows_of, [5]) == [{"value": 5}] * 2  # others take their places

    assert "in a process of the study" in "".join(raised.value.__notes__)
    with pytest.raises(ConfigError, match="the number of processes must be at least 1, got 0"):
        WorkerPool(0)


def test_what_a_call_leaves_open_is_closed_with_its_process_idle_or_not(tmp_path):
    with WorkerPool(2) as workers:
        for worker, takes_s in zip(workers.free(), (0, DEADLINE_S), strict=True):
            worker.give(takes_s or "idle", None, leave_open, {"place": str(tmp_path), "takes_s": takes_s})
        (idle,) = workers.wait()
        assert (idle.key, Path(idle.value[0]["value"]).is_dir()) == ("idle", True)
        end_s = time.monotonic() + DEADLINE_S
        while len(list(tmp_path.glob("*/left"))) < 2:
            assert time.monotonic() < end_s, "it does not begin"
            time.sleep(0.01)

    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------- warm states


def test_a_restored_training_goes_on_with_the_same_bits():
    training = Training()
    held = training.held()
    training.train(5)
    after = digest(training.model.state_dict()), training.optimizer.param_groups[0]["lr"], training.losses[-5:]
    training.model.half().eval()
    training.optimizer.param_groups[0]["lr"] = 1.0
    training.model[1].running_mean = torch.zeros(3)

    for _ in range(2):
        held.restore()
        training.losses.clear()
        training.train(5)

        assert (digest(training.model.state_dict()), training.optimizer.param_groups[0]["lr"], training.losses) == after
        assert training.model.training


def test_a_trial_finds_the_same_first_and_after_others():
    campaign = campaign_of({"a": {}}, prepare=prepare_training, trial=trial_of_training)

    check_alone(campaign, campaign.cells[0], trials=12)


def test_negative_control_a_trial_that_forgets_the_optimizer_does_not():
    campaign = campaign_of({"a": {}}, prepare=prepare_training, trial=trial_that_forgets_the_optimizer)

    with pytest.raises(InternalError, match=r"trial \d of cell 'a' depends on those before it"):
        check_alone(campaign, campaign.cells[0])


def test_the_same_bits_come_from_other_processes(tmp_path):
    campaign = campaign_of({"a": {}}, prepare=prepare_training, trial=trial_of_training, most=10)

    run_campaign(campaign, tmp_path / "rows.db", 2)

    assert table(tmp_path / "rows.db") == by_brute_force(campaign)
    assert len({row["digest"] for row in read_rows(tmp_path / "rows.db")}) > 5


# --------------------------------------------------------------------------------------------- outcomes


def test_classes_are_those_of_the_paper():
    assert outcome_of(0.97, 0.93, finite=True) == RWC
    assert outcome_of(0.88, 0.93, finite=True) == RWC  # a drop of exactly the limit, whatever the last digits are
    assert outcome_of(0.8799, 0.93, finite=True) == ACCR
    assert outcome_of(0.97, 0.93, finite=False) == NAN
    assert outcome_of(0.37, 0.4, finite=True) == RWC
    assert outcome_of(0.37, 0.4, finite=True, drop="relative") == ACCR
    assert are_finite([1.0], [torch.ones(2)])
    assert not are_finite([float("inf")], [torch.ones(2)])
    assert not are_finite([1.0], [torch.tensor([1.0, float("nan")])])


def test_a_digest_sees_every_bit():
    one = {"a": torch.tensor([0.0, float("nan")]), "b": torch.ones(2, 2, dtype=torch.bfloat16), "n": torch.tensor(3)}
    same = {name: one[name].clone() for name in reversed(one)}
    minus = one | {"a": torch.tensor([-0.0, float("nan")])}
    other_nan = one | {"a": torch.tensor([0, 0x7FC00001], dtype=torch.int32).view(torch.float32)}
    reshaped = one | {"b": torch.ones(4, dtype=torch.bfloat16)}

    assert digest(same) == digest(one)
    assert len({digest(state) for state in (one, minus, other_nan, reshaped)}) == 4


def test_relative_errors_say_what_they_do_about_zeros():
    inf, nan = float("inf"), float("nan")
    undisturbed = torch.tensor([2.0, -2.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    disturbed = torch.tensor([3.0, -3.0, 0.0, 5.0, -5.0, inf, nan, 1.0])

    error = relative_error(undisturbed, disturbed)
    of_layer = layer_errors(
        {"x.0.w": undisturbed, "x.n": torch.tensor(1)}, {"x.0.w": disturbed, "x.n": torch.tensor(2)}
    )

    assert error.nan_to_num(nan=77, posinf=inf, neginf=-inf).tolist() == [0.5, -0.5, 0.0, inf, -inf, inf, 77, 0.0]
    assert list(of_layer) == ["x.0"]
    counts = {name: of_layer["x.0"][name] for name in ("values", "changed", "from_zero", "not_finite", "max", "median")}
    assert counts == {"values": 8, "changed": 6, "from_zero": 2, "not_finite": 2, "max": 0.5, "median": 0.0}
    assert of_layer["x.0"]["mean"] == pytest.approx(0.25)
    assert of_layer["x.0"]["norm"] == pytest.approx((52 / 9) ** 0.5)


def test_relative_errors_of_the_critical_bit_are_numbers():
    weights = torch.full((4,), 0.01)
    flipped = weights.clone()
    flipped.view(torch.int32)[0] ^= 1 << 30

    error = layer_errors({"l.weight": weights}, {"l.weight": flipped})["l"]

    assert error["max"] == pytest.approx(3.4e38, rel=0.01)
    assert error["norm"] == pytest.approx(1.7e38, rel=0.01)


# --------------------------------------------------------------------------------------------- what rows say


def test_wilson_gives_the_numbers_of_the_books():
    assert wilson(8, 10) == pytest.approx((0.49016, 0.94332), abs=1e-5)
    assert wilson(0, 10) == (0.0, pytest.approx(0.27753, abs=1e-5))
    assert wilson(10, 10) == (pytest.approx(0.72247, abs=1e-5), 1.0)


def test_shares_and_spread():
    assert shares([NAN, RWC, NAN, RWC, RWC, TF])[RWC].share == 0.5
    assert shares([NAN, NAN])[NAN][2:] == wilson(2, 2)
    assert spread([1.0, None, 3.0]) == (2, 2.0, pytest.approx(2**0.5), pytest.approx(2**0.5 / 2))
    assert spread([None]) is None
    assert spread([0.5]) == (1, 0.5, None, None)


def test_what_decides_the_outcome_is_told_from_what_does_not():
    chance = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 32, (400,), generator=chance).tolist()
    layers = torch.randint(0, 60, (400,), generator=chance).tolist()
    rows = [
        {"bit": bit, "layer": layer, "trial": number, "same": 1, "outcome": NAN if bit >= 30 else RWC}
        for number, (bit, layer) in enumerate(zip(bits, layers, strict=True))
    ]

    found = {name: explained(rows, name, seed=1, permutations=99) for name in ("bit", "layer", "trial", "same")}

    assert found["bit"].share == pytest.approx(1.0)
    assert found["bit"].p == 0.01
    assert found["layer"].share < 0.1  # though 60 levels explain much of 400 rows by chance alone
    assert found["layer"].p > 0.05
    assert (found["trial"].share, found["trial"].p) == (0.0, 1.0)  # each row has a level of its own: says nothing
    assert (found["same"].share, found["same"].p) == (0.0, 1.0)
    assert explained(rows, "nothing", seed=1).trials == 0
