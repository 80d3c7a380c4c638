"""The engine against a model: random sequences of what programs do to memory of a
pool, from three threads. After every step what lives is apart, whole, aligned, counted.

Hypothesis finds the sequences and makes those that fail short.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import numpy_rmm
from numpy_rmm import mr
from numpy_rmm.testing import SimulatedCuda

T = TypeVar("T")
KIB, MIB = 1 << 10, 1 << 20
STEP = 499  # between the bytes that are looked at

SOURCES: dict[str, Callable[[], mr.MemoryResource]] = {
    "host": mr.HostMemoryResource,
    "pinned": mr.PinnedHostMemoryResource,
    "managed": mr.ManagedMemoryResource,
}
ALIGNMENTS = {"host": 64, "pinned": 256, "managed": 256}

# Cells, blocks that threads keep, blocks that they do not keep; and where these meet.
NBYTES = st.one_of(
    st.integers(1, 700),
    st.integers(1, 9000),
    st.sampled_from([8191, 8192, 8193, 64 * KIB, MIB - KIB, MIB, MIB + 1]),
    st.integers(8 * KIB, MIB),
    st.integers(MIB, 6 * MIB),
)
THREADS = st.integers(0, 2)  # 0: the test's own
PICK = st.integers(0, 1 << 16)


@dataclass
class Block:
    """What the model knows of a live block: where it is, and which byte fills it."""

    data: np.ndarray
    value: int
    raw: bool  # allocated past NumPy; `data` is a view of it

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def start(self) -> int:
        return int(self.data.__array_interface__["data"][0])


def bytes_at(pointer: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))


def is_filled(data: np.ndarray, value: int) -> bool:
    return bool((data[::STEP] == value).all()) and int(data[-1]) == value


class PoolMachine(RuleBasedStateMachine):
    """Subclassed for each kind."""

    kind = "host"

    def __init__(self) -> None:
        super().__init__()
        self.pool = mr.PoolMemoryResource(SOURCES[self.kind]())
        self.threads = [ThreadPoolExecutor(1) for _ in range(2)]
        self.blocks: list[Block] = []
        self.n_made = 0
        self.peak_bytes = 0
        self.threshold = 0 if self.kind == "pinned" else None

    def teardown(self) -> None:
        while self.blocks:
            self.free(0, len(self.blocks) % 3)
        assert self.pool.statistics().current_bytes == 0
        assert self.pool.statistics().current_count == 0
        self.pool.trim()
        assert self.pool.statistics().reserved_bytes == 0
        for thread in self.threads:
            thread.shutdown()

    # ---- what threads do ----

    def on(self, thread: int, do: Callable[[], T]) -> T:
        """The result of `do` on a thread, with arrays from the pool."""

        def with_handler() -> T:
            with numpy_rmm.use_handler(self.pool, threshold=self.threshold):
                return do()

        if thread == 0:
            return with_handler()
        return self.threads[thread - 1].submit(with_handler).result()

    def enter(self, data: np.ndarray, *, raw: bool = False) -> None:
        self.n_made += 1
        value = self.n_made % 255 + 1
        data[:] = value
        self.blocks.append(Block(data, value, raw))

    def pick(self, pick: int) -> Block:
        return self.blocks[pick % len(self.blocks)]

    has_blocks = precondition(lambda self: self.blocks)

    @rule(nbytes=NBYTES, thread=THREADS)
    def empty(self, nbytes: int, thread: int) -> None:
        self.enter(self.on(thread, lambda: np.empty(nbytes, np.uint8)))

    @rule(nbytes=NBYTES, thread=THREADS)
    def zeros(self, nbytes: int, thread: int) -> None:
        data = self.on(thread, lambda: np.zeros(nbytes, np.uint8))
        assert not data.any()
        self.enter(data)

    @rule(nbytes=NBYTES, log_alignment=st.integers(0, 16), thread=THREADS)
    def allocate(self, nbytes: int, log_alignment: int, thread: int) -> None:
        alignment = 1 << log_alignment
        pointer = self.on(
            thread, lambda: self.pool.allocate(nbytes, alignment=alignment)
        )
        assert pointer % alignment == 0
        self.enter(bytes_at(pointer, nbytes), raw=True)

    @has_blocks
    @rule(pick=PICK, nbytes=NBYTES, thread=THREADS)
    def resize(self, pick: int, nbytes: int, thread: int) -> None:
        block = self.pick(pick)
        if block.raw:
            return
        before = block.nbytes
        self.on(thread, lambda: block.data.resize(nbytes, refcheck=False))
        assert is_filled(block.data[:before], block.value)
        assert not block.data[before:].any()
        block.data[before:] = block.value

    @has_blocks
    @rule(pick=PICK, thread=THREADS)
    def free(self, pick: int, thread: int) -> None:
        block = self.blocks.pop(pick % len(self.blocks))
        assert is_filled(block.data, block.value)
        if block.raw:
            pointer, nbytes = block.start, block.nbytes
            self.on(thread, lambda: self.pool.deallocate(pointer, nbytes))
        else:
            last = [block.data]
            del block
            self.on(thread, last.clear)

    @rule(keep=st.sampled_from([0, 0, 64 * KIB, 8 * MIB]), thread=THREADS)
    def trim(self, keep: int, thread: int) -> None:
        self.on(thread, lambda: self.pool.trim(keep))

    @has_blocks
    @rule(pick=PICK, offset=st.integers(1, 300), thread=THREADS)
    def free_wrongly(self, pick: int, offset: int, thread: int) -> None:
        block = self.pick(pick)
        inside = block.start + min(offset, block.nbytes - 1)
        if inside != block.start:
            with pytest.raises(ValueError, match="start can be given back"):
                self.on(thread, lambda: self.pool.deallocate(inside, 0))

    # ---- what holds after every step ----

    @invariant()
    def live_blocks_are_apart_and_whole(self) -> None:
        ordered = sorted(self.blocks, key=lambda block: block.start)
        for block, following in pairwise(ordered):
            assert block.start + block.nbytes <= following.start
        for block in ordered:
            assert is_filled(block.data, block.value)

    @invariant()
    def arrays_are_aligned(self) -> None:
        for block in self.blocks:
            assert block.raw or block.start % ALIGNMENTS[self.kind] == 0

    @invariant()
    def every_byte_is_counted(self) -> None:
        statistics = self.pool.statistics()
        nbytes = sum(block.nbytes for block in self.blocks)
        self.peak_bytes = max(self.peak_bytes, nbytes)
        assert statistics.current_bytes == nbytes
        assert statistics.current_count == len(self.blocks)
        assert statistics.peak_bytes >= self.peak_bytes - 3 * 2 * MIB
        assert statistics.total_bytes >= nbytes
        assert statistics.total_count >= self.n_made
        assert statistics.reserved_bytes >= nbytes + statistics.parked_bytes


@pytest.fixture(params=SOURCES)
def machine(
    request: pytest.FixtureRequest, simulator: SimulatedCuda
) -> type[PoolMachine]:
    """The machine of each kind."""
    return type(f"{request.param}_pool", (PoolMachine,), {"kind": request.param})


def test_short_sequences_agree(machine: type[PoolMachine]) -> None:
    fast = settings(
        max_examples=25,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
    )
    run_state_machine_as_test(machine, settings=fast)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_long_sequences_agree(machine: type[PoolMachine]) -> None:
    thorough = settings(
        max_examples=150, stateful_step_count=100, deadline=None, database=None
    )
    run_state_machine_as_test(machine, settings=thorough)
