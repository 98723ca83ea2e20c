"""A decode step in Python: new tokens into a paged cache, then attention over all of them.

python example.py
"""

import numpy as np

import folio

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
rng = np.random.default_rng(0)

# Once: a device, and a handle for the largest batch that will come.
ctx = folio.Context("cpu", num_threads=2)
decode = folio.Decode(
    ctx,
    q_dtype="float32",
    num_qo_heads=NUM_QO_HEADS,
    num_kv_heads=NUM_KV_HEADS,
    head_dim_qk=HEAD_DIM,
    page_size=PAGE_SIZE,
    max_batch_size=8,
    max_kv_len=4096,
)

# The runtime's cache: 64 pages, of which each request owns those in its row of the block table.
k_cache = rng.standard_normal((64, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM), dtype=np.float32)
v_cache = rng.standard_normal((64, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM), dtype=np.float32)
block_table = np.array([[3, 40, 7], [12, 0, 0]], np.int32)
kv_len = np.array([45, 9], np.int32)  # with the tokens of this step

# Once per step: where the new tokens go, and the batch.
slot_mapping = block_table[[0, 1], (kv_len - 1) // PAGE_SIZE] * PAGE_SIZE + (kv_len - 1) % PAGE_SIZE
decode.plan(kv_len=kv_len, block_table=block_table)

# Once per layer: append, attend.
key, value = rng.standard_normal((2, 2, NUM_KV_HEADS, HEAD_DIM), dtype=np.float32)
q = rng.standard_normal((2, NUM_QO_HEADS, HEAD_DIM), dtype=np.float32)
o = np.empty_like(q)
folio.kv_append(ctx, key=key, value=value, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
decode.run(q=q, k=k_cache, v=v_cache, o=o)

# The same by the formula, for one head.
keys = k_cache[block_table[0]].reshape(-1, NUM_KV_HEADS, HEAD_DIM)[: kv_len[0]]
values = v_cache[block_table[0]].reshape(-1, NUM_KV_HEADS, HEAD_DIM)[: kv_len[0]]
scores = keys[:, 1] @ q[0, 5] / np.sqrt(HEAD_DIM)  # query head 5 reads KV head 5 // (32 / 8) = 1
weights = np.exp(scores - scores.max())
difference = np.abs(o[0, 5] - weights @ values[:, 1] / weights.sum()).max()
print(f"{decode.kernel}: {len(q)} tokens attended, {difference:.1e} from the formula")
assert difference < 1e-5
