"""One thing that is wrong with a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

ERROR = "error"
WARNING = "warning"


@dataclass(frozen=True, order=True)
class Finding:
    """``rule`` is a stable id; ``file`` and ``tensor`` locate it (``""`` where they do not apply).

    A ``warning`` is worth reading and does not make a checkpoint unusable; an ``error`` does.
    """

    rule: str
    file: str
    tensor: str
    message: str
    remedy: str
    severity: str = ERROR

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON."""
        return asdict(self)

    def __str__(self) -> str:
        place = " ".join(part for part in (self.file, self.tensor) if part)
        return f"{self.severity} {self.rule}: {place + ': ' if place else ''}{self.message} -> {self.remedy}"
