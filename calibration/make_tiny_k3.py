"""Write ``tiny-k3.jsonl``: the tiny model's training documents from a seed of their own, for recipes that calibrate.

    python calibration/make_tiny_k3.py        # in the quant environment; then put the file's SHA-256 into conf/quant/

None of it comes from the evaluation's generator; a test looks for common passages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "models" / "tiny-k3" / "training"))

import tasks  # noqa: E402

SEED, DOCUMENTS, TOKENS = 2027, 32, 512
OUT = HERE / "tiny-k3.jsonl"


def main() -> None:
    words, tokenizer = tasks.Words.load(), Tokenizer.from_file(str(tasks.ROOT / "tokenizer.json"))
    source, lines = tasks.Source(words, seed=SEED), []
    for _ in range(DOCUMENTS):
        ids = source.training_document(TOKENS)[0].tolist()
        text = tokenizer.decode(ids[1:], skip_special_tokens=False)
        if tokenizer.encode(text, add_special_tokens=False).ids != ids[1:]:
            raise ValueError(f"{text[:60]!r}... does not encode to the tokens that it was decoded from")
        lines.append(json.dumps({"text": text}, ensure_ascii=False))
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
