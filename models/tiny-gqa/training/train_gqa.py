"""Train models/tiny-gqa on a CPU: an ordinary Qwen3 with grouped queries, on tiny-k3's words and documents.

K3 caches a latent; pages of keys and values, calibrated cache scales and stock kernels need a model that has them.  Lexicon,
tokenizer, grammar, optimizers and scoring are tiny-k3's (``models/tiny-k3/training``); the mix of documents is this model's own,
because copying is what it learns first.  Documents grow when the answers are right, or when their share of the time is over.
Writes a standard Hugging Face checkpoint in BF16, the curve and the scores into the folder above (or ``--output``).

    python train_gqa.py --seconds 900        (quant environment)
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

TARGET = Path(__file__).resolve().parents[1]
K3 = TARGET.parent / "tiny-k3"
sys.path.insert(0, str(K3 / "training"))

from config import TOKEN_IDS  # noqa: E402
from evaluate import score  # noqa: E402
from tasks import FAMILIES, Document, Source, Words  # noqa: E402
from train import losses, optimizers  # noqa: E402
from vocabulary import VOCAB_SIZE  # noqa: E402

# Every width is a multiple of 128 on one rank and on two, so that FP8 blocks and groups of 128 apply at both.
CONFIG = {"vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 8192,
          "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "attention_bias": False, "tie_word_embeddings": False, **TOKEN_IDS}
# (end of its share of the time, document length).  A step takes the current length, or now and then a shorter one.
CURRICULUM = ((0.4, 64), (0.52, 128), (0.64, 256), (0.8, 512), (0.92, 1024), (1.0, 2048))
LEARNT = 0.9  # running share of right answers at which documents grow before their time
DECAY_FROM = 0.6
LOOK_BACK, LOOK_BACK_UNTIL = (1, 2), 0.5
MIX = {"pairs": 0.45, "multi_query": 0.15, "multi_value": 0.12, "ordered": 0.18, "frequent": 0.1}
BATCH_TOKENS = 2048
LENGTHS = (512, 1024, 2048)
SHARED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "lexicon.json", "LICENSE")


class Logits(nn.Module):
    """A causal LM in the form that tiny-k3's training and scoring call: (ids, select) -> logits."""

    def __init__(self, model: Qwen3ForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, select: Tensor | None = None) -> Tensor:
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        return self.model.lm_head(hidden if select is None else hidden[select])


@torch.no_grad()
def initialize(model: Qwen3ForCausalLM) -> None:
    """Token identities first: embeddings of size 1 with a common component (what heads that look by position can tell by), blocks and
    head that add nothing yet.  At Hugging Face's .02 everywhere the first layers drown the embeddings."""
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0, 0.7).add_(torch.randn(embedding.shape[1]) * 0.7)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
            parameter.zero_()
        elif "_proj" in name:
            parameter.normal_(0, 0.5 * parameter.shape[1] ** -0.5)


class Retrieval(Source):
    """tiny-k3's documents with one family each, drawn by :data:`MIX` (no aliases: two hops are not this model's)."""

    def training_document(self, length: int) -> np.ndarray:
        doc, draw, room = Document(), self.draw, length - 4
        keys = draw.permutation(self.words.keys).tolist()
        late = bool(draw.random() < 0.4)
        fill = float(draw.uniform(0.6, 1.0) if draw.random() < 0.7 else draw.uniform(0.05, 0.6)) * room
        family = draw.choice(list(MIX), p=list(MIX.values()))

        def some(tokens_each: float, least: int, most: int = 120) -> list[int]:
            return keys[:int(min(most, max(least, fill // tokens_each)))]

        if family == "pairs":
            self.pairs(doc, some(9, 1), late, asked=1.0)
        elif family == "multi_query":
            self.pairs(doc, some(9, 4, 60), late, asked=0.2, fours=0.35)
        elif family == "multi_value":
            self.multi_value(doc, some(19, 2, 50), late)
        elif family == "ordered":
            pool = draw.permutation(np.concatenate([keys, self.words.values])).tolist()
            self.lists(doc, pool, room if draw.random() < 0.7 else max(16, int(fill)), late)
        else:
            most = max(3, min(int(draw.integers(3, 9)), length // 12))
            self.frequent(doc, keys[:int(draw.integers(2, 5))], most, late)
        while doc.room > length - 1:  # too much: the latest events go, and those are questions
            latest = max(doc.events, key=lambda event: event.time)
            doc.room -= len(latest.tokens)
            doc.events.remove(latest)
        return self.lay_out(doc, length)


class LookBack(nn.Module):
    """Reads, from the stream after the first layer, the tokens one and two places before; used in training only.

    ``K = V``: whoever is to find V by K must know at V what stood two places before.  Found by chance that takes very long.
    """

    def __init__(self, model: Logits):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(CONFIG["hidden_size"], VOCAB_SIZE, bias=False) for _ in LOOK_BACK)
        self.stream: Tensor | None = None
        model.model.model.layers[0].register_forward_hook(self._keep)

    def _keep(self, layer: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
        self.stream = output[0] if isinstance(output, tuple) else output

    def loss(self, ids: Tensor) -> Tensor:
        """Mean cross-entropy over both distances, nats."""
        stream = F.rms_norm(self.stream, self.stream.shape[-1:])
        found = [(head(stream[:, back:]), ids[:, :-back]) for back, head in zip(LOOK_BACK, self.heads)]
        return sum(F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten()) for logits, wanted in found) / len(found)


def train(model: Logits, seconds: float, seed: int) -> list[dict]:
    """Follow the curriculum for ``seconds``; returns the curve.  Raises ``FloatingPointError`` where the loss is not finite."""
    reader = LookBack(model)
    optimizer = optimizers(model, reader, 0.02, 3e-3)
    base = [[group["lr"] for group in one.param_groups] for one in optimizer]
    source, draw = Retrieval(Words.load(K3), seed), torch.Generator().manual_seed(seed)
    began, step, tokens, reported, curve, mean, place, since = time.time(), 0, 0, 0.0, [], {}, 0, 0
    while (elapsed := time.time() - began) < seconds:
        progress = elapsed / seconds
        learnt = since >= 60 and mean.get("accuracy_1", 0) >= LEARNT
        if place + 1 < len(CURRICULUM) and (progress >= CURRICULUM[place][0] or learnt):
            place, since = place + 1, 0
        at = int(torch.randint(place + 1, (), generator=draw)) if torch.rand((), generator=draw) < 0.2 else place
        length = CURRICULUM[at][1]
        ids, classes, _ = torch.from_numpy(source.batch(length, BATCH_TOKENS // length))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids)
        loss, parts = losses(logits, ids, classes)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss is {loss.item()} at step {step}")
        if progress < LOOK_BACK_UNTIL:
            with torch.autocast("cpu", torch.bfloat16):
                looked = reader.loss(ids)
            loss, parts = loss + 0.5 * looked, parts | {"back": (looked.item(), None)}
        loss.backward()
        rate = min(1.0, (step + 1) / 40) * min(1.0, max(0.02, (1 - progress) / (1 - DECAY_FROM)))
        for one, initial in zip(optimizer, base):
            for group, lr in zip(one.param_groups, initial):
                group["lr"] = lr * rate
            one.step()
            one.zero_grad(set_to_none=True)
        step, since, tokens = step + 1, since + 1, tokens + ids.numel()
        for kind, (entropy, right) in parts.items():
            for key, value in ((f"loss_{kind}", entropy), (f"accuracy_{kind}", right)):
                if value is not None:
                    mean[key] = 0.95 * mean.get(key, value) + 0.05 * value
        if elapsed - reported > 10:
            reported = elapsed
            note = {"step": step, "wall_s": round(elapsed), "tokens": tokens, "length": length}
            curve.append(note | {key: round(value, 3) for key, value in sorted(mean.items())})
            print(json.dumps(curve[-1]), flush=True)
    return curve


def write(model: Logits, target: Path) -> None:
    """The checkpoint as Hugging Face writes it, BF16, with tiny-k3's tokenizer and lexicon beside it."""
    stored = model.model.eval().to(torch.bfloat16)
    stored.generation_config = GenerationConfig(do_sample=False, max_new_tokens=256, **TOKEN_IDS)
    stored.save_pretrained(target)
    for name in SHARED:
        shutil.copyfile(K3 / name, target / name)
    (target / "model.safetensors").chmod(0o644)


def scores(directory: Path, count: int) -> dict[str, dict[str, dict]]:
    """{family: {length: score}} of the checkpoint as stored, computed in float32."""
    model = Logits(Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval())
    words, families = Words.load(K3), {}
    for family in FAMILIES:
        cells = {str(length): score(model, family, length, count, 1000 + length, words) for length in LENGTHS}
        families[family] = cells
        print(family, {length: cell["accuracy"] for length, cell in cells.items()}, flush=True)
    return families


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--count", type=int, default=100, help="questions a cell of the scores")
    parser.add_argument("--output", type=Path, default=TARGET)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    model = Logits(Qwen3ForCausalLM(Qwen3Config(**CONFIG)).train())
    initialize(model.model)
    print(sum(parameter.numel() for parameter in model.parameters()), "parameters", flush=True)
    curve = train(model, arguments.seconds, arguments.seed)
    write(model, arguments.output)
    training = arguments.output / "training"
    training.mkdir(exist_ok=True)
    record = {"seconds": arguments.seconds, "seed": arguments.seed, "threads": arguments.threads, "points": curve}
    (training / "curve.json").write_text(json.dumps({"runs": [record]}, indent=0) + "\n")
    (arguments.output / "reference_scores.json").write_text(json.dumps({
        "scoring": "greedy, whole answer right, one question a document; fp32, weights as stored (BF16)",
        "command": f"python train_gqa.py --seconds {arguments.seconds:.0f} --seed {arguments.seed} --count {arguments.count}",
        "families": scores(arguments.output, arguments.count),
    }, indent=1) + "\n")


if __name__ == "__main__":
    main()
