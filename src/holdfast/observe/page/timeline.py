"""Draws the lanes of a timeline: the whole run, and one recovery enlarged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.base.formatting import plain, seconds
from holdfast.observe.page import canvas as style
from holdfast.records.lives import JobLife, LostWorker
from holdfast.records.run_model import RunModel
from holdfast.records.types import Finished, Left, Recovered, RunStarted, StepCommitted, WorkerEnded, WorkerFenced

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR = 0.62
_MIN_SHADE_PT = 2.0
_NAME_ROOM = 0.1
"""Share of the width that the label of a step needs."""
_HEADROOM = 0.95
"""Lanes left free above the first, for the labels of the committed steps."""
_MOST_COMMITS = 24
"""With more committed steps than this, only the one that ends a recovery is labelled."""
_EDGE = "white"
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
"""Drawn below text, so that no line crosses it."""
_AXIS_TEXT_IN, _ZOOM_TEXT_IN = 0.45, 0.3
"""Room below the upper axis for its numbers and its name, and above the enlarged recovery for its legend."""
_LETTER_PT = 4.6
"""Approximate width of a letter of the legend."""
_LEGEND_PT = 640.0
"""With less room between its entries, a legend that is wider than this fits, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSegment:
    """A worker at work, from entering the training loop until leaving it."""

    rank: int
    from_s: float
    to_s: float
    open: bool
    """No record shows how it ended."""
    waits_s: float
    """Seconds after ``from_s`` that it waited as a spare or surplus newcomer; 0 if it computed from the start."""


def stretches(history: RunModel, end_s: float) -> Iterator[WorkSegment]:
    """Yield the intervals in which each worker was at work; ``end_s`` ends intervals that are open."""
    for life in history.lives:
        deaths = {f.rank: f.t_s for f in history.failures if _within(f.t_s, life)}
        for start in {r.rank: r for r in reversed(life.of(RunStarted))}.values():
            records = (*life.of(Finished), *life.of(Left), *life.of(WorkerEnded))
            ends = [r.t_s for r in records if r.rank == start.rank and r.t_s > start.t_s]
            ends += [t for rank, t in deaths.items() if rank == start.rank and t > start.t_s]
            ends += [life.restart.t_s] if life.restart else []
            to_s = min(ends, default=end_s)
            waits_s = max(0.0, min(_begins_work_s(history, life, start), to_s) - start.t_s)
            yield WorkSegment(rank=start.rank, from_s=start.t_s, to_s=to_s, open=not ends, waits_s=waits_s)


def _begins_work_s(history: RunModel, life: JobLife, start: RunStarted) -> float:
    """Return when a worker first was among those with the lowest ranks, which share the work."""
    if start.rank in sorted(life.workers)[: history.workers_wanted(start.t_s)]:
        return start.t_s
    shares = (
        record.t_s
        for record in life.of(Recovered)
        if start.rank in sorted(record.survivors)[: history.workers_wanted(record.t_s)]
    )
    return min(shares, default=math.inf)


def first_answered(history: RunModel) -> list[LostWorker]:
    """Return the failures of the first recovery after which a step was committed."""
    answered = [f for f in history.failures if f.resumed_s is not None and f.recovery is not None]
    return [f for f in answered if f.recovery == answered[0].recovery]


def draw_lanes(axes: Axes, history: RunModel, wall_s: float) -> None:
    """Draw the whole run: bars, recoveries, failures, workers that joined and left."""
    lanes = _prepare(axes, history)
    end_s = max(wall_s, history.end_s)
    begin_s = _shown_from_s(history, end_s)
    axes.set_xlim(begin_s, end_s + 0.005 * (end_s - begin_s))
    _draw_starts(axes, history, lanes)
    _draw_work(axes, history, lanes, end_s)
    point_s = (end_s - begin_s) / (axes.get_window_extent().width * 72 / axes.figure.dpi)
    for failure in history.failures:
        if failure.resumed_s is not None:
            wide = max(failure.resumed_s - failure.t_s, _MIN_SHADE_PT * point_s)
            axes.axvspan(failure.t_s, failure.t_s + wide, color=style.RECOVERY, alpha=0.75, linewidth=0, zorder=1.5)
    few = len(history.failures) <= 24
    for failure in history.failures:
        if failure.rank in lanes:
            _draw_death(axes, failure, lanes[failure.rank], axes.get_xlim()[1], label=few)
    _draw_silences(axes, history, lanes)
    _draw_comings(axes, history, lanes)
    axes.set_xlabel(
        f"seconds since the start{'; before the left edge workers were starting' if begin_s else ''}",
        loc="left",
        bbox=_PAPER,
    )


def _shown_from_s(history: RunModel, end_s: float) -> float:
    """Return where the figure begins: shortly before training, if starting took longer than the rest of the run."""
    trains_s = min((start.t_s for start in history.of(RunStarted)), default=0.0)
    return max(0.0, trains_s - 0.1 * (end_s - trains_s)) if trains_s > end_s / 2 else 0.0


def draw_legend(axes: Axes, left_in: float, history: RunModel) -> None:
    """Write the legend above the lanes, for the marks that occur."""
    marks = [("▬ training", style.WORK), ("▬ starting", style.FAINT)]
    if any(segment.waits_s for segment in stretches(history, history.end_s)):
        marks.append(("▭ waiting as a spare", style.WORK))
    if history.failures:
        marks += [("✕ lost", style.DEATH), ("▮ until the next step is committed", style.SEEN)]
    if history.of(WorkerFenced):
        marks.append(("╌ no sign of life", style.DEATH))
    if history.joined:
        marks.append(("▶ joined", style.DECIDED))
    if history.of(Left):
        marks.append(("◀ left after SIGTERM", style.SOFT))
    _write_legend(axes, left_in, marks)


def _write_legend(axes: Axes, left_in: float, marks: Sequence[tuple[str, str]]) -> None:
    """Write coloured words in a line above the axes, beginning ``left_in`` inches left of them."""
    place, letters = -left_in * 72, sum(len(words) for words, _ in marks) * _LETTER_PT
    gap = 20 if letters + 20 * len(marks) < _LEGEND_PT else 12
    for words, color in marks:
        axes.annotate(
            words, (0, 1), xycoords="axes fraction", xytext=(place, 7), textcoords="offset points",
            ha="left", va="bottom", fontsize=9, color=color, bbox=_PAPER,
        )  # fmt: skip
        place += len(words) * _LETTER_PT + gap


def draw_zoom(
    axes: Axes, left_in: float, main: Axes, history: RunModel, failures: Sequence[LostWorker], step_s: float | None
) -> None:
    """Draw one recovery: when each survivor detected the failure, when it decided, when the next step was committed."""
    lanes = _prepare(axes, history)
    zero_s, end_s = failures[0].t_s, max(f.resumed_s or f.t_s for f in failures)
    took_s = end_s - zero_s
    pad_s = max(0.12 * took_s, min(1.3 * (step_s or 0), 0.5 * took_s))
    axes.set_xlim(zero_s - pad_s, end_s + pad_s * 1.35)
    bottom, top = axes.get_ylim()
    axes.set_ylim(top=top + _HEADROOM)
    up_to = (top - bottom) / (top + _HEADROOM - bottom)
    _draw_work(axes, history, lanes, axes.get_xlim()[1])
    axes.axvspan(zero_s, end_s, ymax=up_to, color=style.RECOVERY, alpha=0.45, linewidth=0, zorder=1.5)
    _draw_commits(axes, history, end_s, up_to)
    _draw_survivors(axes, history, failures, lanes)
    _draw_silences(axes, history, lanes)
    for failure in failures:
        _draw_death(axes, failure, lanes[failure.rank], axes.get_xlim()[1], label=True)
    _unit_ticks(axes, zero_s, "the fault" if failures[0].injected else "the first survivor detected it")
    _write_legend(axes, left_in, _marks_of_zoom(axes, history, failures, zero_s, end_s))
    _tie(axes, main)


def _prepare(axes: Axes, history: RunModel) -> dict[int, int]:
    """Set the lanes up and return the vertical position of each rank's lane."""
    ranks = history.ranks
    lanes = {rank: len(ranks) - 1 - place for place, rank in enumerate(ranks)}
    every = math.ceil(len(ranks) / 32)
    axes.set_yticks([lanes[r] for r in ranks[::every]], [_name(history, r) for r in ranks[::every]])
    for name in axes.get_yticklabels():
        name.set_horizontalalignment("left")
    axes.set_ylim(-0.6, len(ranks) - 0.4)
    axes.tick_params(axis="y", length=0, labelcolor=style.INK, pad=51)
    axes.tick_params(axis="x", length=3)
    axes.spines["left"].set_visible(False)
    return lanes


def _name(history: RunModel, rank: int) -> str:
    return f"{'spare' if rank in history.spares else history.worker} {rank}"


def _draw_work(axes: Axes, history: RunModel, lanes: dict[int, int], end_s: float) -> None:
    for segment in stretches(history, end_s):
        if segment.rank in lanes:
            works_s = segment.from_s + segment.waits_s
            axes.barh(
                lanes[segment.rank], segment.to_s - works_s, left=works_s, height=_BAR,
                color=style.WORK_LIGHT, linewidth=0, zorder=2,
            )  # fmt: skip
            if segment.waits_s:
                axes.barh(
                    lanes[segment.rank], segment.waits_s, left=segment.from_s, height=_BAR,
                    color="none", edgecolor=style.WORK_LIGHT, linewidth=1, zorder=2,
                )  # fmt: skip


def _draw_starts(axes: Axes, history: RunModel, lanes: dict[int, int]) -> None:
    """Draw a thin line from the start of each process to the start of its training."""
    for life, from_s in zip(history.lives, [0.0, *(x.restart.t_s for x in history.lives if x.restart)], strict=True):
        newcomers = {joining.rank for joining in life.joined}
        for start in life.of(RunStarted):
            if start.rank in lanes and start.rank not in newcomers:
                axes.plot([from_s, start.t_s], [lanes[start.rank]] * 2, color=style.FAINT, linewidth=1.2, zorder=1.8)


def _draw_death(axes: Axes, failure: LostWorker, lane: int, right_s: float, *, label: bool) -> None:
    axes.plot(failure.t_s, lane, marker="X", markersize=9, color=style.DEATH, markeredgecolor=_EDGE, zorder=6)
    if not label:
        return
    left, _ = axes.get_xlim()
    flip = failure.t_s > left + 0.82 * (right_s - left)
    words = f"step {failure.step}" + (f", {failure.phase}" if failure.phase else "")
    axes.annotate(
        words, (failure.t_s, lane), xytext=(-9 if flip else 9, 0), textcoords="offset points",
        ha="right" if flip else "left", va="center_baseline", color=style.DEATH, fontsize=8.5, zorder=7,
        bbox=_PAPER,
    )  # fmt: skip


def _draw_silences(axes: Axes, history: RunModel, lanes: dict[int, int]) -> None:
    """Show since when a worker that the launcher ended had given no sign of life."""
    left, right = axes.get_xlim()
    for fenced in history.of(WorkerFenced):
        from_s, to_s = max(left, fenced.t_s - fenced.silent_s), min(right, fenced.t_s)
        if fenced.rank in lanes and from_s < to_s:
            lane = lanes[fenced.rank] - _BAR / 2  # at the height of its failure mark
            axes.plot([from_s, to_s], [lane] * 2, color=style.DEATH, linewidth=1.4, dashes=(3, 2), zorder=8)


def _draw_comings(axes: Axes, history: RunModel, lanes: dict[int, int]) -> None:
    """Mark the times at which workers joined and at which they left in order."""
    for joining in history.joined:
        _mark(axes, joining.t_s, lanes[joining.rank], ">", style.DECIDED, size=9)
    for left in history.of(Left):
        _mark(axes, left.t_s, lanes[left.rank], "<", style.SOFT, size=9)


def _draw_commits(axes: Axes, history: RunModel, end_s: float, up_to: float) -> None:
    """Draw commits as lines up to a share of the height; their labels are above them, where no line crosses."""
    left, right = axes.get_xlim()
    shown = [c for c in history.commits if left <= c.t_s <= right]
    if len(shown) > _MOST_COMMITS:
        shown = [c for c in shown if c.t_s == end_s]
    for commit in shown:
        axes.axvline(commit.t_s, ymax=up_to, color=style.INK, linewidth=0.8, linestyle=(0, (1, 2)), zorder=3)
    room_s = _NAME_ROOM * (right - left)
    for commit in _named(shown, end_s, room_s):
        axes.annotate(
            f"step {commit.step}", (commit.t_s, up_to), xycoords=("data", "axes fraction"), xytext=(0, 1),
            textcoords="offset points", ha="right" if commit.t_s > right - room_s / 3 else "center", va="bottom",
            fontsize=8.5, color=style.SOFT, zorder=7,
        )  # fmt: skip


def _named(commits: Sequence[StepCommitted], end_s: float, room_s: float) -> list[StepCommitted]:
    """Return the commits that have room for their labels; the one at ``end_s`` takes precedence."""
    named = [commit for commit in commits if commit.t_s == end_s][:1]
    for commit in commits:
        if all(abs(commit.t_s - other.t_s) >= room_s for other in named):
            named.append(commit)
    return named


def _draw_survivors(axes: Axes, history: RunModel, failures: Sequence[LostWorker], lanes: dict[int, int]) -> None:
    for life in history.lives:
        for recovery in life.recoveries:
            if set(recovery.lost) != {f.rank for f in failures} or not _within(failures[0].t_s, life):
                continue
            for seen in recovery.seen:
                _mark(axes, seen.t_s, lanes[seen.rank], "o", style.SEEN)
            for decision in recovery.said:
                _mark(axes, decision.t_s, lanes[decision.rank], "D", style.DECIDED)


def _mark(axes: Axes, t_s: float, lane: int, marker: str, color: str, *, size: float = 6) -> None:
    axes.plot(t_s, lane, marker=marker, markersize=size, color=color, markeredgecolor=_EDGE, zorder=5)


def _unit_ticks(axes: Axes, zero_s: float, zero: str) -> None:
    """Count from the fault, in milliseconds if that is more readable."""
    left, right = axes.get_xlim()
    unit, factor = ("milliseconds", 1e3) if right - left < 2 else ("seconds", 1.0)
    span = (right - left) * factor
    step = next(s * 10**e for e in range(-3, 9) for s in (1, 2, 5) if span / (s * 10.0**e) <= 10)
    first = math.ceil((left - zero_s) * factor / step)
    ticks = [n * step for n in range(first, math.floor((right - zero_s) * factor / step) + 1)]
    axes.set_xticks([zero_s + t / factor for t in ticks], [plain(t) for t in ticks])
    axes.set_xlabel(f"{unit} since {zero}: the first recovery, enlarged", loc="left")


def _marks_of_zoom(
    axes: Axes, history: RunModel, failures: Sequence[LostWorker], zero_s: float, end_s: float
) -> list[tuple[str, str]]:
    """Return the meanings of the marks, with the times of the first detection, last decision and next commit."""
    left, right = axes.get_xlim()
    detection_s = min((f.known_s for f in failures if f.known_s is not None and f.injected), default=None)
    decided = failures[0].decided_s
    marks = [("✕ lost", style.DEATH)]
    if any(left <= fenced.t_s and fenced.t_s - fenced.silent_s <= right for fenced in history.of(WorkerFenced)):
        marks.append(("╌ no sign of life", style.DEATH))
    if failures[0].known_s is not None:
        first = "" if detection_s is None else f", the first after {seconds(detection_s - zero_s)}"
        marks.append((f"● detected{first}", style.SEEN))
    if decided is not None:
        took = seconds(decided - zero_s)
        again = failures[0].decision == "restart"
        words = f"job restarted after {took}" if again else f"◆ decided, the last after {took}"
        marks.append((words, style.DECIDED))
    return [*marks, (f"┊ step committed, the next after {seconds(end_s - zero_s)}", style.INK)]


def _tie(axes: Axes, main: Axes) -> None:
    """Show which part of the upper axis the lower axis enlarges, between the texts of both, which no line crosses."""
    from matplotlib.lines import Line2D

    figure = main.figure
    left, right = axes.get_xlim()
    dots_per_in = figure.dpi
    upper = main.transAxes.transform((0, 0))[1] - _AXIS_TEXT_IN * dots_per_in
    lower = axes.transAxes.transform((0, 1))[1] + _ZOOM_TEXT_IN * dots_per_in
    for x, corner in ((left, 0.0), (right, 1.0)):
        ends = [(main.transData.transform((x, 0))[0], upper), (axes.transAxes.transform((corner, 1))[0], lower)]
        xs, ys = zip(*map(figure.transFigure.inverted().transform, ends), strict=True)
        figure.add_artist(Line2D(xs, ys, color=style.FAINT, linewidth=0.7, zorder=0))
    main.axvspan(left, right, ymax=0.04, color=style.INK, linewidth=0.8, zorder=4)


def _within(t_s: float, life: JobLife) -> bool:
    return life.span_s is not None and life.span_s[0] <= t_s <= life.span_s[1]
