"""chat_template.jinja in transformers gives the renderer's text, ids and mask; TRL fine-tunes with it."""

from __future__ import annotations

import json

import pytest
from conversations import CALLING, ONE_CALL, PLAIN, TOOLS, WEATHER, chats
from conversations import TOKENIZER as OURS
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config import ModelConfig
from atoll.data.chat import render, text_of, tokenize
from atoll.hub.export import save
from atoll.model import Model

SHAPES = ModelConfig(
    vocab_size=400,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    kda_num_heads=2,
    kda_head_dim=8,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    intermediate_size=24,
    num_experts=8,
    num_experts_per_token=2,
    moe_intermediate_size=8,
    routed_expert_hidden_size=8,
)
STRING_ARGUMENTS = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]},
]
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "b": 1, "a": {"z": 1, "y": 2}}}}
IMAGE = [{"role": "user", "content": [{"type": "image", "width": 30, "height": 40}, {"type": "text", "text": "What is it?"}]}]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "model"
    save(Model(SHAPES), folder, OURS)
    return folder


@pytest.fixture(scope="module")
def theirs(exported):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(exported)


def agree(theirs, messages, tools=None, prefix=False, **options) -> None:
    """Text, ids and (where the whole conversation is there) the mask of assistant tokens are ours."""
    segments = render(messages, tools, add_generation_prompt=prefix, **options)
    ids, trained = tokenize(segments, OURS)
    asked = {"tools": tools, "add_generation_prompt": prefix, **options}
    assert theirs.apply_chat_template(messages, tokenize=False, **asked) == text_of(segments)
    got = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **asked)
    assert got["input_ids"] == ids
    assert [bool(t) for t in got["assistant_masks"]] == trained


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("messages", [PLAIN, CALLING, ONE_CALL, STRING_ARGUMENTS, IMAGE], ids=["plain", "calling", "one", "text", "image"])
def test_conversations(theirs, messages, tools, thinking, prefix):
    agree(theirs, messages, tools, prefix, thinking=thinking)


@pytest.mark.parametrize(
    "options",
    [
        {"effort": "low"},
        {"effort": "max", "thinking": False},
        {"tool_choice": "none"},
        {"tool_choice": "required"},
        {"tool_choice": "auto"},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": SCHEMA, "tool_choice": "none", "effort": "high"},
    ],
    ids=str,
)
def test_options(theirs, options):
    agree(theirs, PLAIN, [WEATHER], True, **options)
    agree(theirs, CALLING, **options)


def without_lookalikes(value) -> bool:
    return "<|" not in json.dumps(value)


@settings(max_examples=150, deadline=None)
@given(chats().filter(without_lookalikes), st.booleans(), st.booleans())
def test_drawn_conversations(theirs, messages, thinking, prefix):
    agree(theirs, messages, TOOLS, prefix, thinking=thinking)


def test_what_decoding_skips_and_where_generation_stops(exported, theirs):
    from transformers import GenerationConfig

    ids = theirs.apply_chat_template(PLAIN[:3], tokenize=True, return_dict=True)["input_ids"]
    left = theirs.decode(ids, skip_special_tokens=True)
    assert left == text_of(render(PLAIN[:3])).replace("<|end_of_msg|>", "")
    assert theirs.eos_token == "<|eos|>"
    assert GenerationConfig.from_pretrained(exported).eos_token_id == [OURS.special["<|eos|>"], OURS.special["<|end_of_msg|>"]]


def test_mlx_lm_reads_the_template_and_stops_at_the_end_of_a_message(exported):
    from mlx_lm.utils import load_config, load_tokenizer

    stops = load_config(exported)["eos_token_id"]
    assert stops == [OURS.special["<|eos|>"], OURS.special["<|end_of_msg|>"]]
    tokenizer = load_tokenizer(exported, eos_token_ids=stops)
    assert tokenizer.eos_token_ids == set(stops)
    ids = tokenizer.apply_chat_template(PLAIN[:2], tools=TOOLS, add_generation_prompt=True, tokenize=True)
    assert list(ids) == tokenize(render(PLAIN[:2], TOOLS, add_generation_prompt=True), OURS)[0]


def test_trl_fine_tunes_on_the_assistants_tokens(exported, tmp_path):
    """TRL's own tokenisation and collator, with `assistant_only_loss`, give our ids and our mask; and a step runs."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=400, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=2)
    )
    rows = [
        {"messages": [PLAIN[0], {"role": "user", "content": "What is 2 + 3?"}, PLAIN[2]]},
        {"messages": [{"role": "user", "content": "And 4 + 5?"}, {"role": "assistant", "reasoning": "", "content": "9"}]},
    ]
    settings = SFTConfig(
        output_dir=str(tmp_path),
        assistant_only_loss=True,
        max_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
    )
    trainer = SFTTrainer(model=model, args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    ours = [tokenize(render(row["messages"]), OURS) for row in rows]
    for example, (ids, trained) in zip(trainer.train_dataset, ours, strict=True):
        assert list(example["input_ids"]) == ids
        assert list(example["labels"]) == [i if t else -100 for i, t in zip(ids, trained, strict=True)]
    batch = trainer.data_collator(list(trainer.train_dataset))
    for labels, (ids, trained) in zip(batch["labels"].tolist(), ours, strict=True):
        assert [i for i in labels if i != -100] == [i for i, t in zip(ids, trained, strict=True) if t]
    trainer.train()
    assert trainer.state.global_step == 1
