"""Talk to a model in the terminal.

    python -m llm.chat run=runs/quickstart mode=continue
    python -m llm.chat checkpoint=data/smollm2 temperature=0.2 confidence=true

Answers stream; Ctrl-C stops one, Ctrl-D or /quit ends, /help lists the commands. The engine runs in this process
(llm/engine.py); `python -m llm.serve` serves the same over HTTP, with a page.
"""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.style import Style
from rich.text import Text

from configs.errors import UserError, check_choice, check_positive
from configs.loader import CONFIG_DIR, run_script, start_script
from configs.report_samples import printable
from llm.chat_prompt import ChatPrompt, load_chat_prompt
from llm.chat_session import MODES, ChatSession
from llm.engine import Engine
from llm.engine_config import EngineConfig
from llm.engine_request import RequestParams, TokenEvent
from llm.model_loading import choose_dtype, load_model, resolve_checkpoint
from llm.sampling import SamplingConfig
from parallel.mesh import choose_device


@dataclass
class ChatConfig(SamplingConfig):
    """Everything that `python -m llm.chat` takes, beside the sampling settings."""

    run: str | None = None  # a run directory: its newest whole checkpoint
    checkpoint: str | None = None  # or one checkpoint's directory
    max_new_tokens: int = 512
    mode: str = "chat"  # continue: the model goes on with each text that is typed
    confidence: bool = False  # shade each token by its probability
    system: str = ""
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(max_new_tokens=self.max_new_tokens)
        check_choice("mode", self.mode, MODES)
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))


class Chat:
    """A session, the engine that answers it, and the console that shows it."""

    def __init__(self, engine: Engine, prompt: ChatPrompt, session: ChatSession, console: Console):
        self.engine, self.prompt, self.session, self.console = engine, prompt, session, console
        self.max_prompt_tokens = engine.config.sequence_limit(engine.model.config) - 1

    def loop(self) -> None:
        """Read lines until the end of input or /quit."""
        while True:
            try:
                line = self.console.input("[bold]> [/bold]").strip()
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self.console.print("\n(/quit or Ctrl-D ends)", style="dim")
                continue
            if line in ("/quit", "/exit"):
                return
            if line:
                self.handle(line)

    def handle(self, line: str) -> None:
        """Carry out a command or answer a message; a user's mistake is shown and changes nothing."""
        try:
            if line.startswith("/"):
                self.console.print(self.session.command(line), style="dim", markup=False, highlight=False)
            elif self.session.mode == "continue":
                self.respond(self.prompt.encode_text(line), ())
            else:
                self.session.ask(line)
                ids, dropped = self.session.prompt_ids(self.prompt, self.max_prompt_tokens)
                if dropped:
                    self.console.print(f"(the oldest {dropped} turns no longer fit and are forgotten)", style="dim")
                self.session.answer(self.respond(ids, self.prompt.chat_stops))
        except UserError as error:
            self.session.drop_question()
            self.console.print(f"error: {error}", style="red", markup=False, highlight=False)

    def respond(self, prompt_ids: list[int], stops: tuple[str, ...]) -> str:
        """Stream one answer to the console; returns its text. Ctrl-C ends it early."""
        params = RequestParams(
            sampling=self.session.sampling,
            max_new_tokens=self.session.max_new_tokens,
            stop_ids=self.prompt.stop_ids,
            stop=stops,
            index=self.session.num_answers,
        )
        self.session.num_answers += 1
        request_id = self.engine.submit(prompt_ids, params)
        pieces, reason = [], None
        waiting: list[float] = []  # log-probabilities of tokens whose text is not whole yet
        with interrupts() as interrupted:
            while reason is None and not interrupted:
                for event in self.engine.step():
                    pieces.append(event.text)
                    waiting.append(event.log_prob)
                    if event.text:
                        self.show(event, sum(waiting))
                        waiting.clear()
                    reason = event.finish_reason
        if reason is None:
            self.engine.cancel(request_id)
            while self.engine.has_work:
                self.engine.step()  # what was under way on the device
        notes = {None: "stopped", "length": "length limit"}
        self.console.print(f" ({notes[reason]})" if reason in notes else "", style="dim", highlight=False)
        return "".join(pieces)

    def show(self, event: TokenEvent, log_prob: float) -> None:
        style = confidence_style(log_prob) if self.session.confidence else Style()
        text = Text(printable(event.text), style=style)
        self.console.print(text, end="", soft_wrap=True)
        self.console.file.flush()


def confidence_style(log_prob: float) -> Style:
    """A background that is the stronger the less likely the text was: none when sure, orange when not."""
    doubt = 1.0 - math.exp(min(0.0, log_prob))
    if doubt < 0.1:
        return Style()
    shade = tuple(round(40 + doubt * (level - 40)) for level in (200, 100, 20))
    return Style(color="white", bgcolor=f"rgb({shade[0]},{shade[1]},{shade[2]})")


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """A list that Ctrl-C appends to instead of raising: a step of the engine is never cut in two."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def run_chat(config: ChatConfig) -> None:
    """Load the model and talk until the end of input."""
    path = resolve_checkpoint(config.run, config.checkpoint)
    device = choose_device(config.device, local_rank=0)
    model, tokenizer, _ = load_model(path, device, choose_dtype(config.dtype, device))
    engine = Engine(model, replace(EngineConfig(max_running=1), num_ids=tokenizer.vocab_size), tokenizer)
    prompt = load_chat_prompt(Path(path), tokenizer)
    sampling = SamplingConfig(**{one.name: getattr(config, one.name) for one in fields(SamplingConfig)})
    session = ChatSession(sampling, config.max_new_tokens, config.mode, config.confidence, config.system)
    console = Console()
    form = "its chat template" if prompt.template else "no chat template: a base model, asked in a plain form"
    console.print(f"{path} ({form}); /help lists the commands", style="dim", markup=False, highlight=False)
    Chat(engine, prompt, session, console).loop()


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="chat")
def main(config: DictConfig) -> None:
    run_script(run_chat, ChatConfig, config)


if __name__ == "__main__":
    start_script(main, ChatConfig, "chat")
