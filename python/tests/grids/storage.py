"""Caches of the grids in the forms that Folio reads: what a run is given of each, and its rows in float64."""

from __future__ import annotations

import numpy as np
import torch

from grids.batches import cache, numbers, rows_of

#: The numbers that four bits of e2m1 stand for.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Latent elements of an fp8_ds_mla record that share a scale.
TILE = 128


class Plain:
    """Keys and values in pages of their own, of NHD or HND, or ragged."""

    def __init__(self, generator, pages, problem):
        of = {"amplitude": problem.amplitude, "mean": problem.mean}
        dtype = problem.stored
        self.k = cache(generator, pages, (problem.kv_heads, problem.dim), dtype, **of)
        self.v = cache(generator, pages, (problem.kv_heads, problem.width_vo), dtype, **of)
        self.hnd, self.ragged = problem.layout == "hnd", problem.kind == "ragged"

    def rows(self, slots):
        return rows_of(self.k, slots), rows_of(self.v, slots)

    def new_rows(self, slots):
        """Rows as they are, for keys beside the cache."""
        return {"k_new": self.k.flatten(0, 1)[slots], "v_new": self.v.flatten(0, 1)[slots]}

    def arguments(self):
        if self.ragged:
            return {"k": self.k.flatten(0, 1), "v": self.v.flatten(0, 1)}
        if self.hnd:
            # Both are views of memory that lies in this order.
            return {"k": self.k.transpose(1, 2).contiguous(), "v": self.v.transpose(1, 2).contiguous()}
        return {"k": self.k, "v": self.v}


class Latent:
    """MLA's records: `[pages, page_size, kv_heads, latent + rope]`, as the peers that have several heads keep them."""

    def __init__(self, generator, pages, problem):
        row = (problem.kv_heads, problem.dim)
        self.kv = cache(generator, pages, row, problem.stored, problem.amplitude, problem.mean)
        self.latent, self.split = problem.latent, problem.split

    def rows(self, slots):
        records = rows_of(self.kv, slots)
        return records, records[..., : self.latent]

    def arguments(self, head):
        records = self.kv[:, :, head]
        if self.split:
            return {"kv": records[..., : self.latent], "kv_rope": records[..., self.latent :]}
        return {"kv": records}


class DsMla:
    """fp8_ds_mla records of 656 bytes: 512 of e4m3, four scales in float32, 64 rotary elements in bfloat16."""

    def __init__(self, generator, pages, problem):
        count = pages.count * pages.page_size
        latent = numbers(generator, (count, 4, TILE), torch.float32, problem.amplitude)
        # The tiles of a record are of different sizes.
        latent *= torch.rand((count, 4, 1), generator=generator, device=generator.device) * 0.95 + 0.05
        self.records = ds_mla_records(latent, numbers(generator, (count, 64), torch.bfloat16, problem.amplitude))
        unused = torch.ones(count, dtype=torch.bool, device=generator.device)
        unused[torch.from_numpy(pages.slots).to(generator.device)] = False
        # 0xff is a NaN of all three types.
        self.records[unused] = 0xFF
        self.kv = self.records.view(pages.count, pages.page_size, 656)

    def rows(self, slots):
        records = ds_mla_rows(self.records[slots])[..., None, :]
        return records, records[..., :512]

    def arguments(self, head):
        return {"kv": self.kv}


def ds_mla_records(latent, rope):
    """`[n, 656]` bytes of latent rows `[n, 4, 128]` in float32 and rotary rows in bfloat16."""
    scales = (latent.abs().amax(-1, keepdim=True) / 448).clamp_(min=torch.finfo(torch.float32).tiny)
    parts = (latent / scales).to(torch.float8_e4m3fn).flatten(1), scales.flatten(1), rope
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def ds_mla_rows(records):
    """Records of any shape `[…, 656]` in float64 `[…, 576]`."""
    values = records[..., :512].contiguous().view(torch.float8_e4m3fn).float().double()
    scales = records[..., 512:528].contiguous().view(torch.float32).double()
    rope = records[..., 528:].contiguous().view(torch.bfloat16).double()
    latent = values.unflatten(-1, (4, TILE)) * scales[..., None]
    return torch.cat([latent.flatten(-2), rope], -1)


class Scaled:
    """Rows of codes with scales beside them: int8 or e4m3 with one for each token and head, or NVFP4."""

    def __init__(self, generator, pages, problem):
        self.nvfp4 = problem.kv_format == "nvfp4"
        self.dtype = problem.stored
        self.k, self.k_scales = self._made(generator, pages, problem.kv_heads, problem.dim)
        self.v, self.v_scales = self._made(generator, pages, problem.kv_heads, problem.width_vo)

    def _made(self, generator, pages, heads, dim):
        device, shape = generator.device, (pages.count, pages.page_size, heads)
        if self.nvfp4:
            codes = torch.randint(0, 256, (*shape, dim // 2), generator=generator, device=device, dtype=torch.uint8)
            scales = torch.rand((*shape, dim // 16), generator=generator, device=device) * 0.5 + 0.1
            return codes, mark_unused(scales, pages).to(torch.float8_e4m3fn).view(torch.uint8)
        if self.dtype is torch.int8:
            codes = torch.randint(-127, 128, (*shape, dim), generator=generator, device=device, dtype=torch.int8)
            most = 127
        else:
            # Beyond the largest number of e4m3 torch makes NaN.
            codes, most = numbers(generator, (*shape, dim), torch.float32, 100.0).clamp_(-448, 448).to(self.dtype), 448
        scales = (torch.rand(shape, generator=generator, device=device) + 0.5) * 2 / most
        return codes, mark_unused(scales, pages)

    def rows(self, slots):
        return self._rows(self.k, self.k_scales, slots), self._rows(self.v, self.v_scales, slots)

    def _rows(self, codes, scales, slots):
        codes, scales = codes.flatten(0, 1)[slots], scales.flatten(0, 1)[slots]
        if not self.nvfp4:
            return codes.float().double() * scales.double()[..., None]
        table = torch.tensor([*E2M1, *(-x for x in E2M1)], device=codes.device, dtype=torch.float64)
        values = table[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(-2)
        scales = scales.view(torch.float8_e4m3fn).float().double()
        return (values.unflatten(-1, (-1, 16)) * scales[..., None]).flatten(-2)

    def arguments(self):
        return {"k": self.k, "v": self.v, "k_scales": self.k_scales, "v_scales": self.v_scales}


def mark_unused(scales, pages):
    """Scales of slots that no request has are NaN."""
    unused = np.ones(pages.count * pages.page_size, bool)
    unused[pages.slots] = False
    scales.flatten(0, 1)[torch.from_numpy(unused).to(scales.device)] = torch.nan
    return scales


def storage_of(problem):
    """The class of a problem's cache."""
    if problem.cache_format == "fp8_ds_mla":
        return DsMla
    if problem.latent:
        return Latent
    return Plain if problem.kv_format == "plain" else Scaled
