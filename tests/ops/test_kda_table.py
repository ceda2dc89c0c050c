"""Chunks and segments of packed documents: the tables of host and device, and the scans over documents cut in pieces."""

import itertools
import os

import pytest
import torch

CARD = torch.cuda.is_available()
if not CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported
DEVICE = "cuda" if CARD else "cpu"

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from test_kda import random_inputs  # noqa: E402
from test_kda_triton import assert_close, both  # noqa: E402

from atoll.ops.kda import table  # noqa: E402
from atoll.ops.kda.triton_path import kda_triton  # noqa: E402


def blind(monkeypatch):
    """Boundaries count as unknown to the host, as they are on a card."""
    monkeypatch.setattr(table, "known", lambda edges: False)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 16])
@pytest.mark.parametrize("seed", range(8))
def test_device_table_is_the_host_table_and_empty_slots(size, seed):
    draw = torch.Generator().manual_seed(seed)
    documents = (1, 2, 5, 40, 129, 200, 300, 1)[seed]
    most = (1, 700, 200, 90, 140, 3, 900, 9000)[seed]
    lengths = torch.randint(0, most + 1, (documents,), generator=draw) * torch.randint(0, 2, (documents,), generator=draw)
    edges = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    total = int(edges[-1])
    host = table.host_table(tuple(edges.tolist()), torch.device("cpu"), size)
    for dtype in (torch.int64, torch.int32):
        made = table.device_table(edges.to(DEVICE, dtype), total, size)
        assert (made.chunks, made.documents) == (total // 64 + documents, documents)
        assert host.chunks <= made.chunks
        assert host.segments <= made.segments
        assert made.starts[: host.chunks].tolist() == host.starts.tolist()
        assert made.counts.tolist() == host.counts.tolist() + [0] * (made.chunks - host.chunks)
        assert made.first.tolist() == host.first.tolist() + [host.chunks] * (made.segments - host.segments)
        assert made.owner.tolist() == host.owner.tolist() + [-1] * (made.segments - host.segments)
        assert made.first_segment.tolist() == host.first_segment.tolist()


def test_boundaries_that_do_not_fit_touch_no_other_memory():
    for edges in ([0, 500, 90], [-7, 3, 1 << 40], [5, 5, 5], [60, 0, 100]):
        made = table.device_table(torch.tensor(edges, device=DEVICE), 100, 1)
        used = made.counts > 0
        assert int(made.starts[used].min() if used.any() else 0) >= 0
        assert int((made.starts + made.counts)[used].max() if used.any() else 0) <= 100
        assert int(made.first.min()) >= 0
        assert int(made.first.max()) <= made.chunks
        assert int(made.first_segment.max()) <= made.segments


def test_the_rule_for_segments():
    assert table.segment_size(8192, 1, 96) == 0  # heads fill the card
    assert table.segment_size(524288, 1, 4) == 256
    assert table.segment_size(65536, 1, 16) == 128
    assert table.segment_size(524288, 600, 4) == 0  # documents do
    for tokens, documents, heads in itertools.product((1000, 8192, 300000), (1, 3, 60), (1, 4, 14, 40)):
        size = table.segment_size(tokens, documents, heads)
        assert size % 16 == 0
        if size:
            pieces = tokens // 64 // size + documents
            assert pieces * heads <= 132 + 528


def test_host_table_cuts_long_documents_only():
    made = table.host_table((0, 64 * 7, 64 * 7, 64 * 12, 64 * 12 + 1), torch.device("cpu"), 2)
    assert made.first.tolist() == [0, 2, 4, 6, 7, 7, 12, 13]  # 7 chunks in pieces of 2; 5 are fewer than three pieces
    assert made.owner.tolist() == [0, 0, 0, 0, 1, 2, 3]
    assert made.first_segment.tolist() == [0, 4, 5, 6, 7]
    assert made.cut
    assert not table.host_table((0, 64 * 5, 64 * 10), torch.device("cpu"), 2).cut


DOCUMENTS = [0, 0, 200, 200, 463, 470]  # 4 chunks, 5 chunks, 1 chunk, and two documents of no token


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_segments_equal_the_recurrence(size, where, monkeypatch):
    """Outputs, states and all gradients, with states given, against float64; the two long documents are cut unlike one another."""
    if where == "device":
        blind(monkeypatch)
    inputs = random_inputs(1, 470, heads=1, width=16, value=16, seed=size)
    inputs["g"] = inputs["g"] - 2.0  # slow decay: a state lasts over segments
    state = torch.randn(5, 1, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_close(*both(inputs, DOCUMENTS, state, segment=size))


def test_segments_without_states_and_of_a_batch():
    assert_close(*both(random_inputs(2, 200, heads=1, width=16, value=16), None, None, segment=1))


def values(inputs, edges, state, **options):
    leaves = [x.to(DEVICE).requires_grad_() for x in inputs]
    start = state.to(DEVICE).requires_grad_()
    o, final = kda_triton(*leaves, -5.0, 0.3, start, edges, **options)
    draw = torch.Generator().manual_seed(3)
    ups = [torch.randn(x.shape, generator=draw).to(x) for x in (o, final)]
    return [o.detach(), final.detach(), *torch.autograd.grad((o, final), [*leaves, start], ups)]


@pytest.mark.parametrize("size", [0, 1])
def test_device_tables_give_the_same_bits(size, monkeypatch):
    inputs = list(random_inputs(1, 250, heads=1, width=16, value=16, dtype=torch.float32).values())
    edges, state = torch.tensor([0, 200, 200, 250]), torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    known = values(inputs, edges, state, segment=size)
    blind(monkeypatch)
    unknown = values(inputs, edges, state, segment=size)
    for i, (a, b) in enumerate(zip(known, unknown, strict=True)):
        if i in (7, 8):  # A_log, dt_bias: sums over all slots, of which there are more
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(a, b)


def test_packed_equals_separate_to_the_bit_within_a_class():
    """A class: the same settings, and each document cut at the same chunks. A document cut elsewhere has other bits."""
    inputs = random_inputs(1, 340, heads=1, width=16, value=16, dtype=torch.float32)
    inputs["g"] = inputs["g"] - 2.0
    edges = [0, 250, 250, 340]
    state = torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(1))

    def run(a, b, state, edges, size):
        part = [x[:, a:b].to(DEVICE).requires_grad_() if x.dim() > 2 else x.to(DEVICE) for x in inputs.values()]
        start = state.to(DEVICE).requires_grad_()
        o, final = kda_triton(*part, -5.0, 0.3, start, edges, segment=size)
        grads = torch.autograd.grad(o.square().sum() + final.sum(), [*part[:5], start])
        return [o, *grads[:5], final, grads[5]]

    for size in (0, 1):
        packed = run(0, 340, state, edges, size)
        for n, (a, b) in enumerate(itertools.pairwise(edges)):
            if a == b:
                assert torch.equal(packed[6][n].cpu(), state[n])
                continue
            alone = run(a, b, state[n : n + 1], None, size)
            for x, y in zip(packed[:6], alone[:6], strict=True):
                assert torch.equal(x[:, a:b], y)
            for x, y in zip(packed[6:], alone[6:], strict=True):
                assert torch.equal(x[n : n + 1], y)
    cut, whole = run(0, 250, state[:1], None, 1), run(0, 250, state[:1], None, 0)
    assert not torch.equal(cut[0], whole[0])
    torch.testing.assert_close(cut[0], whole[0], rtol=1e-4, atol=1e-5)


def test_wrong_boundaries_are_refused_where_the_host_knows_them():
    inputs = [x.to(DEVICE) for x in random_inputs(1, 8, heads=1, width=16, value=16, dtype=torch.float32).values()]
    for edges in ([0, 7], [0, 5, 3, 8], [1, 8]):
        with pytest.raises(ValueError, match="cu_seqlens must rise"):
            kda_triton(*inputs, -5.0, 0.3, None, torch.tensor(edges))
    with pytest.raises(ValueError, match="1 entries"):
        table.device_table(torch.zeros(1, dtype=torch.int64, device=DEVICE), 8, 0)
