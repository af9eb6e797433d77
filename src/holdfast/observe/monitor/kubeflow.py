"""Progress of a job in the status of its TrainJob: Kubeflow Trainer takes it by an authenticated POST.

Trainer sets three variables in each pod if its feature gate ``TrainJobStatus`` is on: a URL, and the files of its CA
certificate and of a token. The launcher of the first node reports to it, from the thread of a queue
(:mod:`holdfast.records.queued`).
"""

from __future__ import annotations

import datetime
import http.client
import json
import math
import ssl
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.records.progress import RunProgress
from holdfast.records.queued import NotTaken
from holdfast.records.types import JobRestarted, Record, Recovered, RunStarted, StepCommitted

URL, CA_CERT, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
"""Variables that Kubeflow Trainer sets."""
EVERY_S = 5.0
"""Shortest time between two reports; Kubeflow asks for it."""
LONGEST_S = 60.0
"""Longest time between two reports to a server that does not take them."""
_TIMEOUT_S = 5.0
_SHOWN = (RunStarted, StepCommitted, JobRestarted)
"""Records that change the status, besides those of a loss."""
_MOST_METRICS, _LONGEST_TEXT = 256, 64
"""Trainer refuses reports with more."""


def progress_reporter(env: Mapping[str, str], say: Callable[[str], None]) -> ProgressReporter | None:
    """Return a reporter if the environment is that of a TrainJob with progress, otherwise None.

    Args:
        env: The environment.
        say: Displays a line.
    """
    url, ca_cert, token = (env.get(name, "") for name in (URL, CA_CERT, TOKEN))
    if not (url and ca_cert and token):
        return None
    try:
        return ProgressReporter(url, Path(ca_cert), Path(token))
    except ConfigError as error:
        say(f"{ProgressReporter.trouble}: {error}")
        return None


class ProgressReporter:
    """A sink of records that reports progress, remaining time and metrics.

    Args:
        url: Where to, ``https://HOST[:PORT]/PATH``.
        ca_cert: File of the certificate that the server's is signed with.
        token: File of the token; read for each report, because tokens expire and are replaced.
        every_s: Shortest time between two reports, in seconds. What happens between them is left out.

    Raises:
        ConfigError: if the URL is not of this form: without TLS, the token could be read on its way.
    """

    name = "kubeflow"
    trouble = "progress is not reported to Kubeflow"
    longest_s = math.inf

    def __init__(self, url: str, ca_cert: Path, token: Path, *, every_s: float = EVERY_S) -> None:
        place = urllib.parse.urlsplit(url)
        if place.scheme != "https" or not place.hostname:
            raise ConfigError(f"{URL} must be https://HOST[:PORT]/PATH, got {url!r}")
        self._host, self._port = place.hostname, place.port or 443
        self._path = place.path or "/"
        self._ca_cert, self._token, self._every_s = ca_cert, token, every_s
        self._progress = RunProgress()
        self.pause_s = 0.0

    def take(self, records: Sequence[Record]) -> None:
        """Report what has changed; NotTaken says why the report did not arrive."""
        for record in records:
            self._progress.apply(record)
        if not any(isinstance(r, _SHOWN) or (isinstance(r, Recovered) and r.lost) for r in records):
            self.pause_s = 0.0
            return
        if why := self._report(status_of(self._progress)):
            self.pause_s = min(2 * max(self.pause_s, self._every_s), LONGEST_S)
            raise NotTaken(why)
        self.pause_s = self._every_s

    def close(self, end_s: float) -> None:
        """Do nothing: the last report was sent with the last records."""

    def _report(self, status: dict[str, Any]) -> str:
        """Send a report; return why it did not arrive, or "". The token is in no message."""
        body = json.dumps({"trainerStatus": status | {"lastUpdatedTime": _now()}})
        try:
            token = self._token.read_text().strip()
            trusted = ssl.create_default_context(cafile=str(self._ca_cert))
            # Neither a proxy nor a redirection may see the token.
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=_TIMEOUT_S, context=trusted)
            try:
                headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
                connection.request("POST", self._path, body, headers)
                answer = connection.getresponse()
                return (
                    "" if answer.status == http.client.OK else f"{self._host} answers {answer.status} {answer.reason}"
                )
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            return f"{self._host}:{self._port}: {error or type(error).__name__}"
        except ValueError:  # http.client shows the header that it refuses
            return f"the token in {self._token} is not one line of text"


def status_of(progress: RunProgress) -> dict[str, Any]:
    """Return the status in Kubeflow's words, without the time."""
    counts = {"step": progress.step, "workers": progress.workers, "recoveries": len(progress.recoveries)}
    metrics = {name[:_LONGEST_TEXT]: f"{value:.6g}" for name, value in progress.metrics.items() if name}
    metrics = dict(list(metrics.items())[: _MOST_METRICS - len(counts)])
    metrics |= {name: str(value) for name, value in counts.items()}
    status: dict[str, Any] = {"metrics": [{"name": name, "value": value} for name, value in metrics.items()]}
    if progress.planned:  # a stream has no end that is known
        status["progressPercentage"] = min(100, 100 * progress.step // progress.planned)
    if (left_s := progress.left_s) is not None:
        status["estimatedRemainingSeconds"] = round(left_s)
    return status


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
