"""The last resort, run only inside a worker process: LaTeX that our parser cannot read, through Math-Verify and sympy.

Its LaTeX grammar (latex2sympy2_extended) builds sympy objects and evaluates no text; the plain-expression parser of
Math-Verify, which calls sympy's parse_expr, is never given the text. A worker has a limit on memory and an alarm of its
own, so that one whose parent died does not compute for ever.
"""

import json
import logging
import resource
import signal
import sys
from typing import Any

MAX_MEMORY_BYTES = 3 << 30
ALARM_S = 30.0
DECIMALS = 12


def same_latex(given: str, truth: str) -> bool:
    """Whether Math-Verify parses both as LaTeX and finds them equal."""
    from math_verify import LatexExtractionConfig, parse, verify

    def tree_of(text: str) -> Any:
        return parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)

    left, right = tree_of(given), tree_of(truth)
    # Its own six decimals would pay 0.333333 for a third.
    same = bool(left) and bool(right) and verify(right, left, float_rounding=DECIMALS, timeout_seconds=None)
    return bool(same)


def serve() -> None:
    """Answer requests, a JSON line each: [given, truth] in, true, false or the name of an error out."""
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    replies = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is not a reply
    same_latex("1", "1")  # import everything before the clock of a request runs
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, ALARM_S)  # unhandled, the signal ends the process
        try:
            reply: bool | str = same_latex(*json.loads(line))
        except Exception as error:
            reply = type(error).__name__
        print(json.dumps(reply), file=replies, flush=True)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
