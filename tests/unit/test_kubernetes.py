"""The manifests of deploy/kubernetes fit the published schemas, and set what `holdfast run` reads."""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path

import pytest
import typer
from manifests import FOLDER, Invalid, command_of, documents, environment_of, find, validate

from holdfast.base.rules import check_rules
from holdfast.cli import app
from holdfast.launch.job_rules import NODE_RULES

DOCUMENTS = [
    (path.name, number, document)
    for path in sorted(FOLDER.glob("*.yaml"))
    for number, document in enumerate(documents(path.name))
]
DO_NOT_REQUEUE = {2, 3, 93}


@pytest.mark.parametrize(
    "document", [each for *_, each in DOCUMENTS], ids=[f"{name}-{each['kind']}" for name, _, each in DOCUMENTS]
)
def test_a_manifest_fits_its_schema_and_a_misspelt_field_does_not(document):
    validate(document)
    wrong = copy.deepcopy(document)
    wrong["spec"]["selektor"] = "x"

    with pytest.raises(Invalid, match="selektor"):
        validate(wrong)


@pytest.mark.parametrize(
    ("name", "kind", "where", "field"),
    [
        ("indexed-job.yaml", "Job", ("template", "spec", "containers", 0), "terminationMessagePolicie"),
        ("jobset.yaml", "JobSet", ("replicatedJobs", 0, "template", "spec"), "backoffLimitPerIndexes"),
        ("kubeflow-runtime.yaml", "ClusterTrainingRuntime", ("mlPolicy",), "nodes"),
        ("kubeflow-trainjob.yaml", "TrainJob", ("trainer",), "numProcsPerNode"),
    ],
)
def test_a_misspelt_field_is_found_at_any_depth(name, kind, where, field):
    wrong = copy.deepcopy(find(name, kind))
    place = wrong["spec"]
    for step in where:
        place = place[step]
    place[field] = "x"

    with pytest.raises(Invalid, match=field):
        validate(wrong)


def test_a_word_or_a_type_that_is_not_allowed_is_found():
    job = find("indexed-job.yaml", "Job")
    action, number = copy.deepcopy(job), copy.deepcopy(job)
    action["spec"]["podFailurePolicy"]["rules"][0]["action"] = "Failjob"
    number["spec"]["backoffLimitPerIndex"] = "many"

    with pytest.raises(Invalid, match="Failjob"):
        validate(action)
    with pytest.raises(Invalid, match="many"):
        validate(number)


def indexed_job():
    spec = find("indexed-job.yaml", "Job")["spec"]
    return spec, spec["template"]["spec"], {}, None


def jobset():
    given = find("jobset.yaml", "JobSet")
    (replicated,) = given["spec"]["replicatedJobs"]
    labels = {
        "jobset.sigs.k8s.io/jobset-name": given["metadata"]["name"],
        "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"],
    }
    spec = replicated["template"]["spec"]
    return spec, spec["template"]["spec"], labels, None


def kubeflow():
    (replicated,) = find("kubeflow-runtime.yaml", "ClusterTrainingRuntime")["spec"]["template"]["spec"][
        "replicatedJobs"
    ]
    spec = replicated["template"]["spec"]
    trainer = find("kubeflow-trainjob.yaml", "TrainJob")["spec"]["trainer"]
    sized = spec | {"completions": trainer["numNodes"], "parallelism": trainer["numNodes"]}
    return sized, spec["template"]["spec"], {}, trainer


def as_kubeflow(name, trainer, index):
    """Return what the plugin `torch` of Kubeflow Trainer sets."""
    return {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }


@pytest.fixture
def job_of(tmp_path, monkeypatch):
    """Return the job that a command starts in an environment; nothing is started."""
    jobs = []

    def keep(job, view):
        check_rules(NODE_RULES, job)
        jobs.append(job)
        raise KeyboardInterrupt  # as before a job begins

    def start(command, env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        typer.main.get_command(app).main(command[1:], standalone_mode=False)
        return jobs.pop()

    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("holdfast.launch.launcher.launch", keep)
    return start


@pytest.mark.parametrize(
    ("made", "rdzv"),
    [
        (indexed_job, "etcd://etcd-0.etcd:2379,etcd-1.etcd:2379,etcd-2.etcd:2379/train"),
        (jobset, "holdfast://train-workers-0-0.train:29400"),
        (kubeflow, "holdfast://train-node-0-0.train:29500"),
    ],
)
def test_each_pod_is_the_node_of_its_index(made, rdzv, job_of):
    spec, pod, labels, trainer = made()
    (container,) = pod["containers"]
    command = command_of(container, trainer and trainer["args"])
    assert command[:2] == ["holdfast", "run"], "the first process receives the SIGTERM"

    for index in (0, spec["completions"] - 1):
        env = environment_of(container, labels) | {"JOB_COMPLETION_INDEX": str(index)}
        job = job_of(command, env | (as_kubeflow("train", trainer, index) if trainer else {}))

        assert (job.nnodes, job.node_rank, job.settings.workers) == (spec["parallelism"], index, 8)
        assert (job.rdzv, job.settings.fabric) == (rdzv, "gloo")
        assert job.settings.resume
        assert job.grace_s + 20 <= pod["terminationGracePeriodSeconds"]
        assert job.left_code == 4, "0 would complete the index of a pod that is drained"
        (code_rule, disruption) = spec["podFailurePolicy"]["rules"]
        assert set(code_rule["onExitCodes"]["values"]) == {2, 3, job.no_requeue_code} == DO_NOT_REQUEUE
        assert code_rule["onExitCodes"]["containerName"] == container["name"]
        assert disruption["action"] == "Ignore"


@pytest.mark.parametrize("made", [indexed_job, jobset, kubeflow])
def test_pods_can_write_where_they_must_and_nowhere_else(made):
    _, pod, _, trainer = made()
    (container,) = pod["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}

    assert mounts == {"runs": "/runs", "tmp": "/tmp", "shm": "/dev/shm"}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    claim = find("storage.yaml", "PersistentVolumeClaim")["metadata"]["name"]
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim
    assert "--checkpoint-dir=/runs/train" in command_of(container, trainer and trainer["args"])
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_indexed_job_finds_its_etcd_and_is_let_in():
    job = find("indexed-job.yaml", "Job")
    service, members = find("etcd.yaml", "Service"), find("etcd.yaml", "StatefulSet")["spec"]
    policy = find("etcd.yaml", "NetworkPolicy")["spec"]
    labels = members["template"]["metadata"]["labels"]
    names = [f"etcd-{n}.{members['serviceName']}" for n in range(members["replicas"])]
    (args,) = [each["args"] for each in members["template"]["spec"]["containers"]]
    clients, peers = policy["ingress"]

    assert members["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == policy["podSelector"]["matchLabels"] == labels
    assert f"--rdzv=etcd://{','.join(f'{name}:2379' for name in names)}/train" in command_of(container_of(job))
    assert f"--initial-cluster={','.join(f'{name[:6]}=http://{name}:2380' for name in names)}" in args
    allowed = clients["from"][0]["podSelector"]["matchLabels"].items()
    assert allowed <= job["spec"]["template"]["metadata"]["labels"].items()
    assert peers["from"][0]["podSelector"]["matchLabels"] == labels
    assert job["spec"]["template"]["spec"]["subdomain"] == find("indexed-job.yaml", "Service")["metadata"]["name"]


def container_of(job):
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "kubernetes.md"


def commands_of_the_page():
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("line", commands_of_the_page())
def test_a_command_of_the_page_names_what_is_there(line):
    """They need a cluster or an engine: here each is read, and everything that it names must exist."""
    words = shlex.split(line.replace("$(openssl rand -hex 16)", "secret"))
    names = {(each["kind"].lower(), each["metadata"]["name"]) for *_, each in DOCUMENTS}
    secrets = {
        (source["name"], source["key"])
        for made in (jobset, kubeflow)
        for each in made()[1]["containers"][0]["env"]
        if (source := each.get("valueFrom", {}).get("secretKeyRef"))
    }
    image = indexed_job()[1]["containers"][0]["image"]

    match words:
        case ["docker", "build", "-f", dockerfile, "-t", tag, "."]:
            assert (FOLDER.parents[1] / dockerfile).is_file()
            assert tag == image
        case ["docker", "push", tag]:
            assert tag == image
        case ["kubectl", "apply", *files]:
            assert files[::2] == ["-f"] * (len(files) // 2)
            assert all((FOLDER.parents[1] / file).is_file() for file in files[1::2])
        case ["kubectl", "create", "secret", "generic", name, literal]:
            assert secrets == {(name, literal.removeprefix("--from-literal=").partition("=")[0])}
        case ["kubectl", "rollout", "status", what] | ["kubectl", "logs", "--follow", what]:
            assert tuple(what.split("/")) in names
        case ["kubectl", "delete", kind, name]:
            assert (kind, name) in names
        case ["kubectl", "get", kind, name, "-o", path]:
            assert (kind, name) in names
            models = pytest.importorskip("kubeflow_trainer_api.models", reason="install the dependency group dev")
            fields = {each.alias for each in models.TrainerV1alpha1TrainJobStatus.model_fields.values()}
            assert path.removeprefix("jsonpath={.status.").removesuffix("}") in fields
        case _:
            pytest.fail(f"no test reads this command: {line}")


def test_every_manifest_and_build_argument_is_on_the_page():
    text = PAGE.read_text()
    arguments = re.findall(r"^ARG (\w+)=", (FOLDER.parent / "Dockerfile").read_text(), flags=re.M)

    assert [path.name for path in FOLDER.glob("*.yaml") if f"`{path.name}`" not in text] == []
    assert len(arguments) == 4
    assert [name for name in arguments if f"| `{name}` |" not in text] == []
