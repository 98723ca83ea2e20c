"""Finds what the integrations' tests have in common, and runs every test on both devices."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "testing"))

import devices  # noqa: E402


@pytest.fixture(autouse=True, params=["cpu", "cuda"])
def device(request):
    """The device of the test's tensors."""
    yield from devices.one_after_the_other(request.param)
