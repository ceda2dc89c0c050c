"""Long documents of which an answer needs evidence from all over: excerpts cut into parts and permuted, with sub-tasks strewn between them.

Everything is a function of the texts and a key. What is asked at the end: numbers (alone, and the sum of two), chains of names, in which
order a document's parts stand, how the next part of one begins, and where a line is from. Each answer follows its question.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from atoll.data.tasks.forms import made_up
from atoll.data.tasks.sample import Draw

PART = 2400  # characters of a part, about
FACTS, CHAIN = 4, 4
SLOTS = 8  # parts of one document at most
MOST = SLOTS * PART  # characters taken of one text at most


@dataclass(frozen=True)
class Evidence:
    """A document; and of each question (question, answer, offsets in the text of what has to be read for it)."""

    text: str
    questions: list[tuple[str, str, list[int]]]


@dataclass(frozen=True)
class _Part:
    document: int
    number: int
    of: int
    text: str

    def laid(self) -> str:
        return f"[document {self.document}, part {self.number} of {self.of}]\n{self.text}\n"


def compose(texts: list[str], chars: int, *key: int) -> Evidence:
    """A document of about `chars` characters from excerpts of `texts`, two or more, each taken once at most."""
    draw = Draw(*key)
    parts = _parts(draw, texts, chars)
    parts = [parts[i] for i in draw.order(len(parts))]
    pieces, notes = [p.laid() for p in parts], _notes(draw)
    places = draw.integers(len(pieces) + 1, sum(len(lines) for lines, _, _ in notes)).tolist()
    strewn: list[tuple[int, int, str]] = []  # slot, order among those of a slot, line
    for n, (lines, _, _) in enumerate(notes):
        mine = sorted(places.pop() for _ in lines)
        strewn += [(slot, i * len(notes) + n, line) for i, (slot, line) in enumerate(zip(mine, lines, strict=True))]
    laid, offsets, at = [], {}, 0
    for slot in range(len(pieces) + 1):
        for _, _, line in sorted(s for s in strewn if s[0] == slot):
            offsets[line] = at
            laid.append(line + "\n\n")
            at += len(laid[-1])
        if slot < len(pieces):
            offsets[pieces[slot]] = at
            laid.append(pieces[slot] + "\n")
            at += len(laid[-1])
    asked = [(q, a, [offsets[line] for line in lines]) for lines, q, a in _asked(draw, notes)]
    asked += [(q, a, [offsets[p.laid()] for p in read]) for q, a, read in _about_parts(draw, parts)]
    asked = [asked[i] for i in draw.order(len(asked))]
    tail = "Questions about the text above.\n\n" + "\n".join(f"Question: {q}\nAnswer: {a}\n" for q, a, _ in asked)
    return Evidence("".join(laid) + tail, asked)


def _parts(draw: Draw, texts: list[str], chars: int) -> list[_Part]:
    """Excerpts of so many texts as fill `chars`, each cut at line ends into parts."""
    found: list[_Part] = []
    room = chars
    for document, i in enumerate(draw.order(len(texts)), 1):
        most = max(PART, min(room, MOST, chars // 2))  # two documents at least
        excerpt = _excerpt(draw, texts[i], most)
        cut = _cut(excerpt)
        found += [_Part(document, n + 1, len(cut), part) for n, part in enumerate(cut)]
        room -= len(excerpt)
        if room < PART:
            break
    return found


def _excerpt(draw: Draw, text: str, most: int) -> str:
    if len(text) <= most:
        return text.strip("\n")
    at = text.rfind("\n", 0, draw.integer(len(text) - most + 1) + 1) + 1
    return text[at : at + most].strip("\n")


def _cut(text: str) -> list[str]:
    """`text` in parts of about `PART` characters, at line ends; each begins with a line that says something."""
    parts, held, size = [], [], 0
    for line in text.split("\n"):
        if size >= PART and line.strip():
            parts.append("\n".join(held))
            held, size = [], 0
        held.append(line)
        size += len(line) + 1
    return [*parts, "\n".join(held)]


def _notes(draw: Draw) -> list[tuple[list[str], str, str]]:
    """Sub-tasks that need no document: (lines in the order they are strewn, question, answer)."""
    names, values = made_up(draw, FACTS + 2 * CHAIN), [int(n) + 10000 for n in draw.integers(90000, FACTS + 2)]
    facts = [
        ([f"Note: the number of {n} is {v}."], f"What is the number of {n}?", f"{v}")
        for n, v in zip(names[:FACTS], values[:FACTS], strict=True)
    ]
    chains = []
    for c in range(2):
        chain, value = names[FACTS + c * CHAIN : FACTS + (c + 1) * CHAIN], values[FACTS + c]
        lines = [
            f"Note: {chain[0]} is another name of {value}.",
            *(f"Note: {b} is another name of {a}." for a, b in itertools.pairwise(chain)),
        ]
        chains.append((lines, f"Which number is {chain[-1]} in the end?", f"{value}"))
    return [*facts, *chains]


def _asked(draw: Draw, notes: list[tuple[list[str], str, str]]) -> list[tuple[list[str], str, str]]:
    """The questions of the notes, and one that needs two of them."""
    a, b = (notes[i] for i in draw.order(FACTS)[:2])
    one, two = (n[1].removeprefix("What is the number of ").removesuffix("?") for n in (a, b))
    return [*notes, ([*a[0], *b[0]], f"What is the sum of the numbers of {one} and {two}?", f"{int(a[2]) + int(b[2])}")]


def _about_parts(draw: Draw, parts: list[_Part]) -> list[tuple[str, str, list[_Part]]]:
    """(question, answer, parts to be read) about the documents that have several parts, and about one line."""
    found: list[tuple[str, str, list[_Part]]] = []
    for document in sorted({p.document for p in parts}):
        mine = [p for p in parts if p.document == document]
        if len(mine) < 2:
            continue
        order = ", ".join(str(p.number) for p in mine)
        found.append((f"In which order do the parts of document {document} stand above?", order, mine))
        chosen = mine[draw.integer(len(mine))]
        following = next((p for p in mine if p.number == chosen.number + 1), None)
        if following is not None:
            question = f"How does the part of document {document} begin that follows part {chosen.number}?"
            found.append((question, following.text.split("\n")[0].strip(), [chosen, following]))
    part = parts[draw.integer(len(parts))]
    lines = [line.strip() for line in part.text.split("\n") if 20 <= len(line.strip()) <= 200]
    alone = [line for line in lines if sum(p.text.count(line) for p in parts) == 1]
    if alone:
        line = alone[draw.integer(len(alone))]
        found.append(
            (f"Which document and which part of it has the line “{line}”?", f"document {part.document}, part {part.number}", [part])
        )
    return found
