"""What to do to the weights: a frozen value, hashed into every shard's resume record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pipeline import files
from pipeline.errors import Refused
from pipeline.quant.calibration import METHODS, Calibration

FORMATS = ("native", "fp8_block", "fp8_channel", "int8_channel", "w4a16", "nvfp4", "w2_control")
SCOPES = ("experts", "dense_too", "dense_only")
SCALES = ("pow2", "amax")
GROUP_SIZES = {"w4a16": (32, 64, 128), "w2_control": (32, 64, 128), "nvfp4": (16,)}

# Raised whenever the bytes that a recipe makes change, so that shards of an older version are not taken for its own.
ENGINE_VERSION = 2


@dataclass(frozen=True)
class Recipe:
    """``format`` of the re-encoded weights; ``scope`` says which; ``scale`` how scales are chosen.

    ``pow2`` scales keep MXFP4 values exact where the format's range allows; ``amax`` is llm-compressor's rounding,
    bit for bit.  ``w4a16`` and ``w2_control`` know only ``amax``, ``nvfp4`` only ``pow2``; ``native`` changes
    nothing. ``w2_control`` puts 2-bit values into a 4-bit container: damage on purpose, for tests of the evaluation.
    With ``calibration`` the values come from llm-compressor's ``oneshot`` instead (K3's experts, ``amax`` scales).
    """

    format: str
    scope: str = "experts"
    group_size: int | None = None
    scale: str = "pow2"
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("format", self.format, FORMATS),
            ("scope", self.scope, SCOPES),
            ("scale", self.scale, SCALES),
        ):
            if value not in allowed:
                raise Refused(f"recipe {name} {value!r} is unknown; use one of {', '.join(allowed)}")
        sizes = GROUP_SIZES.get(self.format)
        if sizes is None and self.group_size is not None:
            raise Refused(f"recipe {self.format} takes no group_size (got {self.group_size})")
        if sizes is not None:
            if self.group_size is None:
                object.__setattr__(self, "group_size", sizes[0])
            if self.group_size not in sizes:
                raise Refused(f"recipe {self.format} takes group_size {sizes}, got {self.group_size}")
        if self.format in ("w4a16", "w2_control"):
            object.__setattr__(self, "scale", "amax")
        if self.calibration is not None:
            made = METHODS[self.calibration.method]
            if (self.format, self.scope, self.scale) != (made, "experts", "amax"):
                raise Refused(
                    f"calibration {self.calibration.method} makes format {made}, scope experts, scale amax; the recipe "
                    f"says {self.format}, {self.scope}, {self.scale}"
                )

    @classmethod
    def from_params(cls, params: dict[str, Any]) -> Recipe:
        """A recipe from parameters.  Raises :class:`Refused` for unknown keys and values."""
        unknown = sorted(params.keys() - cls.__dataclass_fields__.keys())
        if unknown or "format" not in params:
            raise Refused(f"recipe {params}: {'unknown keys ' + ', '.join(unknown) if unknown else 'has no format'}")
        if params.get("calibration") is not None:
            params = params | {"calibration": Calibration.from_params(params["calibration"])}
        return cls(**params)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as JSON; ``calibration`` only where there is one."""
        return {key: value for key, value in asdict(self).items() if key != "calibration" or value is not None}

    @property
    def sha256(self) -> str:
        """Key of everything that decides the output bytes of a given source."""
        return files.sha256_json({"recipe": self.to_dict(), "engine": ENGINE_VERSION})
