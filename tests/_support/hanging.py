"""Simulators that hang: while they are built, once (who makes the folder ``options["once"]``), in steps; an echo."""

import os
import time

from tests.storm.faulty import FaultySimulator
from tests.storm.toy import ToySimulator


class HangsInSetup(FaultySimulator):
    def __init__(self, spec):
        try:
            os.mkdir(spec.options["once"])
        except FileExistsError:
            super().__init__(spec)
        else:
            time.sleep(600)


class HangsInStep(ToySimulator):
    """Hangs where a toy simulator raises."""

    def _fail_if_told(self):
        try:
            super()._fail_if_told()
        except RuntimeError:
            time.sleep(600)


def echo(simulator, item, size):
    return item + bytes(size)
