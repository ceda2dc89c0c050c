"""KDA inside torch.compile: one graph whatever the boundaries, gradients, and the checks that torch.library has for registrations."""

import os

import pytest
import torch

CARD = torch.cuda.is_available()
if not CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported
DEVICE = "cuda" if CARD else "cpu"

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from test_kda import random_inputs  # noqa: E402

from atoll.ops.kda import kda, kernel_report, table  # noqa: E402


def small(length=20, width=16, seed=0):
    return [x.to(DEVICE) for x in random_inputs(1, length, heads=1, width=width, value=16, dtype=torch.float32, seed=seed).values()]


def leaves(tensors):
    return [x.clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("packed", ["whole", "host", "device"])
@pytest.mark.parametrize("path", ["triton", "chunk"])
def test_one_graph_with_gradients(path, packed, monkeypatch):
    if packed == "device":
        monkeypatch.setattr(table, "known", lambda edges: False)
    edges = None if packed == "whole" else torch.tensor([0, 7, 7, 20])
    state = torch.randn(1 if edges is None else 3, 1, 16, 16, device=DEVICE)

    def layer(state, edges, *inputs):
        o, final = kda(*inputs, initial_state=state, output_final_state=True, cu_seqlens=edges, backend=path)
        return o.square().sum() + (final * final).sum()

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if CARD else "aot_eager")
    kernel_report(clear=True)
    results = []
    for run in (compiled, layer):
        given = leaves([state, *small()])
        loss = run(given[0], edges, *given[1:])
        results.append([loss.detach(), *torch.autograd.grad(loss, given)])
    assert kernel_report() == {path: 2}
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_new_boundaries_need_no_new_graph():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(edges, *inputs):
        return kda(*inputs, cu_seqlens=edges, backend="triton")[0]

    torch.compiler.reset()
    compiled, inputs = torch.compile(layer, fullgraph=True, backend=counter), small()
    for edges in ([0, 7, 20], [0, 0, 20], [0, 19, 20]):
        edges = torch.tensor(edges)
        assert torch.equal(compiled(edges, *inputs), layer(edges, *inputs))
    assert counter.frame_count == 1


def test_a_graph_in_evaluation_mode():
    torch.compiler.reset()
    compiled = torch.compile(lambda *x: kda(*x, backend="triton")[0], fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*small()), kda(*small(), backend="triton")[0])


@pytest.mark.parametrize(("edges", "held"), [(None, False), ([0, 7, 7, 20], True)])
def test_registrations_pass_the_checks_of_torch_library(edges, held):
    documents = 1 if edges is None else len(edges) - 1
    state = torch.randn(documents, 1, 16, 16, device=DEVICE).requires_grad_() if held else None
    edges = None if edges is None else torch.tensor(edges)
    inputs = leaves(small())
    torch.library.opcheck(torch.ops.atoll.kda.default, (*inputs, state, edges, -5.0, 0.3, held, None, None))
    for bound in (-5.0, None):
        torch.library.opcheck(torch.ops.atoll.kda_chunk.default, (*inputs, state, edges, bound, 0.3, ""))
    up, last = torch.randn_like(inputs[2]), torch.randn(documents, 1, 16, 16, device=DEVICE)
    plain = [x.detach() for x in inputs]
    state = None if state is None else state.detach()
    checks = ("test_schema", "test_faketensor")  # it has no gradient of its own
    torch.library.opcheck(
        torch.ops.atoll.kda_backward.default, (up, last, *plain, up, state, edges, -5.0, 0.3, None, None), test_utils=checks
    )
    torch.library.opcheck(torch.ops.atoll.kda_chunk_backward.default, (up, last, *plain, state, edges, -5.0, 0.3), test_utils=checks)


def test_no_gradient_of_the_gradient():
    inputs = leaves(small())
    (grad,) = torch.autograd.grad(kda(*inputs, backend="triton")[0].sum(), inputs[2:3], create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


@pytest.mark.parametrize("path", ["triton", "chunk"])
def test_no_token_at_all(path):
    state = torch.randn(2, 1, 16, 16, device=DEVICE, requires_grad=True)
    edges, inputs = torch.tensor([0, 0, 0]), leaves(small(0))
    torch.compiler.reset()
    run = torch.compile(
        lambda s, *x: kda(*x, initial_state=s, output_final_state=True, cu_seqlens=edges, backend=path), fullgraph=True, backend="aot_eager"
    )
    o, final = run(state, *inputs)
    assert o.shape == (1, 0, 1, 16)
    assert torch.equal(final, state)
    (grad,) = torch.autograd.grad(final.square().sum(), state)
    assert torch.equal(grad, 2 * state)
