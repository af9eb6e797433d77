"""Accelerate: a script that changes its import survives deaths with the bits of the undisturbed run."""

import difflib
import functools
import re
import subprocess
import sys

import pytest
from jobs import ROOT, assert_landed, clean_env, holdfast, run_report
from tutorials import comparable, executed

pytestmark = pytest.mark.chaos
NEEDS = ("accelerate",)

BEFORE, AFTER = (ROOT / "examples" / "frameworks" / f"accelerate_{name}.py" for name in ("before", "after"))
STRUCK = f"""
import os, signal, sys
import accelerate, torch
sys.path.insert(0, {str(AFTER.parent)!r})
import accelerate_after
from holdfast.integrations.accelerate import Accelerator

where, folder = sys.argv[1:]
save, gather, calls = accelerate.Accelerator.save_state, Accelerator.gather_for_metrics, []

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def dying_save(self, part, **kwargs):
    save(self, part, **kwargs)
    if where == "saving" and "epoch-1" in part and self._rank == 0:
        os.unlink(os.path.join(part, "model.safetensors"))
        die()

def dying_gather(self, *args, **kwargs):
    calls.append(1)
    if where == "evaluating" and self._rank == 1 and len(calls) == 3:
        die()
    return gather(self, *args, **kwargs)

accelerate.Accelerator.save_state = dying_save
Accelerator.gather_for_metrics = dying_gather
accelerate_after.main(folder)
"""


def weights(output):
    return set(re.findall(r"weights ([0-9a-f]{16})", output))


@functools.cache
def undisturbed():
    """Return the weights' digest of the same script in one process with the job's three slices."""
    done = subprocess.run(
        [sys.executable, AFTER],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_env(HOLDFAST_SLICES="3"),
        check=True,
    )
    (found,) = weights(done.stdout)
    return found


def test_only_the_import_changes():
    before, after = (path.read_text().split('"""', 2)[2].splitlines() for path in (BEFORE, AFTER))
    changed = [
        line for line in difflib.unified_diff(before, after, n=0) if re.match(r"[+-][^+-]", line) and line[1:].strip()
    ]

    assert changed == [
        "-from accelerate import Accelerator",
        "+from holdfast.integrations.accelerate import Accelerator",
    ]


@pytest.mark.parametrize("fabric", ["ulfm", "gloo"])
def test_deaths_in_training_change_no_bit(tmp_path, fabric):
    kills = ("--inject", "kill:rank=0,step=3,phase=allreduce", "--inject", "kill:rank=2,step=14")

    report = run_report(tmp_path, "-n", 3, "--fabric", fabric, *kills, AFTER)

    assert_landed(report, 0, 2)
    assert weights(report["_stdout"]) == {undisturbed()}
    assert report["samples"] == {"planned": 720, "committed": 720, "lost": 0, "repeated": 0}
    lines = re.findall(r"\[(\d)\] epoch (\d)", report["_stdout"])
    assert [epoch for _, epoch in lines] == ["0", "1", "2"], "each line once, by the lead of that time"
    assert lines[-1][0] == "1"


@pytest.mark.parametrize("fabric", ["ulfm", "gloo"])
def test_on_the_cpu_by_its_own_word_it_is_the_same_and_the_script_still_reads_its_rank(tmp_path, fabric):
    """As all official examples say it: Accelerate would make a process group of the RANK and WORLD_SIZE that it finds."""
    script = tmp_path / "script.py"
    made = "Accelerator(cpu=True, gradient_accumulation_steps=2)"
    ranks = 'print("rank", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"])'
    text = AFTER.read_text().replace("import torch\n", "import os\n\nimport torch\n", 1)
    script.write_text(text.replace("Accelerator(gradient_accumulation_steps=2)", f"{made}\n    {ranks}"))

    report = run_report(tmp_path, "-n", 3, "--fabric", fabric, "--inject", "kill:rank=0,step=3", script)

    assert_landed(report, 0)
    assert weights(report["_stdout"]) == {undisturbed()}
    assert sorted(re.findall(r"rank (\d) 3 (\d)", report["_stdout"])) == [("0", "0"), ("1", "1"), ("2", "2")]


@pytest.mark.parametrize("fabric", ["ulfm", "gloo"])
@pytest.mark.parametrize(("where", "dead", "alive"), [("evaluating", 1, (0, 2)), ("saving", 0, (1, 2))])
def test_a_death_outside_training_changes_no_bit_and_leaves_no_half_folder(tmp_path, fabric, where, dead, alive):
    script = tmp_path / "struck.py"
    script.write_text(STRUCK)

    report = run_report(tmp_path, "-n", 3, "--fabric", fabric, script, where, tmp_path / "states")

    assert_landed(report, dead)
    assert weights(report["_stdout"]) == {undisturbed()}
    assert report["workers"]["ranks_finished"] == list(alive)
    folders = {
        path.name: sorted(file.name for file in path.iterdir()) for path in (tmp_path / "states").glob("epoch-?")
    }
    assert len(folders) == (3 if where == "evaluating" else 2)
    assert all("model.safetensors" in files and "optimizer.bin" in files for files in folders.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("Accelerator(", "Accelerator(mixed_precision='fp16', "), "fp16"),
        (
            ("accelerator.prepare(model, optimizer, train, test, scheduler)", "accelerator.prepare(model)"),
            "one optimizer",
        ),
        (
            ("    for epoch in", "    accelerator.skip_first_batches(train, 3)\n    for epoch in"),
            "resume with --resume",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path, change, message):
    script = tmp_path / "script.py"
    script.write_text(AFTER.read_text().replace(*change))

    done = holdfast("run", "-n", 2, "--fabric", "gloo", script)

    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.timeout(300)
def test_the_tutorial_shows_what_its_commands_print(tmp_path):
    done = executed((ROOT / "docs" / "tutorials" / "from-accelerate.md").read_text(), tmp_path)

    assert done
    for command, printed in done:
        assert comparable(printed) == comparable(command.printed), f"$ {command.line}\n{printed}"
