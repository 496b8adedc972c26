"""What the planner answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """Why the request cannot work, with the offenders and the nearest request that can."""

    rule: str
    message: str
    alternative: str | None = None


@dataclass(frozen=True)
class PlanResult:
    """The plan of one (model, hardware, quant, kv).  Bytes are per rank unless the name says otherwise; where pipeline
    stages differ the fullest one is told."""

    model: str
    hardware: str
    quant: str
    kv: str
    state_dtype: str
    layout: str
    ranks: int
    engine: str
    fits: str
    verdict: str
    kv_label: str
    requantization: str
    # weights
    parameters: int
    weight_bytes: int
    weight_bytes_per_rank: int
    weight_bytes_by_role: dict[str, int]
    weight_bytes_by_dtype: dict[str, int]
    # cache, nominal / padded / pool
    kv_bytes_per_token: int
    kv_layers: int
    kv_page_bytes: int
    requested_block_size: int
    effective_block_size: int
    state_layers: int
    state_recurrent_bytes_per_sequence: int
    state_convolution_bytes_per_sequence: int
    state_bytes_per_sequence: int
    state_bytes_per_sequence_padded: int
    state_bytes_per_sequence_pool: int
    state_blocks_per_sequence: int
    bytes_per_block: int
    # budget
    device_bytes: int
    budget_bytes: int
    activation_peak_bytes: int
    activation_largest_site: str
    activation_worst_bytes: int
    activation_worst_site: str
    activation_measured: bool
    workspace_bytes: int
    kv_pool_bytes: int
    num_blocks: int
    kv_capacity_tokens: int
    # settings
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    # capacity
    longest_sequence_tokens: int
    sequences_with_state: int
    replicas: int
    max_concurrency: dict[str, int]
    tie_tokens: float | None
    tie_tokens_fp8: float | None
    fp8_kv_gain: dict[str, float]
    fp8_kv_gain_pool: dict[str, float]
    refusals: list[Refusal] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        return bool(self.refusals)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able.  A refusal is a valid answer: ``status`` says that the computation holds, ``refusals`` what it
        found."""
        return {"status": "valid", "reason": None, **asdict(self)}
