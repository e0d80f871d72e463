"""The profile in the report page: what its tables and its figure say, and that names in it stay text."""

import json

import pytest

from configs.errors import UserError
from configs.report import write_report
from configs.report_profile import memory_figure, read_profile, times_table
from configs.run_dir import RunDir

MIB = 2**20


def block(nbytes: int, category: str, **more) -> dict:
    known = {"phase": "forward", "module": None, "name": "", "born_ms": 1.0, "died_ms": None, "at_peak": True}
    return {"bytes": nbytes, "category": category} | known | more


@pytest.fixture
def memory() -> dict:
    blocks = [
        block(3 * MIB, "weights", name="output.weight", phase=None, born_ms=None),
        block(MIB, "activations", module="blocks.0.<img src=x>", died_ms=2.5),
    ]
    return {
        "source": "bytes of live tensors", "measured": {"requested_peak_bytes": 5 * MIB}, "changes": 2,
        "phases": [{"name": "forward", "start_ms": 0.5, "end_ms": 2.0}], "times_ms": [0.0, 1.0, 2.5],
        "categories": {"weights": [3 * MIB] * 3, "activations": [0, MIB, 0], "other": [0, 0, 0]},
        "largest": [[0], [0, 1], [0]], "blocks": blocks, "table": [0, 1],
        "peak": {"ms": 1.0, "bytes": 4 * MIB, "categories": {}},
    }  # fmt: skip


def breakdown(device: str, rows: int = 2) -> dict:
    named = [
        {"module": f"blocks.*.part_{row}", "host_ms": {"forward": 0.5}, "device_ms": {"forward": 1.0, "backward": 2.0}}
        for row in range(rows)
    ]
    named.append({"module": "(optimizer)", "host_ms": {"optimizer": 0.25}, "device_ms": {"optimizer": 0.5}})
    operations = [{"name": "void gemm<float>", "calls": 12.0, "ms": 4.0}]
    return {"device": device, "steps": 2, "step_ms": 10.0, "busy_ms": 7.0, "rows": named, "operations": operations}


def test_a_run_without_a_profile_has_no_section_and_one_with_a_profile_has(tmp_path, memory):
    run = RunDir(tmp_path / "trial")
    run.create()
    run.write_json("report.json", {"run": {"name": "trial"}, "predicted": {}, "measured": {}, "rows": []})
    assert "<h2>Profile</h2>" not in write_report(run.path).read_text()
    run.write_json("profile/memory.json", memory)
    run.write_json("profile/breakdown.json", breakdown("cuda"))
    page = write_report(run.path).read_text()
    for told in (
        "<h2>Profile</h2>",
        "blocks.*.part_1",
        "(GPU idle)",
        "Largest blocks",
        "output.weight",
        "requested peak 5 MiB",
    ):
        assert told in page, told
    assert "<img src=x>" not in page and "&lt;img src=x&gt;" in page and "gemm&lt;float&gt;" in page
    figures = json.loads(page.split('id="figures">')[1].split("</script>")[0])
    assert [figure["name"] for figure in figures] == ["profile_memory"]
    (run.path / "profile" / "memory.json").write_text("{")
    with pytest.raises(UserError, match=r"memory.json is not valid JSON"):
        write_report(run.path)


def test_the_memory_figure_stacks_what_is_there(memory):
    figure = memory_figure(memory)
    assert [(t["name"], t["y"]) for t in figure.traces] == [
        ("weights", [3.0] * 3), ("activations", [0.0, 1.0, 0.0]), ("total", [3.0, 4.0, 3.0])
    ]  # fmt: skip
    assert figure.y_title == "MiB" and figure.spans == [{"x0": 0.5, "x1": 2.0, "label": "forward"}]
    assert figure.hlines == [{"y": 4.0, "label": "peak 4 MiB"}]
    assert figure.traces[-1]["text"][1].split("<br>") == [
        "3 MiB weights output.weight", "1 MiB activations blocks.0.&lt;img src=x&gt;"
    ]  # fmt: skip
    assert memory_figure({}) is None


@pytest.mark.parametrize(
    ("device", "cells"),
    [
        ("cuda", ["blocks.*.part_0", "1.000", "2.000", "", "3.000", "30.0%", "0.500"]),
        ("cpu", ["blocks.*.part_0", "0.500", "", "", "0.500", "5.0%"]),
    ],
)
def test_the_table_of_times_counts_the_device_that_works(device, cells):
    rows = rows_of(times_table(breakdown(device)))
    assert cells in rows
    assert (["(GPU idle)", "", "", "3.000", "3.000", "30.0%", ""] in rows) == (device == "cuda")


def test_rows_beyond_the_table_are_added_up():
    rows = rows_of(times_table(breakdown("cuda", rows=30)))
    assert ["7 more", "6.000", "12.000", "0.500", "18.500", "185.0%", "3.250"] in rows


def test_what_is_no_profile_is_empty(tmp_path):
    profile = read_profile(tmp_path)
    assert profile.memory == profile.breakdown == {} and times_table({}) == ""


def rows_of(html: str) -> list[list[str]]:
    """The cells of each row of the first table."""
    body = html.split("<tbody>")[1].split("</tbody>")[0]
    return [
        [cell.split(">", 1)[1].removesuffix("</td>") for cell in row.split("<td")[1:]]
        for row in body.removesuffix("</tr>").split("</tr>")
    ]
