"""kill -9 of dvc during evaluate: within 10 s no server may be left, and the next run must complete from what was done."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 10.0
TARGET = "evaluate@fp8-auto"
JOURNALS = Path(".cache/journals/fp8-auto")


def servers() -> list[int]:
    """Pids of vLLM's processes: the API server by its command line, engine and workers by the name that they give themselves."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ") if entry.name.isdigit() else b""
        except OSError:
            continue
        if b"vllm.entrypoints.openai.api_server" in words or words.startswith(b"VLLM::"):
            found.append(int(entry.name))
    return found


def answered() -> int:
    """Requests in the journal so far; its first line is its header."""
    return sum(max(0, path.read_text().count("\n") - 1) for path in JOURNALS.glob("*.jsonl")) if JOURNALS.is_dir() else 0


def main() -> None:
    dvc = [sys.executable, "-m", "dvc", "repro", "--force", "--single-item", TARGET]
    process = subprocess.Popen(dvc, start_new_session=True)
    while answered() < 10:
        if process.poll() is not None:
            sys.exit(f"dvc ended with {process.returncode} before it could be killed")
        time.sleep(0.2)
    if not servers():
        sys.exit("no server was seen: this check would prove nothing")
    os.kill(process.pid, signal.SIGKILL)
    killed = time.monotonic()
    process.wait()
    while left := servers():
        if time.monotonic() - killed > GRACE_S:
            sys.exit(f"{GRACE_S:.0f} s after kill -9 of dvc these live: {left}")
        time.sleep(0.1)
    print(f"no server {time.monotonic() - killed:.1f} s after kill -9 of dvc; {answered()} answers kept", flush=True)
    done = answered()
    subprocess.run(dvc, check=True)
    resumed = json.loads(Path("metrics/evals/fp8-auto.json").read_text())["requests_resumed"]
    if resumed < done:
        sys.exit(f"{done} answers were kept, {resumed} were used again")
    print(f"the next run completed and used {resumed} of them again")


if __name__ == "__main__":
    main()
