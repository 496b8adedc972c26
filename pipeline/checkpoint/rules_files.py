"""Lint rules on files: shards, index, layers, experts, and the auxiliary files that loading needs."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from pipeline.checkpoint.finding import WARNING, Finding
from pipeline.checkpoint.headers import LFS_POINTER
from pipeline.checkpoint.layout import F32_TENSORS, PREDICTION, ROUTER_GATE, expert_of, layer_of
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
        if Path(shard).name != shard:
            message = f"the index names it for {listed[shard]} tensors: a shard lies beside its index, nowhere else"
            yield Finding("shard-outside", shard, "", message, "move the shard there, and correct the index")
        else:
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
            message = f"metadata.total_size is {checkpoint.total_size!r}, the tensors have {total} bytes"
            yield Finding("total-size", INDEX, "", message, "write the index again")


def layers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """The layers and experts that config.json promises, no more and no fewer; what must be F32 is F32."""
    config = checkpoint.text_config
    kimi = config.get("model_type") == "kimi_linear"
    present: dict[int, str] = {}
    predicting: list[str] = []
    routed: set[int] = set()
    experts: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))  # layer, number, w1 and the like
    for name, shard in checkpoint.weight_map.items():
        if PREDICTION.search(name):
            predicting.append(name)
            continue
        layer = layer_of(name)
        if layer is None:
            continue
        present.setdefault(layer, name)
        tensor = checkpoint.headers[shard].tensors[name]
        expert = expert_of(name)
        if expert is not None:
            experts[layer][expert].add(tensor.module.rpartition(".")[2])
        elif ROUTER_GATE.search(tensor.module):
            routed.add(layer)
        if kimi and tensor.dtype != "F32" and F32_TENSORS.search(name):
            yield Finding(
                "f32-lost",
                shard,
                name,
                f"stored as {tensor.dtype}, K3 keeps it F32 (routing and state are sensitive to it)",
                "copy it from the source byte for byte",
            )
    yield from _layer_count(checkpoint, present, predicting)
    # Else the parts may lie in a shard that is already reported as missing.
    listed_whole = (checkpoint.index or {}).keys() <= checkpoint.weight_map.keys()
    wanted = next((config[key] for key in EXPERT_COUNTS if _count(config, key)), None)
    for layer in sorted(routed - experts.keys() if experts else ()):
        message = f"layer {layer} has a router and no experts, {len(experts)} other layers have some"
        yield Finding("expert-missing", CONFIG, f"layers.{layer}.experts", message, FETCH)
    for layer, found in sorted(experts.items()):
        parts = set().union(*found.values())
        for number, mine in sorted(found.items()):
            for leaf in sorted(parts - mine if listed_whole else ()):
                message = f"expert {number} of layer {layer} has no {leaf}, others have it"
                yield Finding("expert-missing", CONFIG, f"layers.{layer}.experts.{number}.{leaf}", message, FETCH)
        if wanted is None:
            continue
        for number in sorted(set(range(wanted)) - found.keys()):
            yield Finding(
                "expert-missing",
                CONFIG,
                f"layers.{layer}.experts.{number}",
                f"{wanted} experts are configured, layer {layer} has {len(found)}",
                FETCH,
            )
        for number in sorted(found.keys() - set(range(wanted))):
            yield Finding(
                "expert-extra",
                CONFIG,
                f"layers.{layer}.experts.{number}",
                f"{wanted} experts are configured",
                "drop it, or correct the config",
            )


EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
PREDICTION_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def _count(config: dict, key: str) -> int:
    """A number of layers or experts that the config states; 0 where it states none."""
    value = config.get(key)
    return value if type(value) is int and value > 0 else 0


def head(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A language model whose embeddings are said not to be tied has an output matrix of its own."""
    untied = any(c.get("tie_word_embeddings") is False for c in (checkpoint.text_config, checkpoint.config))
    names = checkpoint.weight_map
    if untied and any("embed_tokens." in name for name in names) and not any("lm_head." in name for name in names):
        message = "tie_word_embeddings is false, no tensor of lm_head is stored: an engine makes one up, or stops"
        remedy = "copy it from the source, or say true"
        yield Finding("head-missing", CONFIG, "lm_head.weight", message, remedy, WARNING)


def _layer_count(checkpoint: Checkpoint, present: dict[int, str], predicting: list[str]) -> Iterator[Finding]:
    """No decoder layer missing, none too many; prediction layers (MTP) where the config has them, and only there."""
    config = checkpoint.text_config
    count, extra = _count(config, "num_hidden_layers"), max(_count(config, key) for key in PREDICTION_COUNTS)
    if predicting and not extra:
        name = predicting[0]
        message = f"{len(predicting)} tensors of prediction layers (first: this one), but the config has 0 such layers"
        yield Finding(
            "layer-extra", checkpoint.weight_map[name], name, message, "drop them, or set num_nextn_predict_layers"
        )
    if not count or not present:
        return
    for layer in sorted(set(present) - set(range(count + extra))):
        name = present[layer]
        message = f"layer {layer}, but the config has {count} layers (and {extra} for prediction)"
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
    if extra and not predicting and not set(present) & set(range(count, count + extra)):
        message = f"{extra} prediction layers are configured, none is stored: no speculative decoding with them"
        remedy = "copy them from the source, or set their number to 0"
        yield Finding("layer-missing", CONFIG, f"layers.{count}", message, remedy, WARNING)


def auxiliary(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Remote code that ``auto_map`` names (and what that imports), a tokenizer, and no file that is only a pointer."""
    directory = checkpoint.directory
    for name in checkpoint.auxiliary:
        with open(directory / name, "rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                message = "a Git LFS pointer, not the file itself"
                yield Finding("aux-unreadable", name, "", message, "fetch it with `git lfs pull`")
    for name in checkpoint.other_weights:
        message = "weights in a container that is neither linted nor carried along"
        yield Finding("other-weights", name, "", message, "remove it", WARNING)
    yield from _remote_code(directory)
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


def _remote_code(directory: Path) -> Iterator[Finding]:
    wanted: dict[str, str] = {}
    for holder in (CONFIG, "tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        if not (directory / holder).exists():
            continue
        try:
            auto_map = json.loads((directory / holder).read_bytes()).get("auto_map") or {}
            values = list(auto_map.values())
        except (ValueError, AttributeError, RecursionError):
            yield Finding("aux-unreadable", holder, "", "not a JSON object, or its auto_map is none", FETCH)
            continue
        for value in values:
            for reference in value if isinstance(value, list) else [value]:
                if isinstance(reference, str) and "--" not in reference:  # "repo--module.Class" lies elsewhere
                    wanted.setdefault(reference.partition(".")[0] + ".py", f"auto_map of {holder} names {reference}")
    seen: set[str] = set()
    while wanted:
        name, reason = wanted.popitem()
        if name in seen:
            continue
        seen.add(name)
        if not (directory / name).is_file():
            yield Finding(
                "aux-missing", name, "", f"{reason}, the file is not there", "copy it from the source checkpoint"
            )
            continue
        for module in re.findall(r"^\s*from\s+\.(\w+)\s+import", (directory / name).read_text(errors="replace"), re.M):
            wanted.setdefault(f"{module}.py", f"{name} imports it")
