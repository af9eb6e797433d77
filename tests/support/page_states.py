"""States of runs for tests of the page: a run with a death, one of many workers, and one with HTML in every name."""

from __future__ import annotations

import math
from typing import Any

from holdfast.summary.goodput import CAUSES

HOSTILE = "<img src=x onerror=\"document.title='broken'\"><b>bold</b>"
COMMAND = "holdfast run -n 4 --checkpoint-dir ckpt --dashboard 8080 train.py --epochs 3"
PARTS = {"detection": 0.013, "agreement": 0.006, "rebuild": 0.009, "state_transfer": 0.004, "step_redone": 0.021}


def badput(**seconds: float) -> dict[str, float]:
    """Return seconds for every cause."""
    return dict.fromkeys(CAUSES, 0.0) | seconds


def small(run: str = "run-1", *, live: bool = True) -> dict[str, Any]:
    """Return a run of four workers of which worker 2 was killed at 4.1 s."""
    lost_s, now_s = 4.1, 12.3
    costs = badput(start_up=0.81, checkpoint_held=0.046, straggler_wait=0.21, **PARTS)
    return {
        "version": 1,
        "run": {
            "id": run,
            "script": "train.py",
            "command": COMMAND,
            "resume": f"{COMMAND.replace('train.py', '--resume train.py')}",
            "strategy": "rollback",
            "fabric": "gloo",
            "order": "fold",
            "guard": "stop",
            "checkpoint_dir": "ckpt",
            "started_unix": 1_700_000_000.0,
            "live": live,
            "ended": not live,
            "exit_code": None if live else 0,
            "report": "" if live else "report.html",
        },
        "now_s": now_s,
        "state": {"level": "warning", "sentence": "Training: step 320 of 400, 3 of 4 workers."}
        if live
        else {"level": "done", "sentence": "Done after 400 steps in 12.3 s; 1 worker lost."},
        "progress": {
            "step": 320 if live else 400,
            "planned": 400,
            "steps_per_s": 31.2,
            "eta_s": 2.6 if live else None,
            "samples": 40960,
            "steps_redone": 1,
            "samples_lost": 0,
            "restarts": 0,
        },
        "goodput": {
            "wall_s": now_s,
            "useful_s": now_s - sum(costs.values()),
            "ratio": 1 - sum(costs.values()) / now_s,
            "badput_s": costs,
        },
        "causes": CAUSES,
        "series": [
            {"id": "loss", "points": [[s, 0.8 + s / 28, _loss(s)] for s in range(1, 321)]},
            {"id": "rate", "points": [[s, 0.8 + s / 28, _rate(s)] for s in range(4, 321, 4)]},
        ],
        "workers": [worker(rank, lost_s if rank == 2 else None) for rank in range(4)],
        "lanes": [_lane(rank, lost_s) for rank in range(4)],
        "recoveries": [
            {
                "id": 1,
                "t_s": lost_s,
                "step": 98,
                "lost": [{"rank": 2, "cause": "killed by SIGKILL"}],
                "decision": "continue from the state before this step",
                "duration_s": 0.032,
                "parts": PARTS,
                "workers_after": 3,
            }
        ],
        "checkpoints": [
            {
                "id": s,
                "step": s,
                "t_s": 0.8 + s / 28,
                "size_bytes": 1_480_000,
                "held_s": 0.0077,
                "write_s": 0.12,
                "verified": s < 300 or None,
            }
            for s in range(50, 321, 50)
        ],
        "integrity": {
            "guard": "stop",
            "checks": 320,
            "findings": [],
            "certificate": "Every committed step so far has one hash chain; the newest link is 3f9a… at step 320.",
        },
        "nodes": [{"id": 0, "host": "train-0.example", "alive": 3, "workers": 4, "state": "present"}],
        "events": [
            {"id": 1, "t_s": 0.81, "kind": "info", "rank": None, "text": "training began with 4 workers"},
            {"id": 2, "t_s": 2.6, "kind": "checkpoint", "rank": None, "text": "checkpoint of step 50, 1.5 MB"},
            {"id": 3, "t_s": 4.1, "kind": "lost", "rank": 2, "text": "worker 2 was killed by SIGKILL"},
            {
                "id": 4,
                "t_s": 4.13,
                "kind": "recovery",
                "rank": None,
                "text": "3 workers continue, 32 ms after the failure",
            },
            {"id": 5, "t_s": 6.9, "kind": "info", "rank": 1, "text": "worker 1 is slow, 1.4 times the usual"},
        ],
        "sinks": [{"id": "metrics", "missed": 0}],
    }


def large(workers: int = 1000, steps: int = 100_000) -> dict[str, Any]:
    """Return a run of many workers and steps, with a death now and then."""
    state, now_s = small("large"), steps / 10
    deaths = {rank: 100.0 + 9.0 * rank for rank in range(0, workers, 9)}
    costs = badput(start_up=60.0, step_redone=0.4 * len(deaths), detection=1.5 * len(deaths), rebuild=0.8 * len(deaths))
    state |= {
        "now_s": now_s,
        "state": {
            "level": "good",
            "sentence": f"Training: step {steps:,} of {2 * steps:,}, {workers - len(deaths)} of {workers} workers.",
        },
        "progress": state["progress"] | {"step": steps, "planned": 2 * steps, "eta_s": now_s},
        "goodput": {
            "wall_s": now_s,
            "useful_s": now_s - sum(costs.values()),
            "ratio": 1 - sum(costs.values()) / now_s,
            "badput_s": costs,
        },
        "series": [
            {"id": name, "points": [[s, s / 10, f(s / steps * 320)] for s in range(0, steps, steps // 599)]}
            for name, f in (("loss", _loss), ("rate", _rate))
        ],
        "workers": [worker(rank, deaths.get(rank)) for rank in range(workers)],
        "lanes": [
            _lane(rank, deaths.get(rank, 0.0), rank in deaths, sorted(deaths.values())) for rank in range(workers)
        ],
        "recoveries": [
            state["recoveries"][0]
            | {"id": i, "t_s": t, "step": int(t * 10), "lost": [{"rank": rank, "cause": "SIGKILL"}]}
            for i, (rank, t) in enumerate(deaths.items())
        ],
        "nodes": [
            {"id": node, "host": f"node-{node}.example", "alive": 8, "workers": 8, "state": "present"}
            for node in range(workers // 8)
        ],
        "events": [
            {"id": i, "t_s": t, "kind": "lost", "rank": rank, "text": f"worker {rank} was killed by SIGKILL"}
            for i, (rank, t) in enumerate(deaths.items())
        ],
    }
    return state


def hostile() -> dict[str, Any]:
    """Return a run in which every text that a user or a file can choose holds HTML."""
    state = small("hostile")
    for name in ("script", "command", "resume", "strategy", "fabric", "checkpoint_dir", "report"):
        state["run"][name] = HOSTILE
    state["state"]["sentence"] = HOSTILE
    state["integrity"] |= {"certificate": HOSTILE, "findings": [{"t_s": 1.0, "text": HOSTILE}]}
    state["series"].append({"id": HOSTILE, "points": [[1, 1.0, 2.0], [2, 2.0, 3.0]]})
    state["causes"] = dict.fromkeys(CAUSES, HOSTILE)
    state["workers"][2]["cause"] = HOSTILE
    state["lanes"][2]["marks"].append([5.0, HOSTILE, HOSTILE])
    state["recoveries"][0] |= {"decision": HOSTILE, "lost": [{"rank": 2, "cause": HOSTILE}]}
    state["recoveries"][0]["parts"] = PARTS | {HOSTILE: 0.1}
    state["nodes"][0]["host"] = HOSTILE
    state["events"].append({"id": 9, "t_s": 9.0, "kind": HOSTILE, "rank": None, "text": HOSTILE})
    state["sinks"] = [{"id": HOSTILE, "missed": 3}]
    return state


def _loss(step: float) -> float:
    return 2.3 * math.exp(-step / 90) + 0.28 + 0.05 * math.sin(step * 1.7)


def _rate(step: float) -> float:
    return 9.0 if 96 <= step <= 100 else 31 + 2.2 * math.sin(step * 0.9)


def worker(rank: int, lost_s: float | None) -> dict[str, Any]:
    """Return the row of a worker that trains, or was killed at a time."""
    lost = lost_s is not None
    return {
        "id": rank,
        "node": rank // 8,
        "pid": 4000 + rank,
        "state": "lost" if lost else "training",
        "step": 98 if lost else 320,
        "slices": [] if lost else [2 * rank, 2 * rank + 1],
        "since_s": lost_s if lost else 4.13,
        "joined": False,
        "cause": "killed by SIGKILL" if lost else "",
    }


def _lane(rank: int, lost_s: float, lost: bool | None = None, recoveries: list[float] | None = None) -> dict[str, Any]:
    lost = rank == 2 if lost is None else lost
    spans: list[list[Any]] = [[0.0, 0.81, "start"]]
    begin = 0.81
    for t in [t for t in recoveries or [lost_s] if not (lost and t >= lost_s)]:
        spans += [[begin, t, "train"], [t, t + 0.05, "recover"]]
        begin = t + 0.05
    marks: list[list[Any]] = []
    if lost:
        spans += [[begin, lost_s, "train"], [lost_s, None, "lost"]]
        marks = [[lost_s, "fault", "kill"], [lost_s + 0.013, "lost", "killed by SIGKILL"]]
    else:
        spans += [[begin, None, "train"]]
        marks = [[6.9, "straggler", "1.4 times the usual"]] if rank == 1 else []
    return {"id": rank, "spans": spans[-200:], "marks": marks}
