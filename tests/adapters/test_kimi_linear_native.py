"""The Kimi-Linear form in transformers' own class: released weights and ours, logits, cache, greedy text; no remote code."""

from __future__ import annotations

import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from adapters.forms import FLAT, random_model, tokens
from hub.golden import GOLDEN, arrays
from torch import Tensor

import atoll
from atoll import cli, train
from atoll.config import UserError, load_config
from atoll.evals.parity import Reference, compare, judge_greedy
from atoll.evals.peers import transformers as peer
from atoll.exchange import describe
from atoll.hub import export

pytest.importorskip("transformers")
ATOL, TIE = 1e-4, 1e-5
FORMS = {
    "as released": {},
    "low-rank query": {"q_lora_rank": 24},
    "two dense layers": {"first_k_dense_replace": 2},
    "router not renormalised": {"moe_renormalize": False},
    "other layer lists": {"full_attn_layers": (2, 6)},
}


def engine(folder):
    """transformers' model of a folder, in float32, with nothing missing and nothing left over."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert type(model).__name__ == "KimiLinearForCausalLM"
    assert type(model).__module__.startswith("transformers.models.kimi_linear")
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@torch.no_grad()
def step_by_step(model, ids: Tensor, prefill: int) -> Tensor:
    """Its logits on its cache: a prefill, then single tokens."""
    out = model(ids[:, :prefill], use_cache=True)
    parts, cache = [out.logits], out.past_key_values
    for t in range(prefill, ids.shape[1]):
        out = model(ids[:, t : t + 1], cache=cache, use_cache=True)
        parts.append(out.logits)
    return torch.cat(parts, 1)


def check(ours, folder, ids: Tensor, prompt: Tensor) -> None:
    model = engine(folder)
    with torch.no_grad():
        whole = model(ids).logits
    for theirs in (whole, step_by_step(model, ids, 5)):
        report = compare(ours, Reference(ids, theirs, name="transformers"), atol=ATOL, tie=TIE)
        assert report["resolved"], report
        assert report["after"]["kl_max"] <= 1e-6
    mine = ours.generate(prompt, 64, temperature=0)[0]
    theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, do_sample=False, eos_token_id=-1)[0]
    verdict = judge_greedy(ours, mine, theirs, lambda x: model(x).logits.detach(), ATOL)
    assert verdict["verdict"] in ("equal", "near tie of logits", "near tie of experts"), verdict


@pytest.mark.parametrize("form", FORMS)
def test_every_form_the_class_has(tmp_path, form):
    m = random_model(**{**FLAT, **FORMS[form]})
    export.save(m, tmp_path / "a", shard_bytes=100_000)
    check(m, tmp_path / "a", tokens(2, 70), tokens(1, 12))


def test_the_golden_checkpoint():
    """As released, and through an import of ours."""
    ids = arrays("kimi_linear_tiny", "io")["input_ids"]
    check(atoll.load(GOLDEN / "kimi_linear_tiny"), GOLDEN / "kimi_linear_tiny", ids, ids[:1, :20])


def test_an_imported_folder_is_as_good(tmp_path):
    assert cli.main(["import", str(GOLDEN / "kimi_linear_tiny"), str(tmp_path / "a"), "--shard-bytes", "300000"]) == 0
    ids = arrays("kimi_linear_tiny", "io")["input_ids"]
    with torch.no_grad():
        assert torch.equal(engine(tmp_path / "a")(ids).logits, engine(GOLDEN / "kimi_linear_tiny")(ids).logits)


def test_the_biased_router_is_not_in_transformers(tmp_path):
    """The class computes the unbiased convention from either folder, as `engines` says."""
    m, ids = random_model(**FLAT, router_weights="biased"), tokens(2, 20)
    export.save(m, tmp_path / "a")
    theirs = Reference(ids, peer(tmp_path / "a")(ids))
    assert compare(atoll.load(tmp_path / "a", router_weights="unbiased"), theirs, atol=ATOL, tie=TIE)["resolved"]
    assert not compare(m, theirs, atol=1e-2, tie=TIE)["resolved"]


def test_the_nested_form_is_refused_as_we_say(tmp_path):
    """Without the code that Atoll writes; with it, `test_remote_folders.py`."""
    folder = export.save(random_model(), tmp_path / "a")
    tree = json.loads((folder / "config.json").read_text())
    del tree["auto_map"]
    (folder / "config.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match="transformers refuses it") as caught:
        peer(tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_quantised_experts_are_refused_as_we_say(tmp_path):
    export.save(random_model(**FLAT, quantization="mxfp4", moe_intermediate_size=32), tmp_path / "a")
    assert "does not read quantised experts" in "; ".join(describe(tmp_path / "a")["engines"]["transformers"])
    with pytest.raises(UserError, match="transformers refuses it") as caught:
        peer(tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_without_full_attention_only_whole_rows_as_we_say(tmp_path):
    m, ids = random_model(**FLAT, full_attn_layers=()), tokens(2, 20)
    export.save(m, tmp_path / "a")
    assert "only use_cache=False works" in "; ".join(describe(tmp_path / "a")["engines"]["transformers"])
    with torch.no_grad():
        theirs = Reference(ids, engine(tmp_path / "a")(ids, use_cache=False).logits)
    assert compare(m, theirs, atol=ATOL, tie=TIE)["resolved"]
    with pytest.raises(ValueError, match="get_seq_length"):
        engine(tmp_path / "a")(ids, use_cache=True)


def test_a_trained_run_of_the_family(tmp_path, capsys):
    """The preset kimi-linear-tiny, briefly trained, exported and checked by the verb."""
    changes = {
        "data.source": str(GOLDEN.parents[1] / "src"), "data.suffixes": ".py", "data.heldout": 0.1, "data.cache": str(tmp_path / "cache"),
        "stages.0.length": 64, "stages.0.batch": 4, "stages.1.length": 128, "stages.1.batch": 2, "train.steps": 12, "train.threads": 1,
        "train.evaluate": False, "train.report": False, "train.sample_every": 100, "train.validate_tokens": 256,
    }  # fmt: skip
    run = train.run(load_config("kimi-linear-tiny", changes), tmp_path / "run")
    capsys.readouterr()
    assert cli.main(["export", str(run), str(tmp_path / "out"), "--dtype", "float32", "--check", "transformers"]) == 0
    assert "agrees within 0.001" in capsys.readouterr().out
    check(atoll.load(tmp_path / "out"), tmp_path / "out", tokens(1, 70, 4096), tokens(1, 12, 4096))
