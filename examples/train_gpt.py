"""Train a small byte-level GPT on source code; by default the standard library's.

On an unequal fleet, emulated on this machine's cores:

    geartrain run --fleet emulated:0.8,0.4,0.2,0.1 examples/train_gpt.py --steps 60

On one device, the same code:

    python examples/train_gpt.py --steps 60
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import geartrain as gt

NUM_BYTE_VALUES = 256
HEAD_SIZE = 32
MAX_DATA_BYTES = 8 * 2**20
HELD_OUT_FRACTION = 0.1
WARMUP_STEPS = 10
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}

Batch = tuple[Tensor, Tensor]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="a file, or a folder of .py files")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stop-at", type=int, help="end earlier, at this step")
    parser.add_argument("--global-batch-size", type=int, default=128)
    parser.add_argument("--dim", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="bytes a sample has")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--eval-samples", type=int, default=1024, help="held-out samples at the end"
    )
    parser.add_argument("--resume", type=Path, help="continue from a saved folder")
    parser.add_argument("--save", type=Path, help="save everything here at the end")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


def read_corpus(path: Path | None) -> bytes:
    """Read the text to train on, the same bytes in the same order everywhere.

    Args:
        path: A file, or a folder whose ``.py`` files are read in sorted order; None
            reads the Python standard library's own source.

    Returns:
        At most ``MAX_DATA_BYTES`` bytes.
    """
    root = path or Path(sysconfig.get_path("stdlib"))
    if root.is_file():
        return root.read_bytes()[:MAX_DATA_BYTES]
    corpus = bytearray()
    for file in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(file.relative_to(root).parts):
            corpus += file.read_bytes()
        if len(corpus) >= MAX_DATA_BYTES:
            break
    if not corpus:
        msg = f"{root} holds no .py file; give --data another file or folder"
        raise SystemExit(msg)
    return bytes(corpus[:MAX_DATA_BYTES])


class ByteWindows(Dataset[Batch]):
    """Windows of a text, side by side: inputs and the bytes that follow them."""

    def __init__(self, text: bytes, context: int) -> None:
        if len(text) <= context:
            msg = (
                f"{len(text)} bytes of data hold no window of {context} + 1; "
                "give --data more text or lower --context"
            )
            raise SystemExit(msg)
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        """Return the number of whole windows."""
        return (len(self._bytes) - 1) // self._context

    def __getitem__(self, index: int) -> Batch:
        """Return inputs and targets, int64 of shape (context,) each."""
        start = index * self._context
        window = self._bytes[start : start + self._context + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention, then a perceptron, each behind a layer norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_heads = dim // HEAD_SIZE
        self.norm_attention = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, time, dim) to the same shape."""
        batch, time, dim = hidden.shape
        qkv = self.qkv(self.norm_attention(hidden))
        heads = qkv.view(batch, time, 3, self.num_heads, HEAD_SIZE).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(batch, time, dim))
        output: Tensor = hidden + self.mlp(hidden)
        return output


class ByteGPT(nn.Module):
    """A GPT over bytes whose output layer shares the embedding's weights."""

    def __init__(self, *, dim: int, num_layers: int, context: int) -> None:
        super().__init__()
        self.embed_byte = nn.Embedding(NUM_BYTE_VALUES, dim)
        self.embed_position = nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(dim)
        for embedding in (self.embed_byte, self.embed_position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map bytes (batch, time) to logits (batch, time, 256)."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.embed_byte(inputs) + self.embed_position(positions)
        return F.linear(self.norm(self.blocks(hidden)), self.embed_byte.weight)


# begin loss
def byte_losses(logits: Tensor, batch: Batch) -> Tensor:
    """Cross entropy of every byte, shape (batch, time): unreduced, in nats."""
    return F.cross_entropy(logits.transpose(1, 2), batch[1], reduction="none")


def bits_per_byte(logits: Tensor, batch: Batch) -> dict[str, tuple[float, int]]:
    """Sum and count, so that the mean over unequal shares is exact."""
    losses = byte_losses(logits, batch)
    return {"bits_per_byte": (float(losses.double().sum()) / math.log(2), losses.numel())}


# end loss


def warm_up_then_cosine(step: int, num_steps: int) -> float:
    """Return the factor on the learning rate: up in a line, then down to a tenth."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = min(1.0, (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def main() -> None:
    """Train, evaluate on the last tenth of the text, and say what came out."""
    args = parse_arguments()
    corpus = read_corpus(args.data)
    split = int(len(corpus) * (1 - HELD_OUT_FRACTION))
    held_out = ByteWindows(corpus[split:], args.context)
    num_held_out = min(args.eval_samples, len(held_out))

    # begin setup
    session = gt.Session(seed=args.seed)
    model: nn.Module = ByteGPT(dim=args.dim, num_layers=args.layers, context=args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_up_then_cosine(step, args.steps)
    )
    model, optimizer = session.setup(
        model,
        optimizer,
        loss_fn=byte_losses,
        lr_scheduler=scheduler,
        max_grad_norm=1.0,
        total_steps=args.steps,
    )
    loader = session.setup_dataloader(
        ByteWindows(corpus[:split], args.context),
        global_batch_size=args.global_batch_size,
    )
    # end setup
    if args.resume:
        session.load(args.resume)

    last_step = min(args.steps, args.stop_at or args.steps)
    # begin loop
    while session.step_index < last_step:
        for batch in loader:
            loss = session.step(batch)
            if session.step_index % 10 == 0:
                session.print(f"step {session.step_index}: loss {loss:.4f}")
            if session.step_index >= last_step:
                break
    # end loop

    result: dict[str, float] = {"steps": session.step_index}
    if num_held_out:
        held_out_loader = session.setup_dataloader(
            Subset(held_out, range(num_held_out)),
            global_batch_size=min(args.global_batch_size, num_held_out),
            shuffle=False,
        )
        result |= session.evaluate(held_out_loader, bits_per_byte)
        session.print(f"held-out bits per byte: {result['bits_per_byte']:.3f}")
    if args.save:
        session.save(args.save)
        session.print(f"saved to {args.save}")
    if args.json:
        session.print(json.dumps(result))


if __name__ == "__main__":
    main()
