"""pdf_process on PDFs that a few lines of this repository write, and on broken ones."""

import time

import pytest

from data_processing import pdf_process
from data_processing.pdf_process import PdfProcess, PdfProcessConfig, cut_references, dehyphenate, extract_pdf
from data_processing.raw_document import RawDocument
from tests.data_processing.pages import make_pdf

PAGES = [
    [
        "A Journal of Tests, volume 3",
        f"The {name} page speaks of mea-",
        "surement and of things that come",
        f"together in well-known {name} ways.",
        str(number),
    ]
    for number, name in enumerate(["first", "second", "third", "fourth"], 11)
]


def judge(data: bytes, **settings) -> tuple[str, str]:
    document = RawDocument("1", "s", "", raw=data, kind="pdf")
    _, reason, detail = PdfProcess(PdfProcessConfig(**settings)).convert(document)
    return reason, detail


def test_text_is_whole_words_without_heads_and_page_numbers():
    pdf = extract_pdf(make_pdf(PAGES, "On Tests"))
    assert (pdf.pages, pdf.title, pdf.reader) == (4, "On Tests", "pypdfium2")
    assert pdf.text.count("measurement") == 4 and "well-known" in pdf.text
    assert "Journal" not in pdf.text and not any(str(n) in pdf.text for n in range(11, 15))
    plain = extract_pdf(make_pdf(PAGES), PdfProcessConfig(dehyphenate=False, drop_running_heads=False))
    assert plain.text.count("Journal") == 4 and "measurement" not in plain.text


def test_the_second_reader_gives_the_same_words(monkeypatch):
    def broken(data, max_pages):
        raise ValueError("as if the file were too much for it")

    first = extract_pdf(make_pdf(PAGES))
    monkeypatch.setattr(pdf_process, "_read_pdfium", broken)
    second = extract_pdf(make_pdf(PAGES))
    assert second.reader == "pypdf" and "ValueError" in second.problem
    assert second.text.split() == first.text.split()


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("exam-\nple", "example"),
        ("exam\u00ad\nple", "example"),
        ("exam-\n  ple", "example"),
        ("pre-\n1900", "pre-\n1900"),
        ("Jean-\nPaul", "Jean-\nPaul"),
        ("1-\nand", "1-\nand"),
        ("Stra-\nße", "Straße"),
    ],
)
def test_dehyphenation_by_hand(text, whole):
    assert dehyphenate(text) == whole


def test_reference_sections_are_cut_and_chapters_of_that_name_are_not():
    body = "A line of the paper itself.\n" * 60
    works = "".join(f"[{n}] A. Author, A work, {1990 + n}.\n" for n in range(12))
    assert cut_references(body + "References\n" + works) == body.rstrip()
    assert cut_references(body + "7. REFERENCES\n" + works) == body.rstrip()
    with_appendix = cut_references(body + "Bibliography\n" + works + "Appendix A\nMore text.")
    assert with_appendix == body.rstrip() + "\n\nAppendix A\nMore text."
    chapter = body + "References\nHow C++ passes values by reference.\n" * 3
    assert cut_references(chapter) == chapter
    early = "References\n" + works + body * 2
    assert cut_references(early) == early


def test_broken_files_are_dropped_with_their_reason():
    whole = make_pdf(PAGES)
    assert judge(b"<html>not found</html>")[0] == "not_a_pdf"
    assert judge(b"%PDF-1.4 and nothing else")[0] == "unreadable_pdf"
    assert judge(b"junk " * 10 + whole)[0] == "", "junk before the header is mended"
    reason, detail = judge(whole[: len(whole) // 3])
    assert reason in ("unreadable_pdf", "little_text") and detail
    reason, detail = judge(make_pdf([["x"], ["y"]]))
    assert (reason, detail) == ("little_text", "2 characters a page < min_characters_per_page=50")
    assert judge(whole, max_pages=2)[0] == ""


def test_a_page_count_bound_holds():
    assert "second" in extract_pdf(make_pdf(PAGES), PdfProcessConfig(max_pages=2)).text
    assert "third" not in extract_pdf(make_pdf(PAGES), PdfProcessConfig(max_pages=2)).text


def test_expressions_do_not_run_away():
    started = time.process_time()
    for text in ("a-\n" * 300_000, "References\n" * 100_000, "1990 " * 200_000, " " * 1_000_000, "IV. " * 250_000):
        cut_references(dehyphenate(text))
    assert time.process_time() - started < 5
