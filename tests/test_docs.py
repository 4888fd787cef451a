"""The pages for readers: every link leads somewhere, and every module that a page names is there."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
MODULE = re.compile(r"`((?:dilocox|outer|inner|config|checkpoint|tests|tools|benchmarks)/[a-z_0-9/]+\.py)`")


def anchors(page):
    """What GitHub makes of the headings of a page."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    dead = []
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_are_named_are_there(page):
    named = MODULE.findall(page.read_text())
    missing = [
        name for name in named if not any((REPOSITORY / top / name).exists() for top in ("", "dilocox"))
    ]
    assert missing == []


def test_docstrings_cite_headings_that_are_there():
    known = anchors(REPOSITORY / "docs" / "algorithms.md")
    cited = {
        (module.name, anchor)
        for module in (REPOSITORY / "dilocox").rglob("*.py")
        for anchor in re.findall(r"algorithms\.md(?:#([\w-]+))?", module.read_text())
    }
    assert {(name, anchor) for name, anchor in cited if anchor not in known} == set()
    assert len(cited) >= 6
