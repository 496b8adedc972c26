"""Score a checkpoint on the seven families: one question a document, greedy, whole answer right.

Scoring is teacher-forced: an answer counts when every token of it is the arg-max, which is exactly when greedy decoding
would produce it.  ``forced_item_accuracy`` counts the tokens of an answer one by one *given the right ones before*: it is
no measure of generation, where one wrong item leads into another part of the list.  For long answers ``--generate``
lets the model feed on its own output and takes the share of the list recovered in order.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from export import load
from model import TinyK3
from tasks import FAMILIES, Source, Words

LENGTHS = (512, 1024, 2048, 4096)
BATCH_TOKENS = 8192


@torch.inference_mode()
def score(model: TinyK3, family: str, length: int, count: int, seed: int, words: Words | None = None) -> dict:
    """``count`` questions of one family in documents of ``length`` tokens -> exact and per-item accuracy."""
    source = Source(words or Words.load(), seed)
    questions = [source.question(family, length) for _ in range(count)]
    exact, items = [], []
    step = max(1, BATCH_TOKENS // length)
    for start in range(0, count, step):
        group = questions[start:start + step]
        ids = np.zeros((len(group), length), dtype=np.int64)
        select = np.zeros((len(group), length), dtype=bool)
        for row, (prompt, answer) in enumerate(group):
            ids[row, :len(prompt) + len(answer)] = np.concatenate([prompt, answer])
            select[row, len(prompt) - 1:len(prompt) + len(answer) - 1] = True
        best = model(torch.from_numpy(ids), torch.from_numpy(select)).argmax(-1).numpy()
        for _, answer in group:
            right, best = best[:len(answer)] == answer, best[len(answer):]
            exact.append(bool(right.all()))
            items.append(float(right.mean()))
    return {"n": count, "accuracy": round(float(np.mean(exact)), 4), "forced_item_accuracy": round(float(np.mean(items)), 4)}


def in_order(found: list[int], wanted: list[int]) -> float:
    """Length of the longest common subsequence over the length of ``wanted``."""
    row = [0] * (len(found) + 1)
    for target in wanted:
        before = row[:]
        for j, token in enumerate(found, 1):
            row[j] = before[j - 1] + 1 if token == target else max(before[j], row[j - 1])
    return row[-1] / len(wanted)


@torch.inference_mode()
def generated_recall(model: TinyK3, length: int, count: int, seed: int, batch: int = 8) -> dict:
    """Ordered recall by greedy generation (without a cache: slow) -> mean share of the 64 items recovered in order."""
    source, shares = Source(Words.load(), seed), []
    questions = [source.question("ordered", length) for _ in range(count)]
    for start in range(0, count, batch):
        group = questions[start:start + batch]
        ids = torch.from_numpy(np.stack([prompt for prompt, _ in group]))  # one length: lists are equally long
        begin = ids.shape[1]
        for _ in group[0][1]:
            last = torch.zeros(ids.shape, dtype=torch.bool)
            last[:, -1] = True
            ids = torch.cat([ids, model(ids, last).argmax(-1, keepdim=True)], 1)
        shares += [in_order(row[:-1], answer[:-1].tolist())
                   for row, (_, answer) in zip(ids[:, begin:].tolist(), group)]  # without the closing mark
    return {"n": count, "share_in_order": round(float(np.mean(shares)), 4),
            "share_of_lists_at_least_0.9": round(float(np.mean(np.array(shares) >= 0.9)), 4)}


def table(model: TinyK3, lengths: tuple[int, ...], count: int, seed: int) -> dict:
    """{family: {length: score}}; prints each cell as it comes."""
    model.eval()
    words, result = Words.load(), {}
    for family in FAMILIES:
        for length in lengths:
            cell = score(model, family, length, count, seed + length, words)
            result.setdefault(family, {})[str(length)] = cell
            print(f"{family:12} {length:5} {cell['accuracy']:.3f} (forced items {cell['forced_item_accuracy']:.3f}, n {count})", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="exported checkpoint")
    parser.add_argument("--count", type=int, default=100, help="questions a cell")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--generate", type=int, nargs="+", default=[], metavar="LENGTH",
                        help="also generate ordered recall at these lengths, a quarter as many questions")
    parser.add_argument("--output", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    began, model, count = time.time(), load(arguments.directory), arguments.count
    command = f"python evaluate.py <checkpoint> --count {count} --seed {arguments.seed}"
    for option, lengths in (("--lengths", arguments.lengths), ("--generate", arguments.generate)):
        command += f" {option} {' '.join(map(str, lengths))}" if lengths else ""
    result = {
        "scoring": "greedy, whole answer right, one question a document; fp32, weights as exported (MXFP4 experts)",
        "command": command,
        "families": table(model, tuple(arguments.lengths), count, arguments.seed),
        "ordered_generated": {str(length): generated_recall(model, length, max(1, count // 4), arguments.seed + length)
                              for length in arguments.generate},
    }
    print(result["ordered_generated"])
    print(f"{time.time() - began:.0f} s")
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
