"""What a plan's answer means, in sentences that a person can act on. Every number in them is in the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.report.formatting import listing, percent, size
from holdfast_lab.pages.words import duration

Answer = Mapping[str, Any]
Row = Mapping[str, Any]

_PARTS = {
    "lost": ("work that is done again", "make checkpoints cheaper, and then more frequent"),
    "save": ("checkpoints", "write faster, or copy to memory and write beside training (--snapshot-bytes-per-s)"),
    "wait": ("waiting for machines", "keep more spares, or have machines back sooner (--repair-s)"),
    "restart": ("starting the job", "start faster (--restart-s): images that are there, compiled code that is kept"),
    "detect": ("not knowing of a failure", "look sooner (holdfast run --node-timeout, --hang-timeout)"),
    "load": ("loading", "read faster (--read-bytes-per-s)"),
    "regroup": ("regrouping", "measure it on your machines (--from-report)"),
    "rejoin": ("letting newcomers in", "measure it on your machines (--from-report)"),
}
"""What time is lost in, and what to do about it."""

_WORTH_SAYING = 0.002


def shown_row(answer: Answer) -> Row:
    """Return the row of the strategy that is recommended; where it does not matter which, or none works, that of rollback."""
    return next(row for row in answer["rows"] if row["name"] == answer["shown"])


def headline(answer: Answer) -> str:
    """Return what to do, in a sentence or two."""
    row = shown_row(answer)
    if answer["best"] == "none":
        question = answer["question"]
        return (
            f"Next to nothing gets done with any strategy, goodput {percent(row['goodput'])} at best: a failure comes every {duration(question['mtbf_s'])}, "
            f"a step takes {duration(question['step_s'])}, a start of the job {duration(question['restart_s'])}."
        )
    how = (
        f"Use --strategy {answer['shown']}"
        if answer["best"] != "any"
        else "Any strategy will do: what a failure costs hardly matters"
    )
    return f"{how}, {_interval(row)}. Goodput {_estimate(row, 'goodput')}: {_training(answer, row)}."


def command(answer: Answer) -> str:
    """Return the options of ``holdfast run`` that follow, "" where nothing works."""
    if answer["best"] == "none":
        return ""
    row, question = shown_row(answer), answer["question"]
    strategy = "rollback" if row["name"] == "relaunch" else row["name"]
    parts = [f"holdfast run --strategy {strategy}"]
    if row["save_every"]:
        parts.append(f"--checkpoint-dir DIR --checkpoint-every {row['save_every']}")
    if question["spares"]:
        parts.append(f"--spares {question['spares']}")
    if question["split"] != "slices":
        parts.append(f"--split {question['split']}")
    return " ".join([*parts, "..."])


def reasons(answer: Answer) -> list[str]:
    """Return why, and what else to know, one point a sentence or two."""
    points = [
        _failures(answer),
        _costs(answer),
        _forward(answer),
        _around_optimum(answer),
        _spares(answer),
        _what_is_left(answer),
        _llama(answer),
    ]
    return [point for point in points if point]


def interval_lines(answer: Answer) -> list[dict[str, Any]]:
    """Return what the formulas say of the interval, one line for all strategies that go back to a checkpoint as often."""
    groups: dict[Any, list[Row]] = {}
    for row in answer["rows"]:
        groups.setdefault(row["mtbf_back_s"], []).append(row)
    lines = []
    for back_s, rows in groups.items():
        tried = next((answer["optimum"] for row in rows if row["name"] == answer["shown"] and answer["optimum"]), None)
        lines.append(
            {
                "strategies": ", ".join(row["name"] for row in rows),
                "back": duration(back_s) if back_s is not None else "never",
                **{name: duration(rows[0][f"{name}_s"]) for name in ("young", "daly", "exact")},
                "simulated": duration(tried["interval_s"]) if tried else "",
                "range": f"{duration(tried['good_from_s'])} to {duration(tried['good_to_s'])}" if tried else "",
            }
        )
    return lines


def counted(amount: int, what: str) -> str:
    """Return ``"1 step"``, ``"1,235 steps"``: on a terminal, too."""
    return f"{amount:,} {what}{'' if amount == 1 else 's'}"


def _interval(row: Row) -> str:
    if not row["save_every"]:
        return "and no checkpoint is needed for what was asked (keep one a day for what was not)"
    return f"with a checkpoint every {duration(row['interval_s'])} ({counted(row['save_every'], 'step')})"


def _estimate(row: Row, name: str) -> str:
    return f"{percent(row[name])} ({percent(row[name + '_low']).removesuffix(' %')} to {percent(row[name + '_high'])})"


def _training(answer: Answer, row: Row) -> str:
    work = duration(answer["question"]["work_s"])
    if row["train_s"] is None:
        return f"{work} of training never end"
    return f"{work} of training take {duration(row['train_s'])}"


def _failures(answer: Answer) -> str:
    question = answer["question"]
    nodes, per_node, share = question["nodes"], question["workers_per_node"], question["whole_job_share"]
    machines = f"{counted(nodes, 'machine')} of {per_node} workers" if per_node > 1 else counted(nodes, "worker")
    text = f"A failure comes every {duration(question['mtbf_s'])}: {machines}, each fails once in {duration(question['mtbf_node_s'])}"
    if nodes == 1 and per_node > 1:
        return f"{text}. All workers are in one machine, so nobody survives its loss: spread them over several."
    if share:
        text += f". Of all failures {percent(share, digits=0)} end the whole job, whatever the strategy (every {duration(question['mtbf_s'] / share)})"
    return f"{text}."


def _costs(answer: Answer) -> str:
    """Say what one failure costs, by hand: what anybody can add up."""
    question, rows = answer["question"], {row["name"]: row for row in answer["rows"]}
    again, shown = rows["relaunch"], shown_row(answer)
    half_s = again["interval_s"] / 2 if again["save_every"] else 0.0
    started_s = question["detect_s"] + question["restart_s"] + question["load_s"]
    text = (
        f"Each failure costs a launcher that starts all again about {duration(started_s + half_s)}: {duration(started_s)} until it "
        f"trains again, and on average half an interval of work ({duration(half_s)})"
    )
    if shown["name"] in ("relaunch", "restart"):
        return f"{text}."
    survived_s = question["detect_s"] + question["regroup_s"] + question["step_s"]
    survived_s += question["rehome_s"] if question["model"] != "replicated" else 0.0
    joins = f", and {duration(question['regroup_s'] + question['rejoin_s'])} when its place is filled"
    return (
        f"{text}. Under {shown['name']} it costs the survivors about {duration(survived_s)}: to know of it, to regroup, "
        f"and at most one step{joins}. Goodput of relaunch: {percent(again['goodput'])}."
    )


def _forward(answer: Answer) -> str:
    rows = {row["name"]: row for row in answer["rows"]}
    gain = rows["forward"]["goodput"] - rows["rollback"]["goodput"]
    if answer["best"] == "rollback":
        better = f"{100 * gain:.1f} points better" if gain > 5e-4 else "no faster"
        return (
            f"forward would be {better}, and goes on without the samples of the dead; rollback loses none, and no bit."
        )
    if answer["best"] == "forward":
        return (
            f"forward is {100 * gain:.1f} points better than rollback here, because a step that is done again is long beside the time "
            "between failures. It goes on without the samples of the dead; if none may be lost, use rollback."
        )
    return ""


def _around_optimum(answer: Answer) -> str:
    best = answer["optimum"]
    if best is None or answer["best"] == "none":
        return ""
    text = (
        f"How often to save is no fine art: from {duration(best['good_from_s'])} to {duration(best['good_to_s'])} goodput is within 0.1 "
        "points of the best that was tried"
    )
    rows = {row["name"]: row for row in answer["rows"]}
    usual, shown = rows["relaunch"], shown_row(answer)
    if usual["exact_s"] and shown["exact_s"] and shown["exact_s"] > 1.5 * usual["exact_s"]:
        text += (
            f". Young's formula with all failures in it ({duration(usual['young_s'])}) is for strategies that go back to a checkpoint "
            f"each time; {shown['name']} does so only every {duration(shown['mtbf_back_s'])}"
        )
    question = answer["question"]
    if shown["mtbf_back_s"] and question["save_s"] > shown["mtbf_back_s"] / 2:
        text += f". A checkpoint takes {duration(question['save_s'])}, which is long beside {duration(shown['mtbf_back_s'])}: make it cheaper first"
    return f"{text}."


def _spares(answer: Answer) -> str:
    question, bare = answer["question"], answer["without_spares"]
    spares, per_node = question["spares"], question["workers_per_node"]
    if not spares:
        away = question["nodes"] * question["repair_s"] / (question["mtbf_node_s"] + question["repair_s"])
        if away < 0.01:
            return ""
        gone = f"{away:,.2f} {'workers' if per_node == 1 else 'machines'} are away"
        return (
            f"No spares: on average {gone}, and as long as one is, somebody does two slices of each step, "
            "which then takes twice as long under --split slices; --split even shares it out (other bits)."
        )
    machines = f" ({counted(-(-spares // per_node), 'machine')})" if per_node > 1 else ""
    return (
        f"Keep {counted(spares, 'spare worker')}{machines}, {percent(spares / question['workers'])} more: without any, goodput would be "
        f"{percent(bare['slices'])} ({percent(bare['even'])} with --split even, which gives other bits), and {percent(bare['relaunch'])} of relaunch, which waits for repairs."
    )


def _what_is_left(answer: Answer) -> str:
    row = shown_row(answer)
    shares = sorted(((row[f"in_{part}"], part) for part in _PARTS), reverse=True)
    share, part = shares[0]
    if share < _WORTH_SAYING:
        return ""
    what, then = _PARTS[part]
    others = [f"{_PARTS[name][0]} {percent(value)}" for value, name in shares[1:3] if value >= _WORTH_SAYING]
    rest = f" (then {listing(others)})" if others else ""
    return f"Most of what is lost is {what}: {percent(share)} of the time{rest}. To mend that: {then}."


def _llama(answer: Answer) -> str:
    """Hold the rate against one that was published; small jobs are of another kind."""
    question, llama = answer["question"], answer["llama"]
    if question["workers"] < 256:
        return ""
    theirs_s = llama["days"] * 86_400 * llama["workers"] / llama["failures"]
    ours_s = question["mtbf_node_s"] * question["workers_per_node"]
    ratio = ours_s / theirs_s
    node = llama["days"] * llama["nodes"] / llama["failures"]
    same = llama["failures"] / ratio
    text = (
        f"For scale: Llama 3 was interrupted {llama['failures']} times in {llama['days']} days on {llama['workers']:,} GPUs, once in "
        f"{node:.0f} days for each machine of eight; at your rate it would have been {round(same):,} times"
    )
    if ratio > 2:
        text += f". If yours is from a data sheet, ask again with --mtbf-node {node:.0f}d"
    if ratio < 0.05:
        text += ". Is that rate right?"
        return text
    return f"{text}."


def assumption_lines(known: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return option, value, source and reason of each number that a plan stands on."""
    return [(option(one["name"]), shown_value(one["name"], one["value"]), one["source"], one["why"]) for one in known]


def option(name: str) -> str:
    """Return how a number is given on the command line."""
    if name.startswith("mtbf"):
        name = name.removesuffix("_s")
    return "--" + name.replace("_", "-")


def shown_value(name: str, value: Any) -> str:
    """Return a number with its unit."""
    if name.endswith("bytes_per_s"):
        return f"{size(value)}/s"
    if name.endswith("_bytes"):
        return size(value)
    if name.endswith("_s"):
        return duration(value)
    if name.endswith("_share"):
        return percent(value)
    return f"{value:,}" if isinstance(value, int | float) else str(value)
