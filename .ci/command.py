"""dvc as the checks of this folder call it."""

import subprocess
import sys


def dvc(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Its output; ends the check where it fails."""
    done = subprocess.run([sys.executable, "-m", "dvc", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"dvc {' '.join(arguments)} exited with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done
