"""The manifests of deploy/kubernetes: read, validated against the published schemas, and played as a controller would."""

import re
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
KUBERNETES = ("1.33", "1.37")
"""The oldest release that the manifests are for, and a newer one."""
ALLOWED = {
    "action": ("FailJob", "FailIndex", "Count", "Ignore", "FailJobSet", "RestartJobSet", "RestartJob"),
    "completionMode": ("Indexed",),
    "onJobFailureReasons": ("PodFailurePolicy", "FailedIndexes", "BackoffLimitExceeded", "DeadlineExceeded"),
    "operator": ("In", "NotIn"),
    "podReplacementPolicy": ("Failed",),
    "restartPolicy": ("Never",),
    "type": ("DisruptionTarget", "RuntimeDefault"),
}
"""Words that the API server checks, and the published schemas do not."""


class Invalid(Exception):
    """A manifest is not what its schema says."""


def documents(name):
    """Return the objects of a file."""
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def find(name, kind):
    """Return the object of one kind in a file."""
    (found,) = [each for each in documents(name) if each["kind"] == kind]
    return found


def validate(document):
    """Raise :class:`Invalid` unless every field of an object is in its published schema, with a value of its type.

    Kubernetes: its OpenAPI schemas, as the package kubernetes-validate has them. JobSet and Kubeflow Trainer: the models
    that Kubeflow generates from its own, as kubeflow-trainer-api.
    """
    _check_words(document)
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="install the dependency group dev")
    schemas = pytest.importorskip("kubernetes_validate", reason="install the dependency group dev")
    model = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }.get(document["kind"])
    try:
        if model is not None:
            _compare(document, model.from_dict(document).to_dict(), document["kind"])
        else:
            for version in KUBERNETES:
                schemas.validate(document, version, strict=True)
    except (schemas.ValidationError, ValueError) as error:
        raise Invalid(str(error)) from error


def _compare(given, kept, place):
    """The models drop fields that they do not know."""
    if isinstance(given, dict):
        if unknown := given.keys() - kept.keys():
            raise Invalid(f"{place} has no field {', '.join(sorted(unknown))}")
        for name, value in given.items():
            _compare(value, kept[name], f"{place}.{name}")
    elif isinstance(given, list):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            _compare(one, other, f"{place}[{number}]")
    elif given != kept:
        raise Invalid(f"{place} is {given!r}, and means {kept!r}")


def _check_words(value, name=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_words(inner, key)
    elif isinstance(value, list):
        for inner in value:
            _check_words(inner, name)
    elif name in ALLOWED and value not in ALLOWED[name]:
        raise Invalid(f"{name} is {value!r}, and must be one of {', '.join(ALLOWED[name])}")


def command_of(container, args=None):
    """Return the words with which a container starts."""
    return [*container["command"], *(args or container["args"])]


def environment_of(container, labels):
    """Return the environment of a container: literals, labels of its pod, and secrets."""
    found = {}
    for each in container["env"]:
        source = each.get("valueFrom", {})
        if "fieldRef" in source:
            (label,) = re.findall(r"^metadata\.labels\['(.*)'\]$", source["fieldRef"]["fieldPath"])
            found[each["name"]] = labels[label]
        else:
            found[each["name"]] = each.get("value", "a secret")
    return found
