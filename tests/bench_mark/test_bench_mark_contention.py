"""What the contention benchmark makes of its turns: a difference over the bytes that a rank sends."""

from argparse import Namespace

import pytest
import torch

from bench_mark import bench_mark_contention
from bench_mark.bench_mark_contention import BUCKET_BYTES, measure, show, turn
from parallel.mesh import Mesh

ARGS = Namespace(units=2, megabytes=50, turns=3, warmup=1)


def test_the_loss_is_the_difference_of_turns_over_the_bytes_sent(monkeypatch):
    """Turns of 2 s alone and 3 s beside two buckets, of which a rank of two sends as many bytes as they have."""
    mesh = Mesh(0, 0, 2, torch.device("cpu"), "none", {})
    monkeypatch.setattr(bench_mark_contention, "make_senders", lambda transport, count, mesh: [None] * count)
    monkeypatch.setattr(
        bench_mark_contention, "turn", lambda work, units, senders, mesh: (3.0, 3.5) if senders else (2.0, 2.0)
    )
    row = measure(lambda: None, "backend", mesh, ARGS)
    assert row["sent_bytes"] == 2 * BUCKET_BYTES
    assert row["lost_s_per_byte"] == pytest.approx(1.0 / (2 * BUCKET_BYTES))
    assert row["outlasted"]  # half a second of messages was left when the work was done
    text = show({"transport": "backend", "work": "passes", "predicted": row["lost_s_per_byte"], "ratio": 1.0} | row)
    assert "1.00" in text and "outlast" in text


def test_a_turn_does_its_units_and_waits_for_its_messages():
    mesh, done = Mesh(0, 0, 1, torch.device("cpu"), "none", {}), []

    class Message:
        def wait(self) -> None:
            done.append("waited")

    def send() -> Message:
        done.append("sent")
        return Message()

    seconds, whole = turn(lambda: done.append("work"), 2, [send, send], mesh)
    assert done == ["sent", "sent", "work", "work", "waited", "waited"] and 0 < seconds <= whole
