"""Findings as lines of text: one per check, with advice if something changes bits. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.tools.doctor.findings import Findings, ScriptFindings, blame

OK = "ok"
HELD = "held"
"""Would change bits, but Holdfast controls it."""
CHANGES = "changes bits"
MISSING = "missing"

_NAMED = 6
_LEAST_SHM_BYTES = 64 << 20
_LEAST_FILES = 1024
_GENERATORS = {"torch": "torch", "numpy": "NumPy", "python": "Python"}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A line of the report.

    Args:
        name: Name of the check.
        verdict: One of :data:`OK`, :data:`HELD`, :data:`CHANGES`, :data:`MISSING`.
        what: The finding.
        advice: Advice, or "".
    """

    name: str
    verdict: str
    what: str
    advice: str = ""


def is_exact(checks: Sequence[CheckResult]) -> bool:
    """Return whether nothing changes bits that Holdfast does not control."""
    return not any(check.verdict == CHANGES for check in checks)


def checks_of(full: Mapping[str, Any], brief: Mapping[str, Any]) -> list[CheckResult]:
    """Return the results of all checks, from the full and the brief process."""
    if "seen" in full:
        checks = _script(ScriptFindings.from_json(full["seen"]), ScriptFindings.from_json(brief["seen"]))
    else:
        checks = _layers(*([Findings.from_json(layer) for layer in side["layers"]] for side in (full, brief)))
    return [*_machine(full["machine"]), *checks]


# -- the machine


def _machine(facts: Mapping[str, Any]) -> list[CheckResult]:
    kind, versions = facts["kind"], facts["versions"]
    threads = int(kind["threads"])
    libraries = ", ".join(name for name, there in facts["libraries"].items() if there) or "neither MKL nor oneDNN"
    lines = [
        CheckResult("CPU", OK, f"{kind['cpu']}, {kind['capability']}, {facts['cpus']} CPUs; {libraries}"),
        CheckResult("GPU", OK, ", ".join(facts["gpus"]) or "none"),
        *_on_gpu(kind),
        CheckResult("versions", OK, ", ".join(f"{name} {version}" for name, version in versions.items())),
        CheckResult("worker", HELD, f"{threads} {'thread' if threads == 1 else 'threads'}, the same for all workers"),
        CheckResult("flags", OK, f"{kind['flags']}; kernels {kind['kernels']}"),
        *_variables(facts["variables"], threads),
        *_fabrics(facts["fabrics"]),
    ]
    room = f"{facts['shm_bytes'] / 1e9:.1f} GB of shared memory (/dev/shm)"
    little = "give the container more (--shm-size): Open MPI's workers communicate through it"
    is_enough = facts["shm_bytes"] >= _LEAST_SHM_BYTES
    lines.append(CheckResult("memory", OK, room) if is_enough else CheckResult("memory", MISSING, room, little))
    if 0 <= facts["open_files"] < _LEAST_FILES:
        few = f"{facts['open_files']} open files per process"
        lines.append(CheckResult("limits", MISSING, few, f"ulimit -n {_LEAST_FILES}"))
    return lines


def _on_gpu(kind: Mapping[str, str]) -> list[CheckResult]:
    """Return what the settings promise on a GPU, if one was checked; a difference that is found is reported apart."""
    if "promise" not in kind:
        return []
    name, _, why = kind["promise"].partition(": ")
    what = f"{kind['gpu']}; driver {kind['gpu_driver'] or 'unknown'}; {kind['gpu_libraries']}"
    lines = [CheckResult("GPU checked", OK, what), CheckResult("GPU flags", OK, kind["gpu_flags"])]
    return [
        *lines,
        CheckResult("promise", MISSING, f"{name}, not reproducible", why) if why else CheckResult("promise", OK, name),
    ]


def _variables(variables: Mapping[str, str], threads: int) -> list[CheckResult]:
    text = ", ".join(f"{name}={value}" for name, value in variables.items() if name != "OMP_NUM_THREADS")
    lines = [CheckResult("environment", HELD if text else OK, text or "no variable is set that kernels read")]
    if threads > 1 and variables.get("OMP_DYNAMIC", "").lower() in ("true", "1"):
        what = "OMP_DYNAMIC allows OpenMP to use fewer threads"
        lines.append(CheckResult("threads", CHANGES, what, "set OMP_DYNAMIC=false"))
    return lines


def _fabrics(fabrics: Mapping[str, Any]) -> list[CheckResult]:
    mpi = fabrics["ulfm"]
    what, _, advice = fabrics["no ulfm"].rpartition(": ")
    no_mpi = CheckResult("ulfm", MISSING, what, advice)
    no_gloo = CheckResult("gloo", MISSING, "not built into this torch", "use --fabric ulfm")
    return [
        CheckResult("ulfm", OK, f"Open MPI {mpi}") if mpi else no_mpi,
        CheckResult("gloo", OK, "built into this torch") if fabrics["gloo"] else no_gloo,
    ]


# -- common layers


def _layers(full: Sequence[Findings], brief: Sequence[Findings]) -> list[CheckResult]:
    digests = {layer.name: layer.digests for layer in brief}
    again = [layer.name for layer in full if layer.again]
    elsewhere = [layer.name for layer in full if not layer.again and layer.digests != digests.get(layer.name)]
    choose = "their kernels are not deterministic: use other layers"
    look = "check environment variables that libraries read"
    return [
        _names("again", again, f"{len(full)} common layers, three times each", choose),
        _names("elsewhere", elsewhere, "the same in another process", look),
        *_circumstances(full),
        *_errors(full),
    ]


def _names(name: str, broken: Sequence[str], fine: str, advice: str) -> CheckResult:
    if not broken:
        return CheckResult(name, OK, fine)
    return CheckResult(name, CHANGES, f"different bits: {_some(broken)}", advice)


def _circumstances(layers: Sequence[Findings]) -> list[CheckResult]:
    """Return the findings about threads, memory and batch neighbours, all of which Holdfast keeps constant."""
    threads = [layer.name for layer in layers if layer.threads]
    memory = [layer.name for layer in layers if layer.memory]
    batch_layers = [layer for layer in layers if layer.together is not None]
    parts = [layer.name for layer in batch_layers if layer.together]
    complaints = [layer for layer in layers if layer.complaint]
    odd, beside = "misaligned inputs:", f"computed with other samples, {len(batch_layers)} layers:"
    names = _some([layer.name for layer in complaints])
    return [
        _held("threads", threads, "another number, different bits", "any number, the same bits"),
        _held("alignment", memory, f"{odd} different bits", f"{odd} the same bits"),
        _held("together", parts, f"{beside} different bits", f"{beside} the same bits"),
        CheckResult("torch says", HELD, f"not deterministic: {names}: {complaints[0].complaint}")
        if complaints
        else CheckResult("torch says", OK, "use_deterministic_algorithms(True) names none"),
    ]


def _held(name: str, broken: Sequence[str], what: str, fine: str) -> CheckResult:
    return CheckResult(name, HELD, f"{what}: {_some(broken)}") if broken else CheckResult(name, OK, fine)


def _errors(layers: Sequence[Findings]) -> list[CheckResult]:
    failed = [f"{layer.name} ({layer.error})" for layer in layers if layer.error]
    return [CheckResult("not checked", MISSING, _some(failed))] if failed else []


# -- a script's model

_DRAWS = "use the global generators of torch, NumPy or Python, which Holdfast seeds for each slice"
_ORDERS = "sort the elements of sets, or set PYTHONHASHSEED; seed random values that are created before training"


def _script(seen: ScriptFindings, other: ScriptFindings) -> list[CheckResult]:
    what = f"{seen.parameters:,} parameters in {len(seen.layers)} layers; a slice of {seen.samples} samples"
    return [
        CheckResult("model", OK, what),
        *_initial_state(seen, other),
        _step_again(seen),
        *([] if seen.step.again else [_step_elsewhere(seen, other), _step_threads(seen)]),
        _alignment(seen, other),
        *_circumstances(seen.layers)[2:],
        *_errors(seen.layers),
        _randomness(seen),
    ]


def _initial_state(seen: ScriptFindings, other: ScriptFindings) -> list[CheckResult]:
    samples = seen.samples_digest == other.samples_digest
    lines = [CheckResult("weights", OK, "initialized equally in another process")]
    if seen.weights != other.weights:
        what = "initialized differently in another process: two runs do not start from the same weights"
        lines = [CheckResult("weights", CHANGES, what, "call torch.manual_seed(...) before the model is created")]
    if seen.dataset_again:
        what = "have different bits when they are fetched again"
        lines.append(CheckResult("samples", CHANGES, what, f"in the dataset, {_DRAWS}"))
    elif not samples:
        what = "differ in another process: workers would not have the same dataset"
        advice = "seed the creation of the dataset, and " + _ORDERS.partition(";")[0]
        lines.append(CheckResult("samples", CHANGES, what, advice))
    else:
        lines.append(CheckResult("samples", OK, "the same when fetched again, and in another process"))
    return lines


def _step_again(seen: ScriptFindings) -> CheckResult:
    broken = [layer for layer in seen.layers if layer.again]
    if not (seen.step.again or broken):
        return CheckResult("step", OK, "computed again: loss and gradients have the same bits")
    if not broken:
        what = f"computed again: different bits in {_some(seen.step.again)}, but in no single layer"
        advice = f"check the loss, and the training loop around the model: {_DRAWS}"
        return CheckResult("step", CHANGES, what, advice)
    first = broken[0]
    advice = f"torch says: {first.complaint}" if first.complaint else _DRAWS
    what = f"computed again: different bits in {_some([layer.name for layer in broken])} ({_some(first.again)})"
    return CheckResult("step", CHANGES, what, f"{advice}; or its kernel is not deterministic: use another layer")


def _step_elsewhere(seen: ScriptFindings, other: ScriptFindings) -> CheckResult:
    if seen.step.digests == other.step.digests:
        return CheckResult("elsewhere", OK, "the step has the same bits in another process")
    where = (
        blame(seen.layers, other.layers) or "in no single layer: check the loss, and the training loop around the model"
    )
    return CheckResult("elsewhere", CHANGES, f"the step has different bits in another process: {where}", _ORDERS)


def _alignment(seen: ScriptFindings, other: ScriptFindings) -> CheckResult:
    """Return whether layers that compute different bits from misaligned tensors are given such tensors."""
    odd = sorted({*seen.misaligned, *other.misaligned})
    usual = _circumstances(seen.layers)[1]
    if not odd or usual.verdict == OK:
        return usual
    what = f"{usual.what}; {' and '.join(odd)} are misaligned"
    advice = "copy them with .clone() where they are created"
    return CheckResult(usual.name, CHANGES, what, advice)


def _step_threads(seen: ScriptFindings) -> CheckResult:
    broken = [layer.name for layer in seen.layers if layer.threads]
    if not (seen.step.threads or broken):
        return CheckResult("threads", OK, "any number, the same bits")
    where = _some(broken) if broken else "in no single layer: check the loss, and the training loop around the model"
    return CheckResult("threads", HELD, f"another number, different bits: {where}")


def _randomness(seen: ScriptFindings) -> CheckResult:
    drawn = {
        source: _some([_GENERATORS.get(name, name) for name in names]) for source, names in seen.draws.items() if names
    }
    clauses = [f"the {source} draws from {generators}" for source, generators in drawn.items()]
    return CheckResult(
        "randomness", OK, f"{'; '.join(clauses)}: seeded for each slice" if clauses else "no generator is used"
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def lines_of(checks: Sequence[CheckResult]) -> list[str]:
    """Return the checks as lines, each with its advice below, and the verdict last."""
    wide, name_wide = max(len(check.verdict) for check in checks), max(len(check.name) for check in checks)
    lines: list[str] = []
    for check in checks:
        lines.append(f"{check.verdict:<{wide}}  {check.name:<{name_wide}}  {check.what}")
        if check.advice:
            lines.append(f"{'':<{wide}}  {'':<{name_wide}}  -> {check.advice}")
    broken = [check.name for check in checks if check.verdict == CHANGES]
    return [*lines, f"not exact: {', '.join(broken)}" if broken else "exact, with the settings of Holdfast"]
