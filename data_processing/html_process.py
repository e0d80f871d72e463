"""The html_process stage: a page's bytes to its main text, with title, lists, tables and code kept readable.

The main content is found by resiliparse (Bevendorff et al. 2018), which drops most lists without a word: where it kept
less than `min_main_share` of the page's text (navigation aside) the whole text is taken. html_process_encoding finds
the encoding; html_process_guard defuses pages that would take the parser quadratic time.

    page = extract_html(data, "shift_jis", HtmlProcessConfig());  page.text, page.title, page.encoding
"""

from dataclasses import dataclass

from configs.errors import UserError, check_positive, missing_extra
from data_processing.document import Document
from data_processing.html_process_encoding import decode_page
from data_processing.html_process_guard import MAX_DEPTH, cut_long_tags, nesting_depth, strip_tags
from data_processing.raw_document import RawDocument
from data_processing.stage import MappingStage

# What is not part of a page's text, for the fallback; main content is resiliparse's own choice.
NOT_TEXT = ["nav", "header", "footer", "aside", "form", "[role=navigation]", "[role=banner]"]
NOT_TEXT += ["[role=contentinfo]", "[role=search]"]
MAGIC = {b"%PDF-": "PDF", b"\x89PNG": "PNG", b"GIF8": "GIF", b"\xff\xd8\xff": "JPEG", b"PK\x03\x04": "ZIP"}
MAGIC |= {b"\x1f\x8b": "gzip", b"\x7fELF": "ELF", b"OggS": "Ogg", b"ID3": "MP3", b"RIFF": "RIFF", b"Rar!": "RAR"}
SNIFF_BYTES = 2048
CONTROLS = bytes(code for code in range(32) if chr(code) not in "\t\n\r\f\x1b")


@dataclass
class HtmlProcessConfig:
    """How pages become text."""

    main_content: bool = True  # false: all text of the page but navigation
    min_main_share: float = 0.6  # main content below this share of all text is a loss: all text is taken
    max_page_bytes: int = 20_000_000

    def __post_init__(self):
        check_positive(**{"html_process.max_page_bytes": self.max_page_bytes})
        if not 0 <= self.min_main_share <= 1:
            raise UserError(f"html_process.min_main_share={self.min_main_share} is out of range; use a share in 0..1")


@dataclass(slots=True)
class ExtractedPage:
    """What a page gave; `method` is main, all (the fallback) or stripped (tags nested too deep to parse)."""

    text: str
    title: str
    encoding: str
    method: str


def import_resiliparse():
    """(extract_plain_text, HTMLTree), or the UserError that names the install command."""
    try:
        from resiliparse.extract.html2text import extract_plain_text
        from resiliparse.parse.html import HTMLTree
    except ImportError as error:
        raise missing_extra("resiliparse", "data") from error
    return extract_plain_text, HTMLTree


def binary_kind(data: bytes) -> str:
    """What binary data says it is ("PDF", "NUL bytes", ...), "" for what may be text."""
    for magic, name in MAGIC.items():
        if data.startswith(magic):
            return name
    head = data[:SNIFF_BYTES]
    if head[:2] in (b"\xff\xfe", b"\xfe\xff") or head.count(0) >= 0.2 * max(len(head), 1):
        text = decode_page(head)[0]  # UTF-16 is half NULs; binary data stays full of controls when decoded as it
        controls = sum(text.count(chr(code)) for code in CONTROLS) + text.count("\ufffd")
        return "NUL bytes" if controls > 0.05 * max(len(text), 1) else ""
    controls = len(head) - len(head.translate(None, CONTROLS))
    return "control bytes" if controls > 0.1 * max(len(head), 1) else ""


def extract_html(data: bytes, declared: str = "", config: HtmlProcessConfig | None = None) -> ExtractedPage:
    """Text and title of a page; `declared` is the charset of the Content-Type header. Text is "" for an empty page."""
    config = config or HtmlProcessConfig()
    html, encoding = decode_page(data, declared)
    html = cut_long_tags(html.replace("\0", "\ufffd") if "\0" in html else html)
    if nesting_depth(html) > MAX_DEPTH:
        title, text = strip_tags(html)
        return ExtractedPage(text, title, encoding, "stripped")
    extract, tree_class = import_resiliparse()
    tree = tree_class.parse(html)
    text, method = _extract_tree(tree, extract, config)
    return ExtractedPage(text, " ".join((tree.title or "").split()), encoding, method)


def _extract_tree(tree, extract, config: HtmlProcessConfig) -> tuple[str, str]:
    """(text, method) of a parsed page; the second extraction runs only where the first looks like a loss."""
    main = extract(tree, main_content=True) if config.main_content else ""
    if config.main_content and tree.body is not None:
        # The DOM's text costs a tenth of an extraction and bounds what the second one can give.
        if len(main) >= config.min_main_share * len(tree.body.text):
            return main, "main"
    everything = extract(tree, main_content=False, skip_elements=NOT_TEXT)
    if config.main_content and len(main) >= config.min_main_share * len(everything):
        return main, "main"
    return everything, "all"


class HtmlProcess(MappingStage):
    """Turns raw pages into documents; documents that are text already pass."""

    name = "html_process"

    def __init__(self, config: HtmlProcessConfig):
        self.config = config

    def convert(self, document: Document) -> tuple[Document, str, str]:
        if not isinstance(document, RawDocument) or document.kind != "html":
            return document, "", ""
        size = len(document.raw)
        if size > self.config.max_page_bytes:
            return document, "page_too_large", f"{size} bytes > max_page_bytes={self.config.max_page_bytes}"
        if kind := binary_kind(document.raw):
            return document, "binary", f"{kind} served as HTML"
        page = extract_html(document.raw, document.declared, self.config)
        converted = document.with_text(page.text, page.title, encoding=page.encoding, extraction=page.method)
        if not page.text.strip():
            return converted, "empty_page", f"no text in {size} bytes of HTML"
        return converted, "", ""
