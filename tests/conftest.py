"""Settings and fixtures all tests share."""

from __future__ import annotations

import gc
import os
import warnings

# The tests' tensors are small: a second thread only waits, here, in scikit-learn and in children.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from torch import Tensor

torch.set_num_threads(1)
gc.disable()  # until all is imported: of that nothing is garbage


def pytest_collection_finish() -> None:
    """Spare every later collection of garbage the million objects of what is imported by now."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 100)  # most of what is new goes without its help


def pytest_unconfigure() -> None:
    """Let go of them, or libraries complain at the end that they leak."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests with the mark `gpu` are for machines that have one."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True, scope="session")
def sketched_maps() -> None:
    """Half of a small run's time is its map, of which no test looks at where its points lie."""
    try:
        from negchain.tasks import image_judge
    except ImportError:  # without the extras
        return
    image_judge.MAP_STEPS, image_judge.MAP_POINTS = 250, 100


@pytest.fixture
def rng() -> torch.Generator:
    """A generator of its own for every test."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def pair(rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two views of 6 items in 5 dimensions, float64, not normalised."""
    z_a = torch.randn(6, 5, generator=rng, dtype=torch.float64)
    return z_a, z_a + 0.7 * torch.randn(6, 5, generator=rng, dtype=torch.float64)


@pytest.fixture
def no_synchronisation():
    """Any operation that makes the host wait for the device raises."""

    def switch(on: bool) -> None:
        with warnings.catch_warnings():  # "a prototype feature"
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error" if on else "default")

    yield switch
    switch(False)
