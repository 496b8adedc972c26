"""Kimi Delta Attention as tensor algebra: the gated delta rule, one token at a time and in chunks.

Per head, with key/value width D, state S [D, D] (key x value), log decay g <= 0 per key channel, write strength beta:

    S_t = exp(g_t) * S_{t-1};   u_t = beta_t (v_t - k_t S_t);   S_t += k_t u_t^T;   o_t = q_t S_t

(Kimi Linear, arXiv 2510.26692, equations of section 3.)  All tensors here are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Within a chunk, decay products are split around its middle: exp(+-|g| * CHUNK / 2) must stay inside float32.
# The gate's lower bound is -5 on K3, so a chunk of 16 reaches exp(40).
CHUNK = 16
_MAX_EXPONENT = 80.0


def chunk_is_safe(gate_lower_bound: float | None) -> bool:
    """Whether `chunked` may be used: decay per token is bounded, and its powers within a chunk fit float32."""
    return gate_lower_bound is not None and -gate_lower_bound * CHUNK / 2 <= _MAX_EXPONENT


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    """[..., D] -> unit vectors along the last axis (eps 1e-6 on the squared norm)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def log_decay(
    gate: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """Gate projection [T, H, D] -> log decay [T, H, D] <= 0; ``a_log`` [H], ``dt_bias`` [H * D].

    With a lower bound (K3) ``lower_bound * sigmoid(exp(a) (gate + bias))``, else ``-exp(a) softplus(gate + bias)``.
    """
    gate = gate.float() + dt_bias.view(gate.shape[-2:])
    rate = a_log.exp().unsqueeze(-1)
    if lower_bound is None:
        return F.softplus(gate).mul_(-rate)
    return gate.mul_(rate).sigmoid_().mul_(lower_bound)


def step(q, k, v, g, beta, state):
    """One token of N sequences: q, k, v, g [N, H, D]; beta [N, H] -> [N, H, D]; state [N, H, D, D] in place."""
    state.mul_(g.exp().unsqueeze(-1))
    read = torch.matmul(k.unsqueeze(-2), state)
    update = (v.unsqueeze(-2) - read) * beta[..., None, None]
    state.add_(k.unsqueeze(-1) * update)
    return torch.matmul(q.unsqueeze(-2), state).squeeze(-2)


def recurrent(q, k, v, g, beta, state):
    """One sequence, token by token: shapes of `chunked`.  The slow path for gates without a lower bound."""
    state = state.unsqueeze(0).clone()
    rows = [step(*(x[t : t + 1] for x in (q, k, v, g, beta)), state) for t in range(q.shape[0])]
    return torch.cat(rows), state[0]


def chunked(q, k, v, g, beta, state):
    """One sequence in chunks of `CHUNK` tokens (WY form of the delta rule).

    q, k, v, g [T, H, D]; beta [T, H]; state [H, D, D] -> outputs [T, H, D], state [H, D, D].
    Only the walk over chunks is sequential; everything inside a chunk is batched over (chunk, head).
    """
    tokens, heads, width = q.shape
    chunks = -(-tokens // CHUNK)
    q, k, v, g, beta = (_split(x, chunks) for x in (q, k, v, g, beta.unsqueeze(-1)))  # [chunks, H, CHUNK, *]
    cumulative = g.cumsum(-2)
    total = cumulative[..., -1:, :]
    middle = total * 0.5
    grown, shrunk = (cumulative - middle).exp_(), (middle - cumulative).exp_()
    half = middle.exp()
    k_late, k_early, q_late = k * grown, k * shrunk, q * grown
    k_early_t = k_early.transpose(-1, -2)

    inverse = _unit_lower_inverse(torch.matmul(k_late, k_early_t).mul_(beta).tril_(-1))
    value = torch.matmul(inverse, v * beta)  # what each token writes, before the incoming state is read
    erase = torch.matmul(inverse, k_late * half * beta)  # how the incoming state enters that
    attend = torch.matmul(q_late, k_early_t).tril_()
    q_in, k_out, decay = q_late * half, (k_early * half).transpose(-1, -2), total.exp().transpose(-1, -2)

    states, written = [], []
    for i in range(chunks):
        states.append(state)
        u = torch.baddbmm(value[i], erase[i], state, alpha=-1)
        written.append(u)
        state = torch.baddbmm(state * decay[i], k_out[i], u)
    out = torch.matmul(q_in, torch.stack(states)) + torch.matmul(attend, torch.stack(written))
    return out.transpose(1, 2).reshape(chunks * CHUNK, heads, width)[:tokens], state


def _split(x: torch.Tensor, chunks: int) -> torch.Tensor:
    """[T, H, *] -> [chunks, H, CHUNK, *]; padding tokens neither write (beta 0) nor decay (g 0)."""
    x = F.pad(x, (0, 0, 0, 0, 0, chunks * CHUNK - x.shape[0]))
    return x.view(chunks, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous()


def _unit_lower_inverse(strict: torch.Tensor) -> torch.Tensor:
    """(I + strict)^-1 for strictly lower triangular [..., CHUNK, CHUNK]."""
    identity = torch.eye(CHUNK, dtype=strict.dtype)
    return torch.linalg.solve_triangular(strict + identity, identity.expand_as(strict), upper=False, unitriangular=True)
