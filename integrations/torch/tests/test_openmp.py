"""On the CPU Folio computes on PyTorch's OpenMP threads, and gives the bits of its own."""

import os
from pathlib import Path

import folio
import pytest
import torch
from folio_torch import openmp


def own_threads() -> int:
    """Folio's own threads in this process."""
    names = (Path("/proc/self/task") / task / "comm" for task in os.listdir("/proc/self/task"))
    return sum(name.read_text().startswith("folio") for name in names)


def attend(ctx: folio.Context) -> torch.Tensor:
    """A decode of requests of unequal lengths, in pieces for several threads."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 96, 16, 4, 64, generator=generator)
    q = torch.randn(3, 16, 64, generator=generator)
    o = torch.empty_like(q)
    decode = folio.Decode(
        ctx,
        q_dtype=q.dtype,
        num_qo_heads=16,
        num_kv_heads=4,
        head_dim_qk=64,
        page_size=16,
        max_batch_size=3,
        max_kv_len=512,
    )
    decode.plan(kv_len=torch.tensor([500, 17, 211], dtype=torch.int32), block_table=torch.arange(96).int().view(3, 32))
    decode.run(q=q, k=k, v=v, o=o)
    return o


def test_regions_are_of_pytorchs_openmp(device):
    if device.type != "cpu":
        pytest.skip("threads are the CPU's")
    host = openmp.parallel_for()
    if not host:
        pytest.skip("folio_torch was built without a C compiler, or PyTorch without OpenMP")
    before = own_threads()
    on_openmp = attend(folio.Context("cpu", num_threads=3, **host))
    assert own_threads() == before
    with folio.Context("cpu", num_threads=3) as own:
        assert torch.equal(on_openmp, attend(own))
        assert own_threads() > before
