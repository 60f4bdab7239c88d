"""A batch that is spread unevenly over processes is normalised, forward and backward, as one process does it."""

import json
import sys

import torch
import torch.distributed as dist
from accelerate import PartialState

from entame_hf import ZNormLinear
from entame_hf.layers import ZNorm


def main(sizes: list[int]) -> None:
    rank = PartialState(cpu=True).process_index
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(sum(sizes), 8, generator=generator, dtype=torch.float64) * 3 + 100
    upstream = torch.randn(sum(sizes), 8, generator=generator, dtype=torch.float64)

    whole, alone = features.clone().requires_grad_(True), ZNorm(8, sync=False).double().train()
    expected = alone(whole)
    (expected * upstream).sum().backward()

    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    part, together = features[mine].clone().requires_grad_(True), ZNorm(8).double().train()
    got = together(part)
    (got * upstream[mine]).sum().backward()
    torch.testing.assert_close(got, expected[mine], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(part.grad, whole.grad[mine], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(together.state_dict(), alone.state_dict(), rtol=1e-9, atol=1e-9)
    assert together.largest_batch == sum(sizes)

    # Every process for itself, where that is asked for.
    local = ZNorm(8, sync=False).double().train()
    if sizes[rank] > 1:
        local(features[mine])
        torch.testing.assert_close(local.mean, features[mine].mean(0), rtol=1e-9, atol=1e-9)
    head = ZNormLinear(8, 3).train()
    head(features[mine].float()).sum().backward()
    assert head.weight.grad.isfinite().all()
    dist.barrier()


if __name__ == "__main__":
    for sizes in json.loads(sys.argv[1]):
        main(sizes)
    # Threads of gloo that still run when Python ends would abort the process.
    dist.destroy_process_group()
