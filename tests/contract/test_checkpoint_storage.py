"""What a storage promises, and what checkpoints promise in it: the same in a directory, in memory, in S3."""

from __future__ import annotations

import http.server
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from jobs import free_port
from s3 import running_server

from holdfast.checkpoint import (
    FORMATS,
    CheckpointStore,
    load,
    load_box,
    load_newest,
    newest_intact,
    open_storage,
    steps,
    take,
    verify,
    write,
    write_tensors,
)
from holdfast.checkpoint.save import remove
from holdfast.checkpoint.storage import objects, remote
from holdfast.checkpoint.storage.remote import RemoteStorage
from holdfast.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing, ConfigError

KINDS = ("directory", "memory", "s3")
FOLDER = "step-00000020/data-1"
ATTEMPT = "t-1"
_numbers = itertools.count()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("moto")) as server, pytest.MonkeyPatch.context() as patch:
        server.use(patch)
        yield server


class Files:
    """A place whose bytes are files: what lies in it, told by the operating system."""

    def __init__(self, root, url):
        self.root, self.url = root, url

    def put(self, path, data):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(data)

    def get(self, path):
        return (self.root / path).read_bytes()

    def delete(self, path):
        (self.root / path).unlink()

    def paths(self):
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())


class Memory:
    """A place in the memory of this process."""

    def __init__(self, name):
        self.url = f"memory://{name}/run"
        open_storage(self.url)
        self._store = objects._memories[name]

    def put(self, path, data):
        self._store.put(path, data)

    def get(self, path):
        return bytes(self._store.get(path).bytes())

    def delete(self, path):
        self._store.delete(path)

    def paths(self):
        return sorted(entry["path"] for entry in self._store.list().collect())


class Bucket:
    """A place in S3."""

    def __init__(self, server):
        self.name, self._server = f"bucket-{next(_numbers)}-{uuid.uuid4().hex[:8]}", server
        self.url = f"s3://{self.name}/run"
        server.make_bucket(self.name)

    def put(self, path, data):
        self._server.put(self.name, path, data)

    def get(self, path):
        return self._server.get(self.name, path)

    def delete(self, path):
        self._server.delete(self.name, path)

    def paths(self):
        return self._server.keys(self.name)


@pytest.fixture(params=KINDS)
def place(request, tmp_path):
    """Where checkpoints go, and raw access to it: the paths there begin with ``run/``, which is the root."""
    return place_of(request.param, request, tmp_path)


@pytest.fixture(params=[kind for kind in KINDS if kind != "directory"])
def remote_place(request, tmp_path):
    return place_of(request.param, request, tmp_path)


def place_of(kind, request, tmp_path):
    match kind:
        case "directory":
            return Files(tmp_path / "there", str(tmp_path / "there" / "run"))
        case "memory":
            return Memory(f"m{next(_numbers)}")
        case _:
            return Bucket(request.getfixturevalue("server"))


@pytest.fixture
def storage(place):
    return opened(place.url)


def opened(url):
    """A storage of its own, as another process has it."""
    return open_storage(url)


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Where temporary directories are made; at the end of each test there must be none left."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def stored(storage, folder=FOLDER, **files):
    path = storage.prepare(folder)
    for name, data in files.items():
        (path / name).write_bytes(data)
    storage.store(folder, tuple(files))


def read_range(storage, path, offset, size):
    out = bytearray(size)
    with storage.reader(path) as reader:
        return bytes(out[: reader.read_into(offset, memoryview(out))])


# --------------------------------------------------------------------------------------------- a storage


def test_an_empty_place_has_no_names(storage):
    assert storage.names("") == []
    assert storage.names(FOLDER) == []


def test_what_is_stored_has_its_names_in_every_folder_above(storage, place):
    stored(storage, b=b"2", a=b"1")
    storage.put("step-00000020/manifest.json", b"{}")

    assert storage.names("") == ["step-00000020"]
    assert storage.names("step-00000020") == ["data-1", "manifest.json"]
    assert storage.names(FOLDER) == ["a", "b"]
    assert place.paths() == [f"run/{FOLDER}/a", f"run/{FOLDER}/b", "run/step-00000020/manifest.json"]


def test_what_another_process_writes_or_removes_is_seen_at_once(storage, place):
    other = opened(place.url)
    assert storage.names("step-00000020") == other.names("step-00000020") == []

    storage.put("step-00000020/manifest.json", b"1")
    seen = other.names("step-00000020"), other.names(""), other.read("step-00000020/manifest.json")
    storage.put("step-00000020/manifest.json", b"22")
    with other.reader("step-00000020/manifest.json") as reader:
        size = reader.size_bytes
    other.remove("step-00000020/manifest.json")

    assert seen == (["manifest.json"], ["step-00000020"], b"1")
    assert size == 2
    assert storage.names("step-00000020") == []
    assert storage.read("step-00000020/manifest.json") is None


def test_a_small_file_is_replaced_as_a_whole(storage, place):
    assert storage.read("step-00000020/manifest.json") is None

    storage.put("step-00000020/manifest.json", b"one" * 1000)
    storage.put("step-00000020/manifest.json", b"two")

    assert storage.read("step-00000020/manifest.json") == b"two"
    assert place.paths() == ["run/step-00000020/manifest.json"]


def test_an_empty_file_can_be_stored_and_put(storage):
    stored(storage, a=b"")
    storage.put("b", b"")

    assert (storage.read(f"{FOLDER}/a"), storage.read("b")) == (b"", b"")
    assert read_range(storage, f"{FOLDER}/a", 0, 5) == b""


def test_a_range_is_read_as_far_as_the_file_goes(storage):
    stored(storage, a=b"0123456789")

    with storage.reader(f"{FOLDER}/a") as reader:
        assert reader.size_bytes == 10
    for offset, size, wanted in (
        (0, 3, b"012"),
        (4, 2, b"45"),
        (8, 5, b"89"),
        (10, 5, b""),
        (99, 5, b""),
        (3, 0, b""),
    ):
        assert read_range(storage, f"{FOLDER}/a", offset, size) == wanted


def test_a_large_file_comes_back_in_ranges_read_by_several_threads(storage, place):
    data = torch.arange(5 << 20, dtype=torch.int64).numpy().tobytes()  # 40 MiB: three parts of an upload
    stored(storage, a=data)
    out = bytearray(len(data))

    with storage.reader(f"{FOLDER}/a") as reader, ThreadPoolExecutor(4) as pool:
        starts = range(0, len(data), 7 << 20)
        got = pool.map(lambda start: reader.read_into(start, memoryview(out)[start : start + (7 << 20)]), starts)

    assert sum(got) == len(data)
    assert out == data
    assert place.get(f"run/{FOLDER}/a") == data


def test_what_is_no_file_cannot_be_opened(storage):
    stored(storage, a=b"1")

    for path in (f"{FOLDER}/gone", FOLDER, "step-00000099/data-1/a"):
        name = path.rpartition("/")[2]
        with pytest.raises(CheckpointCorrupt, match=f"^{name} (cannot be read: |is not a plain file)"):
            read_range(storage, path, 0, 1)


def test_removing_a_folder_removes_all_in_it_and_nothing_beside_it(storage, place):
    for path in ("step-00000020/data-1/a", "step-00000020/data-10/a", "step-00000020/data-1x", "step-00000020/m.json"):
        storage.put(path, b"1")

    storage.remove("step-00000020/data-1")
    storage.remove("step-00000020/m.json")

    assert place.paths() == ["run/step-00000020/data-10/a", "run/step-00000020/data-1x"]


def test_removing_what_is_not_there_is_right(storage, place):
    storage.put("a", b"1")

    for path in ("b", FOLDER):
        storage.remove(path)

    assert place.paths() == ["run/a"]


def test_a_folder_that_several_remove_at_once_is_gone(storage, place):
    for number in range(12):
        storage.put(f"{FOLDER}/{number}", b"1")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: opened(place.url).remove(FOLDER), range(4)))

    assert place.paths() == []


def test_what_lies_outside_the_root_is_not_touched(storage, place):
    outside = ["a", "run2/step-00000020/manifest.json", "runs/step-00000001/data-1/a"]
    for path in outside:
        place.put(path, b"1")
    write_tensors(storage, 20, {"w": torch.ones(2)}, {}).commit(0)

    found = storage.names("")
    remove(storage, 20)

    assert found == ["step-00000020"]
    assert place.paths() == outside


def test_names_with_spaces_and_letters_of_all_kinds_are_kept(place):
    storage = opened(place.url + "/a run, größer + 50%")

    stored(storage, a=b"1")

    assert storage.names(FOLDER) == ["a"]
    assert place.paths() == [f"run/a run, größer + 50%/{FOLDER}/a"]


# --------------------------------------------------------------------------------------------- temporary directories


def test_the_temporary_directory_is_empty_at_every_attempt_and_gone_when_the_files_are_stored(remote_place, scratch):
    storage = opened(remote_place.url)

    first = storage.prepare(FOLDER)
    (first / "left").write_bytes(b"1")
    second = storage.prepare(FOLDER)
    names = list(second.iterdir())
    held = list(scratch.iterdir())
    (second / "a").write_bytes(b"2")
    storage.store(FOLDER, ("a",))

    assert names == []
    assert held == [second.parent]
    assert list(scratch.iterdir()) == []
    assert storage.names(FOLDER) == ["a"]


def test_the_temporary_directory_is_gone_when_storing_fails_or_the_attempt_is_removed(remote_place, scratch):
    storage = opened(remote_place.url)

    storage.prepare(FOLDER)
    with pytest.raises(CheckpointError, match=r"cannot send files from .*: No such file or directory"):
        storage.store(FOLDER, ("never-written",))
    left = list(scratch.iterdir())
    storage.prepare(FOLDER)
    storage.remove(FOLDER)

    assert left == list(scratch.iterdir()) == []


def test_threads_that_write_parts_of_one_folder_do_not_disturb_each_other(remote_place):
    storage = opened(remote_place.url)
    together = threading.Barrier(3, timeout=30)

    def write_part(number):
        path = storage.prepare(FOLDER)
        together.wait()
        (path / f"part-{number}").write_bytes(bytes([number]))
        together.wait()
        storage.store(FOLDER, (f"part-{number}",))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write_part, range(3)))

    assert [storage.read(f"{FOLDER}/part-{number}") for number in range(3)] == [b"\0", b"\1", b"\2"]


KILLED = """
import sys
from holdfast.checkpoint.storage import remote
from holdfast.checkpoint.storage.remote import RemoteStorage
storage = RemoteStorage("memory://x")
print((storage.prepare("step-00000020/data-1") / "a").write_bytes(b"1" * 1000), flush=True)
sys.stdin.readline()
"""


@pytest.mark.chaos
def test_what_a_killed_process_left_behind_is_removed_by_the_next_and_what_a_live_one_needs_is_not(scratch):
    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED],
            env=os.environ | {"TMPDIR": str(scratch)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout.readline() == b"1000\n"
        return process

    with start() as killed:
        (of_killed,) = scratch.iterdir()
        with start() as alive:
            (of_alive,) = set(scratch.iterdir()) - {of_killed}
            killed.kill()
            assert killed.wait(30) == -signal.SIGKILL

            own = RemoteStorage("memory://x")
            path = own.prepare(FOLDER)
            found = set(scratch.iterdir())
            own.remove(FOLDER)

            assert found == {path.parent, of_alive}
            assert (of_alive / "files" / "a").read_bytes() == b"1" * 1000
            alive.communicate(b"\n", timeout=30)
    assert list(scratch.iterdir()) == []  # a process that ends by itself removes its own


# --------------------------------------------------------------------------------------------- checkpoints


def nested(seed, value=1):
    torch.manual_seed(seed)
    return {
        "model": {"w": torch.randn(700, 30), "empty": torch.empty(0, 3), "scalar": torch.tensor(3.5)},
        "optimizer": [{"step": 7, "m": torch.randn(11, 3).to(torch.bfloat16)}, (True, None, "text")],
        "value": value,
    }


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


@pytest.mark.parametrize("parts", [1, 3])
def test_a_state_comes_back_from_all_its_parts(place, parts):
    pending = [
        write(opened(place.url), 20, take(nested(1), part, parts), {"seed": 1}, token=ATTEMPT) for part in range(parts)
    ]
    before = steps(opened(place.url))
    saved = pending[0].commit(generation=4)

    loaded = load(opened(place.url), 20)

    assert (before, steps(opened(place.url))) == ([], [20])
    assert_same(loaded.state, nested(1))
    assert (loaded.info, loaded.generation, loaded.step) == ({"seed": 1}, 4, 20)
    assert sum(len(place.get(path)) for path in place.paths()) == saved.size_bytes
    assert len(place.paths()) == parts + 1


@pytest.mark.parametrize("format", FORMATS)
def test_files_of_every_format_are_stored(storage, format):
    if format == "hdf5":
        pytest.importorskip("h5py")

    write(storage, 20, take(nested(1)), {}, format=format).commit(0)

    assert_same(load(storage, 20).state, nested(1))
    assert verify(storage, 20).format == format


def test_a_state_is_loaded_into_memory_that_is_there_and_in_part(storage):
    write_tensors(storage, 20, nested(1), {}).commit(0)
    into = nested(2)

    loaded = load(storage, 20, into)
    part = load_box(storage, 20, "model/w", (100, 3), (5, 7))

    assert loaded.state["model"]["w"].data_ptr() == into["model"]["w"].data_ptr()
    assert_same(loaded.state, nested(1))
    assert torch.equal(part, nested(1)["model"]["w"][100:105, 3:10])


def test_a_step_that_is_saved_anew_is_the_new_one_and_nothing_of_the_old_stays(storage, place):
    write_tensors(storage, 20, nested(1), {}).commit(0)
    old = set(place.paths())

    write_tensors(storage, 20, nested(2, value=2), {}).commit(1)

    assert load(storage, 20).state["value"] == 2
    assert len(place.paths()) == 2
    assert set(place.paths()) & old == {"run/step-00000020/manifest.json"}


@pytest.mark.parametrize("parts", [1, 2])
def test_abandoning_leaves_nothing_and_what_was_complete_stays(storage, place, parts):
    write_tensors(storage, 10, nested(1), {}).commit(0)
    before = place.paths()

    pending = [write(storage, 20, take(nested(2), part, parts), {}, token=ATTEMPT) for part in range(parts)]
    written = place.paths()
    for part in reversed(pending):
        part.abandon()
        part.abandon()

    assert len(written) > len(before)
    assert place.paths() == before
    assert storage.names("") == ["step-00000010"]
    with pytest.raises(CheckpointError, match=r"cannot complete the checkpoint of step 20: .* is not in .* any more"):
        pending[0].commit(0)


def altered(place, path):
    data = bytearray(place.get(path))
    data[len(data) // 2] ^= 1
    place.put(path, bytes(data))


def shortened(place, path):
    place.put(path, place.get(path)[:-1])


def deleted(place, path):
    place.delete(path)


@pytest.mark.parametrize(
    ("damage", "which"), [(altered, "safetensors"), (shortened, "manifest.json"), (deleted, "manifest.json")]
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(storage, place, damage, which):
    for step in (10, 20):
        write_tensors(storage, step, nested(step), {}).commit(0)
    (path,) = [path for path in place.paths() if "step-00000020" in path and path.endswith(which)]
    intact = newest_intact(storage)

    damage(place, path)
    told = []
    loaded = load_newest(storage, lambda step, error: told.append(step))

    assert (intact, newest_intact(storage)) == (20, 10)
    assert_same(loaded.state, nested(10))
    if path in place.paths():
        assert told == [20]
        with pytest.raises(CheckpointCorrupt, match=r"the checkpoint of step 20 in .* is damaged: "):
            verify(storage, 20)


def test_removing_a_step_removes_its_objects_only(storage, place):
    for step in (10, 20, 30):
        write_tensors(storage, step, nested(step), {}).commit(0)

    CheckpointStore(place.url).remove(20)

    assert steps(storage) == [10, 30]
    assert {path.split("/")[1] for path in place.paths()} == {"step-00000010", "step-00000030"}
    with pytest.raises(CheckpointMissing, match=r"there are steps 10, 30; choose one that exists"):
        load(storage, 20)


# --------------------------------------------------------------------------------------------- processes, on S3

PART = """
import sys, torch
from holdfast.checkpoint import take, write
url, part, parts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(1)
state = {"w": torch.randn(3_000_000), "b": torch.randn(7)}
pending = write(url, 20, take(state, part, parts), {"seed": 1}, token="job-1")
if part == 0:
    print(pending.commit(2, wait_s=60).size_bytes)
"""


def test_two_processes_write_a_part_each_and_a_third_loads_the_whole(server):
    bucket = Bucket(server)

    writers = [
        subprocess.Popen([sys.executable, "-c", PART, bucket.url, str(part), "2"], stdout=subprocess.PIPE)
        for part in (0, 1)
    ]
    said = [writer.communicate(timeout=90)[0] for writer in writers]
    torch.manual_seed(1)
    w, b = torch.randn(3_000_000), torch.randn(7)
    loaded = load(bucket.url, 20)

    assert [writer.returncode for writer in writers] == [0, 0]
    assert int(said[0]) > w.nbytes
    assert torch.equal(loaded.state["w"], w)
    assert torch.equal(loaded.state["b"], b)
    assert [path.rpartition("/")[2] for path in bucket.paths()] == [
        "part-00000.safetensors",
        "part-00001.safetensors",
        "manifest.json",
    ]


FORKING = """
import os, sys
from holdfast.checkpoint import open_storage
storage = open_storage(sys.argv[1])
storage.put("a", b"1")
if not (child := os.fork()):
    try:
        storage.read("a")
    except Exception as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(storage.read("a"))
"""


def test_a_forked_process_is_told_that_it_cannot_use_s3_and_does_not_wait_for_ever(server):
    command = [sys.executable, "-c", FORKING, Bucket(server).url]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    child, parent = done.stdout.splitlines()
    assert child.endswith("a process that was forked from one that used it; start processes with spawn")
    assert parent == "b'1'"


# --------------------------------------------------------------------------------------------- what goes wrong


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (
            "nonsense://place/run",
            "checkpoints cannot be kept at nonsense://place/run: give a directory, or a URL that begins with s3://, gs://, "
            "az:// or memory://; these need the package obstore: pip install 'holdfast[cluster]'",
        ),
        (
            "sftp://me:secret@host/run",
            "checkpoints cannot be kept at sftp://me:***@host/run: give a directory, or a URL",
        ),
        ("az://container/run", "checkpoints cannot be kept at az://container/run: "),
        ("s3://", "must have the form s3://bucket/folder, got s3:///"),
        ("s3:///run", "must have the form s3://bucket/folder"),
        ("s3://a bucket/run", "must have the form s3://bucket/folder"),
        ("s3://bucket/a//b", "checkpoints cannot be kept at s3://bucket/a//b: "),
        ("s3://bucket/../b", "checkpoints cannot be kept at s3://bucket/../b: "),
    ],
)
def test_an_url_that_cannot_be_used_is_refused_at_once(url, said):
    with pytest.raises(ConfigError) as error:
        open_storage(url)

    assert said in one_line(error)


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", "memory://run"])
def test_a_missing_package_is_named(url, monkeypatch):
    for name in ("obstore", "obstore.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ConfigError, match=rf"{url} need the package obstore: pip install 'holdfast\[cluster\]'"):
        open_storage(url)


def all_acts(storage):
    def write_it():
        write_tensors(storage, 20, {"w": torch.ones(2)}, {})

    yield from (
        lambda: steps(storage),
        lambda: storage.read("step-00000020/manifest.json"),
        lambda: storage.put("step-00000020/manifest.json", b"1"),
        lambda: storage.remove("step-00000020"),
        write_it,
    )


def test_a_missing_bucket_is_named_by_every_act(server):
    storage = open_storage("s3://no-such-bucket/run")

    with pytest.warns(RuntimeWarning, match="could not be removed") as _:
        said = [one_line(pytest_raises(act)) for act in all_acts(storage)]

    for text in said:
        assert f"there is no bucket 'no-such-bucket' at {server.url}; create it, or correct the URL" in text
        assert re.match(r"cannot (list|read|write|remove) s3://no-such-bucket/run", text)


def pytest_raises(act):
    with pytest.raises(CheckpointError) as error:
        act()
    return error


def test_an_endpoint_that_refuses_the_connection_is_named_soon(server, monkeypatch):
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    start_s = time.monotonic()

    error = pytest_raises(lambda: steps("s3://bucket/run"))

    assert (
        one_line(error) == f"cannot list s3://bucket/run: {url} does not answer; check AWS_ENDPOINT_URL and the network"
    )
    assert time.monotonic() - start_s < 30


@pytest.mark.parametrize("url", ["nonsense", "ftp://host", "http://", "http://a b"])
def test_an_endpoint_that_is_no_url_is_refused_at_once(url, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)

    with pytest.raises(ConfigError) as error:
        open_storage("s3://bucket/run")

    assert one_line(error) == f"AWS_ENDPOINT_URL must be a URL such as https://s3.example.org, got {url!r}"


def test_a_server_that_never_answers_is_given_up(server, monkeypatch):
    monkeypatch.setattr(remote, "_LIMIT_S", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start_s = time.monotonic()

        error = pytest_raises(lambda: steps("s3://bucket/run"))

    assert "does not answer; check AWS_ENDPOINT_URL and the network" in one_line(error)
    assert 1 <= time.monotonic() - start_s < 10


@contextmanager
def refusing(status, body):
    """A server that answers everything in one way; its URL."""

    class Refusing(http.server.BaseHTTPRequestHandler):
        def answer(self):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = answer  # noqa: N815

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


ANSWERS = [
    (403, "AccessDenied", r"these credentials may not do it \(AccessDenied\); give some that may read, write, list"),
    (403, "InvalidAccessKeyId", r"does not know this AWS_ACCESS_KEY_ID \(InvalidAccessKeyId\); correct it"),
    (403, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY does not belong to AWS_ACCESS_KEY_ID"),
    (400, "ExpiredToken", "the credentials have expired"),
    (301, "PermanentRedirect", "the bucket 'bucket' is in another region .*; set AWS_DEFAULT_REGION to it"),
    (400, "OddThing", "says: 400 OddThing in words"),
]


@pytest.mark.parametrize(("status", "code", "said"), ANSWERS)
def test_a_refusal_of_the_server_is_told_in_one_line(server, monkeypatch, status, code, said):
    body = f"<?xml version='1.0'?>\n<Error><Code>{code}</Code><Message>in words</Message></Error>".encode()
    with refusing(status, body) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        storage = open_storage("s3://bucket/run")
        errors = [pytest_raises(lambda: storage.names("")), pytest_raises(lambda: storage.put("a", b"1"))]

    for error in errors:
        assert re.search(said, one_line(error))


def test_missing_credentials_are_told(server, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")  # where a role would be asked for

    error = pytest_raises(lambda: steps("s3://bucket/run"))

    assert "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in one_line(error)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (403, r"cannot write az://box/run/a/b: no permission \(.*\); give credentials .* are untouched"),
        (404, "cannot write az://box/run/a/b: there is no such object, folder or bucket"),
        (400, r"cannot write az://box/run/a/b: \w*Error: .*400.* are untouched"),
        (None, "cannot write az://box/run/a/b: .*; check the network and that storage.* are untouched"),
    ],
)
def test_what_another_service_says_is_told_in_one_line(monkeypatch, status, said):
    for name, value in {"ACCOUNT_NAME": "me", "ACCOUNT_KEY": "bWU="}.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    if status is None:
        monkeypatch.setattr(objects, "_RETRIES", 0)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{free_port()}")
        error = pytest_raises(lambda: open_storage("az://box/run").put("a/b", b"1"))
    else:
        with refusing(status, b"<?xml version='1.0'?>\n<Error><Code>Odd</Code></Error>") as url:
            monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", url)
            error = pytest_raises(lambda: open_storage("az://box/run").put("a/b", b"1"))

    assert re.fullmatch(said, one_line(error))


def test_a_missing_place_for_temporary_directories_is_told(server, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not-there"))

    error = pytest_raises(lambda: write_tensors(Bucket(server).url, 20, {"w": torch.ones(2)}, {}))

    assert re.search("cannot make a temporary directory in .*not-there: No such file", one_line(error))


def test_a_password_in_an_url_is_not_shown():
    storage = RemoteStorage("memory://user:secret@host/run")

    assert storage.url == "memory://user:***@host/run"
