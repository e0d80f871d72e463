"""Ask a model every problem several times, grade the responses, and keep each as a line of answers.jsonl.

A line is a function of (weights, problem, sample number, seed): the engine draws by (seed, index), whatever shares the
batch. So a killed evaluation goes on behind its last whole line and ends with the lines of an uninterrupted one.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from alignment.drgrpo_grader import Grader, Verdict
from alignment.drgrpo_grader_compare import same_answer
from alignment.problem import Problem
from alignment.r1_prompt import PromptFormat
from alignment.rollout import RolloutEngine
from configs.run_dir import RunDir, read_jsonl
from llm.engine_request import Completion, RequestParams
from llm.sampling import SamplingConfig
from parallel.collectives import all_gather_json
from parallel.mesh import Mesh

FILE_NAME = "answers.jsonl"
ANSWER_END = "</answer>"


@dataclass(frozen=True)
class Answer:
    """One graded response; `row` is the problem's number in the evaluation, `tokens` the response's."""

    row: int
    sample: int
    id: str
    source: str
    truth: str
    response: str
    answer: str | None
    correct: bool  # the answer is right, whatever the form
    format_ok: bool
    reason: str
    prompt_tokens: int
    tokens: int
    is_cut: bool  # ended by a limit and not by the model

    @property
    def is_paid(self) -> bool:
        """Right and well formed: what the accuracy counts."""
        return self.correct and self.format_ok


@dataclass(frozen=True)
class Asking:
    """How each problem is asked."""

    num_samples: int
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_at_answer: bool
    requests_at_once: int


@dataclass
class Examinee:
    """A model with what it needs to be asked: engine, prompts' ids in the problems' order, prompt format."""

    engine: RolloutEngine
    prompts: list[list[int]]
    fmt: PromptFormat


def answer_all(
    examinee: Examinee, problems: list[Problem], asking: Asking, grader: Grader, run_dir: RunDir, mesh: Mesh
) -> Iterator[tuple[int, float]]:
    """Fill answers.jsonl; yields the number of lines written and the slowest engine's seconds, after each batch.

    Every rank calls it and answers a share of each batch; rank 0 writes.
    """
    if mesh.is_main:
        keep_whole_lines(run_dir)
    written = len(read_jsonl(run_dir.path / FILE_NAME)) if mesh.is_main else 0
    done = all_gather_json(written, mesh)[0]
    total = len(problems) * asking.num_samples
    while done < total:
        places = range(done, min(total, done + asking.requests_at_once * mesh.world_size))
        own = places[mesh.rank :: mesh.world_size]
        start = time.perf_counter()
        lines = answer_share(own, examinee, problems, asking, grader) if own else []
        shares = all_gather_json([[asdict(line) for line in lines], time.perf_counter() - start], mesh)
        if mesh.is_main:
            by_place = dict(
                pair
                for rank, (share, _) in enumerate(shares)
                for pair in zip(places[rank :: mesh.world_size], share, strict=True)
            )
            run_dir.append_jsonl(FILE_NAME, [by_place[place] for place in places])
        done += len(places)
        yield len(places), max(seconds for _, seconds in shares)


def answer_share(
    places: range, examinee: Examinee, problems: list[Problem], asking: Asking, grader: Grader
) -> list[Answer]:
    """One rank's requests of a batch, generated and graded."""
    rows = [place // asking.num_samples for place in places]
    completions = examinee.engine.generate(
        [examinee.prompts[row] for row in rows], [request(asking, examinee.fmt, place) for place in places]
    )
    texts = [response_text(one, asking, examinee.fmt) for one in completions]
    verdicts = grader.verdicts(texts, [problems[row].answer for row in rows])
    return [
        graded(place, asking, problems[row], one, (text, verdict))
        for place, row, one, text, verdict in zip(places, rows, completions, texts, verdicts, strict=True)
    ]


def keep_whole_lines(run_dir: RunDir) -> None:
    """Take off a last line that a kill cut in half, so that the next one starts a line of its own."""
    path = run_dir.path / FILE_NAME
    if path.exists():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            run_dir.write_text(FILE_NAME, whole.decode("utf-8"))


def request(asking: Asking, fmt: PromptFormat, place: int) -> RequestParams:
    sampling = SamplingConfig(temperature=asking.temperature, top_p=asking.top_p, seed=asking.seed)
    stop = (ANSWER_END,) if asking.stop_at_answer else ()
    return RequestParams(sampling, asking.max_new_tokens, stop_ids=(fmt.eos_id,), stop=stop, index=place)


def response_text(completion: Completion, asking: Asking, fmt: PromptFormat) -> str:
    """The response; a stop string, which the engine leaves out, is put back."""
    ended_by_text = completion.finish_reason == "stop" and completion.token_ids[-1:] != [fmt.eos_id]
    return completion.text + (ANSWER_END if asking.stop_at_answer and ended_by_text else "")


def graded(
    place: int, asking: Asking, problem: Problem, completion: Completion, outcome: tuple[str, Verdict]
) -> Answer:
    text, verdict = outcome
    return Answer(
        row=place // asking.num_samples,
        sample=place % asking.num_samples,
        id=problem.id,
        source=problem.source,
        truth=problem.answer,
        response=text,
        answer=verdict.answer,
        correct=verdict.correct,
        format_ok=verdict.format_ok,
        reason=verdict.reason,
        prompt_tokens=len(completion.prompt_ids),
        tokens=len(completion.token_ids),
        is_cut=completion.finish_reason != "stop",
    )


def read_answers(run_dir: RunDir) -> list[list[Answer]]:
    """The answers by problem, samples in order."""
    answers = [Answer(**line) for line in read_jsonl(run_dir.path / FILE_NAME)]
    by_row: dict[int, list[Answer]] = {}
    for answer in answers:
        by_row.setdefault(answer.row, []).append(answer)
    return [by_row[row] for row in sorted(by_row)]


def group_answers(answers: list[Answer]) -> list[int | None]:
    """A number for each sample, equal for answers that are the same by the grader; None where there is no answer."""
    texts: dict[str, int] = {}
    leaders: list[str] = []
    groups: list[int | None] = []
    for one in answers:
        if one.answer is None:
            groups.append(None)
            continue
        if one.answer not in texts:
            same = [number for number, leader in enumerate(leaders) if same_answer(one.answer, leader)]
            texts[one.answer] = same[0] if same else len(leaders)
            if not same:
                leaders.append(one.answer)
        groups.append(texts[one.answer])
    return groups
