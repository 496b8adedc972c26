"""Lint rules on files: shards, index, layers, experts, and the auxiliary files that loading needs."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator

from pipeline.checkpoint.finding import WARNING, Finding
from pipeline.checkpoint.layout import F32_TENSORS, expert_of, layer_of
from pipeline.checkpoint.reading import CONFIG, INDEX, Checkpoint

FETCH = "fetch the file again, or write the checkpoint again"
TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model", "tokenizer.model", "vocab.json", "spiece.model")


def shards(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Shards and index agree both ways, and in total size."""
    for name, reason in checkpoint.broken.items():
        yield Finding("shard-unreadable", name, "", reason, FETCH)
    owners: dict[str, list[str]] = defaultdict(list)
    for shard, header in checkpoint.headers.items():
        for tensor in header.tensors:
            owners[tensor].append(shard)
    for tensor, places in owners.items():
        if len(places) > 1:
            yield Finding(
                "tensor-duplicate",
                places[1],
                tensor,
                f"stored in {len(places)} shards: {', '.join(places)}",
                "keep one",
            )
    index = checkpoint.index
    if index is None:
        if len(checkpoint.headers) + len(checkpoint.broken) > 1:
            yield Finding(
                "index-absent", INDEX, "", f"{len(checkpoint.headers)} shards and no index", "write the index"
            )
        return
    listed: dict[str, int] = defaultdict(int)
    for shard in index.values():
        listed[shard] += 1
    on_disk = checkpoint.headers.keys() | checkpoint.broken.keys()
    for shard in sorted(listed.keys() - on_disk):
        yield Finding("shard-missing", shard, "", f"in the index for {listed[shard]} tensors, not on disk", FETCH)
    for shard in sorted(on_disk - listed.keys()):
        yield Finding(
            "shard-extra",
            shard,
            "",
            "on disk, not in the index: engines load it or not as they please",
            "remove it, or index it",
        )
    for tensor, shard in index.items():
        if shard in checkpoint.headers and tensor not in checkpoint.headers[shard].tensors:
            if tensor in owners:
                yield Finding(
                    "tensor-misplaced",
                    shard,
                    tensor,
                    f"the index says {shard}, it lies in {owners[tensor][0]}",
                    "correct the index",
                )
            else:
                yield Finding("tensor-missing", shard, tensor, "in the index, in no shard", FETCH)
    for tensor, places in owners.items():
        if tensor not in index and places[0] in listed:
            yield Finding(
                "tensor-unindexed",
                places[0],
                tensor,
                "in the shard, not in the index: it would not be loaded",
                "add it to the index",
            )
    # What a total means is settled only when every tensor is there.
    if checkpoint.total_size is not None and not checkpoint.broken and listed.keys() <= on_disk:
        total = sum(t.size_bytes for header in checkpoint.headers.values() for t in header.tensors.values())
        if total != checkpoint.total_size:
            message = f"metadata.total_size is {checkpoint.total_size}, the tensors have {total} bytes"
            yield Finding("total-size", INDEX, "", message, "write the index again")


def layers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """The layers and experts that config.json promises, no more and no fewer; what must be F32 is F32."""
    config = checkpoint.text_config
    kimi = config.get("model_type") == "kimi_linear"
    present: dict[int, str] = {}
    experts: dict[int, set[int]] = defaultdict(set)
    for name, shard in checkpoint.weight_map.items():
        layer = layer_of(name)
        if layer is None:
            continue
        present.setdefault(layer, name)
        expert = expert_of(name)
        if expert is not None:
            experts[layer].add(expert)
        dtype = checkpoint.headers[shard].tensors[name].dtype
        if kimi and dtype != "F32" and F32_TENSORS.search(name):
            yield Finding(
                "f32-lost",
                shard,
                name,
                f"stored as {dtype}, K3 keeps it F32 (routing and state are sensitive to it)",
                "copy it from the source byte for byte",
            )
    count = config.get("num_hidden_layers")
    if isinstance(count, int) and present:
        allowed = count + int(config.get("num_nextn_predict_layers") or 0)
        for layer in sorted(set(present) - set(range(allowed))):
            name = present[layer]
            message = f"layer {layer}, but the config has {count} layers (and {allowed - count} for prediction)"
            yield Finding(
                "layer-extra", checkpoint.weight_map[name], name, message, "drop it, or set num_nextn_predict_layers"
            )
        for layer in sorted(set(range(count)) - set(present)):
            yield Finding(
                "layer-missing",
                CONFIG,
                f"layers.{layer}",
                f"num_hidden_layers is {count}, no tensor of layer {layer} is stored",
                FETCH,
            )
    wanted = next(
        (config[key] for key in ("num_experts", "n_routed_experts", "num_local_experts") if config.get(key)), None
    )
    if isinstance(wanted, int):
        for layer, found in sorted(experts.items()):
            for number in sorted(set(range(wanted)) - found):
                yield Finding(
                    "expert-missing",
                    CONFIG,
                    f"layers.{layer}.experts.{number}",
                    f"{wanted} experts are configured, layer {layer} has {len(found)}",
                    FETCH,
                )
            for number in sorted(found - set(range(wanted))):
                yield Finding(
                    "expert-extra",
                    CONFIG,
                    f"layers.{layer}.experts.{number}",
                    f"{wanted} experts are configured",
                    "drop it, or correct the config",
                )


def auxiliary(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Remote code that ``auto_map`` names (and what that imports), and a tokenizer."""
    directory = checkpoint.directory
    wanted: dict[str, str] = {}
    for holder in (CONFIG, "tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        path = directory / holder
        if not path.exists():
            continue
        try:
            auto_map = json.loads(path.read_bytes()).get("auto_map") or {}
        except (ValueError, AttributeError):
            yield Finding("aux-unreadable", holder, "", "not a JSON object", FETCH)
            continue
        for value in auto_map.values():
            for reference in value if isinstance(value, list) else [value]:
                if isinstance(reference, str) and "--" not in reference:  # "repo--module.Class" lies elsewhere
                    wanted.setdefault(reference.partition(".")[0] + ".py", f"auto_map of {holder} names {reference}")
    seen: set[str] = set()
    while wanted:
        name, reason = wanted.popitem()
        if name in seen:
            continue
        seen.add(name)
        if not (directory / name).exists():
            yield Finding(
                "aux-missing", name, "", f"{reason}, the file is not there", "copy it from the source checkpoint"
            )
            continue
        for module in re.findall(r"^\s*from\s+\.(\w+)\s+import", (directory / name).read_text(errors="replace"), re.M):
            wanted.setdefault(f"{module}.py", f"{name} imports it")
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        message = f"none of {', '.join(TOKENIZER_FILES)} is there: no server can start from this directory alone"
        yield Finding(
            "tokenizer-missing", "tokenizer.json", "", message, "copy the tokenizer from the source checkpoint"
        )
    elif not (directory / "tokenizer_config.json").exists():
        yield Finding(
            "aux-missing",
            "tokenizer_config.json",
            "",
            "a tokenizer without its config",
            "copy it from the source checkpoint",
            WARNING,
        )
