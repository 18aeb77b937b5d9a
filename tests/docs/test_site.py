"""The site: generated pages are complete, every page is in the menu, and links lead somewhere."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
import yaml
from docs.blocks import PAGES, ROOT, script

from mtrain_cli.config import keys
from mtrain_cli.config.pattern_settings import PATTERNS

LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return script("docs/generate.py")


def test_the_configuration_reference_has_every_key_with_its_meaning(generate):
    text = generate.configuration()
    described = dict(re.findall(r"^`([a-z_.0-9]+)`(?:, default .*)?\n:   (.+)", text, re.MULTILINE))
    assert described.keys() == keys.all_keys().keys()
    assert "`train.steps`, default `60`" in text
    assert all(f"| `{pattern}` |" in text for pattern in PATTERNS)


def test_the_command_reference_has_every_command_and_option(generate):
    text = generate.commands()
    headings = re.findall(r"^#+ (mtrain.*)$", text, re.MULTILINE)
    for command in (
        "mtrain train",
        "mtrain profile step",
        "mtrain simulate recommend",
        "mtrain doctor",
    ):
        assert command in headings
    for option in ("--dry-run", "--recompute", "--attention-only", "--vocab-size"):
        assert f"`{option}`" in text
    assert not re.search(r"\[/?(bold|cyan)\]|^:   $", text, re.MULTILINE)


def test_every_page_is_in_the_menu_once(generate):
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def paths(entry) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        below = entry.values() if isinstance(entry, dict) else entry
        return [path for part in below for path in paths(part)]

    written = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(paths(site["nav"])) == sorted(written | generate.PAGES.keys())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    text = page.read_text()
    for path, anchor in LINK.findall(text):
        if path.startswith("http"):
            continue
        target = page.parent / path
        assert target.exists(), f"{page.name}: {path}"
        if anchor and target.suffix == ".md":
            found = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert anchor[1:] in {slug(heading) for heading in found}, f"{page.name}: {anchor}"


def test_links_stay_on_the_site(generate):
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} | generate.PAGES.keys()
    for page in (ROOT / "docs").glob("*.md"):
        text = generate.on_page_markdown(page.read_text(), page=None)
        links = [path for path, _ in LINK.findall(text) if not path.startswith("http")]
        assert {path for path in links if path.endswith((".md", ".py"))} <= pages
        assert not [path for path in links if path.startswith("..")]
        assert "--8<--" not in text  # GitHub does not include files
    text = generate.on_page_markdown("[MFU](../profiles/definitions.md#mfu-hfu-and-density)")
    assert text == "[MFU](definitions.md#mfu-hfu-and-density)"


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_have_at_most_100_columns(page):
    long = [line for line in page.read_text().splitlines() if len(line) > 100]
    assert not long


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170
