//! Batches whose indices are built, and what the indices must be: token by token, from the slots of every request.

use super::door::Session;
use super::memory::{Image, Memory, Resident, View};
use super::values::mix;
use folio::api::Stream;
use folio::dtype::DType;
use folio::problem::{
    BatchLengthsArgs, BlockTableArgs, DraftKvIndicesArgs, DraftSlots, KvIndicesArgs, QueryRows,
    SlotMappingArgs, TokenRows,
};

/// A list of integers of a type.
pub fn list(dtype: DType, values: &[i64]) -> Image {
    let bits = values.iter().map(|&value| value as u64);
    Image::of_bits(dtype, &[values.len() as i64], bits)
}

/// An output before the call, full of a number that no operator writes: not the -1 that other tensors are poisoned with.
fn untouched(view: View) -> Image {
    let mut image = Image::poisoned(view);
    image.bytes.fill(0xa5);
    image
}

/// An output whose other elements may not be written.
struct Output<'m> {
    name: &'static str,
    memory: Resident<'m>,
    want: Image,
}

impl<'m> Output<'m> {
    /// Wants the values from the first element on.
    fn list(
        memory: &'m dyn Memory,
        name: &'static str,
        (dtype, extent): (DType, i64),
        values: &[i64],
    ) -> Output<'m> {
        let blank = untouched(View::compact(dtype, &[extent]));
        let mut want = blank.clone();
        for (at, &value) in (0..).zip(values) {
            want.put(&[at], value as u64);
        }
        Output {
            name,
            memory: Resident::new(memory, blank),
            want,
        }
    }

    /// Wants the values from the first element of every row on.
    fn table(
        memory: &'m dyn Memory,
        name: &'static str,
        (dtype, gap): (DType, u32),
        columns: i64,
        rows: &[Vec<i64>],
    ) -> Output<'m> {
        let view = View::gapped(dtype, &[rows.len() as i64, columns], &[gap, 0], gap);
        let blank = untouched(view);
        let mut want = blank.clone();
        for (row, values) in (0..).zip(rows) {
            for (column, &value) in (0..).zip(values) {
                want.put(&[row, column], value as u64);
            }
        }
        Output {
            name,
            memory: Resident::new(memory, blank),
            want,
        }
    }

    fn check(&self) -> Result<(), String> {
        let is = self.memory.current();
        match is.bytes == self.want.bytes[..is.bytes.len()] {
            true => Ok(()),
            false => Err(format!(
                "{} is {:?}, not {:?}",
                self.name,
                numbers(&is),
                numbers(&self.want)
            )),
        }
    }
}

/// The elements of a list or table, row by row.
pub fn numbers(image: &Image) -> Vec<i64> {
    let mut numbers = Vec::new();
    super::instance::for_each_index(&image.view.shape, |at| {
        let bits = image.bits(at);
        numbers.push(match image.view.dtype {
            DType::I32 => i64::from(bits as u32 as i32),
            _ => bits as i64,
        });
    });
    numbers
}

fn check_all(outputs: &[&Output<'_>]) -> Result<(), String> {
    outputs.iter().try_for_each(|output| output.check())
}

/// Rows of a table, of which requests have some.
#[derive(Debug, Clone)]
pub struct Rows {
    pub dtype: DType,
    pub page_size: u32,
    pub columns: i64,
    pub rows: i64,
    pub row_ids: Option<Vec<i64>>,
    pub gap: u32,
    pub seed: u64,
}

impl Rows {
    /// An entry: one in seven is none.
    fn entry(&self, row: i64, column: i64) -> i64 {
        let hash = mix(self.seed ^ mix((row << 32 | column) as u64));
        match hash % 7 {
            0 => -1 - (hash >> 40) as i64,
            _ => (hash >> 40) as i64,
        }
    }

    fn row(&self, b: usize) -> i64 {
        self.row_ids.as_ref().map_or(b as i64, |ids| ids[b])
    }

    /// The slot of a token, or -1.
    fn slot(&self, b: usize, token: i64) -> i64 {
        let page_size = i64::from(self.page_size);
        match self.entry(self.row(b), token / page_size) {
            page if page < 0 => -1,
            page => page * page_size + token % page_size,
        }
    }

    fn tokens(&self) -> i64 {
        self.columns * i64::from(self.page_size)
    }

    fn resident<'m>(&self, memory: &'m dyn Memory) -> ResidentRows<'m> {
        let shape = [self.rows, self.columns];
        let mut table = Image::poisoned(View::gapped(self.dtype, &shape, &[self.gap, 0], 0));
        // What lies between rows is an id: whoever reads it gives a slot.
        table.bytes.fill(0x01);
        for row in 0..self.rows {
            for column in 0..self.columns {
                table.put(&[row, column], self.entry(row, column) as u64);
            }
        }
        let ids = self.row_ids.as_ref().map(|ids| list(self.dtype, ids));
        ResidentRows {
            table: Resident::new(memory, table),
            row_ids: ids.map(|ids| Resident::new(memory, ids)),
            page_size: self.page_size,
        }
    }
}

struct ResidentRows<'m> {
    table: Resident<'m>,
    row_ids: Option<Resident<'m>>,
    page_size: u32,
}

impl ResidentRows<'_> {
    fn input(&self) -> TokenRows {
        TokenRows {
            table: self.table.tensor(),
            row_ids: self.row_ids.as_ref().map(Resident::tensor),
            page_size: self.page_size,
        }
    }
}

/// As int32 or int64 holds an id.
fn fitting(dtype: DType, id: i64) -> i64 {
    match dtype {
        DType::I32 if i32::try_from(id).is_err() => -1,
        _ => id,
    }
}

/// Sums, of which the last one is repeated.
fn sums(values: &[i64], extent: i64) -> Vec<i64> {
    let sum = |at: i64| values.iter().take(at as usize).sum();
    (0..extent).map(sum).collect()
}

/// Lengths of a step.
#[derive(Debug, Clone)]
pub struct Lengths {
    /// New tokens, tokens in the cache, and those of a prompt.
    pub requests: Vec<[i64; 3]>,
    pub with_cached: bool,
    pub with_kinds: bool,
    /// qo_indptr, kv_len, kv_indptr.
    pub outputs: [bool; 3],
    pub dtypes: [DType; 2],
    pub spare: i64,
}

impl Lengths {
    pub fn check(&self, session: &dyn Session, memory: &dyn Memory) -> Result<(), String> {
        let column = |n: usize| -> Vec<i64> { self.requests.iter().map(|r| r[n]).collect() };
        let input = |n| Resident::new(memory, list(self.dtypes[0], &column(n)));
        let (qo_len, cached, encoder) = (input(0), input(1), input(2));
        let of_keys = self.outputs[1] || self.outputs[2];
        let kv_len: Vec<i64> = (self.requests.iter())
            .map(
                |&[new, cached, _]| match (new, self.with_cached && of_keys) {
                    (0, _) => 0,
                    (_, true) => new + cached,
                    (_, false) => new,
                },
            )
            .collect();
        let kinds: Vec<i64> = (self.requests.iter())
            .map(|&[new, _, encoder]| match (new > 0, encoder > 0) {
                (false, _) => 0,
                (true, true) => 1,
                (true, false) => 2,
            })
            .collect();
        let extent = self.requests.len() as i64 + self.spare;
        let output = |name, extent, values: &[i64]| {
            Output::list(memory, name, (self.dtypes[1], extent), values)
        };
        let padded = |values: &[i64]| {
            let mut padded = values.to_vec();
            padded.resize(extent as usize, 0);
            padded
        };
        let qo_indptr = output("qo_indptr", extent + 1, &sums(&column(0), extent + 1));
        let kv_indptr = output("kv_indptr", extent + 1, &sums(&kv_len, extent + 1));
        let lens = output("kv_len", extent, &padded(&kv_len));
        let row_kind = output("row_kind", extent, &padded(&kinds));
        let given = |is_given: bool, output: &Output<'_>| is_given.then(|| output.memory.tensor());
        let args = BatchLengthsArgs {
            qo_len: qo_len.tensor(),
            cached_len: (self.with_cached && of_keys).then(|| cached.tensor()),
            encoder_len: self.with_kinds.then(|| encoder.tensor()),
            qo_indptr: given(self.outputs[0], &qo_indptr),
            kv_len: given(self.outputs[1], &lens),
            kv_indptr: given(self.outputs[2], &kv_indptr),
            row_kind: given(self.with_kinds, &row_kind),
        };
        (session.batch_lengths(&args, Stream::default())).map_err(|err| err.to_string())?;
        let outputs = [&qo_indptr, &lens, &kv_indptr, &row_kind];
        let is_given = [
            self.outputs[0],
            self.outputs[1],
            self.outputs[2],
            self.with_kinds,
        ];
        let given = (outputs.into_iter().zip(is_given)).filter(|(_, is_given)| *is_given);
        check_all(&given.map(|(output, _)| output).collect::<Vec<_>>())
    }
}

/// Rows that are listed.
#[derive(Debug, Clone)]
pub struct Listing {
    pub rows: Rows,
    pub kv_len: Vec<i64>,
    pub kv_start: Option<Vec<i64>>,
    pub window: u32,
    /// 0: that of the rows.
    pub page_size: u32,
    pub dtype: DType,
    pub with_last: bool,
    /// Of all three outputs; below 0 the list has less room than it needs.
    pub spare: i64,
}

impl Listing {
    /// The indices of a request, and the tokens of the last page.
    fn of(&self, b: usize) -> (Vec<i64>, i64) {
        let page_size = match self.page_size {
            0 => i64::from(self.rows.page_size),
            size => i64::from(size),
        };
        // On a device lengths may lie.
        let row = self.rows.row(b);
        let kv_len = match (0..self.rows.rows).contains(&row) {
            true => self.kv_len[b].clamp(0, self.rows.tokens()),
            false => 0,
        };
        let start = self.kv_start.as_ref().map_or(0, |start| start[b].max(0));
        let is_listed = |token: i64| {
            token >= start && (self.window == 0 || token + i64::from(self.window) >= kv_len)
        };
        let (mut ids, mut last) = (Vec::new(), 0);
        for first in (0..kv_len).step_by(page_size as usize) {
            let tokens = first..kv_len.min(first + page_size);
            last = tokens.end - tokens.start;
            if tokens.clone().any(is_listed) {
                let slot = self.rows.slot(b, first);
                let id = if slot < 0 { -1 } else { slot / page_size };
                ids.push(fitting(self.dtype, id));
            }
        }
        let last = if ids.is_empty() { 0 } else { last };
        (ids, last)
    }

    pub fn check(&self, session: &dyn Session, memory: &dyn Memory) -> Result<(), String> {
        let rows = self.rows.resident(memory);
        let integers = |values: &[i64]| Resident::new(memory, list(self.rows.dtype, values));
        let kv_len = integers(&self.kv_len);
        let kv_start = self.kv_start.as_ref().map(|start| integers(start));
        let (lists, mut last): (Vec<Vec<i64>>, Vec<i64>) =
            (0..self.kv_len.len()).map(|b| self.of(b)).unzip();
        let counts: Vec<i64> = lists.iter().map(|list| list.len() as i64).collect();
        let mut ids = lists.concat();
        let capacity = (ids.len() as i64 + self.spare).max(0);
        ids.truncate(capacity as usize);
        let extent = self.kv_len.len() as i64 + self.spare.max(0);
        let mut indptr = sums(&counts, extent + 1);
        indptr
            .iter_mut()
            .for_each(|sum| *sum = (*sum).min(capacity));
        last.resize(extent as usize, 0);
        let output =
            |name, extent, values: &[i64]| Output::list(memory, name, (self.dtype, extent), values);
        let kv_indptr = output("kv_indptr", extent + 1, &indptr);
        let kv_indices = output("kv_indices", capacity, &ids);
        let last_page_len = output("last_page_len", extent, &last);
        let args = KvIndicesArgs {
            rows: rows.input(),
            kv_len: kv_len.tensor(),
            kv_start: kv_start.as_ref().map(Resident::tensor),
            window: self.window,
            page_size: self.page_size,
            kv_indptr: kv_indptr.memory.tensor(),
            kv_indices: kv_indices.memory.tensor(),
            last_page_len: self.with_last.then(|| last_page_len.memory.tensor()),
        };
        (session.kv_indices(&args, Stream::default())).map_err(|err| err.to_string())?;
        check_all(&[&kv_indptr, &kv_indices])?;
        match self.with_last {
            true => last_page_len.check(),
            false => Ok(()),
        }
    }
}

/// Lists that become the rows of a table.
#[derive(Debug, Clone)]
pub struct Lists {
    pub lists: Vec<Vec<i64>>,
    pub columns: i64,
    pub spare_rows: usize,
    pub fill: i32,
    pub gap: u32,
    pub dtypes: [DType; 2],
}

impl Lists {
    pub fn check(&self, session: &dyn Session, memory: &dyn Memory) -> Result<(), String> {
        let counts: Vec<i64> = self.lists.iter().map(|list| list.len() as i64).collect();
        let indptr = sums(&counts, counts.len() as i64 + 1);
        let integers = |values: &[i64]| Resident::new(memory, list(self.dtypes[0], values));
        let (kv_indptr, kv_indices) = (integers(&indptr), integers(&self.lists.concat()));
        let rows = self.lists.iter().map(|list| {
            let id = |id: &i64| fitting(self.dtypes[1], (*id).max(-1));
            let mut row: Vec<i64> = list.iter().map(id).collect();
            row.resize(self.columns as usize, self.fill.into());
            row
        });
        let mut rows: Vec<Vec<i64>> = rows.collect();
        let blank = vec![i64::from(self.fill); self.columns as usize];
        rows.extend(std::iter::repeat_n(blank, self.spare_rows));
        let form = (self.dtypes[1], self.gap);
        let block_table = Output::table(memory, "block_table", form, self.columns, &rows);
        let args = BlockTableArgs {
            kv_indptr: kv_indptr.tensor(),
            kv_indices: kv_indices.tensor(),
            block_table: block_table.memory.tensor(),
            fill: self.fill,
        };
        (session.block_table(&args, Stream::default())).map_err(|err| err.to_string())?;
        block_table.check()
    }
}

/// New tokens of requests.
#[derive(Debug, Clone)]
pub struct NewTokens {
    pub rows: Rows,
    /// New tokens and all tokens.
    pub requests: Vec<[i64; 2]>,
    pub by_len: bool,
    pub with_positions: bool,
    pub dtypes: [DType; 2],
    /// Below 0 there is less room than needed.
    pub spare: i64,
}

impl NewTokens {
    pub fn check(&self, session: &dyn Session, memory: &dyn Memory) -> Result<(), String> {
        let rows = self.rows.resident(memory);
        let (new, all): (Vec<i64>, Vec<i64>) = self.requests.iter().map(|r| (r[0], r[1])).unzip();
        let integers = |values: &[i64]| Resident::new(memory, list(self.rows.dtype, values));
        let qo_indptr = integers(&sums(&new, new.len() as i64 + 1));
        let (qo_len, kv_len) = (integers(&new), integers(&all));
        let (mut slots, mut positions) = (Vec::new(), Vec::new());
        for (b, &[new, all]) in self.requests.iter().enumerate() {
            let has_row = (0..self.rows.rows).contains(&self.rows.row(b));
            for token in all - new..all {
                let is_there = has_row && (0..self.rows.tokens()).contains(&token);
                let slot = if is_there {
                    self.rows.slot(b, token)
                } else {
                    -1
                };
                slots.push(fitting(self.dtypes[0], slot));
                positions.push(token.max(-1));
            }
        }
        let extent = (slots.len() as i64 + self.spare).max(0);
        slots.resize(extent as usize, -1);
        positions.resize(extent as usize, -1);
        let [of_slots, of_positions] = self.dtypes;
        let slot_mapping = Output::list(memory, "slot_mapping", (of_slots, extent), &slots);
        let positions = Output::list(memory, "positions", (of_positions, extent), &positions);
        let args = SlotMappingArgs {
            rows: rows.input(),
            queries: match self.by_len {
                true => QueryRows::Len(qo_len.tensor()),
                false => QueryRows::Indptr(qo_indptr.tensor()),
            },
            kv_len: kv_len.tensor(),
            slot_mapping: slot_mapping.memory.tensor(),
            positions: self.with_positions.then(|| positions.memory.tensor()),
        };
        (session.slot_mapping(&args, Stream::default())).map_err(|err| err.to_string())?;
        slot_mapping.check()?;
        match self.with_positions {
            true => positions.check(),
            false => Ok(()),
        }
    }
}

/// Pages whose slots the types of slot_mapping cannot hold: those are none.
pub fn check_far_slots(session: &dyn Session, memory: &dyn Memory) -> Result<(), String> {
    let pages = [
        i64::from(i32::MAX),
        1,
        1 << 57,
        (1 << 58) - 1,
        1 << 58,
        i64::MAX,
    ];
    let page_size = 32;
    let count = pages.len() as i64 * page_size;
    let table = Resident::new(
        memory,
        Image::of_bits(DType::I64, &[1, 6], pages.map(|p| p as u64)),
    );
    let len = Resident::new(memory, list(DType::I64, &[count]));
    for (dtype, most) in [(DType::I32, i64::from(i32::MAX)), (DType::I64, i64::MAX)] {
        let slot = |token: i64| {
            let page = i128::from(pages[(token / page_size) as usize]);
            let slot = page * i128::from(page_size) + i128::from(token % page_size);
            if slot > i128::from(most) {
                -1
            } else {
                slot as i64
            }
        };
        let slots: Vec<i64> = (0..count).map(slot).collect();
        let slot_mapping = Output::list(memory, "slot_mapping", (dtype, count), &slots);
        let args = SlotMappingArgs {
            rows: TokenRows {
                table: table.tensor(),
                row_ids: None,
                page_size: page_size as u32,
            },
            queries: QueryRows::Len(len.tensor()),
            kv_len: len.tensor(),
            slot_mapping: slot_mapping.memory.tensor(),
            positions: None,
        };
        (session.slot_mapping(&args, Stream::default())).map_err(|err| err.to_string())?;
        slot_mapping.check()?;
    }
    Ok(())
}

/// Drafts with branches.
#[derive(Debug, Clone)]
pub struct Drafts {
    /// Of one token per page.
    pub rows: Rows,
    pub kv_len: Vec<i64>,
    pub topk: u32,
    pub steps: i64,
    /// 0: steps.
    pub num_steps: u32,
    pub slots: DraftSlots,
    pub dtype: DType,
    pub gap: u32,
    /// Below 0 the lists have less room than they need.
    pub spare: i64,
}

impl Drafts {
    /// Entries of drafted tokens in a row with `kv_len` others, dealt out one by one: `[branch][step]`.
    fn entries(&self, kv_len: i64) -> Vec<Vec<i64>> {
        let steps = match self.num_steps {
            0 => self.steps,
            stated => i64::from(stated),
        } as usize;
        let mut entries = vec![vec![0; steps]; self.topk as usize];
        let mut next = kv_len;
        let mut take = || {
            next += 1;
            next - 1
        };
        match self.slots {
            DraftSlots::StepMajor => {
                for step in 0..steps {
                    entries.iter_mut().for_each(|branch| branch[step] = take());
                }
            }
            DraftSlots::BranchMajor => {
                let all = entries.iter_mut().flatten();
                all.for_each(|entry| *entry = take());
            }
            DraftSlots::Paged(page_size) => {
                let page_size = i64::from(page_size);
                let mut page = kv_len / page_size * page_size;
                for branch in &mut entries {
                    let mut entry = page + kv_len % page_size;
                    for drafted in branch.iter_mut() {
                        *drafted = entry;
                        entry += 1;
                    }
                    while page < entry {
                        page += page_size;
                    }
                }
            }
        }
        entries
    }

    /// The columns that the rows need.
    pub fn columns(&self) -> i64 {
        let ends = |&kv_len: &i64| {
            let last = self.entries(kv_len).concat().into_iter().max();
            last.map_or(kv_len, |last| last.max(kv_len) + 1)
        };
        self.kv_len.iter().map(ends).max().unwrap_or(0)
    }

    /// A step's lists, branch by branch.
    pub fn lists(&self, step: i64) -> Vec<Vec<i64>> {
        let mut lists = Vec::new();
        for (b, &kv_len) in self.kv_len.iter().enumerate() {
            for drafted in self.entries(kv_len) {
                let tokens = (0..kv_len).chain(drafted[..=step as usize].iter().copied());
                let slot = |token| match token < self.rows.columns {
                    true => fitting(self.dtype, self.rows.slot(b, token)),
                    false => -1,
                };
                lists.push(tokens.map(slot).collect());
            }
        }
        lists
    }

    pub fn check(&self, session: &dyn Session, memory: &dyn Memory) -> Result<(), String> {
        let rows = self.rows.resident(memory);
        let kv_len = Resident::new(memory, list(self.rows.dtype, &self.kv_len));
        let steps: Vec<Vec<Vec<i64>>> = (0..self.steps).map(|step| self.lists(step)).collect();
        let longest = steps.last().map_or(0, |lists| lists.concat().len() as i64);
        let capacity = (longest + self.spare).max(0);
        let extent = (self.kv_len.len() * self.topk as usize) as i64 + 1 + self.spare.max(0);
        let (mut indptr, mut ids) = (Vec::new(), Vec::new());
        for lists in &steps {
            let counts: Vec<i64> = lists.iter().map(|list| list.len() as i64).collect();
            let sums = sums(&counts, extent);
            indptr.push(sums.iter().map(|sum| *sum.min(&capacity)).collect());
            let mut all = lists.concat();
            all.truncate(capacity as usize);
            ids.push(all);
        }
        let form = (self.dtype, self.gap);
        let kv_indptr = Output::table(memory, "kv_indptr", form, extent, &indptr);
        let kv_indices = Output::table(memory, "kv_indices", form, capacity, &ids);
        let args = DraftKvIndicesArgs {
            rows: rows.input(),
            kv_len: kv_len.tensor(),
            topk: self.topk,
            num_steps: self.num_steps,
            slots: self.slots,
            kv_indptr: kv_indptr.memory.tensor(),
            kv_indices: kv_indices.memory.tensor(),
        };
        (session.draft_kv_indices(&args, Stream::default())).map_err(|err| err.to_string())?;
        check_all(&[&kv_indptr, &kv_indices])
    }
}
