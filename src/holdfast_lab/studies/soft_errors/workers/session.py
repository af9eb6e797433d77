"""The Holdfast session as a platform: one process runs all workers (``--fabric virtual``).

Each altered worker has its own weights.

The guard is off: it would stop the training or heal the injected error, and a healed trial is void. Samples come in the
order of a session; after the restart it is the order of another seed. Buffers are shared by all workers, so only
parameters are altered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import holdfast
from holdfast.errors import InternalError, MessageAltered, ReplicasDiffer
from holdfast.faults.names import chosen
from holdfast.records.types import Record, Recovered
from holdfast.session.session import forget_sessions
from holdfast_lab.studies.soft_errors.setup import MODEL, SoftErrorSetup
from holdfast_lab.studies.soft_errors.workers.platforms import ModelPlatform, options_of
from holdfast_lab.studies.soft_errors.workers.process import (
    Disturbance,
    alter,
    copied,
    digest_of,
    errors_of,
    layers_of,
    seen,
)
from holdfast_lab.studies.soft_errors.workers.state import read_state, write_state
from holdfast_lab.workloads import loss_of, make_model

GUARD = "off"
_TARGETS = {MODEL: "weights"}


class SessionProcess:
    """The whole training.

    Args:
        setup: The training.
        rank: The rank of this process: 0.
        file: The file of the state: loaded if it exists, else written.
    """

    def __init__(self, setup: SoftErrorSetup, rank: int, file: Path) -> None:
        self._setup, self._rank, self._file = setup, rank, file
        self._undisturbed: list[dict[str, Tensor]] = []

    def begin(self) -> list[dict[str, Any]]:
        """Train to the restart epoch unless the state file exists.

        Resume undisturbed and return the results by worker.
        """
        if not self._file.exists():
            training = SessionTraining(self._setup, self._rank, self._setup.training_seed)
            for _ in range(self._setup.restart):
                training.train()
            write_state(training.platform, self._setup.restart, self._file)
        layers = layers_of(SessionTraining(self._setup, self._rank, 0).platform)
        return [
            answer | {"layers": layers, "file": str(self._file)}
            for answer in self.go_on([None] * self._setup.processes)
        ]

    def go_on(self, disturbances: Sequence[Disturbance | None]) -> list[dict[str, Any]]:
        """Load the restart state, alter the workers' states, train to the end, and return the results by worker.

        Raises:
            InternalError: if the session's guard detected the alteration, which voids the trial.
        """
        forget_sessions()  # a session with an unfinished loop would be kept alive
        training = SessionTraining(self._setup, self._rank, self._setup.training_seed + 1)
        read_state(training.platform, self._file)
        told = [training.disturb(rank, what) if what else ([], 0) for rank, what in enumerate(disturbances)]
        begun_with = training.of_each(lambda: digest_of(training.platform))
        losses: list[float] = []
        states: list[dict[int, dict[str, Tensor]]] = []
        for _ in range(self._setup.epochs):
            losses.append(training.train())
            training.check_unguarded()
            is_over = len(losses) == self._setup.epochs or not math.isfinite(losses[-1])  # NaN: the outcome is known
            if len(losses) == 1 or is_over:
                states.append(training.of_each(lambda: copied(training.platform)))
            if is_over:
                break
        if not self._undisturbed:
            self._undisturbed = [state[0] for state in states]
        found = training.of_each(lambda: seen(training.platform, losses))
        return [
            {"flips": flips, "flipped": count, "begun_with": begun_with[rank], **found[rank]}
            | errors_of([state[rank] for state in states], self._undisturbed)
            for rank, (flips, count) in enumerate(told)
        ]


class _Recoveries:
    """Collects the recoveries among a session's records; no worker fails here, so each is the guard's."""

    def __init__(self) -> None:
        self.recovered: list[Recovered] = []

    def write(self, record: Record) -> None:
        """Keep the record if it is a recovery."""
        if isinstance(record, Recovered):
            self.recovered.append(record)


class SessionTraining:
    """A session of virtual workers.

    Args:
        setup: The training.
        rank: The rank of this process.
        seed: The seed of the session.
    """

    def __init__(self, setup: SoftErrorSetup, rank: int, seed: int) -> None:
        self._setup = setup
        self.platform = ModelPlatform(setup, rank, make_model(setup.network, **options_of(setup)))
        self._workers = tuple(range(setup.processes))
        self._session = holdfast.Session(
            self.platform.module,
            self.platform.optimizer,
            fabric="virtual",
            workers=setup.processes,
            guard=GUARD,
            seed=seed,
        )
        self._trainable: Any = self._session._trainable  # no public interface gives each virtual worker's state
        self._records = _Recoveries()
        self._session._connect().log.subscribe(self._records)  # nor the records of a session without a run directory

    def train(self) -> float:
        """Train an epoch, and return the mean loss.

        Raises:
            InternalError: if the guard stopped the training.
        """
        try:
            return self._train()
        except (ReplicasDiffer, MessageAltered) as error:
            raise InternalError(
                f"a trial is void: the session's guard stopped the training ({error}); it must be off"
            ) from error

    def check_unguarded(self) -> None:
        """Check that the guard has not healed the alteration.

        Raises:
            InternalError: if it has.
        """
        if healed := self._records.recovered:
            raise InternalError(
                f"a trial is void: the session's guard healed the alteration in step {healed[0].step}; it must be off"
            )

    def _train(self) -> float:
        platform = self.platform
        platform.module.train()
        losses = []
        for step in self._session.steps(platform.data.train, self._setup.batch, drop_last=True):
            for x, y in step:
                loss = loss_of(platform.module(x.to(platform.dtype)), y)
                losses.append(float(loss.detach()))
                step.backward(loss)
        mean = sum(losses) / len(losses)
        platform.scheduler.step(mean)
        return mean

    def disturb(self, rank: int, disturbance: Disturbance) -> tuple[list[dict[str, Any]], int]:
        """Alter one worker's state, which is kept separate from then on; return the result of :func:`alter`."""
        target = disturbance.target
        there: dict[str, Tensor] = self._trainable.tensors_of(_TARGETS.get(target, target), rank, self._workers)
        named = {f"{target}/{name}": there[name] for name in sorted(there) if there[name].is_floating_point()}
        assert disturbance.how is not None
        flips, count = alter(chosen(named, disturbance.at), disturbance.how, disturbance.format)
        self._trainable.rest(self._workers)
        return flips, count

    def of_each(self, look: Callable[[], Any]) -> dict[int, Any]:
        """Return, by worker, the value of ``look`` while that worker's state is loaded in the model."""
        with torch.no_grad():
            found: dict[int, Any] = self._trainable.own.of_each(self._workers, look)
        return found
