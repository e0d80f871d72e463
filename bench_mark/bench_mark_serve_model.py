"""A model to serve, made on disk for both servers: one of our checkpoints, and the same weights for transformers.

Random weights of a shape of configs/model, and a tokenizer with as many tokens as its vocabulary: bytes, then pairs of
printable characters, so that whatever is sampled is text. The chat template is the last message's text alone.
"""

import itertools
import json
from pathlib import Path

import torch
from omegaconf import OmegaConf

from configs.loader import CONFIG_DIR, load_config
from llm.args import ModelConfig
from llm.bpe_tokenizer import Tokenizer
from llm.bpe_tokenizer_files import BYTE_ORDER, END_OF_TEXT, config_json, tokenizer_json
from llm.hf_checkpoint import write_checkpoint
from llm.hf_directory_write import write_directory
from llm.hf_source import HfSource, our_shapes
from llm.hf_tensors import StoredTensor
from parallel.mesh import choose_device

TEMPLATE = "{{ messages[-1]['content'] }}"
DEFAULT_VOCAB = 2048  # of shapes that take their tokenizer's


def pair_tokenizer(vocab_size: int) -> bytes:
    """tokenizer.json: 256 bytes, pairs of them, printable ones first, and the end-of-text token last."""
    printable = [i for i, byte in enumerate(BYTE_ORDER) if 0x20 <= byte < 0x7F]
    others = [i for i in range(256) if i not in printable]
    pairs = itertools.chain(itertools.product(printable, printable), itertools.product(others, others))
    merges = list(itertools.islice(pairs, vocab_size - 257))
    single = [bytes([byte]) for byte in BYTE_ORDER]
    return tokenizer_json(single + [single[a] + single[b] for a, b in merges], merges, "gpt2", [END_OF_TEXT])


def random_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
    """Made when it is read: the values are those of the name."""

    def read() -> torch.Tensor:
        device = choose_device("auto", local_rank=0)
        if "norm" in name:
            return torch.ones(shape, dtype=dtype)
        generator = torch.Generator(device).manual_seed(sum(map(ord, name)))
        return (torch.randn(shape, generator=generator, device=device) * 0.02).to(dtype).cpu()

    return StoredTensor(shape, dtype, read)


def make_model(name: str, directory: Path, dtype: torch.dtype) -> tuple[Path, Path, ModelConfig]:
    """Our checkpoint, the exported directory, and the shape."""
    config = load_config(ModelConfig, OmegaConf.load(f"{CONFIG_DIR}/model/{name}.yaml")).with_vocab_of(DEFAULT_VOCAB)
    content = pair_tokenizer(config.vocab_size)
    files = {
        "tokenizer.json": content,
        "tokenizer_config.json": json_bytes(config_json(Tokenizer(content).eot)),
        "chat_template.jinja": TEMPLATE.encode(),
    }
    tensors = [(key, random_tensor(key, shape, dtype)) for key, shape in our_shapes(config).items()]
    checkpoint = write_checkpoint(
        HfSource("random weights", "llama", config, tensors, files), directory / "checkpoints"
    )
    write_directory(checkpoint, directory / "exported", dtype, 5 * 10**9)
    return checkpoint, directory / "exported", config


def json_bytes(value: object) -> bytes:
    return json.dumps(value).encode()
