"""deploy/Dockerfile: it fits the linter and the manifests, and copies all that its commands need.

No image is built here: that takes a daemon. The commands of its build stage are executed in a folder, by `make soak`.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from manifests import find

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"


def instructions() -> list[tuple[str, str]]:
    """Return instruction and arguments of each line."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def copied() -> list[tuple[str, str]]:
    """Return source in the repository and target of each file or folder that is copied."""
    moves = [rest.split() for word, rest in instructions() if word == "COPY" and not rest.startswith("--from")]
    return [(source, target) for *sources, target in moves for source in sources]


def build_stage() -> list[tuple[str, str]]:
    """Return the instructions of the stage that installs."""
    given = instructions()
    stages = [number for number, (word, _) in enumerate(given) if word == "FROM"]
    return given[stages[0] : stages[1]]


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("there is no hadolint: install the dependency group dev")
    return subprocess.run([program, str(path)], capture_output=True, text=True, timeout=60, check=False)


def test_the_linter_accepts_it_and_finds_what_is_not_pinned(tmp_path):
    done = lint(DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")

    careless = tmp_path / "Dockerfile"
    careless.write_text(DOCKERFILE.read_text().replace("FROM ${PYTHON_IMAGE} AS build", "FROM python:latest AS build"))

    found = lint(careless)
    assert found.returncode != 0
    assert "DL3007" in found.stdout


def test_its_user_is_that_of_the_manifests():
    users = [rest for word, rest in instructions() if word == "USER"]
    pod = find("indexed-job.yaml", "Job")["spec"]["template"]["spec"]["securityContext"]

    assert users == [f"{pod['runAsUser']}:{pod['runAsGroup']}"]
    assert users[-1].split(":")[0] != "0"


def test_everything_is_pinned():
    (image,) = [rest.partition("=")[2] for word, rest in instructions() if rest.startswith("PYTHON_IMAGE=")]
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", image)
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["cluster"]]:
        name, least = requirement.split(">=")
        version = [int(part) for part in re.findall(r"\d+", pins[name])]
        assert version >= [int(part) for part in least.split(".")], name
    installs = [rest for word, rest in instructions() if word == "RUN" and "pip install" in rest]
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in rest for rest in installs)


def test_what_it_copies_is_there_and_not_ignored():
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().split("\n")
    kept = [line[1:] for line in ignored if line.startswith("!")]

    assert "*" in ignored
    assert sorted(source for source, _ in copied()) == sorted(kept)
    assert all((ROOT / source).exists() for source, _ in copied())
    assert not any(fnmatch.fnmatch(source, "*.egg-info") for source in kept)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_commands_of_its_build_install_a_holdfast_that_trains(tmp_path):
    """As the image is built, but for the base image, and torch from the index that pip is configured for."""
    place, venv = tmp_path / "src", tmp_path / "holdfast"
    place.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HOLDFAST_"))}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    for word, rest in build_stage():
        if word == "ARG":
            name, _, value = rest.partition("=")
            env[name] = value
        elif word == "ENV":
            env["PATH"] = f"{venv / 'bin'}{os.pathsep}{env['PATH']}"
        elif word == "COPY":
            *sources, _ = rest.split()
            for source in sources:
                subprocess.run(["cp", "-r", str(ROOT / source), str(place)], check=True)
        elif word == "RUN":
            line = rest.replace("/opt/holdfast", str(venv)).replace('--index-url "${TORCH_INDEX}"', "")
            done = subprocess.run(["sh", "-c", line], cwd=place, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{rest}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

    shutil.rmtree(place)
    train = tmp_path / "train"
    train.mkdir()
    shutil.copy(ROOT / "examples" / "01_survive_a_kill.py", train / "train.py")
    words = [str(venv / "bin" / "holdfast"), "run", "--fabric", "gloo", "-n", "2", "--stop-after", "5", "train.py"]
    done = subprocess.run(
        words, cwd=train, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 4, done.stderr
