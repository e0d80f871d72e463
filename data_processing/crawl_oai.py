"""OAI-PMH, the protocol by which repositories hand out their records: pages of XML, joined by resumption tokens.

http://www.openarchives.org/OAI/openarchivesprotocol.html. Tokens expire; a list whose token is refused is read from
its start again, where what is done is passed over.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from data_processing.crawl_api import LISTING_GATE, ApiAddress, ApiContext, fetch_api, listing_failed, parse_xml
from data_processing.crawl_page import FetchError

OAI = "{http://www.openarchives.org/OAI/2.0/}"
DC = "{http://purl.org/dc/elements/1.1/}"


@dataclass
class OaiList:
    """What is asked for: a format of metadata, and perhaps a set and days (2024-01-31)."""

    name: str
    address: ApiAddress
    metadata_prefix: str
    set_name: str = ""
    from_date: str = ""
    until_date: str = ""

    def pages(self, context: ApiContext, token: str) -> Iterator[tuple[list[Element], str, str]]:
        """(records, the token that gave them, the token of what follows or ""); "" as token is the start.

        Raises UserError when the list cannot be had.
        """
        restarted = False
        while True:
            try:
                root = parse_xml(fetch_api(context.fetcher, self.address, "", self._parameters(token), LISTING_GATE))
                code = _error_code(root)
            except FetchError as error:
                raise listing_failed(self.name, error) from error
            if code == "noRecordsMatch":
                return
            if code == "badResumptionToken" and token and not restarted:
                token, restarted = "", True
                continue
            if code:
                raise listing_failed(self.name, FetchError("oai_error", code))
            element = root.find(f"{OAI}ListRecords/{OAI}resumptionToken")
            following = (element.text or "").strip() if element is not None else ""
            yield root.findall(f"{OAI}ListRecords/{OAI}record"), token, following
            if not following:
                return
            token = following

    def _parameters(self, token: str) -> dict[str, str]:
        """A token stands alone: the protocol refuses it beside other arguments."""
        if token:
            return {"verb": "ListRecords", "resumptionToken": token}
        return {
            "verb": "ListRecords",
            "metadataPrefix": self.metadata_prefix,
            "set": self.set_name,
            "from": self.from_date,
            "until": self.until_date,
        }


def _error_code(root: Element) -> str:
    if root.tag != f"{OAI}OAI-PMH":
        raise FetchError("bad_xml", f"{root.tag} instead of OAI-PMH")
    error = root.find(f"{OAI}error")
    return "" if error is None else error.get("code", "unknown")


def is_deleted(record: Element) -> bool:
    header = record.find(f"{OAI}header")
    return header is not None and header.get("status") == "deleted"


def identifier_of(record: Element) -> str:
    return text_at(record, f"{OAI}header/{OAI}identifier")


def text_at(element: Element | None, path: str) -> str:
    """The text at a path in one line, "" when there is none."""
    found = element.find(path) if element is not None else None
    return " ".join((found.text or "").split()) if found is not None else ""


def texts_at(element: Element | None, path: str) -> list[str]:
    found = element.findall(path) if element is not None else []
    return [" ".join(item.text.split()) for item in found if item.text and item.text.strip()]
