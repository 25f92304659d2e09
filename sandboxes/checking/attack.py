"""Hostile programs: what one looks like, where they come from, whether a sandbox held."""

import json
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from turngym.errors import DataError, SessionLostError
from turngym.sandboxes.base import ExecResult, Guarantees, Session
from turngym.sandboxes.checking.canaries import Canaries

__all__ = ["Attack", "capabilities", "load_attacks", "program", "verdict"]

_SLACK_S = 3.0
_KEYS = {"name", "group", "code", "expect", "timeout", "needs", "after", "note", "harmless"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One program, or several cells of one session."""

    name: str
    group: str
    code: tuple[str, ...]

    expect: Mapping[str, Any] = field(default_factory=dict)
    """`kind`: allowed statuses of the last cell (or session_dead); `error`: allowed exception
    names; `has`: part of stdout; `result`: exact repr; `max_out`: characters of stdout;
    `max_wall`: seconds; `state_lost`."""

    timeout_s: float = 3.0
    needs: str = ""
    """Capability without which the program proves nothing; see `capabilities`."""

    after: bool = True
    """A fresh cell must work afterwards."""

    harmless: bool = False
    """Safe to run without any confinement, as the negative control does."""


def program(name: str, group: str, code: str | list[str], **rest: Any) -> Attack:
    """Build an attack of this package: indented code, expectations and fields as keywords."""
    cells = [code] if isinstance(code, str) else code
    names = {"timeout_s", "needs", "after", "harmless"} & rest.keys()
    fields = {key: rest.pop(key) for key in names}
    texts = tuple(textwrap.dedent(cell).strip("\n") for cell in cells)
    return Attack(name=name, group=group, code=texts, expect=rest, **fields)


_HARMLESS = frozenset(  # of the programs that come in files, which cannot say so themselves
    """
    tcp_connect_host udp_send_host unix_socket_host abstract_socket_host read_host_canary
    symlink_out env_secrets kill_host_pid raw_packet_vsock_alg process_vm_readv clone_newuser_raw
    clone3_newuser state_isolated_between_sessions cross_session_abstract sysv_shm
    """.split()  # noqa: SIM905
)


def load_attacks(path: str | Path) -> tuple[Attack, ...]:
    """Read a JSON-lines file of attacks.

    Raises:
        DataError: names file and line.
    """
    attacks = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if unknown := set(row) - _KEYS:
                raise DataError(f"unknown keys {sorted(unknown)}")
            code = row["code"]
            attacks.append(
                Attack(
                    name=row["name"],
                    group=row["group"],
                    code=(code,) if isinstance(code, str) else tuple(code),
                    expect=row["expect"],
                    timeout_s=float(row.get("timeout", 3.0)),
                    needs=row.get("needs", ""),
                    after=row.get("after", True),
                    harmless=row.get("harmless", row["name"] in _HARMLESS),
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number}: not an attack: {error!r}") from error
    return tuple(attacks)


def capabilities(guarantees: Guarantees) -> frozenset[str]:
    """What of a backend the attacks may rely on being there."""
    if guarantees.level == "landlock":
        return frozenset({"supervisor_protected"})
    everything = {"fork", "nproc", "netns", "supervisor_protected"}
    return frozenset(everything | {"quota"} if guarantees.disk == "hard" else everything)


async def run_cells(
    session: Session, attack: Attack, places: Mapping[str, str]
) -> tuple[str, ExecResult | None, float]:
    """Run the cells; returns how the last one ended, its result and its wall time."""
    kind, result, wall_s = "ok", None, 0.0
    for cell in attack.code:
        for mark, text in places.items():
            cell = cell.replace(mark, text)
        start = time.monotonic()
        try:
            result = await session.execute(cell, attack.timeout_s)
            kind = result.status
        except SessionLostError:
            kind, result = "session_dead", None
        wall_s = time.monotonic() - start
        if kind == "session_dead":
            break
    return kind, result, wall_s


async def verdict(
    session: Session, attack: Attack, canaries: Canaries
) -> tuple[Literal["pass", "fail", "breach"], str, str]:
    """Run one attack; returns (pass | fail | breach, why, how the last cell ended)."""
    kind, result, wall_s = await run_cells(session, attack, canaries.places)
    if touched := canaries.touched():
        return "breach", f"reached {', '.join(touched)}", kind
    if result is not None and _escaped(result):
        return "breach", f"reports {result.stdout.strip()[:200]!r}", kind
    if reason := _unexpected(attack, kind, result, wall_s):
        return "fail", reason, kind
    if attack.after and kind != "session_dead":
        again = await session.execute("1+1", 5.0)
        if again.result != "2":
            return "fail", f"afterwards 1+1 gave {again.status} {again.result!r}", kind
    return "pass", "", kind


def _escaped(result: ExecResult) -> bool:
    texts: Sequence[str | None] = (result.stdout, result.stderr, result.result)
    return any("ESCAPED" in text for text in texts if text)


def _unexpected(attack: Attack, kind: str, result: ExecResult | None, wall_s: float) -> str:
    """Return what differs from the expectation, or an empty text."""
    expect = attack.expect
    allowed = expect.get("kind")
    if allowed is not None and kind not in allowed:
        detail = "" if result is None else f" ({(result.stderr or result.stdout)[-200:]!r})"
        return f"ended as {kind}, expected one of {sorted(allowed)}{detail}"
    limit = float(expect.get("max_wall", attack.timeout_s + _SLACK_S))
    if wall_s > limit:
        return f"took {wall_s:.1f} s, allowed {limit:.1f}"
    if result is None:
        return ""
    names = expect.get("error")
    if kind == "error" and names and (result.error is None or result.error.name not in names):
        return f"raised {result.error and result.error.name}, expected one of {sorted(names)}"
    if (part := expect.get("has")) and part not in result.stdout:
        return f"{part!r} is not in stdout {result.stdout[-200:]!r}"
    if kind == "ok" and "result" in expect and result.result != expect["result"]:
        return f"result {result.result!r}, expected {expect['result']!r}"
    if len(result.stdout) > expect.get("max_out", float("inf")):
        return f"{len(result.stdout)} characters of stdout, allowed {expect['max_out']}"
    if "state_lost" in expect and result.state_lost != expect["state_lost"]:
        return f"state_lost is {result.state_lost}, expected {expect['state_lost']}"
    return ""
