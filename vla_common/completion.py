"""Completion of what is typed after a recipe's name: a script for bash, and the answers to what it asks.

Hydra has both, but its script takes ``python NAME.py`` alone as a command, and asking a recipe imports torch first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_ASKED = ("-sc", "--shell-completion")  # of Hydra
_SCRIPT = r"""# Completion for bash, of: vla-recipe run NAME SETTINGS, python recipes/NAME.py SETTINGS
_vla_recipe() {
    local line=${COMP_LINE:0:COMP_POINT} words word choices recipe=()
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    word=${words[-1]}
    case "${words[0]##*/} ${#words[@]} ${words[1]}" in
        vla-recipe\ 2\ *) choices="COMMANDS" ;;
        vla-recipe\ 3\ run | vla-recipe\ 3\ copy) choices="RECIPES" ;;
        vla-recipe\ *\ run) recipe=("${words[@]:0:3}") words=("${words[@]:3}") ;;
        python*\ 2\ *) ;; # its name is being typed
        python*\ *.py)
            grep -qs begin_program "${words[1]}" && recipe=("${words[@]:0:2}") words=("${words[@]:2}") ;;
    esac
    if ((${#recipe[@]})); then
        choices=$(COMP_LINE="recipe ${words[*]}" "${recipe[@]}" -sc query=bash 2> /dev/null)
    fi
    mapfile -t COMPREPLY < <(compgen -W "$choices" -- "$word")
    [[ ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace
    # bash replaces what is behind the last of these, and leaves what is before it
    [[ $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
}
complete -o bashdefault -o default -F _vla_recipe vla-recipe python python3
"""


def script(commands: Iterable[str], recipes: Iterable[str]) -> str:
    """Return the script, which a shell evaluates.

    Args:
        commands: of ``vla-recipe``.
        recipes: their names.
    """
    return _SCRIPT.replace("COMMANDS", " ".join(commands)).replace("RECIPES", " ".join(recipes))


def answer_if_asked(arguments: Sequence[str]) -> None:
    """Answer, and end the program, if this is a question of the script to a recipe; whatever fails, in silence.

    Args:
        arguments: ``sys.argv``; the configuration is that of the recipe's name, in ``conf`` beside it.
    """
    file = Path(arguments[0]).resolve()
    if not {*_ASKED} & {*arguments} or "query=bash" not in arguments or not _config(file).is_file():
        return
    import hydra  # whoever begins to work imports it later

    from vla_common.search_path import search_packages

    search_packages()

    @hydra.main(version_base=None, config_path=str(_config(file).parent), config_name=file.stem)
    def nothing(_: Any) -> None: ...

    nothing()
    sys.stdout.flush()
    os._exit(0)


def _config(file: Path) -> Path:
    return file.parent / "conf" / f"{file.stem}.yaml"
