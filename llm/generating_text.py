"""Tokens to text as they come, and never half a character.

A token of a byte-level tokenizer may end inside a UTF-8 character. Its bytes wait until the character is whole, or
until no byte to come could make it one; only then U+FFFD stands in for them, as in `bytes.decode(errors="replace")`.
"""

import codecs
from typing import Protocol


class HasTokenBytes(Protocol):
    def token_bytes(self, token_id: int) -> bytes: ...


class TextStream:
    """Decodes one row's tokens as they come; the pieces joined equal the whole output decoded at once."""

    def __init__(self, tokenizer: HasTokenBytes):
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes, perhaps none."""
        return self.decoder.decode(self.tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left: nothing, or U+FFFD for a character that the output broke off in."""
        return self.decoder.decode(b"", final=True)
