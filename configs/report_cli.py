"""Rebuild a run's report.html and print its summary: `python -m configs.report_cli runs/quickstart`."""

import argparse
import sys

from configs.errors import UserError
from configs.report import write_report
from configs.report_terminal import print_summary


def main() -> None:
    parser = argparse.ArgumentParser(description="Rebuild a run's report.html and print its summary.")
    parser.add_argument("run_dir", help="a run directory, such as runs/quickstart")
    run_dir = parser.parse_args().run_dir
    try:
        print_summary(run_dir, write_report(run_dir))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
