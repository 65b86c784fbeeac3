"""How much of an exchange hides behind the backward pass of the last micro-batches.

Gradients are final only in a device's last micro-batch. Its backward pass fills the
buckets one after the other; a bucket is exchanged once all members have filled it and the
one before is done. With K equal buckets, a whole exchange of E seconds and a backward pass
of H seconds that ends at T on every member, bucket k of K is filled at T - (1 - k/K) H and
K - k + 1 buckets are still to be exchanged, so the exchange ends at

    T + max over k of ((K - k + 1) E / K - (1 - k/K) H) = T + max(E / K, E - (1 - 1/K) H)

for the maximum of a straight line lies at an end. Maxima may be taken in any order, so
where T and H differ the exchange ends at the largest of the members' own such times: each
device's time can be found by itself, and the slowest one counts, as without an exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from geartrain.planner.curve_fit import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """An exchange of one set of members, in buckets."""

    whole_s: float
    """All buckets, with nothing to hide behind."""
    last_s: float
    """The last bucket, which is filled when backward ends: this much is always seen."""

    @property
    def can_hide(self) -> bool:
        """Whether any of it can be hidden."""
        return self.last_s < self.whole_s

    def exposed_s(self, backward_s: float) -> float:
        """What is left to wait for after a backward pass of the last micro-batch.

        >>> Overlap(whole_s=0.8, last_s=0.1).exposed_s(0.4)
        0.45
        >>> Overlap(whole_s=0.8, last_s=0.1).exposed_s(2.0)
        0.1
        """
        if not self.can_hide:
            return self.whole_s
        hidden_s = (1 - self.last_s / self.whole_s) * backward_s
        return max(self.last_s, self.whole_s - hidden_s)

    def exposed_many_s(self, backward_s: FloatArray) -> FloatArray:
        """The same for several backward passes, to the last bit, shape (num_passes,)."""
        if not self.can_hide:
            return np.full(backward_s.shape, self.whole_s)
        hidden_s = (1 - self.last_s / self.whole_s) * backward_s
        exposed: FloatArray = np.maximum(self.last_s, self.whole_s - hidden_s)
        return exposed


NO_EXCHANGE = Overlap(whole_s=0.0, last_s=0.0)
"""Of a device alone."""
