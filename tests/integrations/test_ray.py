"""The trainer for Ray on a cluster of this machine, whose nodes are killed and added while it trains."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray
from etcd import Cluster as Etcd
from jobs import clean_env
from ray.cluster_utils import Cluster

from holdfast.integrations.ray import HoldfastTrainer, RunConfig, ScalingConfig, TrainingFailed
from holdfast.integrations.ray.configs import read_run, read_scaling
from holdfast.launch.supervise.processes import Process, children_of, descendants_of

SCRIPT = Path(__file__).with_name("train_ray.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "01_survive_a_kill.py"
STEPS = 240  # of the script
DRIVER = """
import sys
import ray
from holdfast.integrations.ray import HoldfastTrainer, RunConfig, ScalingConfig

def train(config):
    import train_ray  # which lies beside this script
    train_ray.train(config["folder"])

ray.init()
run = RunConfig(name="run", storage_path=sys.argv[1])
HoldfastTrainer(train, ScalingConfig(num_workers=2), run, train_loop_config={"folder": sys.argv[1]}).fit()
"""
PATIENCE_S = 360.0  # starting a node of Ray takes seconds on a quiet machine, a minute on a busy one
SMALL = {"object_store_memory": 80 << 20}

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # Ray leaves sockets and files to the garbage collector
]


class Nodes:
    """A cluster with as many nodes as a test asks for, one CPU each; the head has none."""

    def __init__(self):
        self.cluster = Cluster(
            initialize_head=True, head_node_args={**SMALL, "num_cpus": 0, "include_dashboard": False}
        )

    def want(self, count):
        for node in list(self.cluster.worker_nodes)[count:]:
            self.cluster.remove_node(node)
        while len(self.cluster.worker_nodes) < count:
            self.cluster.add_node(**SMALL, num_cpus=1)

    def of(self, pid):
        """Return the node and the actor below which a process runs."""
        for node in self.cluster.worker_nodes:
            raylet = node.all_processes["raylet"][0].process.pid
            for child in children_of(raylet):
                if pid in {below.pid for below in descendants_of(child)}:
                    return node, child
        raise AssertionError(f"process {pid} belongs to no node")

    def power_off(self, node):
        """Kill all processes of a node; return those that Ray did not start itself."""
        raylet = node.all_processes["raylet"][0].process.pid
        processes = [Process.of(raylet), *descendants_of(raylet)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in processes:
                process.send(number)
        self.cluster.remove_node(node, allow_graceful=False)
        return processes


@pytest.fixture(scope="module")
def nodes():
    os.environ["RAY_DEDUP_LOGS"] = "0"
    nodes = Nodes()
    ray.init(address=nodes.cluster.address)
    yield nodes
    ray.shutdown()
    nodes.cluster.shutdown()


class Fit(threading.Thread):
    """A trainer in the background, which a test disturbs."""

    def __init__(self, trainer):
        super().__init__(daemon=True)
        self.trainer, self.result, self.error = trainer, None, None
        self.start()

    def run(self):
        try:
            self.result = self.trainer.fit()
        except BaseException as error:
            self.error = error

    def wait(self):
        self.join(PATIENCE_S)
        assert not self.is_alive(), "the job has not ended"
        if self.error is not None:
            raise self.error
        return self.result


def until(what, said):
    ends_s = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < ends_s, said
        time.sleep(0.1)
    return found


def begun(folder):
    """Return the process of each worker that has begun a step, by rank."""
    return {int(path.name[5:]): int(text) for path in Path(folder).glob("rank-*") if (text := path.read_text())}


def undisturbed(tmp_path, workers, script=SCRIPT):
    """Return the sha256 of the weights that ``holdfast run`` ends with."""
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    (folder / "fast").touch()
    words = [sys.executable, "-m", "holdfast", "run", "--fabric", "gloo", "-n", str(workers), "--json", script]
    done = subprocess.run(
        [*words, folder], env=clean_env(), capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    return json.loads(done.stdout)["replicas"]["sha256"]


def slow(tmp_path, num_workers, **options):
    return HoldfastTrainer(SCRIPT, ScalingConfig(num_workers=num_workers), args=[str(tmp_path)], options=options)


def test_a_lost_node_is_placed_again_and_no_bit_changes(nodes, tmp_path):
    nodes.want(3)
    fit = Fit(slow(tmp_path, 2))
    until(lambda: len(begun(tmp_path)) == 2, "two workers have begun")
    victim = begun(tmp_path)[1]
    node, _ = nodes.of(victim)

    killed = nodes.power_off(node)

    assert victim in {process.pid for process in killed}
    until(lambda: not any(process.is_alive() for process in killed), "the node is without processes")
    until(lambda: max(begun(tmp_path)) > 1, "a new worker has begun, on the third node")
    (tmp_path / "fast").touch()
    result = fit.wait()
    assert [failure["rank"] for failure in result.report["failures"]] == [1]
    assert len(result.report["joined"]) == 1
    assert result.report["replicas"]["sha256"] == undisturbed(tmp_path, 2)


def test_a_job_grows_to_nodes_that_come_later_and_no_bit_changes(nodes, tmp_path):
    nodes.want(2)
    fit = Fit(slow(tmp_path, (2, 4)))
    until(lambda: len(begun(tmp_path)) == 2, "two workers have begun")

    nodes.want(4)

    until(lambda: len(begun(tmp_path)) == 4, "two more have begun")
    (tmp_path / "fast").touch()
    result = fit.wait()
    assert len(result.report["joined"]) == 2
    assert not result.report["failures"]
    assert result.report["replicas"]["sha256"] == undisturbed(tmp_path, 4)


def test_workers_end_with_the_actor_of_their_node(nodes, tmp_path):
    nodes.want(2)
    fit = Fit(slow(tmp_path, 2, node_timeout_s=5.0))
    until(lambda: len(begun(tmp_path)) == 2, "two workers have begun")
    worker = Process.of(begun(tmp_path)[1])
    _, actor = nodes.of(worker.pid)
    below = [process for process in descendants_of(actor) if process.is_alive()]

    os.kill(actor, signal.SIGKILL)

    assert worker in below
    until(lambda: not any(process.is_alive() for process in below), "nothing that the actor started is left")
    until(lambda: max(begun(tmp_path)) > 1, "a new actor has begun in the same place")
    (tmp_path / "fast").touch()
    assert fit.wait().report["replicas"]["sha256"] == undisturbed(tmp_path, 2)


def test_a_job_that_lost_all_nodes_starts_again_from_its_checkpoint(nodes, tmp_path):
    nodes.want(2)
    run = RunConfig(name="run", storage_path=str(tmp_path))
    fit = Fit(
        HoldfastTrainer(
            SCRIPT, ScalingConfig(num_workers=2), run, args=[str(tmp_path)], options={"checkpoint_every": 2}
        )
    )
    until(lambda: list(tmp_path.glob("run/checkpoints/step-*")), "there is a checkpoint")
    before = begun(tmp_path)

    for _, actor in [nodes.of(pid) for pid in before.values()]:
        os.kill(actor, signal.SIGKILL)

    until(lambda: not before.items() & begun(tmp_path).items(), "other processes train")
    (tmp_path / "fast").touch()
    result = fit.wait()
    assert 0 < result.report["steps"] < STEPS, "it resumed"
    assert result.report["replicas"]["sha256"] == undisturbed(tmp_path, 2)


@pytest.fixture
def driver(nodes, tmp_path):
    """Start a driver in a process of its own; it is killed at the end."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    shutil.copy(SCRIPT, tmp_path)
    env = clean_env(RAY_ADDRESS=nodes.cluster.address)
    process = subprocess.Popen(
        [sys.executable, script, tmp_path],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait()


def test_an_interrupt_of_the_driver_saves_and_says_how_to_go_on(nodes, driver, tmp_path):
    nodes.want(2)
    until(lambda: len(begun(tmp_path)) == 2, "two workers have begun")

    driver.send_signal(signal.SIGINT)

    _, said = driver.communicate(timeout=PATIENCE_S)
    last = said.strip().splitlines()[-1]
    assert "TrainingFailed: stopped on request before step" in last
    assert last.endswith("; resume with options={'resume': True}")
    assert list(tmp_path.glob("run/checkpoints/step-*"))


def test_nothing_outlives_the_driver(nodes, driver, tmp_path):
    nodes.want(2)
    until(lambda: len(begun(tmp_path)) == 2, "two workers have begun")
    below = [process for pid in begun(tmp_path).values() for process in descendants_of(nodes.of(pid)[1])]

    driver.kill()

    assert driver.wait() == -signal.SIGKILL
    assert {process.pid for process in below} >= set(begun(tmp_path).values())
    until(lambda: not any(process.is_alive() for process in below), "no process of the job is left")


def test_with_etcd_the_driver_hosts_nothing_and_no_key_is_left(nodes, tmp_path):
    nodes.want(2)
    (tmp_path / "fast").touch()

    with Etcd(tmp_path) as etcd:
        trainer = HoldfastTrainer(SCRIPT, ScalingConfig(num_workers=2), args=[str(tmp_path)], rdzv=etcd.url("train"))
        result = trainer.fit()
        assert etcd.keys("holdfast/") == [], "no key of the run is left"

    assert result.report["replicas"]["sha256"] == undisturbed(tmp_path, 2)


def test_the_configurations_of_ray_train_are_accepted(tmp_path):
    theirs = pytest.importorskip("ray.train")

    scale = read_scaling(theirs.ScalingConfig(num_workers=(2, 4), resources_per_worker={"CPU": 2}), 2)
    run = read_run(
        theirs.RunConfig(
            name="a",
            storage_path=str(tmp_path),
            failure_config=theirs.FailureConfig(max_failures=3),
            checkpoint_config=theirs.CheckpointConfig(num_to_keep=2),
        )
    )

    assert (scale.min_nodes, scale.max_nodes, scale.bundle) == (1, 2, {"CPU": 4})
    assert run.folder == f"{tmp_path}/a"
    assert run.options == {"max_restarts": 3, "keep_last": 2}


def test_the_example_runs_by_its_path_and_no_bit_differs(nodes, tmp_path):
    nodes.want(2)

    result = HoldfastTrainer(EXAMPLE, ScalingConfig(num_workers=2)).fit()

    assert result.metrics["accuracy"] > 0.9
    assert result.error is None
    assert result.report["replicas"]["sha256"] == undisturbed(tmp_path, 2, EXAMPLE)


def test_what_a_function_logs_and_saves_is_in_the_result(nodes, tmp_path):
    nodes.want(2)

    def train(config):
        import torch

        import holdfast

        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=config["lr"]))
        data = [(torch.ones(4), torch.tensor(1))] * 64
        for step in session.steps(data, batch_size=8, epochs=1):
            for x, y in step:
                loss = torch.nn.functional.cross_entropy(model(x), y)
                step.log(double=2 * loss)
                step.backward(loss)
            if config.get("fails") and step.number == 5:
                raise ValueError("a bug in the function")
        session.log(lr=config["lr"])

    def trainer(name, **config):
        return HoldfastTrainer(
            train,
            ScalingConfig(num_workers=2),
            RunConfig(name=name, storage_path=str(tmp_path)),
            train_loop_config={"lr": 0.5, **config},
            options={"checkpoint_every": 4},
        )

    result = trainer("good").fit()
    with pytest.raises(TrainingFailed) as caught:
        trainer("bad", fails=True).fit()

    assert result.metrics["double"] == pytest.approx(2 * result.metrics["loss"])
    assert result.metrics["lr"] == 0.5
    assert result.path == f"{tmp_path}/good"
    assert Path(result.checkpoint).is_dir()
    assert Path(result.path, "report", "report.json").is_file()
    assert "step 5: ValueError: a bug in the function" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert "raise ValueError" in caught.value.__notes__[0]
    assert caught.value.result.error is caught.value


def test_without_room_one_line_says_what_is_missing(nodes):
    nodes.want(2)

    with pytest.raises(TrainingFailed, match=r"no room for 9 nodes with \{'CPU': 1.0\} each within 3 s .*CPU 2\. "):
        HoldfastTrainer(EXAMPLE, ScalingConfig(num_workers=9), options={"rdzv_timeout_s": 3.0}).fit()


def test_a_mistake_on_the_nodes_is_one_line(nodes, tmp_path):
    nodes.want(2)

    with pytest.raises(TrainingFailed, match="there is no script") as caught:
        HoldfastTrainer(tmp_path / "missing.py", ScalingConfig(num_workers=2)).fit()

    assert len(str(caught.value).splitlines()) == 1
