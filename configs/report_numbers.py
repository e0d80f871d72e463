"""Numbers as people read them: 1.5 GiB, 12.3 ms, 124.4M; the same on the page and in the terminal."""

import math

SCALES = {
    "bytes": [("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)],
    "s": [("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3), ("µs", 1e-6)],
    "": [("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3), ("", 1)],
}


def format_quantity(value: float | None, unit: str = "") -> str:
    """A value of a unit in three or four digits; a dash for an unknown one.

    "bytes" and "s" choose their own scale, "fraction" is shown in percent, other units follow a scaled number.
    """
    if value is None or not math.isfinite(value):
        return "–"
    if unit == "fraction":
        return f"{100 * value:.1f}%"
    scales = SCALES.get(unit, SCALES[""])
    # 0.9995 of a scale would round up to it.
    name, scale = next((pair for pair in scales if abs(value) >= 0.9995 * pair[1]), scales[-1])
    if unit in SCALES and unit:
        return f"{digits(value / scale)} {name}"
    return f"{digits(value / scale)}{name if scale > 1 else ''}" + (f" {unit}" if unit else "")


def digits(value: float) -> str:
    """Three significant digits below 100 and one decimal above; whole numbers as they are."""
    if value == int(value) and abs(value) < 10_000:
        return str(int(value))
    if abs(value) >= 100:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
    return f"{value:.3g}"


def format_ratio(ratio: float | None) -> str:
    return "–" if ratio is None or not math.isfinite(ratio) else f"{ratio:.2f}"


def is_within_bounds(ratio: float | None) -> bool | None:
    """Whether measured / predicted lies in 0.8..1.25, beyond which a gap is to be explained; None if unknown."""
    return None if ratio is None or not math.isfinite(ratio) else 0.8 <= ratio <= 1.25
