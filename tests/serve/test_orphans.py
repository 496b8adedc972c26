"""Whoever is killed with -9, the server is gone within ten seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest

from pipeline.serve import lock, watchdog
from pipeline.serve.process import guardians
from tests.serve.conftest import MOCK, sockets_of

REPOSITORY = Path(__file__).resolve().parents[2]
PROMISE_S = 10.0
STAGE = """
    import sys, time
    from pathlib import Path
    from pipeline.serve import ServerSettings, running
    here = Path({folder!r})
    settings = ServerSettings(model=here / "checkpoint", served_name="tiny", start_allowance_s=60, stop_grace_s=1.0,
                              command=({python!r}, {mock!r}, "--behaviour", {behaviour!r},
                                       "--pid-file", str(here / "pids")))
    with running(settings, here / "log") as server:
        (here / "stage.pid").write_text(str(__import__("os").getpid()))
        print("ready", flush=True)
        time.sleep(120)
"""


@pytest.fixture
def stage(tmp_path, checkpoint):
    """Makes a stage script that serves until it is ended; its server has a child in the same session."""

    def make(ignore_sigterm=False):
        script = tmp_path / "stage.py"
        behaviour = json.dumps({"fork_child": True, "ignore_sigterm": ignore_sigterm})
        script.write_text(
            textwrap.dedent(STAGE).format(
                folder=str(tmp_path), python=sys.executable, mock=str(MOCK), behaviour=behaviour
            )
        )
        return script

    return make


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    return None


def start(command, cwd, **kwargs):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "DVC_NO_ANALYTICS": "1"}
    # Under nohup a hang-up is ignored by every child, as it should be: here it has to arrive.
    restore = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, preexec_fn=restore, **kwargs)


def server_pids(folder, process):
    ready = wait_for(lambda: process.poll() is not None or (folder / "stage.pid").exists(), 40)
    assert ready and process.poll() is None, "the stage did not come up"
    pids = [int(line) for line in (folder / "pids").read_text().split()]
    assert len(pids) == 2 and all(watchdog.read_process(pid) for pid in pids)
    return pids


def gone(pids):
    return wait_for(lambda: not [pid for pid in pids if watchdog.read_process(pid)], PROMISE_S)


def end(process, folder):
    """Leave nothing of a failed test behind."""
    for pid in [
        process.pid,
        *(
            int(text)
            for name in ("pids", "stage.pid")
            if (folder / name).exists()
            for text in (folder / name).read_text().split()
        ),
    ]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_killing_the_stage_ends_the_server(stage, tmp_path, number):
    process = start([sys.executable, stage(ignore_sigterm=number == signal.SIGKILL)], tmp_path)
    try:
        pids = server_pids(tmp_path, process)
        sockets = sockets_of(pids[0])
        assert sockets.is_dir()
        process.send_signal(number)
        assert gone(pids) and wait_for(lambda: not sockets.exists(), PROMISE_S)
    finally:
        end(process, tmp_path)


def test_ctrl_c_stops_in_order(stage, tmp_path):
    process = start([sys.executable, stage()], tmp_path, stderr=subprocess.PIPE, start_new_session=True)
    try:
        pids = server_pids(tmp_path, process)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
        assert wait_for(lambda: not [pid for pid in pids if watchdog.read_process(pid)], 25)
        assert b"KeyboardInterrupt" in process.communicate()[1]
    finally:
        end(process, tmp_path)


def test_killing_dvc_itself_ends_the_server(stage, tmp_path):
    """dvc runs the stage through ``sh -c``; both outlive it."""
    (tmp_path / "dvc.yaml").write_text(
        json.dumps(
            {"stages": {"serve": {"cmd": f"{sys.executable} {stage(ignore_sigterm=True)} && true", "outs": ["never"]}}}
        )
    )
    dvc = [sys.executable, "-m", "dvc"]
    subprocess.run(
        [*dvc, "init", "--no-scm", "-q"], cwd=tmp_path, check=True, env=os.environ | {"DVC_NO_ANALYTICS": "1"}
    )
    process = start([*dvc, "repro"], tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        pids = server_pids(tmp_path, process)
        script = int((tmp_path / "stage.pid").read_text())
        parent = watchdog.read_process(script).parent
        assert parent != process.pid, "dvc started the stage through a shell: the case that this test is for"
        process.kill()
        process.wait()
        assert watchdog.read_process(script), "the stage itself outlives dvc, so only the watchdog can know"
        assert gone(pids)
    finally:
        end(process, tmp_path)


def test_killing_the_watchdog_too_leaves_nothing(mock_settings, tmp_path):
    from pipeline.serve import ServerDied, running

    with pytest.raises(ServerDied, match="watchdog was killed"):
        with running(mock_settings(fork_child=True), tmp_path / "log") as server:
            pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
            sockets = sockets_of(pids[0])
            os.kill(watchdog.read_process(server.pid).parent, signal.SIGKILL)
            assert wait_for(lambda: not server.alive, 5)
    assert gone(pids) and not sockets.exists()


def test_a_process_that_leaves_the_group_is_found(tmp_path):
    """A daemon that made its own session and lost its parent is still the watchdog's descendant."""
    script = tmp_path / "escape.py"
    script.write_text(
        "import os, time\n"
        "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n"
        f"  open({str(tmp_path / 'escaped')!r}, 'w').write(str(os.getpid()))\n  time.sleep(600)\n os._exit(0)\n"
        "time.sleep(600)\n"
    )
    from pipeline.serve.process import ServerProcess

    process = ServerProcess([sys.executable, str(script)], os.environ, tmp_path / "log", grace_s=2.0)
    escaped = wait_for(lambda: (tmp_path / "escaped").exists() and (tmp_path / "escaped").read_text(), 10)
    assert watchdog.read_process(int(escaped)).session != process.group
    process.stop()
    assert gone([int(escaped)])


def test_the_lock_is_held_until_the_server_is_gone(stage, tmp_path):
    """The next measured run must not start beside a server whose stage was killed."""
    process = start([sys.executable, stage()], tmp_path)
    try:
        pids = server_pids(tmp_path, process)
        process.kill()
        process.wait()
        with lock.measuring("the next run", poll_s=0.01):
            assert not [pid for pid in pids if watchdog.read_process(pid)]
    finally:
        end(process, tmp_path)


def test_guardians_end_with_dvc(tmp_path):
    """From the stage up to dvc, and no further: the terminal may close."""
    assert guardians()[0][0] == os.getpid()
    code = "import json; from pipeline.serve.process import guardians; print(json.dumps([p for p, _ in guardians()]))"
    fake = tmp_path / "dvc"
    fake.write_text(
        f"import os, subprocess, sys\nprint(os.getpid(), flush=True)\n"
        f"subprocess.run(['sh', '-c', {sys.executable!r} + ' -c \"' + {code!r} + '\"; true'])\n"
    )
    text = subprocess.run(
        [sys.executable, fake],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    ).stdout
    dvc, chain = text.splitlines()
    chain = json.loads(chain)
    assert len(chain) >= 3 and int(dvc) in chain and (chain[-1] == int(dvc) or len(guardians()) > 1)
