"""What the environment says of a launcher that is not ours: who started this process, and beside how many others."""

from __future__ import annotations

import os
from zlib import crc32

import pytest
import torch
from jobs import clean_env
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.comm import VirtualCommunicator, connect, launchers
from holdfast.comm.fabrics.base import Endpoint
from holdfast.comm.launchers import (
    LaunchedGroup,
    chosen,
    launched_group,
    leaves_survivors,
    others_started,
    sole_process,
)
from holdfast.comm.surviving import num_hubs
from holdfast.config import Settings
from holdfast.engine.start_rank import leads_at_start, rank_at_start
from holdfast.errors import ConfigError
from holdfast.session.launched import as_launched

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
RAY = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "4711"}

SEVERAL = {
    "torchrun": (TORCHRUN | {"WORLD_SIZE": "4"}, "WORLD_SIZE=4 (torchrun)", "`holdfast run -n 4 SCRIPT`"),
    "torchrun on two machines": (
        TORCHRUN | {"WORLD_SIZE": "8"},
        "WORLD_SIZE=8 (torchrun)",
        "`holdfast run --nnodes 2 -n 4 ... SCRIPT` on each machine (docs/how-to/several-nodes.md)",
    ),
    "another launcher of torch": ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2", "`holdfast run -n 2 SCRIPT`"),
    "Ray Train": (RAY | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "WORLD_SIZE=2 (Ray)", "holdfast run -n 2"),
    "srun": (STEP, "SLURM_STEP_NUM_TASKS=4 (srun)", "`holdfast run --hosts slurm SCRIPT` in the allocation"),
    "srun with PMIx": (STEP | {"PMIX_RANK": "0"}, "SLURM_STEP_NUM_TASKS=4 (srun)", "--hosts slurm"),
    "MPICH": ({"PMI_SIZE": "3", "PMI_RANK": "0"}, "PMI_SIZE=3 (an MPI launcher)", "holdfast run -n 3"),
    "MVAPICH": ({"MV2_COMM_WORLD_SIZE": "3"}, "MV2_COMM_WORLD_SIZE=3 (an MPI launcher)", "holdfast run -n 3"),
    "Flux": ({"FLUX_JOB_SIZE": "3"}, "FLUX_JOB_SIZE=3 (Flux)", "holdfast run -n 3"),
    "Horovod": ({"HOROVOD_SIZE": "3"}, "HOROVOD_SIZE=3 (horovodrun)", "holdfast run -n 3"),
    "Kubeflow": ({"PET_NNODES": "2"}, "PET_NNODES=2 (Kubeflow)", "holdfast run --nnodes 2 "),
    "Kubeflow, elastic": ({"PET_NNODES": "1:3"}, "PET_NNODES=1:3 (Kubeflow)", "holdfast run --nnodes 3 "),
    "PMIx alone": (
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "job@1"},
        "PMIX_RANK=0 (a PMIx launcher)",
        "`holdfast run -n N SCRIPT`",
    ),
    "a task of Ray": (RAY, "RAY_JOB_ID=01000000 (Ray)", "`holdfast run -n N SCRIPT`"),
}

ALONE = {
    "python": {},
    "torchrun, one process": TORCHRUN | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    "a batch script of Slurm": BATCH,
    "a batch script that says which step it is": BATCH | {"SLURM_STEP_ID": str(0xFFFFFFFB)},
    "the shell of salloc, which has the tasks of the allocation": STEP | {"SLURM_STEP_ID": str(0xFFFFFFFA)},
    "srun -n 1": STEP | {"SLURM_STEP_NUM_TASKS": "1"},
    "srun -n 1 with PMIx": STEP | {"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"},
    "mpiexec -n 1": {"PMI_SIZE": "1", "PMI_RANK": "0"},
    "a worker of Ray Train that is the only one": RAY | {"WORLD_SIZE": "1"},
    "one pod of Kubeflow": {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
    "no numbers": {"WORLD_SIZE": "", "PMI_SIZE": "many", "PET_NNODES": "a:b"},
}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_launcher_of_several_processes_is_named_with_what_works(name):
    env, saw, instead = SEVERAL[name]

    said = others_started(env)
    assert launched_group(env) is None, "it says too little to join them"

    assert said.startswith(f"{saw} ")
    assert instead in said
    assert "\n" not in said


@pytest.mark.parametrize("name", ALONE)
def test_one_process_is_left_alone(name):
    assert others_started(ALONE[name]) == ""
    assert launched_group(ALONE[name]) is None


MEETING = {"MASTER_ADDR": "h", "MASTER_PORT": "29500"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}

JOINED = {
    "torchrun": (
        TORCHRUN | MEETING | {"WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"},
        LaunchedGroup(
            launcher="torchrun", rank=1, size=4, is_local=True, host="h", port=29500, has_store=True, restarts_all=True,
            attempt=2, job="none",
        ),
    ),
    "Kubeflow's PyTorchJob": (
        MEETING | {"WORLD_SIZE": "3", "RANK": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        LaunchedGroup(launcher="another launcher", rank=2, size=3, is_local=False, host="h", port=29500),
    ),
    "processes that were started one by one": (
        MEETING | {"WORLD_SIZE": "3", "RANK": "2"},
        LaunchedGroup(
            launcher="another launcher", rank=2, size=3, is_local=False, host="h", port=29500, leaves_survivors=True,
        ),
    ),
    "srun": (
        STEP | {"SLURM_PROCID": "3", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[3-4]"},
        LaunchedGroup(launcher="srun", rank=3, size=4, is_local=False, host="n3", port=20217, leaves_survivors=True, job="7 0"),
    ),
    "srun with torch's variables for the meeting place": (
        STEP | MEETING | {"SLURM_STEP_NODELIST": "n3"},
        LaunchedGroup(launcher="srun", rank=0, size=4, is_local=True, host="h", port=29500, leaves_survivors=True, job="7 0"),
    ),
    "MPICH": (
        MEETING | {"PMI_SIZE": "3", "PMI_RANK": "0", "MPI_LOCALNRANKS": "3"},
        LaunchedGroup(launcher="an MPI launcher", rank=0, size=3, is_local=True, host="h", port=29500),
    ),
    "Open MPI on one machine": (
        OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-a-1@1"},
        LaunchedGroup(launcher="mpirun", rank=1, size=2, is_local=True, host="127.0.0.1", port=20000 + crc32(b"prterun-a-1@1") % 12000, job="prterun-a-1@1"),
    ),
    "Open MPI on two machines": (OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_NAMESPACE": "a@1"}, None),
    "no rank": (MEETING | {"WORLD_SIZE": "3"}, None),
    "a rank beyond the size": (MEETING | {"WORLD_SIZE": "3", "RANK": "3"}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_processes_join_where_the_environment_says_enough(name):
    env, group = JOINED[name]

    assert launched_group(env) == group


@pytest.mark.parametrize(
    ("env", "counted", "continue_"),
    [
        ({}, "WORLD_SIZE", True),
        (TORCHRUN, "WORLD_SIZE", False),
        (RAY, "WORLD_SIZE", False),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "WORLD_SIZE", False),
        (STEP, "SLURM_STEP_NUM_TASKS", True),
        (STEP | {"SLURM_KILL_BAD_EXIT": "0"}, "SLURM_STEP_NUM_TASKS", True),
        (STEP | {"SLURM_KILL_BAD_EXIT": "1"}, "SLURM_STEP_NUM_TASKS", False),
        (OMPI, "OMPI_COMM_WORLD_SIZE", False),
        (OMPI | {"HOLDFAST_ON_DEATH": "continue"}, "OMPI_COMM_WORLD_SIZE", True),
        ({}, "PMI_SIZE", False),
        ({}, "FLUX_JOB_SIZE", False),
        ({"HOLDFAST_ON_DEATH": "continue"}, "PMI_SIZE", True),
        (RAY | {"HOLDFAST_ON_DEATH": "continue"}, "WORLD_SIZE", True),
        (STEP | {"HOLDFAST_ON_DEATH": "end"}, "SLURM_STEP_NUM_TASKS", False),
    ],
)
def test_the_others_continue_where_the_launcher_leaves_them_alone(env, counted, continue_):
    assert leaves_survivors(env, counted) is continue_


def test_another_word_for_what_happens_on_death_is_refused():
    with pytest.raises(ConfigError, match="HOLDFAST_ON_DEATH must be continue or end, got 'stop'"):
        leaves_survivors({"HOLDFAST_ON_DEATH": "stop"}, "WORLD_SIZE")


@pytest.mark.parametrize(("size", "hubs"), [(2, 1), (3, 3), (4, 3), (100, 3)])
def test_two_hubs_are_never_made(size, hubs):
    assert num_hubs(size) == hubs


def test_a_process_that_torchrun_started_alone_may_have_to_resume():
    env = TORCHRUN | MEETING | {"WORLD_SIZE": "1", "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}

    group = sole_process(env)

    assert group is not None
    assert (group.rank, group.size, group.has_store) == (0, 1, True)
    assert launched_group(env) is None
    assert sole_process(env | {"WORLD_SIZE": "2"}) is None
    assert sole_process(env | {"TORCHELASTIC_USE_AGENT_STORE": "False"}) is None


def test_a_framework_that_shows_itself_one_process_does_not_hide_the_others(monkeypatch):
    monkeypatch.setattr(launchers, "_own", [])
    monkeypatch.setattr(os, "environ", clean_env(**TORCHRUN, **MEETING, WORLD_SIZE="4"))
    assert chosen("") == "gloo"

    os.environ.update(WORLD_SIZE="1", RANK="0")

    assert chosen("") == "gloo"
    settings = as_launched(Settings())
    assert (settings.fabric, settings.rank, settings.workers, settings.ranks) == ("gloo", 1, 4, "0,1,2,3")
    assert (rank_at_start(Settings()), leads_at_start(Settings())) == (1, False)
    assert as_launched(Settings(fabric="virtual")).fabric == "virtual"


@pytest.fixture
def under_torchrun(monkeypatch):
    monkeypatch.setattr(os, "environ", clean_env(**TORCHRUN, WORLD_SIZE="4"))


@pytest.mark.usefixtures("under_torchrun")
def test_a_session_that_would_train_alone_is_refused_and_leaves_no_folder(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = holdfast.Session(model, optimizer, checkpoint_dir=str(tmp_path / "saved"), checkpoint_every=1)

    with pytest.raises(ConfigError, match=r"WORLD_SIZE=4 \(torchrun\)"):
        next(session.steps(TensorDataset(torch.ones(4, 2)), 2))

    assert not (tmp_path / "saved").exists()


@pytest.mark.usefixtures("under_torchrun")
def test_virtual_workers_that_are_asked_for_by_name_are_meant():
    assert isinstance(connect("virtual", Endpoint(workers=2)), VirtualCommunicator)


@pytest.mark.parametrize(
    ("env", "rank", "leads"),
    [
        ({}, 0, True),
        ({"HOLDFAST_RANK": "2", "HOLDFAST_RANKS": "0,1,2"}, 2, False),
        ({"HOLDFAST_RANK": "1", "HOLDFAST_RANKS": "1,3"}, 1, True),  # a restart with the ranks that were left
        ({"HOLDFAST_RANK": "7", "HOLDFAST_RANKS": "0,1"}, 7, False),  # a newcomer
        ({"OMPI_COMM_WORLD_RANK": "1", "HOLDFAST_RANKS": "1,3"}, 3, False),
        ({"OMPI_COMM_WORLD_RANK": "0", "HOLDFAST_RANKS": "1,3"}, 1, True),
        ({"PMIX_RANK": "2"}, 2, False),
    ],
)
def test_a_worker_knows_its_rank_and_the_lead_before_it_is_connected(monkeypatch, env, rank, leads):
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "HOLDFAST_RANK", "HOLDFAST_RANKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    settings = Settings.from_env()

    assert (rank_at_start(settings), leads_at_start(settings)) == (rank, leads)
