"""How fast the processes of one host could exchange through shared memory."""

from __future__ import annotations

import mmap
import time

_NUM_REPEATS = 3


def measure_copy_rate(num_bytes: int = 1 << 25) -> float:
    """Time copies from private into shared memory.

    Anonymous shared memory: nothing appears in /dev/shm, so nothing can be left there.

    Args:
        num_bytes: Of one copy; larger than the caches, or it is they that are measured.

    Returns:
        Bytes per second, the best of three: other work on the host only slows a copy.
    """
    source = memoryview(bytearray(num_bytes))
    with mmap.mmap(-1, num_bytes) as shared:
        target = memoryview(shared)
        try:
            target[:] = source  # the first touch pays for the pages
            best_s = float("inf")
            for _ in range(_NUM_REPEATS):
                start_s = time.perf_counter()
                target[:] = source
                best_s = min(best_s, time.perf_counter() - start_s)
        finally:
            target.release()
    return num_bytes / max(best_s, 1e-9)
