"""The report's parts for reinforcement learning: curves where there are rollouts, completions as untrusted text."""

import json

from configs.report import build_page, read_run
from configs.report_figures import loss_figure
from configs.report_rl import completions_section, rl_figures

LINES = [
    {"step": step, "reward": 0.1 * step, "format_reward": 1.0, "response_tokens": 20.0, "rollout_s": 1.0 + step,
     "reward_s": 0.01, "log_prob_s": 0.0, "update_s": 2.0, "sync_s": 0.1, "wait_s": 0.0, "entropy": 0.3}
    for step in (1, 2, 3)
]  # fmt: skip
ATTACK = {"step": 3, "question": "What?", "completion": "</td><script>alert(1)</script>\x1b[2J", "answer": "8",
          "reward": 1.0, "advantage": -0.5, "tokens": 7}  # fmt: skip


def test_curves_are_those_of_the_fields_that_are_there():
    figures = {figure.name: figure for figure in rl_figures(LINES)}
    assert figures["reward"].traces[0]["y"] == [0.1, 0.2, 0.30000000000000004] and len(figures["reward"].traces) == 2
    split = {trace["name"]: trace["y"] for trace in figures["rl_time"].traces}
    assert split["rollout"] == [2.0, 3.0, 4.0] and split["update"] == [2.0] * 3
    assert "log-probs" not in split and "waiting" not in split, "parts that took no time are not drawn"
    assert "policy_kl" not in figures
    assert rl_figures([{"step": 1, "loss": 2.0}]) == []


def test_completions_are_escaped():
    section = completions_section([ATTACK])
    assert "<script>" not in section and "&lt;script&gt;" in section
    assert "\x1b" not in section and "\u241b" in section
    assert ">1.00<" in section and ">-0.50<" in section and ">7<" in section
    assert completions_section([]) == ""
    assert "–" in completions_section([{"step": 1}]), "a record without its numbers is still shown"


def test_the_page_of_a_run_shows_both(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (tmp_path / "completions.jsonl").write_text(json.dumps(ATTACK) + "\n")
    page = build_page(read_run(tmp_path))
    assert "Where a batch" in page and "<h2>Completions</h2>" in page and "<script>alert" not in page


def test_a_policys_loss_is_not_shown_as_nats_that_fall():
    policy, plain = (loss_figure([{"step": 1, "loss": 2.0} | fields]) for fields in ({"reward": 0.5}, {}))
    assert "straight line" in plain.caption and plain.log_x_switch and plain.y_title == "loss (nats)"
    assert "straight line" not in policy.caption and not policy.log_x_switch and policy.traces[0]["y"] == [2.0]
