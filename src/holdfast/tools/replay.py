"""Replay of steps of a run, on one process, from its report and checkpoints."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.base.formatting import clean
from holdfast.errors import STOPPED, CheckpointError, ConfigError, JobError
from holdfast.tools.certificate import CertifiedSteps
from holdfast.tools.divergence import compare_runs

if TYPE_CHECKING:
    from holdfast.launch.job import JobOutcome
    from holdfast.records.types import Record, RunStarted

Tell = Callable[[str], None]
"""Called with each line that a user should read."""

_DECIDE = ("slices", "order", "seed", "rescale")
"""Settings that bits depend on, as recorded by the run, whose script may have set them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """A replay of steps ``start`` to ``stop`` of a script; ``job`` is the job entry of the report.

    One process plays all workers, because a model may be split among them. ``checkpoint`` is the directory or URL of
    the state before the first step, "" for the beginning of training; ``started`` is the run's first record.
    """

    script: Path
    job: Mapping[str, Any]
    nodes: int
    started: RunStarted
    start: int
    stop: int
    checkpoint: str

    def run(self) -> tuple[Record, ...]:
        """Run the script, and return the records; raise a JobError if it did not reach the last step."""
        with tempfile.TemporaryDirectory(prefix="holdfast-verify-") as folder:
            outcome = self._launch(Path(folder))
        if outcome.exit_code not in (0, STOPPED):
            raise JobError(f"steps {self.start} to {self.stop} could not be replayed: {outcome.message}")
        return outcome.records

    def _launch(self, folder: Path) -> JobOutcome:
        from holdfast.config import FIRM, Settings
        from holdfast.launch.job import Job
        from holdfast.launch.launcher import launch
        from holdfast.observe.terminal.views import make_view

        if self.checkpoint:
            _copy_checkpoint(self.checkpoint, self.start, folder / "checkpoints")
        settings = Settings(
            fabric="virtual",
            workers=self.job["settings"]["workers"] * self.nodes,
            guard="off",
            checkpoint_dir=str(folder / "checkpoints"),  # never the run's own directory
            resume=bool(self.checkpoint),
            stop_after=self.stop,
            **{name: getattr(self.started, name) for name in _DECIDE},
        )
        args = tuple(self.job["args"])
        module = self.job.get("module", "")
        if module:
            _check_module(module, self.script)
        job = Job(
            script=self.script, args=args, module=module, settings=settings, max_restarts=0, log_dir=folder / "logs"
        )
        seed = str(self.job.get("hash_seed", ""))
        hashes = {"PYTHONHASHSEED": seed} if seed.isdigit() else {}
        with _environment({FIRM: "1", "OMP_NUM_THREADS": self.job["threads"]} | hashes):
            return launch(job, make_view(sys.stderr) if sys.stderr.isatty() else None)


def _check_module(module: str, script: Path) -> None:
    """Raise a ConfigError if the module that would be run here is in another file."""
    from holdfast.launch.target import module_file

    if module_file(module).resolve() != script.resolve():
        raise ConfigError(f"module {module!r} is another file here than {script}: change to the directory of that run")


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def _copy_checkpoint(url: str, step: int, folder: Path) -> None:
    from holdfast.checkpoint import CheckpointStore

    loaded = CheckpointStore(url).load(step)
    CheckpointStore(folder).write_tensors(step, loaded.state, loaded.info).commit(loaded.generation)


def replay_steps(
    run: CertifiedSteps,
    report: Mapping[str, Any],
    script: Path | None,
    wanted: int | None,
    stop: int | None,
    *,
    trusted: bool,
    tell: Tell,
) -> dict[str, Any]:
    """Replay steps; return which, from which state, and where they diverge from the records, if they do.

    Args:
        run: The recorded run.
        report: Its report.
        script: The script, None for the one that the report names.
        wanted: The first step to compare, None for the run's first.
        stop: The last step, None for the run's last.
        trusted: Whether the script that the report names may be run although this user has not run it here.
        tell: See :data:`Tell`.

    Raises:
        ConfigError: if the steps cannot be replayed.
        JobError: if the replay did not reach the last step.
    """
    first = run.first if wanted is None else wanted
    last = run.last if stop is None else stop
    if not run.first <= first <= last <= run.last:
        options = {"--from": wanted, "--to": stop}
        bounds = " ".join(f"{option} {step}" for option, step in options.items() if step is not None)
        raise ConfigError(
            f"--from and --to must be within the steps of {run.name}, {run.first} to {run.last}, in this order, got {bounds}"
        )
    if why := _why_not(report, first, last):
        raise ConfigError(f"{run.name} cannot be replayed: {why}")
    path = _script_of(report, script, trusted=trusted, tell=tell)
    begin, url = _find_start(run, report, first, tell)
    if why := _why_not(report, begin, last):
        raise ConfigError(
            f"{run.name} cannot be replayed from step {begin}, the last step before {first} with a saved state: {why}"
        )
    replay = ReplayPlan(
        script=path,
        job=report["job"],
        nodes=report["nodes"],
        started=run.started,
        start=begin,
        stop=last,
        checkpoint=url,
    )
    again = CertifiedSteps(replay.run(), "the replay")
    if odd := _other_kind(run, again):
        tell(f"bits may differ for this reason alone: {odd}")
    compared = compare_runs(run, again, until=last)
    if compared is None or (compared.divergence is None and compared.last < last):
        done = f"only steps {again.first} to {again.last} were"
        raise ConfigError(f"steps {begin} to {last} should have been replayed, but {done}")
    at_end = bool(run.finished) and run.finished[0].step == last + 1
    return {"first": begin, "last": last, "checkpoint": url, "at_end": at_end, "parting": compared.divergence}


# -- first step


def _find_start(run: CertifiedSteps, report: Mapping[str, Any], wanted: int, tell: Tell) -> tuple[int, str]:
    """Return the step to start from, at most ``wanted``, and where the state before it is, "" for the beginning."""
    for step, url in sorted(_checkpoint_folders(run, report, wanted, tell).items(), reverse=True):
        if _is_intact(url, step, run, tell):
            return step, url
    if run.first == 0:
        return 0, ""
    raise ConfigError(
        f"{run.name} begins at step {run.first}, resumed from another run, and no intact checkpoint from before step {wanted} is left "
        "to replay from: give the report directory of the run that began at step 0"
    )


def _checkpoint_folders(run: CertifiedSteps, report: Mapping[str, Any], wanted: int, tell: Tell) -> dict[int, str]:
    """Return where the run saved the states before steps up to ``wanted``."""
    from holdfast.checkpoint import CheckpointStore
    from holdfast.records.types import CheckpointSaved

    saved = [record for record in run.records if isinstance(record, CheckpointSaved)]
    folders = {record.step: record.path.rpartition("/")[0] for record in saved}
    if url := report["job"]["settings"].get("checkpoint_dir"):
        try:
            folders |= {step: url for step in CheckpointStore(url).steps() if step not in folders}
        except (CheckpointError, ConfigError):
            tell(f"skipped: {url} cannot be read")
    return {step: url for step, url in folders.items() if 0 < step <= wanted and step >= run.first}


def _is_intact(url: str, step: int, run: CertifiedSteps, tell: Tell) -> bool:
    from holdfast.checkpoint import CheckpointStore

    try:
        loaded = CheckpointStore(url).load(step)
    except (CheckpointError, ConfigError) as error:
        tell(f"skipped: {error}")
        return False
    if loaded.info.get("link") not in run.before(step):
        tell(f"skipped: the checkpoint before step {step} in {url} does not belong to the history of {run.name}")
        return False
    return True


# -- whether a replay is possible


def _script_of(report: Mapping[str, Any], script: Path | None, *, trusted: bool, tell: Tell) -> Path:
    """Return the script to run: ``script``, or else the run's own script if it is unchanged.

    A report may come from an untrusted source, and its sha256 proves nothing about the script that it names: unless the
    report is ``trusted``, this user must have run the script here with these arguments.

    Raises:
        ConfigError: if the script is missing or changed, or this user has not run it here.
    """
    job = report["job"]
    if script is not None:
        if not script.is_file():
            raise ConfigError(f"--script must be a file, and there is no {str(script)!r}")
        if _sha256(script) != job["sha256"]:
            tell(f"{script} is not the script of the run: its sha256 differs")
        return script
    from holdfast.launch.provenance import is_noted

    path = Path(job["path"])
    if not path.is_file():
        raise ConfigError(f"the script {path} no longer exists; give its new path with --script")
    if _sha256(path) != job["sha256"]:
        what = "restore it, or name the script to run with --script"
        raise ConfigError(f"{path} was changed since the run; {what}")
    if not (trusted or (path.is_absolute() and is_noted(job))):
        what = clean(shlex.join([str(path.absolute()), *job["args"]]))
        raise ConfigError(
            f"the report names a script to run, {what}, which this user has not run here: read it first, then give --script FILE, or --trust"
        )
    return path


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _why_not(report: Mapping[str, Any], start: int, stop: int) -> str:
    """Return why these steps cannot be replayed on one process, or ""."""
    disturbed = report["failures"] or report["left"] or report["joined"]
    if not _is_reproducible(report.get("job")):
        return "its report does not describe the job: it is incomplete, or was altered"
    if report["lost"]:
        return "forward continued without samples that were lost, so its bits depend on the time of failures"
    if report.get("restored"):
        return "parts of the model were restored from older copies, so its bits depend on the time of failures"
    for name, value in (("split", "even"), ("batch", "local")):
        if report[name] == value and disturbed:
            return f"with --{name} {value}, the mini-batches depend on which workers were alive"
    for change in report["changed"]:
        if change["name"] in ("lr", "batch_size") and start <= change["step"] <= stop:
            where = f"--to {change['step'] - 1} ends before the change, --from a later step begins after it if its state was saved"
            return f"{change['name']} was changed before step {change['step']} of the running job; {where}"
    return ""


def _is_reproducible(job: Any) -> bool:
    kinds = {"path": str, "sha256": str, "threads": str, "args": list, "settings": dict}
    if not (isinstance(job, dict) and all(isinstance(job.get(name), kind) for name, kind in kinds.items())):
        return False
    return all(isinstance(word, str) for word in job["args"])


def _other_kind(run: CertifiedSteps, again: CertifiedSteps) -> str:
    """Return how the platform of a replay differs from that of the run, if that changes bits; or ""."""
    from holdfast.state.platform import between

    if not run.started.platform:
        return ""
    odd = between(again.started.platform, run.started.platform, worker="this machine has", others="the run")
    return "" if odd is None else odd.what


def load_job(directory: Path) -> dict[str, Any]:
    """Return the report of a run; raise a ConfigError if it is none, or the script used ``torch.distributed``."""
    from holdfast.observe.report_text import is_distributed
    from holdfast.summary.files import load_report

    report = load_report(directory)
    if is_distributed(report):
        raise ConfigError(f"{directory} is a run of torch.distributed, whose steps have no certificate")
    return report
