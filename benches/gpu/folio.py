"""libfolio through ctypes: the structs of folio.h and a few lines that turn torch tensors into them.

Not a Python package: just what the GPU benchmark and its checks need.
"""

import ctypes as c
import os
import pathlib

import torch

ABI_VERSION = 1
DEVICE_CPU, DEVICE_CUDA, DEVICE_CUDA_HOST = 1, 2, 3
MASK_CAUSAL, MASK_FULL, MASK_BYTES, MASK_BITS, MASK_CAUSAL_BY_REQUEST = range(5)
RUN_WINDOW, RUN_LSE_BASE_2, RUN_MASK_NEW_KEYS = 1, 2, 16
PLAN_GRAPH, PLAN_BATCH_INVARIANT = 1, 2
BATCH_WINDOW = 1
KV_PAGED, KV_RAGGED = 0, 1

u8, u16, u32, i32, i64, u64, f32 = c.c_uint8, c.c_uint16, c.c_uint32, c.c_int32, c.c_int64, c.c_uint64, c.c_float
ptr = c.c_void_p


class DType(c.Structure):
    _fields_ = [("code", u8), ("bits", u8), ("lanes", u16)]


class Tensor(c.Structure):
    _fields_ = [("data", ptr), ("device_type", i32), ("device_id", i32), ("ndim", i32), ("dtype", DType),
                ("shape", c.POINTER(i64)), ("strides", c.POINTER(i64)), ("byte_offset", u64)]


TensorPtr = c.POINTER(Tensor)


class Error(c.Structure):
    _fields_ = [("struct_size", u32), ("status", i32), ("message", c.c_char * 504)]


def sized(name, fields):
    return type(name, (c.Structure,), {"_fields_": [("struct_size", u32), ("flags", u32)] + fields})


def tensors(*names):
    return [(name, TensorPtr) for name in names]


ContextDesc = sized("ContextDesc", [("device_type", i32), ("device_id", i32), ("num_threads", u32), ("log_level", i32),
                                    ("log", ptr), ("log_user", ptr)])
HEADS = [("q_dtype", DType), ("kv_dtype", DType), ("o_dtype", DType), ("kv_layout", i32), ("num_qo_heads", u32),
         ("num_kv_heads", u32), ("head_dim_qk", u32), ("head_dim_vo", u32)]
DecodeDesc = sized("DecodeDesc", HEADS + [("page_size", u32), ("max_batch_size", u32), ("max_qo_len", u32),
                                          ("max_kv_len", u32), ("max_num_pages", u64), ("kv_format", i32),
                                          ("reserved", u32)])
PrefillDesc = sized("PrefillDesc", HEADS + [("kv_storage", i32), ("page_size", u32), ("max_batch_size", u32),
                                            ("max_num_tokens", u32), ("max_qo_len", u32), ("max_kv_len", u32),
                                            ("max_num_pages", u64), ("kv_format", i32), ("new_kv_dtype", DType)])
MlaDesc = sized("MlaDesc", [("q_dtype", DType), ("kv_dtype", DType), ("o_dtype", DType), ("cache_format", i32),
                            ("num_heads", u32), ("kv_lora_rank", u32), ("qk_rope_head_dim", u32), ("page_size", u32),
                            ("max_batch_size", u32), ("max_qo_len", u32), ("max_num_tokens", u32), ("max_kv_len", u32),
                            ("reserved", u32), ("max_num_pages", u64)])
MlaContextDesc = sized("MlaContextDesc", [("dtype", DType), ("kv_dtype", DType), ("cache_format", i32)]
                       + [(name, u32) for name in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                                                   "v_head_dim", "page_size", "max_batch_size", "max_num_tokens",
                                                   "max_qo_len", "max_kv_len", "max_chunk_tokens")]
                       + [("max_num_pages", u64)])
CascadeDesc = sized("CascadeDesc", HEADS + [(name, u32) for name in ("page_size", "max_batch_size", "max_num_tokens",
                                                                     "max_qo_len", "max_kv_len", "max_shared_levels")]
                    + [("max_num_pages", u64)])
Prefixes = sized("Prefixes", [("common_prefix_len", u32), ("num_prefixes", u32), ("request_begin", ptr),
                              ("request_end", ptr), ("kv_len", ptr)])
WorkspaceInfo = sized("WorkspaceInfo", [("device_bytes", u64), ("host_bytes", u64), ("alignment", u64)])
Workspace = sized("Workspace", [("device", ptr), ("device_bytes", u64), ("host", ptr), ("host_bytes", u64)])
Batch = sized("Batch", [("qo_len", u32), ("reserved", u32)] + tensors("qo_indptr", "kv_indptr", "kv_indices",
                                                                       "last_page_len", "kv_len", "block_table")
              + [("window_left", i64)])
Args = sized("Args", tensors("q", "k", "v", "o", "lse", "k_scales", "v_scales", "custom_mask", "mm_prefix_ranges",
                             "alibi_slopes", "sinks")
             + [(name, f32) for name in ("sm_scale", "q_scale", "k_scale", "v_scale", "o_scale", "logits_soft_cap")]
             + [("mask_mode", i32), ("window_left", i32), ("window_right", i32), ("reserved", u32)]
             + tensors("k_rope", "custom_mask_indptr", "causal_requests")
             + [("attention_chunk_size", u32), ("attention_chunk_look_back", u32)]
             + tensors("k_zero_points", "v_zero_points"))
MlaArgs = sized("MlaArgs", tensors("q_latent", "q_rope", "kv", "kv_rope", "o", "lse")
                + [("sm_scale", f32), ("q_scale", f32), ("k_scale", f32), ("mask_mode", i32)])
MlaContextArgs = sized("MlaContextArgs", tensors("q", "k_nope", "k_rope", "v", "kv", "kv_rope", "w_uk", "w_uv",
                                                 "context_latent", "context_rope", "context_k_nope", "context_v", "o",
                                                 "lse") + [("sm_scale", f32), ("k_scale", f32)])
FORMAT = [("k_scale", f32), ("v_scale", f32), ("kv_layout", i32), ("kv_dtype", DType), ("kv_format", i32),
          ("reserved", u32)] + tensors("k_zero_points", "v_zero_points")
AppendArgs = sized("AppendArgs", tensors("key", "value", "k_cache", "v_cache", "slot_mapping", "k_scales", "v_scales")
                   + FORMAT)
CopyArgs = sized("CopyArgs", tensors("k_src", "k_dst", "v_src", "v_dst", "page_pairs"))
RopeAppendArgs = sized("RopeAppendArgs", tensors("q", "q_out", "key", "key_out", "value", "k_cache", "v_cache", "slot_mapping",
                                                 "k_scales", "v_scales", "q_norm_weight", "k_norm_weight", "positions",
                                                 "position_offsets", "cos_sin_cache")
                       + [("k_scale", f32), ("v_scale", f32), ("kv_layout", i32), ("kv_dtype", DType), ("rms_norm_eps", f32),
                          ("rotary_dim", u32), ("rope_theta", f32), ("rope_scale", f32), ("low_freq_factor", f32),
                          ("high_freq_factor", f32), ("old_context_len", u32), ("reserved", u32)])
BatchLengthsArgs = sized("BatchLengthsArgs", tensors("qo_len", "cached_len", "encoder_len", "qo_indptr", "kv_len",
                                                     "kv_indptr", "row_kind"))
KvIndicesArgs = sized("KvIndicesArgs", tensors("block_table", "row_ids", "kv_len", "kv_start", "kv_indptr", "kv_indices",
                                               "last_page_len")
                      + [(name, u32) for name in ("page_size", "indices_page_size", "window", "reserved")])
BlockTableArgs = sized("BlockTableArgs", tensors("kv_indptr", "kv_indices", "block_table") + [("fill", i32), ("reserved", u32)])
SlotMappingArgs = sized("SlotMappingArgs", tensors("block_table", "row_ids", "qo_indptr", "qo_len", "kv_len", "slot_mapping",
                                                   "positions") + [("page_size", u32), ("reserved", u32)])
DraftKvIndicesArgs = sized("DraftKvIndicesArgs", tensors("req_to_token", "row_ids", "kv_len", "kv_indptr", "kv_indices")
                           + [("topk", u32), ("num_steps", u32), ("page_size", u32), ("slot_layout", i32)])
TreeMaskArgs = sized("TreeMaskArgs", tensors("parents", "prefix_lens", "qo_indptr", "mask_bytes", "mask_bits", "tree_mask",
                                             "tree_bits", "positions", "next_token", "next_sibling"))
MergeVarlenArgs = sized("MergeVarlenArgs", tensors("v", "s", "indptr", "v_out", "s_out") + [("o_scale", f32), ("reserved", u32)])
GatherArgs = sized("GatherArgs", tensors("key", "value", "k_cache", "v_cache", "cu_seq_lens", "seq_starts", "block_table",
                                         "kv_indptr", "kv_indices", "k_scales", "v_scales")
                   + FORMAT)
MergeArgs = sized("MergeArgs", tensors("v_a", "s_a", "v_b", "s_b", "v_out", "s_out", "mask"))
AbsorbWeightsArgs = sized("AbsorbWeightsArgs", tensors("kv_b_proj", "w_uk", "w_uv"))
AbsorbQArgs = sized("AbsorbQArgs", tensors("q_nope", "w_uk", "q_latent"))
ProjectOArgs = sized("ProjectOArgs", tensors("o_latent", "w_uv", "out"))
UpProjectArgs = sized("UpProjectArgs", tensors("kv_c", "w_uk", "w_uv", "k_nope", "v"))

OPERATORS = {"rope_append": RopeAppendArgs, "batch_lengths": BatchLengthsArgs, "kv_indices": KvIndicesArgs,
             "block_table": BlockTableArgs, "slot_mapping": SlotMappingArgs, "draft_kv_indices": DraftKvIndicesArgs,
             "tree_mask": TreeMaskArgs, "merge_varlen": MergeVarlenArgs}

DTYPES = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.float8_e4m3fn: (10, 8),
          torch.float8_e5m2: (12, 8), torch.int32: (0, 32), torch.int64: (0, 64), torch.uint8: (1, 8)}


def dtype(torch_dtype):
    return DType(*DTYPES[torch_dtype], 1)


def tensor(t):
    """A pointer to a folio_tensor; the torch tensor must outlive it."""
    rank = t.dim()
    shape, strides = (i64 * rank)(*t.shape), (i64 * rank)(*t.stride())
    host = DEVICE_CUDA_HOST if not t.is_cuda and t.is_pinned() else DEVICE_CPU
    device = (DEVICE_CUDA, t.device.index or 0) if t.is_cuda else (host, 0)
    result = Tensor(t.data_ptr(), *device, rank, dtype(t.dtype), shape, strides, 0)
    result.keep = (t, shape, strides)
    return c.pointer(result)


def struct(kind, **fields):
    value = kind(struct_size=c.sizeof(kind))
    value.keep = []
    for name, field in fields.items():
        if isinstance(field, torch.Tensor):
            field = tensor(field)
            value.keep.append(field)
        if field is not None:
            setattr(value, name, field)
    return value


def load():
    root = pathlib.Path(__file__).resolve().parents[2]
    path = os.environ.get("FOLIO_LIBRARY") or str(root / "target/release/libfolio.so")
    lib = c.CDLL(path)
    lib.folio_version.restype = c.c_char_p
    for kind in ("decode", "prefill", "mla", "mla_context", "cascade"):
        getattr(lib, f"folio_{kind}_kernel").restype = c.c_char_p
    return lib


LIB = load()


def call(function, *args):
    err = Error(struct_size=c.sizeof(Error))
    status = function(*args, c.byref(err))
    if status:
        raise RuntimeError(f"{function.__name__}: status {status}: {err.message.decode()}")


def stream():
    return ptr(torch.cuda.current_stream().cuda_stream)


class Context:
    def __init__(self, device_type=DEVICE_CUDA, device_id=0, num_threads=0):
        self.handle = ptr()
        desc = struct(ContextDesc, device_type=device_type, device_id=device_id, num_threads=num_threads)
        call(LIB.folio_context_create, c.byref(desc), c.byref(self.handle))

    def append(self, **fields):
        args = struct(AppendArgs, **fields)
        return lambda: call(LIB.folio_kv_append, self.handle, c.byref(args), stream())

    def operator(self, name, **fields):
        """A call of an operator by its name in C."""
        args, function = struct(OPERATORS[name], **fields), getattr(LIB, f"folio_{name}")
        return lambda: call(function, self.handle, c.byref(args), stream())

    def kv_copy(self, **fields):
        args = struct(CopyArgs, **fields)
        return lambda: call(LIB.folio_kv_copy, self.handle, c.byref(args), stream())

    def kv_gather(self, **fields):
        args = struct(GatherArgs, **fields)
        return lambda: call(LIB.folio_kv_gather, self.handle, c.byref(args), stream())

    def merge(self, **fields):
        args = struct(MergeArgs, **fields)
        return lambda: call(LIB.folio_merge_state, self.handle, c.byref(args), stream())

    def absorb_weights(self, **fields):
        args = struct(AbsorbWeightsArgs, **fields)
        return lambda: call(LIB.folio_mla_absorb_weights, self.handle, c.byref(args), stream())

    def absorb_q(self, **fields):
        args = struct(AbsorbQArgs, **fields)
        return lambda: call(LIB.folio_mla_absorb_q, self.handle, c.byref(args), stream())

    def project_o(self, **fields):
        args = struct(ProjectOArgs, **fields)
        return lambda: call(LIB.folio_mla_project_o, self.handle, c.byref(args), stream())

    def up_project(self, **fields):
        args = struct(UpProjectArgs, **fields)
        return lambda: call(LIB.folio_mla_up_project, self.handle, c.byref(args), stream())


class Attention:
    """A handle with a workspace of its own."""

    KINDS = {"decode": (DecodeDesc, Args), "prefill": (PrefillDesc, Args), "mla": (MlaDesc, MlaArgs),
             "mla_context": (MlaContextDesc, MlaContextArgs), "cascade": (CascadeDesc, Args)}

    def __init__(self, context, kind, **desc):
        functions = ("create", "workspace", "plan", "run", "kernel", "destroy")
        self.f = {name: getattr(LIB, f"folio_{kind}_{name}") for name in functions}
        self.handle = ptr()
        desc_type, self.args = self.KINDS[kind]
        desc = struct(desc_type, **desc)
        call(self.f["create"], context.handle, c.byref(desc), c.byref(self.handle))
        info = struct(WorkspaceInfo)
        call(self.f["workspace"], self.handle, c.byref(info))
        self.device_memory = torch.empty(max(1, info.device_bytes), dtype=torch.uint8, device="cuda")
        self.host_memory = torch.empty(max(1, info.host_bytes), dtype=torch.uint8, pin_memory=True)
        self.workspace = struct(Workspace, device=self.device_memory.data_ptr(), device_bytes=info.device_bytes,
                                host=self.host_memory.data_ptr(), host_bytes=info.host_bytes)
        self.workspace_bytes = info.device_bytes

    @property
    def kernel(self):
        return self.f["kernel"](self.handle).decode()

    def plan(self, **fields):
        batch = struct(Batch, **fields)
        call(self.f["plan"], self.handle, c.byref(batch), c.byref(self.workspace), stream())
        return batch

    def run(self, **fields):
        """A function of no arguments that runs with these, so that timing sees the call alone."""
        args = struct(self.args, **fields)
        return lambda: call(self.f["run"], self.handle, c.byref(args), stream())

    def append_run(self, append, **fields):
        """Of a decode handle: `append` has the fields of rope_append."""
        append, args = struct(RopeAppendArgs, **append), struct(self.args, **fields)
        return lambda: call(LIB.folio_decode_append_run, self.handle, c.byref(append), c.byref(args), stream())

    def close(self):
        self.f["destroy"](self.handle)
        self.handle = None


class Cascade(Attention):
    """A cascade handle. `prefixes` lists (first request, end, keys)."""

    def __init__(self, context, **desc):
        super().__init__(context, "cascade", **desc)

    def plan(self, prefixes, **fields):
        batch = struct(Batch, **fields)
        columns = [(i32 * len(prefixes))(*column) for column in zip(*prefixes)]
        shared = struct(Prefixes, num_prefixes=len(prefixes))
        for name, column in zip(("request_begin", "request_end", "kv_len"), columns):
            setattr(shared, name, c.addressof(column))
        call(self.f["plan"], self.handle, c.byref(batch), c.byref(shared), c.byref(self.workspace), stream())

    @property
    def shares(self):
        shares = u32()
        call(LIB.folio_cascade_shares, self.handle, c.byref(shares))
        return bool(shares.value)
