"""What is asked of a server, and the command line and environment that ask it of vLLM."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import Refused, Unreadable

WORKER_EXTENSION = "vllm_k3_cpu.memory_report.MemoryReport"
SECRET_NAME = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|COOKIE|_KEY$|_PAT$",
    re.IGNORECASE,
)
SECRET_OPTION = re.compile(r"^--(api-key|hf-token|ssl-keyfile-password)\b", re.IGNORECASE)
# Import paths of this process would change the server's modules; counters in a folder of the caller's would go on from
# the last server's.
DROPPED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP", "VLLM_API_KEY", "PROMETHEUS_MULTIPROC_DIR")
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True)
class ServerSettings:
    """Settings *requested* of a server; what it really uses is ``Server.effective``.

    ``None`` leaves a setting to vLLM.  ``extra_args`` and ``environment`` come from the hardware file
    (``--enforce-eager``, ``OMP_NUM_THREADS``).  Neither may hold a secret: both are recorded, and
    arguments are visible to every user.
    """

    model: Path
    served_name: str
    env: str = "serve-cpu"
    kv_cache_dtype: str = "auto"
    state_dtype: str = "auto"
    """dtype of the recurrent (KDA) state, ``--mamba-ssm-cache-dtype``."""
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    prefix_match_unit: int | None = None
    """Tokens between the places where a prefix-cache hit may end; finer than a hybrid model's large blocks."""
    long_prefill_token_threshold: int | None = None
    """Most prompt tokens of one request in one step; 0: no limit but the batch's."""
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool | None = True
    seed: int = 0
    trust_remote_code: bool = False
    worker_extension: str | None = WORKER_EXTENSION
    extra_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    read_rate_bytes_s: float = 100e6
    """Slowest rate at which the weights may arrive; the start-up time-out follows from it and their size."""
    start_allowance_s: float = 300.0
    """Start-up time that does not depend on the bytes: imports, compilation, profiling."""
    heartbeat_s: float = 10.0
    stop_grace_s: float = 15.0
    """Between SIGTERM and SIGKILL of the process group."""
    command: tuple[str, ...] | None = None
    """Replaces ``python -m vllm.entrypoints.openai.api_server`` (tests)."""

    def __post_init__(self) -> None:
        for argument in self.extra_args:
            if SECRET_OPTION.match(argument):
                raise Refused(
                    f"extra_args: {argument.partition('=')[0]} would put a secret on the command line, where "
                    "every user of the machine can read it; the server listens on loopback and needs none"
                )
        for name in self.environment:
            if SECRET_NAME.search(name):
                raise Refused(
                    f"environment: {name} looks like a secret and would be recorded with the results; "
                    "the server reads a local directory and needs none"
                )

    @property
    def checkpoint_bytes(self) -> int:
        """Size of the weights on disk.  Raises :class:`Unreadable` when there are none (never an empty 0)."""
        files = [path for path in Path(self.model).glob("*.safetensors")]
        if not files:
            raise Unreadable(f"{self.model}: holds no *.safetensors file; quantize or fetch it first")
        return sum(path.stat().st_size for path in files)

    @property
    def start_timeout_s(self) -> float:
        """``start_allowance_s`` + checkpoint bytes / ``read_rate_bytes_s``: 1.56 TB at 1 GB/s: 26 minutes more."""
        return self.start_allowance_s + self.checkpoint_bytes / self.read_rate_bytes_s

    def requested(self) -> dict[str, Any]:
        """What was asked, JSON-able, without paths (results of two machines must compare)."""
        names = (
            "served_name",
            "env",
            "kv_cache_dtype",
            "state_dtype",
            "tensor_parallel_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "prefix_match_unit",
            "long_prefill_token_threshold",
            "kv_cache_memory_bytes",
            "enable_prefix_caching",
            "seed",
        )
        return {name: getattr(self, name) for name in names} | {
            "extra_args": list(self.extra_args),
            "environment": dict(sorted(self.environment.items())),
        }

    def arguments(self, port: int) -> list[str]:
        """vLLM's command-line arguments.  Options at their default are left out: a log shows what was chosen."""
        arguments = [
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--model",
            str(Path(self.model).resolve()),
            "--served-model-name",
            self.served_name,
            "--seed",
            str(self.seed),
        ]
        optional = {
            "--max-model-len": self.max_model_len,
            "--max-num-seqs": self.max_num_seqs,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
            "--block-size": self.block_size,
            "--prefix-match-unit": self.prefix_match_unit,
            "--long-prefill-token-threshold": self.long_prefill_token_threshold,
            "--kv-cache-memory-bytes": self.kv_cache_memory_bytes,
            "--worker-extension-cls": self.worker_extension,
        }
        for option, value in optional.items():
            if value is not None:
                arguments += [option, str(value)]
        if self.tensor_parallel_size != 1:
            arguments += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        if self.kv_cache_dtype != "auto":
            arguments += ["--kv-cache-dtype", self.kv_cache_dtype]
        if self.state_dtype != "auto":
            arguments += ["--mamba-ssm-cache-dtype", self.state_dtype]
        if self.enable_prefix_caching is not None:
            arguments.append("--enable-prefix-caching" if self.enable_prefix_caching else "--no-enable-prefix-caching")
        if self.trust_remote_code:
            arguments.append("--trust-remote-code")
        return [*arguments, *self.extra_args]

    def process_environment(self) -> dict[str, str]:
        """The server's environment: this process's without secrets, proxies and Python paths, plus vLLM's switches."""
        environment = clean_environment(os.environ)
        environment |= {
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        return environment | dict(self.environment)


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` for a child: no secrets (they end in logs), no proxy for loopback, no foreign Python path.

    ``PYTHONSAFEPATH`` keeps the working directory from shadowing an installed package.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name not in DROPPED and name.lower() not in PROXIES and not SECRET_NAME.search(name)
    }
    return kept | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "NO_PROXY": "*", "no_proxy": "*"}
