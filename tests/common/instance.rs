//! A problem laid out in memory, and its way through a door. What no operator may read is poisoned; what
//! no operator may write is compared afterwards, byte by byte.

use super::bias;
use super::codec::{decode, encode};
use super::door::{Handle, Session};
use super::memory::{HostMemory, Image, Memory, Resident, View, WorkspaceMemory};
use super::pages::PageTable;
use super::problem::{Alibi, Gaps, HeadScales, MaskKind, Pattern, Problem, Storage, TableForm};
use super::stored::{BLOCK, Side as StoredSide};
use super::values::{ScaleOf, Values, is_hole};
use folio::api::{BatchInput, Stream, Workspace, WorkspaceInfo};
use folio::dtype::DType;
use folio::error::Result;
use folio::problem::{
    AttentionArgs, AttentionChunks, CacheForm, KvLayout, LogBase, Mask, MaskColumns, Window,
};
use std::num::NonZeroU32;

/// Plans and runs a problem once.
pub fn solve(session: &dyn Session, memory: &dyn Memory, problem: &Problem) -> Result<Output> {
    let handle = session.attention(problem.desc())?;
    Planned::within(
        window_of_plan(problem),
        handle,
        memory,
        &HostMemory,
        problem,
    )?
    .run(&LayerData::new(memory, problem))
}

/// A plan for one layer may be for its window alone: every other one is.
pub fn window_of_plan(problem: &Problem) -> Option<u32> {
    match problem.requests.len() % 2 {
        0 => None,
        _ => problem.window_to_plan_for(),
    }
}

/// A handle with a plan, and the memory that the plan refers to.
pub struct Planned<'m> {
    pub handle: Box<dyn Handle>,
    scratch: Scratch<'m>,
    /// What the plan may refer to until its last run.
    step: Step<'m>,
}

impl<'m> Planned<'m> {
    /// Plans `problem`'s batch, with its index tensors in `index_memory`.
    pub fn new(
        handle: Box<dyn Handle>,
        memory: &'m dyn Memory,
        index_memory: &'m dyn Memory,
        problem: &Problem,
    ) -> Result<Planned<'m>> {
        Planned::within(None, handle, memory, index_memory, problem)
    }

    /// For runs that see no key more than so many before their row's position.
    pub fn within(
        window_left: Option<u32>,
        mut handle: Box<dyn Handle>,
        memory: &'m dyn Memory,
        index_memory: &'m dyn Memory,
        problem: &Problem,
    ) -> Result<Planned<'m>> {
        let scratch = Scratch::new(memory, &handle.workspace()?);
        let step = Step::new(index_memory, problem);
        let batch = BatchInput {
            window_left,
            ..step.input()
        };
        scratch.plan(&mut *handle, &batch)?;
        Ok(Planned {
            handle,
            scratch,
            step,
        })
    }

    /// Plans another batch into the same workspace.
    pub fn replan(&mut self, index_memory: &'m dyn Memory, problem: &Problem) -> Result<()> {
        let step = Step::new(index_memory, problem);
        self.scratch.plan(&mut *self.handle, &step.input())?;
        self.step = step;
        Ok(())
    }

    /// Runs one layer and reads its outputs.
    pub fn run(&self, layer: &LayerData<'_>) -> Result<Output> {
        layer.reset_outputs();
        self.run_args(&layer.input())?;
        Ok(layer.output())
    }

    /// Runs with these arguments.
    pub fn run_args(&self, args: &AttentionArgs) -> Result<()> {
        self.handle.run(args, Stream::default())?;
        self.scratch.assert_within_bounds();
        Ok(())
    }
}

/// A workspace for plans of an attention handle.
pub struct Scratch<'m>(WorkspaceMemory<'m>);

impl<'m> Scratch<'m> {
    pub fn new(memory: &'m dyn Memory, info: &WorkspaceInfo) -> Scratch<'m> {
        Scratch(WorkspaceMemory::new(memory, *info))
    }

    pub fn workspace(&self) -> Workspace {
        self.0.place().0
    }

    /// Plans with all of it.
    pub fn plan(&self, handle: &mut dyn Handle, batch: &BatchInput) -> Result<()> {
        let (workspace, bytes) = self.0.place();
        handle.plan(batch, &workspace, bytes, Stream::default())
    }

    /// Nothing behind the workspace was written.
    pub fn assert_within_bounds(&self) {
        self.0.assert_within_bounds();
    }
}

/// The index tensors of a batch.
pub struct Step<'m> {
    qo_indptr: Option<Resident<'m>>,
    qo_len: u32,
    kv_indptr: Option<Resident<'m>>,
    kv_indices: Option<Resident<'m>>,
    last_page_len: Option<Resident<'m>>,
    kv_len: Option<Resident<'m>>,
    block_table: Option<Resident<'m>>,
}

impl<'m> Step<'m> {
    pub fn new(memory: &'m dyn Memory, problem: &Problem) -> Step<'m> {
        let dtype = index_dtype(problem);
        let indices = |values: &[i32]| {
            let bits = values.iter().map(|&value| index_bits(dtype, value));
            Some(Resident::new(
                memory,
                Image::of_bits(dtype, &[values.len() as i64], bits),
            ))
        };
        let kv_lens: Vec<i32> = (0..problem.requests.len())
            .map(|b| problem.cached_len(b) as i32)
            .collect();
        let stated_qo_len = problem.stated_qo_len();
        let mut step = Step {
            qo_indptr: match stated_qo_len {
                Some(_) => None,
                None => indices(&problem.qo_indptr()),
            },
            qo_len: stated_qo_len.unwrap_or(0),
            kv_indptr: None,
            kv_indices: None,
            last_page_len: None,
            kv_len: None,
            block_table: None,
        };
        let table = PageTable::of(problem);
        match problem.storage {
            Storage::Ragged => step.kv_indptr = indices(&problem.token_indptr()),
            Storage::Paged { form, .. } => match form {
                TableForm::BlockTable { spare_columns } => {
                    step.kv_len = indices(&kv_lens);
                    let image = block_table(&table, spare_columns, dtype);
                    step.block_table = Some(Resident::new(memory, image));
                }
                _ => {
                    let spare = match form {
                        TableForm::CsrKvLen { spare_pages } => spare_pages,
                        _ => 0,
                    };
                    let (indptr, ids) = csr(&table, spare);
                    step.kv_indptr = indices(&indptr);
                    step.kv_indices = indices(&ids);
                    match form {
                        TableForm::CsrKvLen { .. } => step.kv_len = indices(&kv_lens),
                        TableForm::CsrLastPageLen => {
                            let last = kv_lens.iter().map(|&n| last_page_len(problem, n));
                            step.last_page_len = indices(&last.collect::<Vec<i32>>());
                        }
                        _ => {}
                    }
                }
            },
        }
        step
    }

    /// Takes over the numbers of a batch of the same shapes.
    pub fn take_lengths_of(&self, other: &Step<'_>) {
        for (part, other) in [
            (&self.qo_indptr, &other.qo_indptr),
            (&self.kv_indptr, &other.kv_indptr),
            (&self.kv_indices, &other.kv_indices),
            (&self.last_page_len, &other.last_page_len),
            (&self.kv_len, &other.kv_len),
            (&self.block_table, &other.block_table),
        ] {
            if let (Some(part), Some(other)) = (part, other) {
                part.copy_from(other);
            }
        }
    }

    pub fn input(&self) -> BatchInput {
        let tensor = |part: &Option<Resident<'_>>| part.as_ref().map(Resident::tensor);
        BatchInput {
            qo_indptr: tensor(&self.qo_indptr),
            qo_len: self.qo_len,
            kv_indptr: tensor(&self.kv_indptr),
            kv_indices: tensor(&self.kv_indices),
            last_page_len: tensor(&self.last_page_len),
            kv_len: tensor(&self.kv_len),
            block_table: tensor(&self.block_table),
            window_left: None,
        }
    }
}

/// An id that no operator may follow: of pages that no key has reached.
const UNREACHED: i32 = -7;

/// A length that no operator may read: of requests without pages.
const UNREAD: i32 = 99_999;

fn last_page_len(problem: &Problem, kv_len: i32) -> i32 {
    let page_size = problem.page_size() as i32;
    match kv_len {
        0 => UNREAD,
        n => (n - 1) % page_size + 1,
    }
}

fn csr(table: &PageTable, spare: u32) -> (Vec<i32>, Vec<i32>) {
    let (mut indptr, mut ids) = (vec![0], Vec::new());
    for pages in &table.ids {
        ids.extend(pages);
        ids.extend(vec![UNREACHED; spare as usize]);
        indptr.push(ids.len() as i32);
    }
    ids.extend(vec![UNREACHED; spare as usize]);
    (indptr, ids)
}

fn index_dtype(problem: &Problem) -> DType {
    match problem.wide_indices {
        true => DType::I64,
        false => DType::I32,
    }
}

/// An index as it is stored. What nobody may follow does not fit int32 where it need not.
fn index_bits(dtype: DType, value: i32) -> u64 {
    match (dtype, value) {
        (DType::I64, UNREACHED | UNREAD) => 1 << 40,
        (DType::I64, _) => value as i64 as u64,
        _ => value as u32 as u64,
    }
}

fn block_table(table: &PageTable, spare: u32, dtype: DType) -> Image {
    let columns = table.ids.iter().map(Vec::len).max().unwrap_or(0) as i64 + i64::from(spare);
    let shape = [table.ids.len() as i64, columns];
    let mut image = Image::poisoned(View::gapped(dtype, &shape, &[spare, 0], 0));
    for (b, ids) in table.ids.iter().enumerate() {
        for (n, &id) in ids.iter().enumerate() {
            image.put(&[b as i64, n as i64], id as u64);
        }
    }
    image
}

/// The tensors of one layer.
pub struct LayerData<'m> {
    q: Resident<'m>,
    k: Resident<'m>,
    k_rope: Option<Resident<'m>>,
    v: Resident<'m>,
    k_new: Option<Resident<'m>>,
    v_new: Option<Resident<'m>>,
    o: Resident<'m>,
    lse: Option<Resident<'m>>,
    q_scales: Option<Resident<'m>>,
    k_scales: Option<Resident<'m>>,
    v_scales: Option<Resident<'m>>,
    o_scales: Option<Resident<'m>>,
    k_zero_points: Option<Resident<'m>>,
    v_zero_points: Option<Resident<'m>>,
    custom_mask: Option<Resident<'m>>,
    custom_mask_indptr: Option<Resident<'m>>,
    causal_requests: Option<Resident<'m>>,
    items: Option<[Resident<'m>; 2]>,
    mm_prefix_ranges: Option<Resident<'m>>,
    alibi_slopes: Option<Resident<'m>>,
    score_bias: Option<Resident<'m>>,
    sinks: Option<Resident<'m>>,
    problem: Problem,
}

impl<'m> LayerData<'m> {
    pub fn new(memory: &'m dyn Memory, problem: &Problem) -> LayerData<'m> {
        let (layer, values) = (&problem.layer, Values::of(problem));
        let heads = problem.num_qo_heads() as usize;
        let resident = |image| Resident::new(memory, image);
        let floats = |count: Option<usize>, value: &dyn Fn(usize) -> f32| {
            let numbers: Vec<f32> = (0..count?).map(value).collect();
            Some(resident(Image::of_f32(&[numbers.len() as i64], &numbers)))
        };
        let custom_mask = CustomMask::of(problem);
        LayerData {
            q: resident(queries(problem)),
            k: resident(cache(problem, Side::Key)),
            k_rope: (problem.split_keys).map(|_| resident(cache(problem, Side::KeyRope))),
            v: resident(cache(problem, Side::Value)),
            k_new: new_rows(problem, Side::Key).map(resident),
            v_new: new_rows(problem, Side::Value).map(resident),
            o: resident(Image::poisoned(rows(
                problem,
                problem.o_dtype,
                problem.head_dim_vo,
                problem.memory.o,
            ))),
            lse: layer
                .lse
                .map(|_| resident(Image::poisoned(lse_view(problem)))),
            q_scales: row_scales(problem, ScaleOf::Query).map(resident),
            o_scales: (values.o_scales()).map(|scale| resident(Image::of_f32(&[1], &[scale]))),
            k_scales: scales_beside(problem, StoredSide::Key)
                .map(resident)
                .or_else(|| row_scales(problem, ScaleOf::Key).map(resident)),
            v_scales: scales_beside(problem, StoredSide::Value)
                .map(resident)
                .or_else(|| row_scales(problem, ScaleOf::Value).map(resident)),
            k_zero_points: zero_points(problem, StoredSide::Key).map(resident),
            v_zero_points: zero_points(problem, StoredSide::Value).map(resident),
            custom_mask: custom_mask.as_ref().map(|mask| resident(mask.image())),
            custom_mask_indptr: (custom_mask.as_ref())
                .filter(|_| layer.masks_apart)
                .map(|mask| resident(mask.indptr())),
            causal_requests: causal_requests(problem).map(resident),
            items: items(problem).map(|images| images.map(resident)),
            mm_prefix_ranges: mm_prefix_ranges(problem).map(resident),
            alibi_slopes: alibi_slopes(problem).map(resident),
            score_bias: bias::image(problem).map(resident),
            sinks: floats(layer.sinks.then_some(heads), &|h| values.sink(h)),
            problem: problem.clone(),
        }
    }

    pub fn input(&self) -> AttentionArgs {
        let tensor = |part: &Option<Resident<'_>>| part.as_ref().map(Resident::tensor);
        let layer = &self.problem.layer;
        let mask = self.custom_mask.as_ref().map(Resident::tensor);
        let side = |n: i32| u32::try_from(n).ok();
        AttentionArgs {
            k_rope: tensor(&self.k_rope),
            lse: tensor(&self.lse),
            lse_base: layer.lse.unwrap_or(LogBase::E),
            sm_scale: layer.sm_scale,
            q_scale: layer.q_scale,
            k_scale: layer.k_scale,
            v_scale: layer.v_scale,
            o_scale: layer.o_scale,
            q_scales: tensor(&self.q_scales),
            o_scales: tensor(&self.o_scales),
            k_scales: tensor(&self.k_scales),
            v_scales: tensor(&self.v_scales),
            k_zero_points: tensor(&self.k_zero_points),
            v_zero_points: tensor(&self.v_zero_points),
            logits_soft_cap: layer.logits_soft_cap,
            mask: match layer.mask {
                MaskKind::Causal => Mask::Causal,
                MaskKind::Full => Mask::Full,
                MaskKind::CausalByRequest => Mask::CausalByRequest(
                    tensor(&self.causal_requests).expect("a byte per request"),
                ),
                MaskKind::Items => {
                    let [starts, positions] = self.items.as_ref().expect("starts and positions");
                    Mask::Items {
                        starts: starts.tensor(),
                        positions: positions.tensor(),
                    }
                }
                MaskKind::Bytes(_) => Mask::Bytes(mask.expect("a custom mask")),
                MaskKind::Bits(_) => Mask::Bits(mask.expect("a custom mask")),
            },
            window: layer
                .window
                .map_or(Window::default(), |(left, right)| Window {
                    left: side(left),
                    right: side(right),
                }),
            custom_mask_indptr: tensor(&self.custom_mask_indptr),
            mask_columns: layer.mask_columns,
            chunks: layer.chunks.map(|(size, look_back)| AttentionChunks {
                size: NonZeroU32::new(size).expect("a chunk of some keys"),
                look_back,
            }),
            mm_prefix_ranges: tensor(&self.mm_prefix_ranges),
            mm_prefix_in_window: layer.mm_prefix_in_window,
            alibi_slopes: tensor(&self.alibi_slopes),
            alibi_sqrt: layer.alibi == Some(Alibi::Sqrt),
            score_bias: bias::argument(&self.problem, tensor(&self.score_bias)),
            sinks: tensor(&self.sinks),
            k_new: tensor(&self.k_new),
            v_new: tensor(&self.v_new),
            ..AttentionArgs::new(
                self.q.tensor(),
                self.k.tensor(),
                self.v.tensor(),
                self.o.tensor(),
            )
        }
    }

    /// Takes over the queries and caches of a smaller batch with the same strides.
    pub fn take_inputs_of(&self, other: &LayerData<'_>) {
        self.q.copy_from(&other.q);
        self.k.copy_from(&other.k);
        if let (Some(k_rope), Some(other)) = (&self.k_rope, &other.k_rope) {
            k_rope.copy_from(other);
        }
        self.v.copy_from(&other.v);
        for (part, other) in [
            (&self.k_new, &other.k_new),
            (&self.v_new, &other.v_new),
            (&self.q_scales, &other.q_scales),
            (&self.k_scales, &other.k_scales),
            (&self.v_scales, &other.v_scales),
            (&self.o_scales, &other.o_scales),
            (&self.sinks, &other.sinks),
            (&self.score_bias, &other.score_bias),
        ] {
            if let (Some(part), Some(other)) = (part, other) {
                part.copy_from(other);
            }
        }
        let parts = self.items.iter().flatten();
        for (part, other) in parts.zip(other.items.iter().flatten()) {
            part.copy_from(other);
        }
    }

    /// Takes over the leading rows of a larger batch's outputs.
    pub fn take_outputs_of(&self, other: &LayerData<'_>) {
        self.o.copy_from(&other.o);
        if let (Some(lse), Some(other)) = (&self.lse, &other.lse) {
            lse.copy_from(other);
        }
    }

    /// Fills the outputs with poison again.
    pub fn reset_outputs(&self) {
        self.o.reset();
        if let Some(lse) = &self.lse {
            lse.reset();
        }
    }

    /// Nothing was written at all.
    pub fn is_untouched(&self) -> bool {
        self.o.is_untouched() && self.lse.as_ref().is_none_or(Resident::is_untouched)
    }

    /// Reads the outputs of the batch's rows. Everything else in their memory, and all inputs, must be
    /// as they were.
    pub fn output(&self) -> Output {
        let inputs = [Some(&self.q), Some(&self.k), Some(&self.v)];
        let optional = [
            &self.k_rope,
            &self.k_new,
            &self.v_new,
            &self.q_scales,
            &self.o_scales,
            &self.k_scales,
            &self.v_scales,
            &self.k_zero_points,
            &self.v_zero_points,
            &self.custom_mask,
            &self.custom_mask_indptr,
            &self.causal_requests,
            &self.mm_prefix_ranges,
            &self.alibi_slopes,
            &self.score_bias,
            &self.sinks,
        ];
        for input in inputs.into_iter().chain(optional.map(Option::as_ref)) {
            assert!(input.is_none_or(Resident::is_untouched), "an input changed");
        }
        for input in self.items.iter().flatten() {
            assert!(input.is_untouched(), "an input changed");
        }
        let tokens = self.problem.num_tokens() as i64;
        Output {
            o: take_rows(&self.o, tokens),
            lse: self.lse.as_ref().map(|lse| take_lse(lse, tokens)),
        }
    }
}

/// The outputs of a batch's rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// `[token][head][dim]`, as bit patterns of the output type.
    pub o: Vec<u64>,
    /// `[token][head]`
    pub lse: Option<Vec<f32>>,
}

/// The bits of the leading rows, in order; asserts that the rest of the memory is as uploaded.
pub fn take_rows(part: &Resident<'_>, rows: i64) -> Vec<u64> {
    let mut current = part.current();
    let mut shape = current.view.shape.clone();
    shape[0] = rows;
    let mut bits = Vec::new();
    for_each_index(&shape, |index| {
        bits.push(current.bits(index));
        current.put(index, part.image().bits(index));
    });
    assert!(
        current.bytes == part.image().bytes,
        "memory outside of the batch's rows changed"
    );
    bits
}

/// The lse of the leading rows, of whatever type, and as [`take_rows`].
pub fn take_lse(part: &Resident<'_>, rows: i64) -> Vec<f32> {
    let dtype = part.image().view.dtype;
    let bits = take_rows(part, rows);
    bits.iter().map(|&b| decode(dtype, b) as f32).collect()
}

/// Calls `f` with every index of a shape, the last dimension fastest.
pub fn for_each_index(shape: &[i64], mut f: impl FnMut(&[i64])) {
    let mut index = vec![0; shape.len()];
    for _ in 0..shape.iter().product() {
        f(&index);
        for (i, extent) in index.iter_mut().zip(shape).rev() {
            *i += 1;
            if *i < *extent {
                break;
            }
            *i = 0;
        }
    }
}

/// The view of rows of q or o.
pub fn rows(problem: &Problem, dtype: DType, dim: u32, gaps: Gaps) -> View {
    let tokens = problem.num_tokens() as i64 + i64::from(problem.memory.padded_rows);
    let shape = [tokens, problem.num_qo_heads().into(), dim.into()];
    View::gapped(dtype, &shape, &[gaps.middle, gaps.inner, 0], gaps.lead)
}

/// The view of lse.
pub fn lse_view(problem: &Problem) -> View {
    let gaps = problem.memory.lse;
    let tokens = problem.num_tokens() as i64 + i64::from(problem.memory.padded_rows);
    let heads = i64::from(problem.num_qo_heads());
    let dtype = problem.layer.lse_dtype;
    if problem.memory.lse_head_major {
        let mut view = View::gapped(dtype, &[heads, tokens], &[gaps.inner, 0], gaps.lead);
        view.shape.swap(0, 1);
        view.strides.swap(0, 1);
        return view;
    }
    View::gapped(dtype, &[tokens, heads], &[gaps.inner, 0], gaps.lead)
}

fn queries(problem: &Problem) -> Image {
    let (dtype, values) = (problem.q_dtype, Values::of(problem));
    let view = rows(problem, dtype, problem.head_dim_qk, problem.memory.q);
    let mut image = Image::poisoned(view);
    for (b, request) in problem.requests.iter().enumerate() {
        let start = i64::from(problem.qo_indptr()[b]);
        let shape = [
            request.qo_len.into(),
            problem.num_qo_heads().into(),
            problem.head_dim_qk.into(),
        ];
        for_each_index(&shape, |index| {
            let [i, head, d] = [0, 1, 2].map(|n| index[n] as usize);
            let bits = encode(dtype, values.q(b, i, head, d));
            image.put(&[start + index[0], index[1], index[2]], bits);
        });
    }
    image
}

#[derive(Clone, Copy, PartialEq)]
enum Side {
    Key,
    KeyRope,
    Value,
}

/// A cache tensor: keys where the page table says, everything else poisoned.
fn cache(problem: &Problem, side: Side) -> Image {
    let values = Values::of(problem);
    let (memory, heads, rope_dim) = (&problem.memory, problem.num_kv_heads, problem.rope_dim());
    let nope_dim = problem.head_dim_qk - rope_dim;
    let (heads, dim, gaps) = match side {
        Side::Key => (heads, nope_dim, memory.k),
        Side::KeyRope => (1, rope_dim, memory.k_rope),
        Side::Value => (heads, problem.head_dim_vo, memory.v),
    };
    let table = PageTable::of(problem);
    let token_indptr = problem.token_indptr();
    let lanes = u32::from(problem.kv_dtype.lanes());
    let mut image = Image::poisoned(match problem.form {
        CacheForm::PackedKeys => packed_view(problem, side, table.num_pages as i64, gaps),
        _ => cache_view(problem, &table, (heads, dim / lanes), gaps),
    });
    for (b, &first) in token_indptr[..problem.requests.len()].iter().enumerate() {
        let shape = [problem.cached_len(b), heads, dim].map(i64::from);
        for_each_index(&shape, |index| {
            let [j, head, d] = [0, 1, 2].map(|n| index[n] as usize);
            if is_hidden(problem, j) {
                return;
            }
            let value = match side {
                Side::Key => values.k(b, j, head, d),
                Side::KeyRope => values.k(b, j, head, nope_dim as usize + d),
                Side::Value => values.v(b, j, head, d),
            };
            let of = match side {
                Side::Key | Side::KeyRope => StoredSide::Key,
                Side::Value => StoredSide::Value,
            };
            let bits = values.stored(of, b, j, [head, d]).encode(value);
            let row = i64::from(first) + index[0];
            put_element(problem, &mut image, side, (&table, b, row, index), bits);
        });
    }
    match (side, problem.split_keys) {
        (Side::KeyRope, Some(split)) if !split.has_head => without_heads(image, problem),
        _ => image,
    }
}

/// Keys or values beside the cache: those of the query rows, in their order.
fn new_rows(problem: &Problem, side: Side) -> Option<Image> {
    let dtype = problem.new_kv?;
    let values = Values::of(problem);
    let (dim, gaps) = match side {
        Side::Value => (problem.head_dim_vo, problem.memory.v),
        _ => (problem.head_dim_qk, problem.memory.k),
    };
    let tokens = problem.num_tokens() as i64 + i64::from(problem.memory.padded_rows);
    let shape = [tokens, problem.num_kv_heads.into(), dim.into()];
    let mut image = Image::poisoned(View::gapped(
        dtype,
        &shape,
        &[gaps.middle, gaps.inner, 0],
        gaps.lead,
    ));
    for (b, request) in problem.requests.iter().enumerate() {
        let start = i64::from(problem.qo_indptr()[b]);
        let shape = [request.qo_len, problem.num_kv_heads, dim].map(i64::from);
        for_each_index(&shape, |index| {
            let [i, head, d] = [0, 1, 2].map(|n| index[n] as usize);
            let j = problem.cached_len(b) as usize + i;
            let value = match side {
                Side::Value => values.v(b, j, head, d),
                _ => values.k(b, j, head, d),
            };
            image.put(
                &[start + index[0], index[1], index[2]],
                encode(dtype, value),
            );
        });
    }
    Some(image)
}

/// An image of one head without its dimension of heads.
fn without_heads(mut image: Image, problem: &Problem) -> Image {
    let heads = match problem.storage {
        Storage::Paged {
            layout: KvLayout::Nhd,
            form,
            ..
        } if form != TableForm::TokenSlots => 2,
        _ => 1,
    };
    image.view.shape.remove(heads);
    image.view.strides.remove(heads);
    image
}

/// Puts an element of a key or value in its place, or in its half of a byte.
fn put_element(
    problem: &Problem,
    image: &mut Image,
    side: Side,
    (table, b, row, index): (&PageTable, usize, i64, &[i64]),
    bits: u64,
) {
    let at = cache_index(problem, table, b, row, index);
    let [.., d] = *index else { return };
    match (problem.form, side) {
        (CacheForm::PackedKeys, _) => {
            let page_size = i64::from(problem.page_size());
            let page = i64::from(table.ids[b][(index[0] / page_size) as usize]);
            let (slot, head) = (index[0] % page_size, index[1]);
            match side {
                Side::Value => image.put(&[page, head, d, slot], bits),
                _ => {
                    let x = 16 / problem.kv_dtype.size() as i64;
                    image.put(&[page, head, d / x, slot, d % x], bits);
                }
            }
        }
        (CacheForm::ChannelZeroPoints | CacheForm::Nvfp4, _) => {
            let mut at = at;
            *at.last_mut().expect("a dimension of elements") = d / 2;
            let byte = image.bits(&at);
            let byte = match d % 2 {
                0 => byte & 0xf0 | bits,
                _ => byte & 0x0f | bits << 4,
            };
            image.put(&at, byte);
        }
        _ => image.put(&at, bits),
    }
}

/// The scales of a form that has them beside the cache: those of no key are NaN.
fn scales_beside(problem: &Problem, side: StoredSide) -> Option<Image> {
    let values = Values::of(problem);
    let (heads, table) = (problem.num_kv_heads, PageTable::of(problem));
    let (dim, gaps) = match side {
        StoredSide::Key => (problem.head_dim_qk, problem.memory.k),
        StoredSide::Value => (problem.head_dim_vo, problem.memory.v),
    };
    let blocks = dim / BLOCK as u32;
    let (mut image, width) = match problem.form {
        CacheForm::Plain | CacheForm::PackedKeys => return None,
        CacheForm::ChannelScales | CacheForm::ChannelZeroPoints => {
            let shape = [i64::from(heads), i64::from(dim)];
            let mut image = Image::poisoned(View::gapped(
                DType::F32,
                &shape,
                &[gaps.inner, 0],
                gaps.lead,
            ));
            for_each_index(&shape, |at| {
                let [head, d] = [at[0] as usize, at[1] as usize];
                let stored = values.stored(side, 0, 0, [head, d]);
                image.put(at, encode(DType::F32, stored.scale));
            });
            return Some(image);
        }
        CacheForm::TokenHeadScales => {
            let shape = [table.num_pages as u32, problem.page_size(), heads, 1].map(i64::from);
            let after = [gaps.outer, gaps.middle, gaps.inner, 0];
            let mut view = View::gapped(DType::F32, &shape, &after, gaps.lead);
            view.shape.pop();
            view.strides.pop();
            (Image::poisoned(view), 1)
        }
        CacheForm::Nvfp4 => {
            let mut view = cache_view(problem, &table, (heads, blocks), gaps);
            view.dtype = DType::F8E4M3;
            (Image::poisoned(view), blocks)
        }
    };
    for b in 0..problem.requests.len() {
        let shape = [problem.cached_len(b), heads, width].map(i64::from);
        for_each_index(&shape, |index| {
            let [j, head, block] = [0, 1, 2].map(|n| index[n] as usize);
            if is_hidden(problem, j) {
                return;
            }
            let scale = values.stored(side, b, j, [head, block * BLOCK]).scale;
            match problem.form {
                CacheForm::TokenHeadScales => {
                    let page_size = i64::from(problem.page_size());
                    let page = table.ids[b][(index[0] / page_size) as usize];
                    let at = [page.into(), index[0] % page_size, index[1]];
                    image.put(&at, encode(DType::F32, scale));
                }
                _ => {
                    let at = cache_index(problem, &table, b, 0, index);
                    image.put(&at, encode(DType::F8E4M3, scale));
                }
            }
        });
    }
    Some(image)
}

/// The zero points of a form that has them.
fn zero_points(problem: &Problem, side: StoredSide) -> Option<Image> {
    let dim = match side {
        StoredSide::Key => problem.head_dim_qk,
        StoredSide::Value => problem.head_dim_vo,
    };
    let shape = [problem.num_kv_heads.into(), i64::from(dim)];
    (problem.form == CacheForm::ChannelZeroPoints).then(|| {
        let values = Values::of(problem);
        let mut image = Image::poisoned(View::gapped(DType::F32, &shape, &[3, 0], 0));
        for_each_index(&shape, |at| {
            let stored = values.stored(side, 0, 0, [at[0] as usize, at[1] as usize]);
            image.put(at, encode(DType::F32, stored.zero));
        });
        image
    })
}

/// Keys that the mask hides from every row stay poisoned: nobody may read them.
fn is_hidden(problem: &Problem, j: usize) -> bool {
    match problem.layer.mask {
        MaskKind::Bytes(Pattern::Holes(from)) | MaskKind::Bits(Pattern::Holes(from)) => {
            problem.layer.mask_columns == MaskColumns::Keys && is_hole(from, j)
        }
        _ => false,
    }
}

/// The view of a cache in vLLM's first layout.
fn packed_view(problem: &Problem, side: Side, pages: i64, gaps: Gaps) -> View {
    let (heads, tokens) = (problem.num_kv_heads.into(), problem.page_size().into());
    let (dtype, x) = (problem.kv_dtype, 16 / problem.kv_dtype.size() as i64);
    let dim = |dim: u32| i64::from(dim);
    match side {
        Side::Value => View::gapped(
            dtype,
            &[pages, heads, dim(problem.head_dim_vo), tokens],
            &[gaps.outer, gaps.middle, gaps.inner, 0],
            gaps.lead,
        ),
        _ => View::gapped(
            dtype,
            &[pages, heads, dim(problem.head_dim_qk) / x, tokens, x],
            &[gaps.outer, gaps.middle, gaps.inner, 0, 0],
            gaps.lead,
        ),
    }
}

fn cache_view(problem: &Problem, table: &PageTable, (heads, dim): (u32, u32), gaps: Gaps) -> View {
    let (heads, dim) = (i64::from(heads), i64::from(dim));
    let flat = |rows: i64| {
        View::gapped(
            problem.kv_dtype,
            &[rows, heads, dim],
            &[gaps.middle, gaps.inner, 0],
            gaps.lead,
        )
    };
    let pages = table.num_pages as i64;
    let shape = match problem.storage {
        Storage::Ragged => {
            let tokens = problem.token_indptr()[problem.requests.len()];
            return flat(i64::from(tokens) + i64::from(problem.memory.padded_rows));
        }
        Storage::Paged {
            form: TableForm::TokenSlots,
            ..
        } => return flat(pages),
        Storage::Paged {
            page_size, layout, ..
        } => match layout {
            KvLayout::Nhd => [pages, page_size.into(), heads, dim],
            KvLayout::Hnd => [pages, heads, page_size.into(), dim],
        },
    };
    View::gapped(
        problem.kv_dtype,
        &shape,
        &[gaps.outer, gaps.middle, gaps.inner, 0],
        gaps.lead,
    )
}

/// Where key `index = [j, head, d]` of request `b` lies; `row` is its row in a ragged tensor.
fn cache_index(
    problem: &Problem,
    table: &PageTable,
    b: usize,
    row: i64,
    index: &[i64],
) -> Vec<i64> {
    let (j, head, d) = (index[0], index[1], index[2]);
    let Storage::Paged {
        page_size,
        layout,
        form,
        ..
    } = problem.storage
    else {
        return vec![row, head, d];
    };
    let page = i64::from(table.ids[b][(j / i64::from(page_size)) as usize]);
    let slot = j % i64::from(page_size);
    match (form, layout) {
        (TableForm::TokenSlots, _) => vec![page, head, d],
        (_, KvLayout::Nhd) => vec![page, slot, head, d],
        (_, KvLayout::Hnd) => vec![page, head, slot, d],
    }
}

/// A byte that is not 0 lets see, whichever it is.
const VISIBLE: [u8; 4] = [1, 0x80, 0xff, 2];

/// A custom mask, and where each request's part of it starts.
struct CustomMask {
    bytes: Vec<u8>,
    starts: Vec<i64>,
}

/// Bytes between masks that lie apart.
const MASK_GAP: usize = 3;

impl CustomMask {
    fn of(problem: &Problem) -> Option<CustomMask> {
        problem.layer.mask.is_custom().then(|| {
            let count = problem.requests.len();
            let mut mask = CustomMask {
                bytes: Vec::new(),
                starts: vec![i64::MIN; count + 1],
            };
            let mut order: Vec<usize> = (0..count).collect();
            if problem.layer.masks_apart {
                order.reverse();
            }
            for b in order {
                if problem.layer.masks_apart {
                    mask.bytes.extend([0xff; MASK_GAP]);
                }
                mask.starts[b] = mask.bytes.len() as i64;
                mask.bytes.extend(mask_of(problem, b));
            }
            mask
        })
    }

    fn image(&self) -> Image {
        let bits = self.bytes.iter().map(|&byte| byte.into());
        Image::of_bits(DType::U8, &[self.bytes.len() as i64], bits)
    }

    fn indptr(&self) -> Image {
        let bits = self.starts.iter().map(|&start| start as u64);
        Image::of_bits(DType::I64, &[self.starts.len() as i64], bits)
    }
}

/// A request's part of the custom mask. Columns that nobody may read hide.
fn mask_of(problem: &Problem, b: usize) -> Vec<u8> {
    let (values, request) = (Values::of(problem), problem.requests[b]);
    let (rows, keys) = (i64::from(request.qo_len), i64::from(request.kv_len));
    let past = keys - rows;
    let columns = match problem.layer.mask_columns {
        MaskColumns::NewKeys => past..keys,
        _ => 0..keys,
    };
    let first = match problem.layer.mask_columns {
        MaskColumns::Keys => 0,
        _ => past.max(0),
    };
    let mut seen = Vec::new();
    for i in 0..rows {
        seen.extend(
            columns
                .clone()
                .map(|j| j >= first && values.mask(b, i as usize, j as usize)),
        );
    }
    match problem.layer.mask {
        MaskKind::Bits(_) => (seen.chunks(8))
            .map(|eight| {
                // Bits after a request's last one are set: nobody may read them.
                let hidden = eight.iter().enumerate().filter(|(_, seen)| !**seen);
                hidden.fold(0xff, |byte, (n, _)| byte & !(1 << n))
            })
            .collect(),
        _ => (seen.iter().zip(VISIBLE.iter().cycle()))
            .map(|(&seen, &byte)| if seen { byte } else { 0 })
            .collect(),
    }
}

/// A byte per request, where causality goes by request.
fn causal_requests(problem: &Problem) -> Option<Image> {
    let values = Values::of(problem);
    let count = problem.requests.len();
    let causal = (0..count).map(|b| match values.is_causal(b) {
        true => VISIBLE[b % VISIBLE.len()].into(),
        false => 0,
    });
    (problem.layer.mask == MaskKind::CausalByRequest)
        .then(|| Image::of_bits(DType::U8, &[count as i64], causal))
}

/// ALiBi slopes of all heads, for all requests or for each.
/// Scales of rows of q, k or v, where there are some.
fn row_scales(problem: &Problem, of: ScaleOf) -> Option<Image> {
    let values = Values::of(problem);
    let (count, heads) = (problem.requests.len(), problem.num_kv_heads as usize);
    let shape: &[i64] = match of.kind(&problem.layer) {
        HeadScales::Absent => return None,
        HeadScales::One => &[1],
        HeadScales::PerHead => &[heads as i64],
        HeadScales::PerRequest => &[count as i64, heads as i64],
    };
    let numbers = shape.iter().product::<i64>() as usize;
    let all: Vec<f32> = (0..numbers)
        .map(|n| values.scale(of, n / heads, n % heads))
        .collect();
    Some(Image::of_f32(shape, &all))
}

fn alibi_slopes(problem: &Problem) -> Option<Image> {
    problem.layer.alibi?;
    let values = Values::of(problem);
    let (count, heads) = (problem.requests.len(), problem.num_qo_heads() as usize);
    let slopes = |b: usize| (0..heads).map(move |head| values.alibi_slope(b, head));
    Some(match problem.layer.alibi_by_request {
        false => Image::of_f32(&[heads as i64], &slopes(0).collect::<Vec<f32>>()),
        true => {
            let all: Vec<f32> = (0..count).flat_map(slopes).collect();
            Image::of_f32(&[count as i64, heads as i64], &all)
        }
    })
}

/// Starts of items, and positions in them; padding is poisoned by what shows. Those of a graph have one shape, wherever
/// items start.
fn items(problem: &Problem) -> Option<[Image; 2]> {
    if problem.layer.mask != MaskKind::Items {
        return None;
    }
    let values = Values::of(problem);
    let count = problem.requests.len();
    let starts: Vec<i64> = (0..count).map(|b| values.item_start(b)).collect();
    let tokens = |b: usize| i64::from(problem.requests[b].kv_len) - starts[b];
    let needed = (0..count).map(tokens).max().unwrap_or(0);
    let longest = problem.requests.iter().map(|request| request.kv_len).max();
    let columns = match problem.graph {
        true => longest.map_or(0, i64::from),
        false => needed,
    };
    let positions = (0..count).flat_map(|b| {
        let len = tokens(b);
        (0..columns).map(move |n| match n < len {
            true => values.item_position(b, n) as u64,
            false => i32::MAX as u64,
        })
    });
    Some([
        Image::of_bits(
            DType::I64,
            &[count as i64],
            starts.iter().map(|&n| n as u64),
        ),
        Image::of_bits(
            DType::I32,
            &[count as i64, columns],
            positions.collect::<Vec<u64>>(),
        ),
    ])
}

fn mm_prefix_ranges(problem: &Problem) -> Option<Image> {
    let num_ranges = problem.layer.mm_prefix_ranges;
    let values = Values::of(problem);
    let mut ends = Vec::new();
    for b in 0..problem.requests.len() {
        for r in 0..num_ranges as usize {
            let (start, end) = values.range(b, r);
            ends.extend([start, end]);
        }
    }
    let shape = [problem.requests.len() as i64, num_ranges.into(), 2];
    (num_ranges > 0).then(|| Image::of_i32(&shape, &ends))
}
