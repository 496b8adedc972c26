"""A copy of this tree for checks that change parameters; it uses this tree's environments."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.env_facts import home  # noqa: E402


def copy(target: Path) -> None:
    """The tree as git would take it (untracked files too), without results, as a repository of its own."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], capture_output=True, check=True, text=True
    ).stdout.split("\0")
    for name in filter(None, names):
        if name.startswith("metrics/") or name == "dvc.lock" or not Path(name).is_file():
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, target / name)
    (target / "metrics").mkdir(exist_ok=True)
    subprocess.run(["git", "init", "-q", str(target)], check=True)


def run(target: Path, *command: str, read: bool = False) -> str:
    """A command of the copy's, and with ``read`` what it printed; ends the check where it fails."""
    environment = os.environ | {"K3Q_ENVS": str(home())}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=target, env=environment, stdout=subprocess.PIPE if read else None, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} exited with {done.returncode}")
    return done.stdout or ""
