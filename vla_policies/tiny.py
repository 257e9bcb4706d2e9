"""``python -m vla_policies tiny``: tiny checkpoints with random weights, in the layouts of the published ones.

They are for trying commands without weights of billions of parameters, and solve nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from vla_policies.openvla.tiny import write_tiny as write_openvla
from vla_policies.pi0.tiny import write_tiny as write_pi0
from vla_policies.smolvla.tiny import SMALL
from vla_policies.smolvla.tiny import write_tiny as write_smolvla

_SEED = 0
# What instructions of the benchmarks are made of: a tokenizer with nothing but letters makes prompts too long.
_WORDS = """
a action all alphabet and another apple arm at back basket basketball between bin black block blocks blue book both
bottle bottom bowl box bread bulb butter button by bypass cabinet caddy can carrot center cheese chocolate clockwise
close coffee collapse compartment cook cookie corn counter cream cube cup degrees dial dish door down drawer dressing
dunk eggplant falls faucet from front frying get go goal grasp grasped green hammer handle hole in insert into it
joint juice kick lamp led left let lift light lock lying machine microwave middle milk moka move mug next nut object
of off on one onto open orange other out oven pan peg pick pink place plate pot press puck pudding pull push put rack
ramekin reach red remove revolving right robot rotate rotating salad sauce screw shelf should side sideways slide
slider sliding soccer soup spoon stack stacked stick store stove sweep switch table take that the them then to toggle
tomato top towards tower tray turn under unlock up use using wall way what white window wine with wooden yellow
"""
_README = """# A tiny checkpoint with random weights

Made by `python -m vla_policies tiny {kind}`, to try commands with. It was never trained and solves nothing.
"""


KINDS: dict[str, Callable[[Path, str, Sequence[str]], None]] = {
    "openvla": write_openvla,
    "openvla_oft_official": partial(write_openvla, l1=True, proprio=True),
    "openvla_oft_rlinf": write_openvla,  # files as OpenVLA's: they differ in how they are used
    "openvla_oft_calvin": partial(write_openvla, proprio_dim=7),
    "openvla_oft_robotwin": partial(write_openvla, proprio=True, action_dim=14, proprio_dim=14),
    "pi0": partial(write_pi0, pi05=False),
    "pi05": partial(write_pi0, pi05=True),
    "smolvla": partial(
        write_smolvla, cameras=("observation.images.image", "observation.images.image2"), state_dim=8, action_dim=7
    ),
    "smolvla_metaworld": partial(write_smolvla, cameras=("observation.image",), state_dim=4, action_dim=4),
    "smolvla_small": partial(write_smolvla, cameras=("observation.image",), state_dim=4, action_dim=4, sizes=SMALL),
}


def make_tiny(kind: str, folder: str | Path, statistics: str = "tiny") -> Path:
    """Write a tiny checkpoint, always of the same numbers; draws none of the caller's random numbers.

    ``kind`` is one of :data:`KINDS`, ``statistics`` the name of the data set whose statistics it has, which are
    invented too. FileExistsError: the folder is there already. ValueError: there is no such kind.
    """
    if kind not in KINDS:
        raise ValueError(f"no tiny checkpoint of {kind!r}; take one of {', '.join(KINDS)}")
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} is there already; type another folder: --to NEW")
    folder.mkdir(parents=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)  # modules draw their initial weights from torch's own generator
        KINDS[kind](folder, statistics, _WORDS.split())
    (folder / "README.md").write_text(_README.format(kind=kind))
    return folder
