//! Appends with norm and RoPE to caches of other forms than rows of plain elements. Queries and `key_out` are held against the
//! formulas. Every byte of the caches is that of two steps: the keys are computed in float32, and float32 keys and values
//! are appended; or in the type of the cache, where that is the tokens'. For the second step `formats` has an encoder of its
//! own.

use super::codec::encode;
use super::door::Session;
use super::formats::{Case, cases};
use super::instance::for_each_index;
use super::memory::{Image, Memory, Resident, View};
use super::rope_append::{RopeAppend, Rotation, Source};
use folio::api::Stream;
use folio::dtype::DType;
use folio::problem::{AppendArgs, Frequencies};
use proptest::prelude::*;

/// One call.
#[derive(Debug, Clone)]
pub struct InForm {
    cache: Case,
    rope: RopeAppend,
}

pub fn appends_in_forms() -> impl Strategy<Value = InForm> {
    let frequencies = Frequencies {
        theta: 1e4,
        scale: 2.0,
        llama3: None,
    };
    let sources = prop_oneof![
        2 => any::<[bool; 2]>().prop_map(|[is_f32, planes]| Source::Table { is_f32, planes }),
        1 => Just(Source::Computed(frequencies)),
    ];
    let queries = prop::option::of((0i64..5, 0i64..3, any::<bool>()));
    let rotation = (
        prop_oneof![4 => sources.prop_map(Some), 1 => Just(None)],
        any::<[bool; 3]>(),
        0usize..4,
    );
    let gaps = prop_oneof![3 => Just([0u32; 3]), 1 => [0u32..9, 0u32..9, 0u32..9]];
    (
        cases(),
        queries,
        rotation,
        any::<([Option<bool>; 2], Option<bool>)>(),
        gaps,
    )
        .prop_map(
            |(cache, queries, (source, flags, part), (norms, key_out), gaps)| {
                let dim = cache.dims[0];
                let rotary_dim = [dim, dim / 4 * 2, dim.min(16), 2][part];
                let rope = RopeAppend {
                    source: cache.source,
                    cache: cache.source,
                    as_bytes: false,
                    queries,
                    heads: cache.heads,
                    dim,
                    dim_vo: cache.dims[1],
                    page_size: cache.page_size,
                    num_pages: cache.num_pages,
                    layout: cache.layout,
                    num_tokens: cache.num_tokens,
                    padded_rows: 1,
                    wide_slots: flags[0],
                    scale: 0.0,
                    scales: None,
                    norms: [norms[0].filter(|_| queries.is_some()), norms[1]],
                    rotation: source.map(|source| Rotation {
                        source,
                        rotary_dim,
                        is_interleaved: flags[1],
                        with_offsets: flags[2],
                        wide_positions: flags[0],
                    }),
                    key_out,
                    gaps,
                    seed: cache.seed,
                };
                InForm { cache, rope }
            },
        )
}

impl InForm {
    pub fn check(&self, session: &dyn Session, memory: &dyn Memory) -> Result<(), String> {
        let failed = |error: folio::error::Error| error.to_string();
        let element = self.cache.element();
        let in_form = |caches: &super::formats::Caches<'_>, plain: AppendArgs| {
            caches.append(&self.cache, [plain.key, plain.value], plain.slot_mapping)
        };
        let got = self.cache.caches(memory);
        let written =
            self.rope
                .run_into(session, memory, |image| image, |plain| in_form(&got, plain));
        self.rope.check_rows(&written.map_err(failed)?)?;

        // The same numbers in float32, so that `key_out` is what the cache gets. Where the cache has the type of the tokens,
        // it gets what `key_out` has as it is.
        let is_as_it_is = element == self.cache.source;
        let hold = |image| match is_as_it_is {
            true => image,
            false => in_f32(image),
        };
        let wide = self.cache.caches(memory);
        let rope = RopeAppend {
            key_out: Some(false),
            ..self.rope.clone()
        };
        let written = rope.run_into(session, memory, hold, |plain| in_form(&wide, plain));
        got.same_as(&wide, element)
            .map_err(|wrong| format!("fused, against fp32: {wrong}"))?;

        let resident = |image| Resident::new(memory, image);
        let key = written.map_err(failed)?.key_out.expect("key_out");
        let key = resident(key);
        let value = resident(hold(rope.new_values()));
        let slots = resident(rope.slot_mapping());
        let apart = self.cache.caches(memory);
        let rows = [key.tensor(), value.tensor()];
        let append = apart.append(&self.cache, rows, slots.tensor());
        session.append(&append, Stream::default()).map_err(failed)?;
        got.same_as(&apart, element)
            .map_err(|wrong| format!("fused, against two steps: {wrong}"))
    }
}

/// The same numbers in float32, without gaps.
fn in_f32(image: Image) -> Image {
    let shape = image.view.shape.clone();
    let mut wide = Image::poisoned(View::compact(DType::F32, &shape));
    for_each_index(&shape, |at| {
        wide.put(at, encode(DType::F32, image.value(at)))
    });
    wide
}
