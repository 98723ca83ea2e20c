"""The contexts of this process: one per device, on the CPU with as many threads as PyTorch has, and with the same ones where
that can be."""

import os
from functools import cache

import folio
import torch

from folio_torch.openmp import parallel_for


def context_of(device: torch.device | str) -> folio.Context:
    """The context of a device; it lives as long as the process."""
    device = torch.device(device)
    if device.type == "cuda":
        return _cuda(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "cpu":
        return _cpu()
    raise ValueError(f"device is {device}; cpu and cuda are accepted")


@cache
def _cuda(index: int) -> folio.Context:
    return folio.Context("cuda", device_id=index)


@cache
def _cpu() -> folio.Context:
    threads = parallel_for() or dict(cpus=_cpus())
    return folio.Context("cpu", num_threads=torch.get_num_threads(), **threads)


def _cpus() -> list[int]:
    """The CPUs of all threads of the process: OpenMP may have bound each of them, the main one too, to a single one."""
    return sorted({cpu for task in os.listdir("/proc/self/task") for cpu in os.sched_getaffinity(int(task))})
