"""The source model: found where the parameters say, downloaded only when a hub id is given and shards are missing, and hashed once.

1.5 TB take 40 core-minutes to hash, so a file's SHA-256 is remembered by (path, size, mtime, inode); the manifest that DVC tracks
holds names, sizes and hashes only, and an unchanged source costs one ``stat`` a file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pipeline.checkpoint.manifest import listed_files
from pipeline.errors import Unreadable
from pipeline.files import read_json, sha256_file, write_json

HASH_CACHE = Path(".cache/sha256.json")
INDEX = "model.safetensors.index.json"
SINGLE_SHARD = "model.safetensors"
COMMIT = ".commit.json"  # left in the folder by a download, so that a later run still knows what was downloaded
# What a safetensors checkpoint needs besides its shards.  Remote code is added only when the parameters allow it by name.
AUXILIARY = ["*.json", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*", "*.tiktoken"]


def missing_shards(folder: Path) -> list[str]:
    """Names of the shards that the index lists and the folder lacks (the index itself when that is missing)."""
    if (folder / SINGLE_SHARD).is_file():
        return []
    if not (folder / INDEX).is_file():
        return [INDEX]
    listed = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
    return [name for name in listed if not (folder / name).is_file()]


def download(repo: str, revision: str | None, folder: Path, *, trust_remote_code: bool) -> None:
    """Fetch what is missing from the hub into ``folder``, and record there the commit that ``revision`` resolved to.

    Raises :class:`Unreadable` with the hub's own message (offline, no such repository, no access).
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    patterns = ["*.safetensors", *AUXILIARY, *(["*.py"] if trust_remote_code else [])]
    try:
        commit = HfApi().model_info(repo, revision=revision).sha
        snapshot_download(repo, revision=commit, local_dir=folder, allow_patterns=patterns)
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise Unreadable(
            f"{folder}: shards are missing and {repo} cannot be downloaded ({type(error).__name__}: {error}).  "
            "Put the checkpoint there, or check the network, the repository id and your access token."
        ) from None
    write_json(folder / COMMIT, {"repo": repo, "commit": commit})


def downloaded_commit(folder: Path) -> str | None:
    """The hub commit that :func:`download` fetched into ``folder``; None for a folder that came some other way."""
    return read_json(folder / COMMIT)["commit"] if (folder / COMMIT).exists() else None


def manifest(folder: Path, *, hash_cache: Path = HASH_CACHE) -> list[dict[str, Any]]:
    """``[{name, size_bytes, sha256}]`` of every file of the checkpoint in ``folder``, as ``verify --hashes`` lists them."""
    cache = read_json(hash_cache) if hash_cache.exists() else {}
    files = [folder / name for name in listed_files(folder)]
    keys = {path: identity(path) for path in files}
    unknown = [path for path in files if keys[path] not in cache]
    total = sum(path.stat().st_size for path in unknown)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"hashing {folder}", disable=total < 1 << 28) as bar:
        for path in unknown:
            cache[keys[path]] = sha256_file(path)
            bar.update(path.stat().st_size)
            write_json(hash_cache, cache)  # a killed run keeps the shards it has hashed
    return [
        {"name": str(path.relative_to(folder)), "size_bytes": path.stat().st_size, "sha256": cache[keys[path]]}
        for path in files
    ]


def identity(path: Path) -> str:
    """What tells a changed file without reading it."""
    stat = path.stat()
    return f"{os.path.realpath(path)}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
