"""Run folders belong to this user alone, whatever the umask is; checkpoints go where the command says, wherever the script goes."""

import os
import subprocess
import sys

from jobs import clean_env, holdfast

SCRIPT = """
import os, sys
from pathlib import Path
import torch
import holdfast

model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1))
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(data, batch_size=16, epochs=1):
    for x, y in step:
        step.backward(torch.nn.functional.mse_loss(model(x), y))
for folder in sys.argv[1:]:
    for path in sorted([Path(folder), *Path(folder).rglob("*")]):
        print(f"mode {path.lstat().st_mode & 0o777:o} {'d' if path.is_dir() else 'f'} {path.name}", flush=True)
"""


def test_other_users_can_read_nothing_of_a_running_job(tmp_path):
    temporary, logs = tmp_path / "tmp", tmp_path / "logs"
    temporary.mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "holdfast", "run", "--fabric", "gloo", "-n", "2", "--log-dir", logs),
            *("--inject", "kill:rank=1,step=2", script, temporary, logs),
        ],
        env=clean_env(TMPDIR=str(temporary)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        umask=0,
    )
    said = (logs / "rank-0.log").read_text()

    assert done.returncode == 0, done.stderr + said
    found = [line.split()[1:] for line in said.splitlines() if line.startswith("mode ")]
    names = [name for _, _, name in found]
    assert any(name.startswith("holdfast-") for name in names), said
    assert {"beacon-0", "rank-0.log"} <= set(names), said
    assert any(name.endswith(".jsonl") for name in names), said
    others = [each for each in found if int(each[0], 8) & 0o077 and each[2] != "tmp"]
    assert others == []
    assert os.stat(logs).st_mode & 0o777 == 0o700


AWAY = """
import os
os.makedirs("away", exist_ok=True)
os.chdir("away")
"""


def test_a_relative_checkpoint_directory_is_that_of_the_command_though_the_script_changes_to_another(tmp_path):
    (tmp_path / "script.py").write_text(AWAY + SCRIPT)
    run = ("run", "--fabric", "virtual", "-n", 2, "--checkpoint-dir", "saved", "--checkpoint-every", 2)

    done = holdfast(*run, "script.py", cwd=tmp_path)
    again = holdfast(*run, "--resume", "script.py", cwd=tmp_path)

    assert done.returncode == again.returncode == 0, done.stderr + again.stderr
    assert sorted(os.listdir(tmp_path / "saved")) == ["step-00000002", "step-00000004"]
    assert os.listdir(tmp_path / "away") == []
    assert "there is no intact checkpoint" not in again.stdout + again.stderr
