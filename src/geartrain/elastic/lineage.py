"""Names a state by the whole history that led to it.

Two members at the same step may still hold different weights: after two halves of a fleet
went on by themselves, or with a sum that arrived damaged at one of them. So a state is
named by a hash chain over all committed steps, and only members with the same name train
together.
"""

from __future__ import annotations

import hashlib

_DIGEST_BYTES = 16


def first_lineage(origin: str, step: int = 0) -> str:
    """Lineage of a state that no step has led to: fresh weights, or a loaded snapshot.

    Args:
        origin: What the state was made from, the same wherever it is the same: the seed
            and the model's fingerprint, or a snapshot's digest.
        step: Steps that it has behind it.

    >>> first_lineage("seed 0") == first_lineage("seed 1")
    False
    """
    return _hash(b"origin", step, origin.encode())


def next_lineage(parent: str, step: int, digest: bytes) -> str:
    """Lineage after one more step.

    Args:
        parent: Lineage before it.
        step: Its number; the first one is 1.
        digest: Of all that the update is made of: reduced gradients, counts, whether it
            was skipped.

    >>> one = next_lineage(first_lineage("seed 0"), 1, b"gradients")
    >>> next_lineage(one, 2, b"a") == next_lineage(one, 2, b"b")
    False
    """
    return _hash(bytes.fromhex(parent), step, digest)


def _hash(before: bytes, step: int, what: bytes) -> str:
    state = hashlib.blake2b(before, digest_size=_DIGEST_BYTES, person=b"gt lineage")
    state.update(step.to_bytes(8, "big"))
    state.update(what)
    return state.hexdigest()
