"""Writes into the pages the files that they quote, below a comment with the file's name; a test says when a quote is out of date."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / "writing-a-backend.md"]
QUOTE = re.compile(r"(<!-- quotes (\S+) -->\n\n```\w+\n).*?(?<=\n)(?=```\n)", re.DOTALL)


def quoted(text: str) -> str:
    """Return a page's text with its quotes as the files are now."""
    return QUOTE.sub(lambda found: found[1] + (ROOT / found[2]).read_text("utf-8"), text)


def files(text: str) -> list[str]:
    """Return the files that a page quotes."""
    return [found[2] for found in QUOTE.finditer(text)]


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(quoted(page.read_text("utf-8")), "utf-8")
