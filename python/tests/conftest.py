"""What the tests share."""

import os

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


def pytest_terminal_summary(terminalreporter):
    """What was skipped also goes to the file that FOLIO_SKIPS names, for the last line of `make test`."""
    path = os.environ.get("FOLIO_SKIPS")
    reasons = sorted(
        {report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])}
    )
    if path and reasons:
        with open(path, "a") as skips:
            skips.writelines(f"Python package\t{reason}\n" for reason in reasons)
