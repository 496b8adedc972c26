"""How a calibrated recipe calibrates: method, data, the rule for experts that too few tokens reach.  Settings only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Refused

# method -> the weight format that it makes
METHODS = {"gptq": "w4a16", "awq": "w4a16", "sq_gptq": "int8_channel"}
SMOOTHING = ("awq", "sq_gptq")


@dataclass(frozen=True)
class Calibration:
    """``method`` is ``gptq``, ``awq`` or ``sq_gptq`` (SmoothQuant, then GPTQ).

    ``dataset`` is a local .json, .jsonl or .parquet file, pinned by its ``sha256``, or a hub id, pinned by the commit
    ``revision``: the settings then decide the tokens, and the recipe's hash covers them.  ``rows`` rows of ``tokens``
    tokens are packed from ``column`` (text, or a list of chat messages).  An expert that fewer than ``min_tokens``
    calibration tokens are routed to is not calibrated but rounded, and named in the report; ``every_expert`` shows
    each expert every token instead (896/16 times the expert work on the released model).
    """

    method: str
    dataset: str
    rows: int
    tokens: int
    sha256: str | None = None
    revision: str | None = None
    subset: str | None = None
    split: str = "train"
    column: str = "text"
    min_tokens: int = 256
    every_expert: bool = False
    smoothing_strength: float = 0.5

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise Refused(f"calibration method {self.method!r} is unknown; use one of {', '.join(METHODS)}")
        for name in ("rows", "tokens"):
            if getattr(self, name) < 1:
                raise Refused(f"calibration {name} {getattr(self, name)}: at least 1 is needed")
        if self.min_tokens < 0 or not 0 <= self.smoothing_strength <= 1:
            raise Refused("calibration: min_tokens must not be negative, smoothing_strength lies in 0..1")
        if self.is_file == (self.sha256 is None) or self.is_file == (self.revision is not None):
            pin = "its sha256" if self.is_file else "a revision"
            raise Refused(f"calibration dataset {self.dataset} must be pinned by {pin}, and by nothing else")
        if self.revision is not None and not re.fullmatch(r"[0-9a-f]{40}", self.revision):
            raise Refused(f"calibration revision {self.revision!r}: a commit of 40 hex digits, for a branch moves")

    @property
    def is_file(self) -> bool:
        """A local file, by its ending; hub ids have none of these."""
        return self.dataset.endswith((".json", ".jsonl", ".parquet"))

    @classmethod
    def from_params(cls, params: Any) -> Calibration:
        """Settings from parameters.  Raises :class:`Refused` for unknown keys, values and absent ones."""
        if not isinstance(params, dict):
            raise Refused(f"recipe calibration {params!r} is no mapping")
        if unknown := sorted(params.keys() - cls.__dataclass_fields__.keys()):
            raise Refused(f"recipe calibration: unknown keys {', '.join(unknown)}")
        if missing := sorted({"method", "dataset", "rows", "tokens"} - params.keys()):
            raise Refused(f"recipe calibration lacks {', '.join(missing)}")
        return cls(**params)
