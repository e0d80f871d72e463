"""From a problem to token ids: the prompt, the completion that SFT trains on, and masks exact to the token.

The R1-zero prompt is that of DeepSeek-R1-Zero (2025, table 1) as Liu et al. (Dr. GRPO, 2025) use it: it ends in
"<think>", and a well-formed response goes on with "reasoning </think> <answer> 72 </answer>". Other templates serve
small windows, base models and chat models (r1_prompt_chat.py). Rules that hold for every template:

- exactly one begin-of-text token, or none when the model has none; never a second one from a chat template;
- prompt and completion are encoded apart, so training sees the ids that generation starts from;
- special tokens spelled in a question stay ordinary text;
- the mask is 1 on every response token and on the one end token behind it, 0 on the prompt.
"""

from dataclasses import dataclass
from pathlib import Path

from alignment.problem import Problem
from alignment.r1_prompt_chat import ChatTemplate, chat_end_id, encode_chat, load_chat
from configs.errors import UserError, check_choice
from llm.bpe_tokenizer import Tokenizer

R1_ZERO = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant "
    "first thinks about the reasoning process in the mind and then provides the User with the answer. The reasoning "
    "process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> tags, respectively, "
    "i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
    "User: {question}\nAssistant: <think>"
)
CHAT_REQUEST = (
    "{question}\nThink first, inside <think> </think>, then give the final answer alone inside <answer> </answer>."
)


@dataclass(frozen=True)
class Template:
    """A prompt's text with {question} in it, what the response opens with, and where its answer stands.

    mode: answer_tag, gsm8k, boxed or last_number, the grader's way to find the answer. is_chat: written by the
    checkpoint's own chat template.
    """

    text: str
    opening: str
    mode: str
    is_chat: bool = False


TEMPLATES = {
    "r1_zero": Template(R1_ZERO, "", "answer_tag"),
    "r1_short": Template("User: {question}\nAssistant: <think>", "", "answer_tag"),  # 120 tokens fewer
    "gsm8k": Template("Question: {question}\nAnswer:", "", "gsm8k"),
    "boxed": Template("{question}\nPut the final answer in \\boxed{{}}.\n", "", "boxed"),
    "chat": Template(CHAT_REQUEST, "<think>", "answer_tag", is_chat=True),
    "chat_plain": Template("{question}", "", "last_number", is_chat=True),  # for models that know no form of ours
}


@dataclass
class PromptConfig:
    """The template by name and the begin-of-text token: "auto", "none" or a special token's name."""

    template: str = "r1_zero"
    bos: str = "auto"

    def __post_init__(self) -> None:
        check_choice("template", self.template, tuple(TEMPLATES))


@dataclass(frozen=True)
class PromptFormat:
    """How problems become ids for one model: made by `prompt_format`, used by SFT, RL and evaluation alike."""

    name: str
    template: Template
    bos_id: int | None  # the first token of every prompt
    eos_id: int  # ends every trained response; generation stops at it
    chat: ChatTemplate | None = None

    @property
    def mode(self) -> str:
        return self.template.mode


@dataclass(frozen=True)
class Example:
    """One training sequence: `token_ids` (T,) and `response_mask` (T,), 1 where a token is the response's."""

    token_ids: list[int]
    response_mask: list[int]

    @property
    def num_response_tokens(self) -> int:
        return sum(self.response_mask)


def prompt_format(config: PromptConfig, tokenizer: Tokenizer, chat: ChatTemplate | None = None) -> PromptFormat:
    """The format for a tokenizer; UserError for a bos that is no token, and for chat without a chat template.

    bos: "auto", "none" or a special token's name. "auto" is what the tokenizer's file puts before a text, else the
    end-of-text token when that is the only special token (our own models' documents begin behind one), else none.
    With `chat` the template of the checkpoint decides, and bos must stay "auto".
    """
    template, bos = config.template, config.bos
    if TEMPLATES[template].is_chat:
        if chat is None:
            raise UserError(f"template={template} needs a chat template and this model has none; use template=r1_zero")
        if bos != "auto":
            raise UserError(f"bos={bos} with template={template}: the chat template writes it; use bos=auto")
        return PromptFormat(template, TEMPLATES[template], None, chat_end_id(chat, tokenizer), chat)
    return PromptFormat(template, TEMPLATES[template], begin_id(tokenizer, bos), tokenizer.eot_id)


def load_prompt_format(config: PromptConfig, tokenizer: Tokenizer, directory: str | Path) -> PromptFormat:
    """`prompt_format` with the chat template that lies beside a checkpoint or tokenizer, when config asks for chat."""
    chat = load_chat(directory) if TEMPLATES[config.template].is_chat else None
    return prompt_format(config, tokenizer, chat)


def begin_id(tokenizer: Tokenizer, bos: str) -> int | None:
    special = tokenizer.special_tokens
    if bos == "none":
        return None
    if bos != "auto":
        check_choice("bos", bos, ("auto", "none", *sorted(special)))
        return special[bos]
    if tokenizer.model.start_token is not None:
        return special[tokenizer.model.start_token]
    return tokenizer.eot_id if len(special) == 1 else None


def encode_prompt(question: str, fmt: PromptFormat, tokenizer: Tokenizer) -> list[int]:
    """The ids of a prompt, its begin-of-text token included once; the question is stripped."""
    if fmt.chat is not None:
        return encode_chat(fmt.chat, fmt.template.text, question.strip(), tokenizer)
    start = [] if fmt.bos_id is None else [fmt.bos_id]
    return start + tokenizer.encode(fmt.template.text.format(question=question.strip()))


def completion_text(problem: Problem, fmt: PromptFormat) -> str:
    """The response that SFT trains on, without its end token; UserError for a problem without a solution."""
    if problem.solution is None:
        raise UserError(f"problem {problem.id} has no solution to train on; use data with worked solutions")
    if fmt.mode == "gsm8k":
        return f" {problem.solution}\n#### {problem.answer}"
    if fmt.mode == "last_number":
        return f"{problem.solution}\nThe answer is {problem.answer}."
    if fmt.mode == "boxed":
        return f"{problem.solution}\nThe answer is $\\boxed{{{problem.answer}}}$."
    return f"{fmt.template.opening} {problem.solution} </think> <answer> {problem.answer} </answer>"


def encode_example(problem: Problem, fmt: PromptFormat, tokenizer: Tokenizer) -> Example:
    """A problem with its solution as one sequence for SFT: prompt, completion, end token."""
    prompt_ids = encode_prompt(problem.question, fmt, tokenizer)
    return response_example(prompt_ids, [*tokenizer.encode(completion_text(problem, fmt)), fmt.eos_id])


def response_example(prompt_ids: list[int], response_ids: list[int]) -> Example:
    """A sequence from ids, as an engine returned them: nothing is added, every response token is in the mask.

    A response that was stopped carries its end token already; one that was cut at the limit has none to train.
    """
    return Example([*prompt_ids, *response_ids], [0] * len(prompt_ids) + [1] * len(response_ids))


def encode_examples(
    problems: list[Problem], fmt: PromptFormat, tokenizer: Tokenizer, max_tokens: int
) -> tuple[list[Example], int]:
    """All problems for SFT, and how many were left out because they exceed `max_tokens`.

    They are left out, not cut: a cut response would teach the model to stop before its answer. UserError when none is
    left.
    """
    examples = [encode_example(problem, fmt, tokenizer) for problem in problems]
    kept = [example for example in examples if len(example.token_ids) <= max_tokens]
    if not kept and examples:
        shortest = min(len(example.token_ids) for example in examples)
        raise UserError(f"max_tokens={max_tokens} is less than the shortest example's {shortest}; raise it")
    return kept, len(examples) - len(kept)


def encode_prompts(
    problems: list[Problem], fmt: PromptFormat, tokenizer: Tokenizer, max_tokens: int
) -> tuple[list[Problem], list[list[int]], int]:
    """The problems whose prompts fit `max_tokens`, those prompts' ids, and how many were left out.

    UserError when none is left.
    """
    encoded = [(problem, encode_prompt(problem.question, fmt, tokenizer)) for problem in problems]
    kept = [(problem, ids) for problem, ids in encoded if len(ids) <= max_tokens]
    if not kept and encoded:
        shortest = min(len(ids) for _, ids in encoded)
        raise UserError(f"max_tokens={max_tokens} is less than the shortest prompt's {shortest} tokens; raise it")
    return [problem for problem, _ in kept], [ids for _, ids in kept], len(encoded) - len(kept)
