"""Attention by its formula in float64, for many requests at once, on the device of the tensors.

It is the oracle of the grids. `oracle.py` says the same one row at a time, and test_grids.py compares the two.
"""

from __future__ import annotations

import torch


def attend(q, k, v, *, positions, lengths, scale, mask="causal", window=None, cap=0.0, slopes=None, sinks=None):
    """Outputs `[n, rows, heads, dim_vo]` and lse `[n, rows, heads]` of n requests.

    Args:
        q: `[n, rows, heads, dim_qk]`.
        k, v: `[n, keys, kv_heads, dim]`; what is behind a request's length must be finite.
        positions: `[n, rows]`.
        lengths: `[n]` keys of each request.
        window: how many keys a row sees to its left and to its right, beside its own; -1: all.
        slopes, sinks: `[heads]`.
    """
    n, rows, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    q = q.reshape(n, rows, kv_heads, group, dim).permute(0, 2, 1, 3, 4).reshape(n, kv_heads, rows * group, dim)
    scores = torch.matmul(q, k.permute(0, 2, 3, 1)).mul_(scale).view(n, kv_heads, rows, group, keys)
    if cap:
        scores.div_(cap).tanh_().mul_(cap)
    # How far a key is to the right of the row.
    ahead = torch.arange(keys, device=q.device) - positions[..., None]
    if slopes is not None:
        scores += slopes.double().view(1, kv_heads, 1, group, 1) * ahead[:, None, :, None]
    hidden = ~visible(ahead, lengths, mask, window)
    scores.masked_fill_(hidden[:, None, :, None], -torch.inf)

    top = scores.amax(-1)
    sink = None if sinks is None else sinks.double().view(1, kv_heads, 1, group)
    if sink is not None:
        top = torch.maximum(top, sink)
    top.nan_to_num_(neginf=0.0)
    weights = scores.sub_(top[..., None]).exp_()
    total = weights.sum(-1)
    if sink is not None:
        total = total + (sink - top).exp()
    o = torch.matmul(weights.view(n, kv_heads, rows * group, keys), v.permute(0, 2, 1, 3))
    o = o.view(n, kv_heads, rows, group, -1) / torch.where(total > 0, total, 1.0)[..., None]
    lse = top + total.log()
    o, lse = o.transpose(1, 2), lse.transpose(1, 2)
    return o.reshape(n, rows, heads, -1), lse.reshape(n, rows, heads)


def visible(ahead, lengths, mask, window):
    """`[n, rows, keys]`: which keys a row sees, of keys that are `ahead` of it."""
    keys = torch.arange(ahead.shape[-1], device=ahead.device)
    seen = (keys < lengths[:, None])[:, None].expand(ahead.shape)
    if mask == "causal":
        seen = seen & (ahead <= 0)
    left, right = window or (-1, -1)
    if left >= 0:
        seen = seen & (ahead >= -left)
    if right >= 0:
        seen = seen & (ahead <= right)
    return seen
