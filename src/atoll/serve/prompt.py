"""A conversation as a request's ids: rendered message by message, with the very ids of what was sampled here, and images in place."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from atoll.config import VisionConfig
from atoll.data.chat import Segment, render, tokenize_batch
from atoll.data.messages import read_messages
from atoll.data.tokenizer import Tokenizer
from atoll.serve.errors import bad_request
from atoll.serve.images import Sent, read_image, together
from atoll.serve.memory import Memory, Place

END = "<|end_of_msg|>"
OPENING = 6  # segments of an assistant's opening tags: three of the message's, three of its first channel's


@dataclass(frozen=True)
class Options:
    """What stands in a conversation beside its messages; see `atoll.data.chat.render`."""

    tools: Any = None
    thinking: bool = True
    effort: str | None = None
    tool_choice: Any = None
    response_format: Any = None


@dataclass
class Prompt:
    """A conversation up to where the model goes on.

    `turns` are the positions after its messages. `place` names the place of the answer in the `Memory`.
    `history` counts the assistant's messages by how they were found.
    """

    ids: list[int]
    turns: tuple[int, ...]
    place: bytes
    history: dict[str, int] = field(default_factory=dict)
    pixel_values: Tensor | None = None
    grid_thws: Tensor | None = None


def build_prompt(
    messages: Any,
    options: Options,
    tokenizer: Tokenizer,
    memory: Memory,
    salt: str,
    pictures: Sequence[Sent] = (),
    vision: VisionConfig | None = None,
) -> Prompt:
    """Ids of `messages` (their images replaced by `take_images`), ready for an assistant's answer.

    Text is encoded as text whatever it says: nobody writes a marker by spelling it. Raises `UserError` for messages that cannot be.
    """
    o = options
    segments = render(messages, o.tools, o.thinking, o.effort, o.tool_choice, o.response_format, add_generation_prompt=True)
    groups, read = _by_message(segments), read_messages(messages)
    first = bool(o.tools) + (o.effort is not None and o.thinking)  # messages that the options put before the conversation
    mine = {first + i: m for i, m in enumerate(read) if m.role == "assistant"}
    parts = [part for i, group in enumerate(groups) for part in ((group[:OPENING], group[OPENING:]) if i in mine else (group, []))]
    encoded = iter(ids for ids, _ in tokenize_batch(parts, tokenizer))
    pending, history = list(pictures), {"exact": 0, "edited": 0, "unknown": 0}
    place, ids, turns, key = Place(salt, o.thinking), [], [], b""
    for i, _ in enumerate(groups):
        if i == first + len(read):
            key = place.key()
        opening, body = next(encoded), next(encoded)
        if i in mine:
            found, kept = memory.find(place.key(), mine[i])
            history[found] += 1
            body = kept or body
        group, shown = _with_images(opening + body, pending, tokenizer, vision)
        for picture in shown:
            place.add_image(picture.digest)
        place.add(group)
        ids += group
        turns.append(len(ids))
    made = Prompt(ids, tuple(turns[:-1]), key, history)
    if pictures:
        made.pixel_values, made.grid_thws = together(pictures)
    return made


def _by_message(segments: list[Segment]) -> list[list[Segment]]:
    """Segments cut after every message's end; the last group is the generation prefix."""
    groups: list[list[Segment]] = [[]]
    for segment in segments:
        groups[-1].append(segment)
        if segment.marker and segment.text == END:
            groups.append([])
    return groups


def _with_images(ids: list[int], pending: list[Sent], tokenizer: Tokenizer, vision: VisionConfig | None) -> tuple[list[int], list[Sent]]:
    """`ids` with a placeholder a feature where an image stands, and the images that do; taken off `pending`."""
    if vision is None or not pending:
        return ids, []
    out: list[int] = []
    shown: list[Sent] = []
    pad = tokenizer.special["<|media_pad|>"]
    for token in ids:
        if token == pad and pending:
            shown.append(pending.pop(0))
            out += [pad] * shown[-1].picture.features(vision)
        else:
            out.append(token)
    return out, shown


def take_images(messages: Any, vision: VisionConfig | None, max_pixels: int, most: int) -> tuple[Any, list[Sent]]:
    """`messages` with every image as its size, and the images in order. Raises `ApiError`, 400."""
    if not isinstance(messages, list):
        return messages, []
    out, pictures = [], []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            out.append(message)
            continue
        message = copy.copy(message)
        message["content"] = parts = list(content)
        for j, part in enumerate(content):
            if isinstance(part, dict) and part.get("type") in ("image", "image_url"):
                where = f"messages[{i}].content[{j}]"
                if message.get("role") == "assistant":
                    raise bad_request("an assistant's message holds text alone", where)
                if len(pictures) >= most:
                    raise bad_request(f"more than {most} images in one request", where)
                pictures.append(read_image(part, vision, max_pixels, where))
                parts[j] = {"type": "image", "width": pictures[-1].picture.size[0], "height": pictures[-1].picture.size[1]}
        out.append(message)
    return out, pictures
