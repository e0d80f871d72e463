"""Fine-tuning runs: what they learn, record and save, resumed and on ranks; what a user can get wrong."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from alignment.drgrpo_grader import Grader
from alignment.intervals import wilson_interval
from alignment.r1_prompt import encode_prompt
from alignment.sft import train
from alignment.sft_config import GenerationConfig, SftConfig
from alignment.sft_data import load_sft_data, packing_of, with_checkpoint, with_steps
from alignment.sft_evaluate import evaluation_fields
from configs.errors import UserError
from configs.loader import compose_config
from configs.run_dir import read_json, read_jsonl
from llm.checkpoint import load_checkpoint
from llm.cost_model_counts import count_parameters
from llm.generating_loop import GenerationLimits, generate
from llm.lora import apply_lora
from llm.model_loading import load_model
from llm.sampling import SamplingConfig
from llm.training_setup import build_model
from llm.transformer import Transformer
from llm.transformer_init import transformer_on_meta
from parallel.mesh import init_mesh
from parallel.sharded_checkpoint_manifest import find_checkpoint
from tests.alignment.sft_start import sft_config, sft_overrides, write_base_run
from tests.conftest import ROOT
from tests.parallel.pool import pool_of
from tests.tolerances import FP32_GRADIENT


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return write_base_run(tmp_path_factory.mktemp("sft"))


def losses(run):
    return [line["loss"] for line in read_jsonl(run / "metrics.jsonl") if "loss" in line]


def evaluations(run):
    return [line for line in read_jsonl(run / "metrics.jsonl") if "val_accuracy" in line]


def tensors_of(run):
    return load_checkpoint(find_checkpoint(run / "checkpoints"))[0]


def test_a_run_learns_validates_and_answers_problems(base, tmp_path):
    report = train(sft_config(base, tmp_path, "max_steps=40", "validate_every=20"))
    run = tmp_path / "sft"
    assert losses(run)[0] == pytest.approx(5.8, abs=0.2) and losses(run)[-1] < 1.0  # ln 320 at the start
    assert [line["step"] for line in evaluations(run)] == [0, 20, 40]
    last = evaluations(run)[-1]
    assert last["val_problems"] == 6 and 0 < last["val_response_tokens"] <= 8
    assert report["task"]["val_accuracy"] == last["val_accuracy"] and report["state"] == "finished"
    assert report["run"]["examples"] == 40 and report["run"]["rows_per_epoch"] == 20 and report["run"]["filled"] > 0.9
    assert "User:" in (run / "samples.txt").read_text()
    assert all(0 < line["target_tokens"] < 512 for line in read_jsonl(run / "metrics.jsonl") if "loss" in line)


def check_evaluation(run, data):
    """The run's last counts against greedy generation by the saved model, without an engine."""
    model, tokenizer, _ = load_model(find_checkpoint(run / "checkpoints"), torch.device("cpu"))
    prompts = [encode_prompt(problem.question, data.fmt, tokenizer) for problem in data.problems]
    limits = GenerationLimits(48, [data.fmt.eos_id], tokenizer.vocab_size)
    completions = generate(model, prompts, SamplingConfig(temperature=0.0), limits)
    texts = [tokenizer.decode([i for i in ids if i != data.fmt.eos_id]) for ids in completions]
    with Grader(data.fmt.mode) as grader:
        rewards = grader.rewards(texts, [problem.answer for problem in data.problems])
    last = evaluations(run)[-1]
    assert last["val_format_rate"] == sum(reward["format_reward"] for reward in rewards) / 6 > 0
    assert last["val_accuracy"] == sum(reward["reward"] for reward in rewards) / 6
    assert last["val_response_tokens"] == sum(map(len, completions)) / 6


def test_evaluation_matches_greedy_generation_of_the_saved_model(base, tmp_path):
    """The engine has the trainer's weights, and of a run with adapters the merged ones."""
    data = load_sft_data(with_checkpoint(sft_config(base, tmp_path)))
    common = ["generation.max_new_tokens=48", "validate_every=1000", "micro_batch_size=4"]
    train(sft_config(base, tmp_path, "name=full", "max_steps=90", *common))
    check_evaluation(tmp_path / "full", data)
    train(sft_config(tmp_path / "full", tmp_path, "name=lora", "lora.rank=8", "max_steps=5", *common))
    check_evaluation(tmp_path / "lora", data)
    full, lora = (
        load_model(find_checkpoint(tmp_path / n / "checkpoints"), torch.device("cpu"))[0] for n in ("full", "lora")
    )
    name = "blocks.0.ffn.up_proj.weight"
    assert not torch.equal(full.get_parameter(name), lora.get_parameter(name))


def test_a_stopped_run_continues_bit_for_bit_over_the_end_of_an_epoch(base, tmp_path):
    train(sft_config(base, tmp_path, "name=whole", "max_steps=8"))
    rows = packing_of(sft_config(base, tmp_path)).num_sequences
    assert rows * 8 > 40 / 2 > rows * 2, "eight batches are more than an epoch of at most 20 rows"
    train(sft_config(base, tmp_path, "name=cut", "max_steps=8", "checkpoint.every_steps=2", "max_time_s=1e-9"))
    assert losses(tmp_path / "cut") == []  # stopped before its first step
    train(sft_config(base, tmp_path, "name=cut", "max_steps=8", "checkpoint.every_steps=2"))
    newest = find_checkpoint(tmp_path / "cut/checkpoints")
    newest.rename(tmp_path / "set_aside")
    train(sft_config(base, tmp_path, "name=cut", "max_steps=8", "checkpoint.every_steps=2"))  # from step 6
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    one, other = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "cut")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_packed_and_padded_runs_learn_the_same_from_one_epoch(base, tmp_path):
    """All examples in one global batch, packed or one a row: the same step."""
    changes = ["max_steps=1", "generation.problems=0", "micro_batch_size=4"]
    train(sft_config(base, tmp_path, "name=packed", *changes, "global_batch_tokens=2560", "pack_window=64"))
    train(sft_config(base, tmp_path, "name=padded", *changes, "global_batch_tokens=5120", "packing=none"))
    packed, padded = (read_jsonl(tmp_path / name / "metrics.jsonl")[0] for name in ("packed", "padded"))
    assert packed["target_tokens"] == padded["target_tokens"]
    assert packed["loss"] == pytest.approx(padded["loss"], rel=FP32_GRADIENT)
    assert packed["grad_norm"] == pytest.approx(padded["grad_norm"], rel=FP32_GRADIENT)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["lora.rank=4"],
        ["parallel.zero=3", "lora.rank=4"],
        ["parallel.zero=1", "parallel.transport=peer", "lora.rank=4"],  # nothing arrives but by a wait
        ["parallel.tp=2", "lora.rank=4"],
        ["parallel.pp=2"],
        ["parallel.cp=2"],
    ],
)
def test_two_ranks_match_one(base, tmp_path, layout):
    """Losses, and the answers of both ranks' shares of the problems."""
    lora = [one for one in layout if one.startswith("lora")]
    common = ["attention=eager", *lora]
    train(sft_config(base, tmp_path, "name=one", *common))
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    overrides = [*sft_overrides(base, tmp_path), "name=two", *common, *layout]
    command = [sys.executable, *torchrun, "--rdzv-endpoint=localhost:0", "-m", "alignment.sft", *overrides]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=10 * FP32_GRADIENT)
    sent = [row for row in read_json(tmp_path / "two/report.json")["rows"] if row["quantity"].startswith("sent")]
    assert sent and all(row["ratio"] == 1.0 for row in sent), sent
    one, two = evaluations(tmp_path / "one"), evaluations(tmp_path / "two")
    for field in ("val_accuracy", "val_format_rate", "val_response_tokens", "val_problems"):
        assert [line[field] for line in one] == [line[field] for line in two]


def test_epochs_give_the_steps(base, tmp_path):
    config = with_checkpoint(sft_config(base, tmp_path, "epochs=2.5"))
    data = load_sft_data(config)
    tokens = sum(len(example.token_ids) - 1 for example in data.train)
    steps = with_steps(config, data).max_steps
    assert 2.5 * tokens / 512 <= steps <= 2.5 * tokens / 512 / 0.7 + 1


def nudge(mesh, config):
    """A hundred AdamW steps at lr 1e-6 with one-signed gradients of a model that computes in bfloat16."""
    parts = build_model(config, mesh)
    for _ in range(100):
        for parameter in parts.strategy.parameters:
            parameter.grad = torch.ones_like(parameter)
        parts.optimizer.step()
    return {name: value.clone() for name, value in parts.strategy.full_parameters().items()}


@pytest.mark.dist
@pytest.mark.parametrize("zero", [0, 3])
def test_steps_of_a_millionth_move_weights_under_bfloat16(base, tmp_path, zero):
    """A weight of 1.0 in bfloat16 would stay: its neighbours are 0.004 away. Weights are float32, sharded ones too."""
    changes = ["dtype=bfloat16", "optimizer.lr=1e-6", f"parallel.zero={zero}"]
    config = with_checkpoint(sft_config(base, tmp_path, *changes))
    results = pool_of(2).run(nudge, config) if zero else [nudge(init_mesh("cpu"), config)]
    for parameters in results:
        norm = parameters["norm.weight"]
        torch.testing.assert_close(norm, torch.full_like(norm, 1.0 - 1e-4), rtol=0.0, atol=2e-6)


QWEN_PARAMETERS = 1_543_714_304


def test_qwen_experiment_composes_to_the_published_shape():
    config = compose_config(SftConfig, "sft", ["experiment=sft_qwen2.5-math-1.5b"])
    assert config.name == "sft_qwen2.5-math-1.5b" and config.kernels.fused
    assert count_parameters(config.model).total == QWEN_PARAMETERS
    with torch.device("meta"):
        model = Transformer(replace(config.model, attention="sdpa"))
        logits = model(torch.zeros(1, 8, dtype=torch.int64))
    assert sum(parameter.numel() for parameter in model.parameters()) == QWEN_PARAMETERS
    assert logits.shape == (1, 8, 151_936)
    assert config.grad_accum_steps(1) == 16 and config.data.seq_len <= config.model.max_seq_len


def test_qwen_with_adapters_learns_the_adapters_alone():
    config = compose_config(SftConfig, "sft", ["experiment=sft_qwen2.5-math-1.5b", "lora.rank=16"])
    model = transformer_on_meta(config.model)
    apply_lora(model, config.lora)
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    C, F, KV = 1536, 8960, 256
    assert trainable == 28 * 16 * (4 * C + 2 * (C + KV) + 3 * (C + F))  # q and o, k and v, gate, up and down
    assert trainable / QWEN_PARAMETERS < 0.013


@pytest.mark.parametrize("experiment", ["quickstart_sft", "sft_qwen2.5-math-1.5b"])
def test_experiments_compose_and_keep_their_name(experiment):
    assert compose_config(SftConfig, "sft", [f"experiment={experiment}"]).name == experiment


def test_held_out_problems_among_the_training_ones_are_refused(base, tmp_path):
    same = "held_out_data={source: arithmetic, level: one_digit_sums, split: train, size: 5, seed: 1}"
    with pytest.raises(UserError, match="held-out problem"):
        train(sft_config(base, tmp_path, same))


def test_examples_longer_than_a_row_are_left_out_and_counted(base, tmp_path):
    config = with_checkpoint(sft_config(base, tmp_path, "data.seq_len=60", "global_batch_tokens=480"))
    data = load_sft_data(config)
    longest = max(len(example.token_ids) for example in data.train)
    assert 0 < data.dropped < 40 and len(data.train) == 40 - data.dropped and longest <= 61


def test_rows_too_short_for_any_example_are_refused(base, tmp_path):
    with pytest.raises(UserError, match="less than the shortest example"):
        train(sft_config(base, tmp_path, "data.seq_len=8"))


def test_problems_without_solutions_are_refused(base, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "What is 1 + 1?", "answer": "2"}) + "\n")
    with pytest.raises(UserError, match="has no solution to train on"):
        train(sft_config(base, tmp_path, f"train_data=[{{source: jsonl, path: {rows}, split: all}}]"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train_data=[]", "train_data"),
        ("init_from=null", "give a checkpoint"),
        ("init_from=nowhere", "is not a directory"),
        ("epochs=0", "positive"),
        ("attention=flash", "sdpa"),
        ("data.document_masking=false", "see each other"),
        ("data.seq_len=512", "max_seq_len=128"),
        ("packing=tight", "best_fit"),
        ("prompt.template=chat", "needs a chat template"),
        ("lora.rank=100", "lower it"),
        ("generation.max_new_tokens=0", "positive"),
    ],
)
def test_wrong_values_are_refused_with_the_fix(base, tmp_path, change, words):
    with pytest.raises(UserError, match=words):
        train(sft_config(base, tmp_path, change))


def test_generation_settings_must_not_be_negative():
    with pytest.raises(UserError, match="negative"):
        GenerationConfig(problems=-1)


def test_shares_and_interval_of_known_counts():
    counts = {"problems": 50, "correct": 10, "well_formed": 25, "tokens": 500, "cut": 5}
    fields = evaluation_fields(counts)
    assert (fields["val_accuracy"], fields["val_format_rate"], fields["val_cut_fraction"]) == (0.2, 0.5, 0.1)
    assert (fields["val_accuracy_low"], fields["val_accuracy_high"]) == wilson_interval(10, 50)
