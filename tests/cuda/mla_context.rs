//! MLA over a cached context on the device, against float64: chunks of every size, every form of records, whoever unpacks
//! them, and a captured run that follows its plans.

use crate::common::memory::HostMemory;
use crate::common::mla_context::{Case, Data, Handle, check};
use crate::gpu::{self, DeviceMemory};
use crate::problems::session;
use folio::api::Stream;
use folio::dtype::DType;
use folio::problem::{CacheFormat, LogBase};

/// DeepSeek's dimensions, with so many heads.
fn deepseek(lens: &[(u32, u32)], dtype: DType) -> Case {
    Case {
        heads: 2,
        rank: 512,
        nope: 128,
        rope: 64,
        value: 128,
        page_size: 64,
        ..Case::plain(lens).of(dtype)
    }
}

/// No, short and long contexts; prompts that fill tiles and single rows.
const MIXED: [(u32, u32); 6] = [(70, 210), (5, 0), (0, 33), (1, 260), (0, 0), (130, 20)];
/// At most 16 new tokens: the decode kernels' shape.
const SHORT: [(u32, u32); 4] = [(3, 170), (16, 0), (1, 129), (0, 20)];

#[track_caller]
fn assert_right(case: &Case) {
    let session = session();
    assert_eq!(check(&*session, &DeviceMemory, case), Ok(()), "{case:?}");
}

pub fn mla_context() {
    for dtype in [DType::BF16, DType::F16] {
        for lens in [&MIXED[..], &SHORT] {
            for (chunk_tokens, csr) in [(100, false), (256, true), (0, false)] {
                for in_steps in [false, true] {
                    assert_right(&Case {
                        chunk_tokens,
                        csr,
                        in_steps,
                        wide_indices: csr != in_steps,
                        lse: Some(if csr { LogBase::Two } else { LogBase::E }),
                        ..deepseek(lens, dtype)
                    });
                }
            }
        }
    }
    for cache in [
        DType::F8E4M3.into(),
        DType::F8E5M2.into(),
        CacheFormat::DS_MLA,
    ] {
        let is_scaled = cache != CacheFormat::DS_MLA;
        assert_right(&Case {
            k_scale: if is_scaled { 0.5 } else { 0.0 },
            chunk_tokens: 200,
            ..deepseek(&MIXED, DType::BF16).over(cache)
        });
    }
    // Dimensions that only the portable kernels have, and fp32, which the caller unpacks.
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for split_cache in [false, true] {
            assert_right(&Case {
                split_cache,
                in_steps: dtype == DType::F32,
                lse: None,
                ..Case::plain(&[(3, 70), (5, 0), (40, 129), (0, 9)]).of(dtype)
            });
        }
    }
}

/// Heads of whole models, over records of every form, whoever unpacks them.
pub fn mla_context_of_many_heads() {
    for (cache, in_steps) in [
        (DType::BF16.into(), false),
        (DType::F8E4M3.into(), true),
        (CacheFormat::DS_MLA, false),
    ] {
        for (heads, lens) in [
            (16, [(40, 660), (3, 40), (1, 90)]),
            (128, [(17, 183), (1, 64), (5, 0)]),
        ] {
            assert_right(&Case {
                heads,
                in_steps,
                up_project: in_steps,
                chunk_tokens: 256,
                ..deepseek(&lens, DType::BF16).over(cache)
            });
        }
    }
}

/// A captured run is planned again: more and fewer chunks, and none. Captured steps have the caller's products between them.
pub fn mla_context_graph() {
    let session = session();
    let stream = gpu::new_stream();
    for (dtype, cache, in_steps) in [
        (DType::BF16, DType::BF16.into(), false),
        (DType::F16, DType::F16.into(), true),
        (DType::BF16, DType::F8E4M3.into(), true),
        (DType::F16, DType::F8E4M3.into(), false),
        (DType::BF16, CacheFormat::DS_MLA, false),
        (DType::BF16, CacheFormat::DS_MLA, true),
    ] {
        let is_scaled = cache != CacheFormat::DS_MLA && cache.is_scaled();
        let case = Case {
            graph: true,
            in_steps,
            up_project: in_steps,
            k_scale: if is_scaled { 0.5 } else { 0.0 },
            chunk_tokens: 256,
            ..deepseek(&[(70, 400), (5, 40), (1, 500), (30, 130)], dtype).over(cache)
        };
        let mut data = Data::new(&DeviceMemory, &case);
        let mut handle = Handle::new(&*session, &DeviceMemory, case.desc()).unwrap();
        handle.plan(&data.batch(), stream).unwrap();
        // Kernels are loaded before the capture.
        data.run(&*session, &*handle.context, stream).unwrap();
        gpu::synchronize_all();
        assert_eq!(data.check(), Ok(()), "{case:?}");
        let graph = gpu::capture(stream, || {
            data.run(&*session, &*handle.context, stream).unwrap();
        });
        for contexts in [[400, 40, 500, 130], [0, 0, 0, 0], [257, 0, 300, 3]] {
            data.set_contexts(&contexts);
            data.reset_outputs();
            gpu::synchronize_all();
            handle.plan(&data.batch(), stream).unwrap();
            graph.launch(stream);
            gpu::synchronize_all();
            assert_eq!(data.check(), Ok(()), "{contexts:?} {case:?}");
        }
    }
}

/// Plans follow one another faster than the device computes, as the layers of a step do.
pub fn mla_context_in_flight() {
    let session = session();
    let stream = gpu::new_stream();
    let case = Case {
        chunk_tokens: 128,
        ..deepseek(&[(70, 250), (5, 40), (1, 350), (30, 130)], DType::BF16)
    };
    let mut handle = Handle::new(&*session, &DeviceMemory, case.desc()).unwrap();
    let mut layers: Vec<Data<'_>> = (0..5)
        .map(|seed| {
            Data::new(
                &DeviceMemory,
                &Case {
                    seed,
                    ..case.clone()
                },
            )
        })
        .collect();
    for (n, layer) in layers.iter_mut().enumerate() {
        layer.set_contexts(&[250 - n as u32, 40, 350 - 80 * n as u32, 0]);
    }
    gpu::synchronize_all();
    for layer in &layers {
        handle.plan(&layer.batch(), stream).unwrap();
        layer.run(&*session, &*handle.context, stream).unwrap();
    }
    gpu::synchronize_all();
    for layer in &layers {
        assert_eq!(layer.check(), Ok(()));
    }
    // Lengths stay on the host, whatever the device.
    let on_host = Data::new(&HostMemory, &case);
    let refused = handle.plan(&on_host.batch(), Stream::default());
    assert!(refused.is_err(), "page ids on the host");
}
