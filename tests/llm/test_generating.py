"""Streaming shows whole characters only, and its pieces joined are the text decoded at once."""

import random

import pytest

from llm.generating_text import TextStream


class ByteTokens:
    """A vocabulary in which id n stands for the bytes given for it."""

    def __init__(self, pieces: list[bytes]):
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def stream(pieces: list[bytes]) -> list[str]:
    text = TextStream(ByteTokens(pieces))
    return [*(text.push(token_id) for token_id in range(len(pieces))), text.finish()]


def test_a_character_waits_for_its_last_byte():
    euro, family = "€".encode(), "👩‍👧".encode()
    assert stream([b"a" + euro[:1], euro[1:2], euro[2:] + b"b"]) == ["a", "", "€b", ""]
    shown = stream([bytes([byte]) for byte in family])
    assert "".join(shown) == "👩‍👧" and "\ufffd" not in "".join(shown)


def test_bytes_that_can_never_become_a_character_are_replaced_at_once():
    assert stream([b"\xff", b"a"]) == ["\ufffd", "a", ""]
    assert stream([b"\xe2\x82", b"a"]) == ["", "\ufffda", ""]
    assert stream([b"a\xe2\x82"]) == ["a", "\ufffd"]


@pytest.mark.parametrize("seed", range(5))
def test_any_cut_gives_the_text_decoded_at_once(seed):
    draw = random.Random(seed)
    alphabet = ["a", "é", "€", "漢", "🎉", "\u0301", "\x00"]
    data = "".join(draw.choices(alphabet, k=200)).encode() + bytes(draw.choices(range(256), k=20))
    pieces, at = [], 0
    while at < len(data):
        step = draw.randint(1, 5)
        pieces.append(data[at : at + step])
        at += step
    assert "".join(stream(pieces)) == data.decode("utf-8", errors="replace")
