"""Which collectives of torch.distributed take tensors on a device: all of them."""

import re

import pytest
import torch
from torch.distributed import ProcessGroup

from holdfast.comm import device as devices
from holdfast.distributed.group import HoldfastGroup, HostGroup
from holdfast.distributed.group_base import GroupBase
from holdfast.distributed.staged import READS, StagedCollectives
from holdfast.distributed.staging import current_staging, staged
from holdfast.errors import ConfigError

WITHOUT_TENSORS = {"barrier", "monitored_barrier"}
NO_COLLECTIVES = re.compile(
    "_|[A-Z]|abort|bound_device_id|boxed|get_group_store|group_|merge_remote_group|name|rank|set_timeout|shutdown|size"
    "|split_group|unbox|use_pg_for_symm_mem|getRank|getSize|getBackendName|engine|timeout_s|alive"
)


def test_every_collective_is_in_the_table():
    classes = HostGroup.__mro__[: HostGroup.__mro__.index(GroupBase)]
    given = {name for kind in classes for name in vars(kind) if not name.startswith("_") or name.endswith("_base")}

    assert READS.keys() | {"_allgather_base", "_reduce_scatter_base"} == given - WITHOUT_TENSORS
    assert all(vars(StagedCollectives)[name] is getattr(HoldfastGroup, name) for name in given - WITHOUT_TENSORS)


def test_torch_has_no_other_collective():
    names = {name for name in dir(ProcessGroup) if not NO_COLLECTIVES.match(name)}

    assert names <= READS.keys() | WITHOUT_TENSORS


@pytest.mark.parametrize("name", READS)
def test_tensors_elsewhere_are_refused_in_one_line(name):
    tensor = torch.empty(4, device="meta")
    group = HoldfastGroup.__new__(HoldfastGroup)  # of no job

    with pytest.raises(ConfigError) as refused:
        getattr(group, name)([tensor], [tensor])

    assert str(refused.value) == f"{name}: the holdfast backend takes tensors on cpu or cuda, got one on meta"


def test_tensors_on_two_devices_are_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(devices.DEVICES, "meta", devices.CpuDevice)

    with pytest.raises(ConfigError, match="allgather: its tensors must be on one device, got some on cpu and meta"):
        staged(print, "allgather", ([[torch.empty(1)]], [torch.empty(1, device="meta")]), {}, (1,))


def test_tensors_in_host_memory_are_passed_as_they_are():
    tensor = torch.ones(3)

    given, staging = staged(lambda *args: (args, current_staging()), "broadcast", ([tensor], "options"), {}, (0,))

    assert given[0][0] is tensor
    assert given[1] == "options"
    assert staging is None
