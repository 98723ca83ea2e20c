"""Folio's PyTorch operators against scaled_dot_product_attention, on the CPU and, where there is one, a GPU.

    python3 test_folio_torch.py PREFIX    # where Folio is installed
"""

import sys
import unittest
from pathlib import Path

import torch
from torch.utils import cpp_extension

QO_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, POOL_PAGES = 8, 2, 64, 16, 40
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def load(prefix):
    prefix = Path(prefix).resolve()
    library = str(next(prefix.rglob("libfolio.so")).parent)
    cpp_extension.load(
        name="folio_torch",
        sources=[str(Path(__file__).with_name("folio_torch.cpp"))],
        extra_include_paths=[str(prefix / "include")],
        extra_ldflags=[f"-L{library}", "-lfolio", f"-Wl,-rpath,{library}"],
        is_python_module=False,
    )


class Cache:
    """Requests of given lengths in a paged cache, written by folio::append, and the same keys in the clear."""

    def __init__(self, lengths, dtype, device):
        torch.manual_seed(1)
        shape = (POOL_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        # What no request owns must not show.
        self.k = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.v = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.keys, self.values = [], []
        self.kv_len = torch.tensor(lengths, dtype=torch.int32)
        width = max((n + PAGE_SIZE - 1) // PAGE_SIZE for n in lengths)
        pages = torch.randperm(POOL_PAGES, dtype=torch.int32)[: len(lengths) * width]
        self.block_table = pages.reshape(len(lengths), width).contiguous()
        for row, length in zip(self.block_table, lengths):
            # Slices of one fused projection: their strides are not compact.
            kv = torch.randn(length, 2, KV_HEADS, HEAD_DIM, device=device).to(dtype)
            token = torch.arange(length)
            slots = row[token // PAGE_SIZE].long() * PAGE_SIZE + token % PAGE_SIZE
            torch.ops.folio.append(kv[:, 0], kv[:, 1], self.k, self.v, slots.to(device))
            self.keys.append(kv[:, 0])
            self.values.append(kv[:, 1])


def expected(q, key, value, window_left=-1):
    """Attention of the last q.size(0) tokens of a request, in float32."""
    rows, length = q.size(0), key.size(0)
    position = torch.arange(length - rows, length, device=q.device)[:, None]
    token = torch.arange(length, device=q.device)[None, :]
    mask = token <= position
    if window_left >= 0:
        mask &= position - token <= window_left
    o = torch.nn.functional.scaled_dot_product_attention(
        q.float().transpose(0, 1),
        key.float().transpose(0, 1),
        value.float().transpose(0, 1),
        attn_mask=mask,
        enable_gqa=True,
    )
    return o.transpose(0, 1)


class FolioTorch(unittest.TestCase):
    def check(self, make, rows, lengths, window_left=-1):
        for device in DEVICES:
            for dtype, tolerance in TOLERANCE.items():
                with self.subTest(device=device, dtype=dtype):
                    cache = Cache(lengths, dtype, device)
                    q = torch.randn(sum(rows), QO_HEADS, HEAD_DIM, device=device).to(dtype)
                    qo_indptr = torch.tensor([0, *rows]).cumsum(0).int()
                    handle = make(dtype, torch.device(device))
                    handle.plan(qo_indptr, cache.block_table, cache.kv_len)
                    o, _ = handle.run(q, cache.k, cache.v, 0.0, True, window_left)
                    want = [
                        expected(part, key, value, window_left)
                        for part, key, value in zip(q.split(rows), cache.keys, cache.values)
                    ]
                    torch.testing.assert_close(o.float(), torch.cat(want), rtol=tolerance, atol=tolerance)

    def test_decode(self):
        def make(dtype, device):
            return torch.classes.folio.Decode(dtype, QO_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, 8, 512, device)

        self.check(make, [1, 1, 1], [100, 16, 1])
        self.check(make, [1, 1], [100, 33], window_left=20)

    def test_mixed_prefill(self):
        def make(dtype, device):
            return torch.classes.folio.Prefill(dtype, QO_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, 8, 512, 64, device)

        self.check(make, [30, 7, 1], [30, 90, 41])
        self.check(make, [9, 5], [9, 70], window_left=16)

    def test_merge(self):
        for device in DEVICES:
            with self.subTest(device=device):
                o = torch.randn(2, 5, QO_HEADS, HEAD_DIM, device=device)
                lse = torch.randn(2, 5, QO_HEADS, device=device)
                lse[1, 2] = -torch.inf  # an empty state changes nothing
                merged, merged_lse = torch.ops.folio.merge(o[0], lse[0], o[1], lse[1])
                weights = lse.softmax(0)[..., None]
                torch.testing.assert_close(merged, (weights * o).sum(0), rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(merged_lse, lse.logsumexp(0), rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(merged[2], o[0, 2])

    def test_errors_are_exceptions(self):
        with self.assertRaisesRegex(RuntimeError, "head_dim_qk: 7"):
            torch.classes.folio.Decode(torch.float32, 2, 2, 7, PAGE_SIZE, 8, 512, torch.device("cpu"))


if __name__ == "__main__":
    load(sys.argv.pop(1))
    unittest.main()
