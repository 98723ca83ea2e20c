"""Devices of the grids, and how many runs of each there were."""

import pytest

COUNTS = {}


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def runner(request):
    """Runs problems on a device: all of a grid on a GPU, a sample on the CPU."""
    torch = pytest.importorskip("torch")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU, or no torch to use it")
    from grids.runner import Runner

    made = Runner(request.param)
    yield made
    made.close()


@pytest.fixture
def counted(request, record_property):
    """Notes how many runs of a grid there were, for the summary."""

    def note(device, name, runs, seconds):
        COUNTS[device, name] = runs, seconds
        record_property("runs", runs)

    return note


def pytest_terminal_summary(terminalreporter):
    """A line for each grid and device, and their sum."""
    if not COUNTS:
        return
    terminalreporter.section("grids of the peers")
    for (device, name), (runs, seconds) in COUNTS.items():
        terminalreporter.write_line(f"{device:5}{name:36}{runs:6} runs {seconds:7.1f} s")
    for device in sorted({device for device, _ in COUNTS}):
        runs, seconds = (sum(column) for column in zip(*(COUNTS[key] for key in COUNTS if key[0] == device)))
        terminalreporter.write_line(f"{device:5}{'all':36}{runs:6} runs {seconds:7.1f} s")
