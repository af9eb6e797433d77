"""Turns the result of ``holdfast plan`` into sentences to act on. Every number in them comes from that result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.base.formatting import listing, percent, size
from holdfast_lab.pages.words import duration

Answer = Mapping[str, Any]
Row = Mapping[str, Any]

_PARTS = {
    "lost": ("recomputed steps", "make checkpoints cheaper, and then more frequent"),
    "save": ("checkpoints", "write faster, or snapshot to memory and write asynchronously (--snapshot-bytes-per-s)"),
    "wait": ("waiting for replacement nodes", "keep more spares, or repair nodes sooner (--repair-s)"),
    "restart": ("job starts", "start faster (--restart-s): pre-pulled images, a warm compilation cache"),
    "detect": ("failure detection", "shorten the timeouts (holdfast run --node-timeout, --hang-timeout)"),
    "load": ("loading checkpoints", "read faster (--read-bytes-per-s)"),
    "regroup": ("regrouping the survivors", "measure it on your cluster (--from-report)"),
    "rejoin": ("admitting replacement workers", "measure it on your cluster (--from-report)"),
}
"""By share of the lost time: its name, and how to reduce it."""

_WORTH_SAYING = 0.002


def shown_row(answer: Answer) -> Row:
    """Return the row of the recommended strategy: rollback if all are equally good, or if none works."""
    return next(row for row in answer["rows"] if row["name"] == answer["shown"])


def headline(answer: Answer) -> str:
    """Return the recommendation, in one or two sentences."""
    row = shown_row(answer)
    if answer["best"] == "none":
        question = answer["question"]
        return (
            f"No strategy makes useful progress (goodput at best {percent(row['goodput'])}): there is a failure every "
            f"{duration(question['mtbf_s'])}, a step takes {duration(question['step_s'])}, and starting the job takes "
            f"{duration(question['restart_s'])}."
        )
    how = (
        f"Use --strategy {answer['shown']}"
        if answer["best"] != "any"
        else "Any strategy will do, because failures cost almost nothing"
    )
    text = f"{how}, {_interval(row)}. Goodput {_estimate(row, 'goodput')}: {_training(answer, row)}."
    return f"{text} {stale(row, stale_source(answer))}" if row.get("stale_iterations") else text


def stale(row: Row, source: str) -> str:
    """Return what a failure costs under ``partial``, and where the number is from, as a sentence."""
    return (
        f"With {row['name']} each failure costs {row['stale_iterations']:g} further steps ({source}), and the weights are "
        "not those of a run without it."
    )


def stale_source(answer: Answer) -> str:
    """Return where a plan's price of ``partial`` is from."""
    return next(str(one["why"] or one["source"]) for one in answer["known"] if one["name"] == "stale_iterations")


def command(answer: Answer) -> str:
    """Return the recommended ``holdfast run`` command, or "" if no strategy works."""
    if answer["best"] == "none":
        return ""
    row, question = shown_row(answer), answer["question"]
    strategy = "rollback" if row["name"] == "relaunch" else row["name"]
    parts = [f"holdfast run --strategy {strategy}"]
    if row["save_every"]:
        parts.append(f"--checkpoint-dir DIR --checkpoint-every {row['save_every']}")
    if row["name"] == "partial":
        parts.append(f"--mirror-every {question['mirror_every']}")
    parts += _machines(question)
    if question["split"] != "slices":
        parts.append(f"--split {question['split']}")
    return " ".join([*parts, "..."])


def _machines(question: Mapping[str, Any]) -> list[str]:
    """Return the options for workers and spares: spare nodes have launchers of their own, and workers without a slice."""
    spares, per_node = question["spares"], question["workers_per_node"]
    if per_node == 1 or question["nodes"] == 1:
        return [f"--spares {spares}"] if spares else []
    nodes = question["nodes"] + -(-spares // per_node)
    return [f"--fabric gloo --nnodes {nodes} -n {per_node}", *([f"--slices {question['workers']}"] if spares else [])]


def reasons(answer: Answer) -> list[str]:
    """Return the reasons for the recommendation and further advice, one or two sentences for each point."""
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
    """Return the checkpoint intervals from the formulas: one line for all strategies with the same rollback rate."""
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
    """Return a count with its noun: ``"1 step"``, ``"1,235 steps"``."""
    return f"{amount:,} {what}{'' if amount == 1 else 's'}"


def _interval(row: Row) -> str:
    if not row["save_every"]:
        return "and the failures in this plan need no checkpoint (save one a day against others)"
    return f"with a checkpoint every {duration(row['interval_s'])} ({counted(row['save_every'], 'step')})"


def _estimate(row: Row, name: str) -> str:
    return f"{percent(row[name])} ({percent(row[name + '_low']).removesuffix(' %')} to {percent(row[name + '_high'])})"


def _training(answer: Answer, row: Row) -> str:
    work = duration(answer["question"]["work_s"])
    if row["train_s"] is None:
        return f"{work} of training never finish"
    return f"{work} of training take {duration(row['train_s'])}"


def _failures(answer: Answer) -> str:
    question = answer["question"]
    nodes, per_node, share = question["nodes"], question["workers_per_node"], question["whole_job_share"]
    machines = f"{counted(nodes, 'node')} of {per_node} workers" if per_node > 1 else counted(nodes, "worker")
    text = (
        f"There is a failure every {duration(question['mtbf_s'])}: {machines}, each with one failure in "
        f"{duration(question['mtbf_node_s'])}"
    )
    if nodes == 1 and per_node > 1:
        return f"{text}. All workers run on one node, so none survives its loss: spread them over several nodes."
    if share:
        text += (
            f". Under every strategy {percent(share, digits=0)} of the failures stop the whole job "
            f"(one every {duration(question['mtbf_s'] / share)})"
        )
    return f"{text}."


def _costs(answer: Answer) -> str:
    """Return the cost of one failure, from sums that can be checked by hand."""
    question, rows = answer["question"], {row["name"]: row for row in answer["rows"]}
    again, shown = rows["relaunch"], shown_row(answer)
    half_s = again["interval_s"] / 2 if again["save_every"] else 0.0
    started_s = question["detect_s"] + question["restart_s"] + question["load_s"]
    text = (
        "With relaunch, where the launcher restarts the whole job, each failure costs about "
        f"{duration(started_s + half_s)}: {duration(started_s)} until training resumes, and on average half a "
        f"checkpoint interval of work ({duration(half_s)})"
    )
    if shown["name"] in ("relaunch", "restart"):
        return f"{text}."
    survived_s = question["detect_s"] + question["regroup_s"] + question["step_s"]
    survived_s += question["rehome_s"] if question["model"] != "replicated" else 0.0
    joins = f", and {duration(question['regroup_s'] + question['rejoin_s'])} more when a replacement joins"
    return (
        f"{text}. With {shown['name']} it costs the survivors about {duration(survived_s)}: detection, regrouping "
        f"and at most one step{joins}. Goodput of relaunch: {percent(again['goodput'])}."
    )


def _forward(answer: Answer) -> str:
    rows = {row["name"]: row for row in answer["rows"]}
    gain = rows["forward"]["goodput"] - rows["rollback"]["goodput"]
    if answer["best"] == "rollback":
        better = f"{100 * gain:.1f} points better" if gain > 5e-4 else "no faster"
        return (
            f"forward would be {better}, but drops the samples of failed workers. "
            "rollback loses no sample and stays bit-identical."
        )
    if answer["best"] == "forward":
        return (
            f"forward is {100 * gain:.1f} points better than rollback here, because recomputing a step takes long "
            "compared with the time between failures. It drops the samples of failed workers; if none may be lost, use "
            "rollback."
        )
    return ""


def _around_optimum(answer: Answer) -> str:
    best = answer["optimum"]
    if best is None or answer["best"] == "none":
        return ""
    text = (
        f"The checkpoint interval need not be exact: from {duration(best['good_from_s'])} to "
        f"{duration(best['good_to_s'])} goodput is within 0.1 points of the best simulated value"
    )
    rows = {row["name"]: row for row in answer["rows"]}
    usual, shown = rows["relaunch"], shown_row(answer)
    if usual["exact_s"] and shown["exact_s"] and shown["exact_s"] > 1.5 * usual["exact_s"]:
        text += (
            f". Young's formula over all failures ({duration(usual['young_s'])}) is for strategies that load a "
            f"checkpoint after each failure; {shown['name']} loads one only every {duration(shown['mtbf_back_s'])}"
        )
    question = answer["question"]
    if shown["mtbf_back_s"] and question["save_s"] > shown["mtbf_back_s"] / 2:
        text += (
            f". A checkpoint takes {duration(question['save_s'])}, which is long compared with "
            f"{duration(shown['mtbf_back_s'])}: make it cheaper first"
        )
    return f"{text}."


def _spares(answer: Answer) -> str:
    question, bare = answer["question"], answer["without_spares"]
    spares, per_node = question["spares"], question["workers_per_node"]
    if not spares:
        away = question["nodes"] * question["down_share"]
        if away < 0.01 or bare is None:
            return ""
        gone = f"{away:,.2f} {'workers' if per_node == 1 else 'nodes'} are missing"
        return (
            f"No spares: on average {gone}. While one is missing, another worker computes two slices of each step, "
            f"which then takes twice as long with --split slices: goodput {percent(bare['slices'])}. --split even divides "
            f"the work evenly: {percent(bare['even'])} (other bits). No number of spares gives more work per worker-hour."
        )
    machines = f" ({counted(-(-spares // per_node), 'node')})" if per_node > 1 else ""
    if bare is None:
        return ""
    return (
        f"Keep {counted(spares, 'spare worker')}{machines}, {percent(spares / question['workers'])} more. Without "
        f"spares goodput would be {percent(bare['slices'])} ({percent(bare['even'])} with --split even, which gives "
        f"other bits), and {percent(bare['relaunch'])} with relaunch, which waits for repairs."
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
    return f"Most of the lost time goes to {what}: {percent(share)} of all time{rest}. To reduce it: {then}."


def _llama(answer: Answer) -> str:
    """Compare the failure rate with that published for Llama 3; "" below 256 workers, which it says nothing about."""
    question, llama = answer["question"], answer["llama"]
    if question["workers"] < 256:
        return ""
    theirs_s = llama["days"] * 86_400 * llama["workers"] / llama["failures"]
    ours_s = question["mtbf_node_s"] * question["workers_per_node"]
    ratio = ours_s / theirs_s
    node = llama["days"] * llama["nodes"] / llama["failures"]
    same = llama["failures"] / ratio
    text = (
        f"For scale: Llama 3 was interrupted {llama['failures']} times in {llama['days']} days on {llama['workers']:,} "
        f"GPUs, once in {node:.0f} days for each node of eight; at your rate it would have been {round(same):,} times"
    )
    if ratio > 2:
        text += f". If your rate is from a data sheet, plan again with --mtbf-node {node:.0f}d"
    if ratio < 0.05:
        text += ". Is that rate right?"
        return text
    return f"{text}."


def assumption_lines(known: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return option, value, source and reason of each number that the plan is computed from."""
    return [(option(one["name"]), shown_value(one["name"], one["value"]), one["source"], one["why"]) for one in known]


def option(name: str) -> str:
    """Return the command-line option of a number."""
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
