"""The programs of the partial recovery study: their data, run lengths and policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast_lab.studies.scar.policies import (
    HALF,
    LEAST,
    LINE_INT8,
    PARTIAL,
    ScarPolicy,
    bounds,
    candidates,
    controls,
    further_policies,
    paper_policies,
    scar,
    traditional,
)
from holdfast_lab.workloads.iterative import Program, make_program


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEntry:
    """A program of the study and its settings.

    Args:
        program: One of :data:`holdfast_lab.workloads.iterative.PROGRAMS`.
        title: Its name in rows and on the page; "": the program's name.
        from_files: Whether its data are read from files.
        every: C, iterations per full save.
        window: Window of the trailing mean of its loss in iterations.
        iterations: Iterations of the pilot run.
        fractions: Values of r for partial saves.
        has_rate: Whether its learning rate is swept.
        fails_often: Whether several failures in one run are tried.
        perturbed: Number of perturbations to measure the iteration cost of; 0: none.
        options: Options of :func:`~holdfast_lab.workloads.iterative.make_program`.
        by_request: Whether it runs only with ``--only``, because the study is meant to take about an hour.
    """

    program: str
    title: str = ""
    from_files: bool = False
    every: int = 16
    window: int = 8
    iterations: int = 128
    fractions: tuple[float, ...] = (1 / 2, 1 / 4, 1 / 8)
    has_rate: bool = True
    fails_often: bool = False
    perturbed: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    by_request: bool = False

    @property
    def name(self) -> str:
        """Return its name in rows and on the page."""
        return self.title or self.program


ITEMS_FIRST = "items first"
"""Marks a factorisation whose live factor is that of the users; there are fewer users, so it is cheaper to save."""
_FEW: dict[str, Any] = {"fractions": (LEAST,)}
_ALS: dict[str, Any] = {"every": 8, "window": 1, "iterations": 32, "has_rate": False}
_LDA: dict[str, Any] = {"every": 8, "window": 4, "iterations": 64, "has_rate": False}
ENTRIES = (
    ProgramEntry(program="mlr-covertype", from_files=True, fails_often=True, options=(("evaluated", 1000),)),
    ProgramEntry(program="mlr-reuters", from_files=True, window=16, options=(("evaluated", 500),)),
    ProgramEntry(program="mlr-digits", fails_often=True, perturbed=300, options=(("evaluated", 1000),)),
    ProgramEntry(program="mlr-fashion", from_files=True, options=(("evaluated", 500),)),
    ProgramEntry(program="mlp-adam-digits", fails_often=True, **_FEW),
    ProgramEntry(program="mlp-momentum-digits", **_FEW),
    ProgramEntry(program="cnn-adam-digits", iterations=96, **_FEW),
    ProgramEntry(program="cnn-momentum-digits", iterations=96, **_FEW),
    ProgramEntry(program="als-movielens", from_files=True, **_ALS, **_FEW),
    ProgramEntry(
        program="als-movielens",
        title=f"als-movielens, {ITEMS_FIRST}",
        from_files=True,
        options=(("first", "items"),),
        **_ALS,
        **_FEW,
    ),
    ProgramEntry(program="als-ratings", **_ALS),
    ProgramEntry(program="lda-reuters", from_files=True, **_LDA),
    ProgramEntry(program="lda-documents", **_LDA),
    ProgramEntry(program="quadratic", window=1, has_rate=False, perturbed=20_000),
    ProgramEntry(program="quadratic-diagonal", window=1, has_rate=False, perturbed=20_000),
    ProgramEntry(program="gpt-adam", from_files=True, by_request=True, **_FEW),
    ProgramEntry(
        program="cnn-adam-digits",
        title="cnn-adam-digits by layer",
        options=(("blocks", "layers"),),
        by_request=True,
        **_FEW,
    ),
    ProgramEntry(
        program="mlp-adam-digits",
        title="mlp-adam-digits by layer",
        options=(("blocks", "layers"),),
        by_request=True,
        **_FEW,
    ),
)
"""Every program of the study."""
REPLACED = {"als-ratings": "als-movielens", "lda-documents": "lda-reuters"}
"""Programs on synthetic data, and the programs on real data that they stand in for without ``--data``."""
NOT_READ = (
    "Data of the paper that no program here uses: MNIST (scikit-learn digits and Fashion-MNIST instead), Jester (only "
    "MovieLens), 20 Newsgroups (only Reuters)."
)
"""What no run of the study covers."""


def make(name: str, data: Path | None, options: Sequence[tuple[str, Any]], seed: int, **more: Any) -> Program:
    """Return a program of the study; a top-level function, so that it can be pickled for another process."""
    return make_program(name, data, seed, **dict(options), **more)


def policies_of(which: str, fractions: Sequence[float], program: Program) -> list[ScarPolicy]:
    """Return the policies to compare.

    Args:
        which: ``whole``: all policies; ``few``: those that a real system could use, and the traditional ones;
        ``several``:
            those for runs with several failures; ``quick``: those of ``--quick``.
        fractions: Values of r for partial saves.
        program: The program.
    """
    further = further_policies(program, program.start())
    if which == "whole":
        return [*paper_policies(fractions), *controls(), *bounds(), *further]
    if which == "quick":
        return [policy for policy in paper_policies((LEAST,)) if policy.nodes == HALF]
    partial_recovery = ScarPolicy(name=PARTIAL)
    if which == "several":
        return [traditional(), partial_recovery, scar(), *(policy for policy in further if policy.name == LINE_INT8)]
    return [traditional(), partial_recovery, scar(), *candidates(further)]
