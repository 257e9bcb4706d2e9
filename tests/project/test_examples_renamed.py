"""The packages of examples/ become a user's own by the commands of their pages."""

import re
import shutil
import subprocess
import sys

import pytest
from paths import ROOT


@pytest.mark.parametrize(
    ("folder", "code", "said"),
    [
        ("add_benchmark", "from mine_benchmark import BENCHMARK as b, make_spec; print(b.name, make_spec('discs').id)",
         "mine mine/discs"),
        ("add_policy", "from mine_policy import MinePolicy as p; print(p.family, p.__name__)", "mine MinePolicy"),
    ],
)  # fmt: skip
def test_a_copy_has_the_new_name_everywhere(folder, code, said, tmp_path):
    page = (ROOT / "examples" / folder / "README.md").read_text()
    (block,) = (each for each in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "../mine" in each)
    commands = block.replace("pip install -e .\n", "")
    assert commands != block
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "examples" / folder, tmp_path / "here" / "examples" / folder, ignore=ignored)
    subprocess.run(["bash", "-euo", "pipefail", "-c", commands], cwd=tmp_path / "here", check=True)
    mine = tmp_path / "mine"
    left = [path for path in mine.rglob("*") if "toy" in str(path.relative_to(mine)).lower()]
    left += [path for path in mine.rglob("*") if path.is_file() and "toy" in path.read_text().lower()]
    assert not left
    done = subprocess.run([sys.executable, "-c", code], cwd=mine / "src", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said
