//! Decode steps whose new tokens are appended and attended to by one call, as plain data, beside the two calls that it stands
//! for: what each leaves in the cache, in the queries and in the output.

use super::codec::{decode, encode};
use super::door::{Handle, Session};
use super::instance::{Scratch, for_each_index};
use super::memory::{HostMemory, Image, Memory, Resident, View};
use super::values::{mix, normal, uniform};
use folio::api::{BatchInput, Stream};
use folio::dtype::DType;
use folio::error::Result;
use folio::problem::{
    Angles, AppendArgs, AttentionArgs, AttentionDesc, CacheForm, Frequencies, Kind, KvLayout,
    KvStorage, Norm, Rope, RopeAppendArgs,
};
use proptest::prelude::*;
use proptest::sample::select;

const MAX_POSITION: i64 = 4096;

/// Angles of a step's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Angle {
    None,
    /// A table of fp32, or of the tokens' type.
    Table {
        is_f32: bool,
    },
    Computed,
}

#[derive(Debug, Clone)]
pub struct AppendRun {
    pub dtype: DType,
    pub cache: DType,
    pub group: i64,
    pub kv_heads: i64,
    pub dim: i64,
    pub page_size: i64,
    pub layout: KvLayout,
    /// New tokens and keys of each request.
    pub requests: Vec<(i64, i64)>,
    pub angle: Angle,
    pub rotary_dim: i64,
    pub is_interleaved: bool,
    /// A norm of queries and keys, with weights of fp32 or of the tokens' type.
    pub norm: Option<bool>,
    /// Queries are made where they are.
    pub in_place: bool,
    pub graph: bool,
    /// Of so many tokens, the last is not cached; 0: all are.
    pub uncached: u64,
    pub window_left: Option<u32>,
    pub seed: u64,
}

/// What a step leaves.
pub struct Left {
    pub k_cache: Image,
    pub v_cache: Image,
    pub q: Image,
    pub o: Image,
    pub lse: Image,
}

/// A step in memory.
struct Tensors<'m> {
    q: Resident<'m>,
    q_out: Option<Resident<'m>>,
    key: Resident<'m>,
    value: Resident<'m>,
    caches: [Resident<'m>; 2],
    slots: Resident<'m>,
    scales: Resident<'m>,
    weights: Option<[Resident<'m>; 2]>,
    positions: Resident<'m>,
    table: Option<Resident<'m>>,
    o: Resident<'m>,
    lse: Resident<'m>,
    block_table: Resident<'m>,
    kv_len: Resident<'m>,
    qo_indptr: Resident<'m>,
}

fn batch(tensors: &Tensors<'_>) -> BatchInput {
    BatchInput {
        qo_indptr: Some(tensors.qo_indptr.tensor()),
        qo_len: 0,
        kv_indptr: None,
        kv_indices: None,
        last_page_len: None,
        kv_len: Some(tensors.kv_len.tensor()),
        block_table: Some(tensors.block_table.tensor()),
        window_left: None,
    }
}

impl AppendRun {
    fn num_tokens(&self) -> i64 {
        self.requests.iter().map(|request| request.0).sum()
    }

    fn pages_of(&self, request: usize) -> i64 {
        (self.requests[request].1 + self.page_size - 1) / self.page_size
    }

    fn columns(&self) -> i64 {
        let pages = (0..self.requests.len()).map(|request| self.pages_of(request));
        pages.max().unwrap_or(0).max(1)
    }

    fn num_pages(&self) -> i64 {
        let pages = self.columns() as usize * self.requests.len();
        pages.next_power_of_two() as i64
    }

    /// No page is in two places: an odd number permutes the numbers below a power of two.
    fn page(&self, request: usize, column: i64) -> i64 {
        let index = request as u64 * self.columns() as u64 + column as u64;
        (index.wrapping_mul(self.seed | 1) % self.num_pages() as u64) as i64
    }

    /// Of each new token: its request, and its key's number there.
    fn tokens(&self) -> Vec<(usize, i64)> {
        let of = |(request, &(new, keys)): (usize, &(i64, i64))| {
            (keys - new..keys).map(move |key| (request, key))
        };
        self.requests.iter().enumerate().flat_map(of).collect()
    }

    fn slots(&self) -> Vec<i64> {
        let slot = |(token, (request, key)): (u64, (usize, i64))| {
            if self.uncached > 0 && token % self.uncached == self.uncached - 1 {
                return -1;
            }
            self.page(request, key / self.page_size) * self.page_size + key % self.page_size
        };
        (0..).zip(self.tokens()).map(slot).collect()
    }

    fn cache_index(&self, page: i64, at: i64, head: i64, d: i64) -> [i64; 4] {
        match self.layout {
            KvLayout::Nhd => [page, at, head, d],
            KvLayout::Hnd => [page, head, at, d],
        }
    }

    /// Keys before the new ones; where those will be, what would make every result NaN, unless they are not cached.
    fn cache(&self, of: u64) -> Image {
        let (pages, page) = (self.num_pages(), self.page_size);
        let shape = match self.layout {
            KvLayout::Nhd => [pages, page, self.kv_heads, self.dim],
            KvLayout::Hnd => [pages, self.kv_heads, page, self.dim],
        };
        let mut image = Image::poisoned(View::compact(self.cache, &shape));
        let mut put = |request: usize, key: i64| {
            let page = self.page(request, key / self.page_size);
            for head in 0..self.kv_heads {
                for d in 0..self.dim {
                    let at = self.cache_index(page, key % self.page_size, head, d);
                    let hash = at.iter().fold(of, |hash, &i| mix(hash ^ i as u64));
                    image.put(&at, encode(self.cache, normal(hash ^ self.seed)));
                }
            }
        };
        for (request, &(new, keys)) in self.requests.iter().enumerate() {
            (0..keys - new).for_each(|key| put(request, key));
        }
        for ((request, key), slot) in self.tokens().into_iter().zip(self.slots()) {
            if slot < 0 {
                put(request, key);
            }
        }
        image
    }

    fn rows(&self, of: u64, heads: i64) -> Image {
        let shape = [self.num_tokens(), heads, self.dim];
        let mut image = Image::poisoned(View::gapped(self.dtype, &shape, &[16, 0, 0], 8));
        for_each_index(&shape, |at| {
            let hash = at.iter().fold(of, |hash, &i| mix(hash ^ i as u64));
            image.put(at, encode(self.dtype, normal(hash ^ self.seed)));
        });
        image
    }

    fn weights(&self, of: u64, is_f32: bool) -> Image {
        let dtype = if is_f32 { DType::F32 } else { self.dtype };
        let weight = |d: i64| encode(dtype, 0.5 + uniform(mix(self.seed ^ of ^ d as u64)));
        Image::of_bits(dtype, &[self.dim], (0..self.dim).map(weight))
    }

    fn table(&self) -> Option<Image> {
        let Angle::Table { is_f32 } = self.angle else {
            return None;
        };
        let dtype = if is_f32 { DType::F32 } else { self.dtype };
        let shape = [MAX_POSITION, self.rotary_dim];
        let entry = |at: i64| {
            let (position, d) = (at / self.rotary_dim, at % self.rotary_dim);
            let pairs = self.rotary_dim / 2;
            let angle = position as f64 * 1e4f64.powf(-((d % pairs) as f64) / pairs as f64);
            encode(dtype, if d < pairs { angle.cos() } else { angle.sin() })
        };
        Some(Image::of_bits(
            dtype,
            &shape,
            (0..shape[0] * shape[1]).map(entry),
        ))
    }

    fn tensors<'m>(&self, memory: &'m dyn Memory) -> Tensors<'m> {
        let resident = |image| Resident::new(memory, image);
        let integers = |values: Vec<i64>, shape: &[i64]| {
            let bits = values.into_iter().map(|value| value as u64);
            resident(Image::of_bits(DType::I32, shape, bits))
        };
        let (tokens, q_heads) = (self.num_tokens(), self.group * self.kv_heads);
        let rows = [tokens, q_heads, self.dim];
        let batch = self.requests.len() as i64;
        let pages = (0..self.requests.len())
            .flat_map(|request| (0..self.columns()).map(move |column| self.page(request, column)));
        let starts = self.requests.iter().scan(0, |start, request| {
            *start += request.0;
            Some(*start)
        });
        let length = |values: Vec<i64>| {
            let values: Vec<i32> = values.into_iter().map(|value| value as i32).collect();
            // Those of a graph are on the device.
            let memory = if self.graph { memory } else { &HostMemory };
            Resident::new(memory, Image::of_i32(&[values.len() as i64], &values))
        };
        let positions = self.tokens().into_iter().map(|(_, key)| key % MAX_POSITION);
        let scales: Vec<f32> = (0..self.kv_heads)
            .map(|head| 0.25 + head as f32 / 8.0)
            .collect();
        Tensors {
            q: resident(self.rows(1, q_heads)),
            q_out: (!self.in_place)
                .then(|| resident(Image::poisoned(View::compact(self.dtype, &rows)))),
            key: resident(self.rows(2, self.kv_heads)),
            value: resident(self.rows(3, self.kv_heads)),
            caches: [4, 5].map(|of| resident(self.cache(of))),
            slots: integers(self.slots(), &[tokens]),
            scales: resident(Image::of_f32(&[self.kv_heads], &scales)),
            weights: self
                .norm
                .map(|is_f32| [6, 7].map(|of| resident(self.weights(of, is_f32)))),
            positions: integers(positions.collect(), &[tokens]),
            table: self.table().map(resident),
            o: resident(Image::poisoned(View::compact(self.dtype, &rows))),
            lse: resident(Image::poisoned(View::compact(DType::F32, &rows[..2]))),
            block_table: integers(pages.collect(), &[batch, self.columns()]),
            kv_len: length(self.requests.iter().map(|request| request.1).collect()),
            qo_indptr: length(std::iter::once(0).chain(starts).collect()),
        }
    }

    fn scales(&self, tensors: &Tensors<'_>) -> Option<folio::tensor::Tensor> {
        self.cache.is_fp8().then(|| tensors.scales.tensor())
    }

    fn append_args(&self, tensors: &Tensors<'_>) -> RopeAppendArgs {
        let weight = |of: usize| tensors.weights.as_ref().map(|weights| weights[of].tensor());
        RopeAppendArgs {
            append: AppendArgs {
                key: tensors.key.tensor(),
                value: tensors.value.tensor(),
                k_cache: tensors.caches[0].tensor(),
                v_cache: tensors.caches[1].tensor(),
                layout: self.layout,
                kv_dtype: None,
                form: CacheForm::Plain,
                k_zero_points: None,
                v_zero_points: None,
                slot_mapping: tensors.slots.tensor(),
                k_scale: 0.0,
                v_scale: 0.0,
                k_scales: self.scales(tensors),
                v_scales: self.scales(tensors),
            },
            key_out: None,
            q: Some(tensors.q.tensor()),
            q_out: tensors.q_out.as_ref().map(Resident::tensor),
            norm: Norm {
                q_weight: weight(0),
                k_weight: weight(1),
                eps: if self.norm.is_some() { 1e-6 } else { 0.0 },
            },
            rope: (self.angle != Angle::None).then(|| Rope {
                positions: tensors.positions.tensor(),
                position_offsets: None,
                angles: match &tensors.table {
                    Some(table) => Angles::Table(table.tensor()),
                    None => Angles::Computed(Frequencies {
                        theta: 1e4,
                        scale: 0.0,
                        llama3: None,
                    }),
                },
                rotary_dim: self.rotary_dim as u32,
                is_interleaved: self.is_interleaved,
            }),
        }
    }

    fn run_args(&self, tensors: &Tensors<'_>) -> AttentionArgs {
        let q = tensors.q_out.as_ref().unwrap_or(&tensors.q);
        let [k, v] = [0, 1].map(|of: usize| tensors.caches[of].tensor());
        let mut args = AttentionArgs::new(q.tensor(), k, v, tensors.o.tensor());
        args.lse = Some(tensors.lse.tensor());
        args.sm_scale = 1.0 / (self.dim as f32).sqrt();
        args.k_scales = self.scales(tensors);
        args.v_scales = self.scales(tensors);
        args.window.left = self.window_left;
        args
    }

    pub fn desc(&self) -> AttentionDesc {
        AttentionDesc {
            kind: Kind::Decode,
            q_dtype: self.dtype,
            kv_format: self.cache.into(),
            o_dtype: self.dtype,
            num_qo_heads: (self.group * self.kv_heads) as u32,
            num_kv_heads: self.kv_heads as u32,
            head_dim_qk: self.dim as u32,
            head_dim_vo: self.dim as u32,
            kv: KvStorage::Paged {
                page_size: self.page_size as u32,
                layout: self.layout,
            },
            max_batch_size: self.requests.len() as u32,
            max_qo_len: self.requests.iter().map(|r| r.0).max().unwrap_or(1).max(1) as u32,
            max_num_tokens: 0,
            max_kv_len: self.requests.iter().map(|r| r.1).max().unwrap_or(1).max(1) as u32,
            max_num_pages: 0,
            graph: self.graph,
            batch_invariant: false,
            fp8_products: false,
            mask_items: false,
            shared_levels: 0,
            new_kv: None,
        }
    }

    /// Takes a step by one call, or by two.
    pub fn take(&self, session: &dyn Session, memory: &dyn Memory, one_call: bool) -> Result<Left> {
        self.take_with(session, memory, |handle, append, args| match one_call {
            true => handle.append_run(append, args, Stream::default()),
            false => {
                session.rope_append(append, Stream::default())?;
                handle.run(args, Stream::default())
            }
        })
    }

    /// Takes a step by the calls that `enqueue` makes.
    pub fn take_with(
        &self,
        session: &dyn Session,
        memory: &dyn Memory,
        enqueue: impl FnOnce(&dyn Handle, &RopeAppendArgs, &AttentionArgs) -> Result<()>,
    ) -> Result<Left> {
        let tensors = self.tensors(memory);
        let mut handle = session.attention(self.desc())?;
        let scratch = Scratch::new(memory, &handle.workspace()?);
        scratch.plan(handle.as_mut(), &batch(&tensors))?;
        let (append, args) = (self.append_args(&tensors), self.run_args(&tensors));
        enqueue(handle.as_ref(), &append, &args)?;
        Ok(Left {
            k_cache: tensors.caches[0].current(),
            v_cache: tensors.caches[1].current(),
            q: tensors.q_out.as_ref().unwrap_or(&tensors.q).current(),
            o: tensors.o.current(),
            lse: tensors.lse.current(),
        })
    }

    /// Lays a step out in memory, for whoever makes the calls.
    pub fn laid_out<T>(
        &self,
        memory: &dyn Memory,
        of: impl FnOnce(&BatchInput, &RopeAppendArgs, &AttentionArgs) -> T,
    ) -> T {
        let tensors = self.tensors(memory);
        of(
            &batch(&tensors),
            &self.append_args(&tensors),
            &self.run_args(&tensors),
        )
    }

    /// Whether one call has left what two have: queries and keys up to a step of their type, since a norm may add in another
    /// order, values to the bit, and outputs as near as such keys allow.
    pub fn compare(&self, one: &Left, two: &Left) -> std::result::Result<(), String> {
        let step = |dtype: DType| match dtype {
            DType::F32 => 1e-6,
            DType::F16 => 1.0 / 1024.0,
            DType::BF16 => 1.0 / 128.0,
            DType::F8E4M3 => 1.0 / 8.0,
            _ => 1.0 / 4.0,
        };
        near("q", &one.q, &two.q, step(self.dtype))?;
        near("k_cache", &one.k_cache, &two.k_cache, step(self.cache))?;
        if one.v_cache != two.v_cache {
            return Err("v_cache differs".into());
        }
        let of_o = 4.0 * step(self.dtype).max(1e-5);
        near("o", &one.o, &two.o, of_o)?;
        near("lse", &one.lse, &two.lse, of_o)
    }
}

impl AppendRun {
    /// One request of so many keys; heads are as many for queries as for keys, so that their tensors have one shape.
    pub fn of_one_token(dtype: DType, keys: i64) -> AppendRun {
        AppendRun {
            dtype,
            cache: dtype,
            group: 1,
            kv_heads: 2,
            dim: 64,
            page_size: 16,
            layout: KvLayout::Nhd,
            requests: vec![(1, keys)],
            angle: Angle::Computed,
            rotary_dim: 64,
            is_interleaved: false,
            norm: None,
            in_place: false,
            graph: false,
            uncached: 0,
            window_left: None,
            seed: 1,
        }
    }
}

/// Steps of every form, on at most so many keys.
pub fn append_runs(longest: i64) -> impl Strategy<Value = AppendRun> {
    let float = select(vec![DType::BF16, DType::F16, DType::F32]);
    let cache = select(vec![None, None, Some(DType::F8E4M3), Some(DType::F8E5M2)]);
    let heads = (
        select(vec![1i64, 2, 3, 4, 8, 12, 16]),
        select(vec![1i64, 2, 4]),
    );
    let dims = select(vec![
        (64i64, 64i64),
        (64, 32),
        (128, 128),
        (128, 64),
        (128, 96),
        (256, 256),
        (80, 80),
        (96, 48),
    ]);
    let page = select(vec![16i64, 8, 64, 24, 1, 3]);
    let lengths = move || prop_oneof![3 => 0i64..40, 2 => 0i64..200, 1 => 0..longest];
    let new = prop_oneof![3 => Just(1i64), 1 => 0i64..6];
    let request = (new, lengths()).prop_map(|(new, before)| (new, new + before));
    let requests = prop::collection::vec(request, 1..6);
    let angle = select(vec![
        Angle::None,
        Angle::Computed,
        Angle::Table { is_f32: true },
        Angle::Table { is_f32: false },
    ]);
    let window = prop_oneof![3 => Just(None), 1 => (0u32..300).prop_map(Some)];
    let rest = (
        any::<[bool; 3]>(),
        any::<Option<bool>>(),
        select(vec![0u64, 0, 2, 3]),
        any::<bool>(),
    );
    (
        (float, cache),
        (heads, dims, page),
        requests,
        angle,
        window,
        rest,
        any::<u64>(),
    )
        .prop_map(
            |(
                (dtype, cache),
                ((group, kv_heads), (dim, rotary_dim), page_size),
                requests,
                angle,
                window_left,
                rest,
                seed,
            )| {
                let ([is_interleaved, in_place, is_hnd], norm, uncached, graph) = rest;
                AppendRun {
                    dtype,
                    cache: cache.unwrap_or(dtype),
                    group,
                    kv_heads,
                    dim,
                    page_size,
                    layout: if is_hnd { KvLayout::Hnd } else { KvLayout::Nhd },
                    requests,
                    angle,
                    rotary_dim,
                    is_interleaved,
                    norm,
                    in_place,
                    graph,
                    uncached,
                    window_left,
                    seed,
                }
            },
        )
}

/// Up to `step` of the larger one of a number and 1/16; bytes that are no number are the same.
fn near(name: &str, one: &Image, two: &Image, step: f64) -> std::result::Result<(), String> {
    let (dtype, size) = (one.view.dtype, one.view.dtype.size());
    let numbers = |image: &Image| -> Vec<u64> {
        let bits = |bytes: &[u8]| {
            bytes
                .iter()
                .rev()
                .fold(0, |bits, &byte| bits << 8 | u64::from(byte))
        };
        image.bytes.chunks(size).map(bits).collect()
    };
    for (at, (a, b)) in numbers(one).into_iter().zip(numbers(two)).enumerate() {
        let (x, y) = (decode(dtype, a), decode(dtype, b));
        let is_near = (x - y).abs() <= step * x.abs().max(y.abs()).max(1.0 / 16.0);
        if a != b && !is_near {
            return Err(format!(
                "{name}: element {at} is {x} by one call and {y} by two"
            ));
        }
    }
    Ok(())
}
