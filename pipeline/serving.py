"""From parameters to a server: may it be served, the hardware file's flags, the variant's checkpoint and KV cache as
:class:`ServerSettings`, and whether the server really scales its cache as its label says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline import params, store
from pipeline.errors import Invalid, Refused
from pipeline.kv_label import UNQUANTIZED
from pipeline.plan import hardware as machines
from pipeline.plan.hardware import Hardware
from pipeline.serve.settings import ServerSettings
from pipeline.variant import Variant

# Flags of the hardware file that ServerSettings has a field for; every other one goes to the command line as it stands.
FIELDS = {
    "max-model-len": "max_model_len",
    "max-num-seqs": "max_num_seqs",
    "max-num-batched-tokens": "max_num_batched_tokens",
    "block-size": "block_size",
    "prefix-match-unit": "prefix_match_unit",
    "long-prefill-token-threshold": "long_prefill_token_threshold",
    "kv-cache-memory-bytes": "kv_cache_memory_bytes",
    "enable-prefix-caching": "enable_prefix_caching",
    "trust-remote-code": "trust_remote_code",
}
SWITCHES = ("enable_prefix_caching", "trust_remote_code")
# The variant decides these, whatever the recipe of the machine says.
VARIANT = ("kv-cache-dtype", "mamba-ssm-cache-dtype", "seed")
LABELS = {"calibrated": "calibrated", "scale_1.0": "uncalibrated (scale 1.0)"}
"""Label of metrics/kv -> what the workers then say of their scales (``Server.kv_scales``)."""


def admit(variant: Variant, plan: dict[str, Any], *, allow_untested: bool) -> None:
    """Raise :class:`Refused` where the plan (one entry of metrics/plan) refuses the variant, or calls it untested and that is not
    allowed."""
    if plan["refusals"]:
        raise Refused("; ".join(f"{variant.name}: {refusal['message']}" for refusal in plan["refusals"]))
    if plan["verdict"] == "untested" and not allow_untested:
        why = next((text for text in plan["warnings"] if text.startswith("untested")), "untested")
        raise Refused(f"{variant.name} is not served: {why}.  To serve it all the same: -S serve.allow_untested=true")


def check_scales(label: str, effective: dict[str, Any]) -> None:
    """Raise :class:`Invalid` where a server scales its cache otherwise than ``label`` says: accepted scales are not yet used scales.

    A server whose workers do not tell (``label`` None) cannot be held to it.
    """
    wanted, told = LABELS.get(label), effective["label"]
    if wanted and told and told != wanted:
        raise Invalid(f"the KV cache's scales are labelled {label!r}, the server's workers say {told!r}")


def check_dtypes(request: ServerSettings, effective: dict[str, Any]) -> None:
    """Raise :class:`Invalid` where a server caches in another dtype than it was asked to, as far as it tells.

    An engine may fall back to its model's dtype without a word, or take ``auto`` for what the checkpoint's config says.
    """
    asked, told = request.kv_cache_dtype, effective.get("kv_cache_dtype")
    if told and _stored(told) != _stored(asked):
        raise Invalid(f"the KV cache was asked for in {asked}, the server says {told}: figures under a wrong name")
    asked, told = request.state_dtype, effective.get("state_dtype")
    if told and asked not in ("auto", told):
        raise Invalid(f"the recurrent state was asked for in {asked}, the server says {told}")


def _stored(dtype: str) -> str:
    return "unquantized" if dtype in UNQUANTIZED else {"fp8": "fp8_e4m3"}.get(dtype, dtype)


def machine() -> Hardware:
    """The machine that params.yaml names."""
    return machines.parse(params.load("hardware"), "params.yaml, hardware")


def variant_settings(variant: Variant, kv: dict[str, Any]) -> ServerSettings:
    """How a variant is served on :func:`machine`: from the folder that holds its cache's scales too.

    ``kv`` is its setting, an entry of ``kv.dtypes``.  Raises as :func:`server_settings` and :func:`pipeline.store.served`.
    """
    model = params.load("model")
    checkpoint = store.served(variant.quant, variant.name)
    return server_settings(machine(), model["name"], checkpoint, kv, trust_remote_code=model["trust_remote_code"])


def server_settings(
    hardware: Hardware, served_name: str, checkpoint: Path, kv: dict[str, Any], *, trust_remote_code: bool = False
) -> ServerSettings:
    """The settings that one variant is evaluated and benched with.

    ``kv`` is one entry of the parameters' ``kv.dtypes``.  Remote code runs only when both the machine's recipe and the model's own
    group allow it.  Raises :class:`Refused` for a flag of the wrong type, and for a machine of several nodes: one process group on
    one host is what :mod:`pipeline.serve` can start, watch and end.
    """
    if hardware.nodes > 1:
        raise Refused(
            f"hardware {hardware.name}: {hardware.nodes} nodes; this pipeline starts servers on one host only.  Plan for it with "
            "`pipeline plan`, or serve on a single-node machine"
        )
    fields = {FIELDS[name]: _typed(hardware, name) for name in hardware.flags if name in FIELDS}
    fields["trust_remote_code"] = trust_remote_code and bool(fields.get("trust_remote_code", False))
    parallel = {
        "--pipeline-parallel-size": hardware.pipeline_parallel,
        "--data-parallel-size": hardware.data_parallel,
        "--decode-context-parallel-size": hardware.decode_context_parallel,
    }
    extra = [text for option, value in parallel.items() if value != 1 for text in (option, str(value))]
    if hardware.expert_parallel:
        extra.append("--enable-expert-parallel")
    return ServerSettings(
        model=checkpoint,
        served_name=served_name,
        env=hardware.server_env,
        kv_cache_dtype=kv["cache_dtype"],
        state_dtype=kv["state_dtype"],
        tensor_parallel_size=hardware.tensor_parallel,
        extra_args=tuple(extra + hardware.serve_arguments(without=(*FIELDS, *VARIANT))),
        environment=hardware.environment_variables(),
        **fields,
    )


def _typed(hardware: Hardware, flag: str) -> int | bool:
    value, switch = hardware.flags[flag].value, FIELDS[flag] in SWITCHES
    if type(value) is not (bool if switch else int):
        wanted = "true or false" if switch else "a whole number"
        raise Refused(f"hardware {hardware.name}, flags.{flag}: expected {wanted}, not {value!r}")
    return value
