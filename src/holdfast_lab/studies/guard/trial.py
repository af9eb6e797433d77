"""Trials of the guard study: one bit flip, without and then with the guard; and long clean training runs."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import InternalError
from holdfast.faults.alteration import Alteration
from holdfast.faults.flip import Flip
from holdfast.faults.plan import FLIP, Fault
from holdfast_lab.studies.base import Row
from holdfast_lab.studies.guard.setup import MESSAGE, GuardCase, GuardSetup, of_settings
from holdfast_lab.studies.guard.workers.training import OFF, GuardResult, State, steps_of, train
from holdfast_lab.studies.outcomes import NAN, RWC, TF, outcome_of

SAMPLED = 0.2
"""Share of the harmless flips that are also tried with the guard."""
GUARD = "heal"


@dataclass(frozen=True, slots=True)
class GuardWarmStart:
    """The warm state that the trials of a cell start from.

    Args:
        setup: The training.
        case: The bit flips.
        begin: The state that training runs continue from.
        undisturbed: The result of the fault-free training.
    """

    setup: GuardSetup
    case: GuardCase
    begin: State
    undisturbed: GuardResult


def prepare(settings: Mapping[str, Any]) -> GuardWarmStart:
    """Return the warm state of a cell; cells of one training share it."""
    setup, case = of_settings(GuardSetup, settings), of_settings(GuardCase, settings)
    begin, undisturbed = _begun(dataclasses.replace(setup, sums=False))
    return GuardWarmStart(setup, case, begin, undisturbed)


@functools.lru_cache(maxsize=1)
def _begun(setup: GuardSetup) -> tuple[State, GuardResult]:
    """Train up to the warm state, and from there once without a fault; without the guard, ``sums`` has no effect."""
    begun = train(setup, OFF, seed=setup.training_seed, epochs=setup.warm)
    _check(begun)
    undisturbed = _trained_on(setup, begun.state, OFF)
    _check(undisturbed)
    return begun.state, undisturbed


def trial(warm: GuardWarmStart, seed: int) -> Row:
    """Inject a flip without the guard; repeat harmful flips, and a random sample of the others, with the guard."""
    rng = random.Random(seed)
    fault = drawn(warm, rng)
    without = _trained_on(warm.setup, warm.begin, OFF, fault)
    outcome = _class(without, warm.undisturbed)
    row: Row = {
        "outcome": outcome,
        "rank": fault.rank,
        "step": fault.step,
        "differs": without.bits != warm.undisturbed.bits,
        "accuracy": without.accuracy,
        "undisturbed": warm.undisturbed.accuracy,
        **_struck(without),
    }
    if without.error:
        row["error"] = without.error
    if outcome != RWC or rng.random() < SAMPLED:
        row |= _guarded(warm, fault)
    return row


def drawn(warm: GuardWarmStart, rng: random.Random) -> Fault:
    """Return a random flip of one bit, in any step, at any worker."""
    setup, case = warm.setup, warm.case
    how = Alteration(count=1, bits=case.bits, seed=rng.getrandbits(62))
    flip = Flip(case.target, how)
    return Fault(
        FLIP,
        rank=rng.randrange(setup.workers),
        step=rng.randrange(setup.epochs * steps_of(setup)),
        phase=flip.phase,
        bucket=0 if case.target == MESSAGE else None,
        flip=flip,
    )


def _trained_on(setup: GuardSetup, begin: State, guard: str, fault: Fault | None = None) -> GuardResult:
    return train(setup, guard, seed=setup.training_seed + 1, epochs=setup.epochs, begin=begin, fault=fault)


def _guarded(warm: GuardWarmStart, fault: Fault) -> Row:
    """Return the result of the same flip with the guard."""
    ended = _trained_on(warm.setup, warm.begin, GUARD, fault)
    found = ended.of("CorruptionFound")
    row: Row = {
        "tried": True,
        "found": bool(found),
        "healed": ended.bits == warm.undisturbed.bits,
        "outcome_guarded": _class(ended, warm.undisturbed),
        "accuracy_guarded": ended.accuracy,
        "redone_steps": sum(record.redone_steps for record in ended.of("Recovered") if record.rank == 0),
    }
    if found:
        row |= {"found_by": found[0].what, "within": found[0].step - fault.step + 1}
    if ended.error:
        row["error_guarded"] = ended.error
    return row


def _struck(ended: GuardResult) -> Row:
    """Return the flipped bit, its tensor, and the value before and after."""
    altered = ended.of("ValuesAltered")
    if not altered:
        raise InternalError("the injected bit flip of a trial did not happen")
    (value,) = altered[0].values
    return {"bit": value["bit"], "path": value["path"], "before": value["before"], "after": value["after"]}


def _class(ended: GuardResult, undisturbed: GuardResult) -> str:
    if ended.error:
        return TF
    return outcome_of(ended.accuracy, undisturbed.accuracy, finite=ended.finite)


def _check(ended: GuardResult) -> None:
    if ended.error or not ended.finite:
        raise InternalError(f"a fault-free training failed: {ended.error or 'its loss is not finite'}")


# -- clean training runs


def prepare_clean(settings: Mapping[str, Any]) -> GuardSetup:
    """Return the training's settings."""
    setup: GuardSetup = of_settings(GuardSetup, settings)
    return setup


def trial_clean(setup: GuardSetup, seed: int) -> Row:
    """Train from new weights with the guard and without a flip; return the false alarms."""
    own = dataclasses.replace(setup, training_seed=seed % 2**31)
    ended = train(own, GUARD, seed=own.training_seed, epochs=setup.epochs)
    found = [
        {"step": record.step, "what": record.what, "where": list(record.where)}
        for record in ended.of("CorruptionFound")
    ]
    return {
        "outcome": TF if ended.error else RWC if ended.finite else NAN,
        "steps": ended.steps,
        "alarms": len(found),
        "found": found,
        "accuracy": ended.accuracy,
        **({"error": ended.error} if ended.error else {}),
    }
