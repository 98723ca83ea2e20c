"""Folio: attention over paged KV caches, on CPUs and NVIDIA GPUs.

Handles (`Decode`, `Prefill`, `Cascade`, `Mla`, `MlaContext`) are made once per problem, planned once per step and run
once per layer. Operators (`kv_append`, `merge_state`, …) are functions of a `Context`. Every argument has the name of
the C struct's field, and means what folio.h says.

    ctx = folio.Context("cpu", num_threads=4)
    decode = folio.Decode(ctx, q_dtype="float32", num_qo_heads=32, num_kv_heads=8, head_dim_qk=128, page_size=16,
                          max_batch_size=64, max_kv_len=8192)
    decode.plan(kv_len=kv_len, block_table=block_table)
    decode.run(q=q, k=k_cache, v=v_cache, o=o)

Tensors are those of torch, NumPy, Paddle, JAX, CuPy and of all that has DLPack or an array interface. They are never
copied, and outputs are always the caller's. Failures are exceptions with one sentence: see `Error`.
"""

from folio._calls import Call as Call
from folio._calls import Figure as Figure
from folio._calls import prepare as prepare
from folio._context import Context as Context
from folio._context import device_count as device_count
from folio._errors import Error as Error
from folio._generated.constants import *  # noqa: F403
from folio._generated.errors import *  # noqa: F403
from folio._generated.handles import *  # noqa: F403
from folio._generated.operators import *  # noqa: F403
from folio._generated.types import Batch as Batch
from folio._generated.types import SharedPrefixes as SharedPrefixes
from folio._handle import Workspace as Workspace
from folio._handle import WorkspaceInfo as WorkspaceInfo
from folio._library import mla_context_tokens as mla_context_tokens
from folio._library import version as version
from folio._tensors import Tensor as Tensor
from folio._tensors import TensorLike as TensorLike

__version__ = version()
