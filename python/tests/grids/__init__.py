"""The acceptance grids of the peers' unit tests, whole, with their tolerances, against a formula in float64.

A grid is a table of parameters (gqa.py, mla.py, operators.py; grid.py says what a table is). Its combinations become
problems: a batch over shuffled pages, with NaN in slots that nobody has and garbage in table entries that nobody reads
(batches.py), a cache in one of its forms (storage.py), a handle, a plan and some runs (runner.py). Results are
compared with formula.py on the device that they are on.

On a GPU a grid is run whole (`make test-grids-gpu`). The formula is computed of all rows of a batch, or of a sample of
a long one: batches.py says which. All outputs are looked at for NaN and for rows that were not written. On the CPU two
combinations of each grid are run, drawn by FOLIO_GRIDS_SEED, and cut to what takes a moment: fewer requests and rows,
then fewer keys.

What the peers test and the grids do not:

| of | left out | because |
|---|---|---|
| FlashMLA | sparse decode and prefill | attention over lists of tokens is not there |
| FlashMLA | test_fmha_sm100 | only tolerances are known; ragged_192_128 has its dimensions |
| FlashInfer, trtllm-gen MLA | all | only tolerances are known |
| FlashInfer, MLA over fp8 | one scale for latent, one for rotary parts | `k_scale` is of both |
| FlashInfer, prefill | RoPE as keys are read | keys are rotated when they are appended |
| vLLM test_triton_decode_attention | keys of 576 beside values in other memory | CUDA kernels end at 512 |
| vLLM test_triton_unified_attention | NVFP4 of head_dim 512 | CUDA kernels of such caches end at 256 |
| vLLM test_flashinfer_trtllm_attention | outputs and queries of 4 bits | not there |
| vLLM test_flashinfer | the fast plan against the full one | there is one plan |
| vLLM test_merge_attn_states | mask_empty_context_lse | empty contexts have the lse -inf by themselves |
| vLLM test_cache | a round trip of e4m3 alone | append_* has it |
| vLLM test_batch_reordering | all | exact numbers: test_figures.py and Rust's tests |
| SGLang test_build_eagle_tree | all | exact numbers: test_operators.py and Rust's tests |
| SGLang test_triton_attention_kernels | head_dim 13 | multiples of 8 |
| the same | lists of cached and new tokens in one | new keys have a tensor of their own |
| the same | equal bits of chunks and whole prompts | only the batch may change without changing bits |
| FastDeploy test_append_attention | all | a step of a model: integrations/paddle has it |
| FastDeploy test_pre_cache_len_concat | all | exact numbers: integrations/paddle has them |
| FastDeploy test_multi_head_latent_attention | all | its formula has other keys than its kernel |
| FastDeploy test_triton_decode_attention | numbers of splits | splits are the plan's |
"""
