"""Options of `holdfast run` that a scheduler sets in the environment."""

from __future__ import annotations

import pytest

from holdfast.base.slurm import first_host, hosts, read_step
from holdfast.errors import ConfigError
from holdfast.launch.schedulers import read_scheduler

KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_STEP_NODELIST": "node[07-08]",
}
INDEXED = {"JOB_COMPLETION_INDEX": "1"}
JOBSET = INDEXED | {"JOBSET_NAME": "train", "REPLICATED_JOB_NAME": "workers"}
SEVERAL = {"nnodes": 2, "node_rank": 1, "fabric": "gloo"}
SLURM_URL = f"holdfast://node07:{20000 + 31000 % 12000}"

SLURM_4 = SLURM | {"SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "4"}
SLURM_PORT = SLURM_URL.rpartition(":")[2]

FOUND = {
    "nothing": ({}, {}, {}),
    "srun on four nodes": (
        SLURM_4 | {"SLURM_STEP_NODELIST": "node[07-08,11],gpu3"},
        {},
        SEVERAL | {"nnodes": 4, "rdzv": f"holdfast://node07:{SLURM_PORT},node08:{SLURM_PORT},node11:{SLURM_PORT}"},
    ),
    "srun on four nodes whose list cannot be read": (
        SLURM_4 | {"SLURM_STEP_NODELIST": "node[07-x],gpu3"},
        {},
        SEVERAL | {"nnodes": 4, "rdzv": SLURM_URL},
    ),
    "Kubeflow": (KUBEFLOW, {}, SEVERAL | {"workers": 4, "rdzv": "holdfast://job-node-0-0.job:29500"}),
    "Kubeflow, one pod": (KUBEFLOW | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}, {}, {"workers": 4}),
    "a range of one size": (KUBEFLOW | {"PET_NNODES": "1:1"}, {}, {"workers": 4}),
    "torchrun's rendezvous": (
        {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "head", "PET_MAX_RESTARTS": "7"},
        {},
        SEVERAL | {"rdzv": "holdfast://head:29400", "max_restarts": 7},
    ),
    "etcd": (
        {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "e:2379", "PET_RDZV_BACKEND": "etcd-v2"}
        | {"PET_RDZV_ID": "job7"},
        {},
        SEVERAL | {"rdzv": "etcd://e:2379/job7"},
    ),
    "a worker a core": ({"PET_NPROC_PER_NODE": "cpu"}, {}, {"workers": 6}),
    "a worker a GPU": ({"PET_NPROC_PER_NODE": "gpu"}, {}, {"workers": 2}),
    "a worker a GPU, if there are any": ({"PET_NPROC_PER_NODE": "auto"}, {}, {"workers": 2}),
    "options win": (KUBEFLOW, SEVERAL | {"nnodes": 3, "node_rank": 2, "workers": 1, "rdzv": "holdfast://h:1"}, {}),
    "an option wins over a value that cannot be used": (
        KUBEFLOW | {"PET_NPROC_PER_NODE": "many"},
        {"workers": 8, "fabric": "ulfm"},
        {"nnodes": 2, "node_rank": 1, "rdzv": "holdfast://job-node-0-0.job:29500"},
    ),
    "srun": (SLURM, {}, SEVERAL | {"rdzv": SLURM_URL}),
    "srun with hosts for mpirun": (SLURM, {"hosts": "slurm"}, {}),
    "srun on one node": (SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, {}, {}),
    "a batch script": ({name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NODEID")}, {}, {}),
    "the shell of salloc": (SLURM | {"SLURM_STEP_ID": str(0xFFFFFFFA)}, {}, {}),
    "Kubeflow's variables in a step of srun": (
        KUBEFLOW | SLURM,
        {},
        SEVERAL | {"workers": 4, "rdzv": "holdfast://job-node-0-0.job:29500"},
    ),
    "a task a node rank": (
        SLURM | {"SLURM_STEP_NUM_NODES": "1"},
        {"nnodes": 2, "node_rank": 0, "rdzv": "holdfast://h:1", "fabric": "gloo"},
        {},
    ),
    "an indexed job": (
        INDEXED,
        {"nnodes": 2, "rdzv": "holdfast://h:1"},
        {"node_rank": 1, "left_code": 4, "fabric": "gloo"},
    ),
    "an indexed job of one node": (INDEXED, {}, {}),
    "JobSet": (
        JOBSET,
        {"nnodes": 2},
        {"node_rank": 1, "left_code": 4, "fabric": "gloo", "rdzv": "holdfast://train-workers-0-0.train:29400"},
    ),
    "JobSet with several replicated jobs": (
        JOBSET | {"JOB_INDEX": "2", "PROCESSES_IN_JOB": "4"},
        {"nnodes": 12},
        {"node_rank": 9, "left_code": 4, "fabric": "gloo", "rdzv": "holdfast://train-workers-0-0.train:29400"},
    ),
}

WRONG = {
    "no number": ({"PET_NNODES": "two"}, {}, "PET_NNODES must be a whole number, at least 1, got 'two'"),
    "a range": ({"PET_NNODES": "1:3"}, {}, "PET_NNODES=1:3 is a range"),
    "workers by device": (
        {"PET_NPROC_PER_NODE": "gpu"},
        {},
        "PET_NPROC_PER_NODE=gpu asks for a worker for each GPU, and this node has none: give -n",
    ),
    "no workers": ({"PET_NPROC_PER_NODE": "0"}, {}, "PET_NPROC_PER_NODE must be a whole number, at least 1, got '0'"),
    "another rendezvous": (
        {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "h:1", "PET_RDZV_BACKEND": "zeus"},
        {},
        "PET_RDZV_BACKEND must be static, c10d, etcd or etcd-v2, got 'zeus'",
    ),
    "nodes differ": (
        SLURM | {"PET_NNODES": "4"},
        {},
        "PET_NNODES=4 and SLURM_STEP_NUM_NODES=2 contradict each other: give --nnodes",
    ),
    "node ranks differ": (
        KUBEFLOW | {"JOB_COMPLETION_INDEX": "0"},
        {},
        "PET_NODE_RANK=1 and JOB_COMPLETION_INDEX=0 contradict each other: give --node-rank",
    ),
    "a task a worker": (
        SLURM | {"SLURM_STEP_NUM_TASKS": "8"},
        {},
        "srun started 8 tasks on 2 nodes, and each would start the workers of a node: use srun --ntasks-per-node=1",
    ),
    "a replicated job of unknown size": (JOBSET | {"JOB_INDEX": "1"}, {"nnodes": 4}, "give --node-rank"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_a_scheduler_sets(name):
    env, given, values = FOUND[name]

    assert read_scheduler(env, given, cores=6, find_gpus=lambda: ("0", "1")).values == values


@pytest.mark.parametrize("name", WRONG)
def test_values_that_cannot_be_used_are_one_line(name):
    env, given, said = WRONG[name]

    with pytest.raises(ConfigError) as refused:
        read_scheduler(env, given, cores=6)

    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_gpus_auto_is_a_worker_a_core():
    assert read_scheduler({"PET_NPROC_PER_NODE": "auto"}, {}, cores=6).values == {"workers": 6}


def test_one_line_says_what_was_taken_from_where():
    said = read_scheduler(SLURM, {"rdzv": "holdfast://h:1"}, cores=6).said

    assert said == (
        "taken from the scheduler: --nnodes 2 (SLURM_STEP_NUM_NODES=2), --node-rank 1 (SLURM_NODEID=1), "
        "--fabric gloo (for several nodes)"
    )


def test_an_index_without_a_number_of_nodes_is_mentioned():
    assert "JOB_COMPLETION_INDEX=1 is not used" in read_scheduler(INDEXED, {}, cores=6).said
    assert read_scheduler(INDEXED, {"node_rank": 0}, cores=6).said == ""


def test_all_hosts_of_a_list_of_slurm():
    assert list(hosts("a[1-2]b[08-10],c,d[3]")) == [
        *("a1b08", "a1b09", "a1b10", "a2b08", "a2b09", "a2b10"),
        *("c", "d3"),
    ]
    assert list(hosts("")) == []


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node7,node8", "node7"),
        ("node[01-04,07],gpu3", "node01"),
        ("node[7,9]", "node7"),
        ("rack[2-3]-node[05-06]", "rack2-node05"),
        ("node[1-2].cluster,other", "node1.cluster"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_of_slurm(nodes, first):
    assert first_host(nodes) == first


def test_steps_and_jobs_have_ports_of_their_own():
    steps = [
        read_step(SLURM | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}) for job in (7, 8) for step in (0, 1)
    ]

    ports = {step.port for step in steps if step is not None}
    assert len(ports) == 4
    assert all(20000 <= port < 32000 for port in ports)
