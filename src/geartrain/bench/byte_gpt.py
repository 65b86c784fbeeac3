"""The model and data that benchmarks train: a byte-level GPT on source code.

Dims: B samples, T bytes of context, D features.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from geartrain.bench.macro_settings import ModelSize
from geartrain.errors import ConfigError

NUM_BYTE_VALUES = 256
HEAD_SIZE = 32
_MAX_CORPUS_BYTES = 4 * 2**20

Batch = tuple[Tensor, Tensor]
"""Inputs and the bytes that follow them, int64 of shape (B, T) each."""


class _Block(nn.Module):
    """Causal self-attention, then a perceptron, each behind a layer norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_heads = dim // HEAD_SIZE
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, hidden_BTD: Tensor) -> Tensor:  # noqa: N803 - logical dims
        """Map (B, T, D) to the same shape."""
        batch, time, dim = hidden_BTD.shape
        qkv = self.qkv(self.norm(hidden_BTD))
        query, key, value = qkv.view(batch, time, 3, self.num_heads, HEAD_SIZE).permute(
            2, 0, 3, 1, 4
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed_BTD = mixed.transpose(1, 2).reshape(batch, time, dim)  # noqa: N806
        hidden_BTD = hidden_BTD + self.project(mixed_BTD)  # noqa: N806
        output: Tensor = hidden_BTD + self.mlp(hidden_BTD)
        return output


class ByteGPT(nn.Module):
    """A GPT over bytes whose output layer shares the embedding's weights."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embed_byte = nn.Embedding(NUM_BYTE_VALUES, size.dim)
        self.embed_position = nn.Embedding(size.context, size.dim)
        self.blocks = nn.Sequential(*(_Block(size.dim) for _ in range(size.num_layers)))
        self.norm = nn.LayerNorm(size.dim)
        for embedding in (self.embed_byte, self.embed_position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map bytes (B, T) to logits (B, T, 256)."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.embed_byte(inputs) + self.embed_position(positions)
        return functional.linear(self.norm(self.blocks(hidden)), self.embed_byte.weight)


def make_model(size: ModelSize, seed: int) -> ByteGPT:
    """Make the model with the weights that a seed gives, the same in every process."""
    torch.manual_seed(seed)
    return ByteGPT(size)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer of all variants, in torch's fastest form."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def byte_losses(logits: Tensor, batch: Batch) -> Tensor:
    """Cross entropy of every byte, shape (B, T), unreduced."""
    return functional.cross_entropy(logits.transpose(1, 2), batch[1], reduction="none")


class SourceWindows(torch.utils.data.Dataset[Batch]):
    """Windows of the Python standard library's source, the same on every rank.

    Args:
        context: Bytes of a sample.
        device: Where whole batches are put.

    Raises:
        ConfigError: If this Python has no library source.
    """

    def __init__(self, context: int, device: torch.device | None = None) -> None:
        text = _read_corpus()
        if len(text) <= context:
            msg = (
                f"this Python's library holds {len(text)} bytes of source, expected more "
                f"than {context}; run the benchmark with a full Python installation"
            )
            raise ConfigError(msg)
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._context = context
        self._device = device

    def __len__(self) -> int:
        """Return the number of whole windows."""
        return (len(self._bytes) - 1) // self._context

    def __getitem__(self, index: int) -> Batch:
        """Return inputs and targets, int64 of shape (T,) each."""
        start = index * self._context
        window = self._bytes[start : start + self._context + 1].long()
        return window[:-1], window[1:]

    def batch(self, indices: list[int]) -> Batch:
        """Return several samples as one batch, on the device."""
        inputs, targets = zip(*(self[index] for index in indices), strict=True)
        return (
            torch.stack(inputs).to(self._device or "cpu"),
            torch.stack(targets).to(self._device or "cpu"),
        )


def _read_corpus() -> bytes:
    corpus = bytearray()
    # Only the top folder: sub-packages such as tests come and go with distributions.
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        corpus += path.read_bytes()
        if len(corpus) >= _MAX_CORPUS_BYTES:
            break
    return bytes(corpus[:_MAX_CORPUS_BYTES])
