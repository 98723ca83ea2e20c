"""SGLang's engine on Folio, on a backend of SGLang's own, and transformers: equal tokens, equal logprobs. On a GPU.

Each case has a process for each backend (engine.py), several at a time. It takes minutes. `make test-sglang-gpu` asks
for it; elsewhere it has nothing to run.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

#: Engines at a time; 0 where none is asked for.
ENGINES = int(os.environ.get("FOLIO_SGLANG_ENGINES", 0))
if not ENGINES:
    pytest.skip("run by `make test-sglang-gpu`", allow_module_level=True)

import models  # noqa: E402
import torch  # noqa: E402
from cases import CASES  # noqa: E402

HERE = Path(__file__).parent
FOLIO = "folio"
#: Seconds for a case on a backend.
LIMIT = 600


@pytest.fixture(autouse=True)
def device():
    """The CPU: engines choose their device themselves."""


def run(backend: str, name: str, folder: Path) -> list[dict] | str:
    """What a case gives on a backend; where it failed, what was said last."""
    output = folder / f"{name}-{backend}.json"
    command = [sys.executable, HERE / "engine.py", backend, folder / "models", output, name]
    with open(folder / f"{name}-{backend}.log", "w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
        # An engine that fails ends its process, or waits for ever.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        result = json.loads(output.read_text())[name] if output.exists() else f"{backend} gave nothing"
        log.seek(0)
        return f"{result}\n{log.read()[-3000:]}" if isinstance(result, str) else result


@pytest.fixture(scope="session")
def folder(tmp_path_factory, request):
    """A folder with the models that are asked for."""
    folder = tmp_path_factory.mktemp("engine")
    for name in _asked_for(request):
        for model in filter(None, (CASES[name].model, CASES[name].draft)):
            models.save(model, folder / "models")
    return folder


@pytest.fixture(scope="session")
def results(folder, request):
    """What the cases that are asked for give, by case and backend."""
    runs = [(name, backend) for name in _asked_for(request) for backend in (CASES[name].against, FOLIO)]
    with ThreadPoolExecutor(ENGINES) as pool:
        found = pool.map(lambda each: run(each[1], each[0], folder), runs)
        return dict(zip(runs, found, strict=True))


def _asked_for(request) -> list[str]:
    return sorted({item.callspec.params["name"] for item in request.session.items if "results" in item.fixturenames})


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_sglangs_own(name, results, folder):
    case, mine, own = CASES[name], results[name, FOLIO], results[name, CASES[name].against]
    assert not isinstance(mine, str), mine
    assert not isinstance(own, str), f"SGLang's own backend: {own}"
    prompts = case.prompts() * case.rounds
    assert len(mine) == len(own) == len(prompts)
    heard = list(range(len(prompts))) if case.hears else [None] * len(prompts)

    def exactly(answers):
        places = zip(prompts, map(_tokens, answers), heard)
        return [models.exact(case.model, folder / "models", *place) for place in places]

    exact = exactly(mine)
    if case.few_bits:
        theirs = exactly(own)
        assert _mean(mine, exact) <= 1.15 * _mean(own, theirs)
    else:
        assert list(map(_tokens, mine)) == [step.argmax(-1).tolist() for step in exact]
        assert _largest(mine, exact) <= case.tolerance
        if case.own:
            assert list(map(_tokens, mine)) == list(map(_tokens, own))
            assert _largest(mine, [torch.tensor(answer["logprobs"]) for answer in own]) <= case.tolerance
    if case.rounds > 1:
        again = mine[len(prompts) // case.rounds :]
        assert all(answer["cached"] for answer in again)
    if case.speculates:
        # Some drafts were right, and not all were.
        verified, tokens = (sum(map(count, mine)) for count in (lambda a: a["verified"], lambda a: len(_tokens(a))))
        assert 0 < verified < tokens


def _tokens(answer: dict) -> list[int]:
    return answer["tokens"]


def _differences(answers: list[dict], exact: list[torch.Tensor]) -> torch.Tensor:
    parts = [torch.tensor(answer["logprobs"]) - step for answer, step in zip(answers, exact, strict=True)]
    return torch.cat(parts).abs()


def _mean(answers: list[dict], exact: list[torch.Tensor]) -> float:
    return _differences(answers, exact).mean().item()


def _largest(answers: list[dict], exact: list[torch.Tensor]) -> float:
    return _differences(answers, exact).max().item()
