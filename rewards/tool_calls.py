"""Turn rewards on how tools are called: penalties only.

Paying for each valid call is farmed: a policy that spams harmless calls earns more than one that
solves the task. So a good call costs nothing, a bad one costs, and progress is paid by the
environment, which alone knows what progress is.
"""

import json
from collections.abc import Sequence

from turngym.rewards.base import ToolResult, TurnView

__all__ = ["failed_calls", "invalid_calls", "repeated_calls"]

_NOT_RUN = frozenset({"unknown_tool", "schema_mismatch"})
_FAILED = frozenset({"tool_error", "timeout"})


def invalid_calls(turn: TurnView) -> float | None:
    """Return minus the share of the turn's calls that could not be read, or named no such tool.

    None when the turn makes no call: there is nothing to judge.

    >>> call = ToolResult(name="calculate", arguments={"x": 1}, error="schema_mismatch")
    >>> message = {"role": "assistant", "content": ""}
    >>> invalid_calls(TurnView(index=0, message=message, results=(call,)))
    -1.0
    """
    unread = len(turn.invalid_tool_calls)
    rejected = sum(result.error in _NOT_RUN for result in turn.results)
    calls = max(len(turn.tool_calls) + unread, len(turn.results))
    if not calls:
        return None
    return -min(1.0, (unread + rejected) / calls)


def failed_calls(turn: TurnView) -> float | None:
    """Return minus the share of the turn's valid calls whose tool failed or timed out.

    None when no valid call was made.
    """
    ran = [result for result in turn.results if result.ok or result.error in _FAILED]
    if not ran:
        return None
    return -sum(not result.ok for result in ran) / len(ran)


def repeated_calls(turns: Sequence[TurnView]) -> float | None:
    """Return minus the share of the last turn's calls that were made before with equal arguments.

    Only calls that succeeded before count: repeating a call that failed may be a fair retry.
    None when the last turn makes no call.

    Args:
        turns: the episode's turns so far, the one to score last.
    """
    if not turns or not turns[-1].results:
        return None
    seen = {_key(result) for turn in turns[:-1] for result in turn.results if result.ok}
    repeats = 0
    for result in turns[-1].results:
        repeats += _key(result) in seen
        if result.ok:
            seen.add(_key(result))
    return -repeats / len(turns[-1].results)


def _key(result: ToolResult) -> str:
    return json.dumps([result.name, dict(result.arguments)], sort_keys=True, default=repr)
