"""docs/reference/checkpoint-format.md says what is on the disk: others can read and write it by that page alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import torch
import xxhash
from checkpoint_bytes import data_dir, every_dtype, fields_of, same, save_parts, step_dir

from holdfast.checkpoint import FORMATS, load, newest_intact, verify, write_tensors
from holdfast.checkpoint.blocks import BLOCK_BYTES
from holdfast.checkpoint.format import DTYPES
from holdfast.checkpoint.manifest import SCHEMA, SCHEMA_SHARED
from holdfast.faults import points

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "checkpoint-format.md").read_text()


def digest(data):
    return xxhash.xxh3_64_hexdigest(data)


def test_the_reader_of_the_page_reads_what_holdfast_writes(tmp_path):
    state = {
        "w": torch.arange(35.0).reshape(7, 5),
        "tall": torch.arange((BLOCK_BYTES >> 3) + 5, dtype=torch.int64),
        "b": torch.tensor(3),
        "e": torch.ones(0, 4),
    }
    save_parts(tmp_path, 20, [state] * 3)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)  # noqa: S102

    arrays = names["load_arrays"](step_dir(tmp_path, 20))

    assert arrays.keys() == state.keys()
    assert all(np.array_equal(arrays[path], state[path].numpy()) for path in state)


def write_by_hand(root, step):
    """A checkpoint by the words of the page: two files, a tensor in three boxes, values at odd offsets, tied."""
    whole = np.arange(12, dtype="<f4").reshape(3, 4)
    boxes = {(0, 0): whole[:2, :3], (0, 3): whole[:2, 3:], (2, 0): whole[2:]}
    folder = Path(root) / f"step-{step:08d}" / "data-by-hand-1"
    folder.mkdir(parents=True)
    first, pieces = b"any header", []
    for start, box in boxes.items():
        data = box.tobytes()
        pieces.append(
            {"file": "a.bin", "offset": len(first), "start": list(start), "shape": list(box.shape), "bytes": len(data)}
        )
        pieces[-1]["blocks"] = [digest(data)]
        first += data + b"|"
    scalar = np.array(7, dtype="<i8").tobytes()
    (folder / "a.bin").write_bytes(first)
    (folder / "B_2").write_bytes(scalar)
    seven = {"file": "B_2", "offset": 0, "start": [], "shape": [], "bytes": 8, "blocks": [digest(scalar)]}
    nothing = {"file": "B_2", "offset": 8, "start": [0], "shape": [0], "bytes": 0, "blocks": ["2d06800538d394c2"]}
    manifest = {
        "skeleton": {
            "dict": [[1, {"tensor": "x"}], ["t", {"tuple": [{"tied": "x"}, {"tensor": "y"}, {"tensor": "z"}]}]]
        },
        "tensors": {
            "x": {"dtype": "float32", "shape": [3, 4], "pieces": pieces},
            "y": {"dtype": "int64", "shape": [], "pieces": [seven]},
            "z": {"dtype": "bool", "shape": [0], "pieces": [nothing]},
        },
        "files": {
            "a.bin": {"bytes": len(first), "rest_xxh3": digest(b"any header|||")},
            "B_2": {"bytes": 8, "rest_xxh3": digest(b"")},
        },
        "info": {"by": "hand"},
        "versions": {},
        "folder": "data-by-hand-1",
        "format": "npz",
        "generation": 0,
        "step": step,
        "schema": 2,
    }
    body = (json.dumps(manifest, indent=1).removesuffix("\n}") + ",\n").encode()
    (folder.parent / "manifest.json").write_bytes(body + f'"xxh3": "{digest(body)}"\n}}\n'.encode())
    return {
        1: torch.from_numpy(whole),
        "t": (torch.from_numpy(whole), torch.tensor(7), torch.ones(0, dtype=torch.bool)),
    }


def test_what_was_written_by_hand_by_the_page_is_read(tmp_path):
    wanted = write_by_hand(tmp_path, 123)

    loaded = load(tmp_path, 123)

    assert same(loaded.state, wanted)
    assert loaded.state["t"][0] is loaded.state[1]
    assert (loaded.info, newest_intact(tmp_path)) == ({"by": "hand"}, 123)


def test_what_was_written_by_hand_is_checked_as_strictly(tmp_path):
    write_by_hand(tmp_path, 123)
    file = data_dir(tmp_path, 123) / "a.bin"
    for position in range(file.stat().st_size):
        data = bytearray(file.read_bytes())
        data[position] ^= 1
        file.write_bytes(data)
        assert newest_intact(tmp_path) is None, position
        data[position] ^= 1
        file.write_bytes(data)

    verify(tmp_path, 123)


def test_the_page_names_what_there_is(tmp_path):
    write_tensors(tmp_path, 1, every_dtype(), {}).commit(0)
    fields = fields_of(tmp_path, 1)
    dtypes = re.search(r"`dtype` \| `([^`]*)`", PAGE)

    assert dtypes is not None
    assert set(dtypes[1].split()) == set(DTYPES)
    assert set(re.findall(r"`checkpoint\.\w+`", PAGE)) == {f"`{point}`" for point in points.POINTS}
    assert set(re.findall(r"^\| `(\w+)` \| `", PAGE, flags=re.MULTILINE)) >= set(FORMATS)
    for members in (fields, fields["files"]["part-00000.safetensors"], fields["tensors"]["bool"]):
        assert all(f"`{name}`" in PAGE or f'"{name}"' in PAGE for name in members)
    for name in fields["tensors"]["bool"]["pieces"][0]:
        assert f"\n| `{name}` |" in PAGE
    assert f"# The checkpoint format, versions {SCHEMA} and {SCHEMA_SHARED}" in PAGE
    assert f"2^{BLOCK_BYTES.bit_length() - 1} bytes" in PAGE
