"""The `atoll` command: one function a verb, no logic. A user's mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from atoll import __version__, arguments
from atoll.config import UserError, presets

Run = Annotated[Positional[str], arg(metavar="RUN")]


def train(words: list[str]) -> None:
    """Train a model: `atoll train tiny` needs nothing but this machine."""
    started = time.monotonic()
    if {"-h", "--help"} & set(words):
        name = next((word for word in words if not word.startswith("-")), "tiny")
        print(arguments.train_help(arguments.start_config(name, {}), name, presets()), end="")
        return
    args = arguments.parse_train(words)
    config, out = arguments.plan_run(args)
    from atoll.train import run

    run(config, out, resume=args.resume is not None, started=started)


def sample(
    run: Run,
    prompt: Annotated[Positional[tuple[str, ...]], arg(metavar="PROMPT")] = (),
    tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    top_k: int | None = None,
    seed: int = 0,
    chat: bool = False,
    thinking: bool = True,
    json: bool = False,
    image: tuple[str, ...] | None = None,
) -> None:
    """Continue a text with a trained model, or answer a message; several at once where several are given.

    Args:
        run: a run's folder, or a folder in the hub's layout
        prompt: the text to continue; none starts a document; of several each is continued, prompt i with seed + i
        tokens: most tokens to add
        temperature: 0 always takes the likeliest token; 1 samples as the model believes
        top_p: sample among the likeliest tokens that hold this share of the probability
        top_k: sample among this many likeliest tokens
        seed: the same seed gives the same text
        chat: the prompt is a user's message; print the assistant's
        thinking: with --chat, let the assistant think first
        json: print one JSON object, with token ids and log-probabilities
        image: image files that the model sees before the prompt, or where it says <image>
    """
    folder = arguments.model_folder(run)
    from atoll import load
    from atoll.hub.load import load_tokenizer
    from atoll.infer.sample import continue_text, read_pictures, reply

    model, tokenizer = load(folder), load_tokenizer(folder)
    if json or len(prompt) > 1:
        if image:
            raise UserError("image: goes with one prompt and without --json; leave it out, or ask for one at a time")
        from atoll.infer import several
        from atoll.infer.request import Sampling

        asked = Sampling(temperature, top_p, top_k, seed=seed)
        answers = several.answer_all(model, tokenizer, list(prompt) or [""], tokens, asked, chat, thinking)
        arguments.show({"answers": answers}, json, several.show)
        return
    text = "".join(prompt)
    shown = read_pictures(image or (), model.config)
    if chat:
        seen = [{"type": "image", "width": p.size[0], "height": p.size[1]} for p in shown]
        content = [*seen, {"type": "text", "text": text}] if seen else text
        question, show = [{"role": "user", "content": content}], arguments.event_writer()
        answer = reply(model, tokenizer, question, None, thinking, tokens, temperature, top_p, top_k, seed, show, shown)
        sys.stdout.write("" if answer.finished else f"(cut off after {tokens} tokens)\n")
        return
    continue_text(model, tokenizer, text, tokens, temperature, top_p, top_k, seed, arguments.write_model, True, shown)
    sys.stdout.write("\n")


def chat(
    run: Run,
    system: str | None = None,
    tokens: int = 2048,
    temperature: float = 0.8,
    top_p: float = 0.95,
    top_k: int | None = None,
    seed: int | None = None,
    thinking: bool = True,
) -> None:
    """Talk with a trained model in the terminal; /help lists what can be typed.

    Args:
        run: a run's folder, or a folder in the hub's layout
        system: what the model is told before the conversation
        tokens: most tokens of an answer
        temperature: 0 always takes the likeliest token; 1 samples as the model believes
        top_p: sample among the likeliest tokens that hold this share of the probability
        top_k: sample among this many likeliest tokens
        seed: the same seed gives the same answers
        thinking: let the assistant think first
    """
    folder = arguments.model_folder(run)
    from atoll.infer.request import Sampling
    from atoll.serve.terminal import Terminal

    Terminal.open(folder, system or "", tokens, Sampling(temperature, top_p, top_k, seed=seed), thinking).talk()


def serve(
    run: Run,
    host: str = "127.0.0.1",
    port: int = 8000,
    hosts: str | None = None,
    name: str | None = None,
    max_model_len: int = 32768,
    slots: int = 8,
    device_mib: float = 512,
    host_mib: float = 512,
    speculate: Literal["none", "lookup"] = "none",
    max_live: int = 256,
    timeout: float = 600,
    drain: float = 30,
    thinking: bool = True,
    dtype: Literal["float32", "bfloat16"] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Serve a trained model to OpenAI clients and browsers: docs/serving.md. Keys come from ATOLL_API_KEY and ATOLL_ADMIN_KEY.

    Args:
        run: a run's folder, or a folder in the hub's layout
        host: address to listen on; any but the loopback's needs ATOLL_API_KEY
        port: 0 takes a free one
        hosts: names, with commas between, under which the server is reached; others are refused
        name: of the model in requests; the folder's if none
        max_model_len: most tokens of a prompt and its answer together
        slots: sequences decoded at once
        device_mib: memory for states and cached prefixes on the model's device
        host_mib: memory for cached prefixes in the host
        speculate: lookup guesses the next tokens from the text so far and checks them at once
        max_live: answers running or waiting; one more is told to come back (429)
        timeout: most seconds of an answer
        drain: seconds that running answers have after SIGTERM or Ctrl-C; a second one stops at once
        thinking: let the assistant think first, where a request does not say
        dtype: type of the weights; none is bfloat16 on a GPU, else float32
        device: where; auto takes the GPU if there is one
    """
    folder = arguments.model_folder(run)
    arguments.need("serve", "fastapi", "uvicorn")
    import torch

    from atoll.infer.engine import EngineSettings
    from atoll.serve import process
    from atoll.serve.settings import ServerSettings

    where = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    names = tuple(filter(None, (hosts or "").split(",")))
    settings = ServerSettings(
        host=host, port=port, hosts=names, name=name or arguments.model_name(folder), thinking=thinking,
        max_model_len=max_model_len, max_live=max_live, timeout=timeout, drain=drain, **process.keys_of_environment(),
    )  # fmt: skip
    kind = getattr(torch, dtype or ("bfloat16" if where == "cuda" else "float32"))
    engine = EngineSettings(slots=slots, device_mib=device_mib, host_mib=host_mib, speculate=speculate)
    process.serve(folder, settings, engine, kind, where)


def evaluate(
    run: Run,
    suite: Literal["bpb", "recall", "needle", "ruler", "state"] = "bpb",
    lengths: str | None = None,
    depths: str | None = None,
    samples: int = 16,
    seed: int = 0,
    form: Literal["text", "raw"] = "text",
    haystack: Literal["text", "noise"] = "text",
    out: str | None = None,
    against: str | None = None,
    json: bool = False,
) -> None:
    """Measure a run's model: bits per byte of its held-out split, or generated tasks; or hold a model against another implementation.

    Args:
        run: a run's folder; for tasks and with --against also a folder in the hub's layout
        suite: what is measured; all but bpb are generated tasks (docs/evaluations.md)
        lengths: of tasks: tokens of a prompt with its answer, as 1024,4096
        depths: of needles: where they lie, 0 the start to 1 the end, as 0,0.5,1
        samples: of tasks: prompts for each length and depth
        seed: of tasks: the same seed gives the same prompts
        form: of needles and word lists: English, or raw tokens for models trained on those
        haystack: of needles: the run's held-out text, or generated noise
        out: of tasks: write the scores as a heat map here, a file that ends in .png or .html
        against: mlx-lm, transformers, or a safetensors file of input_ids and logits: compare logits with these instead
        json: print one JSON object
    """
    of_tasks = {"lengths": lengths, "depths": depths, "out": out}
    if suite == "bpb" and (unused := {name: value for name, value in of_tasks.items() if value is not None}):
        name, value = next(iter(unused.items()))
        raise UserError(f"{name} = {value!r}: of generated tasks alone; name a suite of them, or leave it out")
    if against is not None and suite != "bpb":
        raise UserError(f"against = {against!r}: is no part of a suite; ask for one at a time")
    if against is not None:
        from atoll import exchange
        from atoll.evals import parity

        arguments.show(exchange.hold_against(run, against), json, parity.render)
        return
    if suite != "bpb":
        from atoll.evals import heatmap
        from atoll.evals import suite as tasks

        where = heatmap.check(out) if out else None
        found = tasks.evaluate(arguments.model_folder(run), suite, lengths, depths, samples, seed, form, haystack, arguments.say)
        if where:
            arguments.say(f"heat map: {heatmap.write(found, where)}")
        arguments.show(found, json, tasks.render)
        return
    folder = arguments.run_folder(run)
    from atoll.evals import heldout

    result = heldout.evaluate(folder)
    arguments.show(result, json, heldout.render)


def compare(words: list[str]) -> None:
    """Train values of a setting side by side, with seeds, and report: `atoll compare tiny --vary balance=quantile,sign`."""
    if {"-h", "--help"} & set(words):
        from atoll.compare.words import USAGE

        print(USAGE, end="")
        return
    from atoll.compare import compare as run
    from atoll.compare.result import render

    result, out, as_json = run(words)
    arguments.show(result, as_json, lambda found: render(found, out))


def data(
    action: Annotated[Positional[Literal["build", "recipes"]], arg(metavar="ACTION")],
    sources: Annotated[Positional[tuple[str, ...]], arg(metavar="SOURCES")] = (),
    out: str | None = None,
    join: Literal["repository", "folder", "none"] = "repository",
    near: float = 0.7,
    min_chars: int = 200,
    max_chars: int = 4_000_000,
    upsample: float = 1.0,
    long: int = 32768,
    evidence: int = 0,
    evidence_chars: int = 65536,
    shard_mb: float = 64.0,
    suffixes: str | None = None,
    licence: str | None = None,
    seed: int = 0,
    download: bool = False,
    json: bool = False,
) -> None:
    """Build a folder of long, clean documents from folders and installed packages; `atoll data recipes` lists the packages.

    Args:
        action: what to do
        sources: of build: folders, and names of recipes
        out: of build: a new folder, or an earlier build to be replaced
        join: files that become one document; none leaves each alone
        near: Jaccard's index of word shingles from which two files are the same; 0 drops exact duplicates alone
        min_chars: least characters of a file
        max_chars: most characters of a document
        upsample: most copies of a long document, as its length over --long says
        long: characters from which a document is long
        evidence: composed documents to add, whose questions need evidence from all over
        evidence_chars: characters of a composed document, about
        shard_mb: most megabytes in one shard
        suffixes: file endings read of folders, with commas between them; none takes every text file
        licence: what the manifest says of folders
        seed: the same seed composes the same documents
        download: fetch packages that are not installed, into a temporary folder, and run nothing of them
        json: print one JSON object
    """
    from atoll.data.builder import pipeline, words
    from atoll.data.builder.filters import Bounds

    if action == "recipes":
        arguments.show(words.catalogue(), json, words.render_catalogue)
        return
    if out is None:
        raise UserError("--out is missing; give a new folder")
    endings, bounds = tuple(s.strip() for s in (suffixes or "").split(",") if s.strip()), Bounds(min_chars)
    sizes = {"max_chars": max_chars, "upsample": upsample, "long": long, "evidence": evidence, "evidence_chars": evidence_chars}
    options = pipeline.Options(join, near or None, **sizes, shard_mb=shard_mb, suffixes=endings, seed=seed, bounds=bounds)
    if licence:
        options = dataclasses.replace(options, licence=licence)
    made = pipeline.build(list(sources), Path(out).expanduser(), options, download, arguments.say)
    arguments.show(made, json, words.render)


def report(run: Run) -> None:
    """Write report.html and plots of a run, finished or not.

    Args:
        run: a run's folder
    """
    folder = arguments.run_folder(run)
    from atoll.report import write

    print(write(folder))


def plan(name: Annotated[Positional[str], arg(metavar="NAME")], json: bool = False) -> None:
    """Count parameters, memory and state of a model before anything is trained.

    Args:
        name: a preset, a TOML file, a run's folder, or a folder in the hub's layout
        json: print one JSON object
    """
    from atoll.plan import summary

    arguments.show(summary.report(arguments.model_settings(name)), json, summary.render)


def audit(
    name: Annotated[Positional[str], arg(metavar="NAME")],
    tile: int | None = None,
    bound: float | Literal["none"] | None = None,
    anchor: Literal["centred", "first", "middle"] | None = None,
    operands: Literal["float16", "bfloat16", "tf32", "float32"] | None = None,
    gate: Literal["float16", "bfloat16", "float32"] | None = None,
    state: Literal["float16", "bfloat16", "float32"] | None = None,
    text: str | None = None,
    tokens: int = 2048,
    json: bool = False,
) -> int:
    """Prove, and measure on a text, that a decay is safe in dense tiles; exit code 1 where it is not.

    Args:
        name: a preset (proof alone), a run's folder, or a folder in the hub's layout; or "none" to judge the settings below by themselves
        tile: tokens of a dense diagonal tile; none takes 16
        bound: least log-decay a token, below 0; "none" is an unbounded gate; left out, the model's own
        anchor: centred (first row, shifted by half the range), first (first row), middle (a row in the middle)
        operands: number format of the matmuls' operands
        gate: number format of log-decays, their sums and decays
        state: number format of the recurrent state
        text: a file to run the model on; left out, the run's held-out text, or random tokens
        tokens: most tokens of it
        json: print one JSON object
    """
    from atoll.plan import audited

    given = {"tile": tile, "bound": bound, "anchor": anchor, "operands": operands, "gate": gate, "state": state}
    found = audited.audit(name, given, text, tokens)
    from atoll.plan.audit import render

    arguments.show(found, json, render)
    return 0 if found["ok"] else 1


def export(
    run: Run,
    folder: Annotated[Positional[str], arg(metavar="FOLDER")],
    dtype: Literal["float32", "bfloat16"] | None = None,
    shard_bytes: float = 5e9,
    form: Literal["text"] = "text",
    check: Literal["mlx-lm", "transformers"] | None = None,
    json: bool = False,
) -> None:
    """Write a model as a folder that other engines load: config.json, safetensors, tokenizer.

    Args:
        run: a run's folder, one of its checkpoints (RUN/checkpoints/step-N), or a folder in the hub's layout
        folder: a new folder, or an older export to be replaced
        dtype: type of most tensors; decay, convolutions, head norms and router bias stay float32; none leaves them as they are
        shard_bytes: most bytes in one weight file
        form: what is written; text is the text model
        check: load the result in this program and compare its logits with ours
        json: print one JSON object
    """
    from atoll import exchange

    found = exchange.export_model(run, folder, dtype, shard_bytes, lambda text: print(text, file=sys.stderr))
    if check is not None:
        found["parity"] = exchange.hold_against(folder, check)
    arguments.show(found, json, exchange.render)


def import_(
    folder: Annotated[Positional[str], arg(metavar="FOLDER")],
    out: Annotated[Positional[str], arg(metavar="OUT")] = "",
    check: bool = False,
    router_weights: Literal["unbiased", "biased"] | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    shard_bytes: float = 5e9,
    json: bool = False,
) -> None:
    """Check every tensor of a released folder and write it in Atoll's normal form; reading one needs no import.

    Args:
        folder: a folder in the hub's layout, from whatever source
        out: a new folder, or an older one that Atoll wrote
        check: only check; write nothing
        router_weights: which scores weigh the experts, where config.json does not say (released files never do); none takes unbiased
        dtype: type of most tensors; none leaves them as they are stored
        shard_bytes: most bytes in one weight file
        json: print one JSON object
    """
    if check == bool(out):
        wrong = "does not go with --check, which writes nothing" if check else "is missing; give a new folder, or --check to write nothing"
        raise UserError(f"OUT {wrong}")
    from atoll import exchange

    arguments.show(exchange.import_model(folder, out or None, dtype, shard_bytes, router_weights), json, exchange.render)


def selftest(device: Literal["auto", "cpu", "cuda"] = "auto", json: bool = False) -> int:
    """Check every op with a fast path against its definition in float64, on this machine; exit code 1 if one is off.

    Args:
        device: where; auto takes the GPU if there is one
        json: print one JSON object
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device = cuda: torch sees no CUDA device; leave --device out to check on the CPU")
    from atoll import selftest as room

    result = room.selftest(None if device == "auto" else device)
    arguments.show(result, json, room.render)
    return 0 if result["ok"] else 1


VERBS = {
    "train": train,
    "sample": sample,
    "chat": chat,
    "serve": serve,
    "eval": evaluate,
    "compare": compare,
    "report": report,
    "plan": plan,
    "audit": audit,
    "export": export,
    "import": import_,
    "data": data,
    "selftest": selftest,
}
WORDY = ("train", "compare")  # verbs that read their words themselves: any setting may stand among them


def usage() -> str:
    """What `atoll --help` prints."""
    lines = ["usage: atoll VERB ...", "", "Train and use sparse models of one blueprint, from a laptop's CPU up.", ""]
    lines += [f"  {name:<8} {(verb.__doc__ or '').splitlines()[0]}" for name, verb in VERBS.items()]
    return "\n".join([*lines, "", "atoll VERB --help says more; atoll --version names the version."])


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] == "--version":
        print(f"atoll {__version__}")
        return 0
    name, *rest = words
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, 1, 0.4)
        raise UserError(f"{name!r}: no such verb; " + (f"did you mean {near[0]}?" if near else f"one of {', '.join(VERBS)} is expected"))
    if name in WORDY:
        {"train": train, "compare": compare}[name](rest)
        return 0
    return arguments.call(VERBS[name], rest, f"atoll {name}") or 0


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 done, 1 a check failed, 2 the user's mistake, 130 interrupted."""
    try:
        code = _dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except UserError as error:
        message = str(error)
    except BrokenPipeError:  # the reader of our output has gone; say nothing more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:
        message = f"{error.filename or 'file system'}: {error.strerror or error}; mend that and start again"
    except KeyboardInterrupt:
        print("atoll: interrupted", file=sys.stderr)
        return 130
    print("atoll: " + " ".join(message.split()), file=sys.stderr)
    return 2
