"""Checks the claims of the study of parallelism against the measured rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast_lab.studies.base import MEASURED, SHARE, Claim, Row, decided_by, statement
from holdfast_lab.studies.parallelism.elastic import CALM, GLOO, NOBODY, ULFM
from holdfast_lab.studies.parallelism.jobs import (
    FORWARD,
    HYBRID,
    PARTIAL,
    PIPELINE,
    REINIT,
    REPLICATED,
    RESTART,
    ROLLBACK,
    SHARDED,
)
from holdfast_lab.studies.parallelism.needs import OMISSIONS
from holdfast_lab.studies.parallelism.rows import LOAD, NOT_COMPARED
from holdfast_lab.studies.stats import bootstrap, median, share_interval

ABSTRACT = "question of the abstract; the answer is ours"
CODE = "the authors' code (matex-org/caffe-intel, branch feature/ft)"
CODE_DERIVED = "follows from the authors' code; the check is derived"
DERIVED = "derived"
ELASTIC = "our reading of Li, Bosilca, Bouteiller, Nicolae (2023)"
ELASTIC_ABSTRACT = "abstract of Li, Bosilca, Bouteiller, Nicolae (2023): by a significant factor; it gives no number"
_LITTLE = 0.02
"""Accuracy counts as little lower if it drops by at most this, as a fraction of 1."""
_LEARNED = 0.5
"""A network below this accuracy without a kill has not learned yet, so it has nothing to lose."""
_FEWEST = 3
"""With fewer runs than this, no interval is given."""


_OF_KILLS = ("undisturbed", "kill", "replaced", "recovery")
"""Kinds of tasks, and part of their rows, with a worker that is killed."""


def hold_claims(rows: Sequence[Row], seed: int) -> list[Claim]:
    """Return every claim with the finding."""
    measured = [row for row in rows if row["status"] == MEASURED]
    killed = [row for row in measured if row["part"] == "recovery"]
    attempted = [row for row in rows if row["part"] == "recovery" and "completes" in row]
    replicated = [row for row in killed if row["kind"] == REPLICATED and row["strategy"] in (ROLLBACK, FORWARD)]
    kept = [row for row in killed if row["strategy"] in (ROLLBACK, FORWARD, REINIT)]
    elastic = [row for row in rows if row["part"] == "elastic" and row.get("scenario") != CALM]
    exact = [row for row in killed if row["strategy"] == ROLLBACK and row["differs"] != NOT_COMPARED]
    kills = [
        _share("Any worker may be killed: training completes", CODE_DERIVED, attempted, lambda row: row["completes"]),
        _share(
            "Survivors end with the same weights, to the bit", CODE_DERIVED, killed, lambda row: bool(row["identical"])
        ),
        _share("No iteration is skipped", CODE, killed, lambda row: row["in_order"]),
        _share(
            "Where the model is replicated, recovery writes no checkpoint file",
            CODE,
            replicated,
            lambda row: row["completes"] and not row["files"],
        ),
        _share(
            "When the survivors redo the iteration, the final bits are those of the undisturbed run",
            DERIVED,
            exact,
            lambda row: row["completes"] and row["differs"] == "nothing",
        ),
        _share(
            "Every sample contributes to the weights once: the survivors' samples are the whole dataset",
            CODE_DERIVED,
            [row for row in killed if row["strategy"] != FORWARD],
            lambda row: row["each_once"],
        ),
    ]
    reread = [
        _share(
            "Survivors that reread the dead worker's blocks hold the whole dataset, each block once",
            CODE,
            [row for row in measured if row["part"] == "data"],
            lambda row: row["held_once"],
        )
    ]
    costs = [
        _loses_little(
            "Continuing without the dead worker's part of the iteration costs little accuracy",
            [row for row in killed if row["strategy"] == FORWARD],
            lambda rows: f"which continued without {sum(row['lost_samples'] for row in rows)} samples",
            seed,
        ),
        _loses_little(
            "Restoring one part from some iterations earlier, while the rest stays current, costs little accuracy",
            [row for row in killed if row["strategy"] == PARTIAL and row.get("restored_parts")],
            lambda rows: (
                f"whose parts were restored from at most {max(row['restored_oldest'] for row in rows)} iterations "
                "earlier"
            ),
            seed,
        ),
        _no_checkpoint_needed(kept),
    ]
    comes_back = [_part_comes_back(killed), _restart_redoes_more(killed, seed), _rebuilding_takes_longer(killed, seed)]
    elastic_claims = [
        _collective_is_done_again(elastic),
        _newcomers_leave_no_trace(elastic),
        _is_quicker_than_elastic_horovod(elastic, seed),
    ]
    return [
        *decided_by(_OF_KILLS, kills),
        *decided_by(["data"], reread),
        *decided_by(_OF_KILLS, costs),
        *decided_by(["structures", "bare"], [_part_is_lost(measured)]),
        *decided_by(_OF_KILLS, comes_back),
        *decided_by([f"without {omission.call}" for omission in OMISSIONS], [_every_call_is_needed(measured)]),
        *decided_by(["elastic"], elastic_claims),
    ]


def _share(
    words: str, source: str, rows: Sequence[Row], is_true: Callable[[Row], object], paper: float | None = 1.0
) -> Claim:
    """Check that a property holds in every run, and name the runs in which it does not."""
    claim = statement(words, source, paper)
    if not rows:
        return claim
    truths = [bool(is_true(row)) for row in rows]
    wrong = [_name(row) for row, truth in zip(rows, truths, strict=True) if not truth]
    found = f"of {len(rows)} runs{_iterations(rows)}"
    found += f"; not so in {'; '.join(wrong)}" if wrong else ""
    ci = share_interval(sum(truths), len(truths))
    ours = sum(truths) / len(truths)
    return claim.judged(ours, not wrong, found, ci=ci, unit=SHARE)


def _iterations(rows: Sequence[Row]) -> str:
    steps = sorted({row["kill_step"] for row in rows if row.get("kill_step") is not None})
    return f", killed in iteration {', '.join(map(str, steps))}" if steps else ""


def _name(row: Row) -> str:
    if row["part"] == "elastic":
        return f"{row['scenario']}, joins: {row['comes']}, {row['fabric']}, {row['strategy']}, {row['workers']} workers"
    return f"{row['kind']}, {row['strategy']}, {row['workers']} workers, rank {row['kill_rank']} in iteration {row['kill_step']}"


def _loses_little(words: str, rows: Sequence[Row], which: Callable[[Sequence[Row]], str], seed: int) -> Claim:
    """Check that the accuracy is little lower than in the undisturbed run."""
    compared = [row for row in rows if row.get("accuracy_loss") is not None]
    rows = [row for row in compared if row["accuracy_undisturbed"] >= _LEARNED]
    if not rows:
        return statement(words, DERIVED)
    losses = [row["accuracy_loss"] for row in rows]
    ci = bootstrap([losses], lambda drawn: sum(drawn[0]) / len(drawn[0]), seed)
    found = f"accuracy of the undisturbed run minus that of the disturbed run, mean of {len(rows)} runs, {which(rows)}"
    if idle := len(compared) - len(rows):
        found += f"; {idle} further runs are left out because their networks had not learned yet"
    few = len(rows) < _FEWEST
    found += f"; fewer than {_FEWEST} runs are too few to decide" if few else ""
    return statement(words, DERIVED, 0.0).judged(
        sum(losses) / len(losses), None if few else ci[1] < _LITTLE, found, ci=ci
    )


def _no_checkpoint_needed(kept: Sequence[Row]) -> Claim:
    words = "With a replica, a pipeline replica or a standby of everything that a worker holds, no data structure needs a checkpoint"
    rows = [row for row in kept if row["from"] != "checkpoint"]
    return _share(
        words,
        ABSTRACT,
        rows,
        lambda row: row["completes"] and row["decision"] != LOAD and not row["restarts"] and not row["files"],
    )


def _part_is_lost(measured: Sequence[Row]) -> Claim:
    words = "A worker of a split model takes its part of the model with it, unless another worker has a copy"
    rows = [row for row in measured if row["part"] == "bare"]
    return _share(words, ABSTRACT, rows, lambda row: row["decision"] == LOAD or row["restarts"] > 0)


def _part_comes_back(killed: Sequence[Row]) -> Claim:
    words = "The lost part is restored from a neighbour's memory, or from the other pipeline: one iteration is redone"
    rows = [row for row in killed if row["kind"] in (PIPELINE, SHARDED, HYBRID) and row["strategy"] == ROLLBACK]
    return _share(
        words, ABSTRACT, rows, lambda row: row["completes"] and row["decision"] != LOAD and row["redone_steps"] <= 1
    )


def _restart_redoes_more(killed: Sequence[Row], seed: int) -> Claim:
    words = "Restoring a checkpoint redoes more iterations than recovering from memory"
    more = [row["redone_steps"] for row in killed if row["strategy"] == RESTART]
    less = [row["redone_steps"] for row in killed if row["strategy"] == ROLLBACK]
    claim = statement(words, DERIVED)
    if not (more and less):
        return claim

    def gap(drawn: Sequence[Sequence[float]]) -> float:
        return sum(drawn[0]) / len(drawn[0]) - sum(drawn[1]) / len(drawn[1])

    ci = bootstrap([more, less], gap, seed)
    found = f"redone iterations, restart minus rollback, means of {len(more)} and {len(less)} runs"
    ours = gap([more, less])
    runs = min(len(more), len(less))
    return claim.judged(ours, ci[0] > 0, found, ci=ci, unit="iterations", runs=runs)


def _rebuilding_takes_longer(killed: Sequence[Row], seed: int) -> Claim:
    words = "Survivors that continue in place (ULFM) commit the next iteration sooner than those that rebuild the application (Reinit)"
    times: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in killed:
        if row["kind"] == REPLICATED and row["strategy"] in (REINIT, ROLLBACK) and row.get("recover_s"):
            alike = tuple(row.get(name) for name in ("network", "form", "workers", "kill_step"))
            times.setdefault(alike, {REINIT: [], ROLLBACK: []})[row["strategy"]].append(row["recover_s"])
    ratios: dict[str, list[float]] = {}
    for (network, *_), pair in times.items():
        of_pairs = [again / at_once for again, at_once in zip(pair[REINIT], pair[ROLLBACK], strict=False)]
        if of_pairs:
            ratios.setdefault(network, []).extend(of_pairs)
    claim = statement(words, ABSTRACT)
    if not ratios:
        return claim
    # Networks are not mixed: both redo the iteration, so the longer it is, the closer the ratio is to 1.
    network, group = next(iter(ratios.items()))
    ci = bootstrap([group], lambda drawn: median(drawn[0]), seed)
    few = len(group) < _FEWEST
    found = f"from the kill to the next commit, reinit over rollback, {network}, median of {len(group)} pairs of runs"
    found += "".join(f"; {name} {median(more):.1f} ({len(more)})" for name, more in ratios.items() if name != network)
    found += f"; fewer than {_FEWEST} pairs are too few to decide" if few else ""
    holds = None if few or ci[0] <= 1 <= ci[1] else ci[0] > 1
    ours = median(group)
    return claim.judged(ours, holds, found, ci=ci, unit="times as long")


def _every_call_is_needed(measured: Sequence[Row]) -> Claim:
    words = "Without any one of the ULFM calls that recovery makes, some run goes wrong"
    rows = [row for row in measured if row["part"] == "needs"]
    if not rows:
        return statement(words, ABSTRACT)
    calls = list(dict.fromkeys((row["call"], row["instead"]) for row in rows))
    broken = {(row["call"], row["instead"]) for row in rows if row["breaks"]}
    spared = [f"{row['call']} ({row['strategy']})" for row in rows if not row["breaks"]]
    found = f"left out, tried in every run of a job of {min(r['workers'] for r in rows)} to {max(r['workers'] for r in rows)} workers"
    found += f"; nothing goes wrong without: {', '.join(spared)}" if spared else ""
    missing = [call for call in calls if call not in broken]
    return statement(words, ABSTRACT, float(len(calls))).judged(
        float(len(calls) - len(missing)), not missing, found, unit="calls"
    )


# -- the resilient collectives of 2023


def _collective_is_done_again(elastic: Sequence[Row]) -> Claim:
    words = "Where the survivors retry the failed all-reduce among themselves, no iteration is redone"
    rows = [row for row in elastic if row["strategy"] == FORWARD]
    return _share(
        words,
        ELASTIC,
        rows,
        lambda row: row.get("completes") and row["redone_steps"] == 0 and not row["restarts"],
        paper=None,
    )


def _newcomers_leave_no_trace(elastic: Sequence[Row]) -> Claim:
    words = "A worker that replaces another, or is added, receives its whole state from the others' memory: the bits are those of the undisturbed run"
    came = [row for row in elastic if row["strategy"] == ROLLBACK and row["comes"] != NOBODY]
    # Without the undisturbed run there is nothing to compare with; a run that failed still counts.
    rows = [row for row in came if not row.get("completes") or row.get("differs", NOT_COMPARED) != NOT_COMPARED]
    return _share(
        words,
        DERIVED,
        rows,
        lambda row: row.get("completes") and row["workers_at_end"] == row["workers"] and row["differs"] == "nothing",
        paper=None,
    )


def _is_quicker_than_elastic_horovod(elastic: Sequence[Row], seed: int) -> Claim:
    words = "Retrying the failed all-reduce (over ULFM) reaches the next commit sooner than rolling back to the last one with a new rendezvous, as Elastic Horovod does (over Gloo)"

    def times(strategy: str, fabric: str) -> list[float]:
        chosen = [row for row in elastic if (row["strategy"], row["fabric"]) == (strategy, fabric)]
        return [row["recover_s"] for row in chosen if row.get("recover_s")]

    def ratio(drawn: Sequence[Sequence[float]]) -> float:
        return median(drawn[0]) / median(drawn[1])

    groups = [times(REINIT, GLOO), times(FORWARD, ULFM)]
    claim = statement(words, ELASTIC_ABSTRACT)
    if not all(groups):
        return claim
    ci = bootstrap(groups, ratio, seed)
    few = min(map(len, groups)) < _FEWEST
    found = "from the kill to the next commit, medians: reinit from a checkpoint over Gloo, which models Elastic Horovod, over "
    found += f"forward over ULFM; {len(groups[0])} and {len(groups[1])} runs"
    if milder := times(RESTART, GLOO):
        found += f"; restart, which does not rebuild the application: {ratio([milder, groups[1]]):.2f} times as long"
    found += f"; fewer than {_FEWEST} runs are too few to decide" if few else ""
    holds = None if few or ci[0] <= 1 <= ci[1] else ci[0] > 1
    return claim.judged(ratio(groups), holds, found, ci=ci, unit="times as long")
