"""A model that is split over workers, as the training loop sees it; see :class:`~holdfast.models.replicated.Replica`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from holdfast.checkpoint.parts import Wanted, all_but
from holdfast.comm import Communicator, Mail
from holdfast.config import Settings
from holdfast.data.plan import MiniBatch
from holdfast.engine.context import World
from holdfast.errors import CheckpointError, ConfigError
from holdfast.integrity.hash_chain import in_order
from holdfast.models.evaluation import Evaluation
from holdfast.models.factories import Makers
from holdfast.models.flat_params import in_row
from holdfast.models.loss import checked
from holdfast.models.part_hashes import PartFingerprint
from holdfast.models.part_transfer import give, take
from holdfast.models.pipeline import Reach, Stages, chain_of
from holdfast.models.pipeline_scaler import Scaling, Stage
from holdfast.models.replicated import Replica, Stateful
from holdfast.models.resident_parts import Holdings, Restore
from holdfast.models.standby import Backups
from holdfast.models.training_state import clone, model_sha256
from holdfast.recovery.placement import Homes, Shape, first_homes
from holdfast.recovery.registry import strategy_class
from holdfast.recovery.strategy import PIPELINE
from holdfast.session.models import Pipeline
from holdfast.state.transfer import take_lowest


class Split:
    """What all split models have in common: parts with homes, and their state.

    Args:
        shape: Of the homes.
        build: Makes a part as it is at the beginning of training.
        drop: Is told of a part that is not held here any more.
        scaler: A ``torch.amp.GradScaler`` for all parts, in the same state at all workers.
    """

    is_split = True
    kind: str

    def __init__(self, shape: Shape, build: Callable[[int], Replica], drop: Callable[[int], None], scaler: Any) -> None:
        self._scaler = scaler
        self.registered: dict[str, Stateful] = {}
        self._before: dict[str, Any] = {}
        self.holdings = Holdings(shape, build, drop)
        self._world: World | None = None
        self._sha256s = ("", "")
        self._whole = torch.nn.Module()
        self.backups: Backups | None = None

    def connect(self, world: World) -> None:
        """Meet the others."""
        self._world = world

    @property
    def _comm(self) -> Communicator:
        assert self._world is not None, "the model is not connected"
        return self._world.comm

    def fingerprint(self, comm: Communicator, settings: Settings) -> PartFingerprint:
        """See :meth:`Replica.fingerprint`."""
        return PartFingerprint(self, comm, settings)

    def _remember(self) -> None:
        """Remember what a step may change besides the parts."""
        self._before = {name: clone(thing.state_dict()) for name, thing in self.registered.items()}

    def _take_back(self) -> None:
        for name, state in self._before.items():
            self.registered[name].load_state_dict(clone(state))
        self._before = {}

    # -- what may be altered

    def enter(self, rank: int) -> None:
        """Hear that one of those whom this process plays computes: with its own parts, and others as their lowest holders lend them."""
        for part, held in self.holdings.held.items():
            if held.own.differ:
                holders = self._holders(part, self._comm.here)
                held.own.enter(rank if rank in holders else min(holders))

    def rest(self, here: Sequence[int]) -> None:
        """Hear that none of those whom this process plays computes; see :meth:`OwnStates.rest`."""
        for part, held in self.holdings.held.items():
            if held.own.differ:
                held.own.rest(self._holders(part, here))

    def tensors_of(self, target: str, rank: int, here: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the weights, or what the optimizer keeps, of the parts that a worker holds; see :meth:`Replica.tensors_of`.

        Raises:
            ConfigError: if nobody can have them for itself, because copies are made of those that all have.
        """
        if self.holdings.shape.lazy and len(here) > 1:
            raise ConfigError(
                f"{target} cannot be altered where all workers are one process and mirror_every is above 1; leave mirror_every out"
            )
        found: dict[str, torch.Tensor] = {}
        for part in self.holdings.now.held_by((rank,)):
            tensors = self.holdings.held[part].tensors_of(target, rank, self._holders(part, here))
            found |= {f"{self.prefix(part)}{name}": tensor for name, tensor in tensors.items()}
        return found

    def prefix(self, part: int) -> str:
        """Return what the names of a part's tensors begin with in the whole model."""
        return ""

    def common_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return the buffers that all workers have, by name, as they were when the step in progress began; of each the same memory."""
        return []

    def remember_buffers(self) -> None:
        """Let the buffers, where no step is in progress, count as those with which one begins."""
        for held in self.holdings.held.values():
            held.buckets.buffers.begin_step()

    def _holders(self, part: int, here: Sequence[int]) -> tuple[int, ...]:
        holders = self.holdings.now.holders(part)
        return tuple(rank for rank in here if rank in holders)

    def set_learning_rate(self, value: float) -> None:
        """Go on with another learning rate."""
        for part in self.holdings.held.values():
            part.set_learning_rate(value)

    # -- parts and their homes

    def lost(self, members: Sequence[int]) -> tuple[int, ...]:
        """Return the parts that nobody among ``members`` holds; none as long as they have no homes."""
        return self.holdings.lost(members)

    def is_lost(self, members: Sequence[int]) -> bool:
        """Return whether nobody among ``members`` holds some part."""
        return bool(self.lost(members))

    def rehome(self, restore: Restore | None) -> int:
        """See :meth:`Holdings.rehome`."""
        return self.holdings.rehome(self._comm, restore)

    def at_beginning(self, part: int) -> dict[str, Any] | None:
        """Return the state of a part as training began; None if it cannot be made any more."""
        return None

    def exchange_backups(self, mail: Mail) -> None:
        """See :meth:`Backups.exchange`; nothing where holders have mirrors."""
        if self.holdings.shape.lazy and self.backups is not None:
            assert self._world is not None
            self.backups.exchange(self._comm, mail, self._world.step)

    def leave(self) -> None:
        """End what goes on beside the loop: this worker is needed no more."""
        if self.backups is not None:
            self.backups.close()

    def settle(self) -> None:
        """See :meth:`Holdings.settle`."""
        self.holdings.settle(self._comm.here)

    def make_equal(self, comm: Communicator) -> None:
        """Begin with the parts as they were made, the same at all who hold them, and with what all have as the lowest has it.

        Raises:
            CheckpointError: if it came damaged.
            PeerFailed: if somebody died meanwhile.
        """
        self.holdings.begin(comm.members, comm.here, None)
        self.holdings.make_equal(comm)
        state = take_lowest(comm, self.shared_state())
        if state is not None:
            self.load_shared_state(state)

    def homes(self) -> Any:
        """Return who holds which part, as plain JSON."""
        return self.holdings.now.to_json()

    def take_homes(self, homes: Any) -> None:
        """Hear, as a newcomer that holds nothing yet, who holds which part."""
        self.holdings.homes = Homes.from_json(homes)

    def memory(self) -> dict[str, Any]:
        """Return what this worker has of the model in its memory, as :class:`~holdfast.records.types.PartsHeld` asks for it."""
        homes, here = self.holdings.now, self._comm.here
        computes = sorted({part for _, part in homes.computed_by(here)})
        mirrors = sorted(set(self.holdings.held) - set(computes))
        return {
            "computes": tuple(computes),
            "mirrors": tuple(mirrors),
            "backups": tuple(part for part, ranks in enumerate(homes.backups) if not set(ranks).isdisjoint(here)),
            "computes_bytes": self.holdings.bytes_of(computes),
            "mirrors_bytes": self.holdings.bytes_of(mirrors),
            "copies_bytes": 0 if self.backups is None else self.backups.bytes_held(),
        }

    # -- the state as a whole

    def wanted(self, members: Sequence[int]) -> Wanted | None:
        """Return what this worker needs of a checkpoint: its parts, as they are when it is loaded, and what all have."""
        held = first_homes(self.holdings.shape, members).held_by(self._comm.here)
        return all_but("replica/parts", *(f"replica/parts/{part}" for part in held))

    def writers(self, comm: Communicator) -> tuple[tuple[int, ...], ...]:
        """Return the processes that write a checkpoint: the lead, and the lowest holder of each part."""
        ranks = [comm.members[0], *self.holdings.lowest_holders(comm.members)]
        found = [next(process for process in comm.processes if rank in process) for rank in ranks]
        return tuple(dict.fromkeys(found))

    def state_dict(self) -> dict[str, Any]:
        """Return what this worker is to save: the parts of which it is the lowest holder, and from the lead what all have."""
        assert self._world is not None
        comm = self._comm
        mine = [part for part, rank in enumerate(self.holdings.lowest_holders(comm.members)) if rank in comm.here]
        parts = {"parts": self.holdings.states(mine)}
        return parts | self.shared_state() if self._world.is_lead else parts

    def shared_state(self) -> dict[str, Any]:
        """Return what all workers have."""
        return {name: thing.state_dict() for name, thing in self._shared().items()}

    def _shared(self) -> dict[str, Stateful]:
        shared = {f"registered.{name}": thing for name, thing in self.registered.items()}
        return shared if self._scaler is None else shared | {"scaler": self._scaler}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Go back to what all workers have.

        Raises:
            CheckpointError: if the state is of other parts than this session has.
        """
        mine = self.shared_state().keys()
        if mine != state.keys() - {"parts"}:
            raise CheckpointError(
                f"the checkpoint holds {', '.join(sorted(state))}; this session has {', '.join(sorted(mine | {'parts'}))}"
            )
        for name, thing in self._shared().items():
            thing.load_state_dict(clone(state[name]))

    def load_state_dict(self, state: dict[str, Any], *, keeps: bool = False) -> None:
        """Go back to a state; where there are parts in it, the homes are those of a beginning.

        Args:
            state: What all have, and the parts that are held here then; or only what all have.
            keeps: Its tensors may become those of this worker.
        """
        self.load_shared_state(state)
        if "parts" in state:
            saved = {int(part): of_part for part, of_part in state["parts"].items()}
            self.holdings.begin(self._comm.members, self._comm.here, saved)

    def sha256s(self, here: Sequence[int]) -> dict[int, tuple[str, str]]:
        """Return by worker the sha256 of the whole model; and that over those of each part with its optimizer's state."""
        if not any(held.own.differ for held in self.holdings.held.values()):
            return dict.fromkeys(here, self._sha256s)
        found = {}
        for rank in here:
            self.enter(rank)
            found[rank] = self._sha256s_now()
        self.rest(here)
        return found

    def _sha256s_now(self) -> tuple[str, str]:
        """Return them of the worker that was entered last."""
        return model_sha256(self._whole), self._sha256s[1]

    def _note_sha256s(self, model: torch.nn.Module, of_parts: Sequence[str]) -> None:
        self._whole = model
        self._sha256s = (model_sha256(model), hashlib.sha256("".join(of_parts).encode()).hexdigest())


def shape_of(parts: int, chains: int, settings: Settings) -> Shape:
    """Return the shape of the homes: without a replica of the model, each part has a mirror, unless the user says otherwise."""
    copies = 1 + settings.mirror if settings.mirror >= 0 else 2
    return Shape(parts=parts, chains=chains, copies=copies, lazy=settings.mirror_every > 1)


class Pipelined(Split):
    """The stages of a pipeline that this worker holds.

    Args:
        model: What the user gave.
        makers: Make what trains a stage.
        scaler: A ``torch.amp.GradScaler``; see :class:`~holdfast.models.pipeline_scaler.Scaling`.
        clip_grad_norm: Largest norm of the norms of the stages.
        settings: Of the run.
    """

    num_buckets = 0
    size_bytes = 64
    kind = PIPELINE
    device = torch.device("cpu")

    def __init__(
        self,
        model: Pipeline,
        makers: Makers,
        scaler: Any,
        clip_grad_norm: float | None,
        settings: Settings,
    ) -> None:
        strategy_class(settings.strategy).check(PIPELINE)
        model.check_devices()
        self._model = model
        self._makers = makers
        self._clip_grad_norm = clip_grad_norm
        self._settings = settings
        self._rows: dict[int, torch.Tensor] = {}
        self._scaling = None if scaler is None else Scaling(scaler)
        shape = shape_of(model.parts, max(1, settings.workers // model.parts), settings)
        super().__init__(shape, self._build, self._drop, scaler)
        self._metrics: dict[str, float] = {}
        self.numel = 0
        """Numbers in the parameters of all stages."""

    def _build(self, part: int) -> Stage:
        module = self._model.build(part, self._settings.seed)
        if not any(p.requires_grad for p in module.parameters()):
            raise ConfigError(
                f"stage {part} of the Pipeline has no parameters that are trained: make it a part of a stage that has some"
            )
        if self.holdings.shape.lazy:  # backups are made of rows
            self._rows[part] = in_row(list(module.parameters()))
        stage = self._makers.part(
            Stage, "stage", module, clip_grad_norm=self._clip_grad_norm, checked=self._settings.guard_sums
        )
        stage.scaling = self._scaling
        return stage

    def _drop(self, part: int) -> None:
        self._rows.pop(part, None)

    def prefix(self, part: int) -> str:
        """See :meth:`Split.prefix`."""
        return f"{part}."

    def _sha256s_now(self) -> tuple[str, str]:
        """See :meth:`Split._sha256s_now`; who has a part counts its own."""
        of_parts = "".join(sha256 for _, sha256 in sorted(self.holdings.sha256s().items()))
        return model_sha256(self._whole), hashlib.sha256(of_parts.encode()).hexdigest()

    def at_beginning(self, part: int) -> dict[str, Any] | None:
        """See :meth:`Split.at_beginning`."""
        return self._build(part).state_dict()

    def connect(self, world: World) -> None:
        """Meet the others."""
        super().connect(world)
        self._stages = Stages(
            self._model, self.holdings, world.comm, self._settings, world.faults, world.altered, self._scaling
        )
        self.backups = Backups(self.holdings, self._rows.__getitem__, world)

    # -- the size of the whole, of which each knows its own: learnt where all begin together

    def make_equal(self, comm: Communicator) -> None:
        """See :meth:`Split.make_equal`."""
        super().make_equal(comm)
        self._count(comm)

    def load_state_dict(self, state: dict[str, Any], *, keeps: bool = False) -> None:
        """See :meth:`Split.load_state_dict`; where there are parts in the state, all members load together."""
        super().load_state_dict(state, keeps=keeps)
        if "parts" in state:
            self._count(self._comm)

    def shared_state(self) -> dict[str, Any]:
        """Return what all workers have."""
        return super().shared_state() | {"stages": self._model.parts}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Go back to what all workers have.

        Raises:
            CheckpointError: if the state is of other things than this session has, or of another number of stages.
        """
        super().load_shared_state(state)
        if state["stages"] != self._model.parts:
            raise CheckpointError(
                f"the checkpoint holds {state['stages']} stages, this Pipeline has {self._model.parts}: go on with as many"
            )

    def _count(self, comm: Communicator) -> None:
        held = self.holdings.held
        self.numel = sum(comm.maximum([held[n].numel if n in held else 0 for n in range(self._model.parts)]))

    def homes(self) -> Any:
        """Return who holds which part, and the size of the whole, as plain JSON."""
        return [self.numel, super().homes()]

    def take_homes(self, homes: Any) -> None:
        """Hear, as a newcomer, what :meth:`homes` returned."""
        self.numel, of_parts = homes
        super().take_homes(of_parts)

    # -- a step

    def begin_step(self) -> None:
        """Forget the step before, and remember what a forward pass may change.

        Raises:
            PeerFailed: if somebody died.
        """
        for part in self.holdings.held.values():
            part.begin_step()
        self._remember()
        self._stages.begin()
        self.exchange_backups(self._stages.mail)

    def compute(self, batch: MiniBatch, seed: int, fetch: Callable[[int], Any], reach: Reach) -> None:
        """Compute the stages that are this worker's; see :meth:`Stages.compute`."""
        self._stages.compute(batch, seed, fetch, reach)

    def evaluate(
        self,
        sizes: Sequence[int],
        load: Callable[[int], Any],
        begin: Callable[[int, int], None],
        *,
        averaged: bool,
    ) -> dict[str, float]:
        """Return the figures of other samples; see :class:`~holdfast.models.evaluation.Evaluation`."""
        evaluation = Evaluation(
            model=self._model,
            holdings=self.holdings,
            comm=self._comm,
            mail=self._stages.mail,
            sizes=sizes,
            load=lambda number: checked(load(number)),
            begin=begin,
            averaged=averaged,
        )
        return evaluation.figures()

    def finish_step(self, batch: MiniBatch, reach: Reach) -> None:
        """Sum the gradients; see :meth:`Stages.sum`."""
        self._stages.sum(batch, reach)
        self._metrics = self._stages.share_figures(batch)
        self._stages.share_overflow()
        if self._clip_grad_norm is not None:
            self._stages.share_norms()

    def discard_step(self) -> None:
        """Take back all that the attempt changed."""
        for part in self.holdings.held.values():
            part.discard_step()
        self._take_back()

    def missing_slices(self, batch: MiniBatch) -> dict[int, tuple[int, ...]]:
        """Return nothing: a step goes without no slice."""
        return {}

    def figures(self) -> list[float]:
        """Return all figures of the step, which is computed."""
        return in_order(self._metrics)

    def apply(self, batch: MiniBatch, names: Sequence[str]) -> dict[str, float]:
        """Run the optimizers, and return the figures of the step."""
        for part in self.holdings.held.values():
            part.apply(batch, (), self._metrics)
        if self._scaling is not None:
            self._scaling.update(self.device)
        return self._metrics

    def computing(self, batch: MiniBatch) -> set[int]:
        """Return who computes a stage of some slice."""
        homes = self.holdings.now
        return {rank for number in batch.owners for rank in chain_of(homes, batch, number)}

    def slices(self, batch: MiniBatch) -> list[int]:
        """Return the slices of which some stage is computed here."""
        homes = self.holdings.now
        return [n for n in sorted(batch.owners) if set(chain_of(homes, batch, n)) & set(self._comm.here)]

    def finish(self) -> None:
        """Give every worker the whole model.

        Raises:
            PeerFailed: if somebody died.
        """
        comm, homes = self._comm, self.holdings.now
        own = self.holdings.sha256s()
        parts, sha256s = [], []
        for part in range(self._model.parts):
            giver = homes.holders(part)[0]
            takers = [rank for rank in comm.members if rank not in homes.holders(part)]
            if giver in comm.here:
                state: dict[str, Any] = {"part": self.holdings.held[part].model_state(), "sha256": own[part]}
                for taker in takers:
                    if taker not in comm.here:
                        give(comm, taker, state)
            if part in self.holdings.held:
                parts.append(self.holdings.held[part])
                sha256s.append(own[part])
            else:
                state = take(comm, giver)
                made = self._build(part)
                made.load_model_state(state["part"])
                parts.append(made)
                sha256s.append(state["sha256"])
        self._model.module = torch.nn.Sequential(*(part.model for part in parts))
        averages = [part.average.module for part in parts if part.average is not None]
        self._model.averaged = torch.nn.Sequential(*averages) if averages else None
        self._note_sha256s(self._model.module, sha256s)
