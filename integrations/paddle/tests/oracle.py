"""Attention and its neighbours in float64, one row after the other."""

import numpy as np


def attention(q, k, v, scale, causal=True, window=0, sink=None, offsets=None, sink_size=0):
    """
    q [n, d], k [m, d], v [m, w] of one head; the last row of q sees the last key. sink: one more logit without a value.
    offsets [n, 2]: the first key of a row and the one behind its last, in place of causality; the first sink_size of those
    are in every window.
    """
    n, m = len(q), len(k)
    out = np.zeros((n, v.shape[1]))
    for i in range(n):
        position = m - n + i
        first = max(0, position - window + 1) if window else 0
        last = position + 1 if causal else m
        keys = np.arange(first, last)
        if offsets is not None:
            keys = np.arange(offsets[i, 0], min(offsets[i, 1], m))
            if window:
                keys = keys[(keys < offsets[i, 0] + sink_size) | (keys >= offsets[i, 1] - window)]
        if len(keys) == 0:
            continue
        logits = k[keys] @ q[i] * scale
        shift = max(logits.max(), sink if sink is not None else -np.inf)
        weights = np.exp(logits - shift)
        total = weights.sum() + (np.exp(sink - shift) if sink is not None else 0)
        out[i] = weights @ v[keys] / total
    return out


def rope(x, positions, table, neox):
    """x [T, H, d]; table [2, max_len, d / 2]."""
    half = x.shape[-1] // 2
    cos, sin = (table[part][positions][:, None, :] for part in (0, 1))
    left, right = (x[..., :half], x[..., half:]) if neox else (x[..., 0::2], x[..., 1::2])
    a, b = left * cos - right * sin, right * cos + left * sin
    return np.concatenate([a, b], -1) if neox else np.stack([a, b], -1).reshape(x.shape)


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
