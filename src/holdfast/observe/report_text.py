"""A report in words: a summary of the run in one or two sentences, and what happened besides failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.base.formatting import count, listing, number, seconds
from holdfast.summary.build import DISTRIBUTED
from holdfast.summary.event_lines import action_line, slowness

_KILLS = ("kill", "oom", "segfault", "nodeloss")
_STUCK = ("hang", "gil", "spin", "deadlock", "gpu-hang")
_SMALL = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_LATE_S, _LATE_STEPS = 1.0, 3.0
"""A failure that is noticed within a second, or within the time of three steps, was not noticed late."""


def is_distributed(report: Mapping[str, Any]) -> bool:
    """Return whether the script uses ``torch.distributed``, so that samples, model and plan are unknown."""
    return report.get("api") == DISTRIBUTED


def worker(report: Mapping[str, Any]) -> str:
    """Return the term for a worker in the run's interface: "worker" or "rank"."""
    return "rank" if is_distributed(report) else "worker"


def headline(report: Mapping[str, Any]) -> str:
    """Return one or two sentences that summarise the run and its end."""
    parts = (_what_happened(report), _joined_and_left(report), _how_it_ended(report), _samples(report))
    return " ".join(part for part in parts if part)


def happenings(report: Mapping[str, Any]) -> list[tuple[float, str]]:
    """Return times and descriptions of events other than failures: workers that joined, left or were slow, changes."""
    one = worker(report)
    events = [
        (r["t_s"], f"{one} {r['rank']} joined at step {r['step']}; the other workers waited {seconds(r['held_s'])}")
        for r in report.get("joined", ())
    ]
    events += [
        (r["t_s"], f"{one} {r['rank']} left before step {r['step']}, after SIGTERM") for r in report.get("left", ())
    ]
    events += [(r["t_s"], _reinitialised(r)) for r in report.get("reinitialised", ())]
    events += [(r["t_s"], _restored(r)) for r in report.get("restored", ())]
    events += [
        (r["t_s"], f"{one} {r['worker']} took the place of {one} {r['seat']} from step {r['step']} on")
        for r in report.get("seats_taken", ())
    ]
    events += [(r["t_s"], _filled(r)) for r in report.get("seats_filled", ())]
    slow: dict[int, list[Mapping[str, Any]]] = {}
    for r in report.get("stragglers", ()):
        slow.setdefault(r["rank"], []).append(r)
    events += [(records[0]["t_s"], f"{one} {rank} was slow {_slow(records)}") for rank, records in slow.items()]
    events += [(r["t_s"], _changed(r)) for r in report.get("changed", ())]
    events += [(r["t_s"], action_line(r["action"], r["values"])) for r in report.get("actions", ())]
    guard = report.get("guard", {})
    events += [(r["t_s"], _corrupt(r)) for r in guard.get("found", ())]
    events += [(r["t_s"], _healed(r)) for r in guard.get("healed", ())]
    return sorted(events)


def _filled(r: Mapping[str, Any]) -> str:
    """Return in which collectives survivors' values stood in for failed ranks, or sums were scaled for them."""
    by: dict[int, list[int]] = {}
    for seat, source in zip(r["seats"], r["sources"], strict=True):
        by.setdefault(source, []).append(seat)
    who = [
        f"the sum was scaled for rank{'s' * (len(seats) > 1)} {listing(seats)}"
        if source < 0
        else f"the value of rank {source} stood in for that of rank{'s' * (len(seats) > 1)} {listing(seats)}"
        for source, seats in by.items()
    ]
    return f"{listing(who)} in {count(r['count'], 'call')} of {r['collective']}"


def _corrupt(r: Mapping[str, Any]) -> str:
    """Return a description of what the guard found, and at which rank."""
    whose = f" (rank{'s' * (len(r['ranks']) > 1)} {listing(r['ranks'])})" if r["ranks"] else ""
    what = {
        "replicas": "replicas differed in",
        "range": "a value was far out of range in",
        "message": "a message was altered in transit,",
    }[r["what"]]
    return f"corruption was found at step {r['step']}: {what} {_some(r['where'])}{whose}"


def _some(names: Sequence[str]) -> str:
    """Return the first few of many names."""
    return listing([*names[:2], f"{len(names) - 2} others"] if len(names) > 3 else names)


def _healed(r: Mapping[str, Any]) -> str:
    """Return a description of how corruption was healed."""
    if r["is_training"]:
        return f"the values found at step {r['found_at']} were recomputed with the same bits, so they come from the training itself"
    if r["source"] == "step":
        return f"it was healed: all workers retried step {r['found_at']}"
    sources = {"snapshot": "kept in memory", "checkpoint": "of a checkpoint", "beginning": "at the start of training"}
    whose = f"; rank{'s' * (len(r['ranks']) > 1)} {listing(r['ranks'])} had computed wrong bits" if r["ranks"] else ""
    return f"it was healed: all workers rolled back to step {r['went_back_to']}, to the state {sources[r['source']]}{whose}"


def _changed(change: Mapping[str, Any]) -> str:
    """Return a description of a change to a running job."""
    name, value, step = change["name"], change["value"], change["step"]
    if name == "workers":
        return f"{count(value, 'worker')} {'was' if value == 1 else 'were'} requested before step {step}"
    if name == "save":
        return f"a checkpoint was requested during step {step}"
    if name == "speeds":  # a table with a row for each worker, which no user requested
        return f"slices were assigned by the workers' speed from step {step} on"
    return f"{name} was {value} from step {step} on"


def _reinitialised(r: Mapping[str, Any]) -> str:
    """Return a description of a rebuild: by which workers, from which state, and the time of each phase."""
    subject = "the survivors alone" if r["form"] == "survivors" else "with failed workers replaced"
    source = {
        "own": "each worker's own snapshot",
        "root": "the lowest rank's snapshot",
        "checkpoint": "the newest checkpoint",
    }
    parts = f"snapshot {seconds(r['snapshot_s'])}, application rebuilt {seconds(r['rebuild_s'])}, state loaded {seconds(r['load_s'])}"
    return f"{count(r['workers'], 'worker')} reinitialised ({subject}) and resumed at step {r['step']} from {source[r['source']]}: {parts}"


def _restored(r: Mapping[str, Any]) -> str:
    """Return a description of the restoration of a part: its source and its age."""
    sources = {
        "backup": "its delta standby",
        "copy": "the file that its delta standby had written",
        "checkpoint": "the newest checkpoint",
        "beginning": "the initial values",
    }
    stale = r["stale_steps"]
    old = f"{number(stale['mean'])} steps old on average, {count(stale['max'], 'step')} at most"
    state = {
        "saved": "",
        "reset": "; its optimizer state was reset",
        "kept": f"; its optimizer state {count(r.get('optimizer_stale_steps') or 0, 'step')} old",
    }[r["optimizer"]]
    return f"part {r['part']} restored at step {r['step']} from {sources[r['source']]}: {count(r['blocks'], 'block')}, {old}{state}"


def _slow(records: Sequence[Mapping[str, Any]]) -> str:
    """Return when a worker was found to be slow, and how slow it was."""
    worst = max(records, key=lambda r: float(r["score"]))
    if len(records) == 1:
        return f"at step {worst['step']}: {slowness(worst['score'], worst['policy'])}"
    return f"{len(records)} times, first at step {records[0]['step']}, most at step {worst['step']}: {slowness(worst['score'], worst['policy'])}"


def total_workers(report: Mapping[str, Any]) -> int:
    """Return the total number of workers, including spares and newcomers."""
    workers = report["workers"]
    return int(workers["started"]) + int(workers.get("spares", 0)) + len(report.get("joined", ()))


def recoveries(report: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """Return the failures, those of the same recovery together in one list."""
    groups: dict[object, list[Mapping[str, Any]]] = {}
    for index, failure in enumerate(report["failures"]):
        together = failure.get("recovery")
        groups.setdefault(("alone", index) if together is None else together, []).append(failure)
    return list(groups.values())


def _what_happened(report: Mapping[str, Any]) -> str:
    failures, started, one = report["failures"], report["workers"]["started"], worker(report)
    if not failures:
        did = f"trained for {count(report['steps'], 'step')}"
        if is_distributed(report) and not report["steps"]:
            did = "ran, without a step of DistributedDataParallel,"
        return f"{count(started, one)} {did} and none was lost."
    ranks = sorted({f["rank"] for f in failures})
    what, then = _what_was_done(failures)
    of = set(ranks) <= set(report["workers"].get("ranks_started", ranks))
    if len(failures) == 1:
        step = failures[0]["step"]
        subject = f"{one.capitalize()} {ranks[0]}{f' of {started}' if of else ''} {what.replace('were', 'was')}"
        after = "" if is_distributed(report) or not report["steps"] else " after training"
        subject += after if step is None else f" at step {step}"
    elif len(ranks) == len(failures):
        subject = f"{len(ranks)} of {count(started, one)} {what}" if of else f"{count(len(ranks), one)} {what}"
    else:
        subject = f"{one.capitalize()}s {what} {len(failures)} times"
    return f"{subject}{then}{_went_on(report)}."


def _what_was_done(failures: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the fate of workers, in the plural, and what the launcher then did."""
    if all(f.get("kind") == "hang" or (f["injected"] and f.get("kind") in _STUCK) for f in failures):
        return "got stuck", f" and {'was' if len(failures) == 1 else 'were'} ended"
    return (
        "were killed" if all(f["injected"] and f.get("kind", "kill") in _KILLS for f in failures) else "were lost"
    ), ""


def _joined_and_left(report: Mapping[str, Any]) -> str:
    joined, left, one = report.get("joined", ()), report.get("left", ()), worker(report)
    events = []
    if len(joined) == 1:
        events.append((joined[0]["t_s"], f"{one} {joined[0]['rank']} joined at step {joined[0]['step']}"))
    elif joined:
        events.append((joined[0]["t_s"], f"{count(len(joined), one)} joined later"))
    if len(left) == 1:
        what = f"{one} {left[0]['rank']} left before step {left[0]['step']}, after SIGTERM"
        events.append((left[0]["t_s"], what))
    elif left:
        events.append((left[0]["t_s"], f"{count(len(left), one)} left after SIGTERM"))
    text = "; ".join(what for _, what in sorted(events))
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _went_on(report: Mapping[str, Any]) -> str:
    answered = [g for g in recoveries(report) if all(f["recover_s"] is not None for f in g)]
    alive = [_longest(group) for group in answered if group[0].get("decision") != "restart"]
    again = [_longest(group) for group in answered if group[0].get("decision") == "restart"]
    late = [slow for group in answered if (slow := noticed_late_s(report, group))]
    text = f"; noticed only after {_after(late)}" if late else ""
    text += f"; training resumed after {_after(alive)}" if alive else ""
    if again:
        text += f"; the job was restarted and had caught up after {_after(again)}"
    return text


def noticed_late_s(report: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> float | None:
    """Return how long failures that were not injected went unnoticed; None if it took no longer than steps do."""
    longest_s = max(float(failure.get("unnoticed_s") or 0.0) for failure in group)
    step_s = (report.get("step_s") or {}).get("p50") or 0.0
    return longest_s if longest_s > max(_LATE_S, _LATE_STEPS * step_s) else None


def _longest(group: Sequence[Mapping[str, Any]]) -> float:
    return max(float(failure["recover_s"]) for failure in group)


def _after(times: Sequence[float]) -> str:
    if len(times) <= 2:
        return listing([seconds(t) for t in times])
    return f"{seconds(min(times))} to {seconds(max(times))}"


def _how_it_ended(report: Mapping[str, Any]) -> str:
    steps, kept = count(report["steps"], "step"), report.get("checkpoint")
    saved = f"; the state is in {kept}" if kept else ""
    match report.get("outcome"):
        case "gave-up":
            return f"Too few workers were alive after {steps}, so it stopped{saved}."
        case "stopped":
            return f"It was stopped on request after {steps}{saved}."
        case "failed":
            error = report.get("error")
            return f"The run failed after {steps}{': ' + error['message'] if error else ''}."
    return _finished(report)


def _finished(report: Mapping[str, Any]) -> str:
    """Return which workers finished, and whether with the same bits, if that is known."""
    came_and_went = report.get("joined") or report.get("left")
    finished, there = report["workers"]["finished"], total_workers(report)
    few = _SMALL[finished] if finished < len(_SMALL) else str(finished)
    if not is_distributed(report) and not report["replicas"]["identical"]:
        return "The replicas that finished do not hold the same bits."
    if finished == 1:
        return f"One {worker(report)} survived and finished." if there > 1 else ""
    all_of_them = "Both" if finished == 2 else f"All {few}"
    who = all_of_them if finished == there else f"The {few} {'remaining workers' if came_and_went else 'survivors'}"
    return f"{who} {'finished' if is_distributed(report) else 'ended with the same bits'}."


def _samples(report: Mapping[str, Any]) -> str:
    lost, repeated = report["samples"]["lost"], report["samples"]["repeated"]
    if report.get("outcome") != "done" or repeated is None:
        return ""
    parts = [f"{number(n)} {what}" for n, what in ((lost, "lost"), (repeated, "repeated")) if n]
    if not parts:
        return "Every sample counted exactly once."
    return f"Of {count(report['samples']['planned'], 'sample')}, {listing(parts)}."
