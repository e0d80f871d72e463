"""The contestants of bench_mark_data: our stages and their peers, each as a function of one document.

Peers are imported when asked for; one that is not installed gives a line that says so, and the rest goes on.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data_processing.deduplicate import Deduplicate
from data_processing.document import Document
from data_processing.html_process import extract_html
from data_processing.mask_pii import mask_text
from data_processing.minhash import signatures
from data_processing.pdf_process import extract_pdf
from data_processing.quality_filter import QualityFilter, QualityFilterConfig

WEB_RULES = ["repetition", "gopher", "c4", "fineweb"]


@dataclass
class Contestant:
    """`run(items)` works through all items; `make` prepares it once, outside the clock."""

    name: str
    make: Callable[[], Callable[[list[Any]], Any]]


def each(function: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
    """A function of one item as one of a list."""
    return lambda items: [function(item) for item in items]


def _resiliparse():
    from resiliparse.extract.html2text import extract_plain_text

    return each(lambda page: extract_plain_text(page.decode("utf-8", "replace"), main_content=True))


def _trafilatura():
    import trafilatura

    return each(lambda page: trafilatura.extract(page.decode("utf-8", "replace")))


def our_verdict() -> Callable[[str], str]:
    """Our reason for a text, "" to keep it."""
    stage = QualityFilter(QualityFilterConfig(rules=WEB_RULES))
    return lambda text: stage.judge(Document("", "", text))[0]


def datatrove_verdict() -> Callable[[str], str]:
    """The reason of datatrove's four filters in the same order, "" to keep it."""
    from datatrove.data import Document as TroveDocument
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    filters = [GopherRepetitionFilter(), GopherQualityFilter(), C4QualityFilter(), FineWebQualityFilter()]

    def judge(text: str) -> str:
        document = TroveDocument(text=text, id="")
        for one in filters:
            verdict = one.filter(document)
            if verdict is not True:
                return verdict[1]
        return ""

    return judge


def _datasketch():
    from datasketch import MinHash

    def sign(text: str):
        words = text.lower().split()
        minhash = MinHash(num_perm=128)
        minhash.update_batch([" ".join(words[i : i + 5]).encode() for i in range(len(words) - 4)])
        return minhash

    return each(sign)


def _rensa():
    from rensa import RMinHash

    def sign(text: str):
        words = text.lower().split()
        minhash = RMinHash(num_perm=128, seed=1)
        minhash.update([" ".join(words[i : i + 5]) for i in range(len(words) - 4)])
        return minhash.digest()

    return each(sign)


def _datatrove_minhash():
    from datatrove.pipeline.dedup import MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.utils.hashing import HashConfig

    # 14 buckets of 8 hashes, its default, is 112 permutations.
    settings = MinhashConfig(n_grams=5, hash_config=HashConfig(hash_fc="sha1"))  # its xxhash64 fails with xxhash 4
    signer = MinhashDedupSignature(output_folder="/tmp", config=settings)
    return each(lambda text: signer.get_signature(signer.get_shingles(text)))


def _exact():
    def run(texts: list[str]):
        return Deduplicate().run([Document(str(i), "s", text) for i, text in enumerate(texts)])

    return run


def _sha1():
    def run(texts: list[str]):
        seen: set[bytes] = set()
        for text in texts:
            seen.add(hashlib.sha1(re.sub(r"\s+", " ", text).encode()).digest())

    return run


def _pypdf():
    import io

    import pypdf

    return each(lambda data: [page.extract_text() for page in pypdf.PdfReader(io.BytesIO(data)).pages])


def _pypdfium2():
    import pypdfium2

    return each(lambda data: [page.get_textpage().get_text_bounded() for page in pypdfium2.PdfDocument(data)])


STAGES: dict[str, list[Contestant]] = {
    "html": [
        Contestant("ours", lambda: each(extract_html)),
        Contestant("resiliparse main content", _resiliparse),
        Contestant("trafilatura", _trafilatura),
    ],
    "heuristics": [
        Contestant("ours, four sets", lambda: each(our_verdict())),
        Contestant("datatrove, four filters", lambda: each(datatrove_verdict())),
    ],
    "minhash": [
        Contestant("ours", lambda: signatures),
        Contestant("datasketch", _datasketch),
        Contestant("rensa, Python shingles", _rensa),
        Contestant("datatrove", _datatrove_minhash),
    ],
    "exact": [Contestant("ours", _exact), Contestant("sha1 and a set", _sha1)],
    "mask_pii": [Contestant("ours", lambda: each(mask_text))],
    "pdf": [
        Contestant("ours", lambda: each(extract_pdf)),
        Contestant("pypdfium2", _pypdfium2),
        Contestant("pypdf", _pypdf),
    ],
}
