"""What every request sent and got, appended line by line, so that a killed run continues at the request where it
stopped.

lm-eval's own response cache keeps only the text; finish reason, usage and time would be lost with it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """One answered (or failed) request."""

    prompt_hash: str
    text: str | None
    finish_reason: str | None
    reasoning: str | None
    sent_prompt_tokens: int | None
    """Tokens in the request; ``None`` for chat, where the server tokenizes."""
    server_prompt_tokens: int | None
    completion_tokens: int | None
    latency_s: float
    attempts: int
    failure: str | None = None
    """``stuck`` or ``error``."""
    message: str | None = None


class Journal:
    """Records by prompt hash, backed by a JSON-lines file whose first line names the run it belongs to."""

    def __init__(self, path: Path, identity: str) -> None:
        self.path, self.identity = path, identity
        self.records: dict[str, Record] = {}
        self.resumed = 0
        self._load()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = open(path, "a" if self.resumed else "w", encoding="utf-8")
        if not self.resumed:
            self._write({"identity": identity})

    def _load(self) -> None:
        """Take over what an earlier run of the same identity finished; failures are tried again."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as stream:
            lines = stream.read().split(b"\n")
        torn = lines.pop()  # what a kill cut in the middle of a write; empty otherwise
        if not lines or _parse(lines[0]) != {"identity": self.identity}:
            return
        for record in map(_record, lines[1:]):
            if record is not None and record.failure is None:
                self.records[record.prompt_hash] = record
        self.resumed = len(self.records)
        if torn and self.resumed:
            with open(self.path, "rb+") as stream:
                stream.truncate(self.path.stat().st_size - len(torn))

    def add(self, record: Record) -> None:
        """Keep ``record``; it is in the file when this returns."""
        self.records[record.prompt_hash] = record
        self._write(asdict(record))

    def _write(self, value: dict[str, Any]) -> None:
        self._stream.write(json.dumps(value, ensure_ascii=False) + "\n")
        self._stream.flush()

    def close(self, *, finished: bool) -> None:
        """Close the file; a finished run needs it no more."""
        self._stream.close()
        if finished:
            self.path.unlink(missing_ok=True)


def failed(prompt_hash: str, failure: str, message: str, latency_s: float, attempts: int) -> Record:
    """A record of a request without an answer."""
    blank = Record(prompt_hash, None, None, None, None, None, None, latency_s, attempts)
    return replace(blank, failure=failure, message=message)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _record(line: bytes) -> Record | None:
    """The record of a line; ``None`` for one that is damaged, or was written by another version of this program."""
    try:
        return Record(**_parse(line))
    except TypeError:
        return None
