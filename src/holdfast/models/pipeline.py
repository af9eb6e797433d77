"""A pipeline-parallel model: workers hold stages, and a slice passes through those of several workers."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from holdfast.comm import Communicator
from holdfast.config import Settings
from holdfast.data.plan import MiniBatch
from holdfast.errors import CheckpointError, ConfigError
from holdfast.integrity.hash_chain import in_order
from holdfast.models.factories import PartFactories
from holdfast.models.flat_params import check_in_host, in_row
from holdfast.models.model_parallel import ModelParallel, shape_of
from holdfast.models.pipeline_scaler import PipelineScaler, ScaledStage
from holdfast.models.specs import Pipeline
from holdfast.models.stages import StageRunner, chain_of
from holdfast.models.trainable import Reach, StepContext
from holdfast.models.training_state import model_sha256
from holdfast.recovery.registry import strategy_class
from holdfast.recovery.strategy import PIPELINE
from holdfast.state.transfer import receive_part, send_part


class PipelineModel(ModelParallel):
    """The stages of a pipeline on this worker; ``clip_grad_norm`` limits the norm of the norms of all stages."""

    kind = PIPELINE
    has_stages = True
    num_buckets = 0
    size_bytes = 64
    device = torch.device("cpu")

    def __init__(
        self, model: Pipeline, factories: PartFactories, scaler: Any, clip_grad_norm: float | None, settings: Settings
    ) -> None:
        strategy_class(settings.strategy).check(self.kind)
        model.check_devices()
        self.given = model
        self._factories = factories
        self._clip_grad_norm = clip_grad_norm
        self._settings = settings
        self._rows: dict[int, torch.Tensor] = {}
        self._scaling = None if scaler is None else PipelineScaler(scaler)
        shape = shape_of(model.parts, max(1, settings.workers // model.parts), settings)
        super().__init__(shape, self._build, self._drop, scaler)
        self.numel = 0
        """Number of elements in the parameters of all stages."""

    def _build(self, part: int) -> ScaledStage:
        module = self.given.build(part, self._settings.seed)
        if not any(p.requires_grad for p in module.parameters()):
            raise ConfigError(
                f"stage {part} of the Pipeline has no trainable parameters: merge it into a stage that has some"
            )
        if self.sends_copies:  # delta standbys need flattened parameters
            check_in_host(next(module.parameters()).device)
            self._rows[part] = in_row(list(module.parameters()))
        stage = self._factories.part(
            ScaledStage,
            "stage",
            module,
            clip_grad_norm=self._clip_grad_norm,
            checked=self._settings.guard_sums,
            prefix=self.prefix(part),
        )
        stage.scaling = self._scaling
        return stage

    def _drop(self, part: int) -> None:
        self._rows.pop(part, None)

    def prefix(self, part: int) -> str:
        return f"{part}."

    def _sha256s_now(self) -> tuple[str, str]:
        """See :meth:`ModelParallel._sha256s_now`; a holder of a part uses its own."""
        of_parts = "".join(sha256 for _, sha256 in sorted(self.resident.sha256s().items()))
        return model_sha256(self._whole), hashlib.sha256(of_parts.encode()).hexdigest()

    def initial_part(self, part: int) -> dict[str, Any] | None:
        return self._build(part).state_dict()

    def _row_of(self, part: int) -> torch.Tensor:
        return self._rows[part]

    def begin_loop(self, context: StepContext) -> StageRunner:
        self._connect(context)
        self.stages = StageRunner(context, self, self.given, self._scaling, clips=self._clip_grad_norm is not None)
        return self.stages

    # -- the size of the complete model: each worker only knows its own stages, so all exchange sizes at the start

    def make_equal(self, comm: Communicator) -> None:
        super().make_equal(comm)
        self._count(comm)

    def load_state_dict(self, state: dict[str, Any], *, keeps: bool = False) -> None:
        """See :meth:`ModelParallel.load_state_dict`; a collective if the state has parts."""
        super().load_state_dict(state, keeps=keeps)
        if "parts" in state:
            self._count(self._comm)

    def shared_state(self) -> dict[str, Any]:
        return super().shared_state() | {"stages": self.given.parts}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        super().load_shared_state(state)
        if state["stages"] != self.given.parts:
            raise CheckpointError(
                f"the checkpoint holds {state['stages']} stages, this Pipeline has {self.given.parts}: use as many"
            )

    def _count(self, comm: Communicator) -> None:
        held = self.resident.held
        self.numel = sum(comm.maximum([held[n].numel if n in held else 0 for n in range(self.given.parts)]))

    def placement(self) -> Any:
        """Return the placement of the parts, and the size of the complete model, as plain JSON."""
        return [self.numel, super().placement()]

    def adopt_placement(self, placement: Any) -> None:
        self.numel, of_parts = placement
        super().adopt_placement(of_parts)

    # -- a step

    def slices(self, batch: MiniBatch, here: Sequence[int]) -> list[int]:
        """Return the slices of which workers ``here`` compute some stage."""
        placement = self.resident.now
        return [n for n in sorted(batch.owners) if set(chain_of(placement, batch, n)) & set(here)]

    def begin_step(self, reach: Reach) -> None:
        """See :meth:`Trainable.begin_step`; messages between stages belong to the forward pass."""
        for part in self.resident.held.values():
            part.begin()
        self._remember_registered()
        self.stages.begin_messages()
        self.exchange_backups(self.stages.mailbox)

    def discard_step(self) -> None:
        for part in self.resident.held.values():
            part.discard()
        self._take_back_registered()

    def take_notes(self) -> tuple[str, ...]:
        held = self.resident.held.values()
        return tuple(note for stage in held for note in stage.buckets.buffers.take_notes())

    def figures(self) -> list[float]:
        return in_order(self.stages.metrics)

    def apply(self, batch: MiniBatch, names: Sequence[str]) -> dict[str, float]:
        for part in self.resident.held.values():
            part.apply(batch, (), self.stages.metrics)
        if self._scaling is not None:
            devices = [part.device for part in self.resident.held.values()]  # none on a spare
            self._scaling.update(devices[0] if devices else self.device)
        return self.stages.metrics

    def computing(self, batch: MiniBatch, lost: Collection[int]) -> set[int]:
        """Return the workers that compute a stage of some slice; no slice is ever lost."""
        placement = self.resident.now
        return {rank for number in batch.owners for rank in chain_of(placement, batch, number)}

    def finish(self) -> None:
        comm, placement = self._comm, self.resident.now
        own = self.resident.sha256s()
        parts, sha256s = [], []
        for part in range(self.given.parts):
            giver = placement.holders(part)[0]
            takers = [rank for rank in comm.members if rank not in placement.holders(part)]
            if giver in comm.local_ranks:
                state: dict[str, Any] = {"part": self.resident.held[part].model_state(), "sha256": own[part]}
                for taker in takers:
                    if taker not in comm.local_ranks:
                        send_part(comm, taker, state)
            if part in self.resident.held:
                parts.append(self.resident.held[part])
                sha256s.append(own[part])
            else:
                state = receive_part(comm, giver)
                made = self._build(part)
                made.load_model_state(state["part"])
                parts.append(made)
                sha256s.append(state["sha256"])
        self.given.module = torch.nn.Sequential(*(part.model for part in parts))
        averages = [part.average.module for part in parts if part.average is not None]
        self.given.averaged = torch.nn.Sequential(*averages) if averages else None
        self._note_sha256s(self.given.module, sha256s)
