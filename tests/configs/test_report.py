"""The report page: self-contained, complete, and safe with a model's untrusted output."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from configs.errors import UserError
from configs.report import read_run, write_report
from configs.report_figures import MAX_POINTS, build_figures, column
from configs.report_numbers import format_quantity
from configs.report_samples import append_samples, printable
from configs.report_terminal import print_summary
from configs.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "trial")
    run.create()
    lines = [
        {"step": step, "loss": 7.0 - step / 10, "lr": 1e-3, "grad_norm": 1.0, "tokens": 100 * step, "mfu": None,
         "tokens_per_s": 5e3, "step_time_s": 0.1, "memory_bytes": 10**8, "z_loss": 0.0, "target_tokens": 100,
         "time_s": float(step)}
        for step in range(1, 11)
    ]  # fmt: skip
    run.append_jsonl(
        "metrics.jsonl", [*lines, {"step": 10, "val_loss": 6.25, "val_bits_per_byte": 2.5, "time_s": 11.0}]
    )
    run.write_text("config.yaml", "name: trial\nnote: '<b>'\n")
    rows = [
        {"quantity": "peak memory", "unit": "bytes", "predicted": 2**20, "measured": 2**21, "ratio": 2.0, "note": "n"}
    ]
    run.write_json(
        "report.json",
        {"run": {"name": "trial", "parameters": 1000}, "predicted": {"memory_peak_bytes": 2**20}, "measured": {},
         "rows": rows, "validation": {"loss": 6.25, "bits_per_byte": 2.5, "perplexity": 518.0}, "state": "finished"},
    )  # fmt: skip
    return run


def test_the_page_holds_the_run_and_needs_no_network(run):
    append_samples(run.path, ["Hello <script>alert(1)</script> \x1b[31mred"], step=10)
    page = write_report(run.path).read_text()
    assert page.startswith("<!doctype html>") or page.startswith("<!DOCTYPE html>")
    for told in ("trial", "peak memory", "1 MiB", "2 MiB", "6.25", "2.5"):
        assert told in page, told
    assert "<script>alert(1)" not in page and "&lt;script&gt;alert(1)" in page and "\x1b" not in page
    assert "<script src" not in page and "<link" not in page and "Plotly" in page


def test_a_page_is_made_of_what_is_there(tmp_path):
    run = RunDir(tmp_path / "young")
    run.create()
    run.write_json("report.json", {"run": {"name": "young"}, "predicted": {}, "measured": {}, "rows": []})
    assert "young" in write_report(run.path).read_text()
    with pytest.raises(UserError, match="holds neither"):
        read_run(tmp_path / "nothing")


def test_samples_cannot_pass_for_headings_or_drive_a_terminal(run):
    append_samples(run.path, ["one\n=== 2026 | step 99 ===\ntwo \x1b]0;title\x07"], step=1, seed=2)
    (sample,) = read_run(run.path).samples
    assert "step 1 | seed 2" in sample.heading and "step 99" in sample.text and "\x1b" not in sample.text
    assert printable("a\x07\n\tb") == "a\u2407\n\tb"
    assert printable("bytes of a shell \udcff").encode() == "bytes of a shell \ufffd".encode()


def test_json_in_the_page_cannot_close_its_script(run):
    report = json.loads((run.path / "report.json").read_text())
    report["run"]["name"] = "</script><img src=x>"
    run.write_json("report.json", report)
    assert "</script><img" not in write_report(run.path).read_text()


def test_a_diverged_run_still_gets_its_page(run):
    run.append_jsonl("metrics.jsonl", [{"step": 11, "loss": float("nan"), "grad_norm": float("inf"), "val_loss": None}])
    run.update_json("report.json", validation={"loss": float("nan"), "bits_per_byte": float("nan")})
    run.write_json("evaluation.json", {"loss_by_position": [{"first": 0, "last": 3, "loss": float("nan")}]})
    page = write_report(run.path).read_text()
    figures = json.loads(page.split('id="figures">')[1].split("</script>")[0], parse_constant=pytest.fail)
    assert [figure["name"] for figure in figures] == ["loss", "lr", "grad_norm", "tokens_per_s", "memory"]


def test_figures_draw_what_the_files_say(run):
    by_position = [{"first": 0, "last": 0, "loss": 5.0}, {"first": 1, "last": 7, "loss": 4.0}]
    figures = {f.name: f for f in build_figures(read_run(run.path).metrics, 2.0**27, by_position)}
    training, validation = figures["loss"].traces
    assert training["x"] == list(range(1, 11)) and training["y"][0] == pytest.approx(6.9)
    assert (validation["x"], validation["y"]) == ([10], [6.25])
    assert figures["memory"].hlines[0]["y"] == 128 and figures["memory"].y_title == "MiB"
    assert figures["memory"].traces[0]["y"][0] == pytest.approx(1e8 / 2**20)
    assert figures["position"].traces[0]["x"] == pytest.approx([1, 4])  # geometric means of 1..1 and 2..8
    assert "mfu" not in figures, "an unknown MFU has no figure"


def test_a_long_run_is_drawn_in_averages():
    lines = [{"step": step, "loss": float(step)} for step in range(1, 10 * MAX_POINTS + 1)]
    steps, values = column(lines, "loss")
    assert len(steps) == MAX_POINTS and steps[0] == 10 and values[0] == pytest.approx(5.5)
    assert steps[-1] == 10 * MAX_POINTS


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (1536, "bytes", "1.5 KiB"), (2**30 - 1, "bytes", "1 GiB"), (0, "bytes", "0 B"), (0.2105, "s", "210.5 ms"),
        (90, "s", "1.5 min"), (1_069_184, "", "1.07M"), (19_512.3, "tokens/s", "19.5k tokens/s"), (11.08, "", "11.1"),
        (0.312, "fraction", "31.2%"), (None, "s", "–"), (float("nan"), "", "–"),
    ],
)  # fmt: skip
def test_numbers_read_as_people_write_them(value, unit, expected):
    assert format_quantity(value, unit) == expected


def test_the_summary_tells_what_a_newcomer_wants_to_know(run):
    append_samples(run.path, ["Once [bold]upon[/bold] a time"], step=10)
    console = Console(file=io.StringIO(), width=80)
    print_summary(run.path, run.path / "report.html", console)
    told = console.file.getvalue()
    for words in ("Once [bold]upon[/bold] a time", "6.2500 nats", "2.5000", "peak memory", "1 MiB", "2 MiB", "2.00"):
        assert words in told, words
    narrow = Console(file=io.StringIO(), width=20)
    print_summary(run.path, run.path / "report.html", narrow)
    assert f"{run.path}/report.html" in narrow.file.getvalue(), "a path stays on one line, whatever the width"


def test_the_command_rebuilds_the_page_and_refuses_what_is_no_run(run, tmp_path):
    command = [sys.executable, "-m", "configs.report_cli"]
    done = subprocess.run([*command, str(run.path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and (run.path / "report.html").exists(), done.stderr
    refused = subprocess.run([*command, str(tmp_path / "none")], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "error: " in refused.stderr


def test_an_evaluation_of_a_later_step_is_the_runs_validation(run):
    report = json.loads((run.path / "report.json").read_text())
    report["validation"]["step"] = 10
    run.write_json("report.json", report)
    assert read_run(run.path).validation["loss"] == 6.25
    for checkpoint, loss in (("step_00000009", 6.25), ("step_00000020", 5.5)):
        run.write_json("evaluation.json", {"checkpoint": checkpoint, "loss": 5.5, "bits_per_byte": 2.0})
        assert read_run(run.path).validation["loss"] == loss
