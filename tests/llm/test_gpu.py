"""The main job on a GPU: the same numbers as on the CPU, eager and compiled, and a run that resumes."""

import json
import subprocess
import sys

import pytest
import torch

from configs.loader import compose_config
from configs.run_dir import read_jsonl
from llm.args import ModelConfig, MoeConfig, TrainConfig
from llm.generating_loop import GenerationLimits, generate
from llm.loss import CrossEntropyLoss
from llm.optimizer import OptimizerConfig, build_optimizer
from llm.sampling import SamplingConfig
from llm.training import train
from llm.transformer import Transformer
from llm.transformer_context import make_context
from llm.transformer_init import initialise
from tests.conftest import ROOT
from tests.tolerances import FP32_FORWARD, FP32_GRADIENT

pytestmark = pytest.mark.gpu
SHAPE = dict(vocab_size=512, max_seq_len=128, d_model=128, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=256)
VARIANTS = {
    "plain": {},
    "qwen3": dict(qk_norm=True, head_dim=64, tie_embeddings=True),
    "moe": dict(moe=MoeConfig(4, 2, 64)),
}


@pytest.fixture(autouse=True)
def exact_float32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def make(variant: str, device: str, **changes) -> Transformer:
    model = Transformer(ModelConfig(**(SHAPE | VARIANTS[variant] | changes)))
    initialise(model, seed=0)
    return model.to(device)


def batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 512, (2, 4, 128), generator=torch.Generator().manual_seed(1)).to(device)
    ids[1, 0, 100:] = -100
    return ids[0], ids[1]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.cpu() - expected.cpu()).norm() / expected.cpu().norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("backend", ["sdpa", "eager", "triton"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_gradients_and_ten_steps_match_the_cpu(variant, backend):
    models = [make(variant, "cpu"), make(variant, "cuda", attention=backend)]
    loss = CrossEntropyLoss(z_loss=1e-4)
    optimizers = [build_optimizer(model.named_parameters(), OptimizerConfig()) for model in models]
    for step in range(10):
        results = []
        for model, device in zip(models, ("cpu", "cuda"), strict=True):
            token_ids, targets = batch(device)
            sums = loss(model(token_ids), targets)
            ((sums.loss_sum + sums.z_loss_sum) / sums.num_targets).backward()
            results.append(sums.loss_sum)
        assert relative_error(results[1], results[0]) < 10 * FP32_FORWARD, step
        if step == 0:
            for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                assert relative_error(b.grad, a.grad) < 10 * FP32_GRADIENT, name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_match_the_cpu_and_recomputation(variant):
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]
    limits = GenerationLimits(max_new_tokens=20)
    outputs = [
        generate(make(variant, device).eval(), prompts, SamplingConfig(temperature=0), limits)
        for device in ("cpu", "cuda")
    ]
    assert outputs[0] == outputs[1]
    model = make(variant, "cuda").eval()
    for prompt, completion in zip(prompts, outputs[1], strict=True):
        ids = list(prompt)
        for token in completion:
            assert model(torch.tensor([ids], device="cuda"))[0, -1].argmax().item() == token
            ids.append(token)


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_packed_documents_match_the_cpu(backend):
    doc_ids = torch.repeat_interleave(torch.arange(5), torch.tensor([7, 40, 1, 50, 30]))[None].expand(4, -1)
    logits = []
    for device, attention in (("cpu", "sdpa"), ("cuda", backend)):
        model, (token_ids, _) = make("plain", device, attention=attention), batch(device)
        logits.append(model(token_ids, make_context(token_ids, doc_ids=doc_ids.to(device))))
    assert relative_error(logits[1], logits[0]) < 10 * FP32_FORWARD


@pytest.mark.parametrize("mode", ["none", "block", "model"])
def test_training_on_the_gpu_learns_resumes_and_predicts_memory(tiny_corpus, tmp_path, mode):
    overrides = [*tiny_corpus.overrides(tmp_path), "device=cuda", f"compile={mode}", "checkpoint.every_steps=3"]
    report = train(compose_config(TrainConfig, "training", [*overrides, "max_steps=6"]))
    assert report["state"] == "finished" and report["measured"]["memory_peak_bytes"] > 0
    losses = {line["step"]: line["loss"] for line in read_jsonl(tmp_path / "tiny" / "metrics.jsonl") if "loss" in line}
    newest = tmp_path / "tiny" / "checkpoints" / "step_00000006"
    (newest / "state.json").write_text("broken")
    train(compose_config(TrainConfig, "training", [*overrides, "max_steps=6"]))
    again = {line["step"]: line["loss"] for line in read_jsonl(tmp_path / "tiny" / "metrics.jsonl") if "loss" in line}
    # The same kernels on the same data; atomics in the embedding's backward may change the last bits.
    assert again == pytest.approx(losses, rel=1e-3) and losses[6] < losses[1]


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_compiled_training_equals_eager(tiny_corpus, tmp_path, backend):
    losses = {}
    for mode in ("none", "block", "model"):
        overrides = [
            *tiny_corpus.overrides(tmp_path),
            "device=cuda",
            f"compile={mode}",
            f"name={mode}",
            "dtype=float32",
            "model.head_dim=32",
            f"model.attention={backend}",
            "data.document_masking=true",
        ]
        train(compose_config(TrainConfig, "training", overrides))
        lines = read_jsonl(tmp_path / mode / "metrics.jsonl")
        losses[mode] = [line["loss"] for line in lines if "loss" in line]
    assert losses["block"] == pytest.approx(losses["none"], rel=10 * FP32_GRADIENT)
    assert losses["model"] == pytest.approx(losses["none"], rel=10 * FP32_GRADIENT)


def test_the_scripts_find_the_gpu(tiny_corpus, tmp_path):
    train(compose_config(TrainConfig, "training", [*tiny_corpus.overrides(tmp_path), "device=auto"]))
    report = json.loads((tmp_path / "tiny" / "report.json").read_text())
    assert report["run"]["dtype"] == "bfloat16" and "CPU" not in report["run"]["device"]
    for script in ("llm.generating", "llm.evaluating"):
        command = [sys.executable, "-m", script, f"run={tmp_path / 'tiny'}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
