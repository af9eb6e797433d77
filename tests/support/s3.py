"""A server with the S3 protocol, as a separate process on this machine, and raw access to its objects."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

START_S = 60
SIGNED = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
"""The server requires a signature but does not verify it."""


class Server:
    """Raw access by plain HTTP, which shares no code with the tested client."""

    def __init__(self, url, process):
        self.url = url
        self.kill, self.pid = process.kill, process.pid
        self.env = {
            "NO_PROXY": "127.0.0.1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url,
        }

    def use(self, patch):
        """Make this the server that this process and its children use."""
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in self.env.items():
            patch.setenv(name, value)

    def make_bucket(self, bucket):
        self._ask("PUT", bucket)

    def put(self, bucket, key, data):
        self._ask("PUT", f"{bucket}/{urllib.parse.quote(key)}", data)

    def get(self, bucket, key):
        return self._ask("GET", f"{bucket}/{urllib.parse.quote(key)}")

    def delete(self, bucket, key):
        self._ask("DELETE", f"{bucket}/{urllib.parse.quote(key)}")

    def keys(self, bucket):
        """Every key, sorted; at most a thousand."""
        return sorted(re.findall("<Key>([^<]*)</Key>", self._ask("GET", f"{bucket}?list-type=2").decode()))

    def uploads(self, bucket):
        """Keys of multipart uploads in progress."""
        return re.findall("<Key>([^<]*)</Key>", self._ask("GET", f"{bucket}?uploads").decode())

    def _ask(self, method, path, data=None):
        headers = {"Authorization": SIGNED}
        request = urllib.request.Request(f"{self.url}/{path}", data, headers, method=method)  # noqa: S310
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return answer.read()


@contextlib.contextmanager
def running_server(folder):
    """Start a server; its output goes to a file in ``folder``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    log = Path(folder, "moto.log")
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            server = Server(f"http://127.0.0.1:{port}", process)
            _wait(server, process, log)
            yield server
        finally:
            process.kill()


def _wait(server, process, log):
    end_s = time.monotonic() + START_S
    while True:
        try:
            return server.make_bucket("it-answers")
        except urllib.error.URLError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end_s, log.read_text()
        time.sleep(0.1)
