"""The contexts of this process: one per device, with as many threads on the CPU as PyTorch has."""

import os
from contextlib import contextmanager
from functools import cache

import folio
import torch


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
    with _all_cpus():
        return folio.Context("cpu", num_threads=torch.get_num_threads())


@contextmanager
def _all_cpus():
    """To be removed when contexts take the CPUs of the process by themselves.

    Threads inherit the mask of the thread that starts them, and OpenMP may have bound this one to a core. All of the
    process's threads together may run where the process may.
    """
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu for task in os.listdir("/proc/self/task") for cpu in os.sched_getaffinity(int(task))})
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
