"""Talking to a server on loopback: JSON and Prometheus text, never through a proxy."""

from __future__ import annotations

import http.client
import json
import math
import re
import urllib.error
import urllib.request
from typing import Any

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
CACHE_INFO = "vllm:cache_config_info"


class RequestFailed(Exception):
    """No answer, or one that is not 200.  ``status`` is ``None`` when nothing answered."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def request(url: str, body: dict | None = None, timeout_s: float = 60.0, method: str | None = None) -> bytes:
    """GET, or POST ``body`` as JSON; the answer's bytes.  Raises :class:`RequestFailed` for anything but a 200."""
    data = None if body is None else json.dumps(body).encode()
    message = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with _opener.open(message, timeout=timeout_s) as response:
            return response.read()
    except urllib.error.HTTPError as error:
        detail = error.read(2000).decode(errors="replace")
        raise RequestFailed(f"{url}: HTTP {error.code} {detail}", error.code) from None
    except (OSError, http.client.HTTPException) as error:
        raise RequestFailed(f"{url}: {getattr(error, 'reason', None) or error or type(error).__name__}") from None


def request_json(url: str, body: dict | None = None, timeout_s: float = 60.0, method: str | None = None) -> Any:
    """Like :func:`request`, parsed.  An answer that is not JSON is a failure too."""
    raw = request(url, body, timeout_s, method)
    try:
        return json.loads(raw)
    except ValueError:
        raise RequestFailed(f"{url}: the answer is not JSON: {raw[:200]!r}", 200) from None


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as ``{name: value}``: summed over engines for counters, the highest for gauges.

    ``request_success`` is also kept by reason (``vllm:request_success_total/length``); histogram buckets are left out,
    and so is what is no number (NaN, text), as if the server did not export it.
    """
    kinds: dict[str, str] = {}
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            kinds[name] = kind.strip()
        match = _SAMPLE.match(line)
        if match is None or match["name"].endswith("_bucket") or match["name"] == CACHE_INFO:
            continue
        name, value = match["name"], _number(match["value"])
        if value is None:
            continue
        counter = name.endswith(("_total", "_sum", "_count")) or kinds.get(name) == "counter"
        reason = dict(_LABEL.findall(match["labels"] or "")).get("finished_reason")
        for key in (name, f"{name}/{reason}") if reason else (name,):
            values[key] = values.get(key, 0.0) + value if counter else max(values.get(key, value), value)
    return values


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def cache_config(text: str) -> dict[str, str]:
    """The labels of ``vllm:cache_config_info``: the cache settings that the engine resolved.  Empty when not there."""
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and match["name"] == CACHE_INFO:
            return dict(_LABEL.findall(match["labels"] or ""))
    return {}
