"""Files of a run directory are whole or not there, and a resumed record has no line twice."""

import json
import os

import pytest

from configs.errors import UserError
from configs.run_dir import RunDir, read_json, read_jsonl, write_text_atomic


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_text_atomic(path, "old")

    def fail(_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_text_atomic(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_lines_after_a_step_are_dropped_and_half_a_line_is_left_out(tmp_path):
    run = RunDir(tmp_path / "run")
    run.create()
    run.append_jsonl("metrics.jsonl", [{"step": step} for step in (1, 2, 3)])
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # a kill in the middle of a write
    assert [line["step"] for line in read_jsonl(run.path / "metrics.jsonl")] == [1, 2, 3]
    run.drop_lines_after("metrics.jsonl", 2)
    run.append_jsonl("metrics.jsonl", [{"step": 3, "again": True}])
    assert [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_broken_json_is_named(tmp_path):
    (tmp_path / "x.json").write_text("{")
    for name in ("x.json", "y.json"):
        with pytest.raises(UserError, match=name):
            read_json(tmp_path / name)
