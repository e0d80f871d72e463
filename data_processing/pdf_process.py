"""The pdf_process stage: a PDF's bytes to running text, de-hyphenated, without page numbers and references.

pypdfium2 reads; where it fails, pypdf tries. Lines are joined across line ends where a word was split, running heads
and page numbers (lines that come back on many pages) go, and the reference section is cut at its heading.

    pdf = extract_pdf(data, PdfProcessConfig());  pdf.text, pdf.title, pdf.pages
"""

import io
import re
from collections import Counter
from dataclasses import dataclass

from configs.errors import check_positive, missing_extra
from data_processing.document import Document
from data_processing.raw_document import RawDocument
from data_processing.stage import MappingStage

MAGIC, MAGIC_WINDOW = b"%PDF-", 1024  # readers accept junk before the header within its first kilobyte
# A word cut at a line end: "exam-\nple". Kept: what a digit or capital follows ("pre-\n1900", "Jean-\nPaul").
SMALL = "a-z\u00df-\u00f6\u00f8-\u00ff"
HYPHEN = re.compile(rf"(?<=[^\W\d_])[-\u00ad\u2010]\n[ \t]*(?=[{SMALL}])")
# pdfium puts one of these for a hyphen and its line end.
PDFIUM_HYPHEN = re.compile(rf"(?<=[^\W\d_])[\x02\ufffe]\n?[ \t]*(?=[{SMALL}])")
PDFIUM_MARKS = re.compile("[\x02\ufffe]")
REFERENCES = re.compile(
    r"^[ \t]{0,8}(?:\d{1,2}\.?[ \t]+|[IVX]{1,5}\.[ \t]+)?"
    r"(?:references(?: cited)?|bibliography|works cited|literature cited|reference list)[ \t]*:?[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
# What may follow the references and is text again.
AFTER_REFERENCES = re.compile(
    r"^[ \t]{0,8}(?:appendi(?:x|ces)\b|supplementary\b|supporting information\b)[^\n]{0,80}$",
    re.IGNORECASE | re.MULTILINE,
)
YEAR = re.compile(r"\b(?:1[6-9]|20)\d\d\b")
YEARS_WITHIN, MIN_YEARS = 3_000, 3
MAX_HEADINGS = 50  # the last ones are looked at
MAX_CUT_SHARE = 0.3  # what is longer is no reference list
PAGE_NUMBER = re.compile(r"^\W{0,3}(?:page\s{1,3})?\d{1,4}(?:\s{0,3}(?:/|of)\s{0,3}\d{1,4})?\W{0,3}$", re.IGNORECASE)
DIGITS = re.compile(r"\d+")


@dataclass
class PdfProcessConfig:
    """What is done to a PDF's text."""

    dehyphenate: bool = True
    cut_references: bool = True
    drop_running_heads: bool = True
    max_pages: int = 2_000
    min_characters_per_page: int = 50  # below it the pages are scans: the document is dropped

    def __post_init__(self):
        check_positive(**{"pdf_process.max_pages": self.max_pages})


@dataclass(slots=True)
class ExtractedPdf:
    """What a PDF gave; `reader` is the package that read it, "" when none could."""

    text: str
    title: str
    pages: int
    reader: str
    problem: str = ""


def is_pdf(data: bytes) -> bool:
    """Whether the bytes begin as a PDF does."""
    return MAGIC in data[:MAGIC_WINDOW]


def _read_pdfium(data: bytes, max_pages: int) -> tuple[list[str], str, int]:
    """(text of each page, title, number of pages) by pypdfium2."""
    try:
        import pypdfium2
    except ImportError as error:
        raise missing_extra("pypdfium2", "data") from error
    pdf = pypdfium2.PdfDocument(data)
    try:
        pages = []
        for index in range(min(len(pdf), max_pages)):
            page = pdf[index]
            text_page = page.get_textpage()
            pages.append(text_page.get_text_bounded())
            text_page.close()
            page.close()
        return pages, pdf.get_metadata_value("Title"), len(pdf)
    finally:
        pdf.close()


def _read_pypdf(data: bytes, max_pages: int) -> tuple[list[str], str, int]:
    """The same by pypdf, which is slower and mends more broken files."""
    try:
        import pypdf
    except ImportError as error:
        raise missing_extra("pypdf", "data") from error
    reader = pypdf.PdfReader(io.BytesIO(data), strict=False)
    count = len(reader.pages)
    pages = [reader.pages[index].extract_text() for index in range(min(count, max_pages))]
    return pages, str((reader.metadata or {}).get("/Title") or ""), count


def read_pages(data: bytes, max_pages: int) -> tuple[list[str], str, int, str, str]:
    """(page texts, title, number of pages, reader, problem); reader is "" when no package could read the file."""
    problems = []
    for name, read in (("pypdfium2", _read_pdfium), ("pypdf", _read_pypdf)):
        try:
            pages, title, count = read(data, max_pages)
        except Exception as error:  # both raise whatever a broken file leads them to, KeyError and RecursionError too
            if isinstance(error, ImportError) or "is not installed" in str(error):
                raise
            problems.append(f"{name}: {type(error).__name__} {str(error)[:80]}")
            continue
        if any(page.strip() for page in pages) or name == "pypdf":
            return pages, title or "", count, name, "; ".join(problems)
        problems.append(f"{name}: no text")
    return [], "", 0, "", "; ".join(problems)


def clean_page(text: str) -> str:
    """One page with plain line ends and spaces, without the characters that mark pdfium's soft hyphens."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
    return "\n".join(line.rstrip() for line in text.split("\n"))


def drop_running_heads(pages: list[str]) -> list[str]:
    """The pages without page numbers and without first and last lines that return on a third of them (at least 3)."""
    split = [[line for line in page.split("\n") if line.strip()] for page in pages]
    edges = Counter(DIGITS.sub("#", line.strip()) for lines in split for line in {*lines[:2], *lines[-2:]})
    running = {line for line, count in edges.items() if count >= max(3, len(pages) / 3)}
    kept = []
    for page in pages:
        lines = page.split("\n")
        marked = [i for i, line in enumerate(lines) if line.strip()]
        outer = {*marked[:2], *marked[-2:]}
        kept.append(
            "\n".join(
                line
                for i, line in enumerate(lines)
                if not (i in outer and (PAGE_NUMBER.match(line.strip()) or DIGITS.sub("#", line.strip()) in running))
            )
        )
    return kept


def dehyphenate(text: str) -> str:
    """Words cut at line ends, whole again; a hyphen before a capital or a digit stays."""
    return PDFIUM_MARKS.sub("-", HYPHEN.sub("", PDFIUM_HYPHEN.sub("", text)))


def cut_references(text: str) -> str:
    """The text without its reference section: from its heading, late in the text, to an appendix or the end.

    The heading counts when years follow it as they do in a list of works, so that a chapter named so stays.
    """
    headings = [found for found in REFERENCES.finditer(text) if found.start() >= 0.4 * len(text)]
    headings = [
        h for h in headings[-MAX_HEADINGS:] if len(YEAR.findall(text, h.end(), h.end() + YEARS_WITHIN)) >= MIN_YEARS
    ]
    if not headings:
        return text
    start = headings[-1].start()
    after = AFTER_REFERENCES.search(text, headings[-1].end())
    return text[:start].rstrip() + ("\n\n" + text[after.start() :] if after else "")


def extract_pdf(data: bytes, config: PdfProcessConfig | None = None) -> ExtractedPdf:
    """Text, title and page count of a PDF; reader "" and a `problem` when it cannot be read."""
    config = config or PdfProcessConfig()
    pages, title, count, reader, problem = read_pages(data, config.max_pages)
    if not reader:
        return ExtractedPdf("", "", 0, "", problem)
    pages = [clean_page(page) for page in pages]
    if config.drop_running_heads:
        pages = drop_running_heads(pages)
    text = "\n".join(pages)
    text = dehyphenate(text) if config.dehyphenate else PDFIUM_MARKS.sub("-", text)
    if config.cut_references:
        text = cut_references(text)
    return ExtractedPdf(text, " ".join(title.split()), count, reader, problem)


class PdfProcess(MappingStage):
    """Turns raw PDFs into documents; documents that are text already pass."""

    name = "pdf_process"

    def __init__(self, config: PdfProcessConfig):
        self.config = config

    def convert(self, document: Document) -> tuple[Document, str, str]:
        if not isinstance(document, RawDocument) or document.kind != "pdf":
            return document, "", ""
        if not is_pdf(document.raw):
            return document, "not_a_pdf", f"begins with {document.raw[:16]!r}"
        pdf = extract_pdf(document.raw, self.config)
        if not pdf.reader:
            return document, "unreadable_pdf", pdf.problem
        converted = document.with_text(pdf.text, pdf.title, pages=pdf.pages, reader=pdf.reader)
        per_page = len(pdf.text.strip()) / max(min(pdf.pages, self.config.max_pages), 1)
        if per_page < self.config.min_characters_per_page:
            bound = f"min_characters_per_page={self.config.min_characters_per_page}"
            return converted, "little_text", f"{per_page:.0f} characters a page < {bound}"
        return converted, "", ""
