"""The grids against the formula: whole on a GPU, a sample of each on the CPU."""

import random
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import oracle  # noqa: E402

from grids import batches, formula, gqa, mla, operators  # noqa: E402
from grids.runner import problem_of, seed  # noqa: E402

#: Combinations of a grid that run on the CPU.
ON_CPU = 2
#: Failures of a grid that are printed.
SHOWN = 5
GRIDS = [*gqa.GRIDS, *mla.GRIDS, *operators.GRIDS]


def chosen(grid, device):
    """All combinations of a grid; on the CPU some at random."""
    cases = list(grid.cases())
    if device == "cpu":
        cases = random.Random(f"{seed()} {grid.name}").sample(cases, min(ON_CPU, len(cases)))
    return cases


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_grid(runner, counted, grid):
    if runner.device == grid.refused_on:
        pytest.skip(f"Folio refuses these problems on {runner.device}")
    started, cases = time.perf_counter(), chosen(grid, runner.device)
    runner.failures.clear()
    if grid.check:
        runs = sum(runner.attempt(grid.check, runner, case, grid.tolerance) for case in cases)
    else:
        runs = runner.check_all([problem_of(case) for case in cases], grid.tolerance)
    counted(runner.device, grid.name, runs, time.perf_counter() - started)
    shown = "\n".join(runner.failures[:SHOWN])
    assert not runner.failures, f"{len(runner.failures)} failures among {len(cases)} combinations:\n{shown}"


@pytest.mark.parametrize("most_tokens", [1000, 40])
def test_nobody_has_what_is_nan(most_tokens):
    """Pages of 16: keys of requests are numbers, all else is NaN or garbage, also where full pages come twice."""
    kv_lens = [0, 1, 16, 50, 33, 64]
    pages = batches.Pages(np.random.default_rng(1), kv_lens, 16, most_tokens=most_tokens)
    cache = batches.cache(torch.Generator().manual_seed(1), pages, (2,), torch.float32)
    seen = torch.zeros(pages.count, 16, dtype=torch.bool)
    for table, kv_len in zip(pages.tables, kv_lens):
        used = -(-kv_len // 16)
        assert (table[used:] == batches.GARBAGE).all() and (table[:used] < pages.count).all()
        tokens = np.arange(kv_len)
        at = table[tokens // 16], tokens % 16
        assert cache[at].isfinite().all()
        seen[at] = True
    assert cache[~seen].isnan().all() or most_tokens < sum(kv_lens)
    lasts = [table[kv_len // 16] for table, kv_len in zip(pages.tables, kv_lens) if kv_len % 16]
    assert cache[lasts].isnan().any(1).all() and len(set(lasts)) == len(lasts)


def test_names_of_grids_are_their_own():
    assert len({grid.name for grid in GRIDS}) == len(GRIDS)


@pytest.mark.parametrize(
    "options, sees",
    [
        ({}, lambda p, j: j <= p),
        ({"mask": "full"}, lambda p, j: True),
        ({"window": (5, 0)}, lambda p, j: p - 5 <= j <= p),
        ({"mask": "full", "window": (3, 4)}, lambda p, j: p - 3 <= j <= p + 4),
        ({"cap": 1.5}, lambda p, j: j <= p),
        ({"slopes": True, "sinks": True}, lambda p, j: j <= p),
    ],
)
def test_formula_of_many_rows_is_that_of_one(options, sees):
    """Requests of 20, 7 and no keys: their rows are at the end, and some of them before the first key."""
    made = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(3, *shape, generator=made, dtype=torch.float64) for shape in ((9, 4, 8), (20, 2, 8), (20, 2, 6))
    )
    slopes, sinks = torch.rand(2, 4, generator=made, dtype=torch.float64)
    options = {**options, **{name: x for name, x in (("slopes", slopes), ("sinks", sinks)) if name in options}}
    lengths = torch.tensor([20, 7, 0])
    positions = lengths[:, None] - 9 + torch.arange(9)
    o, lse = formula.attend(q, k, v, positions=positions, lengths=lengths, scale=0.3, **options)
    extras = {name: options[name].numpy() for name in ("slopes", "sinks") if name in options}
    for b, length in enumerate(lengths.tolist()):
        want, want_lse = oracle.attend(
            q[b].numpy(),
            k[b, :length].numpy(),
            v[b, :length].numpy(),
            sm_scale=0.3,
            sees=sees,
            soft_cap=options.get("cap", 0),
            **extras,
        )
        np.testing.assert_allclose(o[b].numpy(), want, rtol=0, atol=1e-12)
        np.testing.assert_allclose(lse[b].numpy(), want_lse, rtol=0, atol=1e-12)
