"""GPT-2's split pattern on ASCII text in NumPy: where pieces start is a function of each character and its neighbours.

`re` needs about 300 ns a piece whatever the pattern; here the starts of all pieces are found in a few array passes, a
mark is put in front of each, and `str.split` cuts at the marks. The pattern and `re` remain the definition: tests
compare both on random text. Short texts are left to `re`.
"""

import numpy as np

MARK = "\x1e"  # ASCII's record separator: a text that holds one is left to `re`
MIN_CHARS = 1500  # below, the fixed cost of the array passes is more than `re` takes
SPACE_CLASS, LETTER, DIGIT, OTHER, MARK_CLASS = range(5)
APOSTROPHE, BLANK = ord("'"), ord(" ")


def _class_table() -> np.ndarray:
    table = np.full(128, OTHER, dtype=np.uint8)
    for char in map(chr, range(128)):
        if char in "\t\n\v\f\r ":
            table[ord(char)] = SPACE_CLASS
        elif char.isalpha():
            table[ord(char)] = LETTER
        elif char.isdigit():
            table[ord(char)] = DIGIT
    table[ord(MARK)] = MARK_CLASS
    return table


CLASSES = _class_table()
SHORT_CONTRACTION = np.isin(np.arange(128), list(b"sdmt"))
LONG_CONTRACTIONS = [int.from_bytes(name, "big") for name in (b"ll", b"ve", b"re")]


def piece_starts(chars: np.ndarray) -> np.ndarray:
    """Whether a piece starts at each of the characters (uint8, at least two)."""
    classes = CLASSES[chars]
    changes = classes[1:] != classes[:-1]
    # The last character of a run of white space stands apart from the run: a blank goes with what follows it.
    leaves_space = changes & (classes[:-1] == SPACE_CLASS)
    starts = np.ones(len(chars), dtype=bool)
    starts[1:] = changes & ~(leaves_space & (chars[:-1] == BLANK))
    starts[:-1] |= leaves_space
    _mark_contractions(chars, starts)
    return starts


def _mark_contractions(chars: np.ndarray, starts: np.ndarray) -> None:
    """'s 'd 'm 't 'll 've 're, where a piece starts at the apostrophe, are pieces, whatever letter comes next."""
    places = np.flatnonzero(starts & (chars == APOSTROPHE))
    places = places[places < len(chars) - 1]
    first = chars[places + 1]
    second = chars[np.minimum(places + 2, len(chars) - 1)]
    pair = (first.astype(np.int64) << 8) | second
    short = SHORT_CONTRACTION[first]
    ll, ve, re = LONG_CONTRACTIONS
    long = ((pair == ll) | (pair == ve) | (pair == re)) & (places + 2 < len(chars))
    starts[places[short | long] + 1] = False
    ends = np.concatenate([places[short] + 2, places[long] + 3])
    starts[ends[ends < len(chars)]] = True


def split_gpt2_ascii(text: str) -> list[str]:
    """The pieces of an ASCII text of two characters or more.

    The text may be several joined by MARK, each but the first beginning with a blank and each but the last ending in
    another character: two empty pieces then stand between the pieces of one and of the next.
    """
    chars = np.frombuffer(text.encode("ascii"), dtype=np.uint8)
    places = np.flatnonzero(piece_starts(chars))[1:]
    times = np.ones(len(chars), dtype=np.uint8)
    times[places] = 2
    marked = np.repeat(chars, times)
    marked[places + np.arange(len(places))] = ord(MARK)
    return marked.tobytes().decode("ascii").split(MARK)
