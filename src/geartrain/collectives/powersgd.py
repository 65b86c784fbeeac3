"""PowerSGD for users of plain DistributedDataParallel; the algorithm is torch's.

It sends two thin factors of each weight's gradient instead of the gradient. It pays on
links so slow that 4 bits are too many, and for large matrices: each step needs two
exchanges one after the other and an orthogonalisation, and it takes the plain mean over
ranks, so all must have batches of one size. geartrain's own codecs have neither limit.

Source: Vogels et al., PowerSGD, arXiv:1905.13727.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from geartrain.errors import ConfigError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

_FIRST_STEP = 2
"""torch needs a full exchange before feedback and warm start have anything to go on."""


def register_powersgd(
    model: DistributedDataParallel,
    *,
    matrix_rank: int = 2,
    start_step: int = 1000,
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
) -> torch_powersgd.PowerSGDState:
    """Make a DDP model exchange low-rank gradients, with error feedback and warm start.

    Args:
        model: Wrapped, with no other communication hook.
        matrix_rank: Columns of the factors: 1 to 4 usually, up to 32 for transformers.
        start_step: Gradients travel whole before this step, at least 2; about a tenth of
            all steps, and not within the warm-up of the learning rate.
        process_group: Ranks that exchange; None: all.
        seed: Of the first random factor, equal on all ranks.

    Returns:
        The hook's state; it holds residuals, so save it with the run
        (``state.__getstate__()``).

    Raises:
        ConfigError: If a number is out of range.
    """
    if matrix_rank < 1 or start_step < _FIRST_STEP:
        msg = (
            f"powersgd: matrix_rank={matrix_rank} must be >= 1 and start_step={start_step} "
            f">= {_FIRST_STEP}; torch's feedback needs whole gradients first"
        )
        raise ConfigError(msg)
    state = torch_powersgd.PowerSGDState(
        process_group,
        matrix_approximation_rank=matrix_rank,
        start_powerSGD_iter=start_step,
        use_error_feedback=True,
        warm_start=True,
        random_seed=seed,
    )
    model.register_comm_hook(state, torch_powersgd.powerSGD_hook)
    return state
