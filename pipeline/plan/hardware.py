"""Hardware files: ``conf/hardware/*.yaml``, read strictly.  An unknown key is an error, and so is an unexplained
flag."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import Unreadable
from pipeline.plan.layout import Layout

DIRECTORY = Path(__file__).resolve().parents[2] / "conf" / "hardware"
PLATFORMS = ("cpu", "cuda", "rocm")
SERVER_ENVS = ("serve-cpu", "serve-cuda")


@dataclass(frozen=True)
class Setting:
    """One flag or environment variable that differs from the engine's default: the value, why, and on what it was
    seen."""

    value: Any
    why: str
    seen_on: str


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.  ``usable_bytes`` is what the driver reports and every figure here is computed from;
    ``marketed_bytes`` is what the data sheet sells, for recognition only."""

    usable_bytes: int
    usable_source: str
    marketed_bytes: int
    marketed_source: str


@dataclass(frozen=True)
class Workspace:
    """Device memory that the engine takes outside its own budget."""

    bytes: int
    why: str
    seen_on: str


@dataclass(frozen=True)
class Hardware:
    """One machine (or set of nodes) and the recipe to serve on it."""

    name: str
    title: str
    platform: str
    architecture: str
    server_env: str
    engine: str
    engine_version: str
    nodes: int
    devices_per_node: int
    memory: Memory
    tensor_parallel: int
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    decode_context_parallel: int = 1
    price_usd_per_hour: float | None = None
    """Of all devices together; the bench makes dollars a million tokens of it."""
    flags: dict[str, Setting] = field(default_factory=dict)
    environment: dict[str, Setting] = field(default_factory=dict)
    workspaces: dict[str, Workspace] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def layout(self) -> Layout:
        return Layout(
            self.tensor_parallel,
            self.pipeline_parallel,
            self.data_parallel,
            self.expert_parallel,
            self.decode_context_parallel,
        )

    def flag(self, name: str, default: Any = None) -> Any:
        """The value of serve flag ``name`` (without dashes), or ``default`` where the recipe leaves it alone."""
        return self.flags[name].value if name in self.flags else default

    def serve_arguments(self, without: tuple[str, ...] = ()) -> list[str]:
        """The recipe's flags as a command line: true is the bare flag, false ``--no-``, a mapping is JSON."""
        arguments: list[str] = []
        for name, setting in self.flags.items():
            if name in without:
                continue
            if setting.value is True:
                arguments.append(f"--{name}")
            elif setting.value is False:
                arguments.append(f"--no-{name}")
            else:
                value = setting.value
                arguments += [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
        return arguments

    def environment_variables(self) -> dict[str, str]:
        return {name: str(setting.value) for name, setting in self.environment.items()}


def available() -> list[str]:
    """Names of the hardware files."""
    return sorted(path.stem for path in DIRECTORY.glob("*.yaml"))


def load(name: str) -> Hardware:
    """Read ``conf/hardware/<name>.yaml`` (or the file at path ``name``).

    Raises :class:`Unreadable` where it is missing or not as the schema says, naming the key.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else DIRECTORY / f"{name}.yaml"
    if not path.is_file():
        raise Unreadable(f"{path}: no such hardware file; there are: {', '.join(available())}")
    try:
        data = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise Unreadable(f"{path}: not valid YAML ({str(error).splitlines()[0]})") from None
    return parse(data, str(path))


def parse(data: Any, where: str) -> Hardware:
    """Check and build; every problem of the file is reported at once."""
    problems: list[str] = []
    if not isinstance(data, dict):
        raise Unreadable(f"{where}: expected a mapping")
    values = _known(Hardware, data, "", problems)
    values["memory"] = _build(Memory, values.get("memory"), "memory", problems)
    for section, kind in (("flags", Setting), ("environment", Setting), ("workspaces", Workspace)):
        entries = values.get(section) or {}
        if not isinstance(entries, dict):
            problems.append(f"{section}: expected a mapping of names to entries")
            entries = {}
        values[section] = {name: _build(kind, entry, f"{section}.{name}", problems) for name, entry in entries.items()}
    _check(values, problems)
    if problems:
        raise Unreadable(f"{where}: " + "; ".join(problems))
    hardware = Hardware(**values)
    if hardware.layout.ranks != hardware.devices and hardware.platform != "cpu":
        raise Unreadable(
            f"{where}: {hardware.layout.label()} is {hardware.layout.ranks} ranks, but there are "
            f"{hardware.nodes} x {hardware.devices_per_node} = {hardware.devices} devices"
        )
    return hardware


def _known(kind: type, data: dict[str, Any], prefix: str, problems: list[str]) -> dict[str, Any]:
    names = {entry.name for entry in fields(kind)}
    problems += [f"unknown key {prefix}{name}" for name in data if name not in names]
    required = [e.name for e in fields(kind) if e.default is MISSING and e.default_factory is MISSING]
    problems += [f"missing key {prefix}{name}" for name in required if name not in data]
    return {name: value for name, value in data.items() if name in names}


def _build(kind: type, data: Any, where: str, problems: list[str]) -> Any:
    if not isinstance(data, dict):
        problems.append(f"{where}: expected a mapping with {', '.join(e.name for e in fields(kind))}")
        return None
    values = _known(kind, data, f"{where}.", problems)
    for name in ("why", "seen_on", "usable_source", "marketed_source"):
        if name in values and not (isinstance(values[name], str) and values[name].strip()):
            problems.append(f"{where}.{name} is empty: say it in words")
    for name in ("bytes", "usable_bytes", "marketed_bytes"):
        if name in values and (not isinstance(values[name], int) or values[name] <= 0):
            problems.append(f"{where}.{name}: expected a positive number of bytes, not {values[name]!r}")
    try:
        return kind(**values)
    except TypeError:
        return None  # the missing keys are already among the problems


def _check(values: dict[str, Any], problems: list[str]) -> None:
    for name in ("nodes", "devices_per_node", "tensor_parallel", "pipeline_parallel", "data_parallel"):
        if name in values and (not isinstance(values[name], int) or isinstance(values[name], bool) or values[name] < 1):
            problems.append(f"{name}: expected a positive integer, not {values[name]!r}")
    for name, allowed in (("platform", PLATFORMS), ("server_env", SERVER_ENVS)):
        if name in values and values[name] not in allowed:
            problems.append(f"{name}: {values[name]!r} is not one of {', '.join(allowed)}")
    for name in values.get("flags") or {}:
        if str(name).startswith("-") or "_" in str(name):
            problems.append(f"flags.{name}: write the long option without dashes in front, e.g. max-model-len")


