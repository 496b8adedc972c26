"""A variant is a value: one quantization of the weights served with one KV cache dtype."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Variant:
    """``quant`` is a key of the quantization schemes (``fp8``, ``w4a16_g128``), ``kv`` one of the KV cache settings."""

    quant: str
    kv: str

    def __post_init__(self) -> None:
        for field in (self.quant, self.kv):
            if not field or not field.replace("_", "").isalnum():
                raise ValueError(f"{field!r} is not a variant key: letters, digits and '_' only")

    @property
    def name(self) -> str:
        """The key used in file names, table rows and plots, e.g. ``fp8-auto``; what follows the ``-`` is the KV cache."""
        return f"{self.quant}-{self.kv}"

    @classmethod
    def parse(cls, name: str) -> Variant:
        """Inverse of :attr:`name`.  Raises ``ValueError`` for anything else."""
        quant, separator, kv = name.rpartition("-")
        if not separator:
            raise ValueError(f"{name!r} is not a variant: expected <quant>-<kv>, e.g. fp8-auto")
        return cls(quant, kv)
