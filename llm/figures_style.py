"""How every figure of the docs looks, and how it is written: a png to look at and a pdf to print, both reproducible."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe & Ito's colours, which people with colour-blindness tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
INK, GRID = "#222222", "#dddddd"
MAX_RASTER_DPI = 110
SETTINGS = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # fonts as outlines of whole letters, which any viewer can search
    "svg.hashsalt": "mew",
    "font.family": "DejaVu Sans",
}


@contextmanager
def styled(width: float, height: float) -> Iterator[Figure]:
    """A figure of this size in inches, with the house's settings while it is drawn."""
    with rc_context(SETTINGS):
        yield Figure(figsize=(width, height), layout="constrained")


def dress(axes: Axes, title: str = "", x: str = "", y: str = "") -> Axes:
    """Titles and a quiet grid."""
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def save(figure: Figure, stem: str | Path) -> list[Path]:
    """Write STEM.png and STEM.pdf; without dates in them, equal figures are equal files."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.pdf")]
    with rc_context(SETTINGS):
        figure.savefig(paths[0], dpi=MAX_RASTER_DPI, metadata={"Software": None})
        figure.savefig(paths[1], metadata={"CreationDate": None, "Producer": None, "Creator": None})
    return paths
