//! What the driver layer must answer to each driver.

use std::sync::Arc;

use folio::backend::Stream;
use folio::cuda::compiler::loader::{self, Loader};
use folio::cuda::driver::{
    Context, Driver, Event, Function, L2Promotion, Launch, MAX_TENSOR_MAPS, Module, Swizzle,
    TensorMap, Tiled, device_count,
};
use folio::cuda::kernels::{self, Row};
use folio::dtype::DType;
use folio::error::Error;
use folio::log::Logger;

use crate::harness::{self, Case, case};
use crate::stub::{Recorder, Stub};
use crate::{
    backend, biases, cascade, choice, context_parallel, copy, cuts, extend, few_keys, formats,
    gather, head_dims, images, index, items, launches, lse, merge, mixed, mla, mla_cache,
    mla_context, mla_few, narrow, new_tokens, operators, prefill_rows, prefill_widened,
    projections, rope_append, scales, split_keys, tree_mask,
};

/// The driver library that a process finds.
pub struct Setup {
    /// Which one.
    pub stub: Stub,
    /// What goes wrong in it.
    pub mode: &'static str,
    /// Where kernels come from that the bundle lacks.
    pub compiler: Compiler,
    /// Whose kernels run; empty: the device's own.
    pub kernels_of: &'static str,
}

/// The run-time compiler that a process finds.
#[derive(Clone, Copy)]
pub enum Compiler {
    /// None.
    Absent,
    /// One that compiles nothing.
    Stub,
}

const ABSENT: Setup = Setup {
    stub: Stub::Absent,
    mode: "",
    compiler: Compiler::Absent,
    kernels_of: "",
};
const INCOMPLETE: Setup = Setup {
    stub: Stub::WithoutTensorMaps,
    mode: "ok",
    compiler: Compiler::Absent,
    kernels_of: "",
};
const INCOMPLETE_AND_OLD: Setup = Setup {
    stub: Stub::WithoutTensorMaps,
    mode: "old",
    compiler: Compiler::Absent,
    kernels_of: "",
};
const WORKING: Setup = mode("ok");

const fn mode(mode: &'static str) -> Setup {
    Setup {
        stub: Stub::Complete,
        mode,
        compiler: Compiler::Absent,
        kernels_of: "",
    }
}

/// A driver and a compiler.
const fn with_compiler(mode: &'static str) -> Setup {
    Setup {
        stub: Stub::Complete,
        mode,
        compiler: Compiler::Stub,
        kernels_of: "",
    }
}
const BACKEND: Setup = with_compiler("ok");
/// A device that has the portable kernels alone.
const PORTABLE: Setup = Setup {
    kernels_of: "8.0",
    ..BACKEND
};

/// All cases.
pub const CASES: &[Case<Setup>] = &[
    case("no_library", ABSENT, no_library),
    case("missing_symbol", INCOMPLETE, missing_symbol),
    case(
        "missing_symbol_of_an_old_driver",
        INCOMPLETE_AND_OLD,
        too_old,
    ),
    case("toolkit_stub", mode("toolkit_stub"), toolkit_stub),
    case("no_device", mode("no_device"), no_device),
    case("driver_too_old", mode("old"), too_old),
    case("device_properties", WORKING, device_properties),
    case("context_is_restored", WORKING, context_is_restored),
    case("streams", WORKING, streams),
    case("out_of_memory", mode("out_of_memory"), out_of_memory),
    case("launch_failure", mode("launch_failure"), launch_failure),
    case("launch_is_one_call", WORKING, launch_is_one_call),
    case("launch_attributes", WORKING, launch_attributes),
    case("tensor_maps", WORKING, tensor_maps),
    case("events", WORKING, events),
    case(
        "shared_memory_beyond_the_device",
        WORKING,
        too_much_shared_memory,
    ),
    case(
        "kernels_that_are_not_there",
        WORKING,
        kernels_that_are_not_there,
    ),
    case(
        "kernels_of_a_newer_compiler",
        mode("driver_of_cuda_12"),
        kernels_of_a_newer_compiler,
    ),
    case(
        "hopper_loads_its_cubin",
        WORKING,
        images::hopper_loads_its_cubin,
    ),
    case(
        "ampere_loads_a_cubin",
        mode("cc_8_6"),
        images::ampere_loads_a_cubin,
    ),
    case(
        "blackwell_loads_ptx",
        mode("cc_10_0"),
        images::newer_devices_load_ptx,
    ),
    case(
        "blackwell_ultra_loads_ptx",
        mode("cc_10_3"),
        images::newer_devices_load_ptx,
    ),
    case(
        "small_blackwell_loads_ptx",
        mode("cc_12_0"),
        images::newer_devices_load_ptx,
    ),
    case(
        "hopper_kernels_stay_on_hopper",
        mode("cc_10_0"),
        images::hopper_kernels_stay_on_hopper,
    ),
    case(
        "ptx_of_a_newer_compiler",
        mode("cc_10_0_of_cuda_12"),
        images::ptx_of_a_newer_compiler,
    ),
    case(
        "backend_on_a_newer_device",
        mode("cc_10_0"),
        backend::a_newer_device_gets_portable_kernels,
    ),
    case(
        "backend_run_is_one_launch",
        BACKEND,
        backend::run_is_one_launch,
    ),
    case(
        "backend_run_with_splits_is_two_launches",
        BACKEND,
        backend::split_run_is_two_launches,
    ),
    case(
        "backend_plan_is_one_copy",
        BACKEND,
        backend::plan_is_one_copy,
    ),
    case(
        "backend_plan_on_the_device_is_one_launch",
        BACKEND,
        backend::device_plan_is_one_launch,
    ),
    case(
        "backend_capture_needs_the_graph_flag",
        BACKEND,
        backend::capture_needs_the_graph_flag,
    ),
    case(
        "backend_captures_graph_plans",
        BACKEND,
        backend::captures_graph_plans,
    ),
    case(
        "backend_graph_page_ids_keep_their_address",
        BACKEND,
        backend::graph_page_ids_keep_their_address,
    ),
    case(
        "backend_refuses_foreign_streams",
        BACKEND,
        backend::refuses_foreign_streams,
    ),
    case(
        "backend_append_is_one_launch",
        BACKEND,
        backend::append_is_one_launch,
    ),
    case(
        "backend_out_of_memory",
        with_compiler("out_of_memory"),
        backend::out_of_memory,
    ),
    case(
        "backend_launch_failure",
        with_compiler("launch_failure"),
        backend::launch_failure,
    ),
    case("few_keys_plans", BACKEND, few_keys::plans_of_few_keys),
    case("few_keys_in_windows", BACKEND, few_keys::plans_of_windows),
    case("few_keys_handles", BACKEND, few_keys::handles_of_few_keys),
    case("few_keys_runs", BACKEND, few_keys::runs_of_few_keys),
    case("launch_decode_by_tma", BACKEND, launches::decode_by_tma),
    case(
        "launch_decode_by_tma_from_pages_by_head",
        BACKEND,
        launches::decode_by_tma_from_pages_by_head,
    ),
    case(
        "launch_decode_gathers_where_tma_cannot",
        BACKEND,
        launches::decode_gathers_where_tma_cannot,
    ),
    case(
        "launch_keys_leave_the_l2_first_where_they_fit",
        BACKEND,
        launches::keys_leave_the_l2_first_where_they_fit,
    ),
    case(
        "launch_portable_copies_by_alignment",
        BACKEND,
        launches::portable_copies_by_alignment,
    ),
    case(
        "launch_masks_are_found_by_request",
        BACKEND,
        launches::masks_are_found_by_request,
    ),
    case(
        "launch_split_rows_are_combined",
        BACKEND,
        launches::split_rows_are_combined,
    ),
    case(
        "launch_combines_of_a_graph",
        BACKEND,
        launches::combines_of_a_graph,
    ),
    case(
        "launch_combines_of_few_heads",
        BACKEND,
        launches::combines_of_few_heads,
    ),
    case(
        "launch_page_ids_on_the_device",
        BACKEND,
        launches::page_ids_on_the_device,
    ),
    case(
        "launch_plan_on_the_device",
        BACKEND,
        launches::plan_on_the_device,
    ),
    case(
        "launch_tiles_of_prompts_on_the_device",
        BACKEND,
        launches::tiles_of_prompts_on_the_device,
    ),
    case(
        "launch_large_plan_on_the_device",
        BACKEND,
        launches::large_plan_on_the_device,
    ),
    case(
        "launch_prefill_from_pages",
        BACKEND,
        launches::prefill_from_pages,
    ),
    case(
        "launch_prefill_with_logits",
        BACKEND,
        launches::prefill_with_logits,
    ),
    case(
        "launch_prefill_with_masks",
        BACKEND,
        launches::prefill_with_masks,
    ),
    case(
        "launch_prefill_from_rows",
        BACKEND,
        launches::prefill_from_rows,
    ),
    case(
        "prefill_head_dims",
        BACKEND,
        head_dims::every_width_has_a_hopper_row,
    ),
    case(
        "portable_rows",
        PORTABLE,
        head_dims::portable_rows_by_their_number,
    ),
    case(
        "launch_prefill_of_narrow_rows",
        BACKEND,
        head_dims::narrow_rows_end_where_the_maps_do,
    ),
    case(
        "launch_prefill_of_small_pages",
        BACKEND,
        prefill_rows::small_pages,
    ),
    case("launch_prefill_strides", BACKEND, prefill_rows::strides),
    case("launch_prefill_fp8", BACKEND, prefill_rows::fp8),
    case(
        "launch_prefill_boxes_of_fp8",
        BACKEND,
        prefill_rows::boxes_of_fp8,
    ),
    case(
        "launch_prefill_products_in_fp8",
        BACKEND,
        prefill_rows::products_in_fp8,
    ),
    case(
        "launch_prefill_products_in_fp8_of_uneven_rows",
        BACKEND,
        prefill_rows::products_in_fp8_of_uneven_rows,
    ),
    case(
        "launch_prefill_types_of_queries",
        BACKEND,
        prefill_rows::types_of_queries,
    ),
    case(
        "launch_prefill_few_rows_of_long_queries",
        BACKEND,
        prefill_rows::few_rows_of_long_queries,
    ),
    case("launch_prefill_masks", BACKEND, prefill_rows::masks),
    case(
        "launch_prefill_masks_of_every_width",
        BACKEND,
        prefill_rows::masks_of_every_width,
    ),
    case(
        "launch_prefill_logits_of_every_width",
        BACKEND,
        prefill_rows::logits_of_every_width,
    ),
    case("launch_prefill_outputs", BACKEND, prefill_rows::outputs),
    case("launch_mixed_by_the_batch", BACKEND, mixed::decodes_apart),
    case("launch_mixed_with_drafts", BACKEND, mixed::drafts_apart),
    case(
        "launch_mixed_with_products_in_fp8",
        BACKEND,
        mixed::decodes_apart_from_products_in_fp8,
    ),
    case("launch_mixed_of_a_graph", BACKEND, mixed::of_a_graph),
    case(
        "launch_mixed_on_the_device",
        BACKEND,
        mixed::decodes_apart_on_the_device,
    ),
    case(
        "launch_mixed_lse_of_16_bits",
        BACKEND,
        mixed::lse_of_16_bits,
    ),
    case("launch_mixed_portably", PORTABLE, mixed::portably),
    case(
        "launch_prefill_widened_portably",
        PORTABLE,
        prefill_widened::forms_portably,
    ),
    case(
        "launch_prefill_widened_keys_in_fp8",
        BACKEND,
        prefill_widened::keys_in_fp8,
    ),
    case(
        "launch_prefill_widened_queries_in_fp8",
        BACKEND,
        prefill_widened::queries_in_fp8,
    ),
    case(
        "launch_prefill_widened_queries_in_fp8_alone",
        BACKEND,
        prefill_widened::queries_in_fp8_alone,
    ),
    case(
        "launch_prefill_of_other_queries_in_fp8",
        BACKEND,
        prefill_widened::portable_takes_other_queries_in_fp8,
    ),
    case(
        "launch_prefill_widened_beside_fp8_products",
        BACKEND,
        prefill_widened::beside_fp8_products,
    ),
    case(
        "launch_prefill_widened_without_fp8_products",
        BACKEND,
        prefill_widened::without_fp8_products,
    ),
    case(
        "launch_prefill_widened_other_forms",
        BACKEND,
        prefill_widened::other_forms,
    ),
    case(
        "launch_prefill_widened_new_keys_stay_out",
        BACKEND,
        prefill_widened::new_keys_stay_out,
    ),
    case(
        "launch_prefill_widened_head_scales_stay_out",
        BACKEND,
        prefill_widened::head_scales_stay_out,
    ),
    case(
        "launch_prefill_of_other_runs_over_forms",
        BACKEND,
        prefill_widened::portable_takes_other_runs_over_forms,
    ),
    case(
        "launch_prefill_under_masks_over_forms",
        BACKEND,
        prefill_widened::masks_take_no_items_of_wider_tiles,
    ),
    case(
        "launch_prefill_copied_from_small_pages",
        BACKEND,
        prefill_widened::small_pages,
    ),
    case(
        "launch_prefill_portably",
        BACKEND,
        prefill_rows::portable_takes_the_rest,
    ),
    case(
        "launch_prefill_fp8_rows_of_eight_bytes",
        BACKEND,
        prefill_rows::fp8_rows_of_eight_bytes,
    ),
    case(
        "launch_prefill_fp8_rows_that_end_at_eight_bytes",
        BACKEND,
        prefill_rows::fp8_rows_that_end_at_eight_bytes,
    ),
    case(
        "launch_split_keys_by_tma",
        BACKEND,
        split_keys::prefill_by_tma,
    ),
    case(
        "launch_split_keys_of_rows_by_tma",
        BACKEND,
        split_keys::prefill_of_rows_by_tma,
    ),
    case(
        "launch_split_keys_of_short_prompts",
        BACKEND,
        split_keys::short_prompts_by_tma,
    ),
    case(
        "launch_split_keys_portably",
        BACKEND,
        split_keys::portable_takes_the_rest,
    ),
    case(
        "plan_of_int64_on_the_device",
        BACKEND,
        narrow::everything_on_the_device,
    ),
    case("plan_of_int64_page_ids", BACKEND, narrow::page_ids_alone),
    case(
        "plan_of_too_many_int64_page_ids",
        BACKEND,
        narrow::more_than_there_is_room_for,
    ),
    case("launch_biases", BACKEND, biases::portable_takes_them),
    case("launch_items_as_a_mask", BACKEND, items::become_a_mask),
    case("room_for_items", BACKEND, items::room_for_the_mask),
    case("launch_lse_of_16_bits", BACKEND, lse::of_16_bits),
    case("launch_lse_of_graphs", BACKEND, lse::of_graphs),
    case("launch_scales_of_heads", BACKEND, scales::of_heads),
    case(
        "launch_nothing_for_scales_of_requests_and_items",
        BACKEND,
        scales::what_no_kernel_takes,
    ),
    case("launch_scales_of_requests", BACKEND, scales::of_requests),
    case(
        "launch_scales_of_requests_alone",
        BACKEND,
        scales::of_requests_alone,
    ),
    case(
        "launch_scales_of_requests_in_prefill",
        BACKEND,
        scales::of_requests_in_prefill,
    ),
    case(
        "launch_scales_expanded_to_requests",
        BACKEND,
        scales::expanded_to_requests,
    ),
    case(
        "launch_scales_of_keys_alone",
        BACKEND,
        scales::of_keys_alone,
    ),
    case(
        "launch_cascade_that_pays",
        BACKEND,
        cascade::what_pays_is_one_kernel_and_a_combine,
    ),
    case(
        "launch_cascade_with_biases",
        BACKEND,
        cascade::biases_of_rows_of_the_batch_share,
    ),
    case(
        "launch_cascade_with_masks_of_later_keys",
        BACKEND,
        cascade::masks_of_later_keys_share,
    ),
    case(
        "launch_cascade_by_heads",
        BACKEND,
        cascade::the_kernel_follows_from_the_heads,
    ),
    case(
        "launch_cascade_that_does_not_pay",
        BACKEND,
        cascade::what_does_not_pay_is_flat,
    ),
    case(
        "launch_cascade_own_items",
        BACKEND,
        cascade::own_keys_of_many_requests_cost_their_items,
    ),
    case(
        "launch_cascade_flat_plan_of_prefill",
        BACKEND,
        cascade::a_flat_plan_is_that_of_prefill,
    ),
    case(
        "launch_cascade_in_a_graph",
        BACKEND,
        cascade::a_graph_has_one_kernel_for_all_plans,
    ),
    case(
        "launch_cascade_in_a_graph_that_never_shares",
        BACKEND,
        cascade::a_graph_that_never_shares_is_flat,
    ),
    case(
        "launch_cascade_with_device_lengths",
        BACKEND,
        cascade::lengths_on_the_device_are_cut_there,
    ),
    case(
        "launch_cascade_that_shares_nothing_on_the_device",
        BACKEND,
        cascade::what_the_device_does_not_share,
    ),
    case(
        "launch_cascade_of_many_prefixes",
        BACKEND,
        cascade::more_segments_than_there_is_room_for,
    ),
    case("launch_extend", BACKEND, extend::two_passes_and_a_merge),
    case(
        "launch_extend_by_position",
        BACKEND,
        extend::positions_take_other_kernels,
    ),
    case(
        "launch_extend_without_a_cache",
        BACKEND,
        extend::without_a_cache_there_is_one_pass,
    ),
    case(
        "launch_extend_refuses_lengths_on_the_device",
        BACKEND,
        extend::lengths_on_the_device_are_refused,
    ),
    case(
        "launch_mla_context_chunk_by_chunk",
        BACKEND,
        mla_context::a_run_goes_chunk_by_chunk,
    ),
    case(
        "launch_mla_context_with_new_tokens",
        BACKEND,
        mla_context::a_chunk_alone_is_attended_with_new_tokens,
    ),
    case(
        "launch_mla_context_without_sums",
        BACKEND,
        mla_context::parts_are_merged_where_no_kernel_adds,
    ),
    case(
        "launch_mla_context_in_a_graph",
        BACKEND,
        mla_context::a_graph_has_all_chunks,
    ),
    case(
        "operator_append_moves_vectors_or_elements",
        BACKEND,
        operators::append_moves_vectors_or_elements,
    ),
    case(
        "operator_append_of_one_token_moves_vectors",
        BACKEND,
        operators::append_of_one_token_moves_vectors,
    ),
    case(
        "operator_append_of_no_keys",
        BACKEND,
        operators::append_of_no_keys,
    ),
    case("formats_appends", BACKEND, formats::appends),
    case(
        "formats_appends_of_odd_rows",
        BACKEND,
        formats::appends_of_odd_rows,
    ),
    case(
        "rope_appends_to_other_forms",
        BACKEND,
        formats::rope_appends,
    ),
    case("formats_gathers", BACKEND, formats::gathers),
    case("formats_attention", BACKEND, formats::attention),
    case("formats_decode", BACKEND, formats::decode),
    case(
        "formats_attention_over_odd_rows",
        BACKEND,
        formats::attention_over_odd_rows,
    ),
    case(
        "formats_scales_of_blocks",
        BACKEND,
        formats::scales_of_blocks,
    ),
    case(
        "formats_fp32_queries_are_refused",
        BACKEND,
        formats::fp32_queries_are_refused,
    ),
    case(
        "operator_append_to_an_empty_cache",
        BACKEND,
        operators::append_to_an_empty_cache,
    ),
    case(
        "operator_tokens_with_more_elements_than_a_kernel_counts",
        BACKEND,
        operators::tokens_with_more_elements_than_a_kernel_counts,
    ),
    case(
        "operator_merge_of_two_states",
        BACKEND,
        operators::merge_of_two_states,
    ),
    case(
        "operator_merge_of_many_states",
        BACKEND,
        operators::merge_of_many_states,
    ),
    case(
        "operator_general_merge_of_two_states",
        BACKEND,
        merge::of_two_states,
    ),
    case(
        "operator_general_merge_of_many_states",
        BACKEND,
        merge::of_many_states,
    ),
    case(
        "operator_merge_of_numbers_of_states_of_their_own",
        BACKEND,
        merge::of_numbers_of_states_of_their_own,
    ),
    case(
        "operator_more_states_than_a_kernel_counts",
        BACKEND,
        operators::more_states_than_a_kernel_counts,
    ),
    case("mla_portable", BACKEND, mla::portable),
    case("mla_absent_tensors", BACKEND, mla::absent_tensors),
    case("mla_tiles", BACKEND, mla::tiles),
    case(
        "mla_split_rows_are_combined",
        BACKEND,
        mla::split_rows_are_combined,
    ),
    case("mla_plan_on_the_device", BACKEND, mla::plan_on_the_device),
    case("mla_fp32_is_refused", BACKEND, mla::fp32_is_refused),
    case("mla_fp8_queries", BACKEND, mla::fp8_queries),
    case("mla_hopper_maps", BACKEND, mla::hopper_maps),
    case("mla_hopper_tiles", BACKEND, mla::hopper_tiles),
    case("mla_hopper_drafts", BACKEND, mla::hopper_drafts),
    case("mla_hopper_lacks", BACKEND, mla::hopper_lacks),
    case(
        "mla_few_whole_records_by_tma",
        BACKEND,
        mla_few::whole_records_by_tma,
    ),
    case(
        "mla_few_split_records_by_tma",
        BACKEND,
        mla_few::split_records_by_tma,
    ),
    case(
        "mla_few_gathers_where_tma_cannot",
        BACKEND,
        mla_few::gathers_where_tma_cannot,
    ),
    case("mla_few_bytes_by_record", BACKEND, mla_few::bytes_by_record),
    case(
        "mla_few_splits_and_more_rows",
        BACKEND,
        mla_few::splits_and_more_rows,
    ),
    case(
        "mla_few_decodes_beside_prompts",
        BACKEND,
        mla_few::decodes_beside_prompts,
    ),
    case(
        "mla_few_decodes_with_prompts",
        BACKEND,
        mla_few::decodes_with_prompts,
    ),
    case(
        "mla_few_the_portable_kernel_takes_the_rest",
        BACKEND,
        mla_few::the_portable_kernel_takes_the_rest,
    ),
    case("operator_copy_by_a_tensor", BACKEND, copy::by_a_tensor),
    case("operator_copy_by_a_list", BACKEND, copy::by_a_list),
    case("operator_copy_of_swaps", BACKEND, copy::swaps),
    case("operator_gather", BACKEND, gather::gathers),
    case("operator_rope_append", BACKEND, rope_append::launch),
    case(
        "append_run_by_one_kernel",
        BACKEND,
        new_tokens::by_one_kernel,
    ),
    case(
        "append_run_by_two_kernels",
        BACKEND,
        new_tokens::by_two_kernels,
    ),
    case("operator_rope_append_angles", BACKEND, rope_append::angles),
    case("operator_rope_append_grids", BACKEND, rope_append::grids),
    case("operator_rope_append_edges", BACKEND, rope_append::edges),
    case("operator_mla_append", BACKEND, mla_cache::append),
    case(
        "operator_mla_append_of_656_byte_records",
        BACKEND,
        mla_cache::append_of_656_byte_records,
    ),
    case(
        "operator_mla_append_of_no_tokens",
        BACKEND,
        mla_cache::append_of_no_tokens,
    ),
    case("operator_mla_gather", BACKEND, mla_cache::gather),
    case(
        "operator_mla_gather_of_no_requests",
        BACKEND,
        mla_cache::gather_of_no_requests,
    ),
    case("operator_batch_lengths", BACKEND, index::batch_lengths),
    case("operator_kv_indices", BACKEND, index::kv_indices),
    case("operator_block_table", BACKEND, index::block_table),
    case("operator_slot_mapping", BACKEND, index::slot_mapping),
    case(
        "operator_draft_kv_indices",
        BACKEND,
        index::draft_kv_indices,
    ),
    case("operator_cp_reorder", BACKEND, context_parallel::reorder),
    case("operator_cp_correct", BACKEND, context_parallel::correct),
    case("operator_tree_mask", BACKEND, tree_mask::launches),
    case(
        "operator_tree_mask_of_no_requests",
        BACKEND,
        tree_mask::no_requests,
    ),
    case(
        "projection_absorption_of_one_token",
        BACKEND,
        projections::absorption_of_one_token,
    ),
    case(
        "projection_absorption_by_tensor_maps",
        BACKEND,
        projections::absorption_by_tensor_maps,
    ),
    case(
        "projection_projection_by_parts_of_the_up_projection",
        BACKEND,
        projections::projection_by_parts_of_the_up_projection,
    ),
    case(
        "projection_tiles_suit_the_number_of_tokens",
        BACKEND,
        projections::tiles_suit_the_number_of_tokens,
    ),
    case(
        "projection_up_projection_of_shared_rows",
        BACKEND,
        projections::up_projection_of_shared_rows,
    ),
    case(
        "projection_projections_by_the_portable_kernel",
        BACKEND,
        projections::projections_by_the_portable_kernel,
    ),
    case(
        "projection_projections_of_no_tokens_launch_nothing",
        BACKEND,
        projections::projections_of_no_tokens_launch_nothing,
    ),
    case(
        "projection_projections_that_are_refused",
        BACKEND,
        projections::projections_that_are_refused,
    ),
    case(
        "projection_weights_are_copied_by_tiles",
        BACKEND,
        projections::weights_are_copied_by_tiles,
    ),
    case(
        "choice_creates_say_what_the_faster_kernels_lack",
        BACKEND,
        choice::creates_say_what_the_faster_kernels_lack,
    ),
    case(
        "launch_cuts_are_what_the_kernel_that_takes_them_can",
        BACKEND,
        cuts::are_what_the_kernel_that_takes_them_can,
    ),
    case("choice_queries_over_fp8", BACKEND, choice::queries_over_fp8),
    case(
        "choice_head_dims_take_the_next_row",
        BACKEND,
        choice::head_dims_take_the_next_row,
    ),
    case(
        "choice_packed_rows_choose_the_kernel",
        BACKEND,
        choice::packed_rows_choose_the_kernel,
    ),
    case(
        "choice_masks_over_fp8_choose_the_kernel",
        BACKEND,
        choice::masks_over_fp8_choose_the_kernel,
    ),
    case(
        "choice_rows_wider_than_any_kernel",
        BACKEND,
        choice::rows_wider_than_any_kernel,
    ),
    case(
        "choice_wide_rows_are_portable",
        BACKEND,
        choice::wide_rows_are_portable,
    ),
    case(
        "choice_runs_say_what_the_first_choice_lacks",
        BACKEND,
        choice::runs_say_what_the_first_choice_lacks,
    ),
    case(
        "choice_more_ranges_than_a_kernel_counts",
        BACKEND,
        choice::more_ranges_than_a_kernel_counts,
    ),
    case(
        "choice_failed_plans_leave_the_previous_one",
        BACKEND,
        choice::failed_plans_leave_the_previous_one,
    ),
    case(
        "choice_a_copy_without_its_event_is_waited_for",
        BACKEND,
        choice::a_copy_without_its_event_is_waited_for,
    ),
    case(
        "choice_a_failed_plan_binds_no_graph",
        BACKEND,
        choice::a_failed_plan_binds_no_graph,
    ),
];

fn no_library() {
    // SAFETY: opening the CUDA driver has no preconditions.
    if unsafe { libloading::Library::new("libcuda.so.1") }.is_ok() {
        harness::skip("this machine has a CUDA driver");
    }
    let error = Driver::get().unwrap_err();
    assert!(
        matches!(&error, Error::NoDriver(m) if m.contains("libcuda.so.1")),
        "{error:?}"
    );
    assert_eq!(device_count(), 0);

    // A failure is not remembered: the host may load the library later.
    let stub = crate::stub::build(Stub::Complete).expect("a C compiler");
    // SAFETY: the stub has no initialisers.
    let library = unsafe { libloading::Library::new(stub.join("libcuda.so.1")) };
    std::mem::forget(library.expect("the stub loads"));
    assert_eq!(device_count(), 1);
}

fn missing_symbol() {
    let error = Driver::get().unwrap_err();
    assert!(
        matches!(&error, Error::NoDriver(m) if m.contains("cuTensorMapEncodeTiled")),
        "{error:?}"
    );
    assert_eq!(device_count(), 0);
}

fn too_old() {
    let error = Driver::get().unwrap_err();
    assert!(
        matches!(&error, Error::DriverTooOld(m) if m.contains("11.8") && m.contains("12.0")),
        "{error:?}"
    );
    assert_eq!(device_count(), 0);
}

fn toolkit_stub() {
    let error = Driver::get().unwrap_err();
    assert!(
        matches!(&error, Error::NoDriver(m) if m.contains("stub") && m.contains("34")),
        "{error:?}"
    );
    assert_eq!(device_count(), 0);
}

fn no_device() {
    let error = Driver::get().unwrap_err();
    assert!(
        matches!(&error, Error::NoDevice(m) if m.contains("cuInit")),
        "{error:?}"
    );
    assert_eq!(device_count(), 0);
}

fn device_properties() {
    assert_eq!(device_count(), 1);
    let driver = Driver::get().unwrap();
    assert_eq!(driver.version(), 13000);
    assert!(driver.accepts_cubins_of(13020) && driver.accepts_cubins_of(12080));
    assert!(!driver.accepts_cubins_of(14000));
    let device = driver.device(0).unwrap();
    assert_eq!(device.name, "Stub GPU");
    assert_eq!(device.compute_capability, (9, 0));
    assert_eq!((device.sm_count, device.l2_bytes), (132, 50 << 20));
    assert_eq!(device.shared_bytes_per_block, 232448);
    assert_eq!(device.memory_bytes_per_us, 3_352_320);
    for ordinal in [-1, 1] {
        let error = driver.device(ordinal).unwrap_err();
        assert!(
            matches!(&error, Error::NoDevice(m) if m.contains(&ordinal.to_string())),
            "{error:?}"
        );
    }
}

fn context() -> Arc<Context> {
    Context::retain(Driver::get().unwrap(), 0).unwrap()
}

fn context_is_restored() {
    let recorder = Recorder::new();
    let host = 0xABCD as *mut std::ffi::c_void;
    recorder.push(host);
    let context = context();
    assert_eq!((recorder.retained(), recorder.current()), (1, host));
    {
        let outer = context.enter().unwrap();
        assert_ne!(recorder.current(), host);
        let inner = context.enter().unwrap();
        drop(inner);
        assert_ne!(recorder.current(), host);
        drop(outer);
    }
    assert_eq!(recorder.current(), host);
    let function = kernel(&context, 0).unwrap();
    assert_eq!(recorder.current(), host);
    drop(context);
    assert_eq!(recorder.retained(), 1, "a kernel keeps its context");
    drop(function);
    assert_eq!((recorder.retained(), recorder.current()), (0, host));
}

fn streams() {
    let context = context();
    let current = context.enter().unwrap();
    for default in 0..=2 {
        current.check_stream(Stream(default)).unwrap();
        assert!(!current.is_capturing(Stream(default)).unwrap());
    }
    current.check_stream(Stream(0x1000)).unwrap();
    let error = current.check_stream(Stream(0x2000)).unwrap_err();
    assert!(
        matches!(&error, Error::DeviceMismatch(m) if m.contains("0x2000")),
        "{error:?}"
    );
    let error = current.check_stream(Stream(0x5000)).unwrap_err();
    assert!(
        matches!(&error, Error::Driver(m) if m.contains("cuStreamGetCtx") && m.contains("400"))
    );
    assert!(!current.is_capturing(Stream(0x1000)).unwrap());
    assert!(current.is_capturing(Stream(0x3000)).unwrap());
}

/// A kernel from an image that the stub does not look into.
fn kernel(context: &Arc<Context>, shared_bytes: u32) -> Result<Function, Error> {
    Module::load(context, b"\x7fELF")?.function("folio_test", shared_bytes)
}

fn out_of_memory() {
    let error = kernel(&context(), 0).unwrap_err();
    assert!(
        matches!(&error, Error::OutOfMemory(m) if m.contains("cuModuleLoadData") && m.contains("out of memory")),
        "{error:?}"
    );
}

fn too_much_shared_memory() {
    let error = kernel(&context(), 232449).unwrap_err();
    assert!(
        matches!(&error, Error::Unsupported(m) if m.contains("232449")),
        "{error:?}"
    );
    kernel(&context(), 232448).unwrap();
}

fn launch(cluster: u32, dependent: bool, maps: &[TensorMap]) -> (Result<(), Error>, Vec<String>) {
    let context = context();
    let function = kernel(&context, 65536).unwrap();
    let current = context.enter().unwrap();
    let recorder = Recorder::new();
    recorder.forget();
    let launch = Launch {
        grid: [4, 5, 6],
        threads: 128,
        cluster,
        dependent,
        stream: Stream(0x1000),
    };
    // SAFETY: the stub reads one number and the maps.
    let result = unsafe { launch.enqueue(&current, &function, &0x1234u64, maps) };
    (result, recorder.calls())
}

fn launch_failure() {
    let error = launch(1, false, &[]).0.unwrap_err();
    let Error::Driver(message) = &error else {
        panic!("{error:?}");
    };
    for part in [
        "cuLaunchKernelEx(folio_test)",
        "719",
        "CUDA_ERROR_LAUNCH_FAILED",
        "unspecified",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

fn launch_is_one_call() {
    let (result, calls) = launch(1, false, &[]);
    result.unwrap();
    assert_eq!(
        calls,
        ["cuLaunchKernelEx 4,5,6 x 128,1,1 shared 65536 stream 0x1000 params 0x1234"]
    );
}

fn launch_attributes() {
    let map = tiled_map(&[16, 4], &[32]).unwrap();
    let (result, calls) = launch(2, true, &[map, map]);
    result.unwrap();
    assert_eq!(calls.len(), 1);
    assert!(
        calls[0].contains(" attribute 4=2,1,1 attribute 6=1,"),
        "{calls:?}"
    );
    assert!(
        calls[0].contains(" params 0x1234 map 0x902210020 map 0x902210020"),
        "{calls:?}"
    );

    assert!(matches!(
        launch(1, false, &[map; MAX_TENSOR_MAPS + 1]).0,
        Err(Error::Internal(_))
    ));

    let context = context();
    let function = kernel(&context, 0).unwrap();
    let current = context.enter().unwrap();
    let recorder = Recorder::new();
    recorder.forget();
    let nothing = Launch {
        grid: [0, 1, 1],
        threads: 32,
        cluster: 1,
        dependent: false,
        stream: Stream(0),
    };
    // SAFETY: nothing is launched.
    unsafe { nothing.enqueue(&current, &function, &0u64, &[]) }.unwrap();
    assert!(recorder.calls().is_empty());
}

fn tiled_map(extents: &[u64], strides: &[u64]) -> Result<TensorMap, Error> {
    let tiled = Tiled {
        dtype: DType::BF16,
        address: 0x1000,
        extents,
        strides,
        box_extents: &[16, 2, 1, 1, 1][..extents.len().min(5)],
        element_strides: &[1; 5][..extents.len().min(5)],
        swizzle: Swizzle::Span64,
        l2_promotion: L2Promotion::Bytes64,
    };
    TensorMap::encode(Driver::get().unwrap(), &tiled)
}

fn tensor_maps() {
    tiled_map(&[64, 8, 8, 8, 8], &[128, 256, 16, 1 << 39]).unwrap();
    let refusals: [(&[u64], &[u64], &str); 6] = [
        (&[], &[], "rank 0"),
        (&[64; 6], &[16; 5], "rank 6"),
        (&[64, 8], &[16, 16], "strides"),
        (&[64, 0], &[128], "extent 0"),
        (&[64, 8], &[24], "stride 24"),
        (&[64, 8], &[1 << 40], "2^40"),
    ];
    for (extents, strides, part) in refusals {
        let error = tiled_map(extents, strides).unwrap_err();
        assert!(
            matches!(&error, Error::InvalidArgument(m) if m.contains(part)),
            "{part}: {error:?}"
        );
    }
}

fn events() {
    let context = context();
    let event = Event::new(&context).unwrap();
    let current = context.enter().unwrap();
    assert!(event.is_reached(&current).unwrap(), "nothing was recorded");
    event.record(&current, Stream(0x1000)).unwrap();
    assert!(!event.is_reached(&current).unwrap());
    event.wait(&current).unwrap();
    assert!(event.is_reached(&current).unwrap());
    let recorder = Recorder::new();
    recorder.forget();
    // SAFETY: the stub copies nothing.
    unsafe { current.upload(0x1000, &[1, 2, 3], Stream(0)) }.unwrap();
    // SAFETY: as above.
    unsafe { current.upload(0x1000, &[], Stream(0)) }.unwrap();
    assert_eq!(recorder.calls(), ["cuMemcpyHtoDAsync"]);
}

fn any_row() -> &'static Row {
    kernels::table().next().unwrap()
}

/// With the compiler switched off, a row outside the bundle is refused by name.
fn kernels_that_are_not_there() {
    let context = context();
    let loader = Loader::new(&context, Logger::silent()).unwrap();
    let mut row = any_row().clone();
    row.defines.push("NOT_IN_THE_BUNDLE".into());
    let error = loader.load(&row).unwrap_err();
    let Error::Unsupported(message) = &error else {
        panic!("{error:?}");
    };
    for part in [row.name.as_str(), "sm_90a", "NVRTC", "the library holds"] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

/// A driver takes cubins of its own major version and older ones only.
fn kernels_of_a_newer_compiler() {
    let bundle = loader::embedded().unwrap();
    if bundle.version() < 13000 {
        harness::skip("the library was built without NVRTC 13");
    }
    let loader = Loader::new(&context(), Logger::silent()).unwrap();
    let error = loader.load(any_row()).unwrap_err();
    assert!(
        matches!(&error, Error::DriverTooOld(m) if m.contains("13.0") && m.contains("12.8")),
        "{error:?}"
    );
}
