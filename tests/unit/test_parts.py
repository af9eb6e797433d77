"""Which collectives continue over survivors: judged from real call stacks, tensors and what came before."""

import sys
import threading
from functools import partial
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch import nn

from holdfast.base.torch_private import task_of_backward
from holdfast.distributed.call_site import CallSite
from holdfast.distributed.moves import MoveCollectives
from holdfast.distributed.parts import EXCHANGED, Evidence, Fate
from holdfast.distributed.sparse import _scaled
from holdfast.distributed.tasks import Collective, CollectiveCall
from holdfast.distributed.tensors import scaled
from holdfast.distributed.work import COMPLETES_FUTURES, PendingWork


def asked(evidence, *tensors, task=-1, policy="fill", spans_job=True, gathers=False):
    """The fate of a collective that the function makes which calls this, or the lambda that does."""
    frame = sys._getframe(1)
    if frame.f_code.co_name == "<lambda>":
        frame = frame.f_back
    return evidence.fate(CallSite(frame, task), tensors, policy, spans_job=spans_job, gathers=gathers)


def function_of(module):
    """A function of that module, which returns what ``call()`` returns."""
    return FunctionType((lambda call: call()).__code__, {"__name__": module})


def called_in(module, call):
    """What ``call()`` returns where a function of that module has called it."""
    return function_of(module)(call)


class Forward(nn.Module):
    """A model that makes a collective in its forward pass."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self):
        return self.call()


class Function(torch.autograd.Function):
    """The same in an autograd function."""

    @staticmethod
    def forward(ctx, tensor, call, fates):
        fates.append(call())
        return tensor.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return (*gradients, None, None)


def in_function(call):
    fates = []
    Function.apply(torch.ones(3), call, fates)
    return fates[0]


DDP = "torch.nn.parallel.distributed"


@pytest.fixture
def plain():
    return Evidence()


@pytest.fixture
def replicas():
    """Of a job in which ``DistributedDataParallel`` was built over all ranks."""
    evidence = Evidence()
    assert called_in(DDP, lambda: asked(evidence, torch.ones(3))) == Fate(recovers=True)
    return evidence


CONTINUES = Fate(recovers=True, scales=True)
METRIC = torch.ones(2)
ACTIVATIONS = torch.ones(2, 3, requires_grad=True) * 2
LOSS = (torch.ones(2, requires_grad=True) * 2).sum()


def test_a_metric_of_a_script_continues_as_a_mean_and_the_policies_differ(plain):
    assert asked(plain, METRIC) == CONTINUES
    assert asked(plain, METRIC, policy="survivors") == Fate(recovers=True)
    assert asked(plain, METRIC, policy="raise").advice((1,)) == (
        ". --empty-seats is raise: the next call is over the survivors, and with fill this one would be, too"
    )


def test_neither_sums_of_ddp_nor_the_counts_of_join_are_scaled(plain):
    assert called_in(DDP, lambda: asked(plain, METRIC)) == Fate(recovers=True)
    assert called_in(DDP, lambda: asked(plain, METRIC, task=3)) == Fate(recovers=True)
    assert called_in("torch.distributed.algorithms.join", lambda: asked(plain, METRIC)) == Fate(recovers=True)
    through_api = partial(function_of("torch.distributed.distributed_c10d"), lambda: asked(plain, METRIC))
    assert called_in("torch.distributed.algorithms.join", through_api) == Fate(recovers=True)
    assert called_in("train", through_api) == CONTINUES


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e: called_in("torch.distributed.fsdp._x", lambda: asked(e, METRIC)), "Rank 1 held a shard"),
        (lambda e: called_in("transformers.integrations.tensor_parallel", lambda: asked(e, METRIC)), "held a shard"),
        (lambda e: asked(e, nn.Parameter(torch.ones(4)), gathers=True), "held a shard"),
        (lambda e: asked(e, METRIC, task=3), "A backward pass calls it"),
        (lambda e: in_function(lambda: asked(e, METRIC)), "features or activations of rank 1 are lost"),
        (lambda e: asked(e, ACTIVATIONS), "features or activations of rank 1 are lost"),
        (lambda e: asked(e, ACTIVATIONS, gathers=True), "features or activations of rank 1 are lost"),
        (lambda e: asked(e, LOSS), "detach a tensor that is only a metric"),
        (lambda e: called_in("torch.distributed._functional_collectives", lambda: asked(e, METRIC)), "features or"),
        (lambda e: asked(e, METRIC, spans_job=False), "the group is a part of the world"),
        (lambda e: Forward(lambda: asked(e, METRIC))(), "a forward pass without DistributedDataParallel"),
    ],
)
def test_what_may_be_a_part_of_the_model_raises_and_says_what_to_do(plain, call, words):
    fate = call(plain)

    assert (fate.recovers, fate.scales, fate.is_part) == (False, False, True)
    said = fate.advice((1,))
    assert words.lower() in said.lower()
    assert "start again from a checkpoint (holdfast run --max-restarts N does so by itself)" in said
    assert "parameter shards" not in said


def test_tensor_parallel_layers_are_not_taken_for_metrics_once_they_have_trained(plain):
    """In evaluation their sums look like those of metrics."""
    with torch.no_grad():
        assert Forward(lambda: asked(plain, METRIC))().lost
    asked(plain, ACTIVATIONS)

    assert not asked(plain, METRIC).recovers
    assert plain.fate_of_barrier("fill").is_part


def test_a_loss_module_in_a_job_of_ddp_may_sum_its_figures(replicas):
    criterion = Forward(lambda: asked(replicas, METRIC))

    assert criterion() == CONTINUES
    with torch.no_grad():
        assert criterion.eval()() == CONTINUES
    assert asked(replicas, LOSS) == CONTINUES, "a loss that nobody has detached"
    assert not asked(replicas, ACTIVATIONS).recovers


def test_features_that_are_gathered_without_gradients_in_training_are_no_metrics(replicas):
    model = Forward(lambda: asked(replicas, METRIC, gathers=True))

    assert "the features of ranks 1, 2 are lost" in model().advice((1, 2))
    assert model.eval()() == CONTINUES


def test_frameworks_continue_in_any_group_and_their_sums_are_scaled_in_that_of_all(plain):
    assert called_in("torchmetrics.x", lambda: Forward(lambda: None) and asked(plain, METRIC)).recovers
    module = Forward(lambda: called_in("torchmetrics.x", lambda: asked(plain, METRIC, spans_job=False)))
    assert called_in("accelerate.x", lambda: asked(plain, METRIC)) == CONTINUES
    assert module() == Fate(recovers=True)


def test_a_framework_may_repeat_a_loss_for_each_sample_and_may_not_gather_features(replicas):
    assert called_in("accelerate.x", lambda: asked(replicas, LOSS.repeat(4), gathers=True)) == CONTINUES
    assert called_in("torchmetrics.x", lambda: asked(replicas, ACTIVATIONS, gathers=True)) == CONTINUES
    assert not asked(replicas, LOSS.repeat(4), gathers=True).recovers
    assert not called_in("accelerate.x", lambda: asked(replicas, ACTIVATIONS, gathers=True)).recovers


def test_sharded_optimizers_end_the_recovery_of_ddp_and_averaging_replicas_does_not(replicas):
    called_in("torch.distributed.optim.post_localSGD_optimizer", lambda: asked(replicas, METRIC))
    called_in("torch.distributed.checkpoint.x", lambda: asked(replicas, METRIC))
    assert called_in(DDP, lambda: asked(replicas, METRIC, task=3)).recovers
    assert asked(replicas, METRIC) == CONTINUES

    called_in("torch.distributed.optim.zero_redundancy_optimizer", lambda: asked(replicas, METRIC))

    lost = called_in(DDP, lambda: asked(replicas, METRIC, task=3))
    assert (lost.recovers, lost.is_part) == (False, True)
    assert "Rank 1 held a part of the optimizer's state, and this step has updated no parameter" in lost.advice((1,))


def test_hooks_that_make_the_steps_of_a_sharded_optimizer_are_not_those_of_ddp(replicas):
    hook = "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"

    assert "held a shard" in called_in(hook, lambda: asked(replicas, METRIC, task=3)).lost


def test_sync_batch_norm_continues_in_both_passes(replicas):
    """In an autograd function, and in a backward pass that is not DDP's."""
    assert in_function(lambda: called_in("torch.nn.modules._functions", lambda: asked(replicas))) == Fate(recovers=True)
    assert called_in("torch.nn.modules._functions", lambda: asked(replicas, task=3)) == Fate(recovers=True)
    assert asked(replicas, METRIC) == CONTINUES


def test_a_dead_root_is_named_with_another_unless_a_part_is_lost():
    assert CONTINUES.advice((0, 2), root=0) == ". Use a root that is alive, such as holdfast.distributed.alive()[0]"
    assert CONTINUES.advice((0, 2), root=1) == ""
    assert EXCHANGED.advice((0, 2), root=0).startswith(". What ranks 0, 2 held for the others is lost: start again")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_are_scaled_exactly_and_rounded_to_the_nearest(dtype):
    numbers = [0, 1, 2, 3, 4, 5, 127]

    assert scaled(torch.tensor(numbers, dtype=dtype), 3, 2).tolist() == [0, 2, 3, 5, 6, 8, 191]
    assert scaled(torch.tensor(numbers, dtype=dtype), 4, 3).tolist() == [0, 1, 3, 4, 5, 7, 169]


def test_large_and_negative_integers_are_scaled_without_overflow():
    most = 2**63 - 1

    assert scaled(torch.tensor([most // 3 * 2, -5, -7]), 3, 2).tolist() == [most // 3 * 3, -7, -10]


def test_integers_in_a_sparse_tensor_are_scaled_like_others_and_stay_integers():
    total = torch.sparse_coo_tensor([[0, 3]], torch.tensor([2**60 + 3, 5]), (4,), check_invariants=True)

    whole = _scaled(total, 3, 2)

    assert whole.dtype == torch.int64
    assert whole.to_dense().tolist() == [(2**60 + 3) // 2 * 3 + 2, 0, 0, 8]


# -- deaths that a script has not heard of


def collective(fate, number=7, failed=(6,), dead=(1,)):
    """The next collective of a group in which number 6, a sum of DDP, has recovered from a death."""
    group = SimpleNamespace(completed=number, failed=set(failed), dead=dead, alive=(0, 2))
    return Collective(group, CollectiveCall("all_reduce(SUM)", [], lambda: None, fate=fate), None)


def test_with_raise_a_script_hears_of_a_death_in_a_sum_of_ddp_that_has_continued(replicas):
    assert collective(asked(replicas, METRIC, policy="raise")).has_failed
    assert not collective(asked(replicas, METRIC)).has_failed
    assert not collective(called_in(DDP, lambda: asked(replicas, METRIC, task=3, policy="raise"))).has_failed
    assert collective(replicas.fate_of_barrier("raise")).has_failed


def test_a_seat_that_was_taken_again_is_no_death_to_hear_of(replicas):
    assert not collective(asked(replicas, METRIC, policy="raise"), dead=()).has_failed


def test_nothing_is_lost_with_a_barrier_of_any_group(plain):
    assert plain.fate_of_barrier("fill") == plain.fate_of_barrier("survivors") == Fate(recovers=True)
    assert "--empty-seats is raise" in plain.fate_of_barrier("raise").lost


# -- evidence


@pytest.mark.parametrize(
    "call",
    [
        lambda e: called_in("torch.distributed.fsdp._x", lambda: asked(e, METRIC, spans_job=False)),
        lambda e: called_in("deepspeed.x", lambda: asked(e, METRIC, spans_job=False)),
        lambda e: asked(e, METRIC, task=3, spans_job=False),
        lambda e: asked(e, ACTIVATIONS, spans_job=False),
        lambda e: in_function(lambda: asked(e, METRIC, spans_job=False)),
    ],
)
def test_the_calls_in_a_part_of_the_world_decide_nothing_about_those_of_all_ranks(replicas, call):
    """The ranks outside of that group know nothing of them, and decide, too."""
    before = dict(vars(replicas))

    assert call(replicas).is_part
    assert vars(replicas) == before
    assert asked(replicas, METRIC) == CONTINUES
    assert called_in(DDP, lambda: asked(replicas, METRIC, task=3)).recovers


def test_a_loss_that_is_not_detached_raises_by_itself_and_says_nothing_about_the_model(plain):
    assert not asked(plain, LOSS).recovers
    assert asked(plain, LOSS.detach()) == CONTINUES


# -- gradients


HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


@pytest.mark.parametrize("task", [3, -1])
@pytest.mark.parametrize("hook", ["powerSGD_hook", "default_hooks", "quantization_hooks"])
def test_sums_of_a_hook_are_of_gradients_also_in_a_callback_of_a_future(hook, task):
    site = called_in(f"{HOOKS}.{hook}", lambda: CallSite(sys._getframe(1), task))

    assert (site.is_backward, site.is_ddp_outside) == (True, False)


@pytest.mark.parametrize(("module", "thread"), [(f"{HOOKS}.powerSGD_hook", "main"), ("__main__", COMPLETES_FUTURES)])
def test_a_callback_may_wait_for_a_collective_that_it_makes(module, thread):
    """Another thread would complete that future, which is in the callback, or behind other collectives of this hook."""
    work, values = PendingWork([METRIC], "all_reduce(SUM)", 30.0, pytest.fail), []
    reader = threading.Thread(target=lambda: values.append(called_in(module, work.get_future).wait()), name=thread)

    reader.start()
    work.complete()
    reader.join(30)

    assert values == [[METRIC]]


def test_a_script_may_sum_gradients_in_hooks_of_its_own(replicas):
    fates = []

    def hook(parameter):
        site = CallSite(sys._getframe(), task_of_backward())
        fates.append(replicas.fate(site, [parameter.grad], "fill", spans_job=True))
        fates.append(replicas.fate(site, [parameter.grad], "survivors", spans_job=True))
        fates.append(replicas.fate(site, [parameter.grad], "fill", spans_job=False))
        fates.append(replicas.fate(site, [parameter.grad], "fill", spans_job=True, gathers=True))

    weight = nn.Parameter(torch.ones(3))
    weight.register_post_accumulate_grad_hook(hook)
    weight.sum().backward()

    assert [(fate.recovers, fate.scales) for fate in fates] == [
        (True, True), (True, False), (False, False), (False, False),
    ]  # fmt: skip


def test_a_sum_of_the_gradients_of_activations_is_of_parts(replicas):
    fates = []
    x = torch.ones(3, requires_grad=True) * 2

    def hook(gradient):
        fates.append(replicas.fate(CallSite(sys._getframe(), task_of_backward()), [gradient], "fill", spans_job=True))

    x.register_hook(hook)
    x.sum().backward()

    assert "a backward pass calls it" in fates[0].lost


def test_a_gather_does_not_keep_the_frames_of_its_caller(monkeypatch):
    """Their locals are activations, and the communication thread may be idle for long with its last gather."""
    kept = []
    monkeypatch.setattr(MoveCollectives, "_submit", lambda self, call: kept.append(call) or kept)
    group = MoveCollectives.__new__(MoveCollectives)
    group._members, group._policy = SimpleNamespace(ranks=(0, 1)), "fill"
    monkeypatch.setattr(MoveCollectives, "_fate", lambda self, *args, **kwargs: CONTINUES)
    group._gather([METRIC.clone(), METRIC.clone()], METRIC, "all_gather", [])

    (call,) = kept
    cells = [cell.cell_contents for act in (call.exchange, call.finish) for cell in act.__closure__ or ()]
    assert cells
    assert not any(isinstance(cell, CallSite) for cell in cells)
