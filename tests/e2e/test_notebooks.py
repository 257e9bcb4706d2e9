"""The notebooks of docs/notebooks run in kernels of their own, with toy settings; the site has them as they are."""

import importlib.util

import pytest
from paths import ROOT

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'vla-torchrl[dev]'")
_spec = importlib.util.spec_from_file_location("notebooks", ROOT / "scripts/notebooks.py")
notebooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(notebooks)

NOTEBOOKS = {path.stem: path for path in (ROOT / "docs/notebooks").glob("*.py")}
LEARNING = "ENVS, DECISIONS, ITERATIONS, DEMONSTRATIONS, CLONING_STEPS, HELD_OUT = 2, 8, 4, 2, 3, 1"
TOY = {
    "first_ppo_run": LEARNING,
    "own_simulator": LEARNING,
    "evaluate_and_film": "DEMONSTRATIONS, CLONING_STEPS, TRIALS, FILMED = 2, 3, 1, 1",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(NOTEBOOKS))
def test_a_notebook_runs_and_shows_a_picture(name, tmp_path):
    page = notebooks.as_markdown(notebooks.execute(NOTEBOOKS[name], tmp_path, TOY[name]))
    assert page.startswith("# ")
    assert "```python\n" in page
    assert "data:image/png" in page or "data:video/mp4" in page
    assert "\ntask  " in page  # the table of an evaluation


def test_a_notebook_fails_where_a_cell_does(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("# %%\nprint(1)\n\n# %%\n1 / 0\n")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        notebooks.execute(path, tmp_path)
