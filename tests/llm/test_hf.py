"""Import and export beside transformers: logits in float32, weights bit for bit, tokenizer, template, generate.

The models are random and small, one a family; the tokenizer is trained here. Nothing is downloaded.
"""

import shlex
import shutil
import subprocess
import sys
import weakref
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from configs.errors import UserError
from configs.loader import compose_config
from configs.run_dir import read_json
from llm import hf_export, hf_import, training
from llm.args import TrainConfig
from llm.checkpoint import load_checkpoint, save_checkpoint
from llm.evaluation_load import load_named
from llm.generating_loop import GenerationLimits, generate
from llm.hf_checkpoint import write_checkpoint
from llm.model_loading import load_model
from llm.sampling import SamplingConfig
from parallel.sharded_checkpoint_pieces import Piece, whole
from tests.tolerances import FP32_FORWARD

transformers = pytest.importorskip("transformers")
hf_models = pytest.importorskip("tests.llm.hf_models")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer_files(tiny_corpus, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("hf") / "tokenizer"
    hf_models.write_tokenizer(tiny_corpus.tokenizer, directory)
    return directory


def logits_of_ours(checkpoint: Path, ids: torch.Tensor) -> torch.Tensor:
    model, _, _ = load_model(checkpoint, torch.device("cpu"))
    with torch.inference_mode():
        return model(ids)  # (B, T, V)


def assert_logits_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= FP32_FORWARD * theirs.abs().max()


@pytest.fixture
def ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, hf_models.SMALL["vocab_size"], (2, 40), generator=generator)


@pytest.mark.parametrize("family", hf_models.FAMILIES)
def test_logits_of_an_import_and_of_its_export_match_transformers(family, tmp_path, tokenizer_files, ids):
    model = hf_models.saved(family, tmp_path / "theirs", tokenizer_files)
    with torch.inference_mode():
        expected = model(ids).logits
    checkpoint = hf_models.imported(tmp_path / "theirs", tmp_path / "run")
    assert_logits_equal(logits_of_ours(checkpoint, ids), expected)
    exported = hf_export.body(hf_export.HfExportConfig(run=str(tmp_path / "run"), output=str(tmp_path / "back")))
    back = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    same = (
        "Llama" if family == "mistral" else hf_models.FAMILIES[family][0]
    )  # Mistral without a window is Llama's shape
    assert type(back).__name__ == f"{same}ForCausalLM"
    theirs, returned = model.state_dict(), back.state_dict()
    assert theirs.keys() == returned.keys()
    assert all(torch.equal(theirs[name], returned[name]) for name in theirs)
    with torch.inference_mode():
        assert torch.equal(back(ids).logits, expected)


def test_sharded_files_import_and_export(tmp_path, tokenizer_files, ids):
    model = hf_models.saved("qwen2", tmp_path / "theirs", tokenizer_files, max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    checkpoint = hf_models.imported(tmp_path / "theirs", tmp_path / "run")
    with torch.inference_mode():
        expected = model(ids).logits
    assert_logits_equal(logits_of_ours(checkpoint, ids), expected)
    settings = hf_export.HfExportConfig(run=str(tmp_path / "run"), output=str(tmp_path / "back"), max_shard_gb=2e-5)
    exported = hf_export.body(settings)
    assert len(list(exported.glob("model-*.safetensors"))) > 2
    back = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    with torch.inference_mode():
        assert torch.equal(back(ids).logits, expected)
    assert hf_import.body(hf_import.HfImportConfig(str(exported), str(tmp_path / "again"))).is_dir()


def test_an_exported_directory_gives_tokenizer_template_and_the_same_greedy_tokens(tmp_path, tokenizer_files):
    hf_models.saved("qwen3", tmp_path / "theirs", tokenizer_files)
    checkpoint = hf_models.imported(tmp_path / "theirs", tmp_path / "run")
    exported = hf_export.body(hf_export.HfExportConfig(checkpoint=str(checkpoint), output=str(tmp_path / "back")))
    fast = transformers.AutoTokenizer.from_pretrained(exported)
    messages = [{"role": "user", "content": "Once upon a time"}]
    assert fast.apply_chat_template(messages, tokenize=False) == "<|user|>Once upon a time"
    ours, tokenizer, _ = load_model(checkpoint, torch.device("cpu"))
    prompt = fast("Once upon a time there was")["input_ids"]
    assert prompt == tokenizer.encode("Once upon a time there was")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    made = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
    (tokens,) = generate(ours, [prompt], SamplingConfig(temperature=0.0), GenerationLimits(20, [tokenizer.eot_id]))
    assert made[0, len(prompt) :].tolist() == tokens
    known = [token for token in tokens if token < tokenizer.vocab_size]  # the model's vocabulary is padded beyond
    assert known and fast.decode(known) == tokenizer.decode(known)


def test_a_checkpoint_of_training_exports(tmp_path, tiny_corpus, ids):
    overrides = [*tiny_corpus.overrides(tmp_path), "data.seq_len=16", "max_steps=1", "sample_tokens=0"]
    training.train(compose_config(TrainConfig, "training", overrides))
    exported = hf_export.body(hf_export.HfExportConfig(run=str(tmp_path / "tiny"), output=str(tmp_path / "back")))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    ours, tokenizer, _ = load_model(tmp_path / "tiny/checkpoints/step_00000001", torch.device("cpu"))
    few = ids[:, :30] % ours.config.vocab_size
    with torch.inference_mode():
        assert_logits_equal(ours(few), theirs(few).logits)
    assert theirs.generation_config.eos_token_id == tokenizer.eot_id
    fast = transformers.AutoTokenizer.from_pretrained(exported)
    assert (fast.eos_token_id, len(fast)) == (tokenizer.eot_id, tokenizer.vocab_size)
    config = read_json(exported / "config.json")
    assert (config["max_position_embeddings"], config["training_seq_len"]) == (ours.config.max_seq_len, 16)
    again = hf_models.imported(exported, tmp_path / "again")
    assert load_named(str(tmp_path / "again"), torch.device("cpu")).check_seq_len(None) == 16
    twice = hf_export.body(hf_export.HfExportConfig(checkpoint=str(again), output=str(tmp_path / "twice")))
    assert read_json(twice / "config.json") == config


def test_an_import_of_a_foreign_model_does_not_pass_a_guessed_window_on(tmp_path, tokenizer_files):
    hf_models.saved("llama", tmp_path / "theirs", tokenizer_files)
    checkpoint = hf_models.imported(tmp_path / "theirs", tmp_path / "run")
    back = hf_export.body(hf_export.HfExportConfig(checkpoint=str(checkpoint), output=str(tmp_path / "back")))
    assert "training_seq_len" not in read_json(back / "config.json")


def test_an_import_rounds_to_the_dtype_asked_for_and_exports_in_one(tmp_path, tokenizer_files):
    model = hf_models.saved("llama", tmp_path / "theirs", tokenizer_files)
    checkpoint = hf_models.imported(tmp_path / "theirs", tmp_path / "run", dtype="bfloat16")
    ours, _, _ = load_model(checkpoint, torch.device("cpu"))
    expected = model.lm_head.weight.detach()
    assert torch.equal(ours.output.weight, expected.bfloat16().float())
    settings = hf_export.HfExportConfig(checkpoint=str(checkpoint), output=str(tmp_path / "back"), dtype="float16")
    back = transformers.AutoModelForCausalLM.from_pretrained(hf_export.body(settings), dtype="auto")
    assert back.lm_head.weight.dtype == torch.float16
    assert torch.equal(back.lm_head.weight, expected.bfloat16().half())


def test_nothing_is_overwritten(tmp_path, tokenizer_files):
    hf_models.saved("llama", tmp_path / "theirs", tokenizer_files)
    hf_models.imported(tmp_path / "theirs", tmp_path / "run")
    with pytest.raises(UserError, match="exists"):
        hf_models.imported(tmp_path / "theirs", tmp_path / "run")
    with pytest.raises(UserError, match="exists"):
        hf_export.body(hf_export.HfExportConfig(run=str(tmp_path / "run"), output=str(tmp_path / "theirs")))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qk_norm": True, "qkv_bias": True}, "no Hugging Face family"),
        ({"moe": {"num_experts": 4, "d_ff": 8, "normalise_top_k": False}}, "Mixtral always normalises"),
        ({"moe": {"num_experts": 4, "d_ff": 8}, "qkv_bias": True}, "no Hugging Face family"),
    ],
)
def test_shapes_without_a_family_are_refused(fields, message):
    from configs.loader import load_config
    from llm.args import ModelConfig
    from llm.hf_config import family_of

    with pytest.raises(UserError, match=message):
        family_of(load_config(ModelConfig, fields))


def test_adapters_are_merged_on_export(tmp_path, tiny_corpus, ids):
    from llm.args import ModelConfig
    from llm.checkpoint_pieces import model_tensors
    from llm.lora import LoraConfig, apply_lora
    from llm.transformer import Transformer

    config = ModelConfig(vocab_size=384, max_seq_len=64, d_model=32, num_layers=2, num_heads=4, d_ff=48)
    lora = LoraConfig(rank=4, targets=["q_proj", "down_proj"])
    model = apply_lora(Transformer(config), lora).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
        expected = model(ids)
    pieces = [whole(name, tensor) for name, tensor in model_tensors(model).items()]
    for described in (asdict(lora), None):
        state = {"config": {"model": asdict(config), "lora": described}}
        path = save_checkpoint(tmp_path / f"run_{described is None}", 7, pieces, state, tiny_corpus.tokenizer)
        settings = hf_export.HfExportConfig(checkpoint=str(path), output=str(tmp_path / "back"))
        if described is None:  # adapters that the config says nothing of
            (tmp_path / "back").rename(tmp_path / "first")
            with pytest.raises(UserError, match="lora_a"):
                hf_export.body(settings)
            return
        theirs = transformers.AutoModelForCausalLM.from_pretrained(hf_export.body(settings)).eval()
        with torch.inference_mode():
            assert_logits_equal(theirs(ids).logits, expected)


def test_one_tensor_is_in_memory_at_a_time(tmp_path, tokenizer_files):
    hf_models.saved("qwen3_moe", tmp_path / "theirs", tokenizer_files)
    source = hf_import.open_source(str(tmp_path / "theirs"))
    alive: list[weakref.ref] = []
    largest = 0

    def watched(read):
        def read_one():
            nonlocal largest
            tensor = read().clone()
            alive[:] = [other for other in alive if other() is not None]
            alive.append(weakref.ref(tensor))
            largest = max(largest, len(alive))
            return tensor

        return read_one

    source.tensors = [(name, replace(tensor, read=watched(tensor.read))) for name, tensor in source.tensors]
    write_checkpoint(source, tmp_path / "run", torch.bfloat16)
    assert largest == 1


def test_a_weight_too_large_for_float16_is_refused(tmp_path, tokenizer_files):
    model = hf_models.saved("llama", tmp_path / "theirs", tokenizer_files)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 70_000.0
    model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(UserError, match="does not fit float16"):
        hf_models.imported(tmp_path / "theirs", tmp_path / "run", dtype="float16")
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_scripts_end_in_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, "-m", "llm.hf_import", f"path={tmp_path}/nothing", f"output={tmp_path}/run"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "does not exist" in result.stderr


def test_training_starts_from_an_import_and_its_run_exports_with_the_template(tmp_path, tiny_corpus, tokenizer_files):
    model = hf_models.saved("smollm", tmp_path / "theirs", tokenizer_files)
    shutil.copyfile(tiny_corpus.tokenizer / "tokenizer.json", tmp_path / "theirs/tokenizer.json")  # the tokens name it
    hf_models.imported(tmp_path / "theirs", tmp_path / "base")
    shape = ["model.vocab_size=384", "model.max_seq_len=64", "model.rope_theta=100000.0", "model.norm_eps=1e-6"]
    overrides = [
        *tiny_corpus.overrides(tmp_path), *shape, "model.tie_embeddings=true", "max_steps=1", "sample_tokens=0",
        f"init_from={tmp_path}/base", f"data.tokenizer={tmp_path}/base/checkpoints/step_00000000",
        "schedule.warmup_steps=0", "optimizer.lr=1e-9", "optimizer.weight_decay=0",
    ]  # fmt: skip
    hf_models.saved("smollm", tmp_path / "other", tokenizer_files)  # the same tokenizer in other bytes
    hf_models.imported(tmp_path / "other", tmp_path / "other_run")
    with pytest.raises(UserError, match="has another tokenizer"):
        training.train(compose_config(TrainConfig, "training", [*overrides, f"init_from={tmp_path}/other_run"]))
    training.train(compose_config(TrainConfig, "training", overrides))
    exported = hf_export.body(hf_export.HfExportConfig(run=str(tmp_path / "tiny"), output=str(tmp_path / "tuned")))
    back = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tuned = dict(back.named_parameters())
    for name, parameter in model.named_parameters():
        assert (tuned[name] - parameter).abs().max() < 1e-6  # a step of 1e-9; a fresh model differs by 1
    fast = transformers.AutoTokenizer.from_pretrained(exported)
    assert fast.chat_template == hf_models.TEMPLATE


@pytest.mark.parametrize("family", hf_models.FAMILIES)
def test_the_shape_that_an_import_prints_is_the_shape_that_training_takes(family, tmp_path, tokenizer_files, capsys):
    hf_models.saved(family, tmp_path / "theirs", tokenizer_files)
    config = hf_import.open_source(str(tmp_path / "theirs")).config
    hf_models.imported(tmp_path / "theirs", tmp_path / "run")
    printed = capsys.readouterr().out.splitlines()[-1]
    overrides = shlex.split(printed.removeprefix("for llm.training: "))
    base = ["name=x", "data.tokens=x", "data.tokenizer=x", "data.seq_len=16"]
    composed = compose_config(TrainConfig, "training", [*base, *overrides])
    assert composed.model == config
    assert composed.init_from == str(tmp_path / "run")


def test_a_checkpoint_in_pieces_exports_as_the_whole_one(tmp_path, tokenizer_files):
    hf_models.saved("qwen3_moe", tmp_path / "theirs", tokenizer_files)
    checkpoint = hf_models.imported(tmp_path / "theirs", tmp_path / "run")
    tensors, state = load_checkpoint(checkpoint)
    pieces = []
    for name, tensor in tensors.items():  # cut where no row and no expert ends, as a rank's share of a bucket is
        flat, middle = tensor.reshape(-1), tensor.numel() // 3
        pieces += [
            Piece(name, tuple(tensor.shape), 0, flat[:middle]),
            Piece(name, tuple(tensor.shape), middle, flat[middle:]),
        ]
    cut = save_checkpoint(tmp_path / "cut", 3, pieces, {key: state[key] for key in ("config", "imported")}, checkpoint)
    whole = hf_export.body(hf_export.HfExportConfig(checkpoint=str(checkpoint), output=str(tmp_path / "whole")))
    parts = hf_export.body(hf_export.HfExportConfig(checkpoint=str(cut), output=str(tmp_path / "parts")))
    names = sorted(file.name for file in whole.iterdir())
    assert names == sorted(file.name for file in parts.iterdir())
    for name in names:
        assert (whole / name).read_bytes() == (parts / name).read_bytes()


@pytest.mark.parametrize("family", ["smollm", "qwen2", "qwen3_moe"])
def test_a_model_loads_straight_into_bfloat16(family, tmp_path, tokenizer_files, ids):
    hf_models.saved(family, tmp_path / "theirs", tokenizer_files)
    checkpoint = hf_models.imported(tmp_path / "theirs", tmp_path / "run")
    wide, _, _ = load_model(checkpoint, torch.device("cpu"))
    narrow, _, _ = load_model(checkpoint, torch.device("cpu"), torch.bfloat16)
    expected = wide.to(torch.bfloat16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in narrow.parameters())
    assert (narrow.output.weight is narrow.embedding.weight) == narrow.config.tie_embeddings
    with torch.inference_mode():
        assert torch.equal(narrow(ids), expected(ids))
