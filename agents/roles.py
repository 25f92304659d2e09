"""Which sampled tokens reason and which act: one pure function of the token prefix.

The state starts as reasoning in every turn, so that an unclosed tag leaks into nothing; an opening
tag of the dialect switches to action, a closing tag back; tags inside reasoning blocks are text.
The role of token t + 1 is the state after consuming token t: the opening tag itself is a reasoning
decision, the closing tag still action (DART, arXiv:2602.00994, section 5: the state at t chooses
the adapter that produces the log-probability of token t + 1).

The state is defined on text, so a tag may be one token or many: it is consumed with the token that
completes it. Text is the concatenation of the tokens' own texts (`Codec.piece`), which makes the
function incremental: `roles(ids)[:n] == roles(ids[:n])`. A closing tag that is spelled inside a
string argument switches back early; the parser, which sees the whole call, knows better.
"""

import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from turngym.agents.parsing.common import RoleTable
from turngym.types import TokenRole

__all__ = ["RoleMachine", "RoleTracker"]


class RoleMachine:
    """The compiled table of a dialect; makes a tracker a turn.

    Args:
        table: states and markers of the dialect.
        in_reasoning: the prompt of every turn ends inside an opened reasoning block.
    """

    def __init__(self, table: RoleTable, *, in_reasoning: bool = False) -> None:
        self.initial = "think" if in_reasoning else "text"
        self.leading = table.leading
        self.markers = table.markers
        self.patterns = {
            state: re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
            for state, markers in table.markers.items()
            if markers
        }
        self.reach = {
            state: max(map(len, markers)) - 1 for state, markers in table.markers.items() if markers
        }

    def start(self) -> "RoleTracker":
        """Return a tracker at the start of a turn."""
        return RoleTracker(self)

    def roles(self, pieces: Iterable[str]) -> NDArray[np.int8]:
        """Return the `TokenRole` of each token of one completion, given the tokens' texts."""
        tracker = self.start()
        roles = []
        for piece in pieces:
            roles.append(tracker.role)
            tracker.push(piece)
        return np.array(roles, np.int8)


class RoleTracker:
    """State of one turn; `role` is the role of the token to come."""

    def __init__(self, machine: RoleMachine) -> None:
        self._machine = machine
        self._state = machine.initial
        self._tail = ""
        self._is_leading = bool(machine.leading)

    @property
    def role(self) -> TokenRole:
        """Role of the next token."""
        return TokenRole.ACTION if self._state == "action" else TokenRole.REASONING

    @property
    def in_reasoning(self) -> bool:
        """A reasoning block is open."""
        return self._state == "think"

    def push(self, piece: str) -> TokenRole:
        """Consume a token's text; return the role of the token after it."""
        text = self._tail + piece
        if self._is_leading and self._state == "text" and self._lead(text):
            self._tail = text
            return self.role
        machine = self._machine
        while pattern := machine.patterns.get(self._state):
            match = pattern.search(text)
            if match is None:
                reach = machine.reach[self._state]
                text = text[-reach:] if reach else ""
                break
            self._state = machine.markers[self._state][match.group()]
            text = text[match.end() :]
        else:
            text = ""
        self._tail = text
        return self.role

    def _lead(self, text: str) -> bool:
        """Look for a marker that counts only at the beginning; True while it may yet come."""
        said = text.lstrip()
        if said.startswith(self._machine.leading):
            self._state = "action"
        elif any(marker.startswith(said) for marker in (*self._machine.leading, "<think>")):
            return True
        self._is_leading = said.startswith("<think>")
        return False
