"""Hooks of MkDocs (mkdocs.yml): what lies outside docs/ has a place in the site, and links to it work there.

Pages are written for a reader of the repository: README.md links to ``docs/install.md``, and a page of docs/ links to
``../vla_common/keys.py``. In the site README.md is the first page, other Markdown files of the root are pages beside
it, and any other file of the repository that a page links to is copied below ``source/``. A link to a file that does
not exist is left as it is, and ``mkdocs build --strict`` stops at it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}  # of the root
_HOMES = {place: ROOT / name for name, place in PAGES.items()}
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root, and copies of the files that pages link to."""
    docs = Path(config.docs_dir)
    for name, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text()))
    for page in list(files.documentation_pages()):
        written = _HOMES.get(page.src_uri, docs / page.src_uri)
        for target in _targets(written):
            place = _place(target, docs)
            if place.startswith("source/") and place not in files.src_uris:
                files.append(File.generated(config, place, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Point the links of a page at where their targets are in the site."""
    docs = Path(config.docs_dir)
    written = _HOMES.get(page.file.src_uri, docs / page.file.src_uri)
    here = os.path.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = _target(written, link[2])
        if target is None:
            return link[0]
        return f"{link[1]}{os.path.relpath(_place(target, docs), here or '.')}{link[3] or ''}{link[4]}"

    code = [match.span() for match in _FENCE.finditer(markdown)]
    return _LINK.sub(
        lambda link: link[0] if any(start <= link.start() < end for start, end in code) else moved(link), markdown
    )


def _target(written: Path, link: str) -> Path | None:
    """Find the file of the repository that a link means; None for an address, or where there is no such file."""
    target = Path(os.path.normpath(written.parent / link))
    return target if "://" not in link and target.is_relative_to(ROOT) and target.is_file() else None


def _targets(written: Path) -> list[Path]:
    if not written.is_file():
        return []
    links = (_target(written, link[2]) for link in _LINK.finditer(_FENCE.sub("", written.read_text())))
    return [target for target in links if target is not None]


def _place(target: Path, docs: Path) -> str:
    """Tell where a file of the repository is in the site, as MkDocs names sources: relative to docs/."""
    if target.is_relative_to(docs):
        return target.relative_to(docs).as_posix()
    name = target.relative_to(ROOT).as_posix()
    return PAGES.get(name, f"source/{name}")
