"""Scores of generated tasks: exact at both ends and at chance for stubs, the same for a real model however it is read."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from atoll import cli
from atoll.config import load_config
from atoll.data.documents import TokenSet
from atoll.data.tasks import DEEP, NAMES, SUITES, Draw, Tasks
from atoll.data.tokenizer import train_tokenizer
from atoll.evals import heatmap, suite
from atoll.evals.bpb import bits_per_byte
from atoll.evals.position import by_position
from atoll.evals.teacher import forced, hits, nats
from atoll.model import Model

SMALL = {
    "model.vocab_size": 400,
    "model.hidden_size": 16,
    "model.num_hidden_layers": 3,
    "model.full_attn_layers": "2",
    "model.num_attention_heads": 2,
    "model.kda_num_heads": 2,
    "model.kda_head_dim": 8,
    "model.q_lora_rank": 8,
    "model.kv_lora_rank": 8,
    "model.qk_nope_head_dim": 8,
    "model.qk_rope_head_dim": 4,
    "model.v_head_dim": 8,
    "model.intermediate_size": 24,
    "model.moe_intermediate_size": 8,
    "model.routed_expert_hidden_size": 8,
    "model.num_experts": 8,
    "model.num_experts_per_token": 2,
}
SHAPES = load_config("tiny", SMALL).model
TOKENIZER = train_tokenizer(["The quick brown fox jumps over the lazy dog. " * 40], SHAPES)
TASKS = Tasks(TOKENIZER, SHAPES.bos_token_id)


class Stub(torch.nn.Module):
    """Knows the rows it will be asked about; `say(token)` is the id it finds likeliest where `token` follows."""

    def __init__(self, rows, say, vocab: int = 400) -> None:
        super().__init__()
        self.rows, self.say, self.vocab = [r.tolist() for r in rows], say, vocab
        self.widest, self.most, self.modes = 0, 0, set()

    def new_cache(self, batch: int) -> list[list[int]]:
        return [[] for _ in range(batch)]

    def forward(self, input_ids, cache, logits):
        self.modes.add(self.training)
        self.widest = max(self.widest, input_ids.numel())
        for seen, new in zip(cache, input_ids.tolist(), strict=True):
            seen += new
        if not logits:
            return SimpleNamespace(logits=None)
        self.most = max(self.most, input_ids.numel() * self.vocab)
        out = torch.zeros(*input_ids.shape, self.vocab)
        for b, seen in enumerate(cache):
            begin = len(seen) - input_ids.shape[1]
            row = next(r for r in self.rows if r == seen[: len(r)] or r[: len(seen)] == seen)
            for t in range(begin, min(len(seen), len(row) - 1)):
                out[b, t - begin, self.say(row[t + 1])] = 1
        return SimpleNamespace(logits=out)


def made(name: str, count: int, length: int) -> list:
    return [TASKS.make(name, Draw(7, i), length - 3 * (i % 3), 0.5) for i in range(count)]


def graded(samples, stub, **options):
    return suite.grade(samples, forced(stub, [s.ids for s in samples], [s.answers() for s in samples], **options))


@pytest.mark.parametrize("name", NAMES)
def test_who_knows_scores_one_and_who_is_always_wrong_scores_nothing(name):
    samples = made(name, 5, 300)
    rows = [s.ids for s in samples]
    right, wrong = Stub(rows, lambda t: t), Stub(rows, lambda t: (t + 1) % 400)
    for batch_tokens, read in ((16384, 8192), (1, 7), (600, 64)):
        assert graded(samples, right, batch_tokens=batch_tokens, read=read)["exact"] == 1
        assert graded(samples, right, batch_tokens=batch_tokens, read=read)["tokens"] == 1
        assert graded(samples, wrong, batch_tokens=batch_tokens, read=read)["exact"] == 0
        assert graded(samples, wrong, batch_tokens=batch_tokens, read=read)["tokens"] == 0
    assert right.modes == {False}
    assert right.training


def test_one_wrong_token_loses_its_answer_and_no_other():
    samples = made("needle_values:raw", 3, 200)
    rights = [np.ones(16, dtype=bool) for _ in samples]
    rights[1][5] = False
    found = suite.grade(samples, rights)
    assert found["exact"] == 11 / 12
    assert found["tokens"] == 47 / 48
    assert found["questions"] == 12


@pytest.mark.parametrize(
    ("name", "among"), [("mqar", "values"), ("stack", "stacked"), ("parity", 2), ("modular", 5), ("s3", 6), ("s5", 120)]
)
def test_blind_guessing_scores_the_chance_that_is_printed(name, among):
    v = TASKS.vocabulary
    choices = {"values": v.halves()[1], "stacked": v.symbols[4:]}.get(among) if isinstance(among, str) else v.symbols[:among]
    samples = made(name, 1500 if name in SUITES["state"] else 120, 100)
    generator = np.random.default_rng(0)
    blind = [generator.choice(choices, int(s.answers().sum())) == s.ids[s.answers()] for s in samples]
    found = suite.grade(samples, blind)
    spread = np.sqrt(found["chance"] * (1 - found["chance"]) / found["questions"])
    assert found["questions"] >= 1000
    assert abs(found["exact"] - found["chance"]) < 4 * spread
    assert found["chance"] == pytest.approx(1 / len(choices))


def test_memory_is_bounded_by_the_segments():
    samples = made("needle_single", 4, 3000)
    stub = Stub([s.ids for s in samples], lambda t: t)
    forced(stub, [s.ids for s in samples], [s.answers() for s in samples], read=256)
    assert stub.widest <= 256
    assert stub.most <= 256 * 400
    assert stub.widest >= 4  # at least a token a row


def test_a_real_model_gives_the_same_numbers_in_segments_and_whole():
    torch.manual_seed(0)
    model = Model(SHAPES, dtype=torch.float64).eval()
    samples = made("mqar", 3, 90) + made("needle_multi:raw", 3, 120)
    rows, wanted = [s.ids for s in samples], [s.answers() for s in samples]
    for measure in (nats, hits):
        cut = forced(model, rows, wanted, measure, read=37, batch_tokens=250)
        for row, mask, found in zip(rows, wanted, cut, strict=True):
            ids = torch.from_numpy(row)[None]
            at = torch.from_numpy(np.flatnonzero(mask))
            with torch.no_grad():
                logits = model(ids).logits[0, at - 1]
            assert torch.allclose(torch.from_numpy(found), measure(logits, ids[0, at]).double(), atol=1e-9)


def test_an_untrained_model_is_at_chance_and_scores_repeat():
    torch.manual_seed(0)
    model = Model(SHAPES)
    scores = suite.measure(model, TASKS, ("mqar", "parity", "needle_single"), (64, 300), (0.0, 1.0), 8, seed=1)
    assert scores == suite.measure(model, TASKS, ("mqar", "parity", "needle_single"), (64, 300), (0.0, 1.0), 8, seed=1)
    assert [(s.task, s.length, s.depth) for s in scores][:4] == [
        ("mqar", 64, None),
        ("mqar", 300, None),
        ("parity", 64, None),
        ("parity", 300, None),
    ]
    for s in scores:
        assert s.exact <= s.chance + 4 * np.sqrt(max(s.chance, 1 / s.questions) / s.questions)
        assert s.prompt_tokens < s.length
        assert (s.truncated > 0) == (s.task == "needle_single" and s.length == 64)
    assert [s.placed for s in scores[-2:]] == [0.0, 1.0]


# ---------------------------------------------------------------- the verb


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "model"
    torch.manual_seed(0)
    Model(SHAPES).save_pretrained(path, TOKENIZER)
    return path


@pytest.mark.parametrize("name", ["recall", "state", "needle", "ruler"])
def test_every_suite_prints_length_cut_depth_and_chance_with_each_score(folder, name, capsys):
    assert cli.main(["eval", str(folder), "--suite", name, "--lengths", "200,600", "--depths", "0,0.5", "--samples", "2"]) == 0
    out, err = capsys.readouterr()
    head, columns, *rows, legend = out.splitlines()
    assert columns.split() == ["task", "length", "prompt", "cut", "depth", "placed", "exact", "chance", "tokens", "questions"]
    deep = sum(n in DEEP for n in SUITES[name])
    assert len(rows) == 2 * (2 * deep + len(SUITES[name]) - deep)
    for row in rows:
        words = row.split()
        assert words[0] in SUITES[name]
        assert int(words[2].replace(",", "")) < int(words[1].replace(",", ""))
        assert words[3].endswith("/2")
        assert words[4] in ("all", "0", "0.5")
        assert sum(w.endswith("%") for w in words) == 3
    assert ("needles lie in noise" in head) == bool(deep)
    assert ("needles lie in noise: no run's folder" in err) == bool(deep)
    assert legend.startswith("prompt: ")


def test_json_and_the_heat_map(folder, tmp_path, capsys):
    words = [
        "eval",
        str(folder),
        "--suite",
        "ruler",
        "--lengths",
        "200,300",
        "--depths",
        "0,1",
        "--samples",
        "2",
        "--form",
        "raw",
        "--json",
    ]
    for out in ("map.png", "map.html"):
        assert cli.main([*words, "--out", str(tmp_path / out)]) == 0
        result = json.loads(capsys.readouterr().out)
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "map.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "needle_values:raw" in page
    titles = [p[0] for p in heatmap.panels(result["scores"])]
    assert titles == ["needle_single:raw", "needle_multi:raw", "needle_values:raw", "variables:raw", "evidence everywhere"]
    table = heatmap.panels([{"task": "a", "depth": d, "length": n, "exact": d + n} for d in (0.0, 1.0) for n in (1, 2)])[0][3]
    assert table.tolist() == [[1, 2], [2, 3]]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lengths", "1k"], "numbers with commas"),
        (["--lengths", "4"], "16 to"),
        (["--depths", "2"], "0.0 to 1.0"),
        (["--depths", "0;1"], "numbers with commas"),
        (["--samples", "0"], "1 or more"),
        (["--out", "map.gif"], ".png or .html"),
        (["--suite", "needles"], "is expected"),
        (["--suite", "bpb", "--lengths", "64"], "lengths = '64': of generated tasks alone; name a suite of them, or leave it out"),
        (["--suite", "bpb", "--out", "map.png"], "out = 'map.png': of generated tasks alone"),
        (["--suite", "needle", "--against", "transformers"], "against = 'transformers': is no part of a suite"),
    ],
)
def test_mistakes_are_one_line(folder, flags, said, capsys):
    assert cli.main(["eval", str(folder), "--suite", "needle", *flags] if flags[0] != "--suite" else ["eval", str(folder), *flags]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


# ---------------------------------------------------------------- loss by position


def corpus(trained: bool) -> TokenSet:
    generator = np.random.default_rng(0)
    table = np.concatenate([np.zeros(11), 1 + np.arange(389) % 4]).astype(np.int64)
    sizes = [150, 3, 0, 40, 97]
    flat = np.concatenate([[0, *generator.integers(11, 400, n), 1] for n in sizes]).astype(np.uint16)
    offsets = np.concatenate([[0], np.cumsum([n + 2 for n in sizes])]).astype(np.int64)
    mask = generator.random(len(flat)) < 0.5 if trained else None
    spans = [(a + 1, b - 1) for a, b in itertools.pairwise(offsets.tolist())]
    doc_bytes = np.asarray([table[flat[a:b]].sum() for a, b in spans], dtype=np.int64)
    if mask is not None:
        mask[offsets[:-1]] = False
        doc_bytes = np.asarray([table[flat[a : b + 1]][mask[a : b + 1]].sum() for a, b in spans], dtype=np.int64)
    return TokenSet(flat, offsets, doc_bytes, list("abcde"), table, 0, 1, 2, mask)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("length", [100, 512])
def test_bits_per_byte_by_position_add_up_to_the_plain_figure(trained, length):
    torch.manual_seed(1)
    model, data = Model(SHAPES, dtype=torch.float64).eval(), corpus(trained)
    plain = bits_per_byte(model, data, length)
    rows = by_position(model, data, length, batch_tokens=300)
    assert sum(r["nats"] for r in rows) == pytest.approx(plain["nats"], rel=1e-9)
    assert sum(r["bytes"] for r in rows) == plain["bytes"]
    assert sum(r["tokens"] for r in rows) == plain["tokens"]
    assert [r["first"] for r in rows] == [0, 64, 128][: len(rows)]
    assert len(rows) == (2 if length == 100 else 3)
    some, few = by_position(model, data, length, limit_tokens=120), bits_per_byte(model, data, length, limit_tokens=120)
    assert sum(r["nats"] for r in some) == pytest.approx(few["nats"], rel=1e-9)
    assert sum(r["tokens"] for r in some) == few["tokens"] < plain["tokens"]


def test_a_token_is_counted_in_the_bucket_of_its_place():
    data = corpus(False)
    rows = by_position(Stub([data.document(i)[:-1] for i in (0, 3, 4, 1)], lambda t: t), data, 512)
    assert [r["tokens"] for r in rows] == [63 + 3 + 40 + 63, 64 + 34, 23]
    assert [(r["first"], r["last"]) for r in rows] == [(0, 64), (64, 128), (128, 256)]
