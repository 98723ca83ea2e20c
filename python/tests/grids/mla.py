"""Grids of multi-head latent attention: those of FlashMLA, vLLM, FlashInfer, SGLang and FastDeploy, as tables.

The scale is that of the tests, 1 / sqrt(576), where they say no other. Where a peer compares two of its kernels, or
says no number, the tolerance is that of its tests of the same type.
"""

from __future__ import annotations

from itertools import product

from grids.gqa import BF16, CAUSAL, FP16, FULL, NAMED, combined, lens
from grids.grid import Grid
from grids.runner import Layer, Tolerance

DEEPSEEK = {"latent": 512, "rope": 64}
BOTH = (CAUSAL, FULL)

# --- FlashMLA --------------------------------------------------------------------------------------

FLASHMLA = {
    **DEEPSEEK,
    "page": 64,
    ("heads", "kv_heads"): [
        (heads, kv_heads)
        for heads, kv_heads in product([1, 3, 9, 63, 64, 126, 128], [1, 2, 3, 8])
        if heads % kv_heads == 0
    ],
    # The absolute tolerances are for small values and scores.
    "amplitude": 0.1,
    "q_amplitude": 2.0,
    "layers": BOTH,
}
FLASHMLA_TOLERANCE = Tolerance(8e-4, 2.01 / 128, 5e-6, 1e-6, 8.01 / 65536, either=True)
FLASHMLA_PEER = "FlashMLA test_flash_mla_dense_decoding.py"

FLASHMLA_GRIDS = [
    Grid(
        "flashmla",
        FLASHMLA_PEER,
        {**FLASHMLA, "batch": [1, 2, 6, 64], "qo": [1, 2, 4], "kv": [20, 140, 4096], "varlen": [False, True]},
        FLASHMLA_TOLERANCE,
    ),
    Grid(
        "flashmla_without_keys",
        FLASHMLA_PEER,
        {
            **FLASHMLA,
            ("heads", "kv_heads"): [(64, 1), (128, 1)],
            "batch": 128,
            "qo": [1, 2],
            "kv": [20, 140, 4096],
            "varlen": True,
            "zeros": True,
        },
        FLASHMLA_TOLERANCE,
    ),
]

# --- vLLM ------------------------------------------------------------------------------------------

WIDE = {
    **DEEPSEEK,
    "batch": 128,
    "kv": [4096, 8192, 16384],
    "varlen": [False, True],
    ("heads", "kv_heads"): [(heads, 1) for heads in (16, 32, 64, 128)],
    "page": 64,
}
#: Types of queries and cache, the scale of the cache, tolerance.
WIDE_TYPES = {
    "bf16": ({}, CAUSAL, Tolerance(cosine=1e-5)),
    "fp16": ({"dtype": "float16"}, CAUSAL, Tolerance(cosine=1e-5)),
    "fp8": ({"kv_dtype": "float8_e4m3fn"}, Layer(k_scale=0.5), Tolerance(cosine=1e-4)),
}

VLLM = [
    *(
        Grid(
            f"wide_batches_{name}",
            "vLLM test_cutlass_mla_decode.py, test_flashmla.py",
            {**WIDE, **types, "qo": [1, 2], "layers": (layer,)},
            tolerance,
        )
        for name, (types, layer, tolerance) in WIDE_TYPES.items()
    ),
    *(
        Grid(
            f"small_batch_{dtype}",
            "vLLM test_mla_decode_cpu.py",
            {**DEEPSEEK, "batch": 4, "qo": 1, "kv": 256, "varlen": [False, True], "heads": 16, "dtype": dtype},
            tolerance,
            refused_on="cuda" if dtype == "float32" else None,
        )
        for dtype, tolerance in (
            ("float32", Tolerance(1e-5, 1.3e-6)),
            ("float16", FP16),
            ("bfloat16", Tolerance(1e-3, 1.6e-2)),
        )
    ),
    Grid(
        "mla_backends",
        "vLLM test_mla_backends.py",
        {
            **DEEPSEEK,
            "lens": [
                *NAMED.values(),
                *(lens([512, 1024], [rows]) for rows in (2, 4, 8)),
                lens([1024, 2048, 512, 128], [1, 4, 4, 16]),
            ],
            "heads": [16, 128],
            "page": [16, 64],
        },
        Tolerance(0.5, 1e-2),
    ),
]

# --- FlashInfer ------------------------------------------------------------------------------------

FLASHINFER = {**DEEPSEEK, "dtype": "float16", "form": "csr", "split": True, "layers": BOTH}
FLASHINFER_PEER = "FlashInfer test_deepseek_mla.py"
ODD = list(range(1, 18, 2))
TRIPLES = list(product([0, 1, 3, 11], [17, 33, 79, 114], [514, 2743, 8736]))
OVER_FP8 = {
    **DEEPSEEK,
    "batch": [1, 4, 16],
    "kv": [256, 1024, 4096],
    "qo": [1, 16],
    "page": [16, 64],
    "heads": [16, 128],
    "form": "csr",
}

FLASHINFER_GRIDS = [
    Grid(
        "pages",
        FLASHINFER_PEER,
        {
            **FLASHINFER,
            "batch": [1, 3, 5, 7, 157],
            "kv": [0, 17, 33, 96, 97, 114, 514, 1024],
            "qo": ODD,
            "heads": 16,
            "page": [1, 16],
        },
        FP16,
    ),
    Grid(
        "several_lengths",
        FLASHINFER_PEER,
        {
            **FLASHINFER,
            "lens": [
                lens([kv for kv in triple for _ in range(batch)], [qo])
                for batch, triple, qo in product([1, 3, 5, 7], TRIPLES, ODD)
            ],
            "heads": [16, 64],
            "page": 1,
        },
        Tolerance(2e-3, 1e-3),
    ),
    Grid(
        "nan_behind_the_keys",
        FLASHINFER_PEER,
        {
            **FLASHINFER,
            "batch": [1, 2, 3, 4, 5, 6, 7, 157],
            "kv": [17, 33, 75, 197],
            "qo": [3, 7, 17],
            "heads": 16,
            "page": [16, 32],
        },
        FP16,
    ),
    Grid(
        "cutlass",
        FLASHINFER_PEER,
        {
            **DEEPSEEK,
            "batch": [1, 2, 4],
            "qo": 1,
            "kv": [128, 1024, 4096],
            "varlen": True,
            "heads": 128,
            "page": [1, 16, 128],
            "dtype": ["bfloat16", "float16"],
        },
        BF16,
    ),
    Grid("over_fp8", FLASHINFER_PEER, {**OVER_FP8, "kv_dtype": "float8_e4m3fn", "layers": BOTH}, Tolerance(1.5e-2)),
    Grid(
        "over_fp8_by_groups",
        FLASHINFER_PEER,
        {**OVER_FP8, "cache_format": "fp8_ds_mla", "layers": BOTH},
        Tolerance(2e-2),
    ),
    Grid(
        "scales_of_fp8",
        FLASHINFER_PEER,
        {**OVER_FP8, "kv_dtype": "float8_e4m3fn", "layers": combined(k_scale=[0.01, 0.1, 1.0])},
        Tolerance(5e-2),
    ),
    Grid("zeros_of_fp8", FLASHINFER_PEER, {**OVER_FP8, "kv_dtype": "float8_e4m3fn", "amplitude": 0.0}, Tolerance(0.0)),
]

# --- SGLang and FastDeploy -------------------------------------------------------------------------

SGLANG = [
    Grid(
        "grouped_decode_of_latent_rows",
        "SGLang test_triton_attention_kernels.py",
        {**DEEPSEEK, "batch": 2, "qo": 1, "kv": [5, 100, 128, 500], "heads": 128, "page": 1, "form": "slots"},
        Tolerance(3e-2, cosine=1e-2),
    ),
    Grid(
        "many_heads_and_requests",
        "SGLang test_triton_attention_kernels.py",
        {**DEEPSEEK, "batch": 64, "qo": 1, "kv": 256, "heads": 128, "page": 1, "form": "slots"},
        BF16,
    ),
]
FASTDEPLOY_LENS = [[64], [32, 64, 128, 48], [1024], [1, 3], [17, 64, 1, 300, 128, 33, 512, 96]]
FASTDEPLOY = [
    *(
        Grid(
            f"fastdeploy_mla_{dtype}",
            "FastDeploy test_triton_decode_attention.py",
            {
                "lens": [lens(many, [1]) for many in FASTDEPLOY_LENS],
                ("latent", "rope"): [(512, 64), (256, 32)],
                "heads": [8, 16, 128],
                "page": 32,
                "dtype": dtype,
                "runs": 5,
            },
            Tolerance(atol, cosine=1e-3),
        )
        for dtype, atol in (("float16", 2e-2), ("bfloat16", 5e-2))
    ),
    Grid(
        "fastdeploy_long_contexts",
        "FastDeploy test_flashmla_precision.py",
        {
            **DEEPSEEK,
            "batch": 128,
            "qo": 1,
            "kv": [8192, 131072],
            "heads": [16, 128],
            "page": 64,
            "scale": 0.1352337788608801,
        },
        Tolerance(0.1),
    ),
]

GRIDS = [*FLASHMLA_GRIDS, *VLLM, *FLASHINFER_GRIDS, *SGLANG, *FASTDEPLOY]
