"""A server like Kubeflow Trainer's: HTTPS, checks the token of each report, and keeps what it takes."""

import contextlib
import datetime
import http.server
import ipaddress
import json
import ssl
import threading
import time

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/train/status"


def write_certificate(folder):
    """Write a certificate for 127.0.0.1 that signs itself, and its key; return both paths."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "trainer")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    certificate, secret = folder / "ca.crt", folder / "tls.key"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate, secret


class TrainerServer:
    """The server, as a context; ``tokens`` are those that it accepts.

    Args:
        folder: Folder for its certificate and the token file of the job.
        silent: It accepts connections, and never answers.
    """

    def __init__(self, folder, *, silent=False):
        folder.mkdir(exist_ok=True)
        self.ca_cert, key = write_certificate(folder)
        self.token = folder / "token"
        self.token.write_text("first-token\n")
        self.tokens = {"first-token"}
        self.taken, self.refused, self.times_s = [], 0, []
        self.is_closed = threading.Event()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.ca_cert, key)
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler(silent))
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self._server.server_port}{PATH}"

    @property
    def env(self):
        return {
            "KUBEFLOW_TRAINER_SERVER_URL": self.url,
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(self.ca_cert),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(self.token),
        }

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.is_closed.set()
        self._server.shutdown()
        self._server.server_close()

    def await_taken(self, count, limit_s=10):
        """Wait until it has taken so many reports."""
        ends_s = time.monotonic() + limit_s
        while len(self.taken) < count:
            assert time.monotonic() < ends_s, f"{len(self.taken)} reports within {limit_s} s, not {count}"
            time.sleep(0.01)

    def _handler(self, silent):
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.times_s.append(time.monotonic())
                if silent:
                    server.is_closed.wait(60)
                    return
                code = 200
                if self.path != PATH:
                    code = 404
                elif self.headers["Authorization"] not in {f"Bearer {token}" for token in server.tokens}:
                    code = 401
                if code == 200:
                    server.taken.append(json.loads(body)["trainerStatus"])
                else:
                    server.refused += 1
                with contextlib.suppress(OSError):
                    self.send_response(code)
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def log_message(self, *_):
                pass

        return Handler
