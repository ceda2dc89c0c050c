from itertools import pairwise

import pytest
import torch

from atoll.ops.attention import causal_attention, latent_attention_step

SCALE = 0.3


def make(batch=2, queries=9, keys=None, heads=3, width=6, value=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    keys = queries if keys is None else keys
    return rand(batch, queries, heads, width), rand(batch, keys, heads, width), rand(batch, keys, heads, value)


def formula(q, k, v, offset=0):
    """The scores of all pairs, later keys removed."""
    scores = torch.einsum("bthd,bshd->bhts", q, k) * SCALE
    later = torch.arange(k.shape[1])[None] > torch.arange(q.shape[1])[:, None] + offset
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def outcome(f, inputs, **options):
    out = f(*inputs, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    return [out, *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize(("width", "value"), [(6, 4), (4, 6), (5, 5)])
@pytest.mark.parametrize(("queries", "offset"), [(9, 0), (1, 0), (1, 8), (5, 4), (130, 0), (70, 60)])
def test_equals_the_formula_in_float64(width, value, queries, offset):
    inputs = make(queries=queries, keys=queries + offset, width=width, value=value)
    ours = outcome(causal_attention, inputs, scale=SCALE, offset=offset)
    for a, b in zip(ours, outcome(formula, inputs, offset=offset), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


SHUFFLED = [0, 2, 5, 7, 8, 11, 13, 16, 18, 21, 23, 26, 28, 31, 33, 36, 38, 40]  # many of few lengths, mixed: brought together by length


@pytest.mark.parametrize("cuts", [[0, 40], [0, 1, 15, 15, 40], [0, 0, 10, 20, 30, 40, 40], [0, 39, 40], SHUFFLED])
def test_packed_documents_equal_each_on_its_own(cuts):
    inputs = make(batch=1, queries=40)

    def alone(q, k, v):
        parts = [slice(a, b) for a, b in pairwise(cuts) if b > a]
        return torch.cat([formula(q[:, p], k[:, p], v[:, p]) for p in parts], 1)

    ours = outcome(causal_attention, inputs, scale=SCALE, cu_seqlens=torch.tensor(cuts))
    for a, b in zip(ours, outcome(alone, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "cuts", [None, [0, 130, 131, 300], [0, 5, 8, 13, 16, 21, 24, 29, 32, 37, 40, 45, 48, 53, 131, 134, 139, 142, 145, 150, 300]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitwise_causal_and_blind_to_other_documents(cuts, dtype):
    cu = None if cuts is None else torch.tensor(cuts)
    inputs = [u.detach() for u in make(batch=1, queries=300, width=48, value=32, dtype=dtype)]
    out = causal_attention(*inputs, scale=SCALE, cu_seqlens=cu)
    for t in (1, 64, 131, 250, 299):
        changed = [torch.cat([u[:, :t], -2 * u[:, t:] + 1], 1) for u in inputs]
        later = causal_attention(*changed, scale=SCALE, cu_seqlens=cu)
        assert torch.equal(later[:, :t], out[:, :t])
        assert not torch.equal(later[:, t:], out[:, t:])
    if cuts is not None:
        changed = [torch.cat([1 - u[:, :131], u[:, 131:]], 1) for u in inputs]
        assert torch.equal(causal_attention(*changed, scale=SCALE, cu_seqlens=cu)[:, 131:], out[:, 131:])


def test_bitwise_causal_behind_a_cached_prefix():
    q, k, v = (u.detach() for u in make(batch=2, queries=100, keys=160, width=48, value=32, dtype=torch.float32))
    out = causal_attention(q, k, v, scale=SCALE, offset=60)
    changed = [torch.cat([u[:, :t], 2 * u[:, t:] + 1], 1) for u, t in ((q, 50), (k, 110), (v, 110))]
    assert torch.equal(causal_attention(*changed, scale=SCALE, offset=60)[:, :50], out[:, :50])


def test_same_bits_on_every_run_on_two_threads():
    inputs = make(batch=1, queries=700, width=48, value=32, dtype=torch.float32)
    cu = torch.tensor([0, 200, 201, 700])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = outcome(causal_attention, inputs, scale=SCALE, cu_seqlens=cu)
        for _ in range(4):
            assert all(torch.equal(a, b) for a, b in zip(outcome(causal_attention, inputs, scale=SCALE, cu_seqlens=cu), first, strict=True))
    finally:
        torch.set_num_threads(threads)


# --- absorbed decode ---------------------------------------------------------------------------------------------------------------


def absorbed(batch=2, entries=12, heads=3, nope=5, pe=2, rank=7, value=4, steps=1, dtype=torch.float64):
    """Latents, their up-projections and queries; expanded keys and values beside them."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    latent, k_pe, up_k, up_v = rand(batch, entries, rank), rand(batch, entries, pe), rand(heads, nope, rank), rand(heads, value, rank)
    q, q_pe = rand(batch, steps, heads, nope), rand(batch, steps, heads, pe)
    keys = torch.cat([torch.einsum("bsr,hdr->bshd", latent, up_k), k_pe[:, :, None].expand(-1, -1, heads, -1)], -1)
    values = torch.einsum("bsr,hdr->bshd", latent, up_v)
    return q, q_pe, latent, k_pe, up_k, up_v, keys, values


@pytest.mark.parametrize("steps", [1, 4])
def test_absorbed_decode_equals_expanded_attention(steps):
    q, q_pe, latent, k_pe, up_k, up_v, keys, values = absorbed(steps=steps)
    q_latent = torch.einsum("bthd,hdr->bthr", q, up_k)
    lengths = torch.tensor([12, 7])
    mixed = latent_attention_step(q_latent, q_pe, latent, k_pe, lengths, scale=SCALE)
    out = torch.einsum("bthr,hdr->bthd", mixed, up_v)
    whole = torch.cat([q, q_pe], -1)
    for row, n in enumerate(lengths.tolist()):
        at = slice(row, row + 1)
        expected = causal_attention(whole[at], keys[at, :n], values[at, :n], scale=SCALE, offset=n - steps)
        torch.testing.assert_close(out[at], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_absorbed_decode_is_blind_to_entries_past_the_length_and_to_later_steps(dtype):
    q, q_pe, latent, k_pe, up_k, *_ = absorbed(steps=3, dtype=dtype)
    q_latent = torch.einsum("bthd,hdr->bthr", q, up_k)
    lengths = torch.tensor([9, 12])
    out = latent_attention_step(q_latent, q_pe, latent, k_pe, lengths, scale=SCALE)
    assert out.dtype == dtype
    other, other_pe = latent.clone(), k_pe.clone()
    other[0, 9:], other_pe[0, 9:] = 1e30, -1e30
    assert torch.equal(latent_attention_step(q_latent, q_pe, other, other_pe, lengths, scale=SCALE), out)
    other[0, 8], other[1, 11] = 5.0, -5.0  # the last step's own entry
    q_latent[:, 2] += 1
    later = latent_attention_step(q_latent, q_pe, other, other_pe, lengths, scale=SCALE)
    assert torch.equal(later[:, :2], out[:, :2])
    assert not torch.equal(later[:, 2], out[:, 2])


def test_refuses_what_does_not_fit():
    q, k, v = make(batch=2)
    with pytest.raises(ValueError, match="do not fit"):
        causal_attention(q, k[:, 1:], v, scale=SCALE)
    with pytest.raises(ValueError, match="one row"):
        causal_attention(q, k, v, scale=SCALE, cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(ValueError, match="rise from 0"):
        causal_attention(q[:1], k[:1], v[:1], scale=SCALE, cu_seqlens=torch.tensor([0, 5, 8]))
