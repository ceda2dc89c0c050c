"""The translation behind `fla_shim.py`, against the recurrence that fla's arguments mean, in float64. Needs no card, no fla."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from fla_shim import Report, translated


def meant(q, k, v, g, beta, A_log, dt_bias, scale, state, cu_seqlens, bound, norm, gate, sigmoid, v_first):
    """o and the final states that fla's documentation promises, values by value heads."""
    groups = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    if norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if gate:
        raw, rate = g + dt_bias.view(g.shape[2:]), A_log.reshape(-1, 1).exp()
        g = -rate * F.softplus(raw) if bound is None else bound * torch.sigmoid(rate * raw)
    beta = beta.sigmoid() if sigmoid else beta
    spans = [(0, q.shape[1])] * q.shape[0] if cu_seqlens is None else list(itertools.pairwise(cu_seqlens.tolist()))
    rows, finals = [], []
    for n, (start, stop) in enumerate(spans):
        b, S, outs = (n if cu_seqlens is None else 0), state[n].mT if v_first else state[n], []
        for t in range(start, stop):
            S = g[b, t].exp()[..., None] * S
            S = S + (beta[b, t][:, None] * k[b, t])[..., None] * (v[b, t] - (S * k[b, t][..., None]).sum(-2))[:, None, :]
            outs.append((S * q[b, t][..., None]).sum(-2) * scale)
        rows.append(torch.stack(outs) if outs else v[b, :0])
        finals.append(S.mT if v_first else S)
    return (torch.stack(rows) if cu_seqlens is None else torch.cat(rows)[None]), torch.stack(finals)


CASES = {
    "decay and beta given": {},
    "steep decay given": {"steep": True},
    "decay given, now and then none": {"mask": True},
    "raw gate": {"gate": True, "bound": -5.0},
    "raw unbounded gate": {"gate": True},
    "normalised and sigmoid inside": {"norm": True, "sigmoid": True, "gate": True, "bound": -5.0},
    "normalised inside, beta given": {"norm": True, "v_first": True},
    "grouped values, packed, values first": {"groups": 2, "packed": True, "v_first": True},
}


@pytest.mark.parametrize("name", CASES)
def test_translation_is_exact_with_gradients(name):
    flags = {"gate": False, "bound": None, "norm": False, "sigmoid": False, "v_first": False, **CASES[name]}
    groups, packed, steep, mask = (flags.pop(key, None) for key in ("groups", "packed", "steep", "mask"))
    draw = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    batch, length, heads, width, value = 1 if packed else 2, 20, 2, 12, 10
    every, documents = heads * (groups or 1), 3 if packed else batch
    q, k = (normal(batch, length, heads, width) for _ in range(2))
    if not flags["norm"]:
        q, k = 2 * q, k / k.norm(dim=-1, keepdim=True) * 0.9
    g = normal(batch, length, every, width)
    if not flags["gate"]:
        g = F.logsigmoid(g) * (20 if steep else 1)
        g = g * (torch.rand(g.shape, generator=draw) > 0.5) if mask else g
    beta = normal(batch, length, every) if flags["sigmoid"] else normal(batch, length, every).sigmoid()
    shape = (documents, every, value, width) if flags["v_first"] else (documents, every, width, value)
    tensors = [q, k, normal(batch, length, every, value), g, beta, 0.3 * normal(every), normal(every * width), normal(*shape)]
    cu = torch.tensor([0, 7, 7, 20]) if packed else None

    def theirs(q, k, v, g, beta, A_log, bias, state):
        options = {"A_log": A_log, "dt_bias": bias} if flags["gate"] else {}
        options |= {"use_qk_l2norm_in_kernel": flags["norm"], "use_gate_in_kernel": flags["gate"], "state_v_first": flags["v_first"]}
        options |= {"use_beta_sigmoid_in_kernel": flags["sigmoid"], "lower_bound": flags["bound"], "cu_seqlens": cu, "scale": 0.4}
        return translated(q, k, v, g, beta, initial_state=state, output_final_state=True, **options)

    def values(function, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        o, final = function(*leaves)
        up, last = (torch.randn(x.shape, generator=torch.Generator().manual_seed(5)) for x in (o, final))
        used = leaves if flags["gate"] else [*leaves[:5], leaves[7]]
        return o, final, *torch.autograd.grad((o * up).sum() + (final * last).sum(), used)

    got = values(theirs, torch.float32)
    plain = {key: flags[key] for key in ("bound", "norm", "gate", "sigmoid", "v_first")}
    expected = values(lambda q, k, v, g, b, A, bias, s: meant(q, k, v, g, b, A, bias, 0.4, s, cu, **plain), torch.float64)
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b).norm() < 2e-5 * b.norm()


def test_half_precision_and_the_legacy_name():
    tensors = [torch.rand(1, 5, 2, 8).half(), torch.rand(1, 5, 2, 8).half(), torch.rand(1, 5, 2, 8).half(), -torch.rand(1, 5, 2, 8)]
    o, final = translated(*tensors, torch.rand(1, 5, 2).half() * 0.9, use_qk_l2norm_in_kernel=True)
    assert o.dtype == torch.float16
    assert final is None
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        translated(*tensors, torch.rand(1, 5, 2), transpose_state_layout=True)
    with pytest.raises(ValueError, match="both"):
        translated(*tensors, torch.rand(1, 5, 2), transpose_state_layout=True, state_v_first=True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"allow_neg_eigval": True}, "negative eigenvalues"),
        ({"return_intermediate_states": True}, "states inside"),
        ({"chunk_size": 16}, "chunk_size"),
        ({"cp_context": object()}, "context parallelism"),
    ],
)
def test_what_the_op_does_not_have_is_skipped_by_name(options, reason):
    tensors = [torch.rand(1, 5, 2, 8) for _ in range(3)]
    with pytest.raises(pytest.skip.Exception, match=reason):
        translated(*tensors, -torch.rand(1, 5, 2, 8), torch.rand(1, 5, 2), **options)


def test_the_count_tells_cases_apart():
    report = Report()
    assert report.result() == {"passed": 0, "failed": [], "skipped": {}, "never call the op": {}, "paths": report.result()["paths"]}
