"""The programs that the documents show run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_programs_of_the_readme():
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert programs
    for program in programs:
        exec(compile(program, "README.md", "exec"), {})


def test_the_example():
    done = subprocess.run([sys.executable, str(ROOT / "example.py")], capture_output=True, text=True)
    assert done.returncode == 0 and "from the formula" in done.stdout, done.stderr
