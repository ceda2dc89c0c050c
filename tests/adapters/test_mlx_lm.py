"""What Atoll writes, in mlx-lm: strict load, logits of whole sequences and token by token, greedy text. float32 on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adapters.forms import FLAT, NESTED, random_model, tokens
from hub.golden import GOLDEN, arrays
from torch import Tensor

import atoll
from atoll import cli, train
from atoll.config import UserError, load_config
from atoll.evals.parity import Reference, compare, judge_greedy
from atoll.evals.peers import mlx_lm
from atoll.hub import export

mx = pytest.importorskip("mlx.core")
ATOL = 1e-4  # float32 logits of order 1 to 5
TIE = 1e-5  # two float32 implementations' router scores differ by some 1e-6


@pytest.fixture(autouse=True, scope="module")
def _on_the_cpu():
    mx.set_default_device(mx.cpu)


def engine(folder):
    """mlx-lm's own model of a folder, in float32."""
    from mlx_lm.utils import load_model

    model, _ = load_model(folder, strict=True)
    model.set_dtype(mx.float32)
    return model


def to_torch(array) -> Tensor:
    return torch.from_numpy(np.array(array.astype(mx.float32)))


def step_by_step(model, ids: Tensor, prefill: int) -> Tensor:
    """mlx-lm's logits on its cache: a prefill, then single tokens."""
    cache = model.make_cache()
    parts = [model(mx.array(ids[:, :prefill].numpy()), cache=cache)]
    parts += [model(mx.array(ids[:, t : t + 1].numpy()), cache=cache) for t in range(prefill, ids.shape[1])]
    return torch.cat([to_torch(p) for p in parts], 1)


def greedy(model, prompt: Tensor, count: int) -> Tensor:
    """mlx-lm's greedy continuation of ids [1,T], ids [T+count]."""
    cache, ids = model.make_cache(), prompt[0].tolist()
    logits = model(mx.array(prompt.numpy()), cache=cache)
    for _ in range(count):
        ids.append(int(mx.argmax(logits[0, -1]).item()))
        logits = model(mx.array([[ids[-1]]]), cache=cache)
    return torch.tensor(ids)


def check_logits(ours, folder, ids: Tensor, atol: float = ATOL) -> None:
    """Whole sequences and token by token: equal within `atol`, flips of near-tied experts excepted, which the tool has to find."""
    model = engine(folder)
    for theirs in (to_torch(model(mx.array(ids.numpy()))), step_by_step(model, ids, 5)):
        report = compare(ours, Reference(ids, theirs, name="mlx-lm"), atol=atol, tie=TIE)
        assert report["resolved"], report
        assert report["after"]["max_abs"] <= atol
        assert report["after"]["kl_max"] <= 1e-6


def check_greedy(ours, folder, prompt: Tensor, count: int = 64) -> None:
    model = engine(folder)
    mine = ours.generate(prompt, count, temperature=0)[0]
    verdict = judge_greedy(ours, mine, greedy(model, prompt, count), lambda ids: to_torch(model(mx.array(ids.numpy()))), ATOL)
    assert verdict["verdict"] in ("equal", "near tie of logits", "near tie of experts"), verdict


@pytest.mark.parametrize("form", NESTED)
def test_every_nested_form(tmp_path, form):
    m = random_model(**NESTED[form])
    export.save(m, tmp_path / "a", shard_bytes=100_000)
    check_logits(m, tmp_path / "a", tokens(2, 40))


@pytest.mark.parametrize("form", ["blueprint", "softplus decay", "all the older choices"])
def test_greedy_text_of_random_models(tmp_path, form):
    m = random_model(seed=5, **NESTED[form])
    export.save(m, tmp_path / "a")
    check_greedy(m, tmp_path / "a", tokens(1, 12))


def test_the_flat_form_in_its_kimi_linear(tmp_path):
    """mlx-lm's class has rms_norm_eps in the latent norm; a model with that epsilon there is the same to it."""
    m = random_model(**FLAT, latent_norm_eps=1e-5)
    export.save(m, tmp_path / "a")
    check_logits(m, tmp_path / "a", tokens(2, 40))
    check_greedy(m, tmp_path / "a", tokens(1, 12))


def test_the_biased_router_is_not_in_mlx_lm(tmp_path):
    """What `engines` says of it is so: mlx-lm computes the unbiased convention from either folder."""
    m = random_model(router_weights="biased")
    export.save(m, tmp_path / "a")
    check_logits(atoll.load(tmp_path / "a", router_weights="unbiased"), tmp_path / "a", tokens(2, 20))
    ids = tokens(2, 20)
    assert not compare(m.eval(), Reference(ids, mlx_lm(tmp_path / "a")(ids)), atol=1e-2, tie=TIE)["resolved"]


def test_the_golden_checkpoint():
    ids = arrays("k3_tiny", "io")["input_ids"]
    check_logits(atoll.load(GOLDEN / "k3_tiny"), GOLDEN / "k3_tiny", ids, atol=2e-4)  # logits up to 7 in size
    check_greedy(atoll.load(GOLDEN / "k3_tiny"), GOLDEN / "k3_tiny", ids[:1, :20])


@pytest.mark.parametrize("change", [{"residual": "full"}, {"hidden_act": "silu", "residual": "plain"}])
def test_what_it_refuses_is_what_we_say_it_refuses(tmp_path, change):
    from atoll.exchange import describe

    export.save(random_model(**change), tmp_path / "a")
    assert describe(tmp_path / "a")["engines"]["mlx-lm"]
    with pytest.raises(UserError, match="mlx-lm refuses it"):
        mlx_lm(tmp_path / "a")


# ---------------------------------------------------------------- a run of tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The preset tiny, all 896 experts of it, some steps into training on this package's own source."""
    folder = tmp_path_factory.mktemp("tiny")
    changes = {
        "data.source": str(GOLDEN.parents[1] / "src"), "data.suffixes": ".py", "data.heldout": 0.1, "data.cache": str(folder / "cache"),
        "stages.0.length": 64, "stages.0.batch": 4, "stages.1.length": 128, "stages.1.batch": 2, "train.steps": 12, "train.threads": 1,
        "train.evaluate": False, "train.report": False, "train.sample_every": 100, "train.validate_tokens": 256,
    }  # fmt: skip
    return train.run(load_config("tiny", changes), folder / "run")


def test_a_tiny_run_in_mlx_lm(run, tmp_path):
    """`atoll export RUN FOLDER --dtype float32`: strict load, logits, 64 greedy tokens of text."""
    from atoll.hub.load import load_tokenizer

    assert cli.main(["export", str(run), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    m, tokenizer = atoll.load(tmp_path / "out"), load_tokenizer(tmp_path / "out")
    text = 'def parse(line):\n    """Split a line into its words."""\n    return [word for word in line.split() if word]\n'
    ids = torch.tensor([tokenizer.encode(text)])
    check_logits(m, tmp_path / "out", ids)
    check_greedy(m, tmp_path / "out", ids[:, :16])


def test_the_tokenizer_reads_alike(run):
    from mlx_lm.utils import load_tokenizer as theirs

    from atoll.hub.load import load_tokenizer

    ours, text = load_tokenizer(run / "model"), "def f(x):\n\treturn  x+1  # é中😀\n"
    there = theirs(run / "model")
    assert there.encode(text, add_special_tokens=False) == ours.encode(text)
    assert there.decode(ours.encode(text)) == text
    assert there.eos_token_id == atoll.load(run, device="cpu").config.eos_token_id


def test_the_check_of_the_verb(run, tmp_path, capsys):
    assert cli.main(["export", str(run), str(tmp_path / "out"), "--dtype", "bfloat16", "--check", "mlx-lm"]) == 0
    out = capsys.readouterr().out
    assert "against mlx-lm, 128 tokens in float32" in out
    assert "agrees within 0.001" in out or "none with these near ties reversed" in out
