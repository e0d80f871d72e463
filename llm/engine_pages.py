"""Who holds which page of the key-value cache: reference counts, and full pages found again by their content.

A page's key is a hash over all tokens up to its end, so equal keys mean equal keys and values. A page that nobody uses
any more keeps its key and goes to the end of a queue; when no page is free, the one unused for longest is taken. Page 0
is never given out: padded rows of a batch write there.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable

ROOT = b""


def page_key(parent: bytes, token_ids: list[int]) -> bytes:
    """The key of a full page, given that of the page before it (ROOT for a first page)."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class PagePool:
    """Pages 1 .. num_pages - 1; `sharing` false: no page outlives its requests."""

    def __init__(self, num_pages: int, sharing: bool = True):
        self.num_pages = num_pages
        self.sharing = sharing
        self.free = dict.fromkeys(range(num_pages - 1, 0, -1))  # as an ordered set: the last is given first
        self.references = [0] * num_pages
        self.page_of: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()  # with a key but without a user, longest unused first

    @property
    def num_available(self) -> int:
        """Pages that `take` can give."""
        return len(self.free) + len(self.idle)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self.num_available

    def take(self, wanted: int = 0) -> int:
        """A page for new tokens, with one user: page `wanted`, if it is free."""
        if wanted in self.free:
            page = wanted
            del self.free[page]
        elif self.free:
            page, _ = self.free.popitem()
        else:
            page, _ = self.idle.popitem(last=False)
            del self.page_of[self.key_of.pop(page)]
        self.references[page] = 1
        return page

    def find(self, key: bytes) -> int | None:
        """The page of this content, if it is still there."""
        return self.page_of.get(key)

    def share(self, page: int) -> None:
        """One more user of a page that `find` gave."""
        self.idle.pop(page, None)
        self.references[page] += 1

    def publish(self, page: int, key: bytes) -> None:
        """Let others find a full page; one that has this content already stays the one that is found."""
        if self.sharing and key not in self.page_of and page not in self.key_of:
            self.page_of[key] = page
            self.key_of[page] = key

    def release(self, pages: Iterable[int]) -> None:
        """One user less of each; give a request's last page first, so that beginnings stay longest."""
        for page in pages:
            self.references[page] -= 1
            assert self.references[page] >= 0, f"page {page} was released more often than taken"
            if self.references[page] == 0:
                if page in self.key_of:
                    self.idle[page] = None
                else:
                    self.free[page] = None

    def forget(self) -> None:
        """Nothing can be found any more: the weights have changed."""
        self.free.update(self.idle)
        self.idle.clear()
        self.page_of.clear()
        self.key_of.clear()
