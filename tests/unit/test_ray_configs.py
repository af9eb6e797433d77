"""What the trainer for Ray makes of its configurations, without Ray."""

import hashlib
from types import SimpleNamespace

import pytest

from holdfast.errors import ConfigError
from holdfast.integrations.ray.configs import JobScale, RunConfig, ScalingConfig, read_run, read_scaling
from holdfast.integrations.ray.function import MODULE, bind, call_kept
from holdfast.integrations.ray.jobs import make_job


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("pass")
    return path


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in ("HOLDFAST_SLICES", "HOLDFAST_CHECKPOINT_DIR"):
        monkeypatch.delenv(name, raising=False)


def scale(**given):
    return read_scaling(ScalingConfig(**given), 1)


def test_a_node_has_the_resources_of_its_workers():
    found = read_scaling(ScalingConfig(num_workers=(4, 8), use_gpu=True, resources_per_worker={"CPU": 3}), 2)

    assert found == JobScale(min_nodes=2, max_nodes=4, workers_per_node=2, bundle={"CPU": 6, "GPU": 2}, strategy="PACK")


def test_the_configurations_of_ray_are_read_as_they_are():
    idle = {"label_selector": None, "use_tpu": False, "topology": None, "trainer_resources": None}
    scaling = SimpleNamespace(
        num_workers=2,
        use_gpu=False,
        resources_per_worker=None,
        placement_strategy="SPREAD",
        accelerator_type="T4",
        **idle,
    )
    saving = SimpleNamespace(num_to_keep=3, checkpoint_score_attribute=None)
    run = SimpleNamespace(
        name="digits", storage_path="/shared/", storage_filesystem=None, callbacks=[], checkpoint_config=saving,
        failure_config=SimpleNamespace(max_failures=-1), worker_runtime_env={"env_vars": {"A": "1"}},
    )  # fmt: skip

    assert read_scaling(scaling, 1).bundle == {"CPU": 1.0, "accelerator_type:T4": 0.001}
    found = read_run(run)
    assert found.folder == "/shared/digits"
    assert found.options["max_restarts"] > 1000
    assert found.options["keep_last"] == 3
    assert found.runtime_env == {"env_vars": {"A": "1"}}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"num_workers": 0}, r"num_workers must be a whole number, at least 1, or a pair \(min, max\) of them, got 0"),
        ({"num_workers": (4, 2)}, r"num_workers must be \(min, max\) with min at most max, got \(4, 2\)"),
        ({"num_workers": (2, 2.5)}, r"num_workers must be a whole number.*got \(2, 2.5\)"),
        ({"num_workers": 1 << 30}, "num_workers must be at most .*, got 1073741824"),
        ({"placement_strategy": "ANY"}, "placement_strategy must be one of PACK, .* got 'ANY'"),
        ({"resources_per_worker": {"CPU": -1}}, r"resources_per_worker\['CPU'\] must be a number, at least 0, got -1"),
        ({"resources_per_worker": {"GPU": 1}}, "asks for 1 GPU, and use_gpu is False: set use_gpu=True"),
        ({"resources_per_worker": {"CPU": 0}}, "must ask for something"),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 0.5}}, "must be 1, since each worker uses one GPU, got 0.5"),
    ],
)
def test_what_cannot_be_placed_is_refused_in_one_line(given, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        scale(**given)

    assert len(str(caught.value).splitlines()) == 1


def test_workers_fill_whole_nodes():
    with pytest.raises(ConfigError, match=r"num_workers must be a multiple of workers_per_node \(2\), got 3"):
        read_scaling(ScalingConfig(num_workers=3), 2)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (SimpleNamespace(name="a", storage_path="/s", callbacks=[print]), "callbacks is not supported"),
        (SimpleNamespace(name="a", storage_path=None), "the run 'a' needs a storage_path"),
        (SimpleNamespace(name="a/b", storage_path="/s"), "must be the name of a directory, got 'a/b'"),
    ],
)
def test_what_has_no_effect_or_no_place_is_refused(given, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read_run(given)


def test_the_number_of_slices_does_not_depend_on_when_nodes_come(script):
    job = make_job(script, ["--epochs", "2"], scale(num_workers=(2, 4)), {}, "", "")

    assert (job.nnodes, job.settings.workers, job.settings.slices) == (4, 1, 4)
    assert (job.is_managed, job.gpus, job.args) == (True, "none", ("--epochs", "2"))
    assert make_job(script, [], scale(num_workers=2), {"slices": 8}, "", "").settings.slices == 8


def test_checkpoints_and_report_are_where_the_run_is(script, tmp_path):
    run = read_run(RunConfig(name="digits", storage_path=str(tmp_path)))

    job = make_job(script, [], scale(), {"checkpoint_every": 10, "max_restarts": 1}, run.folder, "")

    assert job.settings.checkpoint_dir == f"{tmp_path}/digits/checkpoints"
    assert job.report_dir == tmp_path / "digits" / "report"
    assert (job.settings.checkpoint_every, job.max_restarts) == (10, 1)
    assert make_job(script, [], scale(), {}, "s3://bucket/digits", "").report_dir is None


def test_without_a_script_workers_run_the_module_that_calls_the_function():
    job = make_job(None, [], scale(), {}, "", "")

    assert job.module == MODULE
    assert job.words[:2] == ("-m", MODULE)


@pytest.mark.parametrize(
    ("options", "rdzv", "complaint"),
    [
        ({"nnodes": 2}, "", r"options\['nnodes'\] is not for Ray: scaling_config, run_config and Ray determine it"),
        ({"checkpoint_evry": 2}, "", r"options\['checkpoint_evry'\] is unknown; known options are .*checkpoint_every"),
        ({"checkpoint_every": 2}, "", "--checkpoint-every needs --checkpoint-dir"),
        ({"slices": -1}, "", "slices must be at least 0"),
        ({}, "holdfast://a:1", r"rdzv must be etcd://.*, got 'holdfast://a:1'"),
    ],
)
def test_options_that_cannot_be_used_are_refused_in_one_line(script, options, rdzv, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        make_job(script, [], scale(), options, "", rdzv)

    assert len(str(caught.value).splitlines()) == 1


def test_a_function_gets_its_configuration_if_it_takes_one():
    assert bind(lambda: "none", None)() == "none"
    assert bind(lambda config: config, None)() == {}
    assert bind(lambda config: config, {"lr": 1})() == {"lr": 1}
    assert bind(lambda config=None: config, None)() is None


@pytest.mark.parametrize(
    ("train_fn", "config"),
    [(lambda: None, {"lr": 1}), (lambda a, b: None, {}), (lambda *, a: None, None), (lambda **more: None, {})],
)
def test_a_function_that_cannot_be_called_so_is_refused(train_fn, config):
    with pytest.raises(ConfigError, match="must take no argument, or one: train_loop_config, a dict"):
        bind(train_fn, config)


def test_an_altered_function_is_not_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "function"
    path.write_bytes(b"altered")
    monkeypatch.setenv("HOLDFAST_RAY_FUNCTION", str(path))
    monkeypatch.setenv("HOLDFAST_RAY_FUNCTION_SHA256", hashlib.sha256(b"as it was").hexdigest())

    with pytest.raises(ConfigError, match="is not the function that the driver packed: it was altered"):
        call_kept()
