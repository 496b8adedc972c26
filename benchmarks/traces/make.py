"""Writes mixed.jsonl: some 24 seconds of made-up traffic in Mooncake's layout, the same text every time.

    python3 benchmarks/traces/make.py

Conversations start as a Poisson process whose rate doubles for a while in the middle (a burst).  Each begins with one
of three system prompts; a later turn repeats everything before it, as chat clients do, and adds a question.  Lengths
are log-normal.  No real user's data is in it.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

BLOCK_TOKENS = 512
DURATION_S, CONVERSATIONS_PER_S, BURST = 24.0, 0.9, (8.0, 14.0)
SYSTEM_BLOCKS, LONGEST_TOKENS = (1, 1, 2), 6144


def conversations(generator: random.Random):
    """(start in s, turns) of each conversation."""
    at = 0.0
    while True:
        rate = CONVERSATIONS_PER_S * (2 if BURST[0] <= at < BURST[1] else 1)
        at += generator.expovariate(rate)
        if at >= DURATION_S:
            return
        yield at, 1 + min(3, int(generator.expovariate(1.0)))


def requests() -> list[dict]:
    """Every request, by time."""
    generator, next_id, found = random.Random(20), 100, []
    for at, turns in conversations(generator):
        system = generator.randrange(len(SYSTEM_BLOCKS))
        tokens = SYSTEM_BLOCKS[system] * BLOCK_TOKENS
        blocks = [10 * system + index for index in range(SYSTEM_BLOCKS[system])]
        for _ in range(turns):
            question = min(1024, max(16, round(math.exp(generator.gauss(5.2, 0.7)))))
            answer = min(128, max(8, round(math.exp(generator.gauss(3.4, 0.6)))))
            tokens += question
            if tokens + answer > LONGEST_TOKENS or at >= DURATION_S:
                break
            # Whole blocks that a later turn will repeat keep their ids; the partly filled last one is this turn's own.
            while len(blocks) < tokens // BLOCK_TOKENS:
                blocks, next_id = [*blocks, next_id], next_id + 1
            last = [next_id] if tokens % BLOCK_TOKENS else []
            next_id += len(last)
            found.append(
                {
                    "timestamp": round(at * 1000),
                    "input_length": tokens,
                    "output_length": answer,
                    "hash_ids": [*blocks, *last],
                }
            )
            tokens += answer
            at += generator.uniform(2.0, 6.0)
    return sorted(found, key=lambda request: request["timestamp"])


def main() -> None:
    """Write the file beside this script."""
    lines = [json.dumps(request) for request in requests()]
    Path(__file__).with_name("mixed.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
