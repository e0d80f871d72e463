"""The report page: self-contained, complete, and safe with a model's untrusted output."""

import json

import pytest

from configs.errors import UserError
from configs.report import read_run, write_report
from configs.report_samples import append_samples, printable
from configs.run_dir import RunDir


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


def test_json_in_the_page_cannot_close_its_script(run):
    report = json.loads((run.path / "report.json").read_text())
    report["run"]["name"] = "</script><img src=x>"
    run.write_json("report.json", report)
    assert "</script><img" not in write_report(run.path).read_text()
