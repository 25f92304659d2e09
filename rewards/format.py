r"""Whether a response keeps to a format: tags, a boxed answer, exactly one answer.

Each function takes the text of one assistant message (reasoning markup included, where the format
is about it), never a history, and returns 0.0 or 1.0.
"""

import re
from collections.abc import Sequence

from turngym.errors import ConfigError
from turngym.rewards.extract import boxes, visible

__all__ = ["has_box", "single_answer", "tags_in_order"]

_NAME = re.compile(r"[A-Za-z][\w-]*")
_MARK = re.compile(r"</answer>|^[ \t]*####(?!#)[^\n]*\S", re.IGNORECASE | re.MULTILINE)


def tags_in_order(text: str | None, tags: Sequence[str], *, only: bool = False) -> float:
    """Return 1.0 when each tag opens and closes exactly once, one block after the other.

    Args:
        text: one assistant message.
        tags: names in the order they must come.
        only: allow nothing but white space outside the blocks.

    Raises:
        ConfigError: a tag that is no name, or no tags at all.

    >>> tags_in_order("<think>2+2</think><answer>4</answer>", ["think", "answer"])
    1.0
    >>> tags_in_order("<answer>4</answer><think>2+2</think>", ["think", "answer"])
    0.0
    """
    if not tags or any(not _NAME.fullmatch(tag) for tag in tags):
        raise ConfigError(f"tags must be names such as 'think', got {list(tags)}")
    if text is None:
        return 0.0
    names = "|".join(map(re.escape, tags))
    found = list(re.finditer(rf"</?(?:{names})>", text))
    if [mark.group() for mark in found] != [
        part for tag in tags for part in (f"<{tag}>", f"</{tag}>")
    ]:
        return 0.0
    outside = [text[: found[0].start()], text[found[-1].end() :]]
    outside += [text[a.end() : b.start()] for a, b in zip(found[1::2], found[2::2], strict=False)]
    return float(not only or not "".join(outside).strip())


def has_box(text: str | None) -> float:
    r"""Return 1.0 when a complete, non-empty box stands outside the reasoning.

    >>> has_box(r"So \boxed{4}."), has_box(r"<think>\boxed{4}"), has_box(r"\boxed{}")
    (1.0, 0.0, 0.0)
    """
    shown = visible(text or "")
    return float(any(box.content(shown).strip() for box in boxes(shown)[0]))


def single_answer(text: str | None) -> float:
    r"""Return 1.0 when exactly one answer is marked outside the reasoning.

    A mark is a complete box, an `<answer>` block (with or without a box in it) or a `####` line.

    >>> single_answer(r"\boxed{4}"), single_answer(r"\boxed{4}, or \boxed{5}")
    (1.0, 0.0)
    >>> single_answer(r"<answer>\boxed{4}</answer>")
    1.0
    """
    shown = visible(text or "")
    found, cut = boxes(shown)
    blocks = [
        (block.start(), block.end())
        for block in re.finditer(r"<answer>(?:(?!<answer>).)*?</answer>", shown, re.DOTALL)
    ]
    loose = [
        box
        for box in found
        if box.content(shown).strip()
        and not any(start <= box.start < stop for start, stop in blocks)
    ]
    hashes = re.findall(r"^[ \t]*####(?!#)[^\n]*\S", shown, re.MULTILINE)
    return float(cut is None and len(blocks) + len(loose) + len(hashes) == 1)
