"""Models as people write them train unmodified: transformers, and a ResNet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from local_ranks import run_ranks
from small_models import Samples, plan_of
from training_jobs import (
    Job,
    largest_difference,
    make_adamw,
    relative_error,
    train_on_ranks,
    train_plainly,
)

PLAN = plan_of([9, 3], [4, 2])
NUM_WORDS = 19
REASON = "needs the extra hf: pip install geartrain[hf]"


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Mappings as a tokenizer and its collator make them, of uneven lengths."""

    def __init__(self, count: int, *, is_masked: bool) -> None:
        generator = torch.Generator().manual_seed(4)
        lengths = torch.randint(2, 9, (count, 1), generator=generator)
        mask = torch.arange(8)[None, :] < lengths
        words = torch.randint(0, NUM_WORDS, (count, 8), generator=generator)
        self.columns = {
            "input_ids": words * mask,
            "attention_mask": mask.long(),
            "labels": words.masked_fill(~mask, -100),
        }
        if is_masked:
            hidden = (torch.rand(words.shape, generator=generator) < 0.3) & mask
            hidden[:, 0] = True
            self.columns["input_ids"] = self.columns["input_ids"].masked_fill(hidden, 1)
            self.columns["labels"] = words.masked_fill(~hidden, -100)

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def sentences(count: int, dtype: torch.dtype) -> Sentences:
    return Sentences(count, is_masked=False)


def masked_sentences(count: int, dtype: torch.dtype) -> Sentences:
    return Sentences(count, is_masked=True)


def make_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=NUM_WORDS,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=NUM_WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def next_word_loss(output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, (labels != -100).sum()


def model_s_own_mean(output: Any, batch: Any) -> torch.Tensor:
    """The loss that a transformers model makes of its labels: a mean over them."""
    loss: torch.Tensor = output.loss
    return loss


def count_labels(batch: Any) -> int:
    return int((batch["labels"] != -100).sum())


def test_a_causal_language_model_trains_like_on_one_device() -> None:
    pytest.importorskip("transformers", reason=REASON)
    job = Job(
        make_model=make_gpt2,
        make_data=sentences,
        make_optimizer=make_adamw,
        loss_fn=next_word_loss,
    )
    expected = train_plainly(job)

    results = run_ranks(train_on_ranks, 2, job, {0: PLAN}, timeout_s=150)

    for result in results:
        assert largest_difference(result.losses, expected.losses) <= 1e-10
        assert relative_error(result.parameters, expected.parameters) <= 1e-9


def test_the_models_own_mean_needs_only_its_count() -> None:
    pytest.importorskip("transformers", reason=REASON)
    job = Job(
        make_model=make_bert,
        make_data=masked_sentences,
        make_optimizer=make_adamw,
        loss_fn=model_s_own_mean,
        options={"count_fn": count_labels},
    )
    expected = train_plainly(job)

    results = run_ranks(train_on_ranks, 2, job, {0: PLAN}, timeout_s=150)

    for result in results:
        assert largest_difference(result.losses, expected.losses) <= 1e-10


class BasicBlock(nn.Module):
    """As in torchvision.models.resnet."""

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample: nn.Module | None = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        result: torch.Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    """As in torchvision.models.resnet, with the depths of ResNet-18 and narrow layers."""

    def __init__(self, num_classes: int = 3, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        widths = [width, width, 2 * width, 3 * width, 4 * width]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    BasicBlock(widths[i], widths[i + 1], stride=1 if i == 0 else 2),
                    BasicBlock(widths[i + 1], widths[i + 1]),
                )
                for i in range(4)
            )
        )
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(widths[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, BasicBlock):
                nn.init.zeros_(module.bn2.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = torch.flatten(self.avgpool(self.layers(x)), 1)
        output: torch.Tensor = self.fc(x)
        return output


def pictures(count: int, dtype: torch.dtype) -> Samples:
    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(count, 3, 32, 32, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (count,), generator=generator)
    return Samples(inputs.to(dtype), targets)


def channels_last_resnet() -> nn.Module:
    model: nn.Module = ResNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch lacks this overload
    return model


@pytest.mark.parametrize("make_model", [ResNet, channels_last_resnet])
def test_a_resnet_trains_like_on_one_device(make_model: Callable[[], nn.Module]) -> None:
    job = Job(
        make_model=make_model,
        make_data=pictures,
        num_samples=24,
        num_steps=5,
        make_optimizer=make_adamw,
        options={"sync_batchnorm": True},
    )
    expected = train_plainly(job)

    results = run_ranks(train_on_ranks, 2, job, {0: plan_of([9, 3], uniform_count=1)})

    for result in results:
        assert largest_difference(result.losses, expected.losses) <= 1e-10
        assert torch.equal(result.parameters, results[0].parameters)
