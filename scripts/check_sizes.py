"""Sizes that a reader can still read: lines of rooms and recipes, of functions and of classes (``make lint``)."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = {  # lines of *.py, of a folder with all that is in it, or of a package's own modules (with a / behind it)
    "vla_common": 1_134,
    "vla_envs": 10_785,
    "vla_policies": 9_777,
    "vla_algos/": 4_486,
    "vla_algos/collectors": 736,
    "vla_algos/demonstrations": 801,
    "vla_algos/lerobot": 800,
    "vla_algos/disaggregated": 571,
    "vla_algos/run": 4_722,
    "benchmarks": 2_845,
}
TOLERANCE = 1.05
RECIPE, FUNCTION, CLASS = 130, 60, 350  # lines; of a function without its signature and docstring
LARGE_CLASSES = {"VLAEnv", "WorkerPool"}
PACKAGES = ("vla_common", "vla_envs", "vla_policies", "vla_algos")  # recipes have the whole loop in one function


def problems() -> Iterator[str]:
    """Yield what is too long, and how long it may be."""
    for room, budget in BUDGETS.items():
        folder = ROOT / room.rstrip("/")
        lines = sum(map(_lines, folder.glob("*.py") if room.endswith("/") else folder.rglob("*.py")))
        if lines > budget * TOLERANCE:
            yield f"{room} has {lines} lines, its budget is {budget}: shorten it; a new feature names what it replaces"
    for recipe in (ROOT / "recipes").glob("[!_]*.py"):
        if _lines(recipe) > RECIPE:
            yield f"{recipe.relative_to(ROOT)} has {_lines(recipe)} lines, a recipe has at most {RECIPE}"
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            yield from _long_parts(path)


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def _long_parts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = node.end_lineno - body[0].lineno + 1 if body and node.end_lineno else 0
            if lines > FUNCTION:
                yield f"{where} {node.name} has {lines} lines, a function has at most {FUNCTION}"
        if isinstance(node, ast.ClassDef) and node.name not in LARGE_CLASSES and node.end_lineno:
            lines = node.end_lineno - node.lineno + 1
            if lines > CLASS:
                yield f"{where} {node.name} has {lines} lines, a class has at most {CLASS}"


if __name__ == "__main__":
    found = list(problems())
    print("\n".join(found) or "sizes: all within their budgets")
    sys.exit(bool(found))
