"""From the bytes of a web page to characters: which encoding is it really?

Order of trust: a byte order mark; valid UTF-8 (text of another encoding almost never is); the NUL pattern of UTF-16
without a mark; what HTTP or the page's <meta> declares, if the bytes agree; uchardet's guess; at last windows-1252.
A declaration is doubted because servers add one to everything they send.
"""

import codecs
import re

from configs.errors import missing_extra

BOMS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
META = re.compile(rb"<meta[^>]{0,200}?charset\s{0,8}=\s{0,8}[\"']?\s{0,8}([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
HEAD_BYTES = 4096
SINGLE_BYTE = {"cp1252", "iso8859-1", "iso8859-15", "latin-1", "ascii"}  # these can decode nearly everything
# What the web means by a label is wider than the standard of that name (encoding.spec.whatwg.org).
WIDER = {"iso8859-1": "cp1252", "ascii": "cp1252", "gb2312": "gb18030", "gbk": "gb18030", "euc_kr": "cp949"}
WIDER |= {"shift_jis": "cp932", "utf-16": "utf-16-le"}
MAX_BROKEN_SHARE = 0.005  # characters that may be broken in a text whose encoding is still believed


def import_resiliparse_encoding():
    """resiliparse's detector, or the UserError that names the install command."""
    try:
        from resiliparse.parse import encoding
    except ImportError as error:
        raise missing_extra("resiliparse", "data") from error
    return encoding


def python_codec(label: str) -> str:
    """The codec that the web means by a label, "" for an unknown one."""
    try:
        name = codecs.lookup(label.strip().strip("\"'")).name
    except (LookupError, ValueError):
        return ""
    if not codecs.lookup(name)._is_text_encoding:  # "hex", "zlib": codecs, but of bytes
        return ""
    return WIDER.get(name, name)


def utf16_without_mark(data: bytes) -> str:
    """utf-16-le or utf-16-be when every other byte of the head is mostly NUL, else ""."""
    head = data[:HEAD_BYTES]
    if head.count(0) < 0.2 * len(head) or len(head) < 4:
        return ""
    even, odd = head[0::2].count(0), head[1::2].count(0)
    if max(even, odd) < 5 * min(even, odd):
        return ""
    return "utf-16-le" if odd > even else "utf-16-be"


def _decode_if_sound(data: bytes, codec: str) -> str | None:
    """The text when no more than MAX_BROKEN_SHARE of it is broken."""
    try:
        return data.decode(codec)
    except UnicodeDecodeError:
        text = data.decode(codec, errors="replace")
    return text if text.count("\ufffd") <= MAX_BROKEN_SHARE * len(text) else None


def _candidates(data: bytes, declared: str) -> list[str]:
    """Codecs to try, most trusted first; the page's own declaration beats the server's when both fit."""
    found = META.search(data, 0, HEAD_BYTES)
    labels = [found.group(1).decode("ascii") if found else "", declared]
    claimed = [codec for codec in map(python_codec, filter(None, labels)) if codec]
    guessed = python_codec(import_resiliparse_encoding().detect_encoding(data) or "")
    # A single-byte claim fits any bytes, so a multi-byte guess (which seldom fits by chance) goes before it.
    if claimed and claimed[0] in SINGLE_BYTE and guessed and guessed not in SINGLE_BYTE:
        claimed.insert(0, guessed)
    return [*claimed, guessed, "cp1252"] if guessed else [*claimed, "cp1252"]


def decode_page(data: bytes, declared: str = "") -> tuple[str, str]:
    """(text, codec) of a page's bytes; `declared` is HTTP's charset. Never raises for bad bytes: they become U+FFFD."""
    for mark, codec in BOMS:
        if data.startswith(mark):
            return data[len(mark) :].decode(codec, errors="replace"), codec
    if data.isascii() and b"\x1b$" not in data and b"\x1b(" not in data and b"\0" not in data:
        return data.decode("ascii"), "ascii"
    if codec := utf16_without_mark(data):
        return data.decode(codec, errors="replace"), codec
    if b"\x1b$" in data or b"\x1b(" in data:
        if (text := _decode_if_sound(data, "iso2022_jp")) is not None:
            return text, "iso2022_jp"
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        pass  # not UTF-8: the candidates decide
    for codec in _candidates(data, declared):
        if (text := _decode_if_sound(data, codec)) is not None:
            return text, codec
    return data.decode("utf-8", errors="replace"), "utf-8"
