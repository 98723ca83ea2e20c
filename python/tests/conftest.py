"""What the tests share."""

import numpy as np
import pytest

import folio


@pytest.fixture(scope="session")
def ctx():
    """The CPU, two threads."""
    with folio.Context("cpu", num_threads=2) as context:
        yield context


@pytest.fixture
def rng(request):
    """Random numbers, the same in every run of a test."""
    return np.random.default_rng(sum(map(ord, request.node.name)))
