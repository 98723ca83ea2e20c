//! The CUDA backend on a real GPU, through the C functions: the attention contract over the same random
//! problems as the CPU, and what only a device has: streams, graphs, lengths in device memory. Skipped
//! without a device.

mod append_run;
mod biases;
mod bounds;
mod cascade;
#[path = "../common/mod.rs"]
mod common;
mod context_parallel;
mod copy;
mod decode;
mod extend;
mod few_keys;
mod formats;
mod fp8_products;
mod fp8_queries;
mod gather;
mod gpu;
#[path = "../harness/mod.rs"]
mod harness;
mod head_dims;
mod index;
mod lse;
mod masks;
mod merge;
mod mixed;
mod mla;
mod mla_cache;
mod mla_context;
mod mla_few;
mod operators;
mod outputs;
mod prefill_logits;
mod prefill_rows;
mod prefill_widened;
mod prefill_widened_forms;
mod problems;
mod projections;
mod rope_append;
mod scales;
mod steps;
mod stored_decode;
mod tree;

use folio::api::cuda_device_count;
use harness::case;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cases = [
        case("peers_grids", (), problems::peers_grids),
        case("host_lengths", (), problems::host_lengths),
        case("device_lengths", (), problems::device_lengths),
        case("device_page_ids", (), problems::device_page_ids),
        case("long_splits", (), problems::long_splits),
        case("fp8_queries", (), fp8_queries::fp8_queries),
        case("long_fp8_queries", (), fp8_queries::long_fp8_queries),
        case("wide_indices", (), problems::wide_indices),
        case("scales_in_tensors", (), scales::scales_in_tensors),
        case(
            "scales_change_under_a_graph",
            (),
            scales::scales_change_under_a_graph,
        ),
        case("lse_of_16_bits", (), lse::lse_of_16_bits),
        case("lse_of_16_bits_of_sums", (), lse::lse_of_16_bits_of_sums),
        case("fp8_products", (), fp8_products::fp8_products),
        case(
            "fp8_products_of_device_lengths",
            (),
            fp8_products::fp8_products_of_device_lengths,
        ),
        case("long_fp8_products", (), fp8_products::long_fp8_products),
        case(
            "fp8_products_under_masks",
            (),
            fp8_products::fp8_products_under_masks,
        ),
        case("many_requests", (), problems::many_requests),
        case("equal_shares", (), problems::equal_shares),
        case("prefill_tail", (), problems::prefill_tail),
        case("splits_of_few_heads", (), problems::splits_of_few_heads),
        case("decode_tiles", (), problems::decode_tiles),
        case("narrow_tiles", (), problems::narrow_tiles),
        case("few_keys", (), few_keys::few_keys),
        case("few_keys_between_many", (), few_keys::few_keys_between_many),
        case("few_keys_in_windows", (), few_keys::few_keys_in_windows),
        case(
            "more_parts_than_there_is_room_for",
            (),
            problems::more_parts_than_there_is_room_for,
        ),
        case("any_group", (), problems::any_group),
        case("decode_head_dims", (), decode::decode_head_dims),
        case(
            "decode_head_dims_of_models",
            (),
            decode::decode_head_dims_of_models,
        ),
        case("decode_packed_rows", (), decode::decode_packed_rows),
        case("decode_by_warpgroups", (), decode::decode_by_warpgroups),
        case("decode_logits", (), decode::decode_logits),
        case("head_dims", (), head_dims::every_pair_of_widths),
        case("head_dims_of_split_rows", (), head_dims::split_rows),
        case("wide_rows", (), head_dims::wide_rows),
        case(
            "bf16_queries_of_any_size",
            (),
            head_dims::bf16_queries_of_any_size,
        ),
        case(
            "bf16_queries_of_extreme_sizes",
            (),
            head_dims::bf16_queries_of_extreme_sizes,
        ),
        case("random_wide_rows", (), head_dims::random_wide_rows),
        case("split_keys", (), problems::split_keys),
        case("prefill_soft_caps", (), prefill_logits::soft_caps),
        case("prefill_distances", (), prefill_logits::distances),
        case("prefill_caps_alone", (), prefill_logits::caps_alone),
        case("prefill_slopes_alone", (), prefill_logits::slopes_alone),
        case("prefill_rows_pages", (), prefill_rows::pages),
        case("prefill_rows_strides", (), prefill_rows::strides),
        case("prefill_rows_odd_lengths", (), prefill_rows::odd_lengths),
        case("prefill_rows_layers", (), prefill_rows::layers),
        case("prefill_rows_masks", (), prefill_rows::masks),
        case(
            "prefill_rows_masks_of_split_keys",
            (),
            prefill_rows::masks_of_split_keys,
        ),
        case("prefill_rows_long", (), prefill_rows::long),
        case("prefill_rows_waves", (), prefill_rows::waves),
        case("prefill_widened_widths", (), prefill_widened::widths),
        case("prefill_widened_layers", (), prefill_widened::layers),
        case("prefill_widened_batches", (), prefill_widened::batches),
        case("mixed_types", (), mixed::mixed_types),
        case("mixed_fp8_outputs", (), mixed::mixed_fp8_outputs),
        case("mixed_forms", (), mixed::mixed_forms),
        case("mixed_layers", (), mixed::mixed_layers),
        case("mixed_batches", (), mixed::mixed_batches),
        case("mixed_drafts", (), mixed::mixed_drafts),
        case("mixed_invariant", (), mixed::mixed_invariant),
        case(
            "prefill_widened_fp8_queries",
            (),
            prefill_widened::fp8_queries,
        ),
        case(
            "prefill_widened_fp8_queries_layers",
            (),
            prefill_widened::fp8_queries_layers,
        ),
        case(
            "prefill_widened_fp8_queries_splits",
            (),
            prefill_widened::fp8_queries_splits,
        ),
        case("prefill_widened_copies", (), prefill_widened::copies),
        case("prefill_widened_masks", (), prefill_widened::masks),
        case("prefill_outputs", (), outputs::outputs),
        case(
            "prefill_outputs_of_widened_keys",
            (),
            outputs::of_widened_keys,
        ),
        case(
            "prefill_widened_forms_widths",
            (),
            prefill_widened_forms::widths,
        ),
        case(
            "prefill_widened_forms_layers",
            (),
            prefill_widened_forms::layers,
        ),
        case(
            "prefill_widened_forms_masks",
            (),
            prefill_widened_forms::masks_of_widths,
        ),
        case(
            "prefill_widened_forms_splits",
            (),
            prefill_widened_forms::splits,
        ),
        case(
            "prefill_widened_forms_of_any_size",
            (),
            prefill_widened_forms::numbers_of_any_size,
        ),
        case(
            "prefill_widened_forms_batches",
            (),
            prefill_widened_forms::batches,
        ),
        case(
            "prefill_widened_forms_batch_invariant",
            (),
            prefill_widened_forms::batch_invariant,
        ),
        case("batch_invariant", (), problems::batch_invariant),
        case("many_split_rows", (), problems::many_split_rows),
        case("far_offsets", (), problems::far_offsets),
        case("masks_of_many_rows", (), masks::masks_of_many_rows),
        case("masks_of_few_rows", (), masks::masks_of_few_rows),
        case("custom_masks", (), masks::custom_masks),
        case("biases", (), biases::biases),
        case(
            "biases_of_split_requests",
            (),
            biases::biases_of_split_requests,
        ),
        case(
            "biases_beyond_the_tensor",
            (),
            biases::biases_beyond_the_tensor,
        ),
        case("biases_under_a_graph", (), biases::biases_under_a_graph),
        case("items", (), masks::items),
        case("items_under_a_graph", (), masks::items_under_a_graph),
        case("rows_that_see_nothing", (), masks::rows_that_see_nothing),
        case(
            "masks_of_split_requests",
            (),
            masks::masks_of_split_requests,
        ),
        case("extend_random", (), extend::extend_random),
        case("extend_layers", (), extend::extend_layers),
        case("extend_types", (), extend::extend_types),
        case("extend_packed_unseen", (), extend::extend_packed_unseen),
        case(
            "extend_few_cached_scales",
            (),
            extend::extend_few_cached_scales,
        ),
        case("extend_long", (), extend::extend_long),
        case("extend_device_page_ids", (), extend::extend_device_page_ids),
        case("extend_graph_replays", (), extend::extend_graph_replays),
        case("graph_replays", (), steps::graph_replays),
        case(
            "graph_plans_on_the_device",
            (),
            steps::graph_plans_on_the_device,
        ),
        case(
            "batch_invariant_replays",
            (),
            steps::batch_invariant_replays,
        ),
        case("destroyed_in_flight", (), steps::destroyed_in_flight),
        case("replan_in_flight", (), steps::replan_in_flight),
        case("two_streams", (), steps::two_streams),
        case("threads_share_a_plan", (), steps::threads_share_a_plan),
        case("captures_are_refused", (), steps::captures_are_refused),
        case("append", (), operators::append),
        case("copy", (), copy::copy),
        case("copy_swaps", (), copy::swaps),
        case(
            "copy_pairs_beyond_the_tensors",
            (),
            copy::pairs_beyond_the_tensors,
        ),
        case("copy_graph", (), copy::copy_graph),
        case("formats_append_and_gather", (), formats::append_and_gather),
        case(
            "formats_attention_with_host_lengths",
            (),
            formats::attention_with_host_lengths,
        ),
        case(
            "formats_attention_with_device_lengths",
            (),
            formats::attention_with_device_lengths,
        ),
        case("formats_cascades", (), formats::cascades),
        case("formats_packed_rows", (), stored_decode::packed_rows),
        case("formats_splits", (), stored_decode::splits),
        case(
            "formats_batch_invariant",
            (),
            stored_decode::batch_invariant,
        ),
        case("gather", (), gather::gather),
        case(
            "gathers_beyond_the_tensors",
            (),
            gather::gathers_beyond_the_tensors,
        ),
        case("merge", (), operators::merge),
        case("golden_merge", (), operators::golden_merge),
        case("merge_general", (), merge::merge_general),
        case("merge_varlen", (), merge::merge_varlen),
        case(
            "states_beyond_the_tensors",
            (),
            merge::states_beyond_the_tensors,
        ),
        case("projection_products", (), projections::products),
        case(
            "projection_products_of_every_tile",
            (),
            projections::products_of_every_tile,
        ),
        case(
            "projection_chains_are_replayed",
            (),
            projections::chains_are_replayed,
        ),
        case(
            "projection_absorbed_weights",
            (),
            projections::absorbed_weights,
        ),
        case("batch_lengths", (), index::batch_lengths),
        case("kv_indices", (), index::kv_indices),
        case("block_table", (), index::block_table),
        case("slot_mapping", (), index::slot_mapping),
        case("draft_kv_indices", (), index::draft_kv_indices),
        case(
            "indices_beyond_the_tensors",
            (),
            index::indices_beyond_the_tensors,
        ),
        case("indices_are_replayed", (), index::indices_are_replayed),
        case("cp_reorder", (), context_parallel::cp_reorder),
        case("cp_correct", (), context_parallel::cp_correct),
        case("cp_attend", (), context_parallel::cp_attend),
        case("tree_mask", (), tree::tree_mask),
        case(
            "tree_mask_of_wrong_numbers",
            (),
            tree::tree_mask_of_wrong_numbers,
        ),
        case("tree_mask_replays", (), tree::tree_mask_replays),
        case("rope_append", (), rope_append::rope_append),
        case("append_run", (), append_run::append_run),
        case(
            "append_run_by_every_kernel",
            (),
            append_run::append_run_by_every_kernel,
        ),
        case(
            "append_run_in_a_graph",
            (),
            append_run::append_run_in_a_graph,
        ),
        case(
            "rope_append_to_every_form",
            (),
            rope_append::rope_append_to_every_form,
        ),
        case(
            "rope_append_of_one_and_of_many",
            (),
            rope_append::rope_append_of_one_and_of_many,
        ),
        case(
            "rope_append_beyond_the_tensors",
            (),
            rope_append::rope_append_beyond_the_tensors,
        ),
        case("mla_append", (), mla_cache::mla_append),
        case("mla_gather", (), mla_cache::mla_gather),
        case("golden_records", (), mla_cache::golden_records),
        case("cascade", (), cascade::cascade),
        case("cascade_of_many", (), cascade::cascade_of_many),
        case("cascade_of_wide_rows", (), cascade::cascade_of_wide_rows),
        case("cascade_of_documents", (), cascade::cascade_of_documents),
        case(
            "cascade_on_every_kernel",
            (),
            cascade::cascade_on_every_kernel,
        ),
        case("cascade_graph", (), cascade::cascade_graph),
        case(
            "cascade_with_device_lengths",
            (),
            cascade::cascade_with_device_lengths,
        ),
        case(
            "cascade_trees_with_device_lengths",
            (),
            cascade::cascade_trees_with_device_lengths,
        ),
        case(
            "cascade_of_many_prefixes",
            (),
            cascade::cascade_of_many_prefixes,
        ),
        case(
            "cascade_graph_plans_on_the_device",
            (),
            cascade::cascade_graph_plans_on_the_device,
        ),
        case(
            "cascade_with_wrong_device_lengths",
            (),
            cascade::cascade_with_wrong_device_lengths,
        ),
        case("mla_context", (), mla_context::mla_context),
        case(
            "mla_context_of_many_heads",
            (),
            mla_context::mla_context_of_many_heads,
        ),
        case("mla_context_graph", (), mla_context::mla_context_graph),
        case(
            "mla_context_in_flight",
            (),
            mla_context::mla_context_in_flight,
        ),
        case(
            "records_beyond_the_tensors",
            (),
            mla_cache::records_beyond_the_tensors,
        ),
        case(
            "batches_beyond_the_tensors",
            (),
            bounds::batches_beyond_the_tensors,
        ),
        case("slots_beyond_the_cache", (), bounds::slots_beyond_the_cache),
        case("mla_host_lengths", (), mla::host_lengths),
        case("mla_device_lengths", (), mla::device_lengths),
        case("mla_heads_and_rows", (), mla::heads_and_rows),
        case("mla_fp8_queries", (), mla::fp8_queries),
        case("mla_lengths_around_a_tile", (), mla::lengths_around_a_tile),
        case("mla_long_splits", (), mla::long_splits),
        case("mla_many_requests", (), mla::many_requests),
        case("mla_equal_shares", (), mla::equal_shares),
        case("mla_batch_invariant", (), mla::batch_invariant),
        case(
            "mla_batch_invariant_replays",
            (),
            mla::batch_invariant_replays,
        ),
        case("mla_graph_replays", (), mla::graph_replays),
        case(
            "mla_graph_plans_on_the_device",
            (),
            mla::graph_plans_on_the_device,
        ),
        case("mla_graph_drafts", (), mla::graph_drafts),
        case(
            "mla_batches_beyond_the_tensors",
            (),
            mla::batches_beyond_the_tensors,
        ),
        case(
            "mla_decodes_beside_prompts",
            (),
            mla::decodes_beside_prompts,
        ),
        case("mla_both_forms", (), mla::both_forms),
        case("mla_far_pages", (), mla::far_pages),
        case("mla_lists_of_tokens", (), mla::lists_of_tokens),
        case("mla_few_pages", (), mla_few::pages),
        case(
            "mla_few_lengths_around_the_ring",
            (),
            mla_few::lengths_around_the_ring,
        ),
        case(
            "mla_few_rows_of_several_tokens",
            (),
            mla_few::rows_of_several_tokens,
        ),
        case("mla_few_units_in_turn", (), mla_few::units_in_turn),
        case("mla_few_chunks", (), mla_few::chunks),
    ];
    harness::main(&cases, |_, _| match cuda_device_count() {
        0 => Err("no CUDA device".into()),
        _ => Ok(()),
    })
}
