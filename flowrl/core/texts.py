"""Numbers as people read them."""

from __future__ import annotations

from fractions import Fraction


def amount(n: Fraction, word: str) -> str:
    """``3 minibatches``, ``1.25 calls``."""
    number = f"{n.numerator:,}" if n.denominator == 1 else f"{float(n):,.4g}"
    return f"{number} {word}{('es' if word.endswith('tch') else 's') * (n != 1)}"


def in_bytes(n: int) -> str:
    """``36.6 KB``."""
    for unit in ("B", "KB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n = n / 1000  # type: ignore[assignment]
    return f"{n:.3g} GB"
