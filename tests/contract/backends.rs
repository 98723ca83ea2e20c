//! What the API layer promises over any backend.

use crate::stub::Stub;
use folio::api::{Attention as Handle, BatchInput, Stream, Workspace};
use folio::dtype::DType;
use folio::error::{Error, Result};
use folio::problem::*;
use folio::tensor::{Device, Tensor};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

const HEADS: i64 = 2;
const DIM: i64 = 8;

fn desc(kind: Kind, max_batch_size: u32) -> AttentionDesc {
    AttentionDesc {
        kind,
        q_dtype: DType::F32,
        kv_format: DType::F32.into(),
        o_dtype: DType::F32,
        num_qo_heads: HEADS as u32,
        num_kv_heads: HEADS as u32,
        head_dim_qk: DIM as u32,
        head_dim_vo: DIM as u32,
        kv: KvStorage::Paged {
            page_size: 4,
            layout: KvLayout::Nhd,
        },
        max_batch_size,
        max_qo_len: 3,
        max_num_tokens: 3 * max_batch_size,
        max_kv_len: 64,
        max_num_pages: 0,
        graph: false,
        batch_invariant: false,
        fp8_products: false,
        mask_items: false,
        shared_levels: 0,
        new_kv: None,
    }
}

/// Memory that nobody looks into.
fn tensor(device: Device, dtype: DType, shape: &[i64]) -> Tensor {
    // SAFETY: the stub reads nothing, and the API layer reads no tensor of a device.
    unsafe { Tensor::new("test", 4096 as *mut u8, device, dtype, shape, None) }.unwrap()
}

fn host(values: &[i32], shape: &[i64]) -> Tensor {
    let data = values.as_ptr() as *mut u8;
    // SAFETY: every caller keeps `values` until its plan has returned.
    unsafe { Tensor::new("test", data, Device::Cpu, DType::I32, shape, None) }.unwrap()
}

/// Arguments with so many rows and pages.
fn args(device: Device, rows: i64, pages: i64) -> AttentionArgs {
    let q = tensor(device, DType::F32, &[rows, HEADS, DIM]);
    let cache = tensor(device, DType::F32, &[pages, 4, HEADS, DIM]);
    AttentionArgs::new(q, cache, cache, q)
}

fn plan(handle: &mut Handle, batch: &BatchInput) -> Result<()> {
    handle.plan(batch, &Workspace::default(), (0, 0), Stream::default())
}

/// Two requests of two rows each; lengths on the host, ids of any device.
fn batch(kv_len: &[i32], table: Tensor) -> BatchInput {
    BatchInput {
        qo_len: 2,
        kv_len: Some(host(kv_len, &[2])),
        block_table: Some(table),
        ..BatchInput::default()
    }
}

#[test]
fn a_plan_that_fails_in_the_backend_leaves_the_one_before() {
    let stub = Stub::new(Device::Cpu);
    let fails = Arc::clone(&stub.fails);
    let context = stub.context();
    let mut handle = Handle::new(&context, desc(Kind::Decode, 2)).unwrap();
    let (kv_len, ids) = ([5, 3], [0, 1, 2, 0]);
    let first = batch(&kv_len, host(&ids, &[2, 2]));
    plan(&mut handle, &first).unwrap();
    let right = args(Device::Cpu, 4, 3);
    handle.run(&right, Stream::default()).unwrap();
    fails.store(true, SeqCst);
    // This one would need a fourth page.
    let ids = [0, 1, 3, 0];
    let second = batch(&kv_len, host(&ids, &[2, 2]));
    assert!(matches!(plan(&mut handle, &second), Err(Error::Driver(_))));
    assert_eq!(handle.run(&right, Stream::default()), Ok(()));
}

fn refused(handle: &Handle, args: &AttentionArgs, words: [&str; 2]) {
    let error = handle.run(args, Stream::default()).unwrap_err();
    let Error::Shape(message) = &error else {
        panic!("{error:?}");
    };
    for word in words {
        assert!(message.contains(word), "no {word:?} in {message:?}");
    }
}

const GPU: Device = Device::Cuda(0);

#[test]
fn rows_are_counted_where_lengths_are_on_the_device() {
    let context = Stub::new(GPU).context();
    let mut handle = Handle::new(&context, desc(Kind::Decode, 2)).unwrap();
    let lengths = BatchInput {
        qo_len: 2,
        kv_len: Some(tensor(GPU, DType::I32, &[2])),
        block_table: Some(tensor(GPU, DType::I32, &[2, 3])),
        ..BatchInput::default()
    };
    plan(&mut handle, &lengths).unwrap();
    assert_eq!(handle.run(&args(GPU, 4, 1), Stream::default()), Ok(()));
    refused(&handle, &args(GPU, 3, 1), ["q: ", "4 or more"]);
    let right = args(GPU, 4, 1);
    let short = tensor(GPU, DType::F32, &[3, HEADS, DIM]);
    refused(
        &handle,
        &AttentionArgs { o: short, ..right },
        ["o: ", "4 or more"],
    );
    let lse = Some(tensor(GPU, DType::F32, &[3, HEADS]));
    refused(
        &handle,
        &AttentionArgs { lse, ..right },
        ["lse: ", "4 or more"],
    );
    refused(&handle, &args(GPU, 4, 0), ["k: ", "1 or more"]);
    // One row each is the default.
    let lengths = BatchInput {
        qo_len: 0,
        ..lengths
    };
    plan(&mut handle, &lengths).unwrap();
    assert_eq!(handle.run(&args(GPU, 2, 1), Stream::default()), Ok(()));
    refused(&handle, &args(GPU, 1, 1), ["q: ", "2 or more"]);
}

#[test]
fn page_ids_on_the_device_need_a_page() {
    let context = Stub::new(GPU).context();
    let mut handle = Handle::new(&context, desc(Kind::Decode, 2)).unwrap();
    let table = tensor(GPU, DType::I32, &[2, 3]);
    plan(&mut handle, &batch(&[9, 0], table)).unwrap();
    assert_eq!(handle.run(&args(GPU, 4, 1), Stream::default()), Ok(()));
    refused(&handle, &args(GPU, 4, 0), ["k: ", "1 or more"]);
    // Columns are known.
    let error = plan(&mut handle, &batch(&[13, 0], table)).unwrap_err();
    assert!(
        error.to_string().contains("block_table gives request 0 3"),
        "{error}"
    );
    // No keys need no page, and a table without columns gives none.
    plan(&mut handle, &batch(&[0, 0], table)).unwrap();
    assert_eq!(handle.run(&args(GPU, 4, 0), Stream::default()), Ok(()));
    let lengths = BatchInput {
        kv_len: Some(tensor(GPU, DType::I32, &[2])),
        block_table: Some(tensor(GPU, DType::I32, &[2, 0])),
        ..BatchInput::default()
    };
    plan(&mut handle, &lengths).unwrap();
    assert_eq!(handle.run(&args(GPU, 2, 0), Stream::default()), Ok(()));
}

/// Says to this program that it is the one whose memory is limited.
const LIMITED: &str = "FOLIO_TEST_LIMITED_MEMORY";

/// From now on no more than `more` bytes of address space can be had.
fn limit_memory(more: u64) {
    let status = std::fs::read_to_string("/proc/self/statm").expect("a Linux system");
    let pages: u64 = status.split(' ').next().unwrap().parse().unwrap();
    let most = pages * 4096 + more;
    let limit = libc::rlimit {
        rlim_cur: most,
        rlim_max: most,
    };
    // SAFETY: a live struct.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
}

/// What a handle cannot allocate is an answer and no abort. A process of its own, since the limit stays.
#[test]
fn memory_that_runs_out_is_an_answer() {
    if std::env::var_os(LIMITED).is_none() {
        let program = std::env::current_exe().expect("the path of this program");
        let output = std::process::Command::new(program)
            .args(["--exact", "backends::memory_that_runs_out_is_an_answer"])
            .env(LIMITED, "1")
            .output()
            .expect("this program runs");
        let text = String::from_utf8_lossy(&output.stderr);
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{}\n{told}\n{text}", output.status);
        assert!(told.contains("1 passed"), "{told}");
        return;
    }
    const REQUESTS: u32 = 10_000_000;
    let kv_len = vec![0; REQUESTS as usize];
    let context = Stub::new(Device::Cpu).context();
    limit_memory(300 << 20);
    let most = Handle::new(&context, desc(Kind::Decode, 100_000_000)).err();
    let Some(Error::OutOfMemory(message)) = &most else {
        panic!("{most:?}");
    };
    assert!(
        message.contains("max_batch_size: ") && message.contains("100000000"),
        "{message}"
    );
    for kind in [Kind::Decode, Kind::Prefill] {
        // The lengths take 80 MB, and the work 320.
        let mut handle = Handle::new(&context, desc(kind, REQUESTS)).unwrap();
        let rows: Vec<i32> = (0..=2).collect();
        let of = |requests: i64, qo_indptr: Option<Tensor>| BatchInput {
            qo_indptr,
            kv_len: Some(host(&kv_len[..requests as usize], &[requests])),
            block_table: Some(host(&[], &[requests, 0])),
            ..BatchInput::default()
        };
        plan(&mut handle, &of(2, Some(host(&rows, &[3])))).unwrap();
        let all_rows: Vec<i32> = (0..=REQUESTS as i32).collect();
        let offsets = host(&all_rows, &[i64::from(REQUESTS) + 1]);
        let error = plan(&mut handle, &of(REQUESTS.into(), Some(offsets)));
        assert!(
            matches!(&error, Err(Error::OutOfMemory(m)) if m.contains("there is no memory for a list of")),
            "{error:?}"
        );
        assert_eq!(
            handle.run(&args(Device::Cpu, 2, 0), Stream::default()),
            Ok(())
        );
    }
}
