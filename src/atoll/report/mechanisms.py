"""What the blueprint's mechanisms do: load of the experts, balance over steps, weights over depth, decay of the memory."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from atoll.report.curves import base, column, curve
from atoll.report.layers import draw_extra, extras
from atoll.report.look import LIGHT, Look, diverging, end_labels, plain_log, rising, thousands
from atoll.report.run import Line, Run, number, total
from atoll.report.series import median, thin

_ROWS = 16  # layers shown one by one; more are thinned evenly


def even(count: int, most: int) -> list[int]:
    """At most `most` indices of `count`, evenly spread, first and last among them."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})


# ---------------------------------------------------------------- experts


def loads(probe: Line) -> list[np.ndarray]:
    """Tokens each expert saw, an array a layer."""
    return [np.asarray(layer, float) for layer in probe.get("load") or [] if len(layer)]


def expert_load(figure: Any, run: Run, look: Look) -> None:
    """Every expert of every layer as a cell: its load over the mean. First and last probe one above the other."""
    from matplotlib.colors import LogNorm

    shown = [(step, loads(probe)) for step, probe in run.probes if loads(probe)]
    shown = shown[-1:] if look.compact or len(shown) == 1 else [shown[0], shown[-1]]
    panels = figure.subplots(len(shown), 1, squeeze=False, sharex=True)[:, 0]
    image = None
    for axes, (step, layers) in zip(panels, shown, strict=True):
        mean = float(np.mean([layer.mean() for layer in layers]))
        share = np.stack([np.sort(layer)[::-1] / max(layer.mean(), 1e-9) for layer in layers])
        image = axes.imshow(
            np.where(share > 0, share, np.nan),
            aspect="auto",
            interpolation="nearest",
            cmap=diverging(look),
            norm=LogNorm(0.25, 4),
            extent=(0.5, share.shape[1] + 0.5, len(layers) - 0.5, -0.5),
        )
        axes.set_title("Load of the experts" if look.compact else f"Load of the experts, step {step:,}", pad=8)
        if not look.compact:
            axes.set_title(
                f"mean {mean:,.0f} tokens an expert", loc="right", pad=8, color=look.muted, fontsize="medium", fontweight="normal"
            )
        axes.grid(False)
        axes.set_ylabel("layer")
        _layer_ticks(axes, run, len(layers))
        if len(layers) <= _ROWS and not look.compact:
            dead = [f"max {layer.max():.1f}×, {(layer == 0).sum():,} dead" for layer in share]
            end_labels(axes, [(i, text, look.muted) for i, text in enumerate(dead)])
    panels[-1].set_xlabel("experts of the layer, busiest first")
    thousands(panels[-1].xaxis)
    bar = figure.colorbar(image, ax=list(panels), location="bottom", aspect=50, shrink=0.6, pad=0.03, ticks=[0.25, 0.5, 1, 2, 4])
    bar.ax.set_xticklabels(["≤¼", "½", "level", "2", "≥4"])
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    if not look.compact:
        colour = "black" if look.paper == LIGHT.paper else "white"
        bar.set_label(f"load over the layer's mean; an expert without a token is {colour}")


def _layer_ticks(axes: Any, run: Run, count: int) -> None:
    """The experts' layers by their index in the model."""
    names = [i for i in range(run.config.model.num_hidden_layers) if not run.config.model.is_dense(i)]
    ticks = even(count, 8)
    axes.set_yticks(ticks, [str(names[t] if count == len(names) else t) for t in ticks])


def sampling_noise(run: Run) -> np.ndarray:
    """MaxVio that chance alone gives level routers each step: the largest of n nearly normal loads, sqrt(2 ln n / mean load), where n
    counts the experts of all layers."""
    m = run.config.model
    every = m.num_experts * sum(not m.is_dense(i) for i in range(m.num_hidden_layers))
    tokens = np.array([run.tokens_in(line) for line in run.steps], float)
    with np.errstate(divide="ignore"):
        return np.sqrt(2 * np.log(max(every, 1)) * m.num_experts / (m.num_experts_per_token * tokens))


def balance(figure: Any, run: Run, look: Look) -> None:
    """Worst overload and number of experts without a token, at every step; and what the rule pays for it, where it does."""
    steps, worst = column(run, "max_vio")
    dead = np.array([total(line.get("dead_experts")) for line in run.steps])
    paid = [] if look.compact else extras(run)
    rows = figure.subplots(2 + len(paid), 1, sharex=True, height_ratios=(3, 2) if look.compact else (1,) * (2 + len(paid)))
    upper, lower = rows[:2]
    upper.set_title("Balance of the experts")
    upper.set_ylabel("MaxVio" if look.compact else "MaxVio: busiest\nover mean, less 1")
    level = curve(upper, run, steps, worst, look.blue, raw=not look.compact, method=median)
    noise = sampling_noise(run)
    labels = [(float(level[np.isfinite(level)][-1]), f"{level[np.isfinite(level)][-1]:.2f}", look.blue)] if np.isfinite(level).any() else []
    if np.isfinite(noise).any():
        upper.plot(steps, noise, color=look.muted, linewidth=1, linestyle=(0, (5, 3)))
        labels.append((float(noise[-1]), "chance" if look.compact else f"chance {noise[-1]:.2g}", look.muted))
    known = worst[np.isfinite(worst) & (worst > 0)]
    if len(known) and known.max() > 8 * np.median(known):
        upper.set_yscale("log")
        plain_log(upper.yaxis, 5 if look.compact else 8)
    else:
        upper.set_ylim(0, None)
    lower.set_ylabel("dead experts" if look.compact else "experts without\na token, all layers")
    lower.plot(*thin(steps, dead), color=look.orange, linewidth=1.3)
    most = np.nanmax(dead) if np.isfinite(dead).any() else 0
    lower.set_ylim(0, max(1.0, 1.15 * float(most)))
    thousands(lower.yaxis)
    base(upper, run, look)
    base(lower, run, look)
    for text in list(lower.texts):
        text.remove()
    upper.set_xlabel("")
    upper.tick_params(labelbottom=False)
    end_labels(upper, labels)
    if np.isfinite(dead).any():
        last = dead[np.isfinite(dead)][-1]
        end_labels(lower, [(float(last), f"{last:,.0f}", look.orange)])
    for above, axes, (name, label) in zip(rows[1:], rows[2:], paid, strict=False):
        draw_extra(axes, run, look, name, label)
        above.set_xlabel("")
        above.tick_params(labelbottom=False)


# ---------------------------------------------------------------- depth


def mixes(probe: Line) -> list[tuple[str, list[float]]]:
    """(name, mean weight of each source) of every mix over depth."""
    return [(str(name), [number(w) for w in weights]) for name, weights in probe.get("depth_weights") or [] if weights]


def short_mix(name: str) -> str:
    """`…layers.3.mlp_res…` → "3 MLP"; the model's last mix is "output"."""
    layer = re.search(r"(\d+)", name)
    if layer is None:
        return "output" if "out" in name else name
    return f"{layer[1]} {'MLP' if 'mlp' in name else 'attention'}"


def depth_weights(figure: Any, run: Run, look: Look) -> None:
    """How much every mix takes of every source: mixes down, sources across; what a mix cannot see yet stays blank."""
    probe = next(probe for _, probe in reversed(run.probes) if mixes(probe))
    rows = mixes(probe)
    rows = [rows[i] for i in even(len(rows), 48)]
    widest = max(len(weights) for _, weights in rows)
    table = np.full((len(rows), widest), np.nan)
    for i, (_, weights) in enumerate(rows):
        table[i, : len(weights)] = weights
    axes = figure.subplots()
    axes.grid(False)
    axes.set_title("Weights over depth", pad=8)
    image = axes.imshow(table, aspect="auto", interpolation="nearest", cmap=rising(look), vmin=0, vmax=1)
    marks = even(len(rows), 16 if look.compact else 24)
    axes.set_yticks(marks, [short_mix(rows[i][0]) for i in marks])
    axes.tick_params(axis="y", labelsize="small" if len(rows) <= 16 else "x-small")
    ticks = even(widest, 10)
    axes.set_xticks(ticks, [str(t) if look.compact else "embedding" if t == 0 else f"block {t}" if widest <= 10 else str(t) for t in ticks])
    axes.set_ylabel("mix: layer and its sublayer")
    axes.set_xlabel("source (0 is the embedding, then blocks)" if look.compact else "source; a row's last is the block still being summed")
    if len(rows) <= 24 and widest <= 10:
        _write_cells(axes, table, look)
    bar = figure.colorbar(image, ax=axes, aspect=30, pad=0.02, ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)
    if not look.compact:
        bar.set_label("mean weight over tokens")


def _write_cells(axes: Any, table: np.ndarray, look: Look) -> None:
    dark = look.paper != LIGHT.paper
    for i, j in zip(*np.nonzero(np.isfinite(table)), strict=True):
        strong = table[i, j] > (0.5 if dark else 0.55)
        colour = "#10151a" if dark and strong else "#ffffff" if strong else look.ink
        axes.text(j, i, f"{table[i, j]:.2f}", ha="center", va="center", color=colour, fontsize="small" if len(table) <= 12 else "x-small")


def growth(probe: Line) -> list[tuple[str, float, float]]:
    """(sublayer, RMS of its output, RMS of the running sum with it), first to last."""
    return [(str(name), number(output), number(total)) for name, output, total in probe.get("depth_rms") or []]


def depth_growth(figure: Any, run: Run, look: Look) -> None:
    """Size of what sublayers write and of the sum they write to, over depth, at the last probe; the first probe's outputs faint."""
    shown = [(step, growth(probe)) for step, probe in run.probes if growth(probe)]
    axes = figure.subplots()
    step, rows = shown[-1]
    places = range(len(rows))
    axes.plot(places, [total for _, _, total in rows], color=look.orange, marker="o", markersize=3.5)
    axes.plot(places, [output for _, output, _ in rows], color=look.blue, marker="o", markersize=3.5)
    if len(shown) > 1 and not look.compact:
        axes.plot(places, [output for _, output, _ in shown[0][1]], color=look.blue, alpha=0.35)
    axes.set_yscale("log")
    plain_log(axes.yaxis, 6)
    marks = even(len(rows), 8)
    axes.set_xticks(marks, [short_mix(rows[i][0]) for i in marks], fontsize="small")
    axes.set_xlabel("layer and its sublayer")
    axes.set_ylabel("root mean square")
    axes.set_title("Growth over depth" if look.compact else f"Growth over depth, step {step:,}", pad=8)
    end_labels(axes, [(rows[-1][2], "running sum", look.orange), (rows[-1][1], "output", look.blue)])


# ---------------------------------------------------------------- decay


def half_lives(probe: Line) -> dict[int, np.ndarray]:
    """Half-lives in tokens, ln 2 / -g, of the log decays sampled in each KDA layer."""
    found = {}
    for layer, sample in probe.get("decay") or []:
        g = np.asarray(sample, float)
        g = g[np.isfinite(g) & (g < 0)]
        if len(g):
            found[int(layer)] = np.log(2) / -g
    return found


def decay(figure: Any, run: Run, look: Look) -> None:
    """How long the memory of each KDA layer lasts: a histogram of half-lives a layer, the first probe's as an outline."""
    shown = [(step, half_lives(probe)) for step, probe in run.probes if half_lives(probe)]
    (first_step, first), (_, last) = shown[0], shown[-1]
    layers = [sorted(last)[i] for i in even(len(last), _ROWS)]
    every = np.concatenate([*last.values(), *first.values()])
    bound = run.config.model.gate_lower_bound
    low = max(every.min(), 0.01) if bound is None else np.log(2) / -bound
    edges = np.geomspace(low / 1.3, np.clip(np.quantile(every, 0.9995), 1, 1e6) * 1.6, 34)
    middle = np.sqrt(edges[1:] * edges[:-1])
    axes = figure.subplots()
    axes.set_title("Memory of the delta attention")
    for row, layer in enumerate(reversed(layers)):
        height = _ridge(last[layer], edges)
        axes.fill_between(middle, row, row + height, color=look.blue, alpha=0.55, linewidth=0, zorder=2 * (len(layers) - row))
        axes.plot(middle, row + height, color=look.blue, linewidth=1.2, zorder=2 * (len(layers) - row))
        if len(shown) > 1 and layer in first:
            axes.plot(
                middle,
                row + _ridge(first[layer], edges),
                color=look.orange,
                linewidth=1.1,
                linestyle=(0, (3, 2)),
                zorder=2 * (len(layers) - row) + 1,
            )
    axes.set_xscale("log")
    axes.set_xlim(edges[0], edges[-1])
    plain_log(axes.xaxis, 6 if look.compact else 14)
    axes.set_yticks(range(len(layers)), [f"layer {i}" for i in reversed(layers)])
    axes.set_ylim(-0.1, len(layers) + 0.7)
    axes.set_xlabel("half-life of a channel's memory, in tokens")
    _mark_bound(axes, run, look)
    if len(shown) > 1:
        words = f"dashed: step {first_step:,}"
        axes.annotate(words, (1, 1), xycoords="axes fraction", xytext=(0, 3), textcoords="offset points", color=look.orange, ha="right")


def _ridge(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """A histogram as tall as 1.3 rows, whatever its spread; what lies outside is counted in the outer bins."""
    counts = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
    return 1.3 * counts / max(1, counts.max())


def _mark_bound(axes: Any, run: Run, look: Look) -> None:
    bound = run.config.model.gate_lower_bound
    if bound is None:
        return
    at = np.log(2) / -bound
    axes.axvline(at, color=look.muted, linewidth=1, linestyle=(0, (5, 3)))
    if not look.compact:
        axes.annotate(f"bound {bound:g}", (at, 1), xycoords=axes.get_xaxis_transform(), xytext=(0, 3), textcoords="offset points",
                      color=look.muted, fontsize="small")  # fmt: skip
