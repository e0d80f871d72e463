"""One row of a data set, in any of the layouts that are in use, to one Problem.

GSM8K's solutions carry calculator marks, `<<16-3-4=9>>`, which stand for no text and are taken out, and end in
"#### answer", which is cut off and becomes the answer.
"""

import re
from typing import Any

from alignment.drgrpo_grader_extract import last_boxed
from alignment.problem import Problem
from configs.errors import UserError

CALCULATOR = re.compile(r"<<[^<>]*>>")
MARKER = "####"
QUESTION_KEYS = ("question", "problem")


def problem_of_row(row: Any, where: str, default_id: str, default_source: str) -> Problem:
    """The problem in a row; UserError, opening with `where`, when question or answer is missing."""
    if not isinstance(row, dict):
        raise UserError(f"{where} is a {type(row).__name__}, not an object; a problem is a JSON object")
    key = next((name for name in QUESTION_KEYS if isinstance(row.get(name), str)), None)
    if key is None or not row[key].strip():
        raise UserError(f"{where} has no question among its keys {sorted(map(str, row))}; name it question or problem")
    answer, solution = answer_and_solution(row)
    if not answer:
        raise UserError(f"{where} has no answer: no `answer`, no '####' and no \\boxed in `solution`; add one")
    name, source = row.get("id", default_id), row.get("source", default_source)
    return Problem(str(name), row[key].strip(), answer, str(source), solution)


def answer_and_solution(row: dict[str, Any]) -> tuple[str, str | None]:
    """The bare answer ("" when there is none) and the reasoning without its marker, or None."""
    answer, solution = row.get("answer"), row.get("solution")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    solution = solution.strip() if isinstance(solution, str) and solution.strip() else None
    if isinstance(answer, str) and MARKER in answer:
        return split_gsm8k(answer)
    if isinstance(answer, str) and answer.strip():
        return answer.strip(), solution
    if solution is None:
        return "", None
    if MARKER in solution:
        return split_gsm8k(solution)
    return (last_boxed(solution) or "").strip(), solution


def split_gsm8k(text: str) -> tuple[str, str | None]:
    """The answer behind the last "####" without its thousands' commas, and the reasoning before it."""
    reasoning, _, answer = text.rpartition(MARKER)
    reasoning = CALCULATOR.sub("", reasoning).strip()
    answer = answer.strip()
    plain = answer.replace(",", "")
    return (plain if plain.lstrip("-").isdecimal() else answer), reasoning or None
