"""The tokenizer of the served model: counts tokens as the server will, and names itself by a hash."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

from pipeline.errors import Unreadable

# Everything that can change a token count or the rendering of a chat.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tiktoken.model",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "lexicon.json",
)
CODE = ("tokenization*.py", "encoding*.py")  # what trust_remote_code runs


def tokenizer_sha256(directory: Path) -> str:
    """Hex SHA-256 over names and bytes of the tokenizer's files.  Raises :class:`Unreadable` if there is none."""
    present = [directory / name for name in FILES if (directory / name).is_file()]
    present += sorted(path for pattern in CODE for path in directory.glob(pattern))
    if not present:
        raise Unreadable(f"{directory}: has no tokenizer file (looked for {', '.join(FILES)})")
    digest = hashlib.sha256()
    for path in present:
        data = path.read_bytes()
        digest.update(f"{path.name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


class ServedTokenizer:
    """Wraps the transformers tokenizer that both vLLM and lm-eval load from the model's directory."""

    def __init__(self, directory: Path | str, *, trust_remote_code: bool = False) -> None:
        self.directory, self.trust_remote_code = Path(directory), trust_remote_code
        self.sha256 = tokenizer_sha256(self.directory)

    @cached_property
    def _tokenizer(self):
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(self.directory), trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError, ImportError, KeyError) as error:
            remedy = "" if self.trust_remote_code else "; if it needs code of its own, set eval.trust_remote_code: true"
            raise Unreadable(f"{self.directory}: no usable tokenizer ({error}){remedy}") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of a completion prompt, special tokens as the tokenizer adds them (BOS once where it has one)."""
        return self._tokenizer(text, add_special_tokens=True, return_attention_mask=False).input_ids

    def count(self, text: str, *, chat: bool = False) -> int:
        """Prompt tokens of ``text``; with ``chat``, of one user turn rendered by the chat template."""
        return len(self._render(text)) if chat else len(self.encode(text))

    def _render(self, text: str) -> list[int]:
        turns = [{"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        # The template writes BOS itself where the model wants one: adding it again would send it twice.
        return self._tokenizer(rendered, add_special_tokens=False, return_attention_mask=False).input_ids

    def bos_count(self, ids: list[int]) -> int | None:
        """How many BOS tokens ``ids`` begins with; ``None`` if the tokenizer has none."""
        bos = self._tokenizer.bos_token_id
        return None if bos is None else next((i for i, token in enumerate(ids) if token != bos), len(ids))
