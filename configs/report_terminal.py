"""The end of a run on the terminal: predicted and measured, the validation's figures, a sample, where the page is."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from configs.report import RunFiles, fixed, read_run, run_name
from configs.report_numbers import format_quantity, format_ratio, is_within_bounds
from configs.report_samples import printable

SAMPLE_CHARACTERS = 600


def print_summary(run_dir: str | Path, page: Path, console: Console | None = None) -> None:
    """Print what `make quickstart` ends with; `page` is the report that was written."""
    console = console or Console()
    run = read_run(run_dir)
    if run.samples:
        print_sample(run, console)
    if run.report.get("rows"):
        console.print(comparison_table(run))
    validation = run.validation
    console.print(
        f"validation loss {fixed(validation.get('loss'), 4)} nats, "
        f"bits per byte {fixed(validation.get('bits_per_byte'), 4)}, "
        f"perplexity {format_quantity(validation.get('perplexity'))}",
        highlight=False,
    )
    # Paths are printed plainly: rich would break a long one over lines, and a click needs it whole.
    console.print(f"run directory   {run.path}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"report          {page}", markup=False, highlight=False, soft_wrap=True)


def comparison_table(run: RunFiles) -> Table:
    """The rows of report.json; a ratio outside 0.8..1.25 stands out."""
    table = Table(title=escape(f"{run_name(run)}: predicted and measured"), title_justify="left")
    table.add_column("quantity")
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note", style="dim", overflow="fold")
    for row in run.report["rows"]:
        style = {True: "green", False: "yellow", None: "dim"}[is_within_bounds(row["ratio"])]
        cells = [format_quantity(row[name], row["unit"]) for name in ("predicted", "measured")]
        ratio = f"[{style}]{format_ratio(row['ratio'])}[/{style}]"
        table.add_row(escape(row["quantity"]), *map(escape, cells), ratio, escape(row["note"] or ""))
    return table


def print_sample(run: RunFiles, console: Console) -> None:
    """The newest sample, cut to a screenful."""
    sample = run.samples[-1]
    text = printable(sample.text)
    cut = text[:SAMPLE_CHARACTERS] + (" [...]" if len(text) > SAMPLE_CHARACTERS else "")
    console.print(f"sample ({printable(sample.heading)})", style="bold", markup=False, highlight=False)
    console.print(cut + "\n", markup=False, highlight=False, emoji=False)
