"""What must hold before, during and after a run for its figures to mean anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import Invalid, Refused
from pipeline.evals import dataset, endpoint
from pipeline.evals.dataset import Item
from pipeline.evals.endpoint import ServerDied
from pipeline.evals.scoring import THINK_CLOSE, THINK_OPEN
from pipeline.evals.settings import EvalSettings
from pipeline.evals.tokens import ServedTokenizer, tokenizer_sha256

AGREEMENT = 1e-9


def same_dataset(meta: dict[str, Any], tokenizer_dir: Path | str, settings: EvalSettings) -> None:
    """Raise :class:`Refused` unless the data set is the one that these settings and this tokenizer make."""
    wanted = dataset.key(tokenizer_sha256(Path(tokenizer_dir)), settings)
    if meta.get("key") != wanted:
        raise Refused(
            f"the data set was made with another tokenizer or other settings (key {str(meta.get('key'))[:12]}, "
            f"this run needs {wanted[:12]}); generate it again"
        )


def lengths_fit(items: list[Item], limit: int, url: str) -> None:
    """Raise :class:`Refused` when an item with its answer is longer than the server's ``limit`` (tokens)."""
    too_long = [item for item in items if item.prompt_tokens + item.max_gen_toks > limit]
    if too_long:
        worst = max(too_long, key=lambda item: item.prompt_tokens + item.max_gen_toks)
        lengths = sorted({item.length for item in too_long})
        raise Refused(
            f"{url}: serves at most {limit} tokens; {len(too_long)} items of lengths {lengths} need up to "
            f"{worst.prompt_tokens + worst.max_gen_toks} ({worst.id}). Serve with a larger max_model_len or lower "
            "eval.lengths"
        )


def probe(url: str, model: str, tokenizer_dir: Path | str, settings: EvalSettings, item: Item) -> None:
    """One prompt as text: the server's own tokenizer must count what ours counts, BOS once.

    Raises :class:`Invalid` when it does not.  The run itself sends token ids, which would hide a different tokenizer.
    """
    body = {"model": model, "prompt": item.prompt, "max_tokens": 1, "temperature": 0}
    try:
        usage = endpoint.call(f"{url}/v1/completions", body, settings.deadline_s).get("usage") or {}
    except (OSError, ValueError, AttributeError) as error:
        if not endpoint.alive(url):
            raise ServerDied(f"{url}: no answer to the first prompt ({error})") from None
        raise Invalid(f"{url}: no answer to the first prompt, {item.id} ({error})") from None
    counted = usage.get("prompt_tokens")
    if counted is None:
        raise Invalid(f"{url}: reports no usage.prompt_tokens, so nothing shows that prompts arrive whole")
    tokenizer = ServedTokenizer(tokenizer_dir, trust_remote_code=settings.trust_remote_code)
    ids = tokenizer.encode(item.prompt)
    if (tokenizer.bos_count(ids) or 0) > 1:
        raise Invalid(f"{tokenizer_dir}: the tokenizer begins {item.id} with {tokenizer.bos_count(ids)} BOS tokens")
    if counted != item.prompt_tokens or len(ids) != item.prompt_tokens:
        raise Invalid(
            f"{url}: counts {counted} tokens in {item.id}, the data set says {item.prompt_tokens}, the tokenizer "
            f"in {tokenizer_dir} {len(ids)}: another tokenizer, a cut prompt, or BOS added twice or never"
        )


def arrived_whole(sample: dict[str, Any]) -> bool:
    """Whether meant, sent and counted tokens agree (chat prompts are tokenized by the server alone)."""
    if sample["outcome"] in ("stuck", "error"):
        return True  # counted as such; there is no usage to look at
    sent = sample["sent_prompt_tokens"]
    return sample["server_prompt_tokens"] == sample["prompt_tokens"] and sent in (None, sample["prompt_tokens"])


def thinks(sample: dict[str, Any]) -> bool:
    """Whether the model thought before it answered, in its text or in the server's reasoning field."""
    text = sample["text"] or ""
    return bool((sample["reasoning"] or "").strip()) or THINK_OPEN in text or THINK_CLOSE in text


def scores_agree(results: dict[str, Any], items: list[Item], samples: list[dict[str, Any]]) -> None:
    """lm-eval's mean of each task must be ours, computed from the journal; else one of the two is broken."""
    from pipeline.evals.tasks import task_name

    groups: dict[str, list[float]] = {}
    for item, sample in zip(items, samples, strict=True):
        groups.setdefault(task_name(item), []).append(sample["score"])
    for name, scores in groups.items():
        theirs, ours = results["results"][name]["score,none"], sum(scores) / len(scores)
        if abs(theirs - ours) > AGREEMENT:
            raise Invalid(f"{name}: lm-eval's score is {theirs}, the journal's {ours}")
