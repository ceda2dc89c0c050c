import pytest
import torch
from torch.nn import functional as F

from atoll.ops.loss import linear_cross_entropy, token_logprobs


def make(tokens=57, width=6, vocab=11, dtype=torch.float64, ignored=0.3):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = -100
    return hidden, weight, labels


def outcome(f, hidden, weight, labels, **options):
    loss, count = f(hidden, weight, labels, **options)
    return [loss, count, *torch.autograd.grad(loss / count, [hidden, weight])]


def plain(hidden, weight, labels):
    logits = hidden.to(torch.promote_types(hidden.dtype, torch.float32)) @ weight.to(torch.promote_types(weight.dtype, torch.float32)).T
    return F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()


@pytest.mark.parametrize("chunk", [1, 7, 57, 2048])
def test_equals_the_plain_loss_in_float64(chunk):
    arguments = make()
    for ours, true in zip(outcome(linear_cross_entropy, *arguments, chunk=chunk), outcome(plain, *arguments), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_loss_in_float32(dtype):
    arguments = make(tokens=300, width=32, vocab=500, dtype=dtype)
    ours, true = outcome(linear_cross_entropy, *arguments, chunk=64), outcome(plain, *arguments)
    assert ours[0].dtype == torch.float32
    assert [g.dtype for g in ours[2:]] == [dtype, dtype]
    torch.testing.assert_close(ours[0], true[0], rtol=2e-6, atol=0)
    for a, b in zip(ours[2:], true[2:], strict=True):
        assert (a.double() - b.double()).norm() <= {torch.float32: 1e-6, torch.bfloat16: 5e-3}[dtype] * b.double().norm()


def test_mixed_dtypes_keep_each_ones_own():
    hidden, weight, labels = make(dtype=torch.float32)
    hidden = hidden.detach().bfloat16().requires_grad_()
    loss, _, d_hidden, d_weight = outcome(linear_cross_entropy, hidden, weight, labels)
    assert (loss.dtype, d_hidden.dtype, d_weight.dtype) == (torch.float32, torch.bfloat16, torch.float32)


def test_batched_shapes_frozen_weight_and_gradient_scale():
    hidden, weight, labels = make(tokens=60)
    flat = linear_cross_entropy(hidden, weight, labels)
    batched = linear_cross_entropy(hidden.view(3, 20, -1), weight, labels.view(3, 20))
    assert torch.equal(flat[0], batched[0])
    (once,) = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), labels)[0], hidden)
    (third,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels)[0] / 3, hidden)
    torch.testing.assert_close(third * 3, once, rtol=1e-12, atol=0)


def test_everything_ignored_is_zero_with_zero_gradients():
    hidden, weight, labels = make()
    loss, count = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    assert loss == 0
    assert count == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, [hidden, weight]))


def test_large_logits_stay_finite_and_exact():
    hidden, weight, labels = make(dtype=torch.float32)
    loss, _ = linear_cross_entropy(hidden * 1e4, weight, labels)
    true, _ = plain(hidden.double() * 1e4, weight.double(), labels)
    torch.testing.assert_close(loss.double(), true, rtol=1e-5, atol=0)


def test_no_gradient_asked_none_computed():
    hidden, weight, labels = make()
    with torch.no_grad():
        loss, _ = linear_cross_entropy(hidden, weight, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(hidden, weight, labels)[0].detach())


def test_token_logprobs_sum_to_the_loss_and_are_bitwise_causal():
    hidden, weight, labels = make(tokens=300, width=32, vocab=64, dtype=torch.float32)
    logp = token_logprobs(hidden, weight, labels, chunk=64)
    assert logp.dtype == torch.float32
    assert not logp.requires_grad
    assert (logp[labels == -100] == 0).all()
    torch.testing.assert_close(-logp.sum(), linear_cross_entropy(hidden, weight, labels)[0])
    for t in (1, 64, 150, 299):
        changed = torch.cat([hidden[:t], 2 * hidden[t:] + 1])
        later = token_logprobs(changed, weight, torch.cat([labels[:t], labels[t:].flip(0)]), chunk=64)
        assert torch.equal(later[:t], logp[:t])


def test_same_bits_on_every_run_on_two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        arguments = make(tokens=1500, width=64, vocab=800, dtype=torch.float32)
        first = outcome(linear_cross_entropy, *arguments, chunk=512)
        for _ in range(4):
            assert all(torch.equal(a, b) for a, b in zip(outcome(linear_cross_entropy, *arguments, chunk=512), first, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_refuses_shapes():
    hidden, weight, labels = make()
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden, weight, labels[:-1])
    with pytest.raises(ValueError, match="do not fit"):
        token_logprobs(hidden, weight[:, :-1], labels)
