"""Training what Atoll exported: gradient checkpointing, Trainer, TRL, LoRA; and back into Atoll."""

from __future__ import annotations

import sys

import pytest
import torch
from adapters.remote_models import FORMS, build, hugging, pair, tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoTokenizer, Trainer, TrainingArguments

from atoll.config import ModelConfig
from atoll.data.tokenizer import train_tokenizer
from atoll.hub import export
from atoll.model import load

IDS = tokens(2, 48)


def differs(a, b) -> float:
    return float((a.detach().double() - b.detach().double()).abs().max())


def step(model, ids=IDS):
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


# ---------------------------------------------------------------- gradient checkpointing


class SavedBytes:
    """Bytes that autograd keeps for the backward pass, each storage once, parameters aside."""

    def __init__(self, model) -> None:
        self.seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.kept, self.total = [], 0

    def pack(self, x):
        pointer = x.untyped_storage().data_ptr()
        if pointer not in self.seen:
            self.seen.add(pointer)
            self.kept.append(x)  # alive, so that no address is used twice
            self.total += x.untyped_storage().nbytes()
        return x

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda x: x)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.hooks.__exit__(*error)


def saved_bytes(model, ids) -> int:
    with SavedBytes(model) as saved:
        loss = model(ids, labels=ids).loss
    loss.backward()
    return saved.total


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", ["blueprint", "full residual", "legacy parts"])
def test_checkpointed_gradients_are_the_same(tmp_path, form, reentrant):
    _, theirs = pair(tmp_path / "m", **FORMS[form])
    theirs.train()
    loss, grads = step(theirs)
    theirs.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:  # the older kind passes gradients only through inputs that ask for one
        theirs.enable_input_require_grads()
    again, checkpointed = step(theirs)
    assert torch.equal(loss, again)
    for name, grad in grads.items():
        assert differs(grad, checkpointed[name]) < 1e-14, name


def test_checkpointing_keeps_less(tmp_path):
    _, theirs = pair(tmp_path / "m", torch.float32, num_hidden_layers=9, full_attn_layers=(4, 9))
    theirs.train()
    theirs.config.text_config.logits_with_loss = False
    ids = tokens(1, 256)
    before = saved_bytes(theirs, ids)
    theirs.gradient_checkpointing_enable()
    after = saved_bytes(theirs, ids)
    assert after < before / 5
    theirs.gradient_checkpointing_disable()
    assert saved_bytes(theirs, ids) == before


def test_recomputed_layers_keep_their_experts(tmp_path, monkeypatch):
    """The router chooses once a layer and step, even where a second choice would fall out otherwise."""
    _, theirs = pair(tmp_path / "m")
    theirs.train()
    _, grads = step(theirs)
    router = sys.modules[type(theirs).__module__].Router
    choose, calls = router.choose, []

    def fickle(self, scores):
        calls.append(self)
        ids = choose(self, scores)
        return ids if calls.count(self) == 1 else (ids + 1) % scores.shape[1]

    monkeypatch.setattr(router, "choose", fickle)
    theirs.gradient_checkpointing_enable()
    _, checkpointed = step(theirs)
    assert len(calls) == len(set(map(id, calls))) == 4
    for name, grad in grads.items():
        assert differs(grad, checkpointed[name]) < 1e-14, name


class Alive(TorchDispatchMode):
    """The largest tensor of at least float32 with a vocabulary's last dimension that was ever made."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.rows, self.seen = vocab, 0, WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.ndim and x.shape[-1] == self.vocab:
                self.rows = max(self.rows, x.numel() // self.vocab)
        return out


@pytest.mark.parametrize("logits", [True, False])
def test_float32_logits_of_a_long_row_never_exist_together(tmp_path, monkeypatch, logits):
    export.save(build(torch.bfloat16, vocab_size=313), tmp_path / "m")
    theirs = hugging(tmp_path / "m", torch.bfloat16).train()
    theirs.config.text_config.logits_with_loss = logits
    monkeypatch.setattr(sys.modules[type(theirs).__module__], "LOSS_ROWS", 20)
    ids = tokens(1, 200, vocab=313)
    with Alive(313) as alive:
        theirs(ids, labels=ids).loss.backward()
    assert alive.rows == 20


# ---------------------------------------------------------------- Trainer


def arguments(folder, **changes) -> TrainingArguments:
    options = {
        "max_steps": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_steps": 3,
        "disable_tqdm": True,
        "save_only_model": True,
        "seed": 0,
    }
    return TrainingArguments(output_dir=str(folder), **{**options, **changes})


def rows(count: int = 6) -> list[dict]:
    """One batch, again and again."""
    return [{"input_ids": ids, "labels": ids} for ids in IDS] * (count // 2)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_lowers_the_loss_and_atoll_reads_its_checkpoint(tmp_path, checkpointing):
    _, theirs = pair(tmp_path / "m", torch.float32)
    trainer = Trainer(theirs, arguments(tmp_path / "run", gradient_checkpointing=checkpointing), train_dataset=rows())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]
    back = load(tmp_path / "run" / "checkpoint-3")
    assert differs(back(IDS).logits, theirs.eval()(IDS).logits) < 1e-4
    metrics = trainer.evaluate(rows(2))
    assert abs(metrics["eval_loss"] - float(back(IDS, labels=IDS).loss)) < 1e-4
    prediction = trainer.predict(rows(2))
    assert prediction.predictions.shape == (2, 48, 320)


def test_trainer_counts_tokens_over_accumulated_batches(tmp_path):
    """Two batches of unlike length in one step give the gradient of their tokens' mean, not the mean of two means."""
    _, theirs = pair(tmp_path / "m")
    theirs.train()
    data = [{"input_ids": tokens(1, n, seed=n)[0], "labels": tokens(1, n, seed=n)[0]} for n in (40, 9)]
    grads = {}

    class Look(Trainer):
        def training_step(self, model, *args):
            out = super().training_step(model, *args)
            grads.update({name: p.grad.clone() for name, p in model.named_parameters()})
            return out

    options = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 1,
        "save_strategy": "no",
        "max_grad_norm": 0,
    }
    trainer = Look(theirs, arguments(tmp_path / "run", **options, learning_rate=0.0), train_dataset=data)
    trainer.train()
    theirs.zero_grad()
    losses = [theirs(row["input_ids"][None], labels=row["labels"][None], num_items_in_batch=39 + 8).loss for row in data]
    sum(losses).backward()
    for name, p in theirs.named_parameters():
        assert differs(p.grad, grads[name]) < 1e-9, name


# ---------------------------------------------------------------- TRL


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    """An exported model with its tokenizer."""
    folder = tmp_path_factory.mktemp("trl") / "m"
    ours = build(torch.float32)
    export.save(ours, folder, tokenizer=train_tokenizer(["def f(x): return x", "some text"] * 20, ModelConfig(vocab_size=320)))
    return folder


@pytest.mark.parametrize("padding_free", [False, True])
def test_trl_fine_tunes(tmp_path, chat_folder, padding_free):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    theirs, tokenizer = hugging(chat_folder, torch.float32), AutoTokenizer.from_pretrained(chat_folder)
    texts = ["def f(x): return x", "some text and some more", "x", "def g(): return some text"]
    config = SFTConfig(
        output_dir=str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=4, learning_rate=1e-2, lr_scheduler_type="constant",
        use_cpu=True, report_to=[], logging_steps=1, disable_tqdm=True, padding_free=padding_free, max_length=None, save_strategy="no",
        gradient_checkpointing=True, bf16=False,
    )  # fmt: skip
    batches = []
    theirs.base_model.register_forward_pre_hook(lambda _, args, kwargs: batches.append(kwargs), with_kwargs=True)
    trainer = SFTTrainer(theirs, args=config, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[1] < losses[0]
    assert all(("position_ids" in kwargs) == padding_free for kwargs in batches)
    fresh = hugging(chat_folder, torch.float32).eval()
    total, count = 0.0, 0
    for text in texts:  # the first loss is the mean over the tokens of all texts, each read on its own
        ids = torch.tensor(tokenizer(text + tokenizer.eos_token)["input_ids"])[None]
        if ids.shape[1] > 1:
            total, count = total + float(fresh(ids, labels=ids).loss) * (ids.shape[1] - 1), count + ids.shape[1] - 1
    assert abs(losses[0] - total / count) < 1e-3


# ---------------------------------------------------------------- LoRA

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj"]
EXPERTS = ["experts.w1", "experts.w3", "experts.w2"]


def adapted(theirs, **options):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=ATTENTION, target_parameters=EXPERTS, lora_dropout=0.0, **options)
    return get_peft_model(theirs, config)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_reaches_attention_and_experts(tmp_path, checkpointing):
    ours, theirs = pair(tmp_path / "m")
    before = theirs(IDS).logits.detach()
    model = adapted(theirs).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    assert differs(model(IDS).logits, before) < 1e-12
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for part in [*(f".{x}." for x in ATTENTION), ".experts."]:
        assert any(part in name for name in trained), part
    for name, p in trained.items():
        assert p.grad is not None, name
        assert bool(p.grad.any()), name
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)

    model.eval()
    expected = model(IDS).logits.detach()
    assert differs(expected, before) > 1e-3
    cached = model.generate(input_ids=IDS, max_new_tokens=8, do_sample=False, eos_token_id=None)
    merged = model.merge_and_unload()
    assert differs(merged(IDS).logits, expected) < 1e-9
    merged.save_pretrained(tmp_path / "merged")
    back = load(tmp_path / "merged", dtype=torch.float64)
    assert differs(back(IDS).logits, expected) < 1e-9
    assert torch.equal(back.generate(IDS, max_new_tokens=8, temperature=0), cached)  # decoding used the adapters too
    with pytest.raises(AssertionError):
        assert differs(back(IDS).logits, ours(IDS).logits) < 1e-3


def test_adapters_are_saved_and_found_again(tmp_path):
    from peft import PeftModel

    _, theirs = pair(tmp_path / "m")
    model = adapted(theirs)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    expected = model.eval()(IDS).logits.detach()
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(hugging(tmp_path / "m"), tmp_path / "adapter").eval()
    assert differs(again(IDS).logits, expected) < 1e-12


def test_lora_through_the_trainer(tmp_path):
    _, theirs = pair(tmp_path / "m", torch.float32)
    model = adapted(theirs)
    trainer = Trainer(model, arguments(tmp_path / "run", gradient_checkpointing=True), train_dataset=rows())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[2] < losses[0]
