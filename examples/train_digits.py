"""Train a small ResNet with BatchNorm on scikit-learn's handwritten digits.

    geartrain run --fleet emulated:0.8,0.4,0.2,0.1 examples/train_digits.py
    python examples/train_digits.py

BatchNorm is synchronized: its statistics are those of the whole global batch, however
unequal the shares are.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import geartrain as gt

NUM_CLASSES = 10
NUM_TEST_SAMPLES = 360
LARGEST_PIXEL = 16.0

Batch = tuple[Tensor, Tensor]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


def read_digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Split the 1,797 digits into a training and a test set.

    Args:
        seed: Decides which samples are held out.

    Returns:
        Training and test set of (image (1, 8, 8) in 0..1, label) samples.
    """
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / LARGEST_PIXEL
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[:NUM_TEST_SAMPLES], order[NUM_TEST_SAMPLES:]
    return (
        TensorDataset(images[train], labels[train]),
        TensorDataset(images[test], labels[test]),
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
            nn.BatchNorm2d(out_channels),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, in, height, width) to (batch, out, height/stride, width/stride)."""
        return F.relu(self.body(images) + self.shortcut(images))


def make_resnet() -> nn.Module:
    """Make a ResNet for 8x8 images; its output are logits (batch, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        ResidualBlock(16, 16, stride=1),
        ResidualBlock(16, 32, stride=2),
        ResidualBlock(32, 64, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, NUM_CLASSES),
    )


def digit_losses(logits: Tensor, batch: Batch) -> Tensor:
    """Cross entropy of each image, shape (batch,)."""
    return F.cross_entropy(logits, batch[1], reduction="none")


# begin metric
def count_correct(logits: Tensor, batch: Batch) -> dict[str, tuple[float, int]]:
    """Sum and count, so that the mean over unequal shares is exact."""
    correct = (logits.argmax(dim=1) == batch[1]).sum()
    return {"accuracy": (float(correct), len(batch[1]))}


# end metric


def main() -> None:
    """Train for some epochs and report the accuracy on the test set."""
    args = parse_arguments()
    train_set, test_set = read_digits(args.seed)
    num_steps = args.epochs * -(-len(train_set) // args.global_batch_size)

    session = gt.Session(seed=args.seed)
    model = make_resnet()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=num_steps
    )
    # begin setup
    model, optimizer = session.setup(
        model,
        optimizer,
        loss_fn=digit_losses,
        lr_scheduler=scheduler,
        sync_batchnorm=True,
        total_steps=num_steps,
    )
    # end setup
    loader = session.setup_dataloader(train_set, global_batch_size=args.global_batch_size)
    for epoch in range(args.epochs):
        for batch in loader:
            loss = session.step(batch)
        session.print(f"epoch {epoch}: loss {loss:.4f}")

    # begin evaluate
    test_loader = session.setup_dataloader(
        test_set, global_batch_size=args.global_batch_size, shuffle=False
    )
    metrics = session.evaluate(test_loader, count_correct)
    session.print(f"test accuracy: {metrics['accuracy']:.4f}")
    # end evaluate
    if args.json:
        session.print(json.dumps(metrics))


if __name__ == "__main__":
    main()
