"""`check_sandbox`: does a backend keep the contract, and does it hold against hostile code?"""

import asyncio
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from turngym.errors import SandboxError
from turngym.sandboxes.base import Guarantees, Sandbox
from turngym.sandboxes.checking.attack import Attack, capabilities, load_attacks, verdict
from turngym.sandboxes.checking.canaries import Canaries
from turngym.sandboxes.checking.contract import CHECKS, Check
from turngym.sandboxes.checking.escape_programs import ESCAPE_PROGRAMS
from turngym.sandboxes.checking.leaks import descendants, open_files
from turngym.sandboxes.checking.resource_programs import RESOURCE_PROGRAMS
from turngym.sandboxes.factory import create
from turngym.sandboxes.sync import SyncSandbox

__all__ = ["CheckReport", "CheckRow", "acheck_sandbox", "check_sandbox"]

_INFRA_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 0.0)
"""Pauses before another try of a program that the machine, not the sandbox, let down."""

Verdict = Literal["pass", "fail", "breach", "skip"]

_VICTIM = """
import socket, sys
victim_secret = "VICTIM"
sys.victim_mark = 1
open("victim.txt", "w").write("VICTIM")
try:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\\0tg-victim")
    listener.listen()
except OSError:
    listener = None
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """The outcome of one check."""

    name: str
    group: str
    verdict: Verdict
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """All outcomes for one backend."""

    guarantees: Guarantees
    rows: tuple[CheckRow, ...]

    @property
    def ok(self) -> bool:
        """Nothing failed and nothing was breached."""
        return not self.failed

    @property
    def failed(self) -> tuple[CheckRow, ...]:
        """Rows that failed or were breached."""
        return tuple(row for row in self.rows if row.verdict in ("fail", "breach"))

    @property
    def breached(self) -> tuple[CheckRow, ...]:
        """Rows in which code got out."""
        return tuple(row for row in self.rows if row.verdict == "breach")

    def count(self, verdict: Verdict) -> int:
        """How many rows have this verdict."""
        return sum(row.verdict == verdict for row in self.rows)

    def table(self) -> str:
        """Return the outcomes as aligned text."""
        width = max((len(row.name) for row in self.rows), default=4)
        what = self.guarantees
        lines = [
            f"{row.verdict:6}  {row.group:9}  {row.name:{width}}  {row.seconds:6.2f} s  "
            f"{row.detail}".rstrip()
            for row in self.rows
        ]
        counts = ", ".join(f"{self.count(name)} {name}" for name in _VERDICTS if self.count(name))
        return "\n".join([f"sandbox {what.backend}, level {what.level}: {counts}", *lines])


_VERDICTS: tuple[Verdict, ...] = ("pass", "fail", "breach", "skip")


def check_sandbox(
    backend: str | SyncSandbox = "local",
    *,
    attacks: str | Path | None = None,
    only: Iterable[str] | None = None,
    **options: Any,
) -> CheckReport:
    """Run the contract and the hostile programs against a backend.

    Without confinement (level "none") only programs marked harmless are run; that they are then
    reported as breaches shows that the suite can see one.

    Args:
        backend: a backend name, or a running sandbox.
        attacks: a JSON-lines file of further programs; else `$TURNGYM_SHARED`'s, where set.
        only: names of the checks to run; all by default.
        **options: passed to `turngym.sandboxes.create` when `backend` is a name.

    Raises:
        ConfigError, SandboxUnavailableError: as `create`.
        DataError: `attacks` holds something else.
    """
    if isinstance(backend, SyncSandbox):
        return backend._wait(acheck_sandbox(backend._sandbox, attacks=attacks, only=only))

    async def run() -> CheckReport:
        sandbox = await create(backend, **options)
        try:
            return await acheck_sandbox(sandbox, attacks=attacks, only=only)
        finally:
            await sandbox.aclose()

    return asyncio.run(run())


async def acheck_sandbox(
    sandbox: Sandbox,
    *,
    attacks: str | Path | None = None,
    only: Iterable[str] | None = None,
) -> CheckReport:
    """As `check_sandbox`, for a sandbox on the running event loop."""
    wanted = None if only is None else set(only)
    rows: list[CheckRow] = []
    for name, check in CHECKS.items():
        if wanted is None or name in wanted:
            rows.append(await _contract_row(name, check, sandbox))
    programs = [
        *RESOURCE_PROGRAMS,
        *ESCAPE_PROGRAMS,
        *(load_attacks(path) if (path := _file(attacks)) else ()),
    ]
    with Canaries() as canaries:
        suite = _Suite(sandbox, canaries)
        try:
            for attack in programs:
                if wanted is None or attack.name in wanted:
                    rows.append(await suite.row(attack))
        finally:
            await suite.close()
    return CheckReport(guarantees=sandbox.guarantees, rows=tuple(rows))


def _file(attacks: str | Path | None) -> Path | None:
    if attacks is not None:
        return Path(attacks)
    shared = os.environ.get("TURNGYM_SHARED")
    path = Path(shared, "cases", "sandbox", "attacks.jsonl") if shared else None
    return path if path is not None and path.is_file() else None


async def _contract_row(name: str, check: Check, sandbox: Sandbox) -> CheckRow:
    start = time.monotonic()
    verdict: Verdict = "pass"
    try:
        detail = await check(sandbox)
        verdict = "skip" if detail.startswith("skip") else "fail" if detail else "pass"
    except (SandboxError, OSError, AssertionError) as error:
        verdict, detail = "fail", f"{type(error).__name__}: {error}"
    return CheckRow(
        name=name,
        group="contract",
        verdict=verdict,
        detail=detail,
        seconds=time.monotonic() - start,
    )


class _Suite:
    """Runs attacks one by one beside a victim session that must not notice."""

    def __init__(self, sandbox: Sandbox, canaries: Canaries) -> None:
        self._sandbox = sandbox
        self._canaries = canaries
        self._capabilities = capabilities(sandbox.guarantees)
        self._victim: Any = None

    async def close(self) -> None:
        if self._victim is not None:
            await self._victim.close()

    async def row(self, attack: Attack) -> CheckRow:
        start = time.monotonic()
        outcome, detail = await self._judge(attack)
        return CheckRow(
            name=attack.name,
            group=attack.group,
            verdict=outcome,
            detail=detail,
            seconds=time.monotonic() - start,
        )

    async def _judge(self, attack: Attack) -> tuple[Verdict, str]:
        if attack.needs and attack.needs not in self._capabilities:
            return "skip", f"needs {attack.needs}"
        unconfined = self._sandbox.guarantees.level == "none"
        if unconfined and not attack.harmless:
            return "skip", "not run without confinement"
        if self._victim is None:
            self._victim = await self._sandbox.session()
            await self._victim.execute(_VICTIM)
        for pause_s in _INFRA_PAUSES_S:
            before = descendants(), open_files()
            session = await self._sandbox.session()
            try:
                outcome, detail, kind = await verdict(session, attack, self._canaries)
            finally:
                await session.close()
            if kind != "infra":
                break
            await asyncio.sleep(pause_s)
        else:
            load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
            if load > cores:
                return "skip", f"too busy a machine to tell: load {load:.0f} on {cores} cores"
        if outcome != "pass" or unconfined:
            return outcome, detail
        return await self._aftermath(*before)

    async def _aftermath(self, processes: set[int], files: int) -> tuple[Verdict, str]:
        """The victim is unharmed, and nothing is left on this machine."""
        seen = await self._victim.execute("(victim_secret, open('victim.txt').read())")
        if seen.result != "('VICTIM', 'VICTIM')":
            return "breach", f"the victim session was harmed: {seen.status} {seen.result}"
        # Without a mount namespace the session's folder is removed by a process of ours.
        allowed_s = 20.0 if self._sandbox.guarantees.level == "landlock" else 1.0
        deadline = time.monotonic() + allowed_s
        while left := (descendants() - processes):
            if time.monotonic() > deadline:
                return "fail", f"processes left behind: {sorted(left)}"
            await asyncio.sleep(0.02)
        if (now := open_files()) > files:
            return "fail", f"{now - files} file descriptors left open on the host"
        return "pass", ""
