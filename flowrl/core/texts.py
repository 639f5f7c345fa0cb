"""Numbers as text for people to read."""

from __future__ import annotations

import math
from fractions import Fraction


def plural(count: float, word: str) -> str:
    """Return a word in the singular for a count of 1, else in the plural.

    >>> plural(1, "step"), plural(2, "epoch"), plural(2, "batch"), plural(0, "process")
    ('step', 'epochs', 'batches', 'processes')
    """
    if count == 1:
        return word
    return f"{word}es" if word.endswith(("tch", "sh", "s", "x")) else f"{word}s"


def amount(n: Fraction, word: str) -> str:
    """Return a number of things as text, such as ``3 minibatches`` or ``1.25 calls``."""
    number = f"{n.numerator:,}" if n.denominator == 1 else f"{float(n):,.4g}"
    return f"{number} {plural(float(n), word)}"


def decimal(x: float) -> str:
    """Return a number with one decimal, or as many more as a small one has among three digits.

    >>> decimal(1234.56), decimal(9.0), decimal(0.9123), decimal(-0.05), decimal(0.0)
    ('1,234.6', '9.0', '0.912', '-0.05', '0.0')
    """
    if not math.isfinite(x) or x == 0:
        return f"{x:.1f}"
    digits = max(1, 2 - math.floor(math.log10(abs(x))))
    whole, _, rest = f"{x:,.{digits}f}".partition(".")
    return f"{whole}.{rest[0]}{rest[1:].rstrip('0')}"


def in_bytes(n: int) -> str:
    """Return a number of bytes with its unit, such as ``36.6 KB``."""
    size = float(n)
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
