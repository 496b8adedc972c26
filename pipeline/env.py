"""The isolated environments: made once, found by name, locked by hash.  Standard library only; needs Python 3.11 with venv and pip.

llm-compressor and vLLM pin different releases of compressed-tensors, so no one environment can hold both.  An environment is ready
when its stamp, written last, equals the hash of what it was asked to be; anything else is rebuilt.

Variables: ``K3Q_ENVS`` folder of the environments; ``K3Q_LAUNCH`` command prefix of ``env run`` (``srun ...``);
``K3Q_TORCH_INDEX`` where torch's CPU build is looked for beside pip's own indexes (empty: nowhere else);
``K3Q_TORCH`` another requirement than torch's pinned CPU build.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import PipelineError, Refused

REPO = Path(__file__).resolve().parents[1]
PYTHON = (3, 11)
TORCH_VERSION = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PLUGIN = "plugins/vllm_k3_cpu"
STAMP = ".k3q-env"
PLUGIN_STAMP = ".k3q-plugin"
HEARTBEAT_S = 10.0

ABSENT, HALF_MADE, STALE, STALE_PLUGIN, READY = "absent", "half-made", "stale", "stale plugin", "ready"

GB = 10**9


@dataclass(frozen=True)
class Spec:
    """What an environment is, beyond its lock ``requirements/NAME.txt``."""

    purpose: str
    disk_bytes: int
    """Installed size plus the wheels that pip holds while it installs."""
    cpu_torch: bool = False
    """Torch's CPU build is installed apart from the lock: the index that has it must not serve anything else."""
    imports: tuple[str, ...] = ()
    """Modules whose import proves that native libraries load."""
    plugin: str | None = None
    """Source tree installed on top, with a stamp of its own."""


SPECS = {
    "core": Spec("DVC, evaluation client, statistics, report, tests; no torch", 2 * GB, imports=("dvc.repo", "lm_eval")),
    "quant": Spec("llm-compressor, torch for CPU", 3 * GB, True, imports=("torch", "numba")),
    "serve-cpu": Spec("vLLM for CPU with the K3 plugin", 4 * GB, True, imports=("torch",), plugin=PLUGIN),
    "serve-cuda": Spec("vLLM for NVIDIA GPUs", 25 * GB),
}
DEFAULT = ("core", "quant", "serve-cpu")
"""What ``env make all`` makes: nobody fetches a CUDA build to run the default."""


class NotMade(PipelineError):
    """An environment could not be made; the message holds pip's own last lines and what to do."""


# --- where, and in what state -------------------------------------------------------------------------------------------


def home() -> Path:
    """Folder of the environments: ``$K3Q_ENVS``, else beside the running one, else ``REPO/.venvs``.

    The second rule lets a stage that DVC runs in a temporary checkout find the environments of the tree it was started from.
    """
    if chosen := os.environ.get("K3Q_ENVS"):
        return Path(chosen).expanduser().absolute()
    if (Path(sys.prefix) / STAMP).exists():
        return Path(sys.prefix).parent
    return REPO / ".venvs"


def spec_of(name: str) -> Spec:
    try:
        return SPECS[name]
    except KeyError:
        raise Refused(f"no environment is called {name!r}: there are {', '.join(SPECS)}") from None


def python_of(name: str) -> Path:
    """The interpreter of an environment, made or not."""
    spec_of(name)
    return home() / name / "bin" / "python"


def site_packages_of(name: str) -> Path:
    """Where an environment's packages lie, so that their metadata can be read without starting it."""
    spec_of(name)
    return home() / name / "lib" / f"python{PYTHON[0]}.{PYTHON[1]}" / "site-packages"


def lock_file(name: str) -> Path:
    return REPO / "requirements" / f"{name}.txt"


def locked_versions(name: str) -> dict[str, str]:
    """Normalized package name -> version, from the lock."""
    pins = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==(\S+)", lock_file(name).read_text(), re.MULTILINE)
    return {normalized(package): version for package, version in pins}


def normalized(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def plugin_sources(name: str) -> list[Path]:
    """The files that the installed plugin consists of: neither its tests nor what Python or a build leaves behind."""
    root = REPO / (spec_of(name).plugin or "")
    if not spec_of(name).plugin or not (root / "pyproject.toml").exists():
        return []
    skipped = {"tests", "build", "dist", "__pycache__"}
    return sorted(
        path
        for path in root.rglob("*")
        if path.is_file()
        and not any(part in skipped or part.startswith(".") or part.endswith(".egg-info") for part in path.relative_to(root).parts)
    )


def expected_stamp(name: str) -> str:
    """Hash of the lock, the specification and the Python release."""
    what = f"{spec_of(name)!r} torch {TORCH_VERSION} python {PYTHON} {platform.machine()}"
    return hashlib.sha256(lock_file(name).read_bytes() + what.encode()).hexdigest()


def expected_plugin_stamp(name: str) -> str:
    digest = hashlib.sha256()
    for path in plugin_sources(name):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(REPO)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def state(name: str) -> str:
    """``absent``, ``half-made`` (no stamp, or no interpreter), ``stale``, ``stale plugin`` or ``ready``."""
    folder = home() / name
    if not folder.exists():
        return ABSENT
    if not (folder / STAMP).exists() or not python_of(name).exists():
        return HALF_MADE
    if _read(folder / STAMP) != expected_stamp(name):
        return STALE
    if plugin_sources(name) and _read(folder / PLUGIN_STAMP) != expected_plugin_stamp(name):
        return STALE_PLUGIN
    return READY


# --- making -------------------------------------------------------------------------------------------------------------


def ensure(name: str) -> Path:
    """The interpreter of environment ``name``, which is made, or made anew, when it is not ready.

    Raises :class:`Refused` for an unknown name, another Python or platform, too little disk, or a change under running
    processes; :class:`NotMade` when pip fails.  Makers of one environment wait for each other.
    """
    if state(name) == READY:
        return python_of(name)
    _check_platform(name)
    with _only_maker(name) as lock:
        found = state(name)  # another maker may have been faster
        if found != READY:
            _refuse_if_running(name)
            _Maker(name, lock).make(found)
    return python_of(name)


def remove(name: str) -> bool:
    """Delete an environment; says whether there was one.  Raises :class:`Refused` while a process runs in it."""
    if state(name) == ABSENT:
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
    """Hold the environment's lock; yields its descriptor, which pip inherits: an orphaned pip still keeps others out."""
    home().mkdir(parents=True, exist_ok=True)
    descriptor = os.open(home() / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
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
    prefixes = {f"{home() / name}/", f"{(home() / name).resolve()}/"}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            # A server may rename its processes, so the mapped libraries are looked at as well.
            mapped = (process / "maps").read_text(errors="replace")
        except OSError:
            continue  # ended meanwhile, or another user's
        if any(command[0].startswith(prefix) or prefix in mapped for prefix in prefixes):
            raise Refused(
                f"environment {name} must change, but process {process.name} runs in it ({' '.join(command)[:120].strip()}): "
                f"let it end, or use another folder of environments (K3Q_ENVS=...)"
            )


def _delete(name: str) -> None:
    folder = home() / name
    if any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
        raise Refused(f"{folder} is not a Python environment, so it is left alone: move it, or set K3Q_ENVS to another folder")
    # Renamed first: a kill in the midst of deleting must not leave something that looks like anything.
    doomed = Path(tempfile.mkdtemp(prefix=f".{name}.removed-", dir=home()))
    os.rename(folder, doomed / name)
    for leftover in home().glob(f".{name}.removed-*"):
        shutil.rmtree(leftover)


class _Maker:
    """One run of making environment ``name`` while its lock is held."""

    def __init__(self, name: str, lock: int) -> None:
        self.name, self.lock, self.spec = name, lock, spec_of(name)
        self.folder, self.log = home() / name, home() / f".{name}.log"
        self.started = time.monotonic()

    def make(self, found: str) -> None:
        self.log.write_bytes(b"")
        if found != STALE_PLUGIN:
            if found != ABSENT:
                self.say(f"{found}, so it is made anew")
            self.check_disk()
            if found != ABSENT:
                _delete(self.name)
            self.say(f"making {self.folder} ({self.spec.purpose})")
            self.run("interpreter", venv_command(self.folder))
            if self.spec.cpu_torch:
                self.install_torch()
            lock = str(lock_file(self.name))
            self.run("packages", [*pip_install(self.name), "--no-deps", "--require-hashes", "-r", lock])
            self.verify()
            (self.folder / STAMP).write_text(expected_stamp(self.name) + "\n")
        self.install_plugin()
        self.say("ready")

    def check_disk(self) -> None:
        places = {os.stat(place).st_dev: place for place in (tempfile.gettempdir(), home())}
        for place in places.values():
            free = shutil.disk_usage(place).free
            if free < self.spec.disk_bytes:
                raise Refused(
                    f"environment {self.name} takes up to {self.spec.disk_bytes / GB:.0f} GB while it is made and {place} has "
                    f"{free / GB:.1f} GB free: make room, or set K3Q_ENVS (the environments) or TMPDIR (pip's work) to another disk"
                )

    def install_torch(self) -> None:
        """Torch's CPU build; never the CUDA one that a plain ``torch==`` takes where only that is offered."""
        wanted = os.environ.get("K3Q_TORCH") or f"torch=={TORCH_VERSION}+cpu"
        index = os.environ.get("K3Q_TORCH_INDEX", TORCH_CPU_INDEX)
        command = [*pip_install(self.name), "--no-deps"]
        if not index:
            return self.run("torch", [*command, wanted])
        command += ["--extra-index-url", index]
        try:
            # One short try an index: where the extra one is out of reach, pip's own configuration may still know a wheel.
            self.run("torch", [*command, "--retries", "0", "--timeout", "5", wanted])
        except NotMade:
            if "Downloading" not in self.log_text():
                raise
            self.say("the download of torch broke off; once more with pip's own patience")
            self.run("torch", [*command, wanted])

    def install_plugin(self) -> None:
        sources = plugin_sources(self.name)
        if not sources:
            return
        stamp = expected_plugin_stamp(self.name)
        (self.folder / PLUGIN_STAMP).unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(prefix="k3q-plugin-") as scratch:  # a build in place would litter the source tree
            root = REPO / str(self.spec.plugin)
            for path in sources:
                target = Path(scratch) / root.name / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            options = ["--no-deps", "--no-build-isolation", "--no-index", "--force-reinstall"]
            self.run("plugin", [*pip_install(self.name), *options, str(Path(scratch) / root.name)])
        (self.folder / PLUGIN_STAMP).write_text(stamp + "\n")

    def verify(self) -> None:
        """Every package of the lock is there at its version, torch is a CPU build, and native libraries load."""
        found = installed_versions(self.name)
        wrong = {
            package: f"{found.get(package, 'absent')} instead of {version}"
            for package, version in locked_versions(self.name).items()
            if found.get(package) != version
        }
        if self.spec.cpu_torch and found.get("torch", "").split("+")[0] != TORCH_VERSION:
            wrong["torch"] = f"{found.get('torch', 'absent')} instead of {TORCH_VERSION}"
        if wrong:
            listed = "; ".join(f"{package} {text}" for package, text in sorted(wrong.items()))
            raise NotMade(f"environment {self.name} differs from {lock_file(self.name).relative_to(REPO)}: {listed}")
        if self.spec.imports:
            self.run("import test", [str(python_of(self.name)), "-c", f"import {', '.join(self.spec.imports)}"])

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
        total = len(locked_versions(self.name))
        if "Installing collected packages" in output:
            return f"{len(list(site_packages_of(self.name).glob('*.dist-info')))} installed of about {total}"
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
    return [str(python_of(name)), "-m", "pip", "install", *quiet]


def _environment() -> dict[str, str]:
    """The caller's environment without what would send packages elsewhere or lend foreign ones to the new interpreter."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_REQUIRE_HASHES", "PIP_QUIET"}
    return {key: value for key, value in os.environ.items() if key not in dropped} | {"PYTHONNOUSERSITE": "1"}


def installed_versions(name: str) -> dict[str, str]:
    """Normalized package name -> version, read from the environment's metadata; nothing is imported or started."""
    found = importlib.metadata.distributions(path=[str(site_packages_of(name))])
    return {normalized(distribution.metadata["Name"]): distribution.version for distribution in found}


def failure(name: str, step: str, code: int, output: str, log: Path) -> str:
    """What went wrong, in pip's own words, and what to do about it."""
    remedies = (
        ("No space left on device", "make room, or set K3Q_ENVS or TMPDIR to another disk"),
        ("THESE PACKAGES DO NOT MATCH THE HASHES", "an index serves another file than the one that was locked: do not install it, "
         "ask its keeper; requirements/README.md says how a lock is remade"),
        ("ensurepip", "this Python lacks its venv module: on Debian and Ubuntu it is in the package python3.11-venv"),
    )
    lines = [line for line in output.splitlines() if line.strip() and "is ignored: it is neither a file" not in line]
    network = r"No matching distribution|NewConnectionError|NameResolution|name resolution|Name or service|timed out|Connection|ProxyError"
    for sign, text in remedies:
        if sign in output:
            remedy = text
            break
    else:
        if not re.search(network, output):
            remedy = "the lines above are pip's own"
        elif step == "torch":
            remedy = (
                "no index in reach has torch's CPU build. Give one by K3Q_TORCH_INDEX=URL (a mirror of PyTorch's CPU index), a folder "
                "with the wheel by PIP_FIND_LINKS, a proxy by PIP_PROXY; or take what your index has: K3Q_TORCH=torch=="
                + TORCH_VERSION
            )
        else:
            remedy = (
                "no package index is in reach, or it lacks that version. Set PIP_INDEX_URL or PIP_PROXY; or carry the wheels over: "
                f"`pip download --no-deps -r requirements/{name}.txt -d WHEELS` where there is a network, then PIP_NO_INDEX=1 "
                "PIP_FIND_LINKS=WHEELS here"
            )
    said = "\n".join(f"  | {line[:300]}" for line in lines[-8:])
    return (
        f"environment {name} could not be made: step `{step}` ended with exit code {code}\n{said}\n"
        f"What to do: {remedy}.\nThen: python3 -m pipeline env make {name}   (whole log: {log})"
    )


# --- command line -------------------------------------------------------------------------------------------------------


def size_bytes(folder: Path) -> int:
    """Disk space that a folder takes, each hard-linked file once."""
    blocks: dict[tuple[int, int], int] = {}
    for root, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(root, file))
                blocks[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(blocks.values())


def run_in(name: str, arguments: list[str]) -> None:
    """Become ``arguments`` in environment ``name``, behind ``$K3Q_LAUNCH``; the exit code is the command's.  Never returns."""
    command = [*shlex.split(os.environ.get("K3Q_LAUNCH", "")), str(ensure(name)), *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH")})
    except OSError as error:
        raise Refused(f"cannot start {command[0]!r}: {error.strerror} (K3Q_LAUNCH={os.environ.get('K3Q_LAUNCH', '')!r})") from None


def _list() -> None:
    rows = [("name", "state", "size", "path", "purpose")]
    for name, spec in SPECS.items():
        folder = home() / name
        size = f"{size_bytes(folder) / GB:.2f} GB" if folder.exists() else "-"
        rows.append((name, state(name), size, str(folder), spec.purpose))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def main(argv: list[str]) -> int:
    """``python3 -m pipeline env [list | make NAME...|all | run NAME -- ARGUMENT... | path NAME | remove NAME...]``."""
    parser = argparse.ArgumentParser(prog="python3 -m pipeline env", description="The isolated environments: list, make, use, remove.")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="name, state, size and path of each (the default)")
    make = commands.add_parser("make", help="make or renew environments")
    make.add_argument("names", nargs="+", metavar="NAME", help=f"{', '.join(SPECS)}, or all (= {', '.join(DEFAULT)})")
    run = commands.add_parser("run", help="run the environment's Python with arguments, e.g. run quant -- -m pytest")
    run.add_argument("name", metavar="NAME")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- ARGUMENT...")
    path = commands.add_parser("path", help="print the path of the environment's Python")
    path.add_argument("name", metavar="NAME")
    gone = commands.add_parser("remove", help="delete environments")
    gone.add_argument("names", nargs="+", metavar="NAME")
    options = parser.parse_args(argv)

    if options.command == "make":
        names = [name for chosen in options.names for name in (DEFAULT if chosen == "all" else (chosen,))]
        for name in names:
            spec_of(name)  # a misspelt name is refused before the first one is made
        for name in names:
            ensure(name)
    elif options.command == "run":
        arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
        run_in(options.name, arguments)
    elif options.command == "path":
        print(python_of(options.name))
    elif options.command == "remove":
        for name in options.names:
            print(f"{name}: {'removed' if remove(name) else 'was not there'}")
    else:
        _list()
    return 0
