"""Processes that are forked to decode."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from entame_hf.data.workers import Workers


class Ends:
    """What leaves a mark where it ends; it is in a cycle, so that a garbage collection ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.itself = folder, self

    def __del__(self) -> None:
        (self.folder / str(os.getpid())).touch()


def collect(row: int) -> int:
    # One of its own is collected there.
    cycle: list = []
    cycle.append(cycle)
    del cycle
    return gc.collect() + row


@pytest.fixture
def paused():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("paused")
def test_what_the_parent_has_thrown_away_ends_in_the_parent(tmp_path):
    Ends(tmp_path)
    workers = Workers(collect)
    workers.start(1)
    with workers.pool:
        assert workers.map([0])[0] >= 1
        assert list(tmp_path.iterdir()) == []
    # As it was.
    assert not gc.isenabled()
    gc.collect()
    assert [int(mark.name) for mark in tmp_path.iterdir()] == [os.getpid()]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_parent_that_collects_goes_on_so(enabled):
    if not enabled:
        gc.disable()
    try:
        workers = Workers(abs)
        workers.start(1)
        with workers.pool:
            assert gc.isenabled() == enabled
            assert workers.pool.submit(gc.isenabled).result()
    finally:
        gc.enable()
