"""Object storage for checkpoints that is slow, hangs, resets connections, or answers 503."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import random
import tempfile
import threading
import urllib.parse
import uuid
from collections.abc import Iterable
from dataclasses import replace

from campaign.attacks.base import End, Kind, Launch, Running, moment
from campaign.attacks.mechanisms.afterwards import afterwards
from campaign.attacks.mechanisms.bad_server import BadServer, Mode
from campaign.attacks.mechanisms.kept import Kept
from campaign.attacks.mechanisms.shared import Server, running_server
from campaign.plan import Attack, Job

MODES = tuple(mode.value for mode in Mode if mode is not Mode.WORKS)
_BAD: Kept[BadServer] = Kept()
_STARTING = threading.Lock()


def server() -> Server:
    """A server with the protocol of S3 that works, one for all plans of this process."""
    with _STARTING:
        return _start()


@functools.cache
def _start() -> Server:
    ends = contextlib.ExitStack()
    atexit.register(ends.close)
    folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="s3-"))
    found = ends.enter_context(running_server(folder))
    ends.enter_context(afterwards('kill -KILL "$1"', found.pid))
    os.environ.update(found.env)  # the campaign itself reads checkpoints from it, to judge
    return found


class StorageFails(Kind):
    """Checkpoints are in S3, and the storage does not do what it should for some seconds from its next use on."""

    name = "object-storage"
    weight = 0.5
    takes = frozenset(("checkpoints", "loopback"))

    def missing(self) -> str:
        absent = [name for name in ("moto", "flask", "obstore") if importlib.util.find_spec(name) is None]
        return f"these packages are not installed: {', '.join(absent)}" if absent else ""

    def suits(self, job: Job) -> bool:
        return job.every > 0 and job.script != "ddp"  # which saves nothing

    def draw(self, rng: random.Random, job: Job) -> Attack:
        values = {"mode": rng.choice(MODES), "lasts_s": rng.choice((0.3, 2.0, 6.0)), "delay_ms": 200}
        return Attack(self.name, values=values, **moment(rng))

    def end(self, attack: Attack, job: Job) -> End:
        """At the start a job must look for checkpoints, and may refuse if it cannot."""
        return End.REFUSES if attack.since == "start" else End.SURVIVES

    def prepare(self, attack: Attack, launch: Launch) -> None:
        works = server()
        port = urllib.parse.urlsplit(works.url).port
        assert port is not None
        bad, is_new = _BAD.make(launch, lambda: BadServer(port))
        if is_new:
            launch.undo.callback(bad.close)
            bucket = f"bucket-{uuid.uuid4().hex[:12]}"
            works.make_bucket(bucket)
            launch.env |= {**works.env, "AWS_ENDPOINT_URL": bad.url}
            launch.checkpoints = f"s3://{bucket}/run"

    def strike(self, attack: Attack, running: Running) -> bool:
        bad, values = _BAD.get(running.launch), attack.values
        with bad.turn:
            before = bad.struck
            bad.mode, bad.delay_s = Mode(values["mode"]), values["delay_ms"] / 1000
            while bad.struck == before and running.sleep(0.01):  # seconds may pass between two uses of the storage
                pass
            running.sleep(values["lasts_s"])
            bad.mode = Mode.WORKS
            struck = bad.struck - before
        running.notes.append(f"storage {values['mode']}: {struck} connections")
        return struck > 0

    def repair(self, attack: Attack, launch: Launch) -> None:
        _BAD.get(launch).mode = Mode.WORKS

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        if attack.values["mode"] != MODES[0]:
            yield replace(attack, values={**attack.values, "mode": MODES[0]})


KINDS: tuple[Kind, ...] = (StorageFails(),)
