"""What one step of the engine computes, and the shapes that its allocation sites share."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.k3 import ModelFacts, Role
from pipeline.plan.layout import Layout

BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Step:
    """``tokens`` spread evenly over ``sequences`` requests.  ``context`` is the longest sequence they may belong to.

    ``grouped``: the reference kernels compute all experts of a layer in one product; real kernels go one by one on CPU.
    """

    tokens: int
    sequences: int
    context: int = 0
    grouped: bool = False

    @property
    def span(self) -> int:
        """Tokens of the longest request in the step."""
        return -(-self.tokens // max(1, min(self.sequences, self.tokens)))


@dataclass(frozen=True)
class Site:
    """Bytes alive at one place of the step."""

    name: str
    bytes: int


def widest(facts: ModelFacts, *roles: Role) -> int:
    """The largest dimension of any matrix of these roles: the intermediate size of an MLP."""
    return max((max(tensor.shape) for tensor in facts.distinct() if tensor.role in roles and tensor.linear), default=0)


def expert_shape(facts: ModelFacts, layout: Layout) -> tuple[int, int, int]:
    """(local width, input width, experts a token) of the routed experts."""
    text = facts.text
    cut = 1 if layout.expert else layout.expert_ranks
    top_k = text.get("num_experts_per_token") or text.get("num_experts_per_tok") or 1
    inner = text.get("routed_expert_hidden_size") or text["hidden_size"]
    return -(-text["moe_intermediate_size"] // cut), inner, top_k
