"""Everything of a run that is not its algorithm: folder, configuration, checkpoints, logging, launching.

Importing this package imports no torch; ``__init__.pyi`` says where names live.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
