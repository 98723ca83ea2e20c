"""vLLM's engine on Folio and on its own backend: equal tokens, equal logprobs. It is run where vLLM is: CPU or CUDA.

Each backend has one process that runs the cases asked for (engine.py). All of them take minutes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import EXACT, here
from vllm.platforms import current_platform

HERE = Path(__file__).parent
CASES = here()
#: How vLLM's errors begin where it has no backend for a case: fp8 caches without AVX-512, fp8_e5m2 on CUDA, and MLA in
#: float32 on a CPU with AMX.
NOT_OFFERED = (
    "NotImplementedError",
    "ValueError: No valid attention backend",
    "AssertionError",
    "RuntimeError: expect weight to be bfloat16",
)

on_cuda = pytest.mark.skipif(not current_platform.is_cuda(), reason="vLLM has this on CUDA")


def run(backend: str, folder: Path, names, **environment) -> dict:
    """What the cases give on a backend; a sentence in place of results where one failed."""
    if not names:
        return {}
    output = folder / f"{backend}-{len(os.listdir(folder))}.json"
    command = [sys.executable, HERE / "engine.py", backend, folder / "models", output, *names]
    subprocess.run(command, check=True, env=os.environ | environment, cwd=folder)
    return json.loads(output.read_text())


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session")
def asked_for(request):
    """The cases of the tests that are run; those without a case compare with llama-mixed."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if "folios" in item.fixturenames]
    names = {call.params["name"] if call else "llama-mixed" for call in calls}
    return [name for name in CASES if name in names]


@pytest.fixture(scope="session")
def own(folder, asked_for):
    return run("auto", folder, asked_for)


@pytest.fixture(scope="session")
def folios(folder, own, asked_for):
    return run("FOLIO", folder, asked_for)


@pytest.fixture(scope="session")
def exact(folder, asked_for):
    return run(EXACT, folder, [name for name in asked_for if CASES[name].few_bits and CASES[name].distribution])


def distance(some, others) -> float:
    """The mean difference of logprobs."""
    pairs = [pair for prompt in zip(some, others, strict=True) for pair in zip(*prompt, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def distance_of_steps(answers) -> float:
    """The mean difference of logprobs from those of transformers, over the tokens that a backend decoded itself."""
    steps = [pair for _, mine, exact in answers for pair in zip(mine, exact, strict=True)]
    return distance(*zip(*steps, strict=True))


def largest_difference(some, others) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_vllms_own(name, own, folios, exact):
    case, mine, theirs = CASES[name], folios[name], own[name]
    assert not isinstance(mine, str), mine
    if isinstance(theirs, str) and theirs.startswith(NOT_OFFERED):
        pytest.skip(f"vLLM's own backend: {theirs}")
    assert not isinstance(theirs, str), f"vLLM's own backend: {theirs}"
    if case.few_bits and not case.distribution:
        assert distance_of_steps(mine) <= 1.15 * distance_of_steps(theirs)
    elif case.few_bits:
        assert distance(mine, exact[name]) <= 1.15 * distance(theirs, exact[name])
    elif case.embeds or case.distribution:
        assert all(largest_difference(*pair) <= case.tolerance for pair in zip(mine, theirs, strict=True))
    else:
        for (tokens, logprobs), (own_tokens, own_logprobs) in zip(mine, theirs, strict=True):
            assert tokens == own_tokens
            assert largest_difference(logprobs, own_logprobs) <= case.tolerance


def test_in_processes_of_their_own(folder, folios):
    """As vLLM is deployed: the plugin is found in the worker, too."""
    result = run(
        "FOLIO", folder, ["llama-mixed"], VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="nobind"
    )
    assert [tokens for tokens, _ in result["llama-mixed"]] == [tokens for tokens, _ in folios["llama-mixed"]]


@on_cuda
def test_compiled(folder, folios):
    result = run("FOLIO", folder, ["llama-compiled"], TORCHDYNAMO_DISABLE="0")
    assert [tokens for tokens, _ in result["llama-compiled"]] == [tokens for tokens, _ in folios["llama-mixed"]]


@on_cuda
def test_batch_invariance(folder):
    results = run("FOLIO", folder, ["llama-together", "llama-alone"], VLLM_BATCH_INVARIANT="1")
    together, alone = results["llama-together"], results["llama-alone"]
    assert not isinstance(together, str), together
    assert together == alone
