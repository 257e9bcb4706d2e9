"""A simulator that hangs while it is built, once: who makes the folder ``options["once"]`` does."""

import os
import time

from benchmarks.storm._faulty import FaultySimulator


class HangsInSetup(FaultySimulator):
    def __init__(self, spec):
        try:
            os.mkdir(spec.options["once"])
        except FileExistsError:
            super().__init__(spec)
        else:
            time.sleep(600)
