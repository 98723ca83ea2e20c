"""The devices that the integrations' tests run on: every test on the CPU, and once more on a GPU where there is one."""

import pytest
import torch


def one_after_the_other(device: str):
    """Makes a device torch's default for a test. On a GPU the current stream is not the default one."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    with torch.device(device):
        if device == "cpu":
            yield torch.device(device)
            return
        with torch.cuda.stream(torch.cuda.Stream()):
            yield torch.device("cuda", 0)
        torch.cuda.synchronize()
