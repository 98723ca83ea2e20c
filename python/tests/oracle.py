"""Attention by its formula, in float64: what folio.h says of folio_attention_args, one row and one head at a time."""

from __future__ import annotations

from typing import Callable, Optional

import numpy as np


def softmax_sum(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
    """Output and lse of one row: scores `[n]`, values `[n, d]`."""
    if len(scores) == 0:
        return np.zeros(values.shape[-1]), -np.inf
    top = scores.max()
    weights = np.exp(scores - top)
    return weights @ values / weights.sum(), float(top + np.log(weights.sum()))


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    sm_scale: Optional[float] = None,
    sees: Callable[[int, int], bool] = lambda p, j: j <= p,
    soft_cap: float = 0,
    slopes: Optional[np.ndarray] = None,
    sinks: Optional[np.ndarray] = None,
    bias: Optional[Callable[[int, int, int], float]] = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Output `[qo_len, heads, dim_vo]` and lse `[qo_len, heads]` of one request.

    Args:
        q: `[qo_len, num_qo_heads, dim_qk]`.
        k: `[kv_len, num_kv_heads, dim_qk]`.
        v: `[kv_len, num_kv_heads, dim_vo]`.
        sees: whether the row at position p sees key j; causal by default.
        bias: what is added to the logit of a head, the row at position p and key j.
    """
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    qo_len, heads, dim = q.shape
    group = heads // k.shape[1]
    scale = 1 / np.sqrt(dim) if sm_scale is None else sm_scale
    o = np.zeros((qo_len, heads, v.shape[2]))
    lse = np.zeros((qo_len, heads))
    for i in range(qo_len):
        p = len(k) - qo_len + i
        seen = np.array([j for j in range(len(k)) if sees(p, j)], dtype=int)
        for h in range(heads):
            scores = k[seen, h // group] @ q[i, h] * scale
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            if slopes is not None:
                scores = scores + slopes[h] * (seen - p)
            if bias is not None:
                scores = scores + np.array([bias(h, p, j) for j in seen], dtype=np.float64)
            values = v[seen, h // group]
            if sinks is not None:
                scores, values = np.append(scores, sinks[h]), np.vstack([values, np.zeros((1, v.shape[2]))])
            o[i, h], lse[i, h] = softmax_sum(scores, values)
    return o, lse
