"""Grids of attention with a cache of keys and values: those of vLLM, SGLang, FlashInfer and FastDeploy, as tables.

Where a peer compares two of its kernels, or says no number, the tolerance is that of its tests of the same type. Where
it draws lengths at random, they are drawn here within its limits.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from grids.grid import Grid
from grids.runner import Layer, Tolerance

BF16, FP16 = Tolerance(1e-2, 1e-2), Tolerance(1e-3, 1e-3)
FP8 = Tolerance(0.15, 0.15)
CAUSAL, FULL = Layer(), Layer("full")


def combined(**axes):
    """Layers of all combinations of values of their fields."""
    return tuple(Layer(**dict(zip(axes, values))) for values in product(*axes.values()))


def last(count):
    """The window of a row that sees so many keys, its own among them."""
    return count and (count - 1, 0)


def lens(kv_lens, qo_lens):
    """`(qo, kv)` of requests; rows are repeated where there are fewer of them."""
    return tuple((qo_lens[i % len(qo_lens)], kv) for i, kv in enumerate(kv_lens))


def random_lens(seed, batch, rows, past):
    """Rows and past keys of each request between two limits."""
    rng = np.random.default_rng(seed)
    qo_lens, past = rng.integers(*rows, batch), rng.integers(*past, batch)
    return tuple((int(qo), int(qo + before)) for qo, before in zip(qo_lens, past))


# --- vLLM ------------------------------------------------------------------------------------------

UNIFIED = {
    ("kind", "lens"): [("prefill", ((1, 1328), (5, 18), (129, 463))), ("decode", ((1, 523), (1, 37), (1, 2011)))],
    ("heads", "kv_heads"): [(4, 4), (8, 2), (5, 1)],
    "dim": [128, 256],
    "num_pages": [2048, 32768],
}
UNIFIED_LAYERS = {"window": [None, last(64), last(128), last(256)], "cap": [0.0, 50.0]}
UNIFIED_PEER = "vLLM test_triton_unified_attention.py"
SCALES = {"k_scale": [0.5], "v_scale": [0.25]}
FP8_QUERIES = {"dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn", "o_dtype": "bfloat16"}

#: Keys and rows of the batches of test_attention_backends.py.
NAMED = {
    "small_decode": lens([32, 40], [1]),
    "small_prefill": lens([32, 40], [8]),
    "mixed_small": lens([32, 40, 48, 56], [1, 1, 5, 5]),
    "medium_decode": lens([128, 256, 512, 1024] * 2, [1]),
    "medium_prefill": lens([256, 512, 1024, 2048], [16]),
    "mixed_medium": lens([512, 1024, 2048] * 2, [1, 1, 1, 7, 7, 7]),
    "large_decode": lens([2048] * 32, [1]),
    "large_prefill": lens([4096] * 8, [32]),
    "mixed_large": lens([1024, 2048, 4096] * 2, [1, 1, 1, 32, 32, 32]),
    "single_decode": lens([1024], [1]),
    "single_prefill": lens([1024], [64]),
}
ENCODERS = [tuple((n, n) for n in many) for many in ((32, 64, 128, 256), (256, 512, 1024, 2048))]
LLAMA = {("heads", "kv_heads"): [(32, 8), (16, 4), (8, 2)], "dim": 128}

CASCADES = [
    (((129, 871), (18, 280), (37, 988), (1023, 2304), (1, 257)), 256),
    (((1, 1023), (1, 879), (1, 778), (1, 1777)) * 100, 512),
]

FLASHINFER_OF_VLLM = {("heads", "kv_heads"): [(32, 8), (6, 1)], "dim": [128, 256], "page": [16, 32], "num_pages": 32768}
FLASHINFER_LAYERS = combined(cap=[0.0, 30.0], window=[None, last(64)])

TRTLLM = {
    ("kind", "lens"): [
        (kind, random_lens(batch, batch, rows, (64, 3072)))
        for batch in (4, 12)
        for kind, rows in (("decode", (1, 2)), ("prefill", (1, 1025)))
    ],
    ("heads", "kv_heads"): [(64, 8), (40, 8)],
    "dim": 128,
    "layout": "hnd",
}
TRTLLM_LAYERS = {"window": [None, (127, 0)], "cap": [0.0, 50.0], "sinks": [False, True]}
#: Types of queries, cache and outputs, scales, tolerance.
TRTLLM_TYPES = {
    "bf16": ({}, {}, BF16),
    "fp8_cache": ({"kv_dtype": "float8_e4m3fn"}, SCALES, Tolerance(6e-2, 4e-2)),
    "fp8_queries": (FP8_QUERIES, {"q_scale": [0.75], **SCALES}, Tolerance(2e-2, 2e-2)),
    "fp8_outputs": (
        {**FP8_QUERIES, "o_dtype": "float8_e4m3fn"},
        {"q_scale": [0.75], **SCALES, "o_scale": [0.01]},
        Tolerance(4e-2, 3e-2),
    ),
}

VLLM = [
    Grid("unified", UNIFIED_PEER, {**UNIFIED, "layers": combined(**UNIFIED_LAYERS)}, Tolerance(1.5e-2, 1e-2)),
    Grid(
        "unified_fp8_cache",
        UNIFIED_PEER,
        {**UNIFIED, "kv_dtype": "float8_e4m3fn", "layers": combined(**UNIFIED_LAYERS, **SCALES)},
        FP8,
    ),
    Grid(
        "unified_fp8_queries",
        UNIFIED_PEER,
        {**UNIFIED, **FP8_QUERIES, "layers": combined(**UNIFIED_LAYERS, q_scale=[0.75], **SCALES)},
        FP8,
    ),
    Grid(
        "unified_nvfp4_cache",
        UNIFIED_PEER,
        {
            **UNIFIED,
            "dim": [64, 128, 256],
            "num_pages": 512,
            "kv_format": "nvfp4",
            "layers": combined(**UNIFIED_LAYERS),
        },
        Tolerance(2e-2, 2e-2),
    ),
    Grid(
        "unified_scales_per_token_and_head",
        UNIFIED_PEER,
        {
            **UNIFIED,
            "num_pages": 512,
            "kv_format": "token_head_scales",
            "kv_dtype": ["int8", "float8_e4m3fn"],
            "layers": combined(**UNIFIED_LAYERS),
        },
        # The peer's test has no lse. Prefill on a GPU rounds keys to bfloat16: 2^-9 of logits that are up to 4.
        Tolerance(2e-2, 2e-2, lse_atol=8e-3),
    ),
    Grid(
        "prefill",
        "vLLM test_triton_prefill_attention.py",
        {
            "lens": tuple((n, n) for n in (512, 640, 771, 903, 1024)),
            ("heads", "kv_heads"): [(32, 32), (32, 8)],
            "dtype": ["float32", "bfloat16"],
            "kind": "ragged",
            "layers": (CAUSAL, FULL),
        },
        BF16,
    ),
    Grid(
        "prefill_windows",
        "vLLM test_triton_prefill_attention.py",
        {
            "lens": tuple((n, n) for n in (512, 640, 771, 1024)),
            ("heads", "kv_heads"): [(32, 32), (32, 8)],
            "dtype": ["float32", "bfloat16"],
            "kind": "ragged",
            "layers": combined(mask=["full"], window=[(32, 32), (32, 0), (0, 32)]),
        },
        Tolerance(2e-2, 2e-2),
    ),
    Grid(
        "cascade",
        "vLLM test_cascade_flash_attn.py",
        {
            ("lens", "prefix"): CASCADES,
            ("heads", "kv_heads"): [(4, 4), (8, 2), (16, 2)],
            "dim": [128, 192, 256],
            "dtype": ["float16", "bfloat16"],
            "kind": "cascade",
            "layers": combined(cap=[0.0, 50.0]),
        },
        BF16,
    ),
    Grid(
        "flashinfer_decode",
        "vLLM test_flashinfer.py",
        {
            "lens": [lens([1328, 18, 463], [1]), lens([1, 54, 293, 70], [1])],
            **FLASHINFER_OF_VLLM,
            "kind": "decode",
            "layers": FLASHINFER_LAYERS,
        },
        BF16,
    ),
    Grid(
        "flashinfer_prefill",
        "vLLM test_flashinfer.py",
        {"lens": ((1, 1328), (5, 18), (129, 463)), **FLASHINFER_OF_VLLM, "layers": FLASHINFER_LAYERS},
        Tolerance(5e-2, 1e-2),
    ),
    *(
        Grid(
            f"trtllm_{name}",
            "vLLM test_flashinfer_trtllm_attention.py",
            {**TRTLLM, **types, "layers": combined(**TRTLLM_LAYERS, **scales)},
            tolerance,
        )
        for name, (types, scales, tolerance) in TRTLLM_TYPES.items()
    ),
    Grid(
        "backends",
        "vLLM test_attention_backends.py",
        {"lens": list(NAMED.values()), **LLAMA, "layers": (CAUSAL, Layer(window=last(128)))},
        BF16,
    ),
    Grid(
        "backends_of_encoders",
        "vLLM test_attention_backends.py",
        {"lens": ENCODERS, **LLAMA, "layers": combined(mask=["full"], window=[None, (127, 127)])},
        BF16,
    ),
    Grid(
        "triton_decode",
        "vLLM test_triton_decode_attention.py",
        {
            "batch": [3, 5],
            "qo": 1,
            "kv": [1027, 1025],
            ("heads", "kv_heads"): [(32, 32), (32, 8)],
            "dim": [128, 192],
            "dim_vo": [128, 512],
            "page": [1, 16],
            "kind": "decode",
        },
        BF16,
    ),
]

# --- SGLang ----------------------------------------------------------------------------------------

SGLANG_PEER = "SGLang test_triton_attention_kernels.py"
SGLANG = [
    Grid(
        "extend",
        SGLANG_PEER,
        {
            "lens": random_lens(19, 19, (1, 6165), (1, 6165)),
            ("heads", "kv_heads"): (12, 4),
            "dim": [256, 128, 96, 80],
            "kind": ["prefill", "extend"],
            "page": 1,
            "form": "slots",
            "mean": 0.1,
            "amplitude": 0.2,
            "layers": combined(mask=["causal", "bytes"]),
        },
        Tolerance(1e-3, 1e-2),
    ),
    Grid(
        "extend_windows",
        SGLANG_PEER,
        {
            "lens": random_lens(4, 4, (1, 1024), (200, 2048)),
            ("heads", "kv_heads"): (64, 8),
            "kind": ["prefill", "extend"],
            "page": 1,
            "form": "slots",
            "mean": 0.1,
            "amplitude": 0.2,
            "layers": combined(window=[None, (127, 0)]),
        },
        FP16,
    ),
    Grid(
        "extend_in_chunks",
        SGLANG_PEER,
        {
            "lens": tuple((3000 - past, 3000) for past in (2192, 2205, 2900, 0)),
            ("heads", "kv_heads"): (8, 8),
            "dim": 64,
            "kind": ["prefill", "extend"],
            "page": 1,
            "form": "slots",
            "layers": combined(window=[last(128)]),
        },
        BF16,
    ),
    Grid(
        "context",
        SGLANG_PEER,
        {
            "lens": ((8, 8), (12, 12)),
            ("heads", "kv_heads"): (4, 4),
            "dim": [128, 96, 80],
            "dtype": "float32",
            "kind": "ragged",
            "layers": (CAUSAL, FULL),
        },
        Tolerance(1e-2, cosine=1e-5),
    ),
    Grid(
        "decode",
        SGLANG_PEER,
        {
            "batch": 2,
            "qo": 1,
            "kv": 10,
            ("heads", "kv_heads", "dim"): [(4, 4, 64), (4, 2, 64), (4, 4, 80)],
            "kind": "decode",
            "page": 1,
            "form": "slots",
        },
        BF16,
    ),
    Grid(
        "grouped_decode",
        SGLANG_PEER,
        {
            "batch": 2,
            "qo": 1,
            "kv": [5, 100, 128, 500],
            ("heads", "kv_heads", "dim"): [(16, 16, 64), (16, 1, 64), (128, 1, 80), (128, 2, 512)],
            "kind": "decode",
            "page": 1,
            "form": "slots",
        },
        Tolerance(3e-2, cosine=1e-2),
    ),
    Grid(
        "unified_and_two_stages",
        SGLANG_PEER,
        {
            ("batch", "kv", "heads", "kv_heads", "dim"): [
                (4, 512, 32, 8, 128),
                (2, 2048, 32, 8, 128),
                (8, 256, 64, 8, 80),
            ],
            "qo": 128,
            "kind": ["prefill", "extend"],
            "page": 1,
            "form": "slots",
        },
        Tolerance(0.15, 0.15),
    ),
]

# --- FlashInfer ------------------------------------------------------------------------------------

FLASHINFER = {"dtype": "float16", "form": "csr"}
WINDOWED = {
    **FLASHINFER,
    ("heads", "kv_heads"): [(4, 1), (4, 4), (8, 1), (8, 4), (8, 8)],
    "dim": [64, 128, 256, 512],
    "page": [1, 16],
}
SAME_HEADS = {("heads", "kv_heads"): [(4, 4), (8, 8), (32, 32)], "dim": [128, 256]}
SINKS_PEER = "FlashInfer test_attention_sink.py"
SINK_TYPES = {"float16": FP16, "bfloat16": BF16}


def appended(batch, unique, shared, decode):
    """Requests with a prefix and keys of their own, of which one, or all, are new."""
    return ((1 if decode else unique, shared + unique),) * batch


FLASHINFER_GRIDS = [
    Grid(
        "batch_prefill",
        "FlashInfer test_batch_prefill_kernels.py",
        {
            **FLASHINFER,
            "batch": [12, 17, 128],
            "kv": [54, 97, 512, 2048],
            "qo": [37, 17, 127, 577],
            "page": [1, 5, 16],
            ("heads", "kv_heads"): [(32, 32), (4, 4), (32, 4)],
            "dim": [128, 256],
            "layers": (*combined(mask=["causal", "full"], cap=[0.0, 30.0]), Layer("bytes"), Layer("bits")),
        },
        FP16,
    ),
    Grid(
        "batch_decode",
        "FlashInfer test_batch_decode_kernels.py",
        {
            **FLASHINFER,
            "batch": [12, 17, 128],
            "qo": 1,
            "kv": [54, 97, 512, 2048, 16384],
            "page": [1, 8, 16],
            ("heads", "kv_heads"): [(4, 4), (32, 4)],
            "dim": [128, 256, 512],
            "kv_dtype": ["float16", "float8_e4m3fn"],
            "kind": "decode",
        },
        FP16,
    ),
    Grid(
        "shared_prefix",
        "FlashInfer test_shared_prefix_kernels.py",
        {
            **FLASHINFER,
            ("lens", "prefix"): [
                (appended(batch, unique, shared, decode), shared)
                for batch, unique, shared, decode in product([12, 17], [37, 17], [128, 512, 2048], [True, False])
            ],
            ("heads", "kv_heads"): [(8, 8), (16, 16)],
            "dim": [128, 256],
            "page": [1, 16],
            "kind": "cascade",
        },
        FP16,
    ),
    Grid(
        "windows_of_one_decode",
        "FlashInfer test_sliding_window.py",
        {
            **WINDOWED,
            "page": 1,
            "batch": 1,
            "qo": 1,
            "kv": [1, 3, 19, 99, 199, 1999],
            "kind": "decode",
            "layers": combined(window=[(left, 0) for left in (3, 13, 23, 43)]),
        },
        FP16,
    ),
    Grid(
        "windows_of_decodes",
        "FlashInfer test_sliding_window.py",
        {
            **WINDOWED,
            "batch": [1, 3, 13, 32],
            "qo": 1,
            "kv": [1, 3, 99, 199, 1999],
            "kind": "decode",
            "layers": combined(window=[(33, 0), (533, 0)]),
        },
        FP16,
    ),
    Grid(
        "windows_of_prefills",
        "FlashInfer test_sliding_window.py",
        {
            **WINDOWED,
            "batch": [12, 17, 30],
            "qo": [1, 37, 47],
            "kv": [54, 397, 1177],
            "layers": combined(window=[(left, 0) for left in (13, 33, 111)]),
        },
        FP16,
    ),
    Grid(
        "caps_of_decodes",
        "FlashInfer test_logits_cap.py",
        {
            **FLASHINFER,
            **SAME_HEADS,
            "batch": 1,
            "qo": 1,
            "kv": [1, 9, 81, 729, 33001],
            "kind": "decode",
            "layers": combined(cap=[1.0, 30.0, 50.0]),
        },
        FP16,
    ),
    Grid(
        "caps_of_prefills",
        "FlashInfer test_logits_cap.py",
        {
            **FLASHINFER,
            **SAME_HEADS,
            "batch": 1,
            "qo": [1, 17, 81, 987],
            "kv": [1, 17, 81, 987, 31111],
            "layers": combined(cap=[1.0, 30.0, 50.0], mask=["causal", "full"]),
        },
        BF16,
    ),
    Grid(
        "alibi_of_decodes",
        "FlashInfer test_alibi.py",
        {
            **FLASHINFER,
            **SAME_HEADS,
            "batch": 1,
            "qo": 1,
            "kv": [1, 9, 81, 729],
            "kind": "decode",
            "layers": combined(alibi=[True]),
        },
        FP16,
    ),
    Grid(
        "alibi_of_prefills",
        "FlashInfer test_alibi.py",
        {
            **FLASHINFER,
            **SAME_HEADS,
            "batch": 1,
            "qo": [1, 17, 81, 987],
            "kv": [1, 17, 81, 987],
            "layers": combined(alibi=[True], mask=["causal", "full"]),
        },
        BF16,
    ),
    *(
        Grid(
            f"sinks_{dtype}",
            SINKS_PEER,
            {
                "form": "slots",
                "dtype": dtype,
                "page": 1,
                "lens": [((n, n),) * batch for batch in (1, 4, 16) for n in (1, 4, 16, 128)],
                ("heads", "kv_heads"): [(32, 8), (32, 32)],
                "layers": combined(mask=["causal", "full"], window=[None, (128, -1)], sinks=[True]),
            },
            tolerance,
        )
        for dtype, tolerance in SINK_TYPES.items()
    ),
    *(
        Grid(
            f"sinks_of_decodes_{dtype}",
            SINKS_PEER,
            {
                "form": "slots",
                "dtype": dtype,
                "page": 1,
                "batch": [1, 4, 16],
                "qo": [1, 2, 4],
                "kv": [32, 33, 36, 128, 129, 132],
                ("heads", "kv_heads"): [(32, 8), (32, 32)],
                "kind": "decode",
                "layers": combined(window=[None, (128, 0)], sinks=[True]),
            },
            tolerance,
        )
        for dtype, tolerance in SINK_TYPES.items()
    ),
    Grid(
        "ragged_192_128",
        "FlashInfer test_deepseek_mla.py",
        {
            **FLASHINFER,
            ("batch", "kv", "qo"): [
                *product([1], [5532, 7563], [1832, 3928]),
                *product([12, 17], [544, 977], [377, 177]),
            ],
            ("heads", "kv_heads"): [(4, 4), (32, 32), (128, 128)],
            "dim": 192,
            "dim_vo": 128,
            "kind": "ragged",
            "layers": (CAUSAL, FULL),
        },
        FP16,
    ),
]

# --- FastDeploy ------------------------------------------------------------------------------------

FASTDEPLOY = [
    Grid(
        f"fastdeploy_{dtype}",
        "FastDeploy test_triton_decode_attention.py",
        {
            "lens": [lens(many, [1]) for many in ([64], [32, 64, 128, 48], [1024], [1, 3])],
            ("heads", "kv_heads"): [(16, 4), (8, 8)],
            "page": 32,
            "dtype": dtype,
            "kind": "decode",
            "runs": 5,
        },
        Tolerance(atol, cosine=1e-3),
    )
    for dtype, atol in (("float16", 2e-2), ("bfloat16", 5e-2))
]

GRIDS = [*VLLM, *SGLANG, *FLASHINFER_GRIDS, *FASTDEPLOY]
