//! Which image of a kernel a device gets: the bundle's cubin where one fits, its PTX elsewhere; and what is
//! told about it. The bundle is made up here, so that none has to be compiled.

use std::sync::{Arc, Mutex};

use folio::cuda::compiler::bundle::{Bundle, Writer};
use folio::cuda::compiler::loader::Loader;
use folio::cuda::compiler::packed::Packed;
use folio::cuda::compiler::unit::Unit;
use folio::cuda::driver::{Context, Driver};
use folio::cuda::kernels::attention::{self, AttentionQuery, AttentionTypes, Phase};
use folio::cuda::kernels::{self, Arch};
use folio::dtype::DType;
use folio::error::Error;
use folio::log::{Level, Logger};

use crate::stub::Recorder;

/// The stub takes any cubin, and shows the first line of PTX.
const CUBIN: &[u8] = b"\x7fELF";
const PTX: &[u8] = b"// PTX of this test\n\0";

/// The images that the build would put there, by a compiler of CUDA 13.0.
fn bundle() -> &'static Bundle {
    let mut writer = Writer::new(13000);
    for row in kernels::table().filter(|row| row.bundled) {
        for target in row.arch.bundle_targets() {
            let unit = Unit::new(row, target);
            let image = if unit.is_ptx() { PTX } else { CUBIN };
            writer.image(&unit, &Packed::pack(image));
        }
    }
    Box::leak(Box::new(Bundle::parse(writer.finish().leak()).unwrap()))
}

/// What a decode of bf16 at head_dim 128 finds on the stub's device.
struct Found {
    arch: Arch,
    images: Vec<String>,
    messages: Vec<(Level, String)>,
}

fn find() -> Result<Found, Error> {
    let context = Context::retain(Driver::get().unwrap(), 0).unwrap();
    let messages = Arc::new(Mutex::new(Vec::new()));
    let sink = {
        let messages = Arc::clone(&messages);
        move |level, text: &str| messages.lock().unwrap().push((level, text.to_owned()))
    };
    let logger = Logger::new(Arc::new(sink), Level::Info);
    let loader = Loader::with_bundle(&context, logger, bundle());
    let recorder = Recorder::new();
    recorder.forget();
    let query = AttentionQuery {
        phase: Phase::Decode,
        compute_capability: context.device().compute_capability,
        types: AttentionTypes {
            q: DType::BF16,
            kv: DType::BF16,
            o: DType::BF16,
        },
        head_dim_qk: 128,
        head_dim_vo: 128,
    };
    let find = || {
        loader.find(attention::candidates(query), || {
            attention::unsupported(&query)
        })
    };
    let (row, _) = find()?;
    // A second look-up finds what the first one loaded.
    find()?;
    let loads = recorder.calls().into_iter();
    let images = loads.filter_map(|call| Some(call.strip_prefix("cuModuleLoadData ")?.to_owned()));
    let messages = messages.lock().unwrap().clone();
    Ok(Found {
        arch: row.as_ref().arch,
        images: images.collect(),
        messages,
    })
}

/// Compute capability 9.0: the first row that fits is Hopper's own.
pub fn hopper_loads_its_cubin() {
    let found = find().unwrap();
    assert_eq!(
        (found.arch, found.images),
        (Arch::Sm90a, vec!["cubin".into()])
    );
    assert_eq!(found.messages, []);
}

/// Compute capability 8.6: a cubin runs on its own major version.
pub fn ampere_loads_a_cubin() {
    let found = find().unwrap();
    assert_eq!(
        (found.arch, found.images),
        (Arch::Sm80, vec!["cubin".into()])
    );
    assert_eq!(found.messages, []);
}

/// Compute capabilities 10.0, 10.3, 12.0: the portable kernel by PTX, and it is told that this takes time.
pub fn newer_devices_load_ptx() {
    let found = find().unwrap();
    assert_eq!(found.arch, Arch::Sm80);
    assert_eq!(found.images, ["PTX // PTX of this test"]);
    let [(Level::Info, message)] = found.messages.as_slice() else {
        panic!("{:?}", found.messages);
    };
    for part in [
        "decode_sm80_bf16_d128",
        "driver",
        "PTX",
        "compute capability 1",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

/// Hopper's own kernels have no PTX: with the compiler switched off there is none for another device.
pub fn hopper_kernels_stay_on_hopper() {
    let context = Context::retain(Driver::get().unwrap(), 0).unwrap();
    let loader = Loader::with_bundle(&context, Logger::silent(), bundle());
    let row = kernels::table().find(|row| row.arch == Arch::Sm90a);
    let error = loader.load(row.unwrap()).unwrap_err();
    assert!(
        matches!(&error, Error::Unsupported(m) if m.contains("sm_100") && m.contains("NVRTC")),
        "{error:?}"
    );
}

/// A driver of CUDA 12.8 does not know PTX of CUDA 13.0.
pub fn ptx_of_a_newer_compiler() {
    let error = find().err();
    let Some(Error::DriverTooOld(message)) = &error else {
        panic!("{error:?}");
    };
    for part in ["compute capability 10.0", "PTX of CUDA 13.0", "12.8", "222"] {
        assert!(message.contains(part), "{part}: {message}");
    }
}
