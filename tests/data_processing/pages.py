"""Web pages with known main text, as five kinds of generator write them, and a writer of PDFs: our own material."""

import random
from dataclasses import dataclass
from html import escape

WORDS = (
    "water stone river garden window letter morning evening engine signal carbon market season theory number island"
    " teacher village captain kitchen history justice patient machine travel summer winter colour silver copper"
    " measure balance request answer support improve produce compare describe consider remember discover prepare"
).split()
MENU = ("Home", "Products", "About us", "Contact", "Privacy policy", "Careers", "Press", "Imprint", "Help", "Login")


@dataclass
class Page:
    """HTML and the text that a reader came for."""

    html: str
    main: str


def _sentence(rng: random.Random) -> str:
    words = [rng.choice(WORDS) for _ in range(rng.randint(8, 18))]
    return " ".join(words).capitalize() + "."


def _paragraphs(rng: random.Random, count: int) -> list[str]:
    return [" ".join(_sentence(rng) for _ in range(rng.randint(3, 7))) for _ in range(count)]


def _menu(rng: random.Random, tag: str = "ul") -> str:
    links = rng.sample(MENU, 6)
    return f"<{tag}>" + "".join(f"<li><a href='/{i}'>{name}</a></li>" for i, name in enumerate(links)) + f"</{tag}>"


def manual_page(rng: random.Random) -> Page:
    """As documentation tools write: a sidebar, role=main, headings, code and a definition list."""
    title, parts = _sentence(rng), _paragraphs(rng, 6)
    code = "def area(width, height):\n    return width * height"
    terms = [(rng.choice(WORDS), _sentence(rng)) for _ in range(4)]
    listed = "".join(f"<dt>{t}</dt><dd>{escape(d)}</dd>" for t, d in terms)
    body = "".join(f"<p>{escape(p)}</p>" for p in parts)
    html = (
        f"<html><head><title>{title}</title></head><body><div class='sidebar' role='navigation'>{_menu(rng)}</div>"
        f"<div role='main'><h1>{title}</h1>{body}<pre>{code}</pre><dl>{listed}</dl></div>"
        f"<div class='footer' role='contentinfo'>Copyright 2024. Created by a tool.</div></body></html>"
    )
    return Page(html, "\n".join([title, *parts, code, *(f"{t} {d}" for t, d in terms)]))


def blog_page(rng: random.Random) -> Page:
    """As blogs write: header, article, aside with related posts, a comment form, footer."""
    title, parts = _sentence(rng), _paragraphs(rng, 5)
    body = "".join(f"<p>{escape(p)}</p>" for p in parts)
    related = "".join(f"<li><a href='#'>{_sentence(rng)}</a></li>" for _ in range(5))
    html = (
        f"<!doctype html><html><head><title>{title}</title></head><body><header><nav>{_menu(rng)}</nav></header>"
        f"<article><h1>{title}</h1>{body}</article><aside><h3>Related posts</h3><ul>{related}</ul></aside>"
        f"<form><input type='text'><button>Send comment</button></form><footer>{_menu(rng)}</footer></body></html>"
    )
    return Page(html, "\n".join([title, *parts]))


def list_page(rng: random.Random) -> Page:
    """Instructions as lists: what main-content extraction drops."""
    title, items = _sentence(rng), [_sentence(rng) for _ in range(25)]
    listed = "".join(f"<li>{escape(item)}</li>" for item in items)
    html = (
        f"<html><head><title>{title}</title></head><body><nav>{_menu(rng)}</nav><main><h1>{title}</h1>"
        f"<ul>{listed}</ul></main><footer>All rights reserved.</footer></body></html>"
    )
    return Page(html, "\n".join([title, *items]))


def table_page(rng: random.Random) -> Page:
    """A report with a table of facts between paragraphs."""
    title, parts = _sentence(rng), _paragraphs(rng, 4)
    rows = [(rng.choice(WORDS), str(rng.randint(10, 9999)), rng.choice(WORDS)) for _ in range(12)]
    table = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    body = "".join(f"<p>{escape(p)}</p>" for p in parts)
    html = (
        f"<html><head><title>{title}</title></head><body><div id='header'>{_menu(rng, 'div')}</div>"
        f"<div id='content'><h1>{title}</h1>{body}<table>{table}</table></div></body></html>"
    )
    return Page(html, "\n".join([title, *parts, *(" ".join(row) for row in rows)]))


def old_page(rng: random.Random) -> Page:
    """As pages were written by hand: no end tags, layout by rules and fonts, links at the bottom."""
    title, parts = _sentence(rng), _paragraphs(rng, 7)
    body = "\n<p>".join(escape(p) for p in parts)
    html = (
        f"<HTML><HEAD><TITLE>{title}</TITLE><BODY bgcolor=white><H1>{title}</H1>\n<p>{body}\n<hr><font size=1>"
        f"<a href=prev.html>Previous</a> <a href=next.html>Next</a></font></BODY></HTML>"
    )
    return Page(html, "\n".join([title, *parts]))


GENERATORS = {"manual": manual_page, "blog": blog_page, "list": list_page, "table": table_page, "old": old_page}


def make_pdf(pages: list[list[str]], title: str = "") -> bytes:
    """A PDF with one line of text a list item, in the standard font (ASCII only)."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for lines in pages:
        shown = "".join(
            f"({line.replace(chr(92), chr(92) * 2).replace('(', chr(92) + '(').replace(')', chr(92) + ')')}) Tj T*\n"
            for line in lines
        )
        stream = f"BT /F1 11 Tf 14 TL 50 780 Td\n{shown}ET"
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 842] /Contents {len(objects)} 0 R"
            " /Resources << /Font << /F1 3 0 R >> >> >>"
        )
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    objects.append(f"<< /Title ({title}) >>")
    data, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n{content}\nendobj\n".encode("latin-1")
    start = len(data)
    data += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    data += b"".join(f"{offset:010d} 00000 n \n".encode() for offset in offsets)
    trailer = f"<< /Size {len(objects) + 1} /Root 1 0 R /Info {len(objects)} 0 R >>"
    return data + f"trailer\n{trailer}\nstartxref\n{start}\n%%EOF\n".encode()
