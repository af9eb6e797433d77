"""GPUs of a node: which there are, who gets which, and what a worker's environment says. No GPU is needed here."""

from __future__ import annotations

import pytest

from holdfast.errors import ConfigError
from holdfast.launch.supervise import gpus
from holdfast.launch.supervise.gpus import (
    check_gpus,
    choose,
    describe_sharing,
    find_gpus,
    for_slot,
    for_workers,
    hint_for,
    parse_smi,
    parse_visible,
)
from holdfast.launch.supervise.slots import Slots, slot_at_start

FOUR = ("0", "1", "2", "3")
SMI = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-11111111-aaaa)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-22222222-bbbb)
"""
SMI_MIG = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-11111111-aaaa)
  MIG 3g.40gb     Device  0: (UUID: MIG-33333333-cccc)
  MIG 3g.40gb     Device  1: (UUID: MIG-44444444-dddd)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-22222222-bbbb)
"""


@pytest.fixture
def installed(monkeypatch):
    """Return a function that makes the machine have these GPUs."""

    def have(*names):
        monkeypatch.delenv(gpus.VISIBLE, raising=False)
        monkeypatch.delenv(gpus.WORKSPACE, raising=False)
        monkeypatch.setattr(gpus, "_installed", lambda: names)

    return have


# -- finding


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        ("0,1,2", ("0", "1", "2")),
        (" 3 , 1 ", ("3", "1")),
        ("", ()),
        ("-1", ()),
        ("0,-1,2", ("0",)),  # CUDA ignores everything from the first invalid one on
        ("0,1,0", ("0", "1")),
        ("GPU-1111,MIG-22/3", ("GPU-1111", "MIG-22/3")),
        ("none", ()),
    ],
)
def test_a_list_of_visible_gpus_is_read_as_cuda_reads_it(listed, found):
    assert parse_visible(listed) == found


def test_gpus_and_their_instances_are_read_from_nvidia_smi():
    assert parse_smi(SMI) == ("0", "1")
    assert parse_smi(SMI_MIG) == ("MIG-33333333-cccc", "MIG-44444444-dddd", "1")
    assert parse_smi("No devices found.\n") == ()


def test_a_list_in_the_environment_wins_over_what_the_machine_has(installed):
    installed(*FOUR)

    assert find_gpus({}) == FOUR
    assert find_gpus({gpus.VISIBLE: "2,3"}) == ("2", "3")
    assert find_gpus({gpus.VISIBLE: ""}) == ()


def test_nvidia_smi_is_asked_and_without_it_the_drivers_folder(monkeypatch, tmp_path):
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/sh\nprintf '%s' '{SMI}'\n")
    smi.chmod(0o755)
    proc = tmp_path / "gpus"
    for name in ("0000:1a:00.0", "0000:1b:00.0", "0000:1c:00.0"):
        (proc / name).mkdir(parents=True)
    monkeypatch.setattr(gpus, "_PROC", proc)

    monkeypatch.setenv("PATH", str(smi.parent))
    asked = gpus._installed.__wrapped__()
    smi.write_text("#!/bin/sh\nexit 9\n")  # the driver does not answer
    failed = gpus._installed.__wrapped__()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(gpus, "_PROC", tmp_path / "nothing")
    nothing = gpus._installed.__wrapped__()

    assert (asked, failed, nothing) == (("0", "1"), ("0", "1", "2"), ())


# -- choosing


def test_all_none_or_the_first_few_are_used():
    assert choose("auto", FOUR) == FOUR
    assert choose("auto", ()) == ()
    assert choose("none", FOUR) == ()
    assert choose("2", FOUR) == ("0", "1")


@pytest.mark.parametrize("wrong", ["0", "-1", "all", "", "1.5", "²"])
def test_what_is_no_number_of_gpus_is_refused(wrong):
    with pytest.raises(ConfigError, match=f"--gpus must be auto, none, or a number .* got '{wrong}'"):
        check_gpus(wrong)


def test_more_gpus_than_there_are_is_refused_and_no_gpu_is_silent(installed):
    installed("0")
    with pytest.raises(
        ConfigError, match=r"--gpus 2 needs as many GPUs on each node, and here .* show 1; give a smaller"
    ):
        check_gpus("2")

    installed()
    with pytest.raises(ConfigError, match=r"--gpus 1 needs .* neither CUDA_VISIBLE_DEVICES nor nvidia-smi shows any"):
        check_gpus("1")
    check_gpus("auto")
    check_gpus("8", elsewhere=True)  # the workers look for themselves


def test_workers_that_share_a_gpu_are_told_in_one_line():
    assert describe_sharing(FOUR, 4) == ""
    assert describe_sharing((), 4) == ""
    assert describe_sharing(("0",), 3).startswith("3 workers share 1 GPU: ")
    assert describe_sharing(("0", "1"), 4).startswith("4 workers share 2 GPUs, 2 on each: ")
    assert describe_sharing(("0", "1"), 3).startswith("3 workers share 2 GPUs, 1 or 2 on each: ")


# -- slots


def test_workers_and_spares_of_a_node_count_from_0_whatever_their_ranks():
    slots = Slots([6, 4, 5, 12])

    assert [slots.take(rank, lambda _: False) for rank in (4, 5, 6, 12)] == [0, 1, 2, 3]


def test_a_new_worker_takes_the_lowest_slot_of_the_dead_and_others_keep_theirs():
    slots, dead = Slots([0, 1, 2, 3]), {1, 3}

    assert slots.take(4, dead.__contains__) == 1
    assert slots.take(5, dead.__contains__) == 3
    assert slots.take(6, dead.__contains__) == 4  # no other worker has ended
    assert [slots.take(rank, dead.__contains__) for rank in (0, 2, 4)] == [0, 2, 1]
    dead.add(4)
    assert slots.variables(7, dead.__contains__) == {"HOLDFAST_SLOT": "1", "HOLDFAST_SLOTS": "4"}


def test_a_node_that_comes_back_has_the_slots_that_it_once_had():
    slots = Slots([], 2)

    assert [slots.variables(rank, lambda _: False) for rank in (7, 8)] == [
        {"HOLDFAST_SLOT": "0", "HOLDFAST_SLOTS": "2"},
        {"HOLDFAST_SLOT": "1", "HOLDFAST_SLOTS": "2"},
    ]


def test_a_worker_knows_its_slot_from_the_launcher_or_from_mpirun():
    both = {"HOLDFAST_SLOT": "1", "HOLDFAST_SLOTS": "2"}
    both |= {"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}

    assert slot_at_start(5, 8, is_numbered=True, env=both) == (1, 2)
    assert slot_at_start(5, 8, is_numbered=False, env=both) == (3, 4)
    assert slot_at_start(0, 1, is_numbered=False, env={}) == (0, 1)


# -- the environment of workers


def test_each_slot_sees_one_gpu_of_the_list_that_was_given(installed, monkeypatch):
    installed(*FOUR)
    monkeypatch.setenv(gpus.VISIBLE, "2,GPU-7")

    told = for_workers("auto", one_process=False, elsewhere=False)

    assert told == {gpus.GPUS: "2,GPU-7"}
    assert [for_slot(slot, told)[gpus.VISIBLE] for slot in range(3)] == ["2", "GPU-7", "2"]


def test_what_cublas_needs_for_equal_bits_is_set_where_gpus_are_used_unless_it_is_set(installed):
    installed("0")
    told = for_workers("auto", one_process=False, elsewhere=False)

    assert for_slot(0, told) == {gpus.VISIBLE: "0", gpus.WORKSPACE: ":4096:8"}
    assert for_slot(0, told | {gpus.WORKSPACE: ":16:8"}) == {gpus.VISIBLE: "0", gpus.WORKSPACE: ":16:8"}


def test_without_gpus_the_environment_stays_as_it_is_and_none_hides_them(installed):
    installed()
    assert for_slot(0, for_workers("auto", one_process=False, elsewhere=False)) == {}
    assert for_slot(0, {}) == {}

    installed(*FOUR)
    for elsewhere in (False, True):
        assert for_slot(1, for_workers("none", one_process=False, elsewhere=elsewhere)) == {gpus.VISIBLE: ""}


def test_workers_in_one_process_see_all_gpus(installed):
    installed(*FOUR)

    told = for_workers("2", one_process=True, elsewhere=False)

    assert told == {gpus.GPUS: "", gpus.VISIBLE: "0,1", gpus.WORKSPACE: ":4096:8"}
    assert for_slot(0, told) == {}


def test_a_script_that_takes_another_gpu_than_its_own_is_told_so():
    wrong = "torch.AcceleratorError: CUDA error: invalid device ordinal"

    assert hint_for(wrong, {gpus.GPUS: "0,1"}) == "; each worker sees one GPU only, as cuda:0 (--gpus)"
    assert hint_for(wrong, {}) == hint_for("a bug", {gpus.GPUS: "0,1"}) == ""


def test_workers_on_other_machines_find_their_gpus_there(installed):
    told = for_workers("2", one_process=False, elsewhere=True)

    installed("0", "1", "2")
    assert [for_slot(slot, told)[gpus.VISIBLE] for slot in range(3)] == ["0", "1", "0"]
    installed("0")
    with pytest.raises(ConfigError, match="--gpus 2 needs"):
        for_slot(0, told)
