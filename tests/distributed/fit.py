"""Images that are spread unevenly over processes fit the head that one process fits, to 1e-6."""

import json
import sys

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn

from entame_hf import EntameConfig, apply_entame, fit_head


def fitted(features, labels, parts, **options):
    torch.manual_seed(0)
    config = EntameConfig(init="ridge", head="0")
    model = apply_entame(nn.Sequential(nn.Linear(12, 4)).double(), config)
    (fit,) = fit_head(model, [(features[part], labels[part]) for part in parts], **options)
    return model.state_dict(), fit


def data():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 3
    return torch.randn(40, 12, generator=generator, dtype=torch.float64) + 100 + labels[:, None] / 2, labels


OPTIONS = {"plain": {}, "weighted": {"class_weights": torch.tensor([1.0, 3.0, 2.0, 1.0])}}


def main(rank: int, sizes: list[int], expected: dict) -> None:
    features, labels = data()
    start, end = sum(sizes[:rank]), sum(sizes[: rank + 1])
    # Batches of another size on each process.
    parts = [slice(first, min(first + rank + 2, end)) for first in range(start, end, rank + 2)]
    for name, options in OPTIONS.items():
        state, fit = fitted(features, labels, parts, **options)
        alone, one = expected[name]
        torch.testing.assert_close(state, alone, rtol=1e-6, atol=1e-12)
        assert fit.samples == one.samples == 40
        assert abs(fit.alpha - one.alpha) <= 1e-9 * one.alpha
        assert fit.accuracy == one.accuracy


if __name__ == "__main__":
    # Before processes know of each other.
    expected = {name: fitted(*data(), [slice(0, 40)], **options) for name, options in OPTIONS.items()}
    rank = PartialState(cpu=True).process_index
    for sizes in json.loads(sys.argv[1]):
        main(rank, sizes, expected)
    # Threads of gloo that still run when Python ends would abort the process.
    dist.destroy_process_group()
