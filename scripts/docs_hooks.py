"""Hooks of MkDocs (mkdocs.yml): what lies outside docs/ has a place in the site, and links to it work there.

Pages are written for a reader of the repository: README.md links to ``docs/install.md``, and a page of docs/ links to
``../vla_common/keys.py``. In the site README.md is the first page, other Markdown files of the root are pages beside
it, and any other file of the repository that a page links to is copied below ``source/``. A link to a file that does
not exist is left as it is, and ``mkdocs build --strict`` stops at it.

A notebook, docs/notebooks/NAME.py, is a page with what its cells put out. It is run where the library is installed, and
not again before a line of it or of the library changes.
"""

import hashlib
import importlib.util
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from mkdocs.structure.files import File, Files
from notebooks import as_markdown, execute

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}  # of the root
_HOMES = {place: ROOT / name for name, place in PAGES.items()}
NOTEBOOKS, EXECUTED = ROOT / "docs/notebooks", ROOT / ".cache/notebooks"
PACKAGES = ("vla_algos", "vla_common", "vla_envs", "vla_policies")  # of the library
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
_HINT = """

This page is a notebook, written as text: <a href="{0}" download>{0}</a>. Jupyter opens it where jupytext is installed;
`jupytext --to ipynb {0}` makes a file of Jupyter's own.
"""
_log = logging.getLogger("mkdocs.hooks.notebooks")
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")

_as_text = False  # notebooks are not run: a page that is served is built again whenever a line changes


def on_startup(*, command: str, dirty: bool) -> None:
    """Note whether notebooks are to be run."""
    global _as_text
    _as_text = command == "serve" or os.environ.get("NOTEBOOKS") == "text"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root, and copies of the files that pages link to."""
    docs = Path(config.docs_dir)
    for name, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text()))
    for path in sorted(NOTEBOOKS.glob("*.py")):
        files.append(File.generated(config, _place(path, docs), content=_notebook(path) + _HINT.format(path.name)))
    for page in list(files.documentation_pages()):
        written = _written(page.src_uri, docs)
        for target in _targets(written):
            place = _place(target, docs)
            if place.startswith("source/") and place not in files.src_uris:
                files.append(File.generated(config, place, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Point the links of a page at where their targets are in the site."""
    docs = Path(config.docs_dir)
    written = _written(page.file.src_uri, docs)
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


def _notebook(path: Path) -> str:
    """Return a notebook as Markdown, with outputs if there are some or they can be made."""
    sources = [path, *(each for package in PACKAGES for each in sorted((ROOT / package).rglob("*.py")))]
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()[:16]
    executed = EXECUTED / f"{path.stem}-{digest}.ipynb"
    if executed.exists():
        return as_markdown(nbformat.read(executed, as_version=4))
    if _as_text or any(importlib.util.find_spec(name) is None for name in ("torch", "metaworld", "matplotlib")):
        _log.info(f"{path.name} is shown without what it puts out; type: make setup docs")
        return as_markdown(jupytext.read(path, fmt="py:percent"))
    _log.info(f"Running {path.name}, some minutes")
    with tempfile.TemporaryDirectory() as folder:
        notebook = execute(path, Path(folder))
    EXECUTED.mkdir(parents=True, exist_ok=True)
    for old in EXECUTED.glob(f"{path.stem}-*"):
        old.unlink()
    nbformat.write(notebook, executed)
    return as_markdown(notebook)


def _written(place: str, docs: Path) -> Path:
    """Return the file of the repository that a page is written in; the inverse of :func:`_place`."""
    path = _HOMES.get(place, docs / place)
    return path if path.parent != NOTEBOOKS else path.with_suffix(".py")


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
        return (target.with_suffix(".md") if target.parent == NOTEBOOKS else target).relative_to(docs).as_posix()
    name = target.relative_to(ROOT).as_posix()
    return PAGES.get(name, f"source/{name}")
