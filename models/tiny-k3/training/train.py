"""Train the tiny K3 on a CPU: Muon on matrices, AdamW on the rest, documents growing from 64 to 4096 tokens.

The schedule follows the wall clock, because the budget is time.  Writes ``STATE`` (safetensors of fp32 master weights) and
a curve (JSON) every few minutes and at the end.  From ``--mxfp4-from`` on, the forward pass sees MXFP4 expert weights.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from config import TEXT
from evaluate import score
from model import RMSNorm, TinyK3, linear
from tasks import ANSWER, FAMILIES, ITEM, NOTHING, TRAINING_SHARES, Source, Words

# (share of the time, document length): a step takes this length, or now and then a shorter one seen before.
CURRICULUM = ((0.08, 64), (0.22, 128), (0.2, 256), (0.2, 512), (0.14, 1024), (0.1, 2048), (0.06, 4096))
LOSS_WEIGHT = {ANSWER: 1.0, ITEM: 0.7, NOTHING: 0.1}
HINT, FIRST = 3, 4  # see tasks.Document; FIRST: "no value before this"
HINT_WEIGHT = {HINT: 0.5, FIRST: 0.05}
NOT_MUON = ("embed_tokens", "lm_head", "gate.weight", "conv1d", "res_proj", ".b_proj")


def orthogonalize(gradient: Tensor) -> Tensor:
    """Newton-Schulz iteration of Muon (Jordan et al., 2024) on the last two dimensions, in bf16."""
    x = gradient.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized; parameters of one shape are handled in one batch."""

    def __init__(self, parameters: list[Tensor], lr: float, momentum: float = 0.95):
        shapes: dict[tuple, list[Tensor]] = {}
        for parameter in parameters:
            shapes.setdefault(tuple(parameter.shape[-2:]), []).append(parameter)
        super().__init__([{"params": group} for group in shapes.values()], {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            updates = []
            for parameter in group["params"]:
                buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                updates.append(parameter.grad.lerp(buffer, group["momentum"]).flatten(0, -3 if parameter.ndim > 2 else 0)
                               .view(-1, *parameter.shape[-2:]))
            update = orthogonalize(torch.cat(updates))
            scale = group["lr"] * max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            for parameter, part in zip(group["params"], update.split([len(u) for u in updates])):
                parameter.add_(part.view_as(parameter), alpha=-scale)


def optimizers(model: TinyK3, reader: nn.Module, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    matrices, rest = [], list(reader.parameters())
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and not any(part in name for part in NOT_MUON)
        (matrices if is_matrix else rest).append(parameter)
    return [Muon(matrices, muon_lr), torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0)]


def losses(logits: Tensor, ids: Tensor, classes: Tensor) -> tuple[Tensor, dict[int, tuple[float, float]]]:
    """-> weighted loss and {loss class: (cross-entropy, accuracy)} of the predicted tokens."""
    target, kind = ids[:, 1:].flatten(), classes[:, 1:].flatten()
    flat = logits[:, :-1].flatten(0, 1).float()
    entropy, right = F.cross_entropy(flat, target, reduction="none"), flat.argmax(-1) == target
    total, parts = flat.new_zeros(()), {}
    for number, weight in LOSS_WEIGHT.items():
        mask = kind == number
        if mask.any():
            mean = entropy[mask].mean()
            total = total + weight * mean
            parts[number] = (mean.item(), right[mask].float().mean().item())
    return total, parts


class HintReader(nn.Module):
    """Predicts the hinted token from the residual stream after the first attention layer; used in training only.

    Two attention layers, two steps: the first finds what an alias stands for, the second answers the question.
    """

    def __init__(self, model: TinyK3, config: dict):
        super().__init__()
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.head = linear(config["hidden_size"], config["vocab_size"])
        self.stream: Tensor | None = None
        model.layers[config["linear_attn_config"]["full_attn_layers"][0] - 1].register_forward_hook(self._keep)

    def _keep(self, layer: nn.Module, inputs: tuple, output: tuple) -> None:
        self.stream = output[0]

    def loss(self, hints: Tensor, first: int) -> tuple[Tensor, dict[int, tuple[float, float]]]:
        """As :func:`losses`, at the hinted places (-1: none); ``first`` is the token that hints at "the first value"."""
        places = hints >= 0
        logits, wanted = self.head(self.norm(self.stream[places])).float(), hints[places]
        entropy, right = F.cross_entropy(logits, wanted, reduction="none"), logits.argmax(-1) == wanted
        total, parts = logits.new_zeros(()), {}
        for number, mask in ((HINT, wanted != first), (FIRST, wanted == first)):
            if mask.any():
                mean = entropy[mask].mean()
                total = total + HINT_WEIGHT[number] * mean
                parts[number] = (mean.item(), right[mask].float().mean().item())
        return total, parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1700)
    parser.add_argument("--state", type=Path, required=True, help="where the weights go")
    parser.add_argument("--curve", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="weights to go on from")
    parser.add_argument("--start-at", type=float, default=0.0, help="place in the curriculum to begin at, 0..1")
    parser.add_argument("--decay-from", type=float, default=0.7, help="learning rate falls linearly from here to the end")
    parser.add_argument("--mxfp4-from", type=float, default=0.4)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--share", action="append", default=[], metavar="FAMILY=WEIGHT",
                        help=f"how often a family is drawn, relative to the rest (default: {TRAINING_SHARES})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    model = TinyK3(TEXT).train()
    if arguments.start:
        model.load_state_dict(load_file(arguments.start))
    reader = HintReader(model, TEXT)
    optimizer = optimizers(model, reader, arguments.muon_lr, arguments.adam_lr)
    base = [[group["lr"] for group in one.param_groups] for one in optimizer]
    words = Words.load()
    shares = {family: float(weight) for family, weight in (share.split("=") for share in arguments.share)}
    source = Source(words, arguments.seed, shares)
    draw = torch.Generator().manual_seed(arguments.seed)
    began, step, tokens, curve, mean, reported, probed = time.time(), 0, 0, [], {}, 0.0, 0.0
    print(sum(p.numel() for p in model.parameters()), "parameters", flush=True)

    def save(note: dict) -> None:
        curve.append(note)
        save_file(model.state_dict(), arguments.state)
        record = {"arguments": {key: str(value) for key, value in vars(arguments).items()}, "points": curve}
        arguments.curve.write_text(json.dumps(record, indent=0) + "\n")
        print(json.dumps(note), flush=True)

    while (elapsed := time.time() - began) < arguments.seconds:
        progress = arguments.start_at + (1 - arguments.start_at) * elapsed / arguments.seconds
        reached, place = 0.0, 0
        for place, (share, _) in enumerate(CURRICULUM):
            reached += share
            if progress < reached:
                break
        if torch.rand((), generator=draw) < 0.3:
            place = int(torch.randint(place + 1, (), generator=draw))
        length = CURRICULUM[place][1]
        size = max(1, 4096 // length)
        ids, classes, hints = torch.from_numpy(source.batch(length, size))
        model.train_in_mxfp4(progress >= arguments.mxfp4_from)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids)
        loss, parts = losses(logits, ids, classes)
        if (hints >= 0).any():
            hint_loss, hint_parts = reader.loss(hints, words.mark["multi_value"])
            loss, parts = loss + hint_loss, parts | hint_parts
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss is {loss.item()} at step {step}")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(optimizer[1].param_groups[0]["params"], 1.0)
        rate = min(1.0, (step + 1) / 40)
        if progress > arguments.decay_from:
            rate *= max(0.02, (1 - progress) / (1 - arguments.decay_from))
        for one, initial in zip(optimizer, base):
            for group, lr in zip(one.param_groups, initial):
                group["lr"] = lr * rate
            one.step()
            one.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + ids.numel()
        for number, (entropy, right) in parts.items():
            for key, value in ((f"loss_{number}", entropy), (f"accuracy_{number}", right)):
                mean[key] = 0.95 * mean.get(key, value) + 0.05 * value
        if elapsed - reported > 20:
            reported = elapsed
            note = {"step": step, "wall_s": round(elapsed), "tokens": tokens, "length": length,
                    **{key: round(value, 3) for key, value in sorted(mean.items())}}
            if elapsed - probed > 240:
                probed, now = elapsed, CURRICULUM[min(place + 1, 3)][1] * (2 if place < 2 else 1)
                model.eval()
                cells = {family: score(model, family, now, 32, 7, words) for family in FAMILIES}
                note["probe"] = {f"{family}@{now}": [cell["accuracy"], cell["forced_item_accuracy"]]
                                 for family, cell in cells.items()}
                model.train()
            save(note)
    save({"step": step, "wall_s": round(time.time() - began), "tokens": tokens, "done": True})


if __name__ == "__main__":
    main()
