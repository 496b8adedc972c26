"""A checkpoint directory, opened from its headers alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.checkpoint.headers import Header, HeaderError, Tensor, read_header
from pipeline.errors import Unreadable

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
MANIFEST = "manifest.json"
LOCATION = "location.json"  # stands in a tracked folder for a checkpoint that is kept elsewhere
WEIGHT_SUFFIX = ".safetensors"
# Weights in containers that are never opened here: pickles run code when they are read, the others are other formats.
OTHER_WEIGHTS = re.compile(r"(?i)\.(?:gguf|ggml|pth?|ckpt|h5|msgpack|onnx|pdparams)$|(?:^|/)[^/]*model[^/]*\.bin$")
ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class Checkpoint:
    """What a directory holds.  Damage that can be listed (``broken``, shards that are missing) is kept, not raised.

    ``index`` is the index file's ``weight_map`` (tensor -> shard name), ``None`` where there is no index, and
    ``total_size`` what it says of the size, number or not; ``headers`` the parsed header of every readable shard on
    disk; ``broken`` the reason for every unreadable one.  ``auxiliary`` files are all others but weights in another
    container (``other_weights``), which neither describe these tensors nor are carried along.
    """

    directory: Path
    config: dict[str, Any]
    index: dict[str, str] | None
    total_size: Any
    headers: dict[str, Header]
    broken: dict[str, str]
    auxiliary: tuple[str, ...]
    other_weights: tuple[str, ...]
    _where: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, directory: Path | str) -> Checkpoint:
        """Read config, index and headers.  Raises :class:`Unreadable` when there is no checkpoint to speak of."""
        directory = Path(directory)
        if not directory.is_dir():
            what = "a file; name the directory that holds it" if directory.exists() else "no such directory"
            raise Unreadable(f"{directory}: {what}")
        if what := _what_else(directory):
            raise Unreadable(f"{directory}: {what}")
        config = files.read_json(directory / CONFIG)
        if not isinstance(config, dict):
            raise Unreadable(f"{directory / CONFIG}: expected a JSON object")
        index, total_size = _read_index(directory / INDEX)
        names = sorted(
            str(path.relative_to(directory))
            for path in directory.rglob("*")
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
        )
        headers, broken = {}, {}
        for name in (name for name in names if name.endswith(WEIGHT_SUFFIX) and "/" not in name):
            try:
                headers[name] = read_header(directory / name)
            except HeaderError as error:
                broken[name] = str(error)
        if not headers and not broken and not index:
            raise Unreadable(f"{directory}: no {WEIGHT_SUFFIX} file and no {INDEX}")
        rest = [name for name in names if not name.endswith(WEIGHT_SUFFIX) and name not in (CONFIG, INDEX, MANIFEST)]
        others = tuple(name for name in rest if OTHER_WEIGHTS.search(name))
        auxiliary = tuple(name for name in rest if name not in others)
        where = {tensor: shard for shard, header in headers.items() for tensor in header.tensors}
        return cls(directory, config, index, total_size, headers, broken, auxiliary, others, where)

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> shard, as the files have it."""
        return self._where

    def tensor(self, name: str) -> Tensor:
        """Where a tensor lies.  Raises :class:`Unreadable` naming it when no readable shard has it."""
        if name not in self._where:
            raise Unreadable(f"{self.directory}: no shard holds tensor {name}")
        return self.headers[self._where[name]].tensors[name]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of every readable shard, in file order."""
        return {name: tensor for header in self.headers.values() for name, tensor in header.tensors.items()}

    def read(self, name: str) -> bytes:
        """The bytes of one tensor."""
        tensor = self.tensor(name)
        with open(self.directory / self._where[name], "rb") as stream:
            stream.seek(tensor.start)
            return stream.read(tensor.size_bytes)

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the config: ``text_config`` where the model nests it, else the whole."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config


def _what_else(directory: Path) -> str | None:
    """What a directory holds that is no safetensors checkpoint, with what to do; ``None`` where it may be one."""
    names = sorted(path.name for path in directory.iterdir())
    if not names:
        return "empty"
    if ADAPTER in names and CONFIG not in names:
        return f"an adapter ({ADAPTER}), not a model; merge it into its base first"
    if any(name.endswith(WEIGHT_SUFFIX) or name == INDEX for name in names):
        return None
    if found := [name for name in names if OTHER_WEIGHTS.search(name)]:
        kind = "GGUF" if found[0].lower().endswith(".gguf") else f"{Path(found[0]).suffix} files"
        return (
            f"its weights are {kind} ({found[0]} and {len(found) - 1} more), which are not opened (a pickle runs code "
            f"when it is read); fetch or convert the model as {WEIGHT_SUFFIX}"
        )
    return None


def _read_index(path: Path) -> tuple[dict[str, str] | None, Any]:
    if not path.exists():
        return None, None
    content = files.read_json(path)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise Unreadable(f"{path}: has no weight_map of tensor names to shard names")
    metadata = content.get("metadata")
    return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None
