"""One hash of a text, for every decision that must fall the same way wherever the text turns up."""

import hashlib


def in_share(text: str, share: float) -> bool:
    """Whether the hash of a text lies in the first `share` (0..1) of all hashes: the same texts every time."""
    if not share:
        return False
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2.0**64
