"""Generate text from a trained model.

    python -m llm.generating run=runs/quickstart prompt="The module" max_new_tokens=200 temperature=0.8 top_k=50 seed=1
    python -m llm.generating checkpoint=runs/quickstart/checkpoints/step_00001000 prompts_file=prompts.txt

One prompt streams to the terminal; several run together with a progress bar. Everything is appended to the run's
samples.txt. The engine (llm/engine.py) does the work.
"""

import sys
from dataclasses import dataclass, fields
from pathlib import Path

import hydra
from omegaconf import DictConfig
from rich.progress import Progress

from configs.errors import UserError, check_choice, check_positive
from configs.loader import CONFIG_DIR, run_script, start_script
from configs.report_samples import append_samples, printable
from llm.bpe_tokenizer import Tokenizer
from llm.engine import Engine, EngineConfig, RequestParams
from llm.generating_loop import check_prompts
from llm.model_loading import choose_dtype, load_model, resolve_checkpoint
from llm.sampling import SamplingConfig
from llm.transformer import Transformer
from parallel.mesh import choose_device


@dataclass
class GenerateConfig(SamplingConfig):
    """Everything that `python -m llm.generating` takes, beside the sampling settings."""

    temperature: float = 0.8
    top_k: int = 50
    run: str | None = None  # a run directory: its newest whole checkpoint
    checkpoint: str | None = None  # or one checkpoint's directory
    prompt: str = ""
    prompts: list[str] | None = None  # several prompts in place of one
    prompts_file: str | None = None  # or one prompt a line of a UTF-8 file
    document_start: bool = True  # put the end-of-text token before the prompt: it stands before every document
    num_samples: int = 1  # completions of each prompt
    batch_size: int = 32  # completions in progress at once
    max_new_tokens: int = 200
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(
            num_samples=self.num_samples, batch_size=self.batch_size, max_new_tokens=self.max_new_tokens
        )  # fmt: skip
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        if sum([bool(self.prompt), self.prompts is not None, self.prompts_file is not None]) > 1:
            raise UserError("prompt, prompts and prompts_file exclude each other; give one of them")

    def all_prompts(self) -> list[str]:
        """The prompts' texts, each `num_samples` times."""
        texts = [self.prompt] if self.prompts is None else self.prompts
        if self.prompts_file is not None:
            texts = read_lines(Path(self.prompts_file))
        return [text for text in texts for _ in range(self.num_samples)]

    def sampling(self) -> SamplingConfig:
        return SamplingConfig(**{field.name: getattr(self, field.name) for field in fields(SamplingConfig)})


def read_lines(path: Path) -> list[str]:
    """The lines of a prompt file that are not empty."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts_file={path} is not readable UTF-8 text ({error}); give one prompt a line") from error
    kept = [line for line in lines if line.strip()]
    if not kept:
        raise UserError(f"prompts_file={path} has no prompt in it; write one a line")
    return kept


def run_generation(config: GenerateConfig) -> list[str]:
    """Print and record each prompt with its completion; returns these texts."""
    path = resolve_checkpoint(config.run, config.checkpoint)
    device = choose_device(config.device, local_rank=0)
    model, tokenizer, _ = load_model(path, device, choose_dtype(config.dtype, device))
    texts = config.all_prompts()
    prompts = [encode_prompt(text, tokenizer, config.document_start) for text in texts]
    check_prompts(prompts, model.config.max_seq_len)
    warn_of_short_context(model, prompts, config.max_new_tokens)
    longest = min(max(map(len, prompts)) + config.max_new_tokens, model.config.max_seq_len)
    engine = Engine(model, EngineConfig(
        max_running=min(config.batch_size, len(prompts)), num_ids=tokenizer.vocab_size, max_seq_len=longest,
    ), tokenizer)  # fmt: skip
    params = [
        RequestParams(config.sampling(), config.max_new_tokens, stop_ids=(tokenizer.eot_id,), index=index)
        for index in range(len(prompts))
    ]
    if len(prompts) == 1:
        completions = [stream_to_terminal(engine, texts[0], prompts[0], params[0])]
    else:
        completions = generate_all(engine, prompts, params)
        for text, completion in zip(texts, completions, strict=True):
            print(f"--- {printable(text)}\n{printable(text + completion)}\n")
    results = [text + completion for text, completion in zip(texts, completions, strict=True)]
    record(config, path, results)
    return results


def encode_prompt(text: str, tokenizer: Tokenizer, document_start: bool) -> list[int]:
    start = [tokenizer.start_id] if document_start else []
    return start + tokenizer.encode(text)


def warn_of_short_context(model: Transformer, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Say so when the model's context, not max_new_tokens, will end the longest prompt's completion."""
    longest = max(len(prompt) for prompt in prompts)
    room = model.config.max_seq_len - longest
    if 0 < room < max_new_tokens:
        print(
            f"note: a prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed "
            f"model.max_seq_len={model.config.max_seq_len}; generation stops after {room} new tokens",
            file=sys.stderr,
        )


def stream_to_terminal(engine: Engine, text: str, prompt: list[int], params: RequestParams) -> str:
    """Print one prompt and its completion as it comes; returns the completion."""
    pieces = []
    print(printable(text), end="", flush=True)
    engine.submit(prompt, params)
    while engine.has_work:
        for event in engine.step():
            pieces.append(event.text)
            print(printable(event.text), end="", flush=True)
    print()
    return "".join(pieces)


def generate_all(engine: Engine, prompts: list[list[int]], params: list[RequestParams]) -> list[str]:
    """The completions of many prompts, without their end-of-text tokens."""
    ids = [engine.submit(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    texts = dict.fromkeys(ids, "")
    with Progress() as progress:
        task = progress.add_task("generating", total=len(prompts))
        while engine.has_work:
            for event in engine.step():
                texts[event.request_id] += event.text
                progress.advance(task, event.finish_reason is not None)
    return list(texts.values())


def record(config: GenerateConfig, path: Path, results: list[str]) -> None:
    """Append to samples.txt of the run that the checkpoint belongs to; a checkpoint elsewhere has none."""
    run_dir = Path(config.run) if config.run is not None else path.resolve().parent.parent
    if not (run_dir / "config.yaml").exists():
        return
    settings = {field.name: getattr(config, field.name) for field in fields(SamplingConfig)}
    defaults = SamplingConfig()
    told = {name: value for name, value in settings.items() if name == "seed" or value != getattr(defaults, name)}
    append_samples(run_dir, results, checkpoint=path.name, **told)


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="generating")
def main(config: DictConfig) -> None:
    run_script(run_generation, GenerateConfig, config)


if __name__ == "__main__":
    start_script(main, GenerateConfig, "generating")
