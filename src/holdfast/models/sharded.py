"""A sharded model: parameters are spread over workers, each of which computes its slices with all of them.

A step has the same all-reduces, and the same bits, as that of a replicated model. In addition, before it the holder of
a shard lends it to all other workers, and after it only the holders run the optimizer on it. On one host borrowers read
the holder's memory without a copy. Borrowed shards are read-only, and are released when the step ends.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.comm import Communicator, Mailbox
from holdfast.config import Settings
from holdfast.data.plan import MiniBatch
from holdfast.errors import CheckpointError, StateLost
from holdfast.models.factories import PartFactories
from holdfast.models.flat_params import check_in_host, in_row, views
from holdfast.models.model_parallel import ModelParallel, shape_of
from holdfast.models.optimizers import may_write_gradients
from holdfast.models.part import ModelPart
from holdfast.models.slice_runner import SliceRunner
from holdfast.models.specs import Sharded, check_device
from holdfast.models.trainable import Reach, StepContext
from holdfast.recovery.registry import strategy_class
from holdfast.recovery.strategy import SHARDED
from holdfast.state.transfer import broadcast


@dataclass(slots=True)
class _Shard:
    """Parameters of one shard; on a holder they lie in one row per dtype."""

    names: list[str]
    rows: list[torch.Tensor]


class ShardedModel(ModelParallel):
    """The shards that this worker holds, and the complete model that it computes with.

    The scaler and ``clip_grad_norm`` apply to the gradients of the complete model, which each worker has.
    """

    kind = SHARDED

    def __init__(
        self, model: Sharded, factories: PartFactories, scaler: Any, clip_grad_norm: float | None, settings: Settings
    ) -> None:
        strategy_class(settings.strategy).check(self.kind)
        check_device(model.module, "a Sharded model")
        self._wrapper = model
        self._model = model.module
        self._parameters = dict(model.module.named_parameters())
        self._shards = [_Shard(names, []) for names in model.shard_names(model.shards or settings.workers)]
        self._factories = factories
        self._settings = settings
        self._given_away = False
        super().__init__(shape_of(len(self._shards), 1, settings), self._build, self._drop, scaler)
        self.flow = _Flow(self, factories.schedule, scaler, clip_grad_norm, settings)
        self.num_buckets = self.flow.num_buckets
        self.size_bytes = self.flow.size_bytes
        self.device = self.flow.device
        self.numel = self.flow.numel
        if self.sends_copies:
            check_in_host(self.device)

    def begin_loop(self, context: StepContext) -> SliceRunner:
        self._connect(context)
        self._mailbox = Mailbox(context.job.comm, shared_bytes=self._settings.shared_bytes)
        return SliceRunner(context, self, self.flow)

    @property
    def summed(self) -> ModelPart:
        return self.flow

    # -- the shards of this worker

    def _row_of(self, part: int) -> torch.Tensor:
        return self._shards[part].rows[0]

    def _build(self, part: int) -> ModelPart:
        """Return a shard with its initial parameters, or with memory for a received state."""
        shard = self._shards[part]
        if not shard.rows:
            parameters = [self._parameters[name] for name in shard.names]
            shard.rows = [
                in_row([p for p in parameters if p.dtype == dtype])
                for dtype in dict.fromkeys(p.dtype for p in parameters)
            ]
        tree = _tree({name: self._parameters[name] for name in shard.names})
        return self._factories.part(ModelPart, "shard", tree, clip_grad_norm=None, checked=False)

    def _drop(self, part: int) -> None:
        self._shards[part].rows = []
        if self._given_away:  # before that, parameters still have their initial values, and may be needed again
            self._take_back_loans()

    def make_equal(self, comm: Communicator) -> None:
        """Make the initial shards equal on all their holders.

        Raises:
            StateLost: if parameters were released since: no worker has their initial values any more.
        """
        if self._given_away:
            raise StateLost(
                "a shard of the model is lost with its holders, without a checkpoint: the job must start over"
            )
        super().make_equal(comm)

    # -- a step

    def begin_step(self, reach: Reach) -> None:
        """Lend the shards of this worker, and borrow the others; see :meth:`Trainable.begin_step`."""
        reach("handover", None)
        self._remember_registered()
        self.flow.begin()  # before any failure can occur: a discarded step is rewound to here
        self._given_away = True
        self._mailbox.begin()
        self.exchange_backups(self._mailbox)
        self._borrow()

    def _borrow(self) -> None:
        comm, placement = self._comm, self.resident.now
        givers = [placement.holders(part)[0] for part in range(placement.parts)]
        for part, shard in enumerate(self._shards):  # send everything before waiting for anything
            if givers[part] in comm.local_ranks:
                receivers = [rank for rank in comm.members if rank not in (*placement.holders(part), *comm.local_ranks)]
                for row in shard.rows:
                    self._mailbox.send(receivers, row)
        for part, shard in enumerate(self._shards):
            if part not in self.resident.held:
                parameters = [self._parameters[name] for name in shard.names]
                for dtype in dict.fromkeys(p.dtype for p in parameters):
                    row = self._mailbox.receive(givers[part]).to(self.device)
                    for parameter, place in views([p for p in parameters if p.dtype == dtype], row):
                        parameter.data = place

    def _take_back_loans(self) -> None:
        """Release borrowed parameters; they keep their shape, and take no memory."""
        for part, shard in enumerate(self._shards):
            if part not in self.resident.held:
                for name in shard.names:
                    parameter = self._parameters[name]
                    parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)

    def discard_step(self) -> None:
        self.flow.discard()
        self._take_back_registered()
        self._take_back_loans()

    def common_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """See :meth:`ModelParallel.common_buffers`: the buffers of the complete model."""
        return self.flow.buckets.buffers.initial()

    def remember_buffers(self) -> None:
        super().remember_buffers()
        self.flow.buckets.buffers.begin_step()

    def apply(self, batch: MiniBatch, names: Sequence[str]) -> dict[str, float]:
        """Run the optimizers of this worker's shards, and return the metrics of the step."""
        metrics = self.flow.apply(batch, names)
        self._take_back_loans()
        return metrics

    def finish(self) -> None:
        """Give every worker its own copy of all parameters."""
        self._mailbox.begin()
        self._borrow()
        for part, shard in enumerate(self._shards):
            if part not in self.resident.held:
                for name in shard.names:
                    self._parameters[name].data = self._parameters[name].data.clone()
        self._note_sha256s(self._model, self._gather_sha256s())
        if self._factories.average is not None:
            self._wrapper.averaged = self._gather_averages()

    def _gather_averages(self) -> nn.Module:
        comm, placement = self._comm, self.resident.now
        whole = copy.deepcopy(self._model)
        averaged = dict(whole.named_parameters())
        for part, shard in enumerate(self._shards):
            giver = placement.holders(part)[0]
            held = self.resident.held.get(part)
            own = {} if held is None or held.average is None else dict(held.average.module.named_parameters())
            for name in shard.names:
                averaged[name].data.copy_(
                    broadcast(self._mailbox, comm, giver, functools.partial(own.__getitem__, name))
                )
        return whole

    def _gather_sha256s(self) -> list[str]:
        comm, placement, own = self._comm, self.resident.now, self.resident.sha256s()

        def say(part: int) -> torch.Tensor:
            return torch.frombuffer(bytearray(own[part].encode()), dtype=torch.uint8)

        messages = (
            broadcast(self._mailbox, comm, placement.holders(part)[0], functools.partial(say, part))
            for part in range(placement.parts)
        )
        return [message.numpy().tobytes().decode() for message in messages]

    # -- the complete state

    def shared_state(self) -> dict[str, Any]:
        return super().shared_state() | {"shards": len(self._shards), "buffers": dict(self._model.named_buffers())}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        super().load_shared_state(state)
        if state["shards"] != len(self._shards):
            raise CheckpointError(
                f"the checkpoint holds {state['shards']} shards, this session has {len(self._shards)}:"
                f" pass Sharded(model, shards={state['shards']})"
            )
        for name, buffer in self._model.named_buffers():
            buffer.copy_(state["buffers"][name])

    def adopt_placement(self, placement: Any) -> None:
        """On a newcomer, set the placement of the shards; the parameters in memory are no longer the trained ones."""
        super().adopt_placement(placement)
        self._given_away = True


class _Flow(ModelPart):
    """The gradients of the complete model, which the optimizers of the held shards use."""

    def __init__(
        self, shards: ShardedModel, schedule: str, scaler: Any, clip_grad_norm: float | None, settings: Settings
    ) -> None:
        super().__init__(
            shards._model,
            _OfShards(shards),
            scheduler=None,
            schedule=schedule,
            scaler=scaler,
            clip_grad_norm=clip_grad_norm,
            lay_out=functools.partial(shards._factories.lay_out, checked=settings.guard_sums),
        )
        self._shards = shards

    @property
    def _held(self) -> list[ModelPart]:
        return list(self._shards.resident.held.values())

    def _may_write(self) -> bool:
        is_written = self._scaler is not None or self._clip_grad_norm is not None
        return is_written or any(may_write_gradients(part.optimizer) for part in self._held)

    def _step_scheduler(self, batch: MiniBatch, metrics: dict[str, float]) -> None:
        for part in self._held:
            part._step_scheduler(batch, metrics)

    def _update_average(self) -> None:
        for part in self._held:
            part._update_average()


class _OfShards(torch.optim.Optimizer):
    """The complete model's optimizer, as the scaler sees it: a step runs the optimizers of this worker's shards."""

    def __init__(self, shards: ShardedModel) -> None:
        super().__init__(shards._model.parameters(), {})
        self._shards = shards

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run the optimizers of this worker's shards."""
        for part in self._shards.resident.held.values():
            for _ in part.own.each():
                part.optimizer.step()


def _tree(named: dict[str, nn.Parameter]) -> nn.Module:
    """Return a module that has these parameters under their names, and computes nothing."""
    root = nn.Module()
    for name, parameter in named.items():
        *path, last = name.split(".")
        at = root
        for step in path:
            if step not in dict(at.named_children()):
                at.add_module(step, nn.Module())
            at = at.get_submodule(step)
        at.register_parameter(last, parameter)
    return root
