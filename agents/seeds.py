"""Seeds derived from a run's seed and the place they are used at, the same in every process."""

import hashlib

__all__ = ["derive"]

_MASK = (1 << 63) - 1


def derive(seed: int, *parts: int | str) -> int:
    """Return a 63-bit seed for one use of randomness.

    Independent of process, platform and call order, so that a draw does not depend on what else is
    in flight: `derive(run_seed, "sample", ordinal, sample, turn)`.

    Args:
        seed: the run's seed, any integer.
        parts: what tells this use from all others; `1` and `"1"` differ, as do `("ab", "c")` and
            `("a", "bc")`.

    Returns:
        An integer in [0, 2**63).
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *parts):
        kind = b"s" if isinstance(part, str) else b"i"
        text = str(part if isinstance(part, str) else int(part)).encode("utf-8", "surrogatepass")
        digest.update(b"%b%d:%b" % (kind, len(text), text))
    return int.from_bytes(digest.digest(), "little") & _MASK
