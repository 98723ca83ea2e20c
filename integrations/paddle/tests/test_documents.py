"""The programs of docs/paddle.md run as they stand, in processes of their own, and print what they say."""

import pathlib
import re
import subprocess
import sys

from paddle_devices import cpu_only

PAGE = pathlib.Path(__file__).parents[3] / "docs/paddle.md"


@cpu_only
def test_the_programs_of_the_page():
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert programs
    for program in programs:
        run = subprocess.run([sys.executable, "-c", 'import paddle; paddle.set_device("cpu")\n' + program],
                             capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        said = re.findall(r"print\(.*\)  # (.*)", program)
        assert said and run.stdout.splitlines()[-len(said):] == said
