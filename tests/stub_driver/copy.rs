//! What copies of pages are launched with.

use folio::api::copy;
use folio::cuda::copy_params::{KvCopyList, KvCopyParams};
use folio::dtype::DType;
use folio::error::Error;
use folio::problem::{CopyArgs, PagesToCopy};
use folio::tensor::{Device, Tensor};

use crate::fixture::{CAPTURED, OURS, at, context, divides};
use crate::stub::{Launched, Recorder};

const K: usize = 0x1_0000_0000;
const K_OUT: usize = 0x2_0000_0000;
const V: usize = 0x3_0000_0000;
const V_OUT: usize = 0x4_0000_0000;
const PAIRS: usize = 0x5_0000_0000;

/// Page-locked memory of the stub.
const PINNED: usize = 1 << 45;

/// Pages of 16 tokens of 8 heads, side by side with those of another layer.
fn pages(address: usize, count: i64, dim: i64) -> Tensor {
    let strides = [2 * 16 * 8 * dim, 8 * dim, dim, 1];
    at(address, DType::BF16, &[count, 16, 8, dim], Some(&strides))
}

fn args(page_pairs: Tensor) -> CopyArgs {
    CopyArgs {
        k: PagesToCopy {
            src: pages(K, 40, 128),
            dst: pages(K_OUT, 30, 128),
        },
        v: Some(PagesToCopy {
            src: pages(V, 40, 72),
            dst: pages(V_OUT, 30, 72),
        }),
        page_pairs,
    }
}

/// Pairs on the host: every seventh is skipped.
fn numbers(count: usize) -> Vec<[i32; 2]> {
    let pair = |n: usize| [if n % 7 == 6 { -1 } else { n as i32 }, n as i32 + 1];
    (0..count).map(pair).collect()
}

fn on_host(numbers: &[[i32; 2]]) -> Tensor {
    let data = numbers.as_ptr().cast_mut().cast();
    let shape = [numbers.len() as i64, 2];
    // SAFETY: as many numbers as it says.
    unsafe { Tensor::new("test", data, Device::Cpu, DType::I32, &shape, None) }.unwrap()
}

fn assert_pages(launched: &Launched, name: &str, pairs: u32) {
    assert_eq!(launched.name(), name);
    // 32 pieces of 1 KiB for a page of k and 18 for one of v; a warp takes each.
    let blocks = (pairs * 50).div_ceil(4);
    assert_eq!(
        (launched.grid, launched.block),
        ([blocks, 1, 1], [128, 1, 1])
    );
}

fn assert_params(p: &KvCopyParams, pairs: u32, unit: u32) {
    assert_eq!((p.k.src, p.k.dst), (K as u64, K_OUT as u64));
    assert_eq!((p.v.src, p.v.dst), (V as u64, V_OUT as u64));
    assert_eq!([p.k.src_stride, p.k.dst_stride], [65536; 2]);
    assert_eq!([p.v.src_stride, p.v.dst_stride], [36864; 2]);
    assert_eq!([p.k.page_bytes, p.v.page_bytes], [32768, 18432]);
    assert_eq!((p.k.pieces, p.v.pieces), (32, 18));
    assert_eq!((p.num_pieces, divides(120, p.pair_pieces)), (50 * pairs, 2));
    assert_eq!((p.src_pages, p.dst_pages), (40, 30));
    assert_eq!(p.unit_bytes, unit);
}

pub fn by_a_tensor() {
    let recorder = Recorder::new();
    recorder.expect::<KvCopyParams>("folio_kv_copy");
    let context = context();
    let refused = copy(
        &context,
        &args(at(PAIRS, DType::I32, &[9, 2], None)),
        CAPTURED,
    );
    assert!(matches!(&refused, Err(Error::Capture(_))), "{refused:?}");
    for (dtype, pair_bytes) in [(DType::I32, 8), (DType::I64, 16)] {
        recorder.forget();
        copy(&context, &args(at(PAIRS, dtype, &[9, 2], None)), OURS).unwrap();
        let launched = recorder.launches();
        assert_eq!(launched.len(), 1);
        assert_pages(&launched[0], "folio_kv_copy", 9);
        let p: KvCopyParams = launched[0].params();
        assert_params(&p, 9, 16);
        assert_eq!((p.pairs, p.pair_bytes), (PAIRS as u64, pair_bytes));
    }
    // One tensor of bytes, at an address that only pairs of bytes are aligned to.
    recorder.forget();
    let bytes = |address| at(address, DType::U8, &[40, 64, 656], None);
    let skew = CopyArgs {
        k: PagesToCopy {
            src: bytes(K + 2),
            dst: bytes(K_OUT),
        },
        v: None,
        page_pairs: at(PAIRS, DType::I32, &[1, 2], None),
    };
    copy(&context, &skew, OURS).unwrap();
    let p: KvCopyParams = recorder.launches()[0].params();
    assert_eq!((p.k.pieces, p.v.pieces, p.unit_bytes), (328, 0, 2));
    // Nothing to copy.
    recorder.forget();
    copy(&context, &args(at(PAIRS, DType::I32, &[0, 2], None)), OURS).unwrap();
    assert!(recorder.launches().is_empty());
}

pub fn by_a_list() {
    let recorder = Recorder::new();
    recorder.expect::<KvCopyList>("folio_kv_copy_list");
    let context = context();
    let few = numbers(29);
    let refused = copy(&context, &args(on_host(&few)), CAPTURED);
    assert!(matches!(&refused, Err(Error::Capture(_))), "{refused:?}");
    recorder.forget();
    copy(&context, &args(on_host(&few)), OURS).unwrap();
    let launched = recorder.launches();
    assert_eq!(launched.len(), 1);
    assert_pages(&launched[0], "folio_kv_copy_list", 25);
    let list: KvCopyList = launched[0].params();
    assert_params(&list.copy, 25, 16);
    let kept: Vec<[i32; 2]> = few.into_iter().filter(|pair| pair[0] >= 0).collect();
    assert_eq!(list.pairs[..25], kept[..]);
    // Nothing is uploaded, and nobody waits.
    let calls = recorder.calls().join(" ");
    assert!(
        !calls.contains("Memcpy") && !calls.contains("Synchronize"),
        "{calls}"
    );
    // More than the parameters hold.
    recorder.forget();
    let many: Vec<[i32; 2]> = (0..1000).map(|n| [n % 40, n]).collect();
    let mut long = args(on_host(&many));
    long.k.dst = pages(K_OUT, 1000, 128);
    long.v = None;
    copy(&context, &long, OURS).unwrap();
    let lists = recorder.launches();
    let copied: Vec<[i32; 2]> = lists
        .iter()
        .flat_map(|launched| {
            let list: KvCopyList = launched.params();
            let count = list.copy.num_pieces as usize / 32;
            list.pairs[..count].to_vec()
        })
        .collect();
    assert_eq!((lists.len(), copied), (3, many));
    // A list that is skipped as a whole.
    recorder.forget();
    copy(&context, &args(on_host(&[[-1, 3], [2, -1]])), OURS).unwrap();
    assert!(recorder.launches().is_empty());
}

/// Host memory that the driver page-locked is read and written where the device has it; other host memory is refused.
pub fn swaps() {
    let recorder = Recorder::new();
    recorder.expect::<KvCopyList>("folio_kv_copy_list");
    let context = context();
    let host = |address: usize| {
        let shape = [30, 16, 8, 128];
        let data = address as *mut u8;
        // SAFETY: nobody looks into it.
        let tensor = unsafe { Tensor::new("test", data, Device::Cpu, DType::BF16, &shape, None) };
        tensor.unwrap()
    };
    let pairs = numbers(3);
    let swap = |dst: Tensor| {
        let mut args = args(on_host(&pairs));
        (args.k.dst, args.v) = (dst, None);
        copy(&context, &args, OURS)
    };
    swap(host(PINNED + 256).page_locked()).unwrap();
    let list: KvCopyList = recorder.launches()[0].params();
    assert_eq!(list.copy.k.dst, 2 * (PINNED as u64 + 256));
    assert_eq!(
        [list.copy.k.src_stride, list.copy.k.dst_stride],
        [65536, 32768]
    );
    recorder.forget();
    let address = 0x70_0000_0000;
    for (dst, words) in [
        (host(PINNED), ["k_dst", "FOLIO_DEVICE_CUDA_HOST"]),
        (host(address).page_locked(), ["k_dst", "0x7000000000"]),
    ] {
        let refused = swap(dst);
        let Err(Error::DeviceMismatch(message)) = &refused else {
            panic!("{refused:?}");
        };
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }
    assert!(recorder.launches().is_empty());
}
