"""Making an environment, so that it is whole or made anew.  Standard library only; needs Python 3.11 with venv and pip.

``K3Q_TORCH_INDEX`` says where torch's CPU build is looked for beside pip's own indexes (empty: nowhere else);
``K3Q_TORCH`` asks for another requirement than torch's pinned CPU build.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline import env_facts as facts
from pipeline.env_facts import ABSENT, GB, PYTHON, READY, STALE_PLUGIN, TORCH_CPU_INDEX, TORCH_VERSION
from pipeline.errors import PipelineError, Refused

HEARTBEAT_S = 10.0


class NotMade(PipelineError):
    """An environment could not be made; the message holds the failed tool's own last lines and what to do."""


def ensure(name: str) -> Path:
    """The interpreter of environment ``name``, which is made, or made anew, when it is not ready.

    Raises :class:`Refused` for an unknown name, another Python or platform, too little disk, or a change under running
    processes; :class:`NotMade` when pip fails.  Makers of one environment wait for each other.
    """
    if facts.state(name) == READY:
        return facts.python_of(name)
    _check_platform(name)
    with _only_maker(name) as lock:
        found = facts.state(name)  # another maker may have been faster
        if found != READY:
            _refuse_if_running(name)
            _Maker(name, lock).make(found)
    return facts.python_of(name)


def remove(name: str) -> bool:
    """Delete an environment; says whether there was one.  Raises :class:`Refused` while a process runs in it."""
    if facts.state(name) == ABSENT:
        return False
    with _only_maker(name):
        _refuse_if_running(name)
        _delete(name)
    return True


def _check_platform(name: str) -> None:
    if sys.version_info[:2] != PYTHON:
        wanted = ".".join(map(str, PYTHON))
        there = shutil.which(f"python{wanted}")
        remedy = f"`python{wanted} -m pipeline ...` has it" if there else f"install Python {wanted} and start with it"
        raise Refused(
            f"environment {name} needs Python {wanted} (its lock is resolved for it); "
            f"this is {platform.python_version()}: {remedy}"
        )
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise Refused(
            f"environment {name} is locked for Linux x86_64; this is {sys.platform} {platform.machine()}. "
            "requirements/README.md says how to resolve the locks for another platform"
        )


@contextlib.contextmanager
def _only_maker(name: str) -> Iterator[int]:
    """Hold the environment's lock; yields its descriptor.  Pip inherits it: an orphaned pip still keeps others out."""
    try:
        facts.home().mkdir(parents=True, exist_ok=True)
        descriptor = os.open(facts.home() / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise Refused(
            f"cannot write to {facts.home()}: {error.strerror}; K3Q_ENVS=FOLDER names another place"
        ) from None
    try:
        started, said = time.monotonic(), -HEARTBEAT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - started
                if waited - said >= HEARTBEAT_S:
                    holder = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
                    _say(f"{name}: waiting for another maker (process {holder}), {waited:.0f} s")
                    said = waited
                time.sleep(0.1)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _refuse_if_running(name: str) -> None:
    """Files must not change under a process: it would load half of the old packages and half of the new."""
    prefixes = {f"{facts.home() / name}/", f"{(facts.home() / name).resolve()}/"}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            # A server may rename its processes, so the mapped libraries are looked at as well.
            mapped = (process / "maps").read_text(errors="replace")
        except OSError:
            continue  # ended meanwhile, or another user's
        if any(command[0].startswith(prefix) or prefix in mapped for prefix in prefixes):
            raise Refused(
                f"environment {name} must change, but process {process.name} runs in it "
                f"({' '.join(command)[:120].strip()}): let it end, then `python3 -m pipeline env make {name}`; "
                "or use another folder of environments (K3Q_ENVS=...)"
            )


def _delete(name: str) -> None:
    folder = facts.home() / name
    if any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
        raise Refused(f"{folder} is not a Python environment, so it is left alone: move it, or set K3Q_ENVS elsewhere")
    # Renamed first: a kill in the midst of deleting must not leave something that looks like anything.
    doomed = Path(tempfile.mkdtemp(prefix=f".{name}.removed-", dir=facts.home()))
    os.rename(folder, doomed / name)
    _sweep(name)


def _sweep(name: str) -> None:
    """Finish the deletions of environment ``name``, those of killed processes too."""
    for leftover in facts.home().glob(f".{name}.removed-*"):
        shutil.rmtree(leftover)


class _Maker:
    """One run of making environment ``name`` while its lock is held."""

    def __init__(self, name: str, lock: int) -> None:
        self.name, self.lock, self.spec = name, lock, facts.spec_of(name)
        self.folder, self.log = facts.home() / name, facts.home() / f".{name}.log"
        self.started = time.monotonic()

    def make(self, found: str) -> None:
        self.log.write_bytes(b"")
        _sweep(self.name)
        if found != STALE_PLUGIN:
            stamp = facts.expected_stamp(
                self.name
            )  # of what is read now: a lock edited meanwhile makes the result stale
            if found != ABSENT:
                self.say(f"{found}, so it is deleted and made anew")
            self.check_disk()
            if found != ABSENT:
                _delete(self.name)
            self.say(f"making {self.folder} ({self.spec.purpose})")
            self.run("interpreter", venv_command(self.folder))
            if self.spec.cpu_torch:
                self.install_torch()
            lock = str(facts.lock_file(self.name))
            self.run("packages", [*pip_install(self.name), "--no-deps", "--require-hashes", "-r", lock])
            self.verify()
            (self.folder / facts.STAMP).write_text(stamp + "\n")
        self.install_plugin()
        self.say("ready")

    def check_disk(self) -> None:
        places = {os.stat(place).st_dev: place for place in (tempfile.gettempdir(), facts.home())}
        for place in places.values():
            free = shutil.disk_usage(place).free
            if free < self.spec.disk_bytes:
                raise Refused(
                    f"environment {self.name} takes up to {self.spec.disk_bytes / GB:.0f} GB while it is made and "
                    f"{place} has {free / GB:.1f} GB free: make room, or set K3Q_ENVS (the environments) or TMPDIR "
                    "(pip's work) to another disk"
                )

    def install_torch(self) -> None:
        """Torch's CPU build; never the CUDA one that a plain ``torch==`` takes where only that is offered."""
        wanted = os.environ.get("K3Q_TORCH") or f"torch=={TORCH_VERSION}+cpu"
        chosen = os.environ.get("K3Q_TORCH_INDEX")
        command = [*pip_install(self.name), "--no-deps", wanted]
        if chosen is not None:
            return self.run("torch", [*command, *(["--extra-index-url", chosen] if chosen else [])])
        command += ["--extra-index-url", TORCH_CPU_INDEX]
        try:
            # One short try: where PyTorch's index is out of reach, pip's own configuration may still know a wheel.
            self.run("torch", [*command, "--retries", "0", "--timeout", "5"])
        except NotMade:
            if "Downloading" not in self.log_text():
                raise
            self.say("the download of torch broke off; once more with pip's own patience")
            self.run("torch", command)

    def install_plugin(self) -> None:
        sources = facts.plugin_sources(self.name)
        if not sources:
            return
        stamp = facts.expected_plugin_stamp(self.name)
        (self.folder / facts.PLUGIN_STAMP).unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(
            prefix="k3q-plugin-"
        ) as scratch:  # a build in place would litter the source tree
            root = facts.REPO / str(self.spec.plugin)
            for path in sources:
                target = Path(scratch) / root.name / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            options = ["--no-deps", "--no-build-isolation", "--no-index", "--force-reinstall"]
            self.run("plugin", [*pip_install(self.name), *options, str(Path(scratch) / root.name)])
        (self.folder / facts.PLUGIN_STAMP).write_text(stamp + "\n")

    def verify(self) -> None:
        """Every package of the lock is there at its version, torch is a CPU build, and native libraries load."""
        found = facts.installed_versions(self.name)
        wrong = {
            package: f"{found.get(package, 'absent')} instead of {version}"
            for package, version in facts.locked_versions(self.name).items()
            if found.get(package) != version
        }
        if self.spec.cpu_torch and found.get("torch", "").split("+")[0] != TORCH_VERSION:
            wrong["torch"] = f"{found.get('torch', 'absent')} instead of {TORCH_VERSION}"
        if wrong:
            listed = "; ".join(f"{package} {text}" for package, text in sorted(wrong.items()))
            raise NotMade(f"environment {self.name} differs from requirements/{self.name}.txt: {listed}")
        if self.spec.imports:
            self.run("import test", [str(facts.python_of(self.name)), "-c", f"import {', '.join(self.spec.imports)}"])

    def run(self, step: str, command: list[str]) -> None:
        """Run one step, its output in the log, a line at least every ``HEARTBEAT_S``."""
        begun, before = time.monotonic(), len(self.log_text())
        self.say(f"{step} ...")
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(), pass_fds=(self.lock,)
            )
            try:
                while True:
                    try:
                        code = process.wait(HEARTBEAT_S)
                        break
                    except subprocess.TimeoutExpired:
                        self.say(f"{step} ... {self.progress(self.log_text()[before:])}")
            except BaseException:
                process.kill()
                process.wait()
                raise
        if code:
            raise NotMade(failure(self.name, step, code, self.log_text()[before:], self.log))
        self.say(f"{step} done in {time.monotonic() - begun:.0f} s")

    def progress(self, output: str) -> str:
        total = len(facts.locked_versions(self.name))
        if "Installing collected packages" in output:
            return f"{len(list(facts.site_packages_of(self.name).glob('*.dist-info')))} installed of about {total}"
        fetched = len(re.findall(r"^(?:Collecting|Processing) ", output, re.MULTILINE))
        return f"{fetched} fetched of {total}" if fetched > 1 else "at work"

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def say(self, text: str) -> None:
        _say(f"{self.name}: [{time.monotonic() - self.started:4.0f} s] {text}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def venv_command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "venv", str(folder)]


def pip_install(name: str) -> list[str]:
    quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    return [str(facts.python_of(name)), "-m", "pip", "install", *quiet]


def _environment() -> dict[str, str]:
    """The caller's environment less what sends packages elsewhere or lends foreign ones to the new interpreter."""
    dropped = {"PYTHONPATH", "PYTHONHOME"} | {
        f"PIP_{key}" for key in "TARGET PREFIX ROOT USER REQUIRE_HASHES QUIET".split()
    }
    return {key: value for key, value in os.environ.items() if key not in dropped} | {"PYTHONNOUSERSITE": "1"}


def failure(name: str, step: str, code: int, output: str, log: Path) -> str:
    """What went wrong, in pip's own words, and what to do about it."""
    remedies = (
        ("No space left on device", "make room, or set K3Q_ENVS or TMPDIR to another disk"),
        (
            "THESE PACKAGES DO NOT MATCH THE HASHES",
            "an index serves another file than the one that was locked: do not install it, ask its keeper; "
            "requirements/README.md says how a lock is remade",
        ),
        ("ensurepip", "this Python lacks its venv module: on Debian and Ubuntu it is in the package python3.11-venv"),
    )
    noise = r"\s*$|WARNING: Location .* is ignored|WARNING: Retrying \(Retry\(total=[1-9]"
    lines = [line for line in output.splitlines() if not re.match(noise, line)]
    network = r"No matching distribution|Connection|NameResolution|name resolution|Name or service|timed out|ProxyError"
    for sign, text in remedies:
        if sign in output:
            remedy = text
            break
    else:
        if not re.search(network, output):
            remedy = "the lines above are pip's own"
        elif step == "torch":
            remedy = (
                "no index in reach has torch's CPU build. Give one by K3Q_TORCH_INDEX=URL (a mirror of PyTorch's CPU "
                "index), a folder with the wheel by PIP_FIND_LINKS, a proxy by PIP_PROXY; or take what your index has: "
                f"K3Q_TORCH=torch=={TORCH_VERSION}"
            )
        else:
            remedy = (
                "no package index is in reach, or it lacks that version. Set PIP_INDEX_URL or PIP_PROXY; or carry the "
                f"wheels over: `pip download --no-deps -r requirements/{name}.txt -d WHEELS` where there is a network, "
                "then PIP_NO_INDEX=1 PIP_FIND_LINKS=WHEELS here"
            )
    said = "\n".join(f"  | {line[:300]}" for line in lines[-8:])
    return (
        f"environment {name} could not be made: step `{step}` ended with exit code {code}\n{said}\n"
        f"What to do: {remedy}.\nThen: python3 -m pipeline env make {name}   (whole log: {log})"
    )
