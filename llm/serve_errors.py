"""What goes wrong for a client, in the shape of OpenAI's API: {"error": {"message", "type", "param", "code"}}."""

from typing import Any


class ApiError(Exception):
    """An answer that is an error: a status, a reason in one line, and the parameter that it is about.

    A 4xx says what the client must change. `retry_after_s` becomes the header Retry-After.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after_s: int | None = None

    @property
    def kind(self) -> str:
        """OpenAI's `type` for this status."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        return headers


def too_busy(reason: str, retry_after_s: int) -> ApiError:
    """429 with Retry-After, a whole number of seconds."""
    error = ApiError(429, f"{reason}; try again in {retry_after_s} s", "queue_full")
    error.retry_after_s = retry_after_s
    return error
