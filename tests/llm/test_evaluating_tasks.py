"""lm-evaluation-harness on a run of ours, with local tasks: choices, perplexity of texts, and writing."""

import json
from types import SimpleNamespace

import pytest

from configs.errors import UserError
from configs.loader import compose_config
from llm.args import TrainConfig
from llm.evaluating_tasks import TasksConfig, numbers_of, run_tasks
from llm.training import train
from tests.tolerances import FP32_FORWARD

CHOICES = """task: ends
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXTS = """task: whole
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{context}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
WRITING = """task: write
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{written}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 5, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
CONTEXTS = ["The cat", "The dog ran", "One day the"]


@pytest.fixture(scope="module")
def run(tiny_corpus, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    train(compose_config(TrainConfig, "training", [*tiny_corpus.overrides(root), "max_steps=20", "log_every=10"]))
    return root / "tiny"


def test_lm_eval_runs_on_a_run_of_ours(run, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-eval is in the bench extra")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from llm.evaluation_lm_eval import MewLM, make_params

    asked = MewLM(run=str(run), device="cpu")
    choices = [" home", " zzqx"]
    scores = asked.loglikelihood([SimpleNamespace(args=(c, choice)) for c in CONTEXTS for choice in choices])
    best = [int(scores[2 * i + 1][0] > scores[2 * i][0]) for i in range(len(CONTEXTS))]
    labels = [best[0], best[1], 1 - best[2]]  # two of three right
    params = make_params({"until": ["\n"], "max_gen_toks": 5, "do_sample": False})
    written = asked.model.write(CONTEXTS, [params] * 3)
    rows = [
        {"context": c, "choices": choices, "label": label, "written": text if i else "something else"}
        for i, (c, label, text) in enumerate(zip(CONTEXTS, labels, written, strict=True))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, content in (("ends", CHOICES), ("whole", TEXTS), ("write", WRITING)):
        (tmp_path / f"{name}.yaml").write_text(content.format(path=tmp_path / "rows.jsonl"))
    config = TasksConfig(str(run), tasks=["ends", "whole", "write"], task_path=str(tmp_path), bootstrap_samples=10)
    results = run_tasks(config)
    assert results["ends"]["acc"] == pytest.approx(2 / 3) and results["write"]["exact_match"] == pytest.approx(2 / 3)
    log_p = sum(asked.model.text_log_likelihoods(CONTEXTS))
    bits = -log_p / 0.6931471805599453 / sum(len(c.encode()) for c in CONTEXTS)
    assert results["whole"]["bits_per_byte"] == pytest.approx(bits, rel=FP32_FORWARD)
    written_down = json.loads((run / "evaluation_tasks.json").read_text())
    assert written_down["results"] == results and written_down["checkpoint"] == "step_00000020"
    with pytest.raises(UserError, match="unknown to lm_eval"):
        run_tasks(TasksConfig(str(run), tasks=["no_such_task"], device="cpu"))
    with pytest.raises(UserError, match="beam search"):
        make_params({"num_beams": 4})
    with pytest.raises(UserError, match="'typical_p'"):
        make_params({"typical_p": 0.3})


def test_what_cannot_be_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="leaves nothing to do"):
        TasksConfig("runs/x")
    with pytest.raises(UserError, match="is not a directory"):
        TasksConfig("runs/x", tasks=["a"], task_path=str(tmp_path / "none"))
    assert numbers_of({"acc,none": 0.5, "acc_stderr,none": "N/A", "alias": "x", "em,strict": 1}) == {
        "acc": 0.5, "em,strict": 1.0
    }  # fmt: skip
