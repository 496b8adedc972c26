"""The chunked delta rule equals the token loop, whatever the lengths, gates and keys."""

import pytest
import torch

from vllm_k3_cpu import delta_rule


def inputs(tokens, seed=0, heads=2, width=16):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, heads, width, generator=generator) for _ in range(3))
    g = -5 * torch.rand(tokens, heads, width, generator=generator)
    beta = torch.rand(tokens, heads, generator=generator)
    state = torch.randn(heads, width, width, generator=generator)
    return delta_rule.l2_normalize(q), delta_rule.l2_normalize(k), v, g, beta, state


def assert_same(args, tolerance=2e-5):
    out, state = delta_rule.chunked(*args)
    expected, expected_state = delta_rule.recurrent(*args)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(state, expected_state, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100])
def test_lengths_around_the_chunk(tokens):
    assert_same(inputs(tokens))


def test_every_gate_at_its_lower_bound():
    q, k, v, g, beta, state = inputs(64)
    assert_same((q, k, v, torch.full_like(g, -5.0), beta, state))


def test_no_decay_and_one_key_repeated():
    """The worst case of the triangular inverse: every token overwrites the same entry."""
    q, k, v, g, beta, state = inputs(64)
    assert_same((q, k[:1].expand_as(k), v, torch.zeros_like(g), torch.ones_like(beta), state))


def test_a_sequence_cut_anywhere_keeps_its_state():
    args = inputs(50)
    whole, final = delta_rule.chunked(*args)
    first, state = delta_rule.chunked(*(x[:23] for x in args[:5]), args[5])
    second, state = delta_rule.chunked(*(x[23:] for x in args[:5]), state)
    torch.testing.assert_close(torch.cat([first, second]), whole, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(state, final, atol=2e-5, rtol=2e-5)


def test_chunks_only_where_decay_is_bounded():
    assert delta_rule.chunk_is_safe(-5.0)
    assert not delta_rule.chunk_is_safe(None)
    assert not delta_rule.chunk_is_safe(-20.0)


def test_gate_without_a_lower_bound_is_softplus():
    gate, a_log, bias = torch.randn(3, 2, 4), torch.randn(2), torch.randn(8)
    expected = -a_log.exp()[:, None] * torch.log1p(torch.exp(gate + bias.view(2, 4)))
    torch.testing.assert_close(delta_rule.log_decay(gate, a_log, bias, None), expected)
