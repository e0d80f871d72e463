"""What `python -m llm.serve` takes: where to listen, who may call, and how much a client may ask for."""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from configs.errors import UserError, check_choice, check_positive
from llm.engine_config import EngineConfig


@dataclass
class ServeLimits:
    """Bounds on what clients ask for; a request beyond one is refused with a 4xx that names it."""

    max_prompt_tokens: int | None = None  # a prompt's tokens; null: what the model's context leaves
    max_new_tokens: int | None = None  # a completion's tokens; null: what the context leaves
    max_choices: int = 64  # sequences of one request: n times the number of its prompts
    max_waiting: int = 256  # sequences in the server beyond those that run; more are refused with 429
    max_connections: int = 900  # open ones, below the usual limit of 1,024 open files; more are refused with 503
    max_body_bytes: int = 2_000_000
    max_pieces_per_s: float = 4000.0  # of all streams together; beyond, several tokens of a stream share a piece
    body_timeout_s: float = 30.0  # for a request's body to arrive
    send_timeout_s: float = 60.0  # for a client to take what was sent to it

    def __post_init__(self) -> None:
        check_positive(
            max_choices=self.max_choices, max_connections=self.max_connections, max_body_bytes=self.max_body_bytes,
            max_pieces_per_s=self.max_pieces_per_s,
            body_timeout_s=self.body_timeout_s, send_timeout_s=self.send_timeout_s,
        )  # fmt: skip
        for name in ("max_prompt_tokens", "max_new_tokens"):
            if getattr(self, name) is not None:
                check_positive(**{name: getattr(self, name)})
        if self.max_waiting < 0:
            raise UserError(f"limits.max_waiting={self.max_waiting} must not be negative; use 0 to refuse any queue")


@dataclass
class ServeConfig:
    """Everything that `python -m llm.serve` takes."""

    run: str | None = None  # a run directory: its newest whole checkpoint
    checkpoint: str | None = None  # or one checkpoint's directory
    model_name: str | None = None  # what clients call the model; null: the run's name
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one, printed at start
    token_file: str | None = None  # a file that holds the bearer token; null: no token is asked for
    allow_no_token: bool = False  # listen beyond this machine without a token
    allowed_hosts: list[str] = field(default_factory=list)  # names by which this server is called, beside its address
    document_start: bool = True  # put the end-of-text token before a prompt given as text, as before a document
    switch_interval_ms: float = 5.0  # Python's: the engine waits so long for the interpreter while HTTP is busy
    device: str = "auto"
    dtype: str = "auto"
    limits: ServeLimits = field(default_factory=ServeLimits)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        check_positive(switch_interval_ms=self.switch_interval_ms)
        if not 0 <= self.port <= 65535:
            raise UserError(f"port={self.port} must lie in 0..65535; 0 takes any free one")
        if not is_loopback(self.host) and self.token_file is None and not self.allow_no_token:
            raise UserError(
                f"host={self.host} is reached from other machines and no token is asked for; set token_file=PATH, "
                "or allow_no_token=true where something else keeps strangers out"
            )

    def read_token(self) -> str | None:
        """The bearer token, or None; UserError when its file cannot serve."""
        if self.token_file is None:
            return None
        try:
            token = Path(self.token_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"token_file={self.token_file} cannot be read as ASCII ({error}); write one line"
            ) from error
        if len(token) < 16 or any(char.isspace() for char in token):
            raise UserError(
                f"token_file={self.token_file} must hold one word of 16 characters or more; make one with: "
                "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        return token


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
