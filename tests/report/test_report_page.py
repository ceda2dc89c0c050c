"""The whole of report.write: files, self-containment, escaping, runs that are short, unfinished or damaged."""

import html.parser
import json
import re
import shutil

import numpy as np
import pytest
from fake_run import SAMPLES, write_run
from matplotlib.figure import Figure

from atoll import report
from atoll.config import UserError
from atoll.report import curves, layers, page, plots
from atoll.report.look import LIGHT
from atoll.report.run import read

PNG = b"\x89PNG\r\n\x1a\n"


class Outline(html.parser.HTMLParser):
    """Collects what a page refers to and what it contains."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "srcset", "href", "data", "action")]
        if tag not in ("meta", "img", "source", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag


@pytest.fixture(autouse=True, scope="module")
def _coarse():
    """Fewer dots: what is tested here is not how sharp the pictures are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "_DPI", 40)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = write_run(tmp_path_factory.mktemp("runs") / "tiny-0412", steps=240, probes=2)
    return run, report.write(run).read_text(encoding="utf-8")


def append(run, *lines):
    with open(run / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def html_of(run):
    """The page without its pictures: all that the text tests need, in a moment."""
    return page.page(read(run), {})


def drawn(run):
    """The names of the plots that `run` allows, each drawn once."""
    shown = read(run)
    return {p.name for p in plots.PLOTS if p.available(shown) and plots.picture(p, shown, LIGHT).startswith(PNG)}


def test_every_plot_is_written(finished):
    run, _ = finished
    names = {p.stem for p in (run / "plots").glob("*.png")}
    assert names == {p.name for p in plots.PLOTS} | {"overview"}
    assert all(p.read_bytes().startswith(PNG) for p in (run / "plots").iterdir())
    assert not list(run.rglob(".*"))  # nothing half-written is left


def test_the_page_needs_nothing_outside_itself(finished):
    _, text = finished
    outline = Outline(text)
    assert outline.open == []
    assert "script" not in outline.tags
    assert "link" not in outline.tags
    assert len(outline.addresses) == 2 * len(plots.PLOTS)  # light and dark
    assert all(a.startswith("data:image/png;base64,") for a in outline.addresses)
    assert not re.search(r"https?://|url\(|@import", text)
    assert "default-src 'none'" in text


def test_the_page_tells_the_run(finished):
    _, text = finished
    told = ("tiny-0412", "40.9M, 2.54M active", "240 of 240", "983,040", "x86_64", "2 on 2 CPUs", "2.13.0")
    told += ("1.713", "1.668", "1.571", "1.03×", "1.09×", "38 held-out files", "812,344 bytes", "tests were among the files")
    assert [t for t in told if t not in text] == []
    assert "not finished" not in text
    order = [text.index(t) for t in ("<h1>", "Bits per byte on", ">Learning<", ">Samples<", ">Mechanisms<", ">Health of", ">Settings<")]
    assert order == sorted(order)


def test_the_page_shows_first_and_last_sample(finished):
    _, text = finished
    assert page.text(SAMPLES[0]) in text
    assert page.text(SAMPLES[3]) in text
    assert text.count("<pre>") == 6


def test_both_themes_are_there(finished):
    _, text = finished
    assert text.count('<source media="(prefers-color-scheme: dark)"') == len(plots.PLOTS)
    assert "color-scheme: light dark" in text


def test_drawing_again_gives_the_same_bytes(finished):
    run = read(finished[0])
    by_name = {p.name: p for p in plots.PLOTS}
    for name in ("bits_per_byte", "expert_load"):
        assert plots.picture(by_name[name], run, LIGHT) == (finished[0] / "plots" / f"{name}.png").read_bytes()


def test_what_users_and_models_wrote_is_escaped(tmp_path):
    run = write_run(tmp_path / "a&b<i>", steps=10, probes=0, **{"train.sample_prompt": "<b>&\"'", "stages.0.name": "<script>x</script>"})
    append(run, {"kind": "sample", "step": 99, "text": "</pre><script>alert(1)</script>\x00\x1b[31m \ud800 &amp;"},
           {"kind": "run", "device": "<img src=x onerror=alert(1)>", "torch": "2<3"})  # fmt: skip
    text = html_of(run)
    assert Outline(text).open == []
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;/pre&gt;&lt;script&gt;alert(1)&lt;/script&gt;␀␛[31m ? &amp;amp;" in text
    assert "<h1>a&amp;b&lt;i&gt;</h1>" in text
    text.encode("utf-8")


def test_dollars_and_unknown_scripts_in_names_are_drawn(tmp_path):
    overrides = {"stages.0.name": "$\\frac{", "stages.1.name": "二千"}
    run = read(write_run(tmp_path / "r", steps=10, probes=0, **overrides))
    assert plots.picture(plots.PLOTS[0], run, LIGHT).startswith(PNG)


def test_an_unfinished_run_says_what_is_missing(tmp_path):
    run = write_run(tmp_path / "r", steps=100, finished=False, probes=0)
    text = report.write(run).read_text()
    assert "This run is not finished" in text
    assert "60 of 100" in text
    assert "on a fixed part of the held-out files" in text
    assert "No probe of the expert load yet." in text
    assert not (run / "plots" / "expert_load.png").exists()
    assert (run / "plots" / "overview.png").exists()


def test_a_run_that_was_to_end_without_an_evaluation_is_finished(tmp_path):
    overrides = {"train.evaluate": False}
    write_run(tmp_path / "whole", steps=20, probes=1, **overrides)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    (tmp_path / "whole" / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines if x.get("kind") != "final"))
    text = report.write(tmp_path / "whole").read_text()
    assert "not finished" not in text
    assert "are measured by atoll eval on this run" in text
    assert "not finished" in report.write(write_run(tmp_path / "part", steps=20, finished=False, probes=1, **overrides)).read_text()


def test_settings_are_shown_as_a_file_has_them(tmp_path):
    overrides = {"optim.router_lr": 3e-4 * 0.1, "train.evaluate": False, "model.vision.patch_size": 7}
    text = report.write(write_run(tmp_path / "r", steps=10, probes=0, **overrides)).read_text()
    assert "<td><code>router_lr</code></td><td class=changed>3e-05</td>" in text
    assert "<td><code>evaluate</code></td><td class=changed>false</td>" in text
    assert "<td><code>vision.patch_size</code></td><td class=changed>7</td>" in text
    assert "<td><code>max_bytes</code></td><td>none</td>" in text


def test_a_single_validation_is_within_the_frame(tmp_path):
    run = write_run(tmp_path / "r", steps=10, finished=False, probes=0)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [x for x in lines if x.get("kind") != "validation"] + [{"kind": "validation", "step": 6, "bits_per_byte": 0.5}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in kept))
    figure = Figure()
    curves.bits_per_byte(figure, read(run), LIGHT)
    assert figure.axes[0].get_ylim()[0] < 0.5


@pytest.mark.parametrize("steps", [1, 10])
def test_a_run_of_very_few_steps_has_every_plot(tmp_path, steps):
    assert drawn(write_run(tmp_path / "r", steps=steps, probes=1)) == {p.name for p in plots.PLOTS}


def test_a_step_without_numbers_is_no_obstacle(tmp_path):
    run = write_run(tmp_path / "r", steps=10, finished=False, probes=0)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    bare = [{k: None if isinstance(v, (float, list)) else v for k, v in line.items()} for line in lines if "kind" not in line]
    (run / "metrics.jsonl").write_text("".join(json.dumps({**line, "skipped": True}) + "\n" for line in bare))
    assert drawn(run) == set()
    assert "6 of 6 steps were skipped" in html_of(run)
    assert "No step has said its loss." in html_of(run)


def test_a_skipped_step_without_a_norm_is_still_drawn(tmp_path):
    run = write_run(tmp_path / "r", steps=10, probes=0)
    append(run, {"step": 11, "stage": "2k", "loss": None, "grad_norm": None, "skipped": True})
    assert "gradient_norm" in drawn(run)


def test_a_model_without_some_mechanisms_has_a_shorter_page(tmp_path):
    overrides = {"model.residual": "plain", "model.first_k_dense_replace": 5, "model.gate_lower_bound": "none"}
    run = write_run(tmp_path / "r", steps=10, probes=1, **overrides)
    probe = next((run / "probes").iterdir())
    probe.write_text(json.dumps({"load": [], "decay": json.loads(probe.read_text())["decay"]}))
    assert drawn(run) == {p.name for p in plots.PLOTS} - {"expert_load", "depth_weights", "depth_growth", "balance", "layer_load"}
    text = html_of(run)
    assert "No probe of the weights over depth." in text
    assert "<td>attention residual</td>" not in text
    assert "routed experts, 16 a token" not in text


def test_a_rule_that_pays_shows_what_it_pays(tmp_path):
    run = write_run(tmp_path / "r", steps=40, probes=0, **{"balance.kind": "aux", "balance.capacity_factor": 1.0})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    paid = [{**line, "dropped_share": 0.25, "balance_loss": 0.04} if "loss" in line else line for line in lines]
    plain = plots.picture(next(p for p in plots.PLOTS if p.name == "balance"), read(run), LIGHT)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in paid))
    assert [name for name, _ in layers.extras(read(run))] == ["dropped_share", "balance_loss"]
    assert plots.picture(next(p for p in plots.PLOTS if p.name == "balance"), read(run), LIGHT) != plain
    text = html_of(run)
    assert 'Balance, as numbers (rule "aux")' in text
    assert "<td>share of choices dropped over capacity</td><td class=n>0.25</td><td class=n>0.25</td>" in text
    assert Outline(text).open == []


def test_the_map_of_layers_averages_steps_and_tolerates_gaps(tmp_path):
    run = read(write_run(tmp_path / "r", steps=10, probes=0))
    assert layers.load_map(run).shape == (10, 4, 5)
    values = np.arange(12.0).reshape(6, 2)
    values[4:, 1] = np.nan
    table = layers.by_columns(values, 3)
    assert table[0].tolist() == [1, 5, 9]
    assert table[1][:2].tolist() == [2, 6]
    assert np.isnan(table[1][2])
    assert layers.by_columns(values, 100).shape == (2, 6)


def test_settings_away_from_the_defaults_are_marked(tmp_path):
    text = html_of(write_run(tmp_path / "r", steps=10, probes=0, **{"optim.lr": 0.123}))
    assert "<td class=changed>0.123</td>" in text
    assert "<code>lr</code></td><td class=changed>0.123</td><td>peak learning rate of Muon</td>" in text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: shutil.rmtree(run), "no config.toml there"),
        (lambda run: (run / "metrics.jsonl").unlink(), "no metrics.jsonl there"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "no step yet"),
        (lambda run: (run / "metrics.jsonl").write_text('{"kind": "run"}\n{"step": 1, "lo'), "no step yet"),
        (lambda run: (run / "config.toml").write_text("a = ["), "not valid TOML"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path, damage, message):
    run = write_run(tmp_path / "r", steps=10, probes=0)
    damage(run)
    with pytest.raises(UserError, match=message) as error:
        report.write(run)
    assert "\n" not in str(error.value)
    assert not (run / "report.html").exists()


def test_a_place_that_cannot_be_written_is_said_in_one_line(tmp_path, monkeypatch):
    run = write_run(tmp_path / "r", steps=2, finished=False, probes=0)
    monkeypatch.setattr(plots, "PLOTS", plots.PLOTS[:1])
    (run / "plots").write_text("in the way")
    with pytest.raises(UserError, match="cannot write it"):
        report.write(run)


def test_durations():
    assert [page.duration(s) for s in (0, 7.4, 291.4, 7265, 200_000)] == ["", "7 s", "4 min 51 s", "2 h 1 min", "2 d 7 h"]
