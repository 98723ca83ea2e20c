"""What the integrations' tests compare with: folio.h's formula of attention in float64, one request at a time."""

import torch


def attention(q, k, v, *, sm_scale, causal=True, window=None, cap=0.0, slopes=None, sinks=None, mask=None):
    """Attention of one request.

    Args:
        q: `[rows, heads, dim]`
        k, v: `[keys, kv_heads, dim]`
        window: (left, right) keys around a row's own position, -1 for unlimited.
        slopes, sinks: `[heads]`
        mask: `[rows, keys]` bool in place of `causal`.

    Returns:
        `o`, `[rows, heads, dim]`, and `lse`, `[rows, heads]`, in float64.
    """
    q, k, v = (tensor.to(torch.float64) for tensor in (q, k, v))
    rows, heads, _ = q.shape
    keys = k.shape[0]
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * sm_scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(keys)[None, :] - (torch.arange(rows)[:, None] + keys - rows)
    if slopes is not None:
        scores = scores + slopes.to(torch.float64)[:, None, None] * distance
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if mask is not None:
        seen = mask
    elif causal:
        seen = distance <= 0
    if window is not None:
        left, right = window
        seen = seen & (distance >= -left if left >= 0 else seen) & (distance <= right if right >= 0 else seen)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.to(torch.float64)[:, None, None].expand(heads, rows, 1)
        scores = torch.cat([scores, sink], dim=-1)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    lse = torch.logsumexp(scores, dim=-1) if scores.shape[-1] else torch.full((heads, rows), -torch.inf)
    weights = torch.where(torch.isneginf(lse)[..., None], 0.0, torch.exp(scores - lse[..., None]))
    return torch.einsum("hij,jhd->ihd", weights, v), lse.transpose(0, 1)


def paged(cache, table, length):
    """The first `length` rows of a request: its pages (`[pages, page_size, …]`) one after the other."""
    return cache[table.long()].flatten(0, 1)[:length]
