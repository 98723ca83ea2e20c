"""Quantised caches: random bytes, scales and zero points of every kind, and the numbers that they stand for."""

from dataclasses import dataclass

import numpy as np
import paddle

from steps import array, tensor


def e4m3(codes):
    """Subnormals included; codes of NaN are not made."""
    codes = codes.astype(int)
    sign, exponent, mantissa = np.where(codes & 0x80, -1.0, 1.0), (codes >> 3) & 15, codes & 7
    return sign * np.where(exponent, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0 ** -6)


def int8(codes):
    return codes.view(np.int8).astype(float)


def int4(codes):
    """Two elements in a byte, the first in its low bits."""
    halves = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1).astype(int)
    return np.where(halves > 7, halves - 16, halves).astype(float)


@dataclass
class Format:
    """scale_size: 1, "heads" or "channels"."""
    quant: str
    scale_size: object
    scale_dtype: str = "float32"

    def fill(self, layer, seed=1):
        """Gives a layer caches of this kind, in the place of its plain ones."""
        rng, shape = np.random.default_rng(seed), list(layer.k_cache.shape)
        heads, dim = shape[1], shape[3]
        count = {"heads": heads, "channels": heads * dim}.get(self.scale_size, self.scale_size)
        if self.quant == "cache_int4_zp":
            shape[3] //= 2
        top = 0x50 if self.quant == "cache_fp8" else 256
        layer.k_cache, layer.v_cache = (paddle.to_tensor(rng.integers(0, top, shape), dtype="uint8") for _ in range(2))
        size = {"cache_fp8": 0.25, "cache_int8": 1 / 32, "cache_int4_zp": 0.4}[self.quant]
        self.scales = [tensor(size * rng.uniform(0.5, 2, count), self.scale_dtype) for _ in range(2)]
        self.zero_points = [None, None]
        if self.quant == "cache_int4_zp":
            self.zero_points = [tensor(rng.uniform(-2, 2, count), self.scale_dtype) for _ in range(2)]
        self.shape = heads, dim
        return dict(quant=self.quant, scales=self.scales, zero_points=self.zero_points)

    def factors(self, given):
        """[heads, 1, dim], to stand beside [pages, heads, page_size, dim]."""
        heads, dim = self.shape
        values = array(given)
        rows = 1 if values.size == 1 else heads
        return np.broadcast_to(values.reshape(rows, -1), (heads, dim))[:, None, :]

    def decoded(self, layer):
        """Both caches as numbers."""
        decode = {"cache_fp8": e4m3, "cache_int8": int8, "cache_int4_zp": int4}[self.quant]
        return [(decode(cache.numpy()) - (0 if zero is None else self.factors(zero))) * self.factors(scale)
                for cache, scale, zero in zip((layer.k_cache, layer.v_cache), self.scales, self.zero_points)]

    def nearest(self, x, part):
        """What x [heads, dim] may be read back as: the nearest number, and how far off it may be."""
        scale = self.factors(self.scales[part])[:, 0]
        if self.quant == "cache_fp8":
            return x, np.abs(x) * 2 ** -4 + scale * 2 ** -10
        zero = 0 if self.zero_points[part] is None else self.factors(self.zero_points[part])[:, 0]
        low, high = (-127, 127) if self.quant == "cache_int8" else (-8, 7)
        return np.clip(x, (low - zero) * scale, (high - zero) * scale), scale * 0.5001


FORMATS = [Format("cache_fp8", 1), Format("cache_fp8", "heads"), Format("cache_int8", 1), Format("cache_int8", "heads"),
           Format("cache_int8", "channels"), Format("cache_int8", "channels", "bfloat16"), Format("cache_int4_zp", "channels"),
           Format("cache_int4_zp", "heads", "float16")]
