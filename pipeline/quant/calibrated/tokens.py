"""The calibration set: pinned text, tokenized and packed into rows of equal length, so that nothing is padded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import files
from pipeline.errors import Refused, Unreadable
from pipeline.quant.calibration import Calibration


def load(calibration: Calibration, model: Path, vocabulary: int, trust_remote_code: bool = False) -> np.ndarray:
    """Token ids ``[rows, tokens]`` int64.

    Raises :class:`Unreadable` for a missing file or tokenizer, :class:`Refused` for a file that is not the pinned one,
    a missing column, too little text, or tokens outside the model's ``vocabulary``.
    """
    tokenizer = _tokenizer(model, trust_remote_code)
    wanted, stream, documents = calibration.rows * calibration.tokens, [], 0
    for document in _documents(calibration):
        stream += _encode(tokenizer, document)
        documents += 1
        if len(stream) >= wanted:
            break
    if len(stream) < wanted:
        raise Refused(
            f"{calibration.dataset}: {documents} documents make {len(stream) // calibration.tokens} rows of "
            f"{calibration.tokens} tokens, {calibration.rows} are wanted; lower calibration.rows or add text"
        )
    ids = np.array(stream[:wanted], np.int64).reshape(calibration.rows, calibration.tokens)
    if ids.max() >= vocabulary:
        raise Refused(f"{model}: its tokenizer gives id {ids.max()} of {vocabulary}; the two do not belong together")
    return ids


def describe(calibration: Calibration, ids: np.ndarray) -> dict[str, Any]:
    """What the report says of the set; the hash is of the token ids, so it also tells another tokenizer apart."""
    return {
        "dataset": calibration.dataset,
        "pin": calibration.sha256 or calibration.revision,
        "rows": int(ids.shape[0]),
        "tokens_per_row": int(ids.shape[1]),
        "tokens": int(ids.size),
        "token_ids_sha256": files.sha256_json(ids.tolist()),
    }


def _documents(calibration: Calibration) -> Iterator[Any]:
    import datasets

    if not calibration.is_file:
        source = datasets.load_dataset(
            calibration.dataset, calibration.subset, split=calibration.split, revision=calibration.revision,
            streaming=True,
        )  # fmt: skip
        yield from _column(source, calibration)
        return
    path = Path(calibration.dataset)
    if not path.is_file():
        raise Unreadable(f"{path}: no such calibration file; calibration.dataset names it")
    digest = files.sha256_file(path)
    if digest != calibration.sha256:
        raise Refused(f"{path}: sha256 {digest}, calibration.sha256 says {calibration.sha256}; correct one of them")
    read = datasets.Dataset.from_parquet if path.suffix == ".parquet" else datasets.Dataset.from_json
    with tempfile.TemporaryDirectory() as cache:  # else a cache of the user's would stand between us and the file
        yield from _column(read(str(path), cache_dir=cache, keep_in_memory=True), calibration)


def _column(source: Any, calibration: Calibration) -> Iterator[Any]:
    for number, row in enumerate(source):
        value = row.get(calibration.column)
        if not value:
            raise Refused(
                f"{calibration.dataset}, row {number}: column {calibration.column!r} is empty or absent "
                f"(columns: {', '.join(sorted(row))}); set calibration.column"
            )
        yield value


def _tokenizer(model: Path, trust_remote_code: bool) -> Any:
    import transformers

    try:
        if (model / "tokenizer.json").is_file():
            return transformers.PreTrainedTokenizerFast.from_pretrained(model)
        return transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise Unreadable(f"{model}: no tokenizer that can be read ({error}); fetch the model's own") from None


def _encode(tokenizer: Any, document: Any) -> list[int]:
    """One document's tokens, BOS first where the model has one; chats through the model's template."""
    if isinstance(document, list):
        ids = tokenizer(tokenizer.apply_chat_template(document, tokenize=False), add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(document)["input_ids"]
    bos = tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]
