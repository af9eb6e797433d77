"""The campaign itself: plans are their seeds, are read back from their JSON, shrink, and are judged by what they promise."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from campaign import command, jobs, runner
from campaign.attacks import KINDS
from campaign.attacks.base import End, Found, Kind
from campaign.command import command_for, main
from campaign.draw import draw, what_lacks
from campaign.judge import allowed_codes, allowed_ends, judge
from campaign.plan import Attack, Job, Plan
from campaign.results import Result, Results, summary
from campaign.runner import Ended, Outcome, Striker
from campaign.shrink import fails_again, shrink

KILL = Attack("signal", "worker 1", "commit 3", 12.3, {"signal": "SIGKILL"})
TERM = Attack("signal", "launcher", "start", 4321.0, {"signal": "SIGTERM"})
LITTLE = Attack("memory-too-small", values={"mb": 60})
DAMAGE = Attack("damage", since="commit 3", values={"how": "flip", "file": "data", "at": 0.5, "newest": 0})
HASH = "a" * 64


def test_a_plan_is_its_seed_and_is_read_back_from_its_json():
    plans = [draw(seed) for seed in range(400)]

    assert plans == [draw(seed) for seed in range(400)]
    assert [Plan.from_json(plan.to_json()) for plan in plans] == plans
    assert "\n" not in plans[0].to_json()
    assert "'" not in "".join(plan.to_json() for plan in plans), "the command quotes it with apostrophes"
    assert {plan.job.fabric for plan in plans} == {"gloo", "ulfm", "virtual"}
    assert {plan.job.strategy for plan in plans} == {"rollback", "restart", "reinit", "partial", "forward"}
    assert {plan.job.script for plan in plans} == {"session", "prepared", "ddp"}
    assert any(plan.job.guard == "heal" and plan.job.flip for plan in plans)
    assert all(len(plan.attacks) >= 1 for plan in plans)


def test_every_kind_is_drawn():
    assert {each.kind for seed in range(3000) for each in draw(seed).attacks} == set(KINDS)


def test_attacks_come_from_the_first_millisecond_on():
    times = [each.ms for seed in range(400) for each in draw(seed).attacks if each.kind == "signal"]

    assert min(times) < 1.5
    assert sum(ms < 10 for ms in times) > len(times) / 10
    assert max(times) > 2000


def test_only_kinds_that_exist_can_be_asked_for(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "nonsense"])
    assert "no such kind of attack: nonsense; there are" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--plan", '{"job":{},"attacks":[{"kind":"nonsense"}]}'], "no such kind of attack: nonsense"),
        (["--plan", "/nowhere"], "No such file"),
        (["--plan", "{"], "not a plan"),
        (["--plan", '{"job":{},"attacks":[{"kind":"twin"}]}'], "kind 'twin' needs values.fabric, values.kills"),
        (["--plan", '{"job":{},"attacks":[{"kind":"signal","values":{"signal":"SIGKILL"}}]}'], "needs victim"),
        (["--runs", "0"], "at least 1, got '0'"),
    ],
)
def test_wrong_words_are_refused_in_one_line(words, why, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert why in capsys.readouterr().err


def test_what_was_drawn_lacks_nothing():
    assert not [each for seed in range(200) for each in draw(seed).attacks if what_lacks(each)]


def test_without_a_kind_nothing_is_drawn(tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="no kind of attack"):
        draw(1, frozenset())
    monkeypatch.setattr(type(KINDS["twin"]), "missing", lambda self: "not here")
    assert main(["--only", "twin", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == "without twin: not here\n"
    assert said.err.startswith("error: none of the attacks")


@pytest.mark.parametrize(("commit", "seeds"), [("abc", [2, 3]), ("abc+", [1, 2, 3]), ("", [1, 2, 3])])
def test_only_plans_of_the_same_files_are_known(tmp_path, monkeypatch, commit, seeds):
    Results(tmp_path).add(Result(draw(1).to_json(), "right", "", 4.0, [], commit))
    ran = []
    monkeypatch.setattr(command, "commit_of", lambda root: commit)
    monkeypatch.setattr(command.Campaign, "run", lambda self, plans: ran.extend(plan.seed for plan in plans) or [])
    monkeypatch.setattr(command.signal, "signal", lambda number, handler: None)

    assert main(["--runs", "3", "--only", "signal", "--out", str(tmp_path)]) == 0
    assert ran == seeds


# -- shrinking


def test_a_plan_shrinks_to_what_makes_it_fail():
    plan = Plan(Job(workers=4, fabric="ulfm", spares=1, model="cnn", pause_ms=100), (TERM, KILL, TERM), seed=17)

    found = shrink(plan, lambda smaller: KILL.victim in [each.victim for each in smaller.attacks])

    assert len(found.attacks) == 1
    assert found.job == Job(workers=2)
    assert found.attacks[0] == replace(KILL, since="start", ms=0)
    assert found.seed is None
    assert command_for(found.to_json()).startswith("make chaos PLAN='{")


def test_a_flip_shrinks_with_its_guard_and_keeps_its_rank():
    job = Job(workers=4, guard="heal", flip="flip:rank=2,step=3,target=weights")
    smaller = []
    shrink(Plan(job, (replace(KILL, victim="worker 0"),)), lambda plan: smaller.append(plan.job) or False)

    assert {(each.guard, each.flip) for each in smaller} == {(job.guard, job.flip), ("stop", "")}
    assert {each.workers for each in smaller if each.flip} == {3, 4}
    assert jobs.with_workers(job, 2).flip == "flip:rank=1,step=3,target=weights"
    assert jobs.with_workers(Job(), 3) == Job(workers=3)


def test_what_fails_once_of_three_times_is_not_taken_for_the_cause():
    answers = iter([True, False, False])
    assert not fails_again(Plan(Job(), (KILL,)), lambda plan: next(answers))
    answers = iter([False, True, True])
    assert fails_again(Plan(Job(), (KILL,)), lambda plan: next(answers))


def test_a_plan_of_which_nothing_smaller_fails_stays_as_it_is():
    plan = Plan(Job(workers=3), (KILL,), seed=5)
    assert shrink(plan, lambda smaller: False) == plan


# -- judging


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "undisturbed", lambda case, cache: HASH)
    return tmp_path


def ended(code=0, said="", **more):
    samples = {"planned": 406, "committed": 406, "lost": 0, "repeated": 0}
    report = {"outcome": "done", "samples": samples, "replicas": {"identical": True, "state_sha256": HASH}}
    return Ended(code, said, 3.0, **{"report": report, "events": [{"event": "RunStarted", "step": 0}]} | more)


def verdict(cache: Path, first, resumed=None, attacks=(KILL,), landed=True, job=None, **more):
    plan = Plan(job or Job(workers=3), tuple(attacks), 1)
    outcome = Outcome(plan, first, resumed, landed=[landed] * len(attacks), **more)
    return judge(outcome, cache).kind


def altered(**more):
    report = ended().report
    return {"report": {**report, **{name: {**report[name], **value} for name, value in more.items()}}}


def test_right_ends_are_right(cache):
    assert verdict(cache, ended()) == "right"
    assert verdict(cache, ended(), landed=False) == "missed"
    assert verdict(cache, ended(-9), ended(), [replace(TERM, values={"signal": "SIGKILL"})]) == "right"
    assert verdict(cache, ended(4, "holdfast: stopped on request"), ended(), [TERM]) == "right"
    forward = Job(workers=3, strategy="forward")
    assert verdict(cache, ended(**altered(replicas={"state_sha256": "b"}, samples={"lost": 7})), job=forward) == "right"


@pytest.mark.parametrize(
    ("expected", "first"),
    [
        ("hang", ended(None, waits="worker 1 waits")),
        ("left-overs", ended(left=["4712 python"])),
        ("left-overs", ended(files=["/tmp/holdfast-1-x"])),
        ("traceback", ended(said="Traceback (most recent call last)\n  ...")),
        ("wrong hash", ended(**altered(replicas={"state_sha256": "b" * 64}))),
        ("wrong hash", ended(**altered(replicas={"identical": False}))),
        ("samples", ended(**altered(samples={"lost": 1}))),
        ("samples", ended(**altered(samples={"repeated": 1}))),
        ("false success", ended(**altered(samples={"committed": 405}))),
        ("false success", ended(report=None)),
        ("false success", ended(report={"outcome": "stopped"})),
    ],
)
def test_what_is_wrong_with_an_end_is_found(cache, expected, first):
    assert verdict(cache, first) == expected


def test_what_is_wrong_after_a_stop_is_found(cache):
    clear = "error: the job was lost"
    assert verdict(cache, ended(1, clear), ended()) == "stopped", "a killed worker is survived"
    assert verdict(cache, ended(1, "it broke"), ended(), [TERM]) == "no clear line"
    assert verdict(cache, ended(1, clear), ended(1, clear), [TERM]) == "not resumed"
    assert verdict(cache, ended(1, clear), ended(files=["/tmp/t/left"]), [TERM]) == "left-overs"
    early = ended(events=[{"event": "RunStarted", "step": 2}])
    assert verdict(cache, ended(1, clear), early, [TERM], intact=4) == "lost checkpoint"
    assert verdict(cache, ended(1, clear), early, [TERM], intact=2) == "right"
    assert verdict(cache, ended(1, clear), ended(events=[]), [TERM]) == "false success"
    assert verdict(cache, ended(), found=[Found("hang", "the second job")]) == "hang"


def test_a_plan_may_stop_where_too_many_workers_are_struck():
    def end(workers, *victims):
        return max(allowed_ends(Job(workers=workers), tuple(replace(KILL, victim=victim) for victim in victims)))

    assert end(2, "worker 0") == End.SURVIVES
    assert end(3, "worker 0", "watcher 2") == End.SURVIVES
    assert end(2, "worker 0", "watcher 1") == End.MAY_STOP
    assert end(4, "worker 0", "worker 0", "worker 1") == End.MAY_STOP
    assert end(2, "launcher") == End.MAY_STOP


def test_only_attacks_that_landed_excuse_a_stop(cache):
    clear = "holdfast: stopped on request"
    assert verdict(cache, ended(4, clear), ended(), [TERM], landed=False) == "stopped"
    assert verdict(cache, ended(1, "error: no memory"), ended(), [LITTLE], landed=False) == "right", (
        "it is there at once"
    )
    assert verdict(cache, ended(), None, [LITTLE], landed=False) == "missed"


@pytest.mark.parametrize(
    ("attack", "right", "wrong"),
    [
        (TERM, (4, 1, 93, -15), (2, -9, -11, 130)),
        (replace(TERM, values={"signal": "SIGINT"}), (4, 130, -2), (-15,)),
        (replace(TERM, victim="mpirun"), (1,), (-15, 130)),
        (Attack("limit", "launcher", values={"limit": "cpu", "value": 1}), (-9, 1), (-11,)),
        (Attack("limit", "worker 0", values={"limit": "cpu", "value": 1}), (1,), (-9,)),
        (Attack("memory-oom"), (-9, 1), (-6,)),
        (Attack("memory-oom", "worker 1"), (-9,), (1, 4)),
        (Attack("limit-at-start", values={"limit": "nofile", "value": 8}), (1, 2, 93), (4, -11)),
    ],
)
def test_a_launcher_ends_by_a_signal_only_where_something_can_kill_it(attack, right, wrong):
    codes = allowed_codes(Job(), (attack,))
    assert codes.issuperset(right)
    assert codes.isdisjoint(wrong)


OF_SCRIPT = """error: rank 0: OSError: libgomp.so.1: failed to map segment from shared object
Traceback (most recent call last):
  File "/x/tests/support/train_reference.py", line 12, in <module>
    import reference
  File "/x/tests/support/reference.py", line 13, in <module>
    import torch
  File "/x/lib/python3.11/site-packages/torch/__init__.py", line 444, in <module>
OSError: libgomp.so.1: failed to map segment from shared object
"""
OF_US = OF_SCRIPT.replace("/x/tests/support/reference.py", "/x/src/holdfast/session/session.py")
FROM_A_RANK = OF_SCRIPT + "".join(f"[1] {line}\n" for line in OF_US.splitlines())
OF_PYTHON = """Fatal Python error: init_import_site: Failed to import the site module
Traceback (most recent call last):
  File "<frozen site>", line 517, in venv
OSError: [Errno 24] Too many open files: '/x/.venv/pyvenv.cfg'
"""


@pytest.mark.parametrize(
    ("said", "value", "kind"),
    [
        (OF_SCRIPT, "as", "right"),
        (OF_US, "as", "traceback"),
        (FROM_A_RANK, "as", "traceback"),
        (OF_SCRIPT, "core", "traceback"),
        (OF_PYTHON, "nofile", "right"),
        (
            OF_PYTHON.replace(OF_PYTHON.splitlines()[0], "Could not import runpy module").replace(
                "site>", "importlib.util>"
            ),
            "nofile",
            "right",
        ),
        (
            OF_PYTHON.replace("init_import_site", "error evaluating path").replace("site>", "getpath>"),
            "nofile",
            "right",
        ),
        (OF_PYTHON + "/x/src/holdfast/cli.py", "nofile", "traceback"),
    ],
)
def test_a_traceback_is_the_users_only_where_a_limit_fails_the_scripts_own_statements(cache, said, value, kind):
    limit = Attack("limit-at-start", values={"limit": value, "value": 64})
    assert verdict(cache, ended(1, said), ended(), [limit]) == kind


def test_the_second_launcher_is_judged(cache):
    silence = Attack("net-silence", values={"lasts_s": 0, "way": "both", "saved": 0}, since="commit 3")

    def second(code, *attacks, first=0, said="error: this node was cut off"):
        return verdict(cache, ended(first, said, second=runner.Second(4712, code)), ended(), attacks)

    assert second(0) == second(0, silence) == second(1, silence) == "right"
    assert second(1) == second(-11, silence) == second(2, silence) == "stopped"
    assert second(1, silence, said="") == "no clear line"
    assert second(1, TERM, first=4, said="stopped on request") == "right"
    assert second(-15, KILL, first=0) == "stopped"
    left = verdict(cache, ended(4, "stopped "), ended(said="error: x", second=runner.Second(4712, 1)), [TERM])
    assert left == "stopped", "the resumed run is not attacked"


def test_a_checkpoint_that_is_lost_is_found(cache):
    def run(*events, code=0):
        found = [{"event": name, "step": step, "t_s": t_s} for t_s, (name, step) in enumerate(events)]
        return ended(code, "error: lost", events=found)

    begun, saved, restarted = ("RunStarted", 0), ("CheckpointSaved", 4), ("JobRestarted", -1)
    assert verdict(cache, run(begun, saved, restarted, ("RunStarted", 4))) == "right"
    assert verdict(cache, run(begun, saved, restarted, begun)) == "lost checkpoint"
    assert verdict(cache, run(begun, restarted, begun, saved)) == "right"
    assert verdict(cache, run(begun, saved, restarted, begun), None, [KILL, DAMAGE]) == "right"
    stopped = run(begun, saved, code=1)
    assert verdict(cache, stopped, ended(), [TERM]) == "lost checkpoint"
    back = {"event": "Recovered", "t_s": 9, "decision": "heal"}
    to_3, to_5 = (ended(1, "error: lost", events=[*stopped.events, back | {"step": step}]) for step in (3, 5))
    assert verdict(cache, to_3, ended(), [TERM]) == "right", "the guard removes what was saved after step 3"
    assert verdict(cache, to_5, ended(), [TERM]) == "lost checkpoint"
    assert verdict(cache, stopped, run(("RunStarted", 4)), [TERM], intact=4) == "right"
    assert verdict(cache, stopped, ended(), [TERM, DAMAGE]) == "right"


def test_what_a_job_without_an_effective_attack_promises_is_checked(cache):
    forward, ddp = Job(workers=3, strategy="forward"), Job(script="ddp")
    assert verdict(cache, ended(**altered(samples={"lost": 7})), job=forward, landed=False) == "samples"
    assert verdict(cache, ended(**altered(replicas={"state_sha256": "b"})), job=forward, landed=False) == "wrong hash"
    assert verdict(cache, ended(said=f"state {HASH}"), job=ddp) == "right"
    assert verdict(cache, ended(), job=ddp) == "false success"


def test_ranks_of_ddp_end_with_equal_weights_those_of_the_last_start(cache):
    ddp, other = Job(script="ddp"), f"state {'b' * 64}"
    again = "holdfast: start 2 of the job, on ranks 0, 1: ranks 0, 1 ended, and how is not recorded"
    assert verdict(cache, ended(said=f"state {HASH}\n{other}"), None, [KILL], job=ddp) == "wrong hash"
    assert verdict(cache, ended(said=f"{other}\n{again}\nstate {HASH}"), None, [KILL], job=ddp) == "right"
    assert verdict(cache, ended(said=f"{again}\nstate {HASH}\n{other}"), None, [KILL], job=ddp) == "wrong hash"


def test_the_hash_of_another_job_on_the_machine_is_checked(cache):
    assert verdict(cache, ended(), others=[(Job(), HASH)]) == "right"
    assert verdict(cache, ended(), others=[(Job(), "b" * 64)]) == "wrong hash"


def test_ctrl_c_before_the_job_is_one_line_with_its_own_exit_code(cache):
    interrupt = replace(TERM, values={"signal": "SIGINT"})
    line = "holdfast: interrupted before the job began"
    in_python = (
        'Traceback (most recent call last)\n  File "/src/holdfast/__init__.py", line 9, in <module>\nKeyboardInterrupt'
    )

    assert verdict(cache, ended(130, line), ended(), [interrupt]) == "right"
    assert verdict(cache, ended(130), ended(), [interrupt]) == "no clear line"
    assert verdict(cache, ended(1, line), ended(), [interrupt]) == "no clear line"
    assert verdict(cache, ended(-2, in_python), ended(), [interrupt]) == "right"
    assert verdict(cache, ended(-2, in_python.replace("<module>", "main")), ended(), [interrupt]) == "traceback"
    assert verdict(cache, ended(1, in_python), ended(), [interrupt]) == "traceback"


def test_an_attack_may_wait_until_the_one_before_has_struck(tmp_path):
    order, gate = [], threading.Event()

    class Slow(Kind):
        def strike(self, attack, running):
            gate.wait(10)
            order.append("first")
            return True

    class Next(Kind):
        def strike(self, attack, running):
            order.append("second")
            return True

    running = SimpleNamespace(began_s=time.monotonic(), sleep=lambda seconds: time.sleep(seconds) or True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "slow", Slow())
        patch.setitem(KINDS, "next", Next())
        first = Striker(Attack("slow"), running)
        second = Striker(Attack("next", since="landed"), running, first)
        first.start()
        second.start()
        time.sleep(0.05)
        assert order == []
        gate.set()
        second.join(10)

    assert order == ["first", "second"]


def test_damage_waits_for_a_file_that_is_there(tmp_path):
    attack = Attack("damage", values={"how": "remove", "file": "data", "at": 0.5, "newest": 0})
    checkpoint, notes = tmp_path / "step-4", []
    steps = iter([checkpoint.mkdir, (checkpoint / "manifest.json").touch, (checkpoint / "data").touch])

    def go_on(seconds):
        next(steps)()
        return True

    running = SimpleNamespace(launch=SimpleNamespace(checkpoints=str(tmp_path)), sleep=go_on, notes=notes)

    assert KINDS["damage"].strike(attack, running)
    assert notes == ["remove of step-4/data"]
    assert not (checkpoint / "data").exists()


# -- results


def test_results_are_kept_line_by_line_and_a_torn_line_is_left_out(tmp_path):
    results = Results(tmp_path)
    right = Result(Plan(Job(), (KILL,), 3).to_json(), "right", "", 4.0, [("signal", True)], "abc")
    wrong = Result(
        Plan(Job(), (KILL, TERM), 4).to_json(), "hang", "", 6.0, [("signal", True), ("signal", False)], "abc"
    )
    results.add(right)
    results.add(wrong)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"plan": "torn')

    assert results.seeds_of("abc") == {3, 4}
    assert results.seeds_of("other") == set()
    assert [each.verdict for each in results.newest()] == ["right", "hang"]
    assert "| `signal` | 2 | 2 | 1 | 1 | 4 (hang) |" in summary(results.all())
    assert "2 plans, seeds 3 to 4: 1 right, 1 hang; 5.0 s a plan." in summary(results.all())
