"""The report on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.base.formatting import clean, count, listing, number, seconds, size
from holdfast.observe.report_text import happenings, headline, is_distributed, noticed_late_s, total_workers, worker


def summary_lines(report: Mapping[str, Any], directory: Path | None = None) -> list[str]:
    """Return the lines printed at the end of a run.

    Args:
        report: Report of the run.
        directory: The folder of its files, if they were written.
    """
    lines = [headline(report), _pace(report)]
    lines += [_failure(failure, report) for failure in report["failures"]]
    lines += [what for _, what in happenings(report)]
    lines += [f"did not strike: {spec}" for spec in report.get("faults_not_fired", ())]
    lines += [
        f"{sink['name']} missed {count(sink['dropped'], 'record')} of {sink['taken'] + sink['dropped']}"
        for sink in report.get("sinks", ())
        if sink["dropped"]
    ]
    lines.append(_iteration_cost(report.get("iteration_cost")))
    lines += [_parts_held(held) for held in report.get("parts_held", ())]
    lines.append(_overlap_cost(report.get("optimizer_overlap", ())))
    lines += [
        _goodput(report.get("goodput")),
        _samples(report),
        _replicas(report),
        _platforms(report.get("platforms")),
        _promise(report.get("platforms")),
    ]
    if directory is not None:
        lines.append(f"report   {directory / 'report.json'}   (as a page: holdfast report {directory})")
    return [clean(line) for line in lines if line]


def _pace(report: Mapping[str, Any]) -> str:
    workers = report["workers"]
    pace = (
        f"{count(report['steps'], 'step')} in {seconds(report['wall_s'])} ({seconds(report['step_s']['p50'])} a step)"
    )
    if is_distributed(report) and not report["steps"]:
        pace = f"over after {seconds(report['wall_s'])}"
    text = f"{pace}, {workers['finished']} of {count(total_workers(report), worker(report))} finished"
    metrics = ", ".join(f"{name} {number(value)}" for name, value in report["metrics"].items())
    return f"{text}; {metrics}" if metrics else text


def _goodput(spent: Mapping[str, Any] | None) -> str:
    """Return the share of useful time, and the causes of the rest that took at least 0.1 % of the time."""
    if spent is None:
        return ""
    wall_s = spent["useful_s"] + sum(spent["badput_s"].values())
    causes = sorted(spent["badput_s"].items(), key=lambda item: -item[1])
    large = [f"{cause.replace('_', ' ')} {seconds(value)}" for cause, value in causes if value >= 0.001 * wall_s > 0]
    text = f"goodput  {spent['ratio']:.1%} useful ({seconds(spent['useful_s'])})"
    return f"{text}; {', '.join(large)}" if large else text


def _failure(failure: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    when = f"at step {failure['step']}" if failure["step"] is not None else f"{seconds(failure['t_s'])} after the start"
    parts = [f"{worker(report)} {failure['rank']} lost {when}" + (f", {failure['phase']}" if failure["phase"] else "")]
    if failure.get("silent_s") is not None:
        parts.append(f"ended by the launcher after {seconds(failure['silent_s'])} without a sign of life")
    if failure["detect_s"] is not None:
        parts.append(f"detected after {seconds(failure['detect_s'])}")
    if late_s := noticed_late_s(report, [failure]):
        parts.append(f"noticed only after {seconds(late_s)}")
    if failure["recover_s"] is not None:
        parts.append(f"next step committed after {seconds(failure['recover_s'])}")
    elif not is_distributed(report):
        parts.append("no step was committed after it")
    elif failure["step"] is not None:
        parts.append("no later step began")
    if failure["redone_steps"]:
        parts.append(f"{count(failure['redone_steps'], 'step')} recomputed")
    if failure["lost_samples"]:
        parts.append(f"{count(failure['lost_samples'], 'sample')} lost")
    return "; ".join(parts)


def _iteration_cost(cost: Mapping[str, Any] | None) -> str:
    """Return the cost of the failures in steps, if the run was compared with an undisturbed one."""
    if cost is None:
        return ""
    if cost["iterations"] is None:
        return f"iteration cost against {cost['undisturbed']}: its loss falls nowhere by more than noise"
    late = f"; {count(cost['censored'], 'level')} never reached" if cost["censored"] else ""
    means = f"the loss averaged over {count(cost['window'], 'step')}, at {count(len(cost['levels']), 'level')}{late}"
    return f"iteration cost against {cost['undisturbed']}: {number(cost['iterations'])} steps ({means})"


def _parts_held(held: Mapping[str, Any]) -> str:
    """Return which parts of a split model a worker held in its memory."""
    kinds = (("computes", "computes_bytes", "parts"), ("mirrors", "mirrors_bytes", "standbys of"))
    phrases = [f"{what} {listing(held[key])} ({size(held[key_bytes])})" for key, key_bytes, what in kinds if held[key]]
    if held["copies_bytes"]:
        of = f" of {listing(held['backups'])}" if held["backups"] else ""
        phrases.append(f"delta standbys{of} ({size(held['copies_bytes'])})")
    return f"worker {held['rank']} held {listing(phrases) or 'nothing'} of the model"


def _overlap_cost(workers: Sequence[Mapping[str, Any]]) -> str:
    """Return the cost of updating buckets before the commit vote, at the worker where it was highest."""
    if not workers:
        return ""
    most = max(workers, key=lambda worker: worker["copy_s"])
    copied = f"update   overlapped: undo copies of {size(most['copy_bytes'])}"
    if most["steps"]:
        copied += f", {seconds(most['copy_s'] / most['steps'])} a step"
    undone = max(workers, key=lambda worker: worker["undo_s"])
    if undone["undone"]:
        copied += f"; {count(undone['undone'], 'bucket')} rolled back in {seconds(undone['undo_s'])}"
    return copied


def _samples(report: Mapping[str, Any]) -> str:
    samples = report["samples"]
    if samples["committed"] is None:
        return ""
    rest = [f"{number(samples[key])} {key}" for key in ("lost", "repeated") if samples[key] is not None]
    since = " since the first step of the training" if (report.get("certificate") or {}).get("first_step") else ""
    return f"samples  {number(samples['committed'])} of {number(samples['planned'])} committed{since}, {listing(rest)}"


def _platforms(platforms: Mapping[str, Any] | None) -> str:
    return f"platform {platforms['given_up']}" if platforms and platforms["given_up"] else ""


def _promise(platforms: Mapping[str, Any] | None) -> str:
    return f"bits     {platforms['promise']}" if platforms and platforms.get("promise") else ""


def _replicas(report: Mapping[str, Any]) -> str:
    replicas = report["replicas"]
    if replicas["sha256"] is None:
        return ""
    return f"sha256   {replicas['sha256']}" + ("" if replicas["identical"] else "   REPLICAS DIFFER")
