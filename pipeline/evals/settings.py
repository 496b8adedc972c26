"""The ``eval:`` and ``gates:`` groups of params.yaml, typed and checked.  An unknown key is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.errors import wrong_values

Family = Literal[
    "single", "multi_key", "multi_value", "multi_query", "variable_tracking", "frequent_words", "qa", "ordered_recall"
]
Language = Literal["auto", "lexicon", "en", "zh"]
Fraction = Annotated[float, Field(ge=0, le=1)]
Margin = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[int, Field(gt=0)]


class Strict(BaseModel):
    """Immutable; unknown keys are errors, and so is NaN: no rate is ever above it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Thresholds(Strict):
    """Largest share of all items in each unscored class; above it the run is invalid, not inaccurate."""

    unfinished: Fraction = 0.05
    empty: Fraction = 0.02
    degenerate: Fraction = 0.10
    stuck: Fraction = 0.01
    error: Fraction = 0.01
    extraction_failure: Fraction = 0.20
    family_unscored: Fraction = 0.50
    """Largest share of unscored items within any one family."""


class Fidelity(Strict):
    """How many prompts a length get their log-probabilities recorded; 0 switches it off."""

    prompts_per_length: int = Field(4, ge=0)
    top_k: int = Field(20, ge=1)
    """vLLM refuses more than its own ``--max-logprobs`` (20 by default)."""
    position_buckets: tuple[Positive, ...] = (256, 1024, 4096, 16384, 65536, 262144)


class Hub(Strict):
    """lm-eval's own long-context tasks, asked over the chat endpoint."""

    tasks: tuple[str, ...]
    """Keys of :data:`pipeline.evals.hub.TASKS`."""
    limit_per_task: Positive | None = None


class EvalSettings(Strict):
    """One choice of ``conf/eval/``."""

    name: str
    tasks: Literal["generated", "hub"] = "generated"
    endpoint: Literal["completions", "chat"] = "completions"
    thinking: Literal["never", "always"] = "never"
    """``always``: the model thinks before it answers, so no stop string may be set and the budget must hold the
    thinking.
    """
    thinking_budget_tokens: int = Field(0, ge=0)
    """Added to every item's answer budget."""
    lengths: tuple[Positive, ...] = ()
    """Prompt tokens, BOS included, counted with the served tokenizer."""
    depths: tuple[Fraction, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    seeds: tuple[int, ...] = (0,)
    languages: tuple[Language, ...] = ("auto",)
    """``auto``: the closed lexicon where the model ships one (``lexicon.json``), else English and Chinese."""
    items: dict[Family, Positive | dict[Positive, Positive]] = {}
    """Items of a family at each length (or ``{length: items}``), dealt out over languages, depths and seeds in turn."""
    recall_items: int = Field(64, ge=2)
    """List length of ordered recall."""
    recall_correct_at: Annotated[float, Field(gt=0, le=1)] = 0.90
    """Share of the list, in order, from which an ordered recall counts as correct."""
    length_tolerance: Annotated[float, Field(gt=0, lt=0.5)] = 0.02
    stop: bool = True
    """Stop at the end of the answer (generated tasks on a model that does not think)."""
    concurrency: Positive = 16
    deadline_s: float = Field(300.0, gt=0)
    """A request that takes longer is `stuck`."""
    retries: int = Field(3, ge=0)
    """Further attempts after a broken connection or a 5xx answer."""
    failures_in_a_row: Positive = 16
    """So many requests without any answer stop the run: the server is gone whatever its health endpoint says."""
    max_model_len: Positive | None = None
    """Only for servers that do not report it in ``/v1/models``."""
    trust_remote_code: bool = False
    """Lets the tokenizer run code from the model's directory."""
    thresholds: Thresholds = Thresholds()
    fidelity: Fidelity = Fidelity()
    hub: Hub | None = None

    @model_validator(mode="after")
    def _consistent(self) -> EvalSettings:
        if self.tasks == "hub" and self.hub is None:
            raise ValueError("tasks: hub needs the `hub:` block")
        if self.tasks == "generated":
            if not self.lengths or not self.items:
                raise ValueError("tasks: generated needs `lengths` and `items`")
            for family, count in self.items.items():
                unknown = set(count) - set(self.lengths) if isinstance(count, dict) else set()
                if unknown:
                    raise ValueError(
                        f"items.{family}: lengths {sorted(unknown)} are not in `lengths` {list(self.lengths)}"
                    )
        if self.thinking == "always":
            if self.stop and self.tasks == "generated":
                raise ValueError(
                    "thinking: always with stop: true; a stop string fires inside the thinking. Set stop: false"
                )
            if self.thinking_budget_tokens == 0:
                raise ValueError("thinking: always needs thinking_budget_tokens > 0, else no answer is ever reached")
        for name in ("lengths", "depths", "seeds", "languages"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name}: {list(values)} has duplicates")
        return self

    def count(self, family: str, length: int) -> int:
        """Items of ``family`` at ``length`` tokens."""
        wanted = self.items.get(family, 0)
        return wanted.get(length, 0) if isinstance(wanted, dict) else wanted


class GateSettings(Strict):
    """The ``gates:`` group: what a variant may lose.  Margins are differences of accuracy (0.03 = 3 points)."""

    accuracy_margin: Margin = 0.05
    """Largest loss allowed over all gateable items."""
    length_margin: Margin = 0.10
    """Largest loss allowed at any one length (and in the long-output bucket)."""
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    power: Annotated[float, Field(gt=0, lt=1)] = 0.80
    native_floor: Fraction = 0.50
    """A (family, length) cell where native is below this cannot show harm and is not gated."""
    min_gateable_families: Positive = 4
    required_families: tuple[Family, ...] = ("ordered_recall",)
    """Families without which nothing passes: damage that grows with the length of the answer shows only here."""
    bootstrap_resamples: Positive = 10_000
    seed: int = 0
    long_output_tokens: Positive = 32
    """Items for which native generated at least so many tokens form the long-output bucket."""
    conditions_must_match: tuple[str, ...] = ("tensor_parallel_size", "serving", "software")
    """Serving conditions that both sides must share; anything else makes the pair not comparable."""
    baseline_tolerance: Margin = 0.05
    """Native may be this far below its reference score, on top of what sampling explains."""
    baseline_alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.01
    noise_concurrency: Positive | None = 8
    """Requests at once of the A/A run, which asks native everything a second time; ``None``: no such run."""
    noise_floor: Annotated[float, Field(ge=0, lt=1)] | None = None
    """|difference| to call noise in every cell, instead of what the A/A run shows there."""
    kl_alarm: float | None = Field(0.1, gt=0)
    """Mean KL divergence (nats a token) from native that raises an alarm; never a verdict by itself."""
    top1_alarm: Fraction | None = 0.90
    """Top-1 agreement below this, where native gives its first choice at least half, raises an alarm."""


def parse(raw: Any) -> EvalSettings:
    """The ``eval:`` group.  Raises :class:`~pipeline.errors.Refused` naming each wrong key and value."""
    return _parse(EvalSettings, raw, "eval")


def parse_gates(raw: Any) -> GateSettings:
    """The ``gates:`` group.  Raises :class:`~pipeline.errors.Refused` naming each wrong key and value."""
    return _parse(GateSettings, raw, "gates")


def _parse(model: type[Strict], raw: Any, group: str) -> Any:
    if isinstance(raw, model):
        return raw
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise wrong_values(group, error) from None
