"""Records and reports of runs as they might have been, for tests of pages."""

import hashlib
import math
import random

from holdfast.records.types import (
    FailureSeen,
    FaultFired,
    Finished,
    Recovered,
    RunStarted,
    SamplesLost,
    StepCommitted,
    WorkerEnded,
)
from holdfast.summary.build import build_report
from holdfast_lab.pages.demo import demo_rows

STEPS, BATCH, PACE_S = 120, 120, 0.041
KILLS = ((1, 31, "allreduce"), (3, 78, "backward"))


def made_up_run(strategy="rollback", kills=KILLS, workers=4):
    """Records of a run as it might have been, from the start of the launcher to the end of the last worker."""
    chance = random.Random(7)
    alive, records, now, step, generation = list(range(workers)), [], 2.6, 0, 0
    lost_samples = 0
    pending = list(kills)

    def start(at_step):
        records.extend(
            RunStarted(
                t_s=now + chance.random() * 0.02, rank=rank, step=at_step, fabric="ulfm", strategy=strategy, seed=0,
                workers=len(alive), slices=workers, order="fold", split="slices", batch="global", rescale="survivors",
                steps_planned=STEPS, samples_planned=STEPS * BATCH, num_buckets=3, parameters=38_250,
            )
            for rank in alive
        )  # fmt: skip

    start(0)
    now += 0.05
    while step < STEPS:
        if pending and pending[0][1] == step:
            rank, _, phase = pending.pop(0)
            now += PACE_S * 0.6
            records.append(FaultFired(t_s=now, rank=rank, step=step, fault=len(kills), kind="kill", phase=phase))
            alive.remove(rank)
            generation += 1
            for other in alive:
                seen_s = now + 0.006 + chance.random() * 0.006
                records.append(FailureSeen(t_s=seen_s, rank=other, step=step, phase="allreduce"))
                decision = {"rollback": "redo", "forward": "continue", "restart": "load"}[strategy]
                back = step // 25 * 25 if strategy == "restart" else step
                records.append(
                    Recovered(
                        t_s=seen_s + 0.018 + chance.random() * 0.004, rank=other, step=back, lost=(rank,),
                        survivors=tuple(alive), decision=decision,
                        redone_steps=0 if strategy == "forward" else step - back + 1, generation=generation,
                    )
                )  # fmt: skip
            records.append(WorkerEnded(t_s=now + 0.09, rank=rank, step=step, exit_code=-9, pid=4000 + rank))
            now += 0.034
            if strategy == "forward":
                ids = tuple(sorted(chance.sample(range(1437), BATCH // workers)))
                lost_samples += len(ids)
                records.append(
                    SamplesLost(t_s=now, rank=alive[0], step=step, epoch=step // 12, ids=ids, buckets=(0, 1))
                )
            if strategy == "restart":
                now += 0.2
            step = back
        now += PACE_S * (1 + chance.random() * 0.15) * (workers / len(alive)) ** 0.3
        metrics = {"loss": 2.2 * math.exp(-step / 28) + 0.12 + chance.gauss(0, 0.03)}
        metrics["accuracy"] = 0.965 - 0.85 * math.exp(-step / 20) + chance.gauss(0, 0.006)
        records.append(
            StepCommitted(
                t_s=now, rank=alive[0], step=step, epoch=step // 12, samples=BATCH, workers=len(alive), metrics=metrics
            )
        )
        step += 1
    bits = hashlib.sha256(b"forward" if strategy == "forward" else b"same").hexdigest()
    for rank in alive:
        records.append(
            Finished(
                t_s=now + 0.03 + rank * 0.004, rank=rank, step=STEPS, outcome="done", sha256=bits, state_sha256=bits[::-1],
                planned=STEPS * BATCH, committed=STEPS * BATCH - lost_samples, lost=lost_samples, repeated=0,
                metrics={"accuracy": 0.9722 - 0.0056 * (strategy == "forward")}, checkpoint="",
            )
        )  # fmt: skip
        records.append(WorkerEnded(t_s=now + 0.4 + rank * 0.02, rank=rank, step=-1, exit_code=0, pid=4000 + rank))
    return records, now + 0.6


def made_up_report(**how):
    records, wall_s = made_up_run(**how)
    kills = "".join(f" --inject kill:rank={r},step={s},phase={p}" for r, s, p in how.get("kills", KILLS))
    command = f"holdfast run -n 4 --strategy {how.get('strategy', 'rollback')}{kills} --report out examples/digits.py"
    return build_report(records, started=range(how.get("workers", 4)), wall_s=wall_s, seed=0, command=command), records


def made_up_demo():
    runs = {
        "undisturbed": made_up_report(kills=()),
        "rollback": made_up_report(),
        "forward": made_up_report(strategy="forward"),
        "restart": made_up_report(strategy="restart"),
    }
    results = demo_rows(
        [(name, report) for name, (report, _) in runs.items()], settings={"dataset": "digits", "epochs": 10}
    )
    return results, {name: records for name, (_, records) in runs.items()}
