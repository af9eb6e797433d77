"""What was found, in lines for people: one a check, with what to do where something breaks bits. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.doctor.findings import Found, Seen, blame

OK = "ok"
HELD = "held"
"""Would change bits; Holdfast sees to it that it does not."""
CHANGES = "changes bits"
MISSING = "missing"

_NAMED = 6
_LEAST_SHM_BYTES = 64 << 20
_LEAST_FILES = 1024
_GENERATORS = {"torch": "torch", "numpy": "NumPy", "python": "Python"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line.

    Args:
        name: Of what was looked at.
        verdict: One of :data:`OK`, :data:`HELD`, :data:`CHANGES`, :data:`MISSING`.
        what: Was found.
        advice: What to do, "" if nothing.
    """

    name: str
    verdict: str
    what: str
    advice: str = ""


def is_exact(checks: Sequence[Check]) -> bool:
    """Return whether nothing breaks bits that Holdfast does not hold by itself."""
    return not any(check.verdict == CHANGES for check in checks)


def checks_of(full: Mapping[str, Any], brief: Mapping[str, Any]) -> list[Check]:
    """Return what was found by the full process and the brief one beside it."""
    if "seen" in full:
        found = _script(Seen.from_json(full["seen"]), Seen.from_json(brief["seen"]))
    else:
        found = _layers(*([Found.from_json(said) for said in side["layers"]] for side in (full, brief)))
    return [*_machine(full["machine"]), *found]


# -- the machine


def _machine(facts: Mapping[str, Any]) -> list[Check]:
    kind, versions = facts["kind"], facts["versions"]
    threads = int(kind["threads"])
    libraries = [name for name, there in facts["libraries"].items() if there]
    lines = [
        Check(
            name="CPU",
            verdict=OK,
            what=f"{kind['cpu']}, {kind['capability']}, {facts['cpus']} CPUs; {', '.join(libraries) or 'neither MKL nor oneDNN'}",
        ),
        Check(name="GPU", verdict=OK, what=", ".join(facts["gpus"]) or "none"),
        Check(name="versions", verdict=OK, what=", ".join(f"{name} {version}" for name, version in versions.items())),
        Check(
            name="worker", verdict=HELD, what=f"{threads} {'thread' if threads == 1 else 'threads'}, the same for all"
        ),
        Check(name="flags", verdict=OK, what=f"{kind['flags']}; kernels {kind['kernels']}"),
        *_variables(facts["variables"], threads),
        *_fabrics(facts["fabrics"]),
    ]
    room = facts["shm_bytes"]
    little = "give the container more of it (--shm-size): Open MPI's workers talk through it"
    is_enough = room >= _LEAST_SHM_BYTES
    lines.append(
        Check(
            name="memory",
            verdict=OK if is_enough else MISSING,
            what=f"{room / 1e9:.1f} GB to share (/dev/shm)",
            advice="" if is_enough else little,
        )
    )
    if 0 <= facts["open_files"] < _LEAST_FILES:
        few = f"{facts['open_files']} open files a process"
        lines.append(Check(name="limits", verdict=MISSING, what=few, advice=f"ulimit -n {_LEAST_FILES}"))
    return lines


def _variables(given: Mapping[str, str], threads: int) -> list[Check]:
    said = ", ".join(f"{name}={value}" for name, value in given.items() if name != "OMP_NUM_THREADS")
    lines = [Check(name="environment", verdict=HELD if said else OK, what=said or "nothing set that kernels read")]
    if threads > 1 and given.get("OMP_DYNAMIC", "").lower() in ("true", "1"):
        what = "OMP_DYNAMIC lets OpenMP use fewer threads when it likes"
        lines.append(Check(name="threads", verdict=CHANGES, what=what, advice="set OMP_DYNAMIC=false"))
    return lines


def _fabrics(fabrics: Mapping[str, Any]) -> list[Check]:
    mpi, gloo = fabrics["ulfm"], fabrics["gloo"]
    return [
        Check(name="ulfm", verdict=OK, what=f"Open MPI {mpi}")
        if mpi
        else Check(
            name="ulfm",
            verdict=MISSING,
            what="no Open MPI with mpi4py",
            advice="pip install 'holdfast[mpi]', or --fabric gloo",
        ),
        Check(name="gloo", verdict=OK, what="in this torch")
        if gloo
        else Check(name="gloo", verdict=MISSING, what="not in this torch", advice="use --fabric ulfm"),
    ]


# -- the usual layers


def _layers(full: Sequence[Found], brief: Sequence[Found]) -> list[Check]:
    theirs = {layer.name: layer.digests for layer in brief}
    again = [layer.name for layer in full if layer.again]
    elsewhere = [layer.name for layer in full if not layer.again and layer.digests != theirs.get(layer.name)]
    return [
        _names(
            "again",
            again,
            f"{len(full)} usual layers, each three times",
            "the kernels are not deterministic: choose others",
        ),
        _names(
            "elsewhere",
            elsewhere,
            "the same in another process",
            "look for variables of the environment that libraries read",
        ),
        *_circumstances(full),
        *_errors(full),
    ]


def _names(name: str, broken: Sequence[str], fine: str, advice: str) -> Check:
    if not broken:
        return Check(name=name, verdict=OK, what=fine)
    return Check(name=name, verdict=CHANGES, what=f"other bits: {_some(broken)}", advice=advice)


def _circumstances(layers: Sequence[Found]) -> list[Check]:
    """Return what was found about threads, memory and other samples: Holdfast keeps all of these as they are."""
    threads = [layer.name for layer in layers if layer.threads]
    memory = [layer.name for layer in layers if layer.memory]
    known = [layer for layer in layers if layer.together is not None]
    parts = [layer.name for layer in known if layer.together]
    complaints = [layer for layer in layers if layer.complaint]
    return [
        Check(
            name="threads",
            verdict=HELD if threads else OK,
            what=f"another number, other bits: {_some(threads)}" if threads else "any number, the same bits",
        ),
        Check(
            name="alignment",
            verdict=HELD if memory else OK,
            what=f"at an odd place, other bits: {_some(memory)}" if memory else "at an odd place, the same bits",
        ),
        Check(
            name="together",
            verdict=HELD if parts else OK,
            what=f"samples beside others, of {len(known)} layers: "
            + (f"other bits: {_some(parts)}" if parts else "the same bits"),
        ),
        Check(
            name="torch says",
            verdict=HELD if complaints else OK,
            what=f"not deterministic: {_some([layer.name for layer in complaints])}: {complaints[0].complaint}"
            if complaints
            else "use_deterministic_algorithms(True) names none",
        ),
    ]


def _errors(layers: Sequence[Found]) -> list[Check]:
    failed = [f"{layer.name} ({layer.error})" for layer in layers if layer.error]
    return [Check(name="not seen", verdict=MISSING, what=_some(failed))] if failed else []


# -- a script's model

_DRAWS = "draw from torch's, NumPy's or Python's global generators: Holdfast seeds them for each slice"
_ORDERS = "sort what comes from a set, or set PYTHONHASHSEED; seed what is made at random before training"


def _script(seen: Seen, other: Seen) -> list[Check]:
    what = f"{seen.parameters:,} parameters in {len(seen.layers)} layers; a slice of {seen.samples} samples"
    return [
        Check(name="model", verdict=OK, what=what),
        *_beginning(seen, other),
        _step_again(seen),
        *([] if seen.step.again else [_step_elsewhere(seen, other), _step_threads(seen)]),
        _alignment(seen, other),
        *_circumstances(seen.layers)[2:],
        *_errors(seen.layers),
        _randomness(seen),
    ]


def _beginning(seen: Seen, other: Seen) -> list[Check]:
    weights, samples = seen.weights == other.weights, seen.samples_digest == other.samples_digest
    lines = [
        Check(name="weights", verdict=OK, what="begin the same in another process")
        if weights
        else Check(
            name="weights",
            verdict=CHANGES,
            what="begin otherwise in another process: two runs do not begin alike",
            advice="torch.manual_seed(...) before the model is made",
        )
    ]
    if seen.dataset_again:
        what = "have other bits when they are fetched again"
        lines.append(Check(name="samples", verdict=CHANGES, what=what, advice=f"in the dataset, {_DRAWS}"))
    elif not samples:
        what = "are others in another process: workers would not have the same dataset"
        advice = "seed what the dataset is made from, and " + _ORDERS.partition(";")[0]
        lines.append(Check(name="samples", verdict=CHANGES, what=what, advice=advice))
    else:
        lines.append(Check(name="samples", verdict=OK, what="the same when fetched again, and in another process"))
    return lines


def _step_again(seen: Seen) -> Check:
    broken = [layer for layer in seen.layers if layer.again]
    if not (seen.step.again or broken):
        return Check(name="step", verdict=OK, what="computed again: loss and gradients have the same bits")
    if not broken:
        what = f"computed again: other bits in {_some(seen.step.again)}, and in no layer by itself"
        advice = f"look at the loss, and at what the loop does around the model: {_DRAWS}"
        return Check(name="step", verdict=CHANGES, what=what, advice=advice)
    first = broken[0]
    advice = _DRAWS
    if first.complaint:
        advice = f"torch says: {first.complaint}"
    what = f"computed again: other bits in {_some([layer.name for layer in broken])} ({_some(first.again)})"
    return Check(
        name="step", verdict=CHANGES, what=what, advice=f"{advice}; or its kernel is not deterministic: choose another"
    )


def _step_elsewhere(seen: Seen, other: Seen) -> Check:
    if seen.step.digests == other.step.digests:
        return Check(name="elsewhere", verdict=OK, what="the step has the same bits in another process")
    where = blame(seen.layers, other.layers) or "no layer by itself: in the loss, or around the model"
    return Check(
        name="elsewhere", verdict=CHANGES, what=f"the step has other bits in another process: {where}", advice=_ORDERS
    )


def _alignment(seen: Seen, other: Seen) -> Check:
    """Return whether layers that compute otherwise from odd places in memory are given what lies there."""
    odd = sorted({*seen.odd_places, *other.odd_places})
    usual = _circumstances(seen.layers)[1]
    if not odd or usual.verdict == OK:
        return usual
    what = f"{usual.what}; {' and '.join(odd)} lie at such a place"
    advice = "copy them into memory of torch's: .clone(), where they are made"
    return Check(name=usual.name, verdict=CHANGES, what=what, advice=advice)


def _step_threads(seen: Seen) -> Check:
    broken = [layer.name for layer in seen.layers if layer.threads]
    if not (seen.step.threads or broken):
        return Check(name="threads", verdict=OK, what="any number, the same bits")
    where = _some(broken) if broken else "no layer by itself: in the loss, or around the model"
    return Check(name="threads", verdict=HELD, what=f"another number, other bits: {where}")


def _randomness(seen: Seen) -> Check:
    said = [
        f"the {who} draws from {_some([_GENERATORS.get(name, name) for name in names])}"
        for who, names in seen.draws.items()
        if names
    ]
    return Check(
        name="randomness", verdict=OK, what=f"{'; '.join(said)}: seeded for each slice" if said else "none is drawn"
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def lines_of(checks: Sequence[Check], mark: Callable[[str], str] = str) -> list[str]:
    """Return the checks as lines, what to do below what breaks bits, and the verdict last.

    Args:
        checks: What was found.
        mark: Makes a verdict stand out.
    """
    wide, name_wide = max(len(check.verdict) for check in checks), max(len(check.name) for check in checks)
    lines: list[str] = []
    for check in checks:
        lines.append(
            f"{mark(check.verdict)}{' ' * (wide - len(check.verdict))}  {check.name:<{name_wide}}  {check.what}"
        )
        if check.advice:
            lines.append(f"{'':<{wide}}  {'':<{name_wide}}  -> {check.advice}")
    broken = [check.name for check in checks if check.verdict == CHANGES]
    return [*lines, f"not exact: {', '.join(broken)}" if broken else "exact, with what Holdfast sets by itself"]
