//! The two forms of MLA by Folio's own operators, for the same weights: absorbed, over latent records in a cache, and with
//! keys and values of every head.

use super::codec::{encode, unit_roundoff};
use super::door::Session;
use super::instance::{Planned, for_each_index};
use super::memory::{HostMemory, Image, Memory, Resident, View};
use super::mla::{MlaProblem, SM_SCALE};
use super::pages::PageTable;
use super::problem::{Problem, Storage, TableForm};
use super::values::{mix, normal};
use folio::api::Stream;
use folio::dtype::DType;
use folio::error::Result;
use folio::problem::{
    AbsorbQArgs, AbsorbWeightsArgs, AttentionArgs, LatentCache, MlaAppendArgs, ProjectOArgs,
    UpProjectArgs,
};

/// Widths of DeepSeek's heads.
const NOPE: i64 = 128;
const ROPE: i64 = 64;
const VALUE: i64 = 128;
const RANK: i64 = 512;

const PAGE_SIZE: i64 = 16;

/// A batch that both forms compute.
#[derive(Debug, Clone)]
pub struct Forms {
    pub dtype: DType,
    pub heads: u32,
    /// Query rows and keys of each request.
    pub lens: Vec<(u32, u32)>,
}

/// What a model gives, and the two weights made of its one.
struct Inputs<'m> {
    memory: &'m dyn Memory,
    /// `[tokens, H, 128 + 64]`
    q: Resident<'m>,
    /// `[keys, 512]` and `[keys, 64]`: the requests' one after the other.
    latent: Resident<'m>,
    k_rope: Resident<'m>,
    w_uk: Resident<'m>,
    w_uv: Resident<'m>,
}

impl Forms {
    /// Both forms come to the same, up to their roundings.
    pub fn check(
        &self,
        session: &dyn Session,
        memory: &dyn Memory,
    ) -> std::result::Result<(), String> {
        let outputs = || {
            let inputs = self.inputs(session, memory)?;
            Ok((
                self.absorbed(session, &inputs)?,
                self.of_heads(session, &inputs)?,
            ))
        };
        let (absorbed, of_heads) =
            outputs().map_err(|error: folio::error::Error| error.to_string())?;
        self.compare(&absorbed, &of_heads)
    }

    fn num_keys(&self) -> i64 {
        self.lens.iter().map(|r| i64::from(r.1)).sum()
    }

    fn num_tokens(&self) -> i64 {
        self.lens.iter().map(|r| i64::from(r.0)).sum()
    }

    /// Normal numbers, and weights of one column that make such numbers of them.
    fn inputs<'m>(&self, session: &dyn Session, memory: &'m dyn Memory) -> Result<Inputs<'m>> {
        let heads = i64::from(self.heads);
        let filled = |seed: u64, shape: &[i64], spread: f64| {
            let mut image = Image::poisoned(View::compact(self.dtype, shape));
            for_each_index(shape, |at| {
                let hash = at.iter().fold(mix(seed), |hash, &i| mix(hash ^ i as u64));
                image.put(at, encode(self.dtype, spread * normal(hash)));
            });
            Resident::new(memory, image)
        };
        let (tokens, keys) = (self.num_tokens(), self.num_keys());
        let spread = (RANK as f64).powf(-0.5);
        let kv_b_proj = filled(1, &[heads * (NOPE + VALUE), RANK], spread);
        let inputs = Inputs {
            memory,
            q: filled(2, &[tokens, heads, NOPE + ROPE], 1.0),
            latent: filled(3, &[keys, RANK], 1.0),
            k_rope: filled(4, &[keys, ROPE], 1.0),
            w_uk: self.blank(memory, &[heads, NOPE, RANK]),
            w_uv: self.blank(memory, &[heads, RANK, VALUE]),
        };
        let args = AbsorbWeightsArgs {
            kv_b_proj: kv_b_proj.tensor(),
            w_uk: Some(inputs.w_uk.tensor()),
            w_uv: Some(inputs.w_uv.tensor()),
        };
        session.absorb_weights(&args, Stream::default())?;
        Ok(inputs)
    }

    fn blank<'m>(&self, memory: &'m dyn Memory, shape: &[i64]) -> Resident<'m> {
        Resident::new(memory, Image::poisoned(View::compact(self.dtype, shape)))
    }

    /// `o_latent · W_UV` of attention over records: all heads have the same keys.
    fn absorbed(&self, session: &dyn Session, inputs: &Inputs<'_>) -> Result<Image> {
        let (stream, memory) = (Stream::default(), inputs.memory);
        let (tokens, heads) = (self.num_tokens(), i64::from(self.heads));
        let form = TableForm::BlockTable { spare_columns: 1 };
        let problem = MlaProblem::plain(&self.lens).of(self.dtype);
        let problem = problem.heads(self.heads).pages(PAGE_SIZE as u32, form);
        let cache = self.append(session, inputs, &problem)?;
        let q_latent = self.blank(memory, &[tokens, heads, RANK]);
        let absorb = AbsorbQArgs {
            q_nope: inputs.q.tensor().narrow(2, 0, NOPE),
            w_uk: inputs.w_uk.tensor(),
            q_latent: q_latent.tensor(),
        };
        session.absorb_q(&absorb, stream)?;
        let o_latent = self.blank(memory, &[tokens, heads, RANK]);
        let handle = session.attention(problem.desc())?;
        let planned = Planned::new(handle, memory, &HostMemory, &problem.batch)?;
        planned.run_args(&AttentionArgs {
            sm_scale: SM_SCALE,
            ..AttentionArgs::mla(
                q_latent.tensor(),
                Some(inputs.q.tensor().narrow(2, NOPE, ROPE)),
                cache.tensor(),
                None,
                o_latent.tensor(),
            )
        })?;
        let out = self.blank(memory, &[tokens, heads, VALUE]);
        let project = ProjectOArgs {
            o_latent: o_latent.tensor(),
            w_uv: inputs.w_uv.tensor(),
            out: out.tensor(),
        };
        session.project_o(&project, stream)?;
        Ok(out.current())
    }

    /// The cache of a problem, to which every key was appended.
    fn append<'m>(
        &self,
        session: &dyn Session,
        inputs: &Inputs<'m>,
        problem: &MlaProblem,
    ) -> Result<Resident<'m>> {
        let table = PageTable::of(&problem.batch);
        let mut slots = Vec::new();
        for (ids, request) in table.ids.iter().zip(&self.lens) {
            let slot =
                |j: i64| ids[(j / PAGE_SIZE) as usize] * PAGE_SIZE as i32 + (j % PAGE_SIZE) as i32;
            slots.extend((0..i64::from(request.1)).map(slot));
        }
        let slots = Image::of_i32(&[slots.len() as i64], &slots);
        let slots = Resident::new(inputs.memory, slots);
        let shape = [table.num_pages as i64, PAGE_SIZE, RANK + ROPE];
        let cache = self.blank(inputs.memory, &shape);
        let args = MlaAppendArgs {
            latent: inputs.latent.tensor(),
            rope: Some(inputs.k_rope.tensor()),
            cache: LatentCache {
                kv: cache.tensor(),
                kv_rope: None,
                kv_dtype: None,
                is_ds_mla: false,
            },
            slot_mapping: slots.tensor(),
            k_scale: 0.0,
            rotary: None,
        };
        session.mla_append(&args, Stream::default())?;
        Ok(cache)
    }

    /// Attention over keys in two parts, the second of which all heads share, and values of every head.
    fn of_heads(&self, session: &dyn Session, inputs: &Inputs<'_>) -> Result<Image> {
        let memory = inputs.memory;
        let (keys, heads) = (self.num_keys(), i64::from(self.heads));
        let k_nope = self.blank(memory, &[keys, heads, NOPE]);
        let v = self.blank(memory, &[keys, heads, VALUE]);
        let unpack = UpProjectArgs {
            kv_c: inputs.latent.tensor(),
            w_uk: Some(inputs.w_uk.tensor()),
            w_uv: Some(inputs.w_uv.tensor()),
            k_nope: Some(k_nope.tensor()),
            v: Some(v.tensor()),
        };
        session.up_project(&unpack, Stream::default())?;
        let width = (NOPE + ROPE) as u32;
        let problem = Problem {
            storage: Storage::Ragged,
            head_dim_vo: VALUE as u32,
            ..Problem::plain(&self.lens)
                .of(self.dtype)
                .heads(self.heads, self.heads, width)
        };
        let problem = problem.split(ROPE as u32);
        let out = self.blank(memory, &[self.num_tokens(), heads, VALUE]);
        let handle = session.attention(problem.desc())?;
        let planned = Planned::new(handle, memory, &HostMemory, &problem)?;
        planned.run_args(&AttentionArgs {
            k_rope: Some(inputs.k_rope.tensor()),
            sm_scale: SM_SCALE,
            ..AttentionArgs::new(inputs.q.tensor(), k_nope.tensor(), v.tensor(), out.tensor())
        })?;
        Ok(out.current())
    }

    /// Between weights and output one form rounds q_latent, the weights of the softmax, o_latent and the output; the other
    /// keys, weights, values and the output. As parts of a row's length these are eight errors of at most a unit roundoff,
    /// each of many numbers that are rounded on their own: together they have the length of their root mean square sum.
    fn most_error(&self) -> f64 {
        match self.dtype {
            // What float32 sums and exponentials may be off (`compare`) is more than these.
            DType::F32 => 1e-5,
            dtype => 8f64.sqrt() * unit_roundoff(dtype),
        }
    }

    fn compare(&self, absorbed: &Image, of_heads: &Image) -> std::result::Result<(), String> {
        let most = self.most_error();
        for token in 0..self.num_tokens() {
            for head in 0..i64::from(self.heads) {
                let (mut error, mut size) = (0.0, 0.0);
                for d in 0..VALUE {
                    let [one, other] = [absorbed, of_heads].map(|o| o.value(&[token, head, d]));
                    error += (one - other) * (one - other);
                    size += other * other;
                }
                let off = (error / size).sqrt();
                // NaN is not close to anything.
                let is_close = off <= most;
                if !is_close {
                    return Err(format!(
                        "row {token} of head {head}: the forms are {off:e} of its length apart, not within {most:e}"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Single rows, which decode, and prompts; keys of one request in part of a page, and in many pages.
pub fn forms_agree(session: &dyn Session, memory: &dyn Memory, heads: u32, dtypes: &[DType]) {
    for &dtype in dtypes {
        for lens in [&[(1, 200), (1, 3), (1, 75)][..], &[(40, 200), (40, 40)]] {
            let forms = Forms {
                dtype,
                heads,
                lens: lens.to_vec(),
            };
            assert_eq!(forms.check(session, memory), Ok(()), "{forms:?}");
        }
    }
}
