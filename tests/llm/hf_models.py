"""Random models of transformers, one a family, saved as a user would find them, and their import."""

from pathlib import Path

import torch
import transformers

from llm import hf_import

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 384,
    "initializer_range": 0.2,  # of the usual size the logits would hardly differ from each other
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES = {
    "llama": ("Llama", {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "smollm": ("Llama", {"tie_word_embeddings": True, "rope_theta": 100000.0}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
}
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"


def write_tokenizer(source: Path, directory: Path) -> None:
    """A tokenizer as transformers writes it, with a chat template."""
    fast = transformers.AutoTokenizer.from_pretrained(source)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


def random_model(family: str):
    """A model of transformers with random weights, norms and biases included."""
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL | settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def saved(family: str, directory: Path, tokenizer_files: Path, **settings):
    """The directory that save_pretrained writes, and the model."""
    model = random_model(family)
    model.save_pretrained(directory, **settings)
    for file in tokenizer_files.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return model


def imported(directory: Path, output: Path, **settings) -> Path:
    return hf_import.body(hf_import.HfImportConfig(str(directory), str(output), **settings))
