"""Notebooks of docs/notebooks, written as text (jupytext's py:percent): run them, and show them as Markdown."""

import os
import re
from pathlib import Path
from typing import Any

import jupytext
import nbformat

ROOT = Path(__file__).resolve().parent.parent


def execute(path: Path, folder: Path, parameters: str = "") -> nbformat.NotebookNode:
    """Run a notebook in a kernel of its own and return it with its outputs.

    Args:
        path: of the notebook's text.
        folder: the kernel's, where what the notebook saves goes.
        parameters: a line of Python that follows the cell with the tag ``parameters``, to set others.

    Raises:
        CellExecutionError: a cell failed.
    """
    from nbclient import NotebookClient

    notebook = jupytext.read(path, fmt="py:percent")
    if parameters:
        cell = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
        cell.source += f"\n{parameters}"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # the library as it is here
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=1200, coalesce_streams=True, resources=resources)
    return client.execute(env=environment)


def as_markdown(notebook: nbformat.NotebookNode) -> str:
    """Write a notebook as Markdown: its cells, and below each the text, pictures and videos that it has put out."""
    return "\n\n".join(part for cell in notebook.cells for part in _parts(cell))


def _parts(cell: nbformat.NotebookNode) -> list[str]:
    if cell.cell_type != "code":
        return [cell.source]
    return [_fenced(cell.source, "python"), *filter(None, map(_shown, cell.get("outputs", ())))]


def _shown(output: Any) -> str:
    """Show an output: a picture or a video within the page, so that nothing is loaded; of progress bars nothing."""
    data = output.get("data", {})
    if "text/html" in data:
        return f'<div class="notebook-output">{data["text/html"]}</div>'
    if "image/png" in data:
        return (
            f'<div class="notebook-output"><img alt="" src="data:image/png;base64,{data["image/png"].strip()}"></div>'
        )
    text = output.text if output.output_type == "stream" and output.name == "stdout" else data.get("text/plain", "")
    return _fenced(re.sub(r"[^\n]*\r", "", text).strip("\n"), "text") if text.strip() else ""


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```"
