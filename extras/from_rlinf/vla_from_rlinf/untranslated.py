"""Why nothing is made of a key: the table ``untranslated.yaml``, read in RLinf's code at commit a3816b596."""

from fnmatch import fnmatchcase
from pathlib import Path

from vla_common.plain import read_yaml
from vla_from_rlinf.keys import UNKNOWN, Keys

_FEW = 3  # keys that a pattern stands for and that are printed one by one
_UNKNOWN = "in none of RLinf's files for these benchmarks and models at commit a3816b596; look whether you need it"


def account_for_the_rest(keys: Keys) -> None:
    """Say of each key of the file that nothing was made of, why: the first pattern that fits it counts."""
    reasons = {"": (UNKNOWN, _UNKNOWN), **read_yaml(Path(__file__).with_name("untranslated.yaml"))}
    remarked = {key for remark in keys.remarks for key in remark.keys}
    found: dict[str, list[str]] = {}
    for key in keys.values:
        if key not in keys.used and key not in remarked:
            found.setdefault(next((pattern for pattern in reasons if fnmatchcase(key, pattern)), ""), []).append(key)
    for pattern, of_pattern in found.items():
        many = pattern.endswith("*") and len(of_pattern) > _FEW
        keys.remark(
            *reasons[pattern][:1], of_pattern, reasons[pattern][1], f"{pattern} ({len(of_pattern)} keys)" * many
        )
