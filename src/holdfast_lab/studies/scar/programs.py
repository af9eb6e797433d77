"""The programs of the study of partial recovery: on which data, for how long, and with which policies."""

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
    Policy,
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
class Entry:
    """A program of the study, and how it is run.

    Args:
        program: One of :data:`holdfast_lab.workloads.iterative.PROGRAMS`.
        title: In rows and on the page; "": the program's name.
        from_files: Whether its data are read from files.
        every: C.
        window: Of the trailing mean of its loss.
        iterations: Of the pilot.
        fractions: Of partial saves that are compared.
        has_rate: Whether its learning rate is swept.
        fails_often: Whether several failures in one run are tried.
        perturbed: How many perturbations its iteration cost is measured of; 0: none.
        options: Of :func:`~holdfast_lab.workloads.iterative.make_program`.
        by_request: Whether it is left out unless it is asked for: it would not fit into the hour.
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
        """Return what it is called."""
        return self.title or self.program


ITEMS_FIRST = "items first"
"""How a factorisation is called whose live factor is that of the users: there are fewer of them, so it takes less to save."""
_FEW: dict[str, Any] = {"fractions": (LEAST,)}
_ALS: dict[str, Any] = {"every": 8, "window": 1, "iterations": 32, "has_rate": False}
_LDA: dict[str, Any] = {"every": 8, "window": 4, "iterations": 64, "has_rate": False}
ENTRIES = (
    Entry(program="mlr-covertype", from_files=True, fails_often=True, options=(("evaluated", 1000),)),
    Entry(program="mlr-reuters", from_files=True, window=16, options=(("evaluated", 500),)),
    Entry(program="mlr-digits", fails_often=True, perturbed=300, options=(("evaluated", 1000),)),
    Entry(program="mlr-fashion", from_files=True, options=(("evaluated", 500),)),
    Entry(program="mlp-adam-digits", fails_often=True, **_FEW),
    Entry(program="mlp-momentum-digits", **_FEW),
    Entry(program="cnn-adam-digits", iterations=96, **_FEW),
    Entry(program="cnn-momentum-digits", iterations=96, **_FEW),
    Entry(program="als-movielens", from_files=True, **_ALS, **_FEW),
    Entry(
        program="als-movielens",
        title=f"als-movielens, {ITEMS_FIRST}",
        from_files=True,
        options=(("first", "items"),),
        **_ALS,
        **_FEW,
    ),
    Entry(program="als-ratings", **_ALS),
    Entry(program="lda-reuters", from_files=True, **_LDA),
    Entry(program="lda-documents", **_LDA),
    Entry(program="quadratic", window=1, has_rate=False, perturbed=20_000),
    Entry(program="quadratic-diagonal", window=1, has_rate=False, perturbed=20_000),
    Entry(program="gpt-adam", from_files=True, by_request=True, **_FEW),
    Entry(
        program="cnn-adam-digits",
        title="cnn-adam-digits by layer",
        options=(("blocks", "layers"),),
        by_request=True,
        **_FEW,
    ),
    Entry(
        program="mlp-adam-digits",
        title="mlp-adam-digits by layer",
        options=(("blocks", "layers"),),
        by_request=True,
        **_FEW,
    ),
)
"""Every program of the study."""
REPLACED = {"als-ratings": "als-movielens", "lda-documents": "lda-reuters"}
"""Programs on data that are made, which are run where there are no files for the others."""
NOT_READ = (
    "Data of the paper that no program here reads: MNIST (digits of scikit-learn and Fashion-MNIST instead), Jester (MovieLens alone), "
    "20 Newsgroups (Reuters alone)."
)
"""What is always left out."""


def make(name: str, data: Path | None, options: Sequence[tuple[str, Any]], seed: int, **more: Any) -> Program:
    """Return a program of the study; of the top level, so that another process can be told to call it."""
    return make_program(name, data, seed, **dict(options), **more)


def policies_of(which: str, fractions: Sequence[float], program: Program) -> list[Policy]:
    """Return what is compared.

    Args:
        which: ``whole``: all; ``few``: those that a system may choose from, beside the traditional ones; ``several``:
            those of the runs with several failures; ``quick``.
        fractions: Of partial saves.
        program: That it is for.
    """
    further = further_policies(program, program.start())
    if which == "whole":
        return [*paper_policies(fractions), *controls(), *bounds(), *further]
    if which == "quick":
        return [policy for policy in paper_policies((LEAST,)) if policy.nodes == HALF]
    partial_recovery = Policy(name=PARTIAL)
    if which == "several":
        return [traditional(), partial_recovery, scar(), *(policy for policy in further if policy.name == LINE_INT8)]
    return [traditional(), partial_recovery, scar(), *candidates(further)]
