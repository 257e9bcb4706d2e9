"""Several workers of pytest share the cores of one machine (``make test``); processes of TorchRL's are forked."""

import multiprocessing
import os

import pytest

# Before torch and numpy are imported: as many threads as a worker has cores, also in processes that tests start.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _WORKERS > 1:
    _THREADS = str(max(1, len(os.sched_getaffinity(0)) // _WORKERS))
    for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(_name, _THREADS)


@pytest.fixture
def forked_processes():
    """TorchRL starts its processes from the server of :mod:`forked`, without the seconds of their imports."""
    from forked import forks

    forks()
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)
