r"""Where a response states its answer: the last mark outside the reasoning.

A mark is a complete `\boxed{…}` (or `\fbox`, `\framebox`), an `<answer>…</answer>` tag, or
`#### …` at the end of a line. The last one counts and discarded ones never do; marks are never
merged. Every function is pure, never raises on a string and takes time linear in its length.
"""

import re
from collections import deque
from typing import NamedTuple

__all__ = ["boxes", "final_answer", "stated_answer", "unwrap", "visible"]

MAX_BOXES = 64
"""Boxes looked at from the end, in search of one that is not empty."""

_END_OF_TURN = re.compile(
    r"<\|(?:im_end|im_start|eot_id|end_of_text|endoftext|end|eom_id)\|>|</s>"
    "|<\uff5cend\u2581of\u2581sentence\uff5c>"
)
_THINK = re.compile(
    r"<(?P<close>/)?(?:think|thinking|reasoning|thought)>|(?P<open>\[THINK\])|(?P<shut>\[/THINK\])"
    r"|◁(?P<turn>/)?think▷",
    re.IGNORECASE,
)
_BRACES = re.compile(
    r"\\{1,3}(?:boxed|fbox|framebox)(?![A-Za-z])\s{0,8}(?P<box>\{)?|\\.|[{}]", re.DOTALL
)
_BARE = re.compile(r"[-+]?(?:\d[\d.,]*|\\[A-Za-z]+)[^\s$]*")
_TAG = re.compile(r"<(?P<close>/)?answer>", re.IGNORECASE)
_HASHES = re.compile(r"^[ \t]*####(?!#)(?P<answer>[^\n]*)", re.MULTILINE)
_STATED = re.compile(r"(?:answer|result)\**\s{0,4}(?:\bis\b\s{0,4}:?|:|=)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")


class Box(NamedTuple):
    """Where a box lies in the text: the macro, its content, the end of its closing brace."""

    start: int
    inner: int
    outer: int
    stop: int

    def content(self, text: str) -> str:
        """Return what the box holds."""
        return text[self.inner : self.outer]


def visible(text: str) -> str:
    """Drop the reasoning, and anything after the end of the turn.

    A block that is never closed hides the rest; a closing tag without an opening one (the opening
    tag was part of the prompt) hides everything before it.

    >>> visible("<think>perhaps 4</think>It is 5.")
    'It is 5.'
    >>> visible("perhaps 4</think>It is 5."), visible("<think>perhaps 4")
    ('It is 5.', '')
    """
    if end := _END_OF_TURN.search(text):
        text = text[: end.start()]
    shown: list[str] = []
    start: int | None = 0
    for tag in _THINK.finditer(text):
        if tag["close"] or tag["shut"] or tag["turn"]:
            if start is not None:
                shown.clear()
            start = tag.end()
        elif start is not None:
            shown.append(text[start : tag.start()])
            start = None
    if start is not None:
        shown.append(text[start:])
    return "".join(shown)


def boxes(text: str) -> tuple[list[Box], int | None]:
    r"""Find the complete boxes, and where the last one that was cut off begins.

    Braces are balanced (escaped ones do not count); a box within a box is part of the outer one.

    >>> text = r"\boxed{1}, \boxed{\frac{1}{2}}, \boxed{3"
    >>> found, cut = boxes(text)
    >>> [box.content(text) for box in found], cut
    (['1', '\\frac{1}{2}'], 32)

    Returns:
        Boxes in order of their end, and the start of an unclosed, non-empty box after all of them.
    """
    found: list[Box] = []
    stack: list[tuple[int, int] | None] = []
    for mark in _BRACES.finditer(text):
        token = mark.group()
        if mark["box"]:
            stack.append((mark.start(), mark.end()))
        elif token == "{":
            stack.append(None)
        elif token == "}":
            opened = stack.pop() if stack else None
            if opened is not None:
                start, inner = opened
                while found and found[-1].start > start:
                    found.pop()
                found.append(Box(start, inner, mark.start(), mark.end()))
        elif token[1:2].isalpha() and len(token) > 2 and (bare := _BARE.match(text, mark.end())):
            inner, outer = bare.start(), bare.start() + len(bare.group().rstrip(".,;"))
            found.append(Box(mark.start(), inner, outer, bare.end()))
    last = found[-1].stop if found else 0
    open_boxes = [box for box in stack if box is not None and box[0] >= last]
    cut = open_boxes[-1][0] if open_boxes and text[open_boxes[-1][1] :].strip() else None
    return found, cut


def unwrap(answer: str) -> str:
    r"""Strip white space and boxes that wrap the whole answer.

    >>> unwrap(r" \boxed{\fbox{3}} ")
    '3'
    """
    answer = answer.strip()
    for _ in range(4):
        found, _cut = boxes(answer)
        if not found or found[-1].start > 0 or found[-1].stop < len(answer):
            break
        answer = found[-1].content(answer).strip()
    return answer


def final_answer(response: str, *, fallback: bool = False) -> str | None:
    r"""Return the answer a response commits to, or None when it states none.

    An empty box is skipped. A box cut off by the end of the text is no answer, and neither is
    anything before it.

    Args:
        response: everything the policy said, reasoning included.
        fallback: without a mark, read "the answer is …" (see `stated_answer`).

    >>> final_answer(r"First \boxed{14}. No: \boxed{15}")
    '15'
    >>> final_answer(r"<think>\boxed{42}</think> I cannot tell.") is None
    True
    >>> final_answer("12 + 4 = 16\n#### 16"), final_answer("<answer> B </answer>")
    ('16', 'B')
    """
    text = visible(response)
    found, cut = boxes(text)
    if cut is not None:
        return None
    marks = [(box.stop, unwrap(box.content(text))) for box in found[-MAX_BOXES:]]
    marks += [(stop, _inside(content)) for content, stop in _tagged(text)]
    marks += [(hit.end(), hit["answer"].strip()) for hit in _last_hashes(text)]
    for _, answer in sorted(marks, reverse=True):
        if answer:
            return answer
    return stated_answer(text) if fallback else None


def _tagged(text: str) -> list[tuple[str, int]]:
    """Content and end of the last closed `<answer>` tag."""
    opened: int | None = None
    last: list[tuple[str, int]] = []
    for tag in _TAG.finditer(text):
        if not tag["close"]:
            opened = tag.end()
        elif opened is not None:
            last = [(text[opened : tag.start()], tag.end())]
            opened = None
    return last


def _inside(content: str) -> str:
    found, _ = boxes(content)
    return unwrap(found[-1].content(content)) if found else content.strip()


def _last_hashes(text: str) -> list[re.Match[str]]:
    return list(deque(_HASHES.finditer(text), maxlen=1))


def stated_answer(text: str) -> str | None:
    """Return what follows the last "answer is", "answer:" or "result =", up to the sentence's end.

    Looser than a mark, so `final_answer` uses it only on request.

    >>> stated_answer("The answer is 3. Wait. The answer is 4.")
    '4'
    >>> stated_answer("Final Answer: **73**")
    '73'
    """
    last = deque(_STATED.finditer(text), maxlen=1)
    if not last:
        return None
    answer = text[last[0].end() :].lstrip().partition("\n")[0].strip("* ")
    if end := _SENTENCE_END.search(answer):
        answer = answer[: end.start()]
    return answer.strip("* ") or None
