"""Tiny random models, their batches, and the weights that one process trains."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MODELS = ("llama", "vit", "timm")
STEPS, ROWS, NORM = 3, 4, 2.5
State = dict[str, Tensor]


class Classifier(nn.Module):
    """An image model of timm with the loss that Hugging Face's models return."""

    def __init__(self) -> None:
        super().__init__()
        import timm

        self.network = timm.create_model("test_vit", num_classes=3, img_size=32)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean loss of ``pixel_values [batch, 3, 32, 32]``."""
        return {"loss": nn.functional.cross_entropy(self.network(pixel_values), labels)}


def make_model(name: str) -> nn.Module:
    """Return a model in double precision, the same on every process."""
    torch.manual_seed(0)
    if name == "timm":
        return Classifier().double()
    import transformers

    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
    if name == "llama":
        llama = transformers.LlamaConfig(vocab_size=17, num_key_value_heads=1, **sizes)
        return transformers.LlamaForCausalLM(llama).double()
    vit = transformers.ViTConfig(image_size=32, patch_size=16, num_labels=3, hidden_dropout_prob=0.0, **sizes)
    return transformers.ViTForImageClassification(vit).double()


def make_samples(name: str) -> list[dict[str, Tensor]]:
    """Return the samples of all steps, in order."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(STEPS * ROWS):
        if name == "llama":
            tokens = torch.randint(17, (8,), generator=generator)
            samples.append({"input_ids": tokens, "labels": tokens})
        else:
            pixels = torch.randn(3, 32, 32, dtype=torch.float64, generator=generator)
            samples.append({"pixel_values": pixels, "labels": torch.randint(3, (), generator=generator)})
    return samples


def make_optimizer(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of all examples."""
    return torch.optim.SGD(named.values(), lr=0.1, momentum=0.9, weight_decay=0.1)


def train_on_one_process(name: str, epochs: int = 1) -> State:
    """Return the weights after a plain loop on this process alone."""
    model, samples = make_model(name), make_samples(name) * epochs
    optimizer = make_optimizer(dict(model.named_parameters()))
    for step in range(STEPS * epochs):
        batch = torch.utils.data.default_collate(samples[step * ROWS : (step + 1) * ROWS])
        model(**batch)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two states."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max((found[name] - x).abs().max().item() for name, x in expected.items())


def main(description: str | None, train: Callable[[str, dict[str, Any]], State]) -> None:
    """Train under a plan, and print how far the weights are from those of one process."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--zero", type=int, choices=range(4), default=1)
    options = parser.parse_args()
    dist.init_process_group("gloo")  # torchrun started the processes
    found = train(options.model, {"dp": dist.get_world_size(), "zero": options.zero})
    worst = difference(found, train_on_one_process(options.model))
    if int(os.environ["RANK"]) == 0:
        print(f"{options.model}: weights differ from one process's by {worst:.1e}")
    dist.destroy_process_group()
