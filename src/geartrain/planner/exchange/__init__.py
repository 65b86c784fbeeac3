"""Who sends which part of a gradient to whom: pure choices from a measured topology."""

from geartrain.planner.exchange.book import write_book
from geartrain.planner.exchange.bound import bound_s
from geartrain.planner.exchange.choice import (
    AutoGain,
    candidates,
    choose,
    what_auto_would_gain,
)
from geartrain.planner.exchange.explanation import (
    ExchangeExplanation,
    exchange_sentences,
    explain_exchange,
)
from geartrain.planner.exchange.ownership import Piece, chunk_bounds, pieces
from geartrain.planner.exchange.request import AUTO, AUTO_CODECS, ExchangeRequest
from geartrain.planner.exchange.schedule import (
    EXACT,
    CodecProfile,
    CommSchedule,
    RackPart,
    ScheduleBook,
    StageTimes,
)
from geartrain.planner.exchange.ways import Candidate

__all__ = [
    "AUTO",
    "AUTO_CODECS",
    "EXACT",
    "AutoGain",
    "Candidate",
    "CodecProfile",
    "CommSchedule",
    "ExchangeExplanation",
    "ExchangeRequest",
    "Piece",
    "RackPart",
    "ScheduleBook",
    "StageTimes",
    "bound_s",
    "candidates",
    "choose",
    "chunk_bounds",
    "exchange_sentences",
    "explain_exchange",
    "pieces",
    "what_auto_would_gain",
    "write_book",
]
