"""Random plans on real processes: all faults, mixed, over both fabrics; a plan is determined by its seed.

    python tests/support/soak.py --seed 17              # one plan again
    python tests/support/soak.py --runs 300             # a campaign, from --seed on
    python tests/support/soak.py --minutes 20

A plan draws a model, replicated or split, an optimizer, additional features (clipping, a scaler, loader processes,
...), an exact strategy, the fabric, 2 to 8 workers, spares, whether failed workers are replaced, how mini-batches are
sliced and gradients added, the straggler policy, and one to four faults: deaths of several kinds, workers that get
stuck, are slow, or receive SIGTERM; in any phase, also simultaneously, during recovery, while a worker joins, and while
a checkpoint is written. Some jobs are rescaled to more or fewer workers. In some plans the launcher receives SIGTERM or
SIGKILL and the job is resumed, sometimes with another number of workers; some plans have two launchers, and the second
one's node is lost. The result is checked by one hash, and by the account of all samples.
"""

import argparse
import functools
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reference
from clusters import free_port, until
from jobs import clean_env, holdfast, read_report, run_report

from holdfast.faults.plan import ENDS, PHASES, SPLIT_PHASES, Fault

SCRIPT = Path(__file__).with_name("train_reference.py")
SPLIT_SCRIPT = Path(__file__).with_name("train_split.py")
SPLIT = ("pipeline", "sharded")
FEATURES = dict.fromkeys(reference.MODELS, reference.FEATURES) | {
    "pipeline": tuple(
        feature for feature in reference.FEATURES if feature != "ema"
    ),  # no worker has all of the weights
    "sharded": reference.FEATURES,
}
"""Additional features of a training, by model."""
FABRICS = ("ulfm",) * 4 + ("gloo",) * 5 + ("virtual",)
NUM_BUCKETS = 3
LIMIT_S = 170
HANG_S = 2
NODE_S = 4
GRACE_S = 90
"""Time to save and stop, in seconds: a worker stuck in a checkpoint is detected after 30 times the usual limit."""
KINDS = ("kill",) * 5 + ("oom", "segfault", "hang", "hang", "gil", "deadlock", "spin", "slow", "leave")
UNWATCHED_KINDS = (*ENDS, "slow")
"""The same if the launcher is killed: no process is left that detects stuck workers."""
reference_hash = functools.cache(reference.train)


@dataclass(frozen=True)
class Plan:
    """The plan of one seed.

    ``struck`` is the signal that the launcher receives once ``struck_at`` steps are committed, 0 for none.
    """

    seed: int
    case: tuple[str, str]
    fabric: str
    options: tuple[str, ...]
    faults: tuple[str, ...]
    pause: float
    nodes: int = 1
    struck: int = 0
    struck_at: int = 0

    @property
    def computes(self):
        """Whether to call ``step.compute``, with a model whose slices may be batched, instead of the drawn model."""
        return self.case[0] == "mlp" and random.Random(f"way of {self.seed}").random() < 0.5

    @property
    def trained(self):
        """The model, and the optimizer."""
        return (reference.ROWS, self.case[1]) if self.computes else self.case

    @property
    def features(self):
        """The additional features; drawn separately, so that the rest of a plan does not depend on them."""
        rng = random.Random(f"features of {self.seed}")
        return tuple(feature for feature in FEATURES[self.case[0]] if rng.random() < 0.35)

    @property
    def slices(self):
        """Slices of each mini-batch; 0: chosen by the job."""
        if self.case[0] in SPLIT:
            return reference.SLICES
        if self.computes:
            return random.Random(f"slices of {self.seed}").choice((4, 6, 8, 10))
        return random.Random(f"slices of {self.seed}").choice((reference.SLICES, reference.SLICES, 7, 8, 0))

    @property
    def order(self):
        """The order in which slices are added."""
        return random.Random(f"order of {self.seed}").choice(("fold", "fold", "fold", "tree"))

    @property
    def more(self):
        """Options that were not drawn with the rest; they come before those."""
        rng = random.Random(f"more of {self.seed}")
        words = ["--order", self.order, *([] if self.slices else ["--slices", rng.choice(("auto", "auto:1"))])]
        if self.nodes == 1 and rng.random() < 0.15:
            words += ["--strategy", "reinit", *(["--reinit-from", "checkpoint"] if self.case[0] in SPLIT else [])]
        slow = rng.choice(("warn", "warn", "rebalance", "replace"))
        has_others = self.option("--spares") != "0" or "--respawn" in self.options
        if self.case[0] not in SPLIT and self.nodes == 1 and (slow != "replace" or has_others):
            words += ["--stragglers", slow, "--straggler-factor", "1.5"]
        return tuple(words)

    def option(self, name):
        """The value of an option; "" if it is not set."""
        return self.options[self.options.index(name) + 1] if name in self.options else ""

    @property
    def resumed(self):
        """Options for resuming after the launcher was struck."""
        rng = random.Random(f"resumed of {self.seed}")
        workers = rng.choice((self.option("-n"), str(rng.randint(1, 6))))
        return (*self.options, *self.more, "-n", workers, "--resume")

    @property
    def scaled(self):
        """The numbers of workers to rescale to, and after how many commits."""
        rng = random.Random(f"scale of {self.seed}")
        if self.fabric != "gloo" or self.nodes > 1 or self.struck or rng.random() < 0.3:
            return ()
        return tuple((at, rng.randint(1, 8)) for at in sorted(rng.sample(range(2, 12), rng.choice((1, 2)))))

    @property
    def script(self):
        """The script, and its arguments."""
        model, optimizer = self.trained
        script = (SPLIT_SCRIPT, model, "--optimizer", optimizer) if model in SPLIT else (SCRIPT, model, optimizer)
        if model not in SPLIT:
            script = (*script, "--slices", self.slices, *(["--compute"] if self.computes else []))
        pause = max(self.pause, 0.3 if self.scaled else 0.0)
        return (*script, "--pause", pause, f"--features={','.join(self.features)}")

    @property
    def injected(self):
        return [word for fault in self.faults for word in ("--inject", fault)]


def draw(seed, folder, fabric=None):
    """Return the plan of a seed."""
    rng = random.Random(seed)
    fabric = fabric or rng.choice(FABRICS)
    saves = ["--checkpoint-dir", Path(folder) / "checkpoints", "--checkpoint-every", rng.choice((2, 5))]
    options = ["--fabric", fabric, "--hang-timeout", HANG_S, *saves]
    if fabric == "virtual":
        return _draw_virtual(rng, seed, options)
    if fabric == "gloo" and rng.random() < 0.2:
        return _draw_nodes(rng, seed, options)
    split = rng.random() < 0.35
    case = (rng.choice(SPLIT if split else reference.MODELS), rng.choice(reference.OPTIMIZERS))
    workers, spares = rng.choice((2, 3, 3, 4, 4, 5, 8)), rng.choice((0, 0, 0, 1, 2))
    struck = rng.choice((0, 0, 0, 0, signal.SIGTERM, signal.SIGKILL))
    respawn = fabric == "gloo" and rng.random() < 0.5
    options += ["-n", workers, "--spares", spares, *(["--respawn"] if respawn else [])]
    options += ["--mirror", rng.choice((1, 1, 2))] if split else []
    options += ["--strategy", "rollback" if split else rng.choice(("rollback", "rollback", "restart"))]
    options += ["--grace", GRACE_S] if struck == signal.SIGTERM else []
    kinds = UNWATCHED_KINDS if struck == signal.SIGKILL else KINDS
    of_parts = tuple(
        phase for phase in SPLIT_PHASES if phase != "mirror"
    )  # that phase belongs to delta standbys, and these have hot standbys
    phases, buckets = (PHASES + of_parts, (None,)) if split else (PHASES, (None, *range(NUM_BUCKETS)))
    return Plan(
        seed, case, fabric, tuple(map(str, options)), tuple(_faults(rng, workers + spares, kinds, phases, buckets)),
        pause=0.4 if respawn else 0.1 if struck else 0.0, struck=struck, struck_at=rng.randrange(2, 10),
    )  # fmt: skip


def _draw_virtual(rng, seed, options):
    """Return a plan for the virtual fabric: deaths only, and the launcher is not struck."""
    split = rng.random() < 0.35
    case = (rng.choice(SPLIT if split else reference.MODELS), rng.choice(reference.OPTIMIZERS))
    workers, spares = rng.choice((2, 3, 5, 8)), rng.choice((0, 1))
    options += [
        "-n",
        workers,
        "--spares",
        spares,
        "--strategy",
        "rollback" if split else rng.choice(("rollback", "restart")),
    ]
    phases = ("forward", "backward", "allreduce", "optimizer", "recovery")
    faults = _faults(rng, workers + spares, ("kill",), phases, (None,))
    return Plan(seed, case, "virtual", tuple(map(str, options)), tuple(faults), pause=0.0)


def _draw_nodes(rng, seed, options):
    """Return a plan of two launchers: besides the node one of four workers fails, never the first of a node."""
    case, workers = (rng.choice(reference.MODELS), rng.choice(reference.OPTIMIZERS)), rng.choice((1, 2))
    options += ["-n", workers, "--nnodes", 2, "--node-timeout", NODE_S, "--strategy", "rollback"]
    phases = [p for p in PHASES if p not in ("recovery", "rejoin", "checkpoint")]
    step = rng.randrange(1, reference.STEPS)
    faults = [f"nodeloss:node=1,step={step},phase={rng.choice(phases)}"]
    if workers == 2:
        beside = rng.choice((step, rng.randrange(reference.STEPS)))
        kind = rng.choice([kind for kind in KINDS if kind != "slow"])
        faults.append(Fault(kind, rng.choice((1, 3)), beside, rng.choice(phases)).to_spec())
    return Plan(seed, case, "gloo", tuple(map(str, options)), tuple(faults), pause=0.1, nodes=2)


def _faults(rng, workers, kinds, phases, buckets):
    """Yield faults of different workers; one worker is spared."""
    last = None
    for rank in rng.sample(range(workers), min(rng.randint(1, 4), workers - 1)):
        if last is not None and rng.random() < 0.4:
            # Relative to the previous fault: in the same phase, in another, or during the recovery from it.
            step, phase = last.step, rng.choice((last.phase, "recovery", rng.choice(phases)))
        else:
            step, phase = (
                rng.randrange(reference.STEPS),
                rng.choice([p for p in phases if p not in ("recovery", "rejoin", "rehome")]),
            )
        kind = rng.choice(kinds)
        bucket = rng.choice(buckets) if phase == "allreduce" else None
        seconds = rng.choice((0.3, 1.0)) if kind == "slow" else None
        last = Fault(kind, rank, step, phase, bucket, seconds)
        yield last.to_spec()


@functools.cache
def split_hash(model, optimizer, features=(), order="fold"):
    """The final hash of one worker that has the whole model, part after part; see :func:`split_end`."""
    with tempfile.TemporaryDirectory() as folder:
        features = f"--features={','.join(features)}"
        words = (
            "-n",
            1,
            "--fabric",
            "virtual",
            "--order",
            order,
            SPLIT_SCRIPT,
            model,
            "--optimizer",
            optimizer,
            features,
        )
        return split_end(run_report(folder, *words, timeout=LIMIT_S))


def split_end(report):
    """The hash of the weights, averages and optimizers of all parts, and the script's own average and evaluation."""
    return report["replicas"]["state_sha256"], report["metrics"].get("ema"), report["metrics"].get("evaluated")


def run(plan, folder):
    """Run a plan, check everything, and return its report."""
    if plan.nodes > 1:
        report = _run_nodes(plan, Path(folder))
    elif plan.struck:
        report = _run_struck(plan, Path(folder))
    elif plan.scaled:
        report = _run_scaled(plan, Path(folder))
    else:
        report = run_report(folder, *plan.options, *plan.more, *plan.injected, *plan.script, timeout=LIMIT_S)
    if plan.case[0] in SPLIT:
        found, wanted = split_end(report), split_hash(*plan.case, plan.features, plan.order)
    else:
        slices = next(event["slices"] for event in report["_events"] if event["event"] == "RunStarted")
        assert slices == (plan.slices or slices)
        found = report["replicas"]["state_sha256"]
        wanted = reference_hash(*plan.trained, plan.features, slices, plan.order)
        found = (found, int(report["metrics"]["ema"])) if "ema" in plan.features else found
    assert found == wanted, f"the run ended with other bits, {found} instead of {wanted}"
    assert report["replicas"]["identical"] is True, "the replicas differ"
    assert report["samples"] == {"planned": 406, "committed": 406, "lost": 0, "repeated": 0}, report["samples"]
    return report


def _run_nodes(plan, folder):
    """Run one launcher on each node; the first one's node is never lost, and its report counts."""
    meet = ("--rdzv", f"holdfast://127.0.0.1:{free_port()}", *plan.injected)
    launchers = [_start(plan, folder / f"node-{node}", "--node-rank", node, *meet) for node in range(plan.nodes)]
    try:
        codes = [launcher.wait(LIMIT_S) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    assert codes == [0, -signal.SIGKILL], f"exit {codes}\n{_said(folder)}"
    return read_report(folder / "node-0" / "report")


def _run_struck(plan, folder):
    """Strike the launcher during training, wait until all processes have ended, and resume."""
    launcher = _start(plan, folder, *plan.injected)
    try:
        until(lambda: launcher.poll() is not None or _committed(folder) >= plan.struck_at, f"step {plan.struck_at}")
        launcher.send_signal(plan.struck)
        code = launcher.wait(LIMIT_S)
    finally:
        launcher.kill()
        launcher.wait()
    until(lambda: not _is_anybody_left(folder), "the end of all workers")
    if code == 0:  # training was over before the signal came
        return read_report(folder / "report")
    assert code == (4 if plan.struck == signal.SIGTERM else -signal.SIGKILL), f"exit {code}\n{_said(folder)}"
    return run_report(folder / "resumed", *plan.resumed, *plan.script, timeout=LIMIT_S)


def _run_scaled(plan, folder):
    """Rescale the job to other numbers of workers, while faults strike it."""
    launcher = _start(plan, folder, *plan.injected)
    try:
        for at, workers in plan.scaled:
            until(lambda at=at: launcher.poll() is not None or _committed(folder) >= at, f"step {at}")
            asked = holdfast(
                "scale", workers, "--job", launcher.pid, env={"TMPDIR": str(folder / "t")}, timeout=LIMIT_S
            )
            assert asked.returncode == 0 or launcher.poll() is not None, asked.stderr
        code = launcher.wait(LIMIT_S)
    finally:
        launcher.kill()
        launcher.wait()
    assert code == 0, f"exit {code}\n{_said(folder)}"
    return read_report(folder / "report")


def _start(plan, folder, *more):
    (folder / "t").mkdir(parents=True)
    words = ("run", "--no-page", "--report", folder / "report", *plan.options, *plan.more, *more, *plan.script)
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast", *map(str, words)],
            env=clean_env(TMPDIR=str(folder / "t")),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _committed(folder):
    """The number of commits that the workers have recorded."""
    return sum(path.read_bytes().count(b'"StepCommitted"') for path in folder.glob("t/holdfast-*/records-*.jsonl"))


def _is_anybody_left(folder):
    """Whether a process runs that uses the folder for temporary files."""
    mark = f"TMPDIR={folder / 't'}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                return True
        except OSError:  # it has just ended
            continue
    return False


def _said(folder):
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.rglob("output")))


def describe(plan, report):
    """Return a line about a run: the second one, if the launcher was struck and training resumed."""
    events = report["_events"]
    joined = sum(
        len(e.get("joined", ())) for e in events if e["event"] == "Recovered" and e["rank"] == e["survivors"][0]
    )
    fenced = sum(e["event"] == "WorkerFenced" for e in events)
    left = sum(e["event"] == "Left" for e in events)
    struck = f"{signal.Signals(plan.struck).name}@{plan.struck_at}" if plan.struck else "no"
    return (
        f"SOAK seed={plan.seed} model={plan.trained[0]} with={','.join(plan.features) or 'nothing'} fabric={plan.fabric} nodes={plan.nodes} launcher-struck={struck} "
        f"slices={plan.slices or 'auto'} order={plan.order} {' '.join(plan.more)} scaled={','.join(str(workers) for _, workers in plan.scaled) or 'no'} "
        f"lost={len(report['failures'])} joined={joined} left={left} fenced={fenced} restarts={report['restarts']}"
    )


def main():
    """Run a campaign and print its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first plan")
    parser.add_argument("--runs", type=int, help="number of plans; one, if no time is given")
    parser.add_argument("--minutes", type=float, help="minutes after which no run is started")
    parser.add_argument("--fabric", choices=sorted(set(FABRICS)))
    options = parser.parse_args()
    runs = options.runs or (1 if options.minutes is None else 1 << 30)
    ends_s = time.monotonic() + 60 * (options.minutes or 1e9)
    done, failed, restarts = 0, [], {fabric: [0, 0] for fabric in FABRICS}
    for seed in range(options.seed, options.seed + runs):
        if time.monotonic() > ends_s:
            break
        with tempfile.TemporaryDirectory() as folder:
            plan = draw(seed, folder, options.fabric)
            case = " ".join([*plan.trained, *plan.features, *(f"scale@{at}={workers}" for at, workers in plan.scaled)])
            print(f"seed {seed}: {case} {' '.join([*plan.options, *plan.more, *plan.injected])}", flush=True)
            try:
                report = run(plan, folder)
            except Exception as error:
                failed.append(seed)
                print(f"FAILED seed={seed} fabric={plan.fabric}: {str(error)[-3000:]}", flush=True)
                continue
            finally:
                done += 1
            restarts[plan.fabric][0] += 1
            restarts[plan.fabric][1] += report["restarts"] > 0
            print(describe(plan, report), flush=True)
    print(f"{done} plans, {len(failed)} failed: {failed}")
    for fabric, (count, again) in restarts.items():
        print(f"{fabric}: {count} ended correctly, {again} of them after the launcher had restarted the job")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
