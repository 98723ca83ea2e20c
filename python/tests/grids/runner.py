"""Runs the attention problems of the grids: a batch, a handle, a plan, and a run and a comparison for each layer."""

from __future__ import annotations

import functools
import os
import random
import zlib
from dataclasses import dataclass, replace
from typing import Optional

import numpy as np
import torch

import folio
from grids import batches, formula
from grids.storage import storage_of

#: Most scores, and numbers of keys, that the formula is computed of, by device. Longer problems are sampled by row.
BUDGET = {"cpu": 1 << 20, "cuda": 48 << 20}
#: Most multiplications of a layer, and numbers of a cache, of a problem that is run on the CPU. Longer ones are cut.
MOST_ON_CPU = 1 << 25, 1 << 21
#: Layers of a problem that are run on the CPU.
LAYERS_ON_CPU = 3
#: Error of scores on the CPU: what Folio's other tests allow of 16-bit queries (tests/common/compare.rs). It shows
#: where an lse is about 0, as that of a single key may be; FlashMLA's test allows a GPU 1e-6 there.
SCORES_ON_CPU = 1e-4


@dataclass(frozen=True)
class Layer:
    """What differs from run to run of one plan.

    Attributes:
        mask: causal, full, or causal in bytes or bits.
        window: keys to the left and right that a row sees; -1: all.
    """

    mask: str = "causal"
    window: Optional[tuple[int, int]] = None
    cap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    o_scale: float = 1.0


@dataclass(frozen=True)
class Tolerance:
    """How far results may be from the formula, in the peers' terms.

    Attributes:
        cosine: most of 1 - 2·(a·b) / (a·a + b·b), over all outputs.
        either: the error is within atol or within rtol, as FlashMLA has it, and not within the sum of both.
    """

    atol: float = torch.inf
    rtol: float = 0.0
    cosine: float = torch.inf
    lse_atol: float = 1e-3
    lse_rtol: float = 1e-3
    either: bool = False

    def excess(self, got, want, atol, rtol):
        """The largest error minus what is allowed of it, and NaN for any NaN."""
        error = (got - want).abs()
        near, far = torch.full_like(want, atol), want.abs() * rtol
        return (error - (torch.maximum(near, far) if self.either else near + far)).max()


@dataclass(frozen=True)
class Problem:
    """A batch over a cache. The fields of a table's rows are these, and those of `lens_of`.

    Attributes:
        amplitude, mean: of what is in the cache, and of queries.
        q_amplitude: of queries, where it is another one.
    """

    lens: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int = 1
    dim: int = 128
    dim_vo: int = 0
    latent: int = 0
    page: int = 16
    dtype: str = "bfloat16"
    kv_dtype: Optional[str] = None
    o_dtype: Optional[str] = None
    kind: str = "prefill"
    layout: str = "nhd"
    form: str = "block_table"
    kv_format: str = "plain"
    cache_format: str = "plain"
    split: bool = False
    num_pages: int = 0
    prefix: int = 0
    scale: float = 0.0
    amplitude: float = 1.0
    mean: float = 0.0
    q_amplitude: float = 0.0
    runs: int = 1
    layers: tuple[Layer, ...] = (Layer(),)

    @property
    def width_vo(self):
        return self.latent or self.dim_vo or self.dim

    @property
    def stored(self):
        """The torch type of the cache."""
        return getattr(torch, self.kv_dtype or self.dtype)

    @property
    def form_name(self):
        return "ragged" if self.kind == "ragged" else self.form

    @property
    def qo_lens(self):
        return [qo for qo, _ in self.lens]

    @property
    def kv_lens(self):
        return [kv for _, kv in self.lens]

    @property
    def table_entries(self):
        """Pages of all requests."""
        return sum(-(-kv // self.page) for kv in self.kv_lens)

    def for_cpu(self):
        """What of it the CPU runs: fewer requests with fewer rows and then fewer keys, where it is too large, and some
        of its layers."""
        layers = random.Random(f"{seed()} {self}").sample(self.layers, min(LAYERS_ON_CPU, len(self.layers)))
        problem = replace(self, num_pages=min(self.num_pages, 512), layers=tuple(layers))
        while problem.work() > MOST_ON_CPU[0] or problem.numbers() > MOST_ON_CPU[1]:
            problem = replace(problem, lens=problem.shorter_lens())
            if problem.prefix:
                problem = replace(problem, prefix=min(problem.prefix, shared_by_all(problem)))
        return problem

    def shorter_lens(self):
        """Half of the requests, of their rows, or of their keys: the first that is more than enough."""
        if len(self.lens) > 4:
            return self.lens[: (len(self.lens) + 1) // 2]
        if max(self.qo_lens) > 20 and all(kv >= qo for qo, kv in self.lens):
            return tuple((qo - qo // 2, kv - qo // 2) for qo, kv in self.lens)
        return tuple(((qo + 1) // 2, (kv + 1) // 2) for qo, kv in self.lens)

    def work(self):
        return sum(qo * kv for qo, kv in self.lens) * self.heads * (self.dim + self.width_vo) * self.runs

    def numbers(self):
        return sum(self.kv_lens) * self.kv_heads * self.dim


def shared_by_all(problem):
    """The whole pages that all requests have before their new tokens."""
    return max(min(kv - qo for qo, kv in problem.lens), 0) // problem.page * problem.page


def lens_of(case):
    """Lengths of a table's row: `lens`, or `batch`, `qo` and `kv`.

    With `varlen` keys are drawn around kv as the peers do it; with `zeros` some requests have none.
    """
    if "lens" in case:
        return tuple(case.pop("lens"))
    batch, qo, kv = (case.pop(name) for name in ("batch", "qo", "kv"))
    varlen, zeros = case.pop("varlen", False), case.pop("zeros", False)
    kv_lens = np.full(batch, kv)
    rng = np.random.default_rng(zlib.crc32(repr((batch, qo, kv)).encode()))
    if varlen:
        kv_lens = rng.normal(kv, kv / 2, batch).astype(int).clip(min(qo, kv), 2 * kv)
    if zeros:
        kv_lens[rng.random(batch) < 0.3] = 0
        kv_lens[:1] = 0
    return tuple((qo, int(length)) for length in kv_lens)


def problem_of(case):
    """The problem of a table's row."""
    case = dict(case)
    lens = lens_of(case)
    if "latent" in case:
        case["dim"] = case["latent"] + case.pop("rope")
    return Problem(lens=lens, **case)


class Runner:
    """A device to run problems on.

    Attributes:
        failures: what went wrong; whoever asks for checks looks at it.
    """

    def __init__(self, device):
        self.device = device
        self.context = folio.Context(device, **({"num_threads": 2} if device == "cpu" else {}))
        self.stream, self.failures = None, []
        if device == "cuda":
            # Not the default stream, which waits for all others.
            self.stream, self.stream_before = torch.cuda.Stream(), torch.cuda.current_stream()
            torch.cuda.set_stream(self.stream)

    def close(self):
        if self.stream:
            self.stream.synchronize()
            torch.cuda.set_stream(self.stream_before)
        self.context.close()

    def check_all(self, problems, tolerance):
        """Compares problems with the formula, those of one handle after each other; how many runs that was."""
        if self.device == "cpu":
            problems = [problem.for_cpu() for problem in problems]
            tolerance = replace(tolerance, lse_atol=max(tolerance.lse_atol, SCORES_ON_CPU))
        runs = sum(self.attempt(self.check_alike, *group, tolerance) for group in by_handle(problems))
        if self.device == "cuda":
            # The next grid has tensors of other sizes.
            torch.cuda.empty_cache()
        return runs

    def check_alike(self, kind, desc, problems, tolerance):
        """Those of one handle."""
        with kind(self.context, **desc) as handle:
            return sum(self.attempt(self.check, handle, problem, tolerance) for problem in problems)

    def attempt(self, check, *arguments):
        """What a check returns. If it fails, that is noted, and the next ones are made nevertheless."""
        try:
            return check(*arguments)
        except (AssertionError, folio.Error) as failure:
            self.failures.append(f"{type(failure).__name__}: {failure}")
            return 0

    def check(self, handle, problem, tolerance):
        """Compares all layers of a problem with the formula; how many runs that was."""
        attempt = Attempt(self, handle, problem)
        for layer in problem.layers:
            attempt.check(layer, tolerance)
        return len(problem.layers) * problem.runs


#: Handles by what a problem says of its kind.
HANDLES = {
    "decode": folio.Decode,
    "prefill": folio.Prefill,
    "ragged": folio.Prefill,
    "extend": folio.Prefill,
    "cascade": folio.Cascade,
}


def by_handle(problems):
    """`(class, desc, problems)` of each handle.

    Problems that differ in lengths alone share one, with the maxima of all. The most rows of a request are an
    exception: kernels are chosen by them.
    """
    alike = {}
    for problem in problems:
        kind, fixed, maxima = desc_of(problem)
        group = alike.setdefault((kind.__name__, *fixed.items()), (kind, fixed, [], []))
        group[2].append(maxima)
        group[3].append(problem)
    for kind, fixed, maxima, members in alike.values():
        yield kind, {**fixed, **{name: max(each[name] for each in maxima) for name in maxima[0]}}, members


def desc_of(problem):
    """The class of a problem's handle, what it is made from, and the maxima of that."""
    desc = {
        "q_dtype": problem.dtype,
        "kv_dtype": problem.kv_dtype,
        "o_dtype": problem.o_dtype,
        "max_qo_len": max(max(problem.qo_lens), 1),
    }
    maxima = {"max_batch_size": len(problem.lens), "max_kv_len": max(*problem.kv_lens, 1)}
    if problem.kind != "ragged":
        desc["page_size"] = problem.page
        maxima["max_num_pages"] = max(problem.table_entries, 1)
    if problem.latent:
        desc.update(
            cache_format=problem.cache_format,
            num_heads=problem.heads // problem.kv_heads,
            kv_lora_rank=problem.latent,
            qk_rope_head_dim=problem.dim - problem.latent,
        )
        return folio.Mla, desc, maxima
    desc.update(
        num_qo_heads=problem.heads,
        num_kv_heads=problem.kv_heads,
        head_dim_qk=problem.dim,
        head_dim_vo=problem.width_vo,
        kv_layout=problem.layout,
        kv_format=problem.kv_format,
    )
    if problem.kind != "decode":
        maxima["max_num_tokens"] = sum(problem.qo_lens)
    if problem.kind == "ragged":
        desc["kv_storage"] = "ragged"
    if problem.kind == "extend":
        desc["new_kv_dtype"] = problem.dtype
    return HANDLES[problem.kind], desc, maxima


class Attempt:
    """A problem on its way: tensors, and a handle with a plan."""

    def __init__(self, runner, handle, problem):
        self.runner, self.problem, self.device = runner, problem, runner.device
        seed = zlib.crc32(repr(problem).encode())
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator(runner.device).manual_seed(seed)
        self.pages = self._pages()
        self.storage = storage_of(problem)(self.generator, self.pages, problem)
        self.qo_indptr = batches.indptr(problem.qo_lens)
        self.q = batches.numbers(
            self.generator,
            (int(self.qo_indptr[-1]), problem.heads, problem.dim),
            getattr(torch, problem.dtype),
            problem.q_amplitude or problem.amplitude,
            problem.mean,
        )
        self.slopes = torch.exp2(-8 * torch.arange(1, problem.heads + 1, device=self.device) / problem.heads)
        self.sinks = torch.rand(problem.heads, generator=self.generator, device=self.device) * 5
        self.handle = handle
        self._plan()

    def _pages(self):
        problem = self.problem
        if problem.kind == "ragged":
            return batches.Pages.in_order(problem.kv_lens)
        return batches.Pages(
            self.rng,
            problem.kv_lens,
            problem.page,
            most_tokens=batches.MOST_NUMBERS[self.device] // (problem.kv_heads * problem.dim),
            at_least=problem.num_pages,
            prefix=problem.prefix,
        )

    def _plan(self):
        problem = self.problem
        lengths = {"qo_indptr": self.qo_indptr}
        if isinstance(self.handle, (folio.Decode, folio.Mla)) and len(set(problem.qo_lens)) == 1:
            lengths = {"qo_len": problem.qo_lens[0]}
        cached = [kv - qo for qo, kv in problem.lens] if problem.kind == "extend" else None
        shared = {"prefixes": {"common_prefix_len": problem.prefix}} if problem.kind == "cascade" else {}
        self.handle.plan(**lengths, **self.pages.form(problem.form_name, cached), **shared, stream=self.runner.stream)

    # --- Runs -------------------------------------------------------------------------------------

    def check(self, layer, tolerance):
        """Runs a layer as often as the problem says, to the same bits, and compares it with the formula."""
        o, lse = self.run(layer)
        for _ in range(self.problem.runs - 1):
            again = self.run(layer)
            assert torch.equal(bits(again[0]), bits(o)) and torch.equal(bits(again[1]), bits(lse)), "other bits"
        finite = (o.float() if o.dtype in batches.FP8 else o).isfinite().all() & ~lse.isnan().any()
        found = torch.stack([finite.double(), *self.compare(layer, o, lse, tolerance)]).tolist()
        names = ("all outputs finite", "outputs beyond tolerance", "lse beyond tolerance", "cosine")
        limits = (1 - found[0], found[1], found[2], found[3] - tolerance.cosine)
        wrong = [f"{name}: {value}" for name, value, by in zip(names, found, limits) if not by <= 0]
        assert not wrong, f"{'; '.join(wrong)}; {layer} of {self.problem}"

    def run(self, layer):
        problem = self.problem
        o_dtype = getattr(torch, problem.o_dtype or problem.dtype)
        o = torch.full((*self.q.shape[:2], problem.width_vo), torch.nan, device=self.device, dtype=o_dtype)
        lse = torch.full(self.q.shape[:2], torch.nan, device=self.device)
        if problem.latent:
            self._run_latent(layer, o, lse)
            return o, lse
        options = {}
        if problem.kind == "extend":
            options = self.storage.new_rows(self._new_slots())
        self.handle.run(
            q=self.q, o=o, lse=lse, sm_scale=self.scale, **self.storage.arguments(), **self._options(layer), **options
        )
        return o, lse

    def _run_latent(self, layer, o, lse):
        """Each KV head with its query heads is a run of its own: the peers' several KV heads are views."""
        latent, group = self.problem.latent, self.problem.heads // self.problem.kv_heads
        for head in range(self.problem.kv_heads):
            of = slice(head * group, (head + 1) * group)
            self.handle.run(
                q_latent=self.q[:, of, :latent],
                q_rope=self.q[:, of, latent:] if self.problem.dim > latent else None,
                o=o[:, of],
                lse=lse[:, of],
                sm_scale=self.scale,
                mask_mode=layer.mask,
                q_scale=layer.q_scale,
                k_scale=layer.k_scale,
                **self.storage.arguments(head),
            )

    @property
    def scale(self):
        return self.problem.scale or self.problem.dim**-0.5

    def _options(self, layer):
        options = {"q_scale": layer.q_scale, "k_scale": layer.k_scale, "v_scale": layer.v_scale}
        if layer.window:
            options.update(flags="window", window_left=layer.window[0], window_right=layer.window[1])
        if layer.cap:
            options["logits_soft_cap"] = layer.cap
        if layer.alibi:
            options["alibi_slopes"] = self.slopes
        if layer.sinks:
            options["sinks"] = self.sinks
        if layer.o_scale != 1:
            options["o_scale"] = layer.o_scale
        if layer.mask in ("bytes", "bits"):
            return {**options, "mask_mode": f"custom_{layer.mask}", "custom_mask": self._mask(layer.mask == "bits")}
        return {**options, "mask_mode": layer.mask}

    def _mask(self, packed):
        """The causal mask, as a caller writes it."""
        return torch.cat([causal_mask(qo, kv, packed, self.device) for qo, kv in self.problem.lens])

    def _new_slots(self):
        qo_lens, kv_lens = np.array(self.problem.lens, np.int64).T
        request = np.repeat(np.arange(len(qo_lens)), qo_lens)
        token = np.arange(len(request)) - self.qo_indptr[request] + (kv_lens - qo_lens)[request]
        page = self.problem.page
        slots = self.pages.tables[request, token // page].astype(np.int64) * page + token % page
        return torch.from_numpy(slots).to(self.device)

    # --- Comparison -------------------------------------------------------------------------------

    def compare(self, layer, o, lse, tolerance):
        """How far outputs and lse exceed the tolerance, and the cosine's difference, over the rows of a sample."""
        problem = self.problem
        width = problem.kv_heads * (problem.dim + problem.width_vo)
        chunks = batches.sample(
            self.rng, problem.qo_lens, problem.kv_lens, heads=problem.heads, width=width, budget=BUDGET[self.device]
        )
        zero = torch.zeros((), device=self.device, dtype=torch.float64)
        if not chunks:
            return zero, zero, zero
        parts = [self._compare_part(layer, o, lse, tolerance, *part) for part in chunks]
        o_excess, lse_excess, products, squares = torch.stack(parts).unbind(1)
        return o_excess.max(), lse_excess.max(), 1 - 2 * products.sum() / squares.sum().clamp(min=1e-300)

    def _compare_part(self, layer, o, lse, tolerance, requests, rows):
        at, present, positions = self._rows(requests, rows)
        want, want_lse = self._formula(layer, requests, at, positions)
        got, got_lse = o[at].to(torch.float32).double() * layer.o_scale, lse[at].double()
        got, want, got_lse, want_lse = (x[present] for x in (got, want, got_lse, want_lse))
        # Infinities of one sign have no difference.
        got_lse = torch.where(got_lse == want_lse, 0.0, got_lse - want_lse)
        want_lse = torch.where(want_lse.isinf(), 0.0, want_lse)
        return torch.stack(
            [
                tolerance.excess(got, want, tolerance.atol, tolerance.rtol),
                tolerance.excess(got_lse + want_lse, want_lse, tolerance.lse_atol, tolerance.lse_rtol),
                (got * want).sum(),
                got.square().sum() + want.square().sum(),
            ]
        )

    def _rows(self, requests, rows):
        """Where rows of requests are in q, which of them there are, and their positions."""
        lens = np.array(self.problem.lens)[requests]
        at = self.qo_indptr[requests][:, None].astype(np.int64) + np.maximum(rows, 0)
        positions = (lens[:, 1] - lens[:, 0])[:, None] + np.maximum(rows, 0)
        return [torch.from_numpy(x).to(self.device) for x in (at, rows >= 0, positions)]

    def _formula(self, layer, requests, at, positions):
        problem = self.problem
        lengths = self.pages.kv_lens[requests]
        slots = self.pages.slots_of(requests, max(int(lengths.max()), 1), self.device)
        k, v = self.storage.rows(slots)
        if not lengths.any():
            k, v = torch.zeros_like(k), torch.zeros_like(v)
        want, lse = formula.attend(
            self.q[at].to(torch.float32).double(),
            k,
            v,
            positions=positions,
            lengths=torch.from_numpy(lengths).to(self.device),
            scale=self.scale * layer.q_scale * layer.k_scale,
            mask="full" if layer.mask == "full" else "causal",
            window=layer.window,
            cap=layer.cap,
            slopes=self.slopes if layer.alibi else None,
            sinks=self.sinks if layer.sinks else None,
        )
        return want.mul_(layer.k_scale if problem.latent else layer.v_scale), lse


def bits(tensor):
    """A tensor's bits as integers, which compare equal where NaN would not."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


@functools.lru_cache(maxsize=2)
def causal_mask(qo_len, kv_len, packed, device):
    """A request's causal mask: a byte for each row and key, or a bit, in little-endian bytes."""
    keys = torch.arange(kv_len, device=device)
    mask = (keys <= torch.arange(qo_len, device=device)[:, None] + (kv_len - qo_len)).flatten().to(torch.uint8)
    if not packed:
        return mask
    mask = torch.nn.functional.pad(mask, (0, -len(mask) % 8)).view(-1, 8)
    return (mask << torch.arange(8, device=device, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def seed():
    """What the sample for the CPU is drawn from, as in `make test SEED=7`."""
    return int(os.environ.get("FOLIO_GRIDS_SEED", "1"))
