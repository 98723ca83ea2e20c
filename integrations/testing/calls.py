"""How many functions a call runs: as many for any number of requests, where nothing loops over them."""

import sys


def calls_of(function, *arguments) -> int:
    """How many functions a call runs, those of C included."""
    count = 0

    def called(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return count
