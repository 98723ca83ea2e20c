// FastDeploy's ops that are called once per step: tile lists and maxima, slots and positions, cumulative key lengths.
//
// Results that live in CPU tensors, and lists of tiles, need the lengths on the host. They are copied there, which waits for
// the device; while a graph is captured such outputs are left as they are, as FastDeploy does it, and no op of this library
// reads them.
#include "grouped.h"
#include "ops.h"

#include "folio_backend.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#ifdef PADDLE_WITH_CUDA
#include "paddle/phi/backends/gpu/gpu_info.h"
#endif

namespace folio_paddle {
namespace {

using Ints = std::vector<int32_t>;

/** Writes the first rows of an int32 tensor, wherever it is. */
void write(const char *name, Tensor &target, const Ints &values)
{
    require(target.dtype() == paddle::DataType::INT32 && target.numel() >= static_cast<int64_t>(values.size()),
            std::string(name) + " has room for " + std::to_string(target.numel()) + " int32; " +
                std::to_string(values.size()) + " are needed");
    if (values.empty())
        return;
    if (!target.is_gpu()) {
        std::copy(values.begin(), values.end(), target.data<int32_t>());
        return;
    }
    const int64_t count = static_cast<int64_t>(values.size());
    Tensor part = target.numel() == count ? target : target.slice(0, count * target.shape()[0] / target.numel());
    Tensor host = px::empty(part.shape(), paddle::DataType::INT32, paddle::CPUPlace());
    std::copy(values.begin(), values.end(), host.data<int32_t>());
    part.copy_(host, target.place(), false);
    finish(target); /* which reads `host` */
}

int32_t ceil_div(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

/** The lengths of a step on the host, and which kinds of requests they make. */
struct Step {
    Ints encoder, decoder, this_time;

    Step(const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder, const Tensor &seq_lens_this_time)
    {
        // One copy of all three, since each waits for the device.
        const int64_t batch_size = seq_lens_this_time.numel();
        const Tensor all = px::concat({lengths("seq_lens_encoder", seq_lens_encoder, batch_size),
                                       lengths("seq_lens_decoder", seq_lens_decoder, batch_size),
                                       lengths("seq_lens_this_time", seq_lens_this_time, batch_size)},
                                      0);
        const Tensor host = all.is_cpu() ? all : all.copy_to(paddle::CPUPlace(), false);
        finish(all);
        const auto *first = host.data<int32_t>();
        encoder.assign(first, first + batch_size);
        decoder.assign(first + batch_size, first + 2 * batch_size);
        this_time.assign(first + 2 * batch_size, first + 3 * batch_size);
    }

    size_t size() const { return this_time.size(); }

    /** max_len_tensor_cpu: new tokens, encoder, decoder, all keys, keys of pure decodes, keys of rows with a past. */
    std::array<int32_t, 6> maxima() const
    {
        std::array<int32_t, 6> most{};
        auto raise = [&](size_t index, int32_t value) { most[index] = std::max(most[index], value); };
        for (size_t b = 0; b < size(); b++) {
            raise(0, this_time[b]);
            raise(1, encoder[b]);
            raise(2, decoder[b]);
            if (this_time[b] <= 0)
                continue;
            raise(3, decoder[b] + this_time[b]);
            if (encoder[b] <= 0)
                raise(4, decoder[b]);
            if (decoder[b] > 0)
                raise(5, decoder[b] + this_time[b]);
        }
        return most;
    }

    /** What its prompts are. `num_keys`: new tokens of all requests, and the cached contexts of prompts. */
    struct Prompts {
        bool over_contexts = false, fresh = false;
        int64_t num_keys = 0;
    };

    Prompts prompts() const
    {
        Prompts there;
        for (size_t b = 0; b < size(); b++) {
            const bool context = encoder[b] > 0 && decoder[b] > 0, runs = this_time[b] > 0;
            there.over_contexts |= runs && context;
            there.fresh |= runs && encoder[b] > 0 && !context;
            there.num_keys += std::max(this_time[b], 0) + (context ? decoder[b] : 0);
        }
        return there;
    }
};

/** Which tile of which request: one entry for each of counts[b] tiles. */
struct Tiles {
    Ints batch_ids, tile_ids;

    explicit Tiles(const Ints &counts)
    {
        for (size_t b = 0; b < counts.size(); b++)
            for (int32_t tile = 0; tile < counts[b]; tile++) {
                batch_ids.push_back(static_cast<int32_t>(b));
                tile_ids.push_back(tile);
            }
    }

    Ints count() const { return {static_cast<int32_t>(batch_ids.size())}; }
};

template <class Count>
Tiles tiles_of(const Step &step, Count count)
{
    Ints counts(step.size());
    for (size_t b = 0; b < step.size(); b++)
        counts[b] = count(step.encoder[b], step.decoder[b], step.this_time[b]);
    return Tiles(counts);
}

/** Keys of a row that decodes. */
int32_t decode_keys(int32_t encoder, int32_t decoder, int32_t this_time)
{
    return this_time > 0 && encoder <= 0 ? decoder + this_time : 0;
}

/** Keys per work item of MLA decodes: block_size · 2^i, i < 12, with the fullest last wave of work items; 1 <= i where any helps. */
int32_t latent_chunk(const Step &step, int32_t block_size, int32_t num_sms)
{
    int32_t best = block_size;
    int64_t fullest = 0;
    for (int i = 1; i < 12; i++) {
        int64_t items = 0;
        for (size_t b = 0; b < step.size(); b++)
            items += ceil_div(decode_keys(step.encoder[b], step.decoder[b], step.this_time[b]), int64_t{block_size} << i);
        if (items % num_sms >= fullest) {
            fullest = items % num_sms;
            best = block_size << i;
        }
    }
    return best;
}

int32_t num_sms(const Tensor &tensor)
{
#ifdef PADDLE_WITH_CUDA
    if (tensor.is_gpu())
        return phi::backends::gpu::GetGPUMultiProcessors(tensor.place().GetDeviceId());
#endif
    (void)tensor;
    return 132; /* an H100's, so that lists made on the CPU are those of FastDeploy's own runs */
}

/** The tiles of a step, as FastDeploy's kernels take them; Folio's need none. */
struct AllTiles {
    Tiles decoder, encoder, kv;
    int32_t decoder_chunk;
};

AllTiles cut(const Step &step, const Tensor &like, int encoder_block_shape_q, int decoder_block_shape_q, int group_size,
             int block_size)
{
    require(block_size > 0, "block_size is " + std::to_string(block_size) + "; 1 or more is accepted");
    // The blocks that prompts write to, from the one in which their cached context ends.
    Tiles kv = tiles_of(step, [&](int32_t e, int32_t d, int32_t) { return e > 0 ? ceil_div(e + d % block_size, block_size) : 0; });
    // MLA backends have no block shapes, or say -1.
    if (folio_backend::keeps_latent_cache() || (encoder_block_shape_q < 0 && decoder_block_shape_q < 0)) {
        const int32_t chunk = latent_chunk(step, block_size, num_sms(like));
        return {tiles_of(step, [&](int32_t e, int32_t d, int32_t t) { return ceil_div(decode_keys(e, d, t), chunk); }),
                Tiles({}), std::move(kv), chunk};
    }
    require(encoder_block_shape_q > 0 && decoder_block_shape_q > 0 && group_size > 0,
            "encoder_block_shape_q, decoder_block_shape_q and group_size are above 0 for caches of keys and values, or both "
            "block shapes are -1 for latent caches");
    return {tiles_of(step, [&](int32_t e, int32_t, int32_t t) { return e > 0 ? 0 : ceil_div(int64_t{t} * group_size, decoder_block_shape_q); }),
            tiles_of(step, [&](int32_t e, int32_t, int32_t) { return ceil_div(int64_t{e} * group_size, encoder_block_shape_q); }),
            std::move(kv), block_size};
}

/** Work items of FastDeploy's decode kernels: four numbers each, request, key head, chunk of keys, tile of 16 queries. */
struct WorkItems {
    Ints items;
    int32_t chunk;
};

/** How many work items chunks of `chunk` keys make of the requests that decode. */
int64_t count_items(const Step &step, int32_t chunk, int group_size, int kv_num_heads)
{
    int64_t count = 0;
    for (size_t b = 0; b < step.size(); b++)
        count += int64_t{ceil_div(decode_keys(step.encoder[b], step.decoder[b], step.this_time[b]), chunk)} *
                 ceil_div(int64_t{step.this_time[b]} * group_size, 16) * kv_num_heads;
    return count;
}

/**
 * The longest chunks, of 512 to 16384 keys, that leave three work items to each multiprocessor; 512 where none do.
 * FastDeploy's buffers of partial results have room for chunks of 512.
 */
WorkItems decode_items(const Step &step, int group_size, int kv_num_heads, int32_t num_multiprocessors)
{
    WorkItems made{{}, 16384};
    while (made.chunk > 512 && count_items(step, made.chunk, group_size, kv_num_heads) < 3 * num_multiprocessors)
        made.chunk -= 128;
    for (int32_t b = 0; b < static_cast<int32_t>(step.size()); b++) {
        const int32_t chunks = ceil_div(decode_keys(step.encoder[b], step.decoder[b], step.this_time[b]), made.chunk);
        for (int32_t head = 0; head < kv_num_heads; head++)
            for (int32_t chunk = 0; chunk < chunks; chunk++)
                for (int32_t tile = 0; tile < ceil_div(int64_t{step.this_time[b]} * group_size, 16); tile++)
                    made.items.insert(made.items.end(), {b, head, chunk, tile});
    }
    return made;
}

void write_tiles(Tensor &batch_ids, Tensor &tile_ids, const Tiles &tiles)
{
    write("batch_ids", batch_ids, tiles.batch_ids);
    write("tile_ids_per_batch", tile_ids, tiles.tile_ids);
}

void write_maxima(Tensor &max_len_tensor_cpu, const Step &step)
{
    const auto most = step.maxima();
    write("max_len_tensor_cpu", max_len_tensor_cpu, Ints(most.begin(), most.end()));
}

Tensor of_ints(const Ints &values, const paddle::Place &place)
{
    Tensor made = px::empty({static_cast<int64_t>(values.size())}, paddle::DataType::INT32, place);
    write("an output", made, values);
    return made;
}

}  // namespace

void get_block_shape_and_split_kv_block(
    const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder, const Tensor &seq_lens_this_time,
    Tensor &decoder_batch_ids, Tensor &decoder_tile_ids_per_batch, Tensor &decoder_num_blocks_cpu,
    Tensor &decoder_num_blocks_device, Tensor &decoder_chunk_size_device, Tensor &max_len_tensor_cpu,
    Tensor &encoder_batch_ids, Tensor &encoder_tile_ids_per_batch, Tensor &encoder_num_blocks_x_cpu, Tensor &kv_batch_ids,
    Tensor &kv_tile_ids_per_batch, Tensor &kv_num_blocks_x_cpu, const int encoder_block_shape_q,
    const int decoder_block_shape_q, const int group_size, const int block_size)
{
    guarded("get_block_shape_and_split_kv_block", [&] {
        if (capturing())
            return;
        const Step step(seq_lens_encoder, seq_lens_decoder, seq_lens_this_time);
        const AllTiles tiles =
            cut(step, seq_lens_this_time, encoder_block_shape_q, decoder_block_shape_q, group_size, block_size);
        write_maxima(max_len_tensor_cpu, step);
        write_tiles(decoder_batch_ids, decoder_tile_ids_per_batch, tiles.decoder);
        write("decoder_num_blocks_cpu", decoder_num_blocks_cpu, tiles.decoder.count());
        write("decoder_num_blocks_device", decoder_num_blocks_device, tiles.decoder.count());
        write("decoder_chunk_size_device", decoder_chunk_size_device, {tiles.decoder_chunk});
        write_tiles(encoder_batch_ids, encoder_tile_ids_per_batch, tiles.encoder);
        write("encoder_num_blocks_x_cpu", encoder_num_blocks_x_cpu, tiles.encoder.count());
        write_tiles(kv_batch_ids, kv_tile_ids_per_batch, tiles.kv);
        write("kv_num_blocks_x_cpu", kv_num_blocks_x_cpu, tiles.kv.count());
    });
}

void get_block_shape_and_split_kv_block_v3(
    const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder, const Tensor &seq_lens_this_time,
    Tensor &decoder_batch_ids, Tensor &decoder_tile_ids_per_batch, Tensor &decoder_num_blocks_cpu,
    Tensor &decoder_num_blocks_device, Tensor &decoder_chunk_size_device, Tensor &max_len_tensor_cpu,
    Tensor &encoder_batch_ids, Tensor &encoder_tile_ids_per_batch, Tensor &encoder_num_blocks_x_cpu, Tensor &kv_batch_ids,
    Tensor &kv_tile_ids_per_batch, Tensor &kv_num_blocks_x_cpu, const int encoder_block_shape_q,
    const int decoder_block_shape_q, const int group_size, const int block_size, const int decoder_step_token_num)
{
    (void)decoder_step_token_num; /* seq_lens_this_time says how many tokens each row has */
    get_block_shape_and_split_kv_block(seq_lens_encoder, seq_lens_decoder, seq_lens_this_time, decoder_batch_ids,
                                       decoder_tile_ids_per_batch, decoder_num_blocks_cpu, decoder_num_blocks_device,
                                       decoder_chunk_size_device, max_len_tensor_cpu, encoder_batch_ids,
                                       encoder_tile_ids_per_batch, encoder_num_blocks_x_cpu, kv_batch_ids,
                                       kv_tile_ids_per_batch, kv_num_blocks_x_cpu, encoder_block_shape_q,
                                       decoder_block_shape_q, group_size, block_size);
}

void get_block_shape_and_split_kv_block_v2(
    const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder, const Tensor &seq_lens_this_time,
    Tensor &decoder_batch_ids, Tensor &decoder_tile_ids_per_batch, Tensor &decoder_num_blocks_cpu,
    Tensor &max_len_tensor_cpu, Tensor &encoder_batch_ids, Tensor &encoder_tile_ids_per_batch,
    Tensor &encoder_num_blocks_x_cpu, Tensor &kv_batch_ids, Tensor &kv_tile_ids_per_batch, Tensor &kv_num_blocks_x_cpu,
    Tensor &max_len_kv_cpu, const int encoder_block_shape_q, const int decoder_block_shape_q, const int group_size,
    const int block_size, const int decoder_step_token_num)
{
    (void)decoder_step_token_num; /* seq_lens_this_time says how many tokens each row has */
    guarded("get_block_shape_and_split_kv_block", [&] {
        if (capturing())
            return;
        const Step step(seq_lens_encoder, seq_lens_decoder, seq_lens_this_time);
        const AllTiles tiles =
            cut(step, seq_lens_this_time, encoder_block_shape_q, decoder_block_shape_q, group_size, block_size);
        write_maxima(max_len_tensor_cpu, step);
        write_tiles(decoder_batch_ids, decoder_tile_ids_per_batch, tiles.decoder);
        write("decoder_num_blocks_cpu", decoder_num_blocks_cpu, tiles.decoder.count());
        write_tiles(encoder_batch_ids, encoder_tile_ids_per_batch, tiles.encoder);
        write("encoder_num_blocks_x_cpu", encoder_num_blocks_x_cpu, tiles.encoder.count());
        write_tiles(kv_batch_ids, kv_tile_ids_per_batch, tiles.kv);
        write("kv_num_blocks_x_cpu", kv_num_blocks_x_cpu, tiles.kv.count());
        write("max_len_kv_cpu", max_len_kv_cpu, {step.maxima()[5]});
    });
}

std::vector<Tensor> get_block_shape_and_split_kv_block_v1(
    const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder, const Tensor &seq_lens_this_time,
    Tensor &decoder_batch_ids, Tensor &decoder_tile_ids_per_batch, Tensor &decoder_num_blocks_cpu,
    Tensor &max_len_tensor_cpu, const int encoder_block_shape_q, const int decoder_block_shape_q, const int group_size,
    const int block_size, const int decoder_step_token_num)
{
    (void)decoder_step_token_num;
    return guarded("get_block_shape_and_split_kv_block", [&]() -> std::vector<Tensor> {
        require(!capturing(), "this signature makes tensors of a size that depends on the lengths; it cannot be captured");
        const Step step(seq_lens_encoder, seq_lens_decoder, seq_lens_this_time);
        const AllTiles tiles =
            cut(step, seq_lens_this_time, encoder_block_shape_q, decoder_block_shape_q, group_size, block_size);
        write_maxima(max_len_tensor_cpu, step);
        write_tiles(decoder_batch_ids, decoder_tile_ids_per_batch, tiles.decoder);
        write("decoder_num_blocks_cpu", decoder_num_blocks_cpu, tiles.decoder.count());
        const auto place = seq_lens_this_time.place();
        const auto cpu = paddle::CPUPlace();
        return {of_ints(tiles.encoder.batch_ids, place), of_ints(tiles.encoder.tile_ids, place),
                of_ints(tiles.encoder.count(), cpu),     of_ints(tiles.kv.batch_ids, place),
                of_ints(tiles.kv.tile_ids, place),       of_ints(tiles.kv.count(), cpu),
                of_ints(tiles.decoder.count(), place),   of_ints({tiles.decoder_chunk}, cpu),
                of_ints({step.maxima()[5]}, cpu)};
    });
}

/**
 * Fills max_len_tensor_cpu alone, and says whether there are prompts over a cached context, whether there are prompts without
 * one, and how many keys there are where cached contexts of prompts lie before the new tokens. All come of one copy of the
 * lengths. In a capture nothing is written, and there is none of these.
 */
std::tuple<bool, bool, int64_t> max_lengths(const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder,
                                            const Tensor &seq_lens_this_time, Tensor &max_len_tensor_cpu)
{
    return guarded("max_lengths", [&]() -> std::tuple<bool, bool, int64_t> {
        if (capturing())
            return {false, false, 0};
        const Step step(seq_lens_encoder, seq_lens_decoder, seq_lens_this_time);
        write_maxima(max_len_tensor_cpu, step);
        const Step::Prompts prompts = step.prompts();
        return {prompts.over_contexts, prompts.fresh, prompts.num_keys};
    });
}

void config_for_attention(const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder,
                          const Tensor &seq_lens_this_time, Tensor &block_indices, Tensor &num_blocks, Tensor &chunk_size,
                          Tensor &max_len_tensor_cpu, const std::string &cache_quant_type, const int group_size,
                          const int kv_num_heads, const int max_tokens_per_batch)
{
    (void)max_tokens_per_batch; /* seq_lens_this_time says how many tokens each row has */
    guarded("config_for_attention", [&] {
        kind_of(cache_quant_type);
        require(group_size > 0 && kv_num_heads > 0, "group_size is " + std::to_string(group_size) +
                                                        " and kv_num_heads is " + std::to_string(kv_num_heads) +
                                                        "; 1 or more is accepted for both");
        require(block_indices.shape().size() == 2 && block_indices.shape()[1] == 4, "block_indices is not [n, 4]");
        if (capturing())
            return;
        const Step step(seq_lens_encoder, seq_lens_decoder, seq_lens_this_time);
        const WorkItems made = decode_items(step, group_size, kv_num_heads, num_sms(seq_lens_this_time));
        write("block_indices", block_indices, made.items);
        write("num_blocks", num_blocks, {static_cast<int32_t>(made.items.size() / 4)});
        write("chunk_size", chunk_size, {made.chunk});
        write_maxima(max_len_tensor_cpu, step);
    });
}

void get_position_ids_and_slot_mapping(const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder,
                                       const Tensor &seq_lens_this_time, const Tensor &batch_id_per_token,
                                       const Tensor &block_tables, Tensor &position_ids, Tensor &slot_mapping,
                                       const int block_size)
{
    (void)batch_id_per_token; /* the tokens lie request by request */
    guarded("get_position_ids_and_slot_mapping", [&] {
        const int64_t batch_size = seq_lens_this_time.numel(), num_tokens = slot_mapping.numel();
        require(position_ids.numel() == num_tokens, "position_ids and slot_mapping have different lengths");
        require(block_size > 0, "block_size is " + std::to_string(block_size) + "; 1 or more is accepted");
        lengths("seq_lens_encoder", seq_lens_encoder, batch_size);
        if (batch_size == 0 || num_tokens == 0)
            return;
        const Tensor this_time = lengths("seq_lens_this_time", seq_lens_this_time, batch_size);
        const Tensor zero = px::full({1}, 0, paddle::DataType::INT32, this_time.place());
        const Tensor cu = px::concat({zero, px::cast(px::cumsum(this_time, 0), paddle::DataType::INT32)}, 0);
        const Tensor kv_len = kv_lengths(lengths("seq_lens_decoder", seq_lens_decoder, batch_size), this_time);
        const Places made = places(cu, kv_len, block_tables, nullptr, block_size, num_tokens);
        // Elements beyond the batch keep their value.
        const Tensor active = px::greater_equal(made.positions, px::zeros_like(made.positions));
        for (auto [target, values] : {std::pair{&position_ids, &made.positions}, std::pair{&slot_mapping, &made.slots}}) {
            const Tensor typed = target->dtype() == values->dtype() ? *values : px::cast(*values, target->dtype());
            overwrite(*target, px::where(active, typed, px::reshape(*target, {num_tokens})));
        }
    });
}

/** pre_cache_len_concat in both signatures. `seq_lens_encoder` says whose cached keys count. */
std::vector<Tensor> concatenate(const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder,
                                const Tensor &seq_lens_this_time, const int block_size)
{
    return guarded("pre_cache_len_concat", [&]() -> std::vector<Tensor> {
        require(!capturing(), "its outputs have sizes that depend on the lengths; it cannot be captured");
        require(block_size > 0, "block_size is " + std::to_string(block_size) + "; 1 or more is accepted");
        const Step step(seq_lens_encoder, seq_lens_decoder, seq_lens_this_time);
        auto cached = [](int32_t encoder, int32_t decoder) { return encoder > 0 ? decoder : 0; };
        Ints cu_seqlens_k{0};
        for (size_t b = 0; b < step.size(); b++) {
            const int32_t added =
                step.this_time[b] > 0 ? cached(step.encoder[b], step.decoder[b]) + step.this_time[b] : 0;
            cu_seqlens_k.push_back(cu_seqlens_k.back() + added);
        }
        const Tiles tiles =
            tiles_of(step, [&](int32_t e, int32_t d, int32_t) { return ceil_div(cached(e, d), block_size); });
        const auto place = seq_lens_this_time.place();
        return {of_ints(cu_seqlens_k, place), of_ints(tiles.batch_ids, place), of_ints(tiles.tile_ids, place),
                of_ints(tiles.count(), paddle::CPUPlace()), of_ints({cu_seqlens_k.back()}, paddle::CPUPlace())};
    });
}

std::vector<Tensor> pre_cache_len_concat(const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder,
                                         const Tensor &seq_lens_this_time, const int max_dec_len, const int block_size)
{
    (void)max_dec_len; /* the lengths themselves are read */
    return concatenate(seq_lens_encoder, seq_lens_decoder, seq_lens_this_time, block_size);
}

std::vector<Tensor> pre_cache_len_concat_v1(const Tensor &seq_lens_decoder, const Tensor &seq_lens_this_time,
                                            const int max_dec_len, const int block_size)
{
    (void)max_dec_len;
    return concatenate(seq_lens_this_time, seq_lens_decoder, seq_lens_this_time, block_size);
}

}  // namespace folio_paddle

namespace folio_paddle {

void bind_step(pybind11::module_ &module)
{
    module.def("folio_get_block_shape_and_split_kv_block", &get_block_shape_and_split_kv_block,
               "Maxima and tile lists of a step, in place.");
    module.def("folio_get_block_shape_and_split_kv_block_v3", &get_block_shape_and_split_kv_block_v3,
               "With decoder_step_token_num.");
    module.def("folio_get_block_shape_and_split_kv_block_v1", &get_block_shape_and_split_kv_block_v1, "Nine outputs.");
    module.def("folio_get_block_shape_and_split_kv_block_v2", &get_block_shape_and_split_kv_block_v2,
               "In place, with max_len_kv_cpu.");
    module.def("folio_config_for_attention", &config_for_attention,
               "Maxima of a step and work items of its decodes, in place.");
    module.def("folio_max_lengths", &max_lengths,
               "Maxima of a step, in place; whether it has prompts over a cached context, and prompts without one; how many "
               "keys, cached contexts of prompts among them.");
    module.def("folio_get_position_ids_and_slot_mapping", &get_position_ids_and_slot_mapping,
               "Positions and slots of new tokens, in place.");
    module.def("folio_pre_cache_len_concat", &pre_cache_len_concat, "Cumulative key lengths of prompts with a past.");
    module.def("folio_pre_cache_len_concat_v1", &pre_cache_len_concat_v1, "Of all requests with new tokens.");
}

namespace {

Shapes nothing(const Shapes &, const std::vector<Shapes> &, const std::vector<paddle::any> &) { return {}; }
std::vector<paddle::DataType> no_type(const std::vector<paddle::DataType> &,
                                      const std::vector<std::vector<paddle::DataType>> &, const std::vector<paddle::any> &)
{
    return {};
}
Shapes concat_shapes(const Shapes &inputs, const std::vector<Shapes> &, const std::vector<paddle::any> &)
{
    return {{inputs[0][0] + 1}, {-1}, {-1}, {1}, {1}};
}
Shapes split_shapes(const Shapes &, const std::vector<Shapes> &, const std::vector<paddle::any> &)
{
    return {{-1}, {-1}, {1}, {-1}, {-1}, {1}, {1}, {1}, {1}};
}
template <size_t Count>
std::vector<paddle::DataType> int_types(const std::vector<paddle::DataType> &,
                                        const std::vector<std::vector<paddle::DataType>> &,
                                        const std::vector<paddle::any> &)
{
    return std::vector<paddle::DataType>(Count, paddle::DataType::INT32);
}

}  // namespace
}  // namespace folio_paddle

PD_BUILD_OP(static_op_folio_get_block_shape_and_split_kv_block)
    .Inputs({"seq_lens_encoder", "seq_lens_decoder", "seq_lens_this_time", "decoder_batch_ids",
             "decoder_tile_ids_per_batch", "decoder_num_blocks_cpu", "decoder_num_blocks_device",
             "decoder_chunk_size_device", "max_len_tensor_cpu", "encoder_batch_ids", "encoder_tile_ids_per_batch",
             "encoder_num_blocks_x_cpu", "kv_batch_ids", "kv_tile_ids_per_batch", "kv_num_blocks_x_cpu"})
    .Outputs({})
    .Attrs({"encoder_block_shape_q: int", "decoder_block_shape_q: int", "group_size: int", "block_size: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::get_block_shape_and_split_kv_block))
    .SetInferShapeFn(folio_paddle::nothing)
    .SetInferDtypeFn(folio_paddle::no_type);

PD_BUILD_OP(static_op_folio_get_block_shape_and_split_kv_block_v3)
    .Inputs({"seq_lens_encoder", "seq_lens_decoder", "seq_lens_this_time", "decoder_batch_ids",
             "decoder_tile_ids_per_batch", "decoder_num_blocks_cpu", "decoder_num_blocks_device",
             "decoder_chunk_size_device", "max_len_tensor_cpu", "encoder_batch_ids", "encoder_tile_ids_per_batch",
             "encoder_num_blocks_x_cpu", "kv_batch_ids", "kv_tile_ids_per_batch", "kv_num_blocks_x_cpu"})
    .Outputs({})
    .Attrs({"encoder_block_shape_q: int", "decoder_block_shape_q: int", "group_size: int", "block_size: int",
            "decoder_step_token_num: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::get_block_shape_and_split_kv_block_v3))
    .SetInferShapeFn(folio_paddle::nothing)
    .SetInferDtypeFn(folio_paddle::no_type);

PD_BUILD_OP(static_op_folio_get_block_shape_and_split_kv_block_v2)
    .Inputs({"seq_lens_encoder", "seq_lens_decoder", "seq_lens_this_time", "decoder_batch_ids",
             "decoder_tile_ids_per_batch", "decoder_num_blocks_cpu", "max_len_tensor_cpu", "encoder_batch_ids",
             "encoder_tile_ids_per_batch", "encoder_num_blocks_x_cpu", "kv_batch_ids", "kv_tile_ids_per_batch",
             "kv_num_blocks_x_cpu", "max_len_kv_cpu"})
    .Outputs({})
    .Attrs({"encoder_block_shape_q: int", "decoder_block_shape_q: int", "group_size: int", "block_size: int",
            "decoder_step_token_num: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::get_block_shape_and_split_kv_block_v2))
    .SetInferShapeFn(folio_paddle::nothing)
    .SetInferDtypeFn(folio_paddle::no_type);

PD_BUILD_OP(static_op_folio_get_block_shape_and_split_kv_block_v1)
    .Inputs({"seq_lens_encoder", "seq_lens_decoder", "seq_lens_this_time", "decoder_batch_ids",
             "decoder_tile_ids_per_batch", "decoder_num_blocks_cpu", "max_len_tensor_cpu"})
    .Outputs({"encoder_batch_ids", "encoder_tile_ids_per_batch", "encoder_num_blocks", "kv_batch_ids",
              "kv_tile_ids_per_batch", "kv_num_blocks", "decoder_num_blocks", "decoder_chunk_size_cpu", "max_len_kv"})
    .Attrs({"encoder_block_shape_q: int", "decoder_block_shape_q: int", "group_size: int", "block_size: int",
            "decoder_step_token_num: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::get_block_shape_and_split_kv_block_v1))
    .SetInferShapeFn(folio_paddle::split_shapes)
    .SetInferDtypeFn(folio_paddle::int_types<9>);

PD_BUILD_OP(static_op_folio_config_for_attention)
    .Inputs({"seq_lens_encoder", "seq_lens_decoder", "seq_lens_this_time", "block_indices", "num_blocks", "chunk_size",
             "max_len_tensor_cpu"})
    .Outputs({})
    .Attrs({"cache_quant_type: std::string", "group_size: int", "kv_num_heads: int", "max_tokens_per_batch: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::config_for_attention))
    .SetInferShapeFn(folio_paddle::nothing)
    .SetInferDtypeFn(folio_paddle::no_type);

PD_BUILD_OP(static_op_folio_get_position_ids_and_slot_mapping)
    .Inputs({"seq_lens_encoder", "seq_lens_decoder", "seq_lens_this_time", "batch_id_per_token", "block_tables",
             "position_ids", "slot_mapping"})
    .Outputs({"position_ids_out", "slot_mapping_out"})
    .SetInplaceMap({{"position_ids", "position_ids_out"}, {"slot_mapping", "slot_mapping_out"}})
    .Attrs({"block_size: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::get_position_ids_and_slot_mapping))
    .SetInferShapeFn(folio_paddle::nothing)
    .SetInferDtypeFn(folio_paddle::no_type);

PD_BUILD_OP(static_op_folio_pre_cache_len_concat)
    .Inputs({"seq_lens_encoder", "seq_lens_decoder", "seq_lens_this_time"})
    .Outputs({"cu_seqlens_k", "cache_batch_ids", "cache_tile_ids", "cache_num_blocks", "kv_token_num"})
    .Attrs({"max_dec_len: int", "block_size: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::pre_cache_len_concat))
    .SetInferShapeFn(folio_paddle::concat_shapes)
    .SetInferDtypeFn(folio_paddle::int_types<5>);

PD_BUILD_OP(static_op_folio_pre_cache_len_concat_v1)
    .Inputs({"seq_lens_decoder", "seq_lens_this_time"})
    .Outputs({"cu_seqlens_k", "cache_batch_ids", "cache_tile_ids", "cache_num_blocks", "kv_token_num"})
    .Attrs({"max_dec_len: int", "block_size: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::pre_cache_len_concat_v1))
    .SetInferShapeFn(folio_paddle::concat_shapes)
    .SetInferDtypeFn(folio_paddle::int_types<5>);
