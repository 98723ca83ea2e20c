//! Indices of random batches.

#![allow(unsafe_code)]

use super::Place;
use super::corrupt::Rng;
use super::guarded::Guarded;
use super::operators::{Operator, judge};
use super::oracle::Ending;
use super::structs::Struct;
use crate::common::c_door::{
    Tensors, api, c_batch_lengths, c_block_table, c_draft_kv_indices, c_kv_indices, c_slot_mapping,
};
use crate::common::index::list;
use crate::common::memory::{Image, Resident, View};
use folio::dtype::DType;
use folio::problem::{
    BatchLengthsArgs, BlockTableArgs, DraftKvIndicesArgs, DraftSlots, KvIndicesArgs, QueryRows,
    SlotMappingArgs, TokenRows,
};

/// What the cases are made of.
struct Batch<'a> {
    data: &'a Guarded,
    dtypes: [DType; 2],
    requests: i64,
    columns: i64,
    page_size: u32,
}

impl<'a> Batch<'a> {
    fn new(data: &'a Guarded, rng: &mut Rng) -> Batch<'a> {
        Batch {
            data,
            dtypes: [(); 2].map(|()| rng.pick(&[DType::I32, DType::I64])),
            requests: rng.below(6) as i64,
            columns: 1 + rng.below(8) as i64,
            page_size: rng.pick(&[1, 4, 16]),
        }
    }

    fn tokens(&self) -> i64 {
        self.columns * i64::from(self.page_size)
    }

    /// A number for each request, below `end`.
    fn per_request(&self, end: i64, rng: &mut Rng) -> Vec<i64> {
        let number = |_| rng.below(end as usize) as i64;
        (0..self.requests).map(number).collect()
    }

    fn input(&self, values: &[i64]) -> Resident<'a> {
        Resident::new(self.data, list(self.dtypes[0], values))
    }

    fn output(&self, shape: &[i64]) -> Resident<'a> {
        Resident::new(
            self.data,
            Image::poisoned(View::compact(self.dtypes[1], shape)),
        )
    }

    /// A table, and a row of it for each request.
    fn rows(&self, rng: &mut Rng) -> [Resident<'a>; 2] {
        let rows = self.requests + 1;
        let view = View::gapped(self.dtypes[0], &[rows, self.columns], &[3, 0], 0);
        let mut table = Image::poisoned(view);
        for row in 0..rows {
            for column in 0..self.columns {
                let page = rng.below(1 << 20) as i64 - 9;
                table.put(&[row, column], page as u64);
            }
        }
        let ids = self.per_request(rows, rng);
        [Resident::new(self.data, table), self.input(&ids)]
    }
}

fn rows(rows: &[Resident<'_>; 2], page_size: u32, rng: &mut Rng) -> TokenRows {
    TokenRows {
        table: rows[0].tensor(),
        row_ids: rng.one_in(2).then(|| rows[1].tensor()),
        page_size,
    }
}

fn sums(values: &[i64]) -> Vec<i64> {
    let sum = |end: usize| values[..end].iter().sum();
    (0..=values.len()).map(sum).collect()
}

/// One of the operators.
pub fn case(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let data = Guarded::new(place.device);
    let batch = Batch::new(&data, rng);
    match rng.below(5) {
        0 => batch_lengths(&batch, rng, place),
        1 => kv_indices(&batch, rng, place),
        2 => block_table(&batch, rng, place),
        3 => slot_mapping(&batch, rng, place),
        _ => draft_kv_indices(&batch, rng, place),
    }
}

fn batch_lengths(
    batch: &Batch<'_>,
    rng: &mut Rng,
    place: &Place,
) -> Result<Option<Ending>, String> {
    let inputs = [9, 100, 3].map(|end| batch.input(&batch.per_request(end, rng)));
    let extent = batch.requests + rng.below(4) as i64;
    let outputs = [1, 0, 1, 0].map(|more| batch.output(&[extent + more]));
    let input = BatchLengthsArgs {
        qo_len: inputs[0].tensor(),
        cached_len: Some(inputs[1].tensor()),
        encoder_len: Some(inputs[2].tensor()),
        qo_indptr: (!rng.one_in(4)).then(|| outputs[0].tensor()),
        kv_len: Some(outputs[1].tensor()),
        kv_indptr: (!rng.one_in(4)).then(|| outputs[2].tensor()),
        row_kind: Some(outputs[3].tensor()),
    };
    let tensors = Tensors::default();
    let args = c_batch_lengths(&input, &tensors);
    // SAFETY: the header's struct, with tensors that `tensors` keeps until they were copied.
    let args = unsafe { Struct::new("folio_batch_lengths_args", args) };
    let call: &Operator = &|ctx, args, stream, err| {
        // SAFETY: a live context, and a struct as large as it says.
        unsafe { api().batch_lengths.unwrap()(ctx, args.pointer(), stream, err) }
    };
    let outputs = ["qo_indptr", "kv_len", "kv_indptr", "row_kind"];
    judge(rng, place, batch.data, args, call, &outputs, &[])
}

fn kv_indices(batch: &Batch<'_>, rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let table = batch.rows(rng);
    let lens = batch.per_request(batch.tokens() + 1, rng);
    let starts: Vec<i64> = lens
        .iter()
        .map(|&len| rng.below(len as usize + 1) as i64)
        .collect();
    let (kv_len, kv_start) = (batch.input(&lens), batch.input(&starts));
    let indptr = batch.output(&[batch.requests + 1 + rng.below(3) as i64]);
    let indices = batch.output(&[batch.requests * batch.tokens()]);
    let last = batch.output(&[batch.requests]);
    let input = KvIndicesArgs {
        rows: rows(&table, batch.page_size, rng),
        kv_len: kv_len.tensor(),
        kv_start: rng.one_in(2).then(|| kv_start.tensor()),
        window: rng.pick(&[0, 0, 5]),
        page_size: rng.pick(&[0, 1, batch.page_size]),
        kv_indptr: indptr.tensor(),
        kv_indices: indices.tensor(),
        last_page_len: rng.one_in(2).then(|| last.tensor()),
    };
    let tensors = Tensors::default();
    let args = c_kv_indices(&input, &tensors);
    // SAFETY: as above.
    let args = unsafe { Struct::new("folio_kv_indices_args", args) };
    let call: &Operator = &|ctx, args, stream, err| {
        // SAFETY: as above.
        unsafe { api().kv_indices.unwrap()(ctx, args.pointer(), stream, err) }
    };
    let outputs = ["kv_indptr", "kv_indices", "last_page_len"];
    judge(rng, place, batch.data, args, call, &outputs, &[])
}

fn block_table(batch: &Batch<'_>, rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let counts = batch.per_request(batch.columns + 1, rng);
    let indptr = sums(&counts);
    let ids: Vec<i64> = (0..indptr[counts.len()])
        .map(|_| rng.below(1 << 20) as i64)
        .collect();
    let (kv_indptr, kv_indices) = (batch.input(&indptr), batch.input(&ids));
    let table = batch.output(&[batch.requests + rng.below(3) as i64, batch.columns]);
    let input = BlockTableArgs {
        kv_indptr: kv_indptr.tensor(),
        kv_indices: kv_indices.tensor(),
        block_table: table.tensor(),
        fill: -1,
    };
    let tensors = Tensors::default();
    let args = c_block_table(&input, &tensors);
    // SAFETY: as above.
    let args = unsafe { Struct::new("folio_block_table_args", args) };
    let call: &Operator = &|ctx, args, stream, err| {
        // SAFETY: as above.
        unsafe { api().block_table.unwrap()(ctx, args.pointer(), stream, err) }
    };
    judge(rng, place, batch.data, args, call, &["block_table"], &[])
}

fn slot_mapping(batch: &Batch<'_>, rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let table = batch.rows(rng);
    let lens = batch.per_request(batch.tokens() + 1, rng);
    let new: Vec<i64> = lens
        .iter()
        .map(|&len| rng.below(len as usize + 1) as i64)
        .collect();
    let (kv_len, qo_len) = (batch.input(&lens), batch.input(&new));
    let indptr = sums(&new);
    let qo_indptr = batch.input(&indptr);
    let extent = indptr[new.len()] + rng.below(4) as i64;
    let (slots, positions) = (batch.output(&[extent]), batch.output(&[extent]));
    let input = SlotMappingArgs {
        rows: rows(&table, batch.page_size, rng),
        queries: match rng.one_in(2) {
            true => QueryRows::Len(qo_len.tensor()),
            false => QueryRows::Indptr(qo_indptr.tensor()),
        },
        kv_len: kv_len.tensor(),
        slot_mapping: slots.tensor(),
        positions: rng.one_in(2).then(|| positions.tensor()),
    };
    let tensors = Tensors::default();
    let args = c_slot_mapping(&input, &tensors);
    // SAFETY: as above.
    let args = unsafe { Struct::new("folio_slot_mapping_args", args) };
    let call: &Operator = &|ctx, args, stream, err| {
        // SAFETY: as above.
        unsafe { api().slot_mapping.unwrap()(ctx, args.pointer(), stream, err) }
    };
    let outputs = ["slot_mapping", "positions"];
    judge(rng, place, batch.data, args, call, &outputs, &[])
}

fn draft_kv_indices(
    batch: &Batch<'_>,
    rng: &mut Rng,
    place: &Place,
) -> Result<Option<Ending>, String> {
    let (topk, steps) = (1 + rng.below(3) as i64, rng.below(3) as i64);
    let batch = &Batch {
        // Enough for three pages of four slots for each branch.
        columns: batch.columns + 12 * topk,
        ..*batch
    };
    let table = batch.rows(rng);
    let longest = batch.columns - 12 * topk;
    let kv_len = batch.input(&batch.per_request(longest + 1, rng));
    let indptr = batch.output(&[steps, batch.requests * topk + 1 + rng.below(3) as i64]);
    let indices = batch.output(&[steps, batch.requests * topk * (longest + steps)]);
    let input = DraftKvIndicesArgs {
        rows: rows(&table, 1, rng),
        kv_len: kv_len.tensor(),
        topk: topk as u32,
        num_steps: rng.pick(&[0, 3]),
        slots: rng.pick(&[
            DraftSlots::StepMajor,
            DraftSlots::BranchMajor,
            DraftSlots::Paged(4),
        ]),
        kv_indptr: indptr.tensor(),
        kv_indices: indices.tensor(),
    };
    let tensors = Tensors::default();
    let args = c_draft_kv_indices(&input, &tensors);
    // SAFETY: as above.
    let args = unsafe { Struct::new("folio_draft_kv_indices_args", args) };
    let call: &Operator = &|ctx, args, stream, err| {
        // SAFETY: as above.
        unsafe { api().draft_kv_indices.unwrap()(ctx, args.pointer(), stream, err) }
    };
    let outputs = ["kv_indptr", "kv_indices"];
    judge(rng, place, batch.data, args, call, &outputs, &[])
}
