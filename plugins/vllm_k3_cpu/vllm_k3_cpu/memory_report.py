"""Memory of one vLLM worker, read from its objects (never from log lines), for any model.

    --worker-extension-cls vllm_k3_cpu.memory_report.MemoryReport

then ``LLM.collective_rpc("memory_report")``, or ``POST /collective_rpc {"method": "memory_report"}`` on a server
started with ``VLLM_SERVER_DEV_MODE=1`` (that endpoint runs methods by name: loopback only).  Ask an idle engine.

A figure that cannot be read is None, and ``unavailable`` says why under its key.  The CUDA branch is written from vLLM
0.32's source and has not been run.
"""

from __future__ import annotations

import gc
import re
from contextlib import contextmanager

import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, UniformTypeKVCacheSpecs

from . import weight_accounting

weight_accounting.install()  # a worker imports its extension before it loads the model


class MemoryReport:
    """Worker extension: its methods become methods of the vLLM worker."""

    def memory_report(self, num_tokens: int | None = None) -> dict:
        """One rank's memory, bytes unless the key says otherwise.

        ``num_tokens``: batch tokens of the activation measurement (default ``max_num_batched_tokens``), spread over
        up to ``max_num_seqs`` requests.
        """
        runner = self.model_runner
        report: dict = {"rank": self.rank, "device": self.device.type, "unavailable": {}}
        report |= _weights(runner, report["unavailable"])
        report |= _cache(runner, self.vllm_config, report["unavailable"])
        report |= _activations(runner, self.device.type, num_tokens or runner.max_num_tokens, report["unavailable"])
        report |= {
            "max_num_seqs": runner.max_num_reqs,
            "max_num_batched_tokens": runner.max_num_tokens,
            "rss_bytes": _status_bytes("VmRSS"),
        }
        report |= linear_kernels(runner.get_model())
        if self.device.type != "cpu":
            report["worker"] = _accelerator_figures(self, runner)
        return report

    def kv_scales(self) -> dict:
        """Scales of the KV cache per attention layer, as in effect.

        ``source``: ``checkpoint`` or ``default``.  K3's layers know; vLLM's own forget it, but put exactly 1.0 where the checkpoint
        has none.  ``applied``: whether the cache type uses scales at all.
        """
        layers = {}
        for name, layer in self.vllm_config.compilation_config.static_forward_context.items():
            k_scale, v_scale = (_scale_of(layer, scale) for scale in ("k_scale", "v_scale"))
            if k_scale is None:
                continue
            loaded = getattr(layer, "loaded_scales", {*k_scale, *(v_scale or ())} != {1.0})
            layers[name] = {
                "k_scale": k_scale,
                "v_scale": v_scale,
                "source": "checkpoint" if loaded else "default",
                "kv_cache_dtype": layer.kv_cache_dtype,
                "applied": layer.kv_cache_dtype.startswith("fp8"),
            }
        return {"rank": self.rank, "layers": layers}


def _scale_of(layer, name: str) -> list[float] | None:
    """A cache scale of an attention layer: a float (K3) or vLLM's ``_k_scale`` / ``_v_scale`` tensor; one value or
    one a head.
    """
    value = getattr(layer, name, None)
    value = getattr(layer, f"_{name}", None) if value is None else value
    return None if value is None else torch.as_tensor(value).flatten().tolist()


def _weights(runner, unavailable: dict) -> dict:
    model = runner.get_model()
    recorded = getattr(model, weight_accounting.ATTRIBUTE, None)
    if recorded is None:
        unavailable["weight_bytes"] = "the model was loaded before vllm_k3_cpu.memory_report was imported"
    live = [*model.parameters(), *model.buffers()]
    return {
        "weight_bytes": None if recorded is None else sum(recorded.values()),
        "weight_bytes_by_dtype": recorded,
        # After loading, without what vLLM moved into oneDNN's own buffers.
        "weight_live_tensor_bytes": weight_accounting.storage_bytes(live),
    }


def _cache(runner, vllm_config, unavailable: dict) -> dict:
    """Attention cache and recurrent state.  Both live in one pool of blocks, every page padded to one size."""
    config = getattr(runner, "kv_cache_config", None)
    if config is None:
        unavailable["kv_bytes_allocated"] = "the engine has no KV cache yet"
        config_specs = []
    else:
        config_specs = [spec for group in config.kv_cache_groups for spec in _specs_of_layers(group)]
    attention = [spec for spec in config_specs if isinstance(spec, AttentionSpec)]
    state = [spec for spec in config_specs if isinstance(spec, MambaSpec)]
    cache = vllm_config.cache_config
    capacity, concurrency = get_kv_cache_capacity(vllm_config, config) if config_specs else (None, None)
    return {
        "kv_cache_dtype": cache.cache_dtype,
        "kv_bytes_allocated": weight_accounting.storage_bytes(_cache_tensors(vllm_config)) if config else None,
        "kv_bytes_per_token": sum(spec.real_page_size_bytes // spec.block_size for spec in attention),
        "kv_num_blocks": config.num_blocks if config else None,
        "kv_block_size": attention[0].block_size if attention else None,
        "kv_page_bytes": attention[0].page_size_bytes if attention else None,
        "kv_capacity_tokens": capacity,
        "kv_max_concurrency": concurrency,
        "kv_attention_layers": len(attention),
        "state_layers": len(state),
        "state_bytes_per_sequence": sum(spec.real_page_size_bytes for spec in state),
        "state_page_bytes_padded": state[0].page_size_bytes if state else 0,
        "state_block_bytes_per_sequence": sum(spec.page_size_bytes for spec in state),
        "state_cache_mode": cache.mamba_cache_mode if state else None,
    }


def _specs_of_layers(group) -> list:
    """One cache spec a layer of the group."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return [spec.kv_cache_specs[name] for name in group.layer_names]
    return [spec] * len(group.layer_names)


def _cache_tensors(vllm_config) -> list[torch.Tensor]:
    tensors = []
    for layer in vllm_config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        tensors += [cache] if isinstance(cache, torch.Tensor) else list(cache or ())
    return tensors


def _activations(runner, device: str, num_tokens: int, unavailable: dict) -> dict:
    """Peak bytes that one forward pass and one sampling of ``num_tokens`` tokens add to what is already allocated."""

    def run():
        _, last_hidden = runner._dummy_run(num_tokens, force_attention=True)
        runner._dummy_sampler_run(last_hidden)

    measure = _cpu_allocation_peak if device == "cpu" else _accelerator_allocation_peak
    peak = None
    try:
        with _null_block_tables(runner):
            run()  # what is built once (workspaces, dequantized projections) is not activation
            gc.collect()
            peak = measure(run)
    except Exception as error:  # vLLM's dummy run is not implemented for every model; the other figures stand
        unavailable["activation_peak_bytes"] = f"the dummy run failed: {type(error).__name__}: {error}"
    return {"activation_peak_bytes": peak, "activation_num_tokens": num_tokens}


@contextmanager
def _null_block_tables(runner):
    """Point every batch row at the null block meanwhile: rows of finished requests still name blocks that the prefix
    cache may hand out, and a dummy run writes recurrent state."""
    tables = runner.input_batch.block_table.block_tables
    kept = [table.block_table.np.copy() for table in tables]
    for table in tables:
        table.block_table.np.fill(0)
    try:
        yield
    finally:
        for table, rows in zip(tables, kept, strict=True):
            table.block_table.np[:] = rows
        runner.input_batch.block_table.commit_block_table(runner.max_num_reqs)


def _cpu_allocation_peak(run) -> int:
    """Peak of live bytes in torch's CPU allocator during ``run()``, from allocation events: the same figure every
    time.
    """
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events, stack = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    live = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        live += size
        peak = max(peak, live)
    return peak


def _accelerator_allocation_peak(run) -> int:
    """Peak of the caching allocator above its level before ``run()``."""
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    run()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - before


def _accelerator_figures(worker, runner) -> dict:
    """vLLM's own profile of an accelerator; set only when it sized the cache itself (no ``kv_cache_memory_bytes``)."""
    names = (
        "requested_memory", "available_kv_cache_memory_bytes", "peak_activation_memory", "total_consumed",
        "cudagraph_memory_estimate",
    )  # fmt: skip
    figures = {name: int(getattr(worker, name)) for name in names if hasattr(worker, name)}
    return figures | {"model_memory_usage": int(getattr(runner, "model_memory_usage", 0) or 0)}


def linear_kernels(model: torch.nn.Module) -> dict:
    """Which kernel every quantization scheme of the model resolved to.

    ``kernels``: scheme class -> kernel classes (the quantization method's own class where it has no kernel object);
    ``emulated``: formats computed by this plugin's reference kernels, whose speed means nothing.
    """
    kernels: dict[str, set[str]] = {}
    emulated = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        scheme = getattr(module, "scheme", None)
        owner = method if scheme is None else scheme
        kernel = next((k for name in ("kernel", "fp8_linear") if (k := getattr(owner, name, None)) is not None), None)
        kernels.setdefault(type(owner).__name__, set()).add(type(owner if kernel is None else kernel).__name__)
        weight_format = getattr(kernel, "format", None)
        if type(kernel).__module__.startswith(__package__) and weight_format is not None:
            emulated.add(weight_format.name)
    return {"kernels": {name: sorted(found) for name, found in sorted(kernels.items())}, "emulated": sorted(emulated)}


def _status_bytes(key: str) -> int:
    with open("/proc/self/status") as status:
        return int(re.search(rf"^{key}:\s+(\d+) kB", status.read(), re.M).group(1)) << 10
