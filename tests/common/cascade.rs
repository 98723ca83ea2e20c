//! Batches whose requests share prefixes, as plain data: a random tree, its page table and cache, and the comparison with
//! flat attention in float64 over the same table.

use super::codec::{encode, rounded, unit_roundoff};
use super::compare::{self, Tolerance};
use super::dense;
use super::door::{CascadeHandle, Session};
use super::instance::{LayerData, Step, for_each_index};
use super::memory::{HostMemory, Image, Memory, Resident, View, WorkspaceMemory};
use super::pages::{page_table, prefix_sums};
use super::problem::{Problem, Storage, TableForm};
use super::values::{mix, normal, shuffled};
use folio::api::{BatchInput, SharedPrefixes, Stream, Target, Workspace};
use folio::dtype::DType;
use folio::error::Result;
use folio::problem::{
    AttentionArgs, AttentionDesc, CacheForm, Kind, KvLayout, KvStorage, LogBase, Mask, MaskColumns,
    ScoreBias, Window,
};

/// What a run asks for beside causal attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extra {
    Nothing,
    Full,
    SoftCap,
    Sinks,
    Scales,
    RequestScales,
    Window,
    Alibi,
    MmPrefix,
    CustomMask,
    /// What follows hides none of the keys before the new tokens.
    LaterKeys,
    CausalByRequest,
    MmPrefixAlone,
    MaskOfNewKeys,
    MaskAfterPrefix,
    /// Of the rows of the batch, which all cuts have in common.
    BiasOfKeys,
    BiasOfNewKeys,
    /// Of the rows of each request, which a cut of several does not know.
    BiasOfRequestRows,
}

pub const EXTRAS: [Extra; 18] = [
    Extra::Nothing,
    Extra::Full,
    Extra::SoftCap,
    Extra::Sinks,
    Extra::Scales,
    Extra::RequestScales,
    Extra::Window,
    Extra::Alibi,
    Extra::MmPrefix,
    Extra::CustomMask,
    Extra::LaterKeys,
    Extra::CausalByRequest,
    Extra::MmPrefixAlone,
    Extra::MaskOfNewKeys,
    Extra::MaskAfterPrefix,
    Extra::BiasOfKeys,
    Extra::BiasOfNewKeys,
    Extra::BiasOfRequestRows,
];

/// One problem.
#[derive(Debug, Clone)]
pub struct Case {
    pub dtype: DType,
    pub kv_dtype: DType,
    pub kv_heads: i64,
    pub group: i64,
    pub dim_qk: i64,
    pub dim_vo: i64,
    pub page_size: i64,
    pub layout: KvLayout,
    /// The page table is CSR, not a block table.
    pub csr: bool,
    /// Query rows and own keys of each request, the rows' included; below 0 where it has not all keys of its prefixes.
    pub requests: Vec<(i32, i32)>,
    /// First request, end, and pages, those of the prefixes around it included; the wider ones first.
    pub prefixes: Vec<(i32, i32, i32)>,
    pub levels: u32,
    pub extra: Extra,
    pub lse: Option<LogBase>,
    pub lse_dtype: DType,
    pub batch_invariant: bool,
    pub graph: bool,
    /// Keys that the handle allows a request, if more than these have. Runs of a graph share what costs nothing where so many
    /// may pay.
    pub most_keys: u32,
    pub seed: u64,
}

impl Case {
    /// Decodes over pages of 8, in fp32.
    pub fn plain(requests: &[(i32, i32)], prefixes: &[(i32, i32, i32)]) -> Case {
        Case {
            dtype: DType::F32,
            kv_dtype: DType::F32,
            kv_heads: 2,
            group: 2,
            dim_qk: 16,
            dim_vo: 16,
            page_size: 8,
            layout: KvLayout::Nhd,
            csr: false,
            requests: requests.to_vec(),
            prefixes: prefixes.to_vec(),
            levels: 3,
            extra: Extra::Nothing,
            lse: Some(LogBase::E),
            lse_dtype: DType::F32,
            batch_invariant: false,
            graph: false,
            most_keys: 1,
            seed: 1,
        }
    }

    /// The same in another type.
    pub fn of(self, dtype: DType) -> Case {
        Case {
            dtype,
            kv_dtype: dtype,
            ..self
        }
    }

    /// The pages that a request shares.
    fn shared_pages(&self, b: usize) -> i32 {
        let holds = |prefix: &&(i32, i32, i32)| (prefix.0..prefix.1).contains(&(b as i32));
        let pages = self.prefixes.iter().filter(holds).map(|prefix| prefix.2);
        pages.max().unwrap_or(0)
    }

    pub fn kv_len(&self, b: usize) -> i32 {
        self.shared_pages(b) * self.page_size as i32 + self.requests[b].1
    }

    pub fn num_tokens(&self) -> i64 {
        self.requests.iter().map(|r| i64::from(r.0)).sum()
    }

    pub fn desc(&self) -> AttentionDesc {
        let num_pages = |b| i64::from(self.kv_len(b)).div_euclid(self.page_size) as u64 + 1;
        let requests = 0..self.requests.len();
        AttentionDesc {
            kind: Kind::Prefill,
            q_dtype: self.dtype,
            kv_format: self.kv_dtype.into(),
            o_dtype: self.dtype,
            num_qo_heads: (self.kv_heads * self.group) as u32,
            num_kv_heads: self.kv_heads as u32,
            head_dim_qk: self.dim_qk as u32,
            head_dim_vo: self.dim_vo as u32,
            kv: KvStorage::Paged {
                page_size: self.page_size as u32,
                layout: self.layout,
            },
            max_batch_size: self.requests.len().max(1) as u32,
            max_qo_len: self.requests.iter().map(|r| r.0).max().unwrap_or(0).max(1) as u32,
            max_num_tokens: self.num_tokens().max(1) as u32,
            max_kv_len: requests
                .clone()
                .map(|b| self.kv_len(b))
                .max()
                .map_or(0, |keys| keys as u32)
                .max(self.most_keys),
            max_num_pages: requests.map(num_pages).sum::<u64>().max(1),
            graph: self.graph,
            batch_invariant: self.batch_invariant,
            fp8_products: false,
            mask_items: false,
            shared_levels: self.levels,
            new_kv: None,
        }
    }
}

/// Page ids of every request, and the number of pages. Those of a prefix are its requests' alike.
fn pages(case: &Case) -> (Vec<Vec<i32>>, i64) {
    let mut next = 0;
    let mut take = |count: i32| {
        next += count;
        (next - count..next).collect::<Vec<i32>>()
    };
    let mut tables: Vec<Vec<i32>> = vec![Vec::new(); case.requests.len()];
    for &(begin, end, pages) in &case.prefixes {
        let first = tables[begin as usize].len() as i32;
        let ids = take(pages - first);
        for table in &mut tables[begin as usize..end as usize] {
            table.extend(&ids);
        }
    }
    for (b, table) in tables.iter_mut().enumerate() {
        let own = i64::from(case.requests[b].1).div_euclid(case.page_size) as i32 + 1;
        table.extend(take(own.max(0)));
    }
    let ids = shuffled(case.seed, next as usize + 3);
    for table in &mut tables {
        table
            .iter_mut()
            .for_each(|page| *page = ids[*page as usize]);
    }
    (tables, i64::from(next) + 3)
}

/// The tensors of a case in memory.
pub struct Data<'m> {
    case: Case,
    q: Resident<'m>,
    k: Resident<'m>,
    v: Resident<'m>,
    pub o: Resident<'m>,
    pub lse: Option<Resident<'m>>,
    qo_indptr: Resident<'m>,
    kv_len: Resident<'m>,
    indptr: Option<Resident<'m>>,
    ids: Resident<'m>,
    slopes: Resident<'m>,
    bias: Resident<'m>,
    sinks: Resident<'m>,
    scales: Resident<'m>,
    request_scales: Resident<'m>,
    ranges: Resident<'m>,
    mask: Resident<'m>,
    /// Where the masks of the new keys start.
    new_keys_start: Resident<'m>,
    causal: Resident<'m>,
    columns: [Vec<i32>; 3],
}

impl<'m> Data<'m> {
    /// With lengths on the host.
    pub fn new(memory: &'m dyn Memory, case: &Case) -> Data<'m> {
        Data::with_lengths(memory, &HostMemory, case)
    }

    pub fn with_lengths(
        memory: &'m dyn Memory,
        of_lengths: &'m dyn Memory,
        case: &Case,
    ) -> Data<'m> {
        let filled = |salt: u64, dtype: DType, shape: &[i64]| {
            let mut image = Image::poisoned(View::compact(dtype, shape));
            for_each_index(shape, |index| {
                let start = mix(case.seed ^ salt << 40);
                let hash = index.iter().fold(start, |hash, &i| mix(hash ^ i as u64));
                image.put(index, encode(dtype, normal(hash)));
            });
            Resident::new(memory, image)
        };
        let (tables, num_pages) = pages(case);
        let (tokens, heads) = (case.num_tokens(), case.kv_heads * case.group);
        let cache = |dim| match case.layout {
            KvLayout::Nhd => [num_pages, case.page_size, case.kv_heads, dim],
            KvLayout::Hnd => [num_pages, case.kv_heads, case.page_size, dim],
        };
        let lengths = |numbers: &[i32]| {
            Resident::new(of_lengths, Image::of_i32(&[numbers.len() as i64], numbers))
        };
        let batch_size = case.requests.len();
        let kv_len: Vec<i32> = (0..batch_size).map(|b| case.kv_len(b)).collect();
        let most_keys = kv_len.iter().copied().max().map_or(0, i64::from);
        let (indptr, ids) = page_table(case.csr, DType::I32, &tables);
        let floats = |numbers: Vec<f32>| {
            Resident::new(memory, Image::of_f32(&[numbers.len() as i64], &numbers))
        };
        let ranges: Vec<i32> = kv_len.iter().flat_map(|&len| [len / 2, len - 1]).collect();
        let elements: i64 = (case.requests.iter().zip(&kv_len))
            .map(|(request, &len)| i64::from(request.0) * i64::from(len))
            .sum();
        let bytes = (0..elements).map(|i| u64::from(!mix(case.seed ^ i as u64).is_multiple_of(4)));
        let column = |f: fn(&(i32, i32, i32)) -> i32| case.prefixes.iter().map(f).collect();
        let mut columns: [Vec<i32>; 3] = [column(|p| p.0), column(|p| p.1), column(|p| p.2)];
        let page_size = case.page_size as i32;
        columns[2]
            .iter_mut()
            .for_each(|pages: &mut i32| *pages *= page_size);
        Data {
            q: filled(1, case.dtype, &[tokens, heads, case.dim_qk]),
            k: filled(2, case.kv_dtype, &cache(case.dim_qk)),
            v: filled(3, case.kv_dtype, &cache(case.dim_vo)),
            o: Resident::new(
                memory,
                Image::poisoned(View::compact(case.dtype, &[tokens, heads, case.dim_vo])),
            ),
            lse: case.lse.map(|_| {
                let view = View::compact(case.lse_dtype, &[tokens, heads]);
                Resident::new(memory, Image::poisoned(view))
            }),
            qo_indptr: lengths(&prefix_sums(case.requests.iter().map(|r| r.0))),
            kv_len: lengths(&kv_len),
            indptr: indptr.as_deref().map(lengths),
            ids: Resident::new(memory, ids),
            bias: filled(4, DType::F32, &[heads, tokens, most_keys]),
            slopes: floats((0..heads).map(|h| 0.02 * (h + 1) as f32).collect()),
            sinks: floats((0..heads).map(|h| h as f32 - 1.0).collect()),
            scales: floats((0..case.kv_heads).map(|h| 0.5 + 0.25 * h as f32).collect()),
            request_scales: request_scales(memory, batch_size as i64, case.kv_heads),
            ranges: Resident::new(memory, Image::of_i32(&[batch_size as i64, 1, 2], &ranges)),
            mask: Resident::new(memory, Image::of_bits(DType::U8, &[elements], bytes)),
            new_keys_start: Resident::new(memory, {
                let squares = case.requests.iter().map(|r| (r.0 * r.0) as u64);
                let starts = std::iter::once(0).chain(squares.scan(0, |end, n| {
                    *end += n;
                    Some(*end)
                }));
                Image::of_bits(DType::I64, &[batch_size as i64 + 1], starts)
            }),
            causal: Resident::new(memory, {
                let causal = (0..batch_size as u64).map(|b| b % 3 / 2);
                Image::of_bits(DType::U8, &[batch_size as i64], causal)
            }),
            columns,
            case: case.clone(),
        }
    }

    pub fn batch(&self) -> BatchInput {
        let mut batch = BatchInput {
            qo_indptr: Some(self.qo_indptr.tensor()),
            kv_len: Some(self.kv_len.tensor()),
            ..BatchInput::default()
        };
        match &self.indptr {
            Some(indptr) => {
                batch.kv_indptr = Some(indptr.tensor());
                batch.kv_indices = Some(self.ids.tensor());
            }
            None => batch.block_table = Some(self.ids.tensor()),
        }
        batch
    }

    /// Other numbers in the place of the lengths.
    pub fn set_lengths(&self, number: impl Fn(u64) -> i32) {
        let count = self.case.requests.len() as u64 + 1;
        let numbers: Vec<i32> = (0..2 * count).map(number).collect();
        let [rows, keys] = [0, count as usize].map(|first| {
            let numbers = &numbers[first..first + count as usize];
            Resident::new(&HostMemory, Image::of_i32(&[count as i64], numbers))
        });
        self.qo_indptr.copy_from(&rows);
        self.kv_len.copy_from(&keys);
    }

    /// The case's own.
    pub fn reset_lengths(&self) {
        self.qo_indptr.reset();
        self.kv_len.reset();
    }

    /// Takes over what plans and runs read of another case, whose tensors have the same shapes.
    pub fn take_inputs_of(&self, other: &Data<'_>) {
        for (own, other) in [
            (&self.q, &other.q),
            (&self.k, &other.k),
            (&self.v, &other.v),
            (&self.qo_indptr, &other.qo_indptr),
            (&self.kv_len, &other.kv_len),
            (&self.ids, &other.ids),
        ] {
            own.copy_from(other);
        }
        if let (Some(indptr), Some(other)) = (&self.indptr, &other.indptr) {
            indptr.copy_from(other);
        }
    }

    pub fn prefixes(&self) -> SharedPrefixes<'_> {
        let [request_begin, request_end, kv_len] = &self.columns;
        SharedPrefixes {
            common_prefix_len: 0,
            request_begin,
            request_end,
            kv_len,
        }
    }

    pub fn args(&self) -> AttentionArgs {
        let mut args = AttentionArgs::new(
            self.q.tensor(),
            self.k.tensor(),
            self.v.tensor(),
            self.o.tensor(),
        );
        args.lse = self.lse.as_ref().map(Resident::tensor);
        args.lse_base = self.case.lse.unwrap_or(LogBase::E);
        match self.case.extra {
            Extra::Nothing => {}
            Extra::Full => args.mask = Mask::Full,
            Extra::SoftCap => args.logits_soft_cap = 3.0,
            Extra::Sinks => args.sinks = Some(self.sinks.tensor()),
            Extra::Scales => {
                (args.k_scale, args.v_scale, args.q_scale) = (0.7, 1.5, 0.9);
                args.k_scales = Some(self.scales.tensor());
                args.v_scales = Some(self.scales.tensor());
            }
            Extra::RequestScales => {
                args.q_scales = Some(self.request_scales.tensor());
                args.k_scales = Some(self.request_scales.tensor());
                args.v_scales = Some(self.request_scales.tensor());
            }
            Extra::Window => args.window.left = Some(37),
            Extra::Alibi => args.alibi_slopes = Some(self.slopes.tensor()),
            Extra::BiasOfKeys => args.score_bias = Some(self.bias(false, false)),
            Extra::BiasOfNewKeys => args.score_bias = Some(self.bias(true, true)),
            Extra::BiasOfRequestRows => args.score_bias = Some(self.bias(true, false)),
            Extra::MmPrefix => {
                args.mm_prefix_ranges = Some(self.ranges.tensor());
                args.window = Window {
                    left: Some(20),
                    right: None,
                };
            }
            Extra::CustomMask => args.mask = Mask::Bytes(self.mask.tensor()),
            Extra::LaterKeys => {
                args.mask = Mask::Full;
                args.window.right = Some(2);
            }
            Extra::CausalByRequest => {
                args.mask = Mask::CausalByRequest(self.causal.tensor());
            }
            Extra::MmPrefixAlone => args.mm_prefix_ranges = Some(self.ranges.tensor()),
            Extra::MaskOfNewKeys => {
                args.mask = Mask::Bytes(self.mask.tensor());
                args.mask_columns = MaskColumns::NewKeys;
                args.custom_mask_indptr = Some(self.new_keys_start.tensor());
            }
            Extra::MaskAfterPrefix => {
                args.mask = Mask::Bytes(self.mask.tensor());
                args.mask_columns = MaskColumns::KeysAfterPrefix;
            }
        }
        args
    }
}

/// A factor for each KV head of each request.
fn request_scales(memory: &dyn Memory, batch_size: i64, kv_heads: i64) -> Resident<'_> {
    let numbers: Vec<f32> = (0..batch_size * kv_heads)
        .map(|n| 0.5 + 0.125 * (n % 5) as f32)
        .collect();
    Resident::new(memory, Image::of_f32(&[batch_size, kv_heads], &numbers))
}

impl Data<'_> {
    fn bias(&self, request_rows: bool, new_keys: bool) -> ScoreBias {
        ScoreBias {
            tensor: self.bias.tensor(),
            request_rows,
            new_keys,
        }
    }
}

/// A handle with its workspace.
pub struct Handle<'m> {
    pub cascade: Box<dyn CascadeHandle>,
    workspace: WorkspaceMemory<'m>,
}

impl<'m> Handle<'m> {
    pub fn new(
        session: &dyn Session,
        memory: &'m dyn Memory,
        desc: AttentionDesc,
    ) -> Result<Handle<'m>> {
        let cascade = session.cascade(desc)?;
        Ok(Handle {
            workspace: WorkspaceMemory::new(memory, cascade.workspace()?),
            cascade,
        })
    }

    pub fn plan(
        &mut self,
        batch: &BatchInput,
        prefixes: &SharedPrefixes<'_>,
        stream: Stream,
    ) -> Result<()> {
        let (workspace, bytes) = self.workspace.place();
        self.cascade
            .plan(batch, prefixes, &workspace, bytes, stream)
    }

    pub fn assert_within_bounds(&self) {
        self.workspace.assert_within_bounds();
    }
}

/// What flat attention in float64 makes of the case: o, and lse in float32.
fn flat(case: &Case) -> (Image, Option<Image>) {
    let case = &Case {
        lse_dtype: DType::F32,
        ..case.clone()
    };
    let data = Data::new(&HostMemory, case);
    let session = super::door::DOORS[0].open(Target::Reference).unwrap();
    let desc = AttentionDesc {
        shared_levels: 0,
        graph: false,
        batch_invariant: false,
        fp8_products: false,
        mask_items: false,
        ..case.desc()
    };
    let mut handle = session.attention(desc).unwrap();
    handle
        .plan(
            &data.batch(),
            &Workspace::default(),
            (0, 0),
            Stream::default(),
        )
        .unwrap();
    handle.run(&data.args(), Stream::default()).unwrap();
    (data.o.current(), data.lse.as_ref().map(Resident::current))
}

/// Compares outputs with flat attention. What lies behind a value is one rounding of it, those of weights and values where
/// a matrix unit takes them in 16 bits, and float32 errors of scores, of values of up to about 5.
pub fn compare(case: &Case, data: &Data<'_>) -> std::result::Result<(), String> {
    let (want_o, want_lse) = flat(case);
    let (o, lse) = (data.o.current(), data.lse.as_ref().map(Resident::current));
    let unit = unit_roundoff(case.dtype);
    let accepted = 5.0 * (2.0 * unit + 2e-5);
    let score = if case.dtype == DType::F32 { 2e-5 } else { 1e-4 };
    // A base of 2 has larger numbers.
    let accepted_lse = score * std::f64::consts::LOG2_E;
    let mut worst = (0.0f64, Vec::new());
    let mut add = |error: f64, at: &[i64]| {
        if error > worst.0 || error.is_nan() {
            worst = (error, at.to_vec());
        }
    };
    let (tokens, heads) = (case.num_tokens(), case.kv_heads * case.group);
    for_each_index(&[tokens, heads, case.dim_vo], |at| {
        add((o.value(at) - want_o.value(at)).abs() / accepted, at);
    });
    if let (Some(lse), Some(want)) = (&lse, &want_lse) {
        for_each_index(&[tokens, heads], |at| {
            let (got, want) = (lse.value(at), want.value(at));
            let bound = |lse: f64| match case.lse_dtype {
                DType::F32 => lse,
                dtype => rounded(dtype, lse),
            };
            let [low, high] = [want - accepted_lse, want + accepted_lse].map(bound);
            let error = match got == want || (low <= got && got <= high) {
                true => 0.0,
                false => (got - want).abs() / accepted_lse,
            };
            add(error, at);
        });
    }
    match worst.0 <= 1.0 {
        true => Ok(()),
        false => Err(format!(
            "{} times what is accepted at {:?}",
            worst.0, worst.1
        )),
    }
}

/// Computes a case and compares; answers whether the plan shared keys.
pub fn check(
    session: &dyn Session,
    memory: &dyn Memory,
    case: &Case,
) -> std::result::Result<bool, String> {
    check_with(session, (memory, &HostMemory), case)
}

/// The same with lengths in a memory of their own.
pub fn check_with(
    session: &dyn Session,
    (memory, of_lengths): (&dyn Memory, &dyn Memory),
    case: &Case,
) -> std::result::Result<bool, String> {
    let data = Data::with_lengths(memory, of_lengths, case);
    let solve = || {
        let mut handle = Handle::new(session, memory, case.desc())?;
        handle.plan(&data.batch(), &data.prefixes(), Stream::default())?;
        handle.cascade.run(&data.args(), Stream::default())?;
        handle.cascade.shares()
    };
    let shares = solve().map_err(|error| error.to_string())?;
    compare(case, &data)?;
    Ok(shares)
}

/// A random tree over so many requests: first request, end and pages of prefixes, up to `levels` one within the other.
pub fn tree(seed: u64, requests: i32, levels: u32, most_pages: i32) -> Vec<(i32, i32, i32)> {
    let mut prefixes = Vec::new();
    grow(seed, 0..requests, (levels, 0), most_pages, &mut prefixes);
    prefixes
}

fn grow(
    seed: u64,
    requests: std::ops::Range<i32>,
    (levels, pages): (u32, i32),
    most_pages: i32,
    prefixes: &mut Vec<(i32, i32, i32)>,
) {
    let mut begin = requests.start;
    while levels > 0 && begin < requests.end {
        let hash = mix(seed ^ (begin as u64) << 8 ^ u64::from(levels));
        let end = begin + 1 + (hash % (requests.end - begin) as u64) as i32;
        let own = (hash >> 20) as i32 & 0x7fff_ffff;
        if own % 4 != 0 {
            let inner = pages + 1 + own % most_pages;
            prefixes.push((begin, end, inner));
            grow(hash, begin..end, (levels - 1, inner), most_pages, prefixes);
        }
        begin = end;
    }
}

/// A random tree over twenty requests: some have no rows, and in every other tree some have not all keys of their prefixes.
pub fn short_requests(seed: u64, like: Case) -> Case {
    let rows = if seed.is_multiple_of(3) { 20 } else { 3 };
    let own = |b: i32| match seed % 2 == 1 && b % 4 == 3 {
        true => -(3 * b % 17),
        false => rows + 31 * b % 190,
    };
    let mut case = Case {
        prefixes: tree(seed, 20, 3, 40),
        requests: (0..20)
            .map(|b| ((b + seed as i32) % rows, own(b)))
            .collect(),
        seed,
        ..like
    };
    // All of them have their new tokens.
    for b in 0..case.requests.len() {
        let missing = case.requests[b].0 - case.kv_len(b);
        case.requests[b].1 += missing.max(0);
    }
    case
}

/// Shared keys in caches of every form are those that the requests have.
pub fn cascades_of_every_form(
    session: &dyn Session,
    memory: &dyn Memory,
    tolerance: impl Fn(&Problem) -> Tolerance,
) {
    for (form, kv_dtype) in [
        (CacheForm::TokenHeadScales, DType::I8),
        (CacheForm::TokenHeadScales, DType::F8E4M3),
        (CacheForm::ChannelScales, DType::I8),
        (CacheForm::ChannelZeroPoints, DType::I4x2),
        (CacheForm::Nvfp4, DType::F4E2M1x2),
        (CacheForm::PackedKeys, DType::BF16),
        (CacheForm::PackedKeys, DType::F8E4M3),
    ] {
        let lens: Vec<(u32, u32)> = (0..4).map(|b| (1 + b % 2, 1210 + 20 * b)).collect();
        let problem = Problem::plain(&lens).of(DType::BF16).heads(4, 2, 64);
        let mut problem = problem.stored(form, kv_dtype);
        problem.storage = Storage::Paged {
            page_size: 16,
            layout: KvLayout::Hnd,
            form: TableForm::BlockTable { spare_columns: 1 },
            unused_pages: 3,
            shared_pages: 75,
        };
        let desc = AttentionDesc {
            shared_levels: 1,
            // A plan for a graph shares what there is, where longer requests may share what pays.
            graph: true,
            max_kv_len: 1 << 22,
            ..problem.desc()
        };
        let mut handle = Handle::new(session, memory, desc).unwrap();
        let step = Step::new(&HostMemory, &problem);
        let prefixes = SharedPrefixes {
            common_prefix_len: 1200,
            ..SharedPrefixes::default()
        };
        let batch = step.input();
        handle.plan(&batch, &prefixes, Stream::default()).unwrap();
        assert_eq!(handle.cascade.shares(), Ok(true));
        let layer = LayerData::new(memory, &problem);
        let run = handle.cascade.run(&layer.input(), Stream::default());
        run.unwrap();
        let want = dense::attention(&problem);
        let result = compare::compare(&problem, &want, &layer.output(), tolerance(&problem));
        assert_eq!(result, Ok(()), "{form:?} of {kv_dtype}");
    }
}
