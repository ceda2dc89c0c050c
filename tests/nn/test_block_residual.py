"""Depth attention in a network: schedules that must agree, what is kept for the backward pass, and a network of one's own."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from atoll.config import load_config
from atoll.model import Model
from atoll.nn import BlockResidual, Stream
from atoll.ops.norm import rms_norm

WIDTH, DEPTH = 32, 10  # sublayers
MICRO = {
    "model.vocab_size": "64", "model.hidden_size": "32", "model.num_hidden_layers": "7", "model.attn_res_block_size": "2",
    "model.num_experts": "8", "model.num_experts_per_token": "2",
}  # fmt: skip


def model(residual="block", schedule="one-pass", seed=3):
    m = Model(load_config("tiny", {**MICRO, "model.residual": residual}).model, dtype=torch.float64)
    m.reset_parameters(seed)
    torch.manual_seed(seed)
    for name, p in m.named_parameters():
        if "_res_" in name:
            nn.init.normal_(p, 1.0 if "_norm" in name else 0.0, 0.3)
    m.language_model.model.schedule = schedule
    return m


def trained(m, ids):
    """Loss and every parameter's gradient."""
    routing = m(ids).routing
    out = m(ids, labels=ids, routing=routing)
    out.loss.backward()
    return [out.loss.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad for p in m.parameters())]


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, 64, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_phases_train_as_single_mixes_do(ids, checkpointing):
    expected = trained(model(), ids)
    m = model(schedule="two-phase").train()
    m.gradient_checkpointing = checkpointing
    for a, b in zip(trained(m, ids), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("schedule", ["one-pass", "two-phase"])
def test_decoding_step_by_step_equals_the_whole(ids, schedule):
    m = model(schedule=schedule).eval()
    with torch.no_grad():
        whole = m(ids)
        cache = m.new_cache(2)
        routed = [torch.cat([r.view(2, 24, -1)[:, :20].flatten(0, 1)]) for r in whole.routing]
        parts = [m(ids[:, :20], cache=cache, routing=routed).logits]
        for t in range(20, 24):
            routed = [r.view(2, 24, -1)[:, t] for r in whole.routing]
            parts.append(m(ids[:, t : t + 1], cache=cache, routing=routed).logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole.logits, rtol=1e-9, atol=1e-9)


def test_a_block_of_one_layer_is_not_the_full_mode_and_every_mode_differs(ids):
    with torch.no_grad():
        logits = {r: model(r).eval()(ids).logits for r in ("block", "full", "plain")}
    assert not torch.allclose(logits["block"], logits["full"])
    assert not torch.allclose(logits["block"], logits["plain"])


def test_number_of_rows_of_every_mix(ids):
    """Architecture of the release: with blocks of 2 layers the 7th layer's block is partial; layer 0's first mix is the embedding."""
    record = {}
    with torch.no_grad():
        model().eval()(ids, record=record)
    rows = {name: len(w) for name, w in record["depth_weights"]}
    assert rows == {
        "0.mlp": 2, "1.attention": 2, "1.mlp": 2, "2.attention": 2, "2.mlp": 3, "3.attention": 3, "3.mlp": 3, "4.attention": 3, "4.mlp": 4,
        "5.attention": 4, "5.mlp": 4, "6.attention": 4, "6.mlp": 5, "output": 5,
    }  # fmt: skip


# ---------------------------------------------------------------- a network of one's own


class Network(nn.Module):
    """Normed sublayers with a plain residual, or with depth attention in blocks of `block` sublayers."""

    def __init__(self, block, schedule="auto"):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.schedule = block, schedule
        self.norms = nn.ParameterList(torch.rand(WIDTH) for _ in range(DEPTH + 1))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
        self.residuals = nn.ModuleList(BlockResidual(WIDTH) for _ in range(DEPTH + 1))
        for r in self.residuals:
            nn.init.normal_(r.query.weight, std=0.3)

    def forward(self, x):
        stream = Stream((), x)
        for i in range(DEPTH + 1):
            if self.block is None:
                stream = stream.settle()
                h = rms_norm(stream.prefix, self.norms[i])
            else:
                if i % self.block == 0:
                    end = i + self.block if i + self.block < DEPTH else DEPTH + 1
                    stream = stream.close([r.reader() for r in self.residuals[i:end]], schedule=self.schedule)
                h, stream = self.residuals[i](stream, out_norm=self.norms[i])
            if i < DEPTH:
                stream = stream.add(self.layers[i](h))
        if stream.block is not None:
            stream.block.close()
        return h


def kept_bytes(net, x):
    """Bytes of all tensors that autograd keeps, parameters aside, each memory once."""
    storages, own = {}, {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        y = net(x)
    alive = sum(storages.values())
    y.sum().backward()
    return alive


@pytest.mark.parametrize("schedule", ["one-pass", "two-phase"])
@pytest.mark.parametrize("block", [1, 3, 4])
def test_keeps_what_the_plain_network_keeps(block, schedule):
    """Sums and bank are the inputs of the plain network's norms; scores, weights and mixes are made again."""
    x = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    plain = kept_bytes(Network(None), x)
    assert kept_bytes(Network(block, schedule), x) <= plain
    assert plain >= 2 * DEPTH * 50 * WIDTH * 4  # the norms' inputs and outputs were counted


@pytest.mark.parametrize("block", [2, 3, 4, 20])
def test_schedules_agree_in_a_network_of_ones_own(block):
    x = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(0))
    outcomes = []
    for schedule in ("one-pass", "two-phase"):
        net = Network(block, schedule)
        y = net(x)
        y.square().sum().backward()
        outcomes.append([y.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters())])
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, float(b.abs().max())))


def test_sublayer_outputs_are_added_once_whoever_reads():
    a, b, c = (torch.full((1, 2, 4), float(n)) for n in (1, 2, 4))
    stream = Stream((), a).add(b)
    assert torch.equal(stream.settle().prefix, a + b)
    assert torch.equal(stream.add(c).settle().prefix, a + b + c)
    closed = stream.add(c).close()
    assert torch.equal(closed.bank[0], a + b + c)
    assert closed.prefix is None
    assert torch.equal(closed.add(b).rows()[-1], b)


def test_gradients_can_be_taken_twice():
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    net = Network(4, "two-phase")
    y = net(x).square().sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


def test_the_example_of_the_docs_runs():
    text = (Path(__file__).parents[2] / "docs" / "residuals.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.S)
    assert code
    space = {}
    for part in code:
        exec(part, space)
    assert space["y"].shape == (2, 16, 64)
    without = {name for name, p in space["net"].named_parameters() if p.grad is None}
    assert without == {"residuals.0.norm.weight", "residuals.0.query.weight"}


def test_probes_over_depth_see_outputs_sums_and_gradients(ids):
    """The running sum starts anew with a block; gradients appear with the backward pass and change nothing."""
    m, record = model().train(), {}
    routing = m(ids).routing
    m(ids, labels=ids, routing=routing, record=record).loss.backward()
    with_probes = [p.grad.clone() for p in m.parameters() if p.grad is not None]
    for name, output, total in record["depth_rms"]:
        layer, part = name.split(".")
        starts = int(layer) % 2 == 0 and part == "attention"
        assert (output == total) == starts, name
    assert all(g > 0 for _, g in record["depth_gradients"])
    m.zero_grad()
    m(ids, labels=ids, routing=routing).loss.backward()
    without = [p.grad for p in m.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(without, with_probes, strict=True))
