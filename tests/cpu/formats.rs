//! Caches of other forms than rows of plain elements: what an append writes, byte by byte, and what a gather reads back.

use crate::common::door::{DOORS, Session};
use crate::common::formats::cases;
use crate::common::memory::{HostMemory, Image, Resident, View};
use crate::common::random;
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::problem::{AppendArgs, CacheForm, KvLayout};
use proptest::prelude::*;

fn sessions() -> Vec<Box<dyn Session>> {
    let targets = [Target::Reference, Target::Cpu { num_threads: 2 }];
    let pairs = DOORS
        .iter()
        .flat_map(|door| targets.map(|target| door.open(target)));
    pairs
        .map(|session| session.expect("a CPU context"))
        .collect()
}

proptest! {
    #![proptest_config(random::cases(200))]

    #[test]
    fn what_is_appended_is_gathered(case in cases()) {
        for session in sessions() {
            prop_assert_eq!(case.check(&*session, &HostMemory), Ok(()));
        }
    }
}

/// Bytes of one row of keys of one head, and of its scales, computed by hand.
struct Golden {
    form: CacheForm,
    element: DType,
    row: &'static [f32],
    bytes: &'static [u8],
    /// Given or computed, as the tensor holds them.
    scales: Vec<u8>,
    zero_points: Vec<f32>,
}

impl Golden {
    fn check(&self, session: &dyn Session) {
        let dim = self.row.len() as i64;
        let row = Resident::new(&HostMemory, Image::of_f32(&[1, 1, dim], self.row));
        let slot = Resident::new(&HostMemory, Image::of_bits(DType::I64, &[1], [0]));
        let poison = |dtype, shape: &[i64]| {
            Resident::new(&HostMemory, Image::poisoned(View::compact(dtype, shape)))
        };
        let elements = dim / i64::from(self.element.lanes());
        let caches = [0, 1].map(|_| poison(self.element, &[1, 1, 1, elements]));
        let scale_dtype = match self.form {
            CacheForm::Nvfp4 => DType::F8E4M3,
            _ => DType::F32,
        };
        let is_computed = matches!(self.form, CacheForm::TokenHeadScales | CacheForm::Nvfp4);
        let count = (self.scales.len() / scale_dtype.size()) as i64;
        let shape = match self.form {
            CacheForm::TokenHeadScales => vec![1, 1, 1],
            CacheForm::Nvfp4 => vec![1, 1, 1, count],
            _ => vec![1, count],
        };
        let scales = [0, 1].map(|_| match is_computed {
            true => poison(scale_dtype, &shape),
            false => {
                let bits = self
                    .scales
                    .chunks(4)
                    .map(|b| u64::from(u32::from_le_bytes([b[0], b[1], b[2], b[3]])));
                Resident::new(&HostMemory, Image::of_bits(scale_dtype, &shape, bits))
            }
        });
        let zeros = (!self.zero_points.is_empty())
            .then(|| Resident::new(&HostMemory, Image::of_f32(&[1, dim], &self.zero_points)));
        let zeros = zeros.as_ref().map(Resident::tensor);
        let args = AppendArgs {
            key: row.tensor(),
            value: row.tensor(),
            k_cache: caches[0].tensor(),
            v_cache: caches[1].tensor(),
            layout: KvLayout::Nhd,
            form: self.form,
            kv_dtype: None,
            slot_mapping: slot.tensor(),
            k_scale: 0.0,
            v_scale: 0.0,
            k_scales: Some(scales[0].tensor()),
            v_scales: Some(scales[1].tensor()),
            k_zero_points: zeros,
            v_zero_points: zeros,
        };
        session.append(&args, Stream::default()).unwrap();
        for side in [0, 1] {
            let bytes = caches[side].current().bytes;
            assert_eq!(&bytes[..self.bytes.len()], self.bytes, "{:?}", self.form);
            let scales = scales[side].current().bytes;
            assert_eq!(&scales[..self.scales.len()], self.scales, "{:?}", self.form);
        }
    }
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

#[test]
fn rows_have_the_bytes_that_were_computed_by_hand() {
    let goldens = [
        // 254 / 127 = 2; -1.5, 2.5 and 0.5 are ties.
        Golden {
            form: CacheForm::TokenHeadScales,
            element: DType::I8,
            row: &[254.0, -3.0, 5.0, 1.0, 0.0, -254.0, 7.0, 100.0],
            bytes: &[0x7f, 0xfe, 0x02, 0x00, 0x00, 0x81, 0x04, 0x32],
            scales: floats(&[2.0]),
            zero_points: vec![],
        },
        // The least scale: vLLM's.
        Golden {
            form: CacheForm::TokenHeadScales,
            element: DType::I8,
            row: &[0.0; 8],
            bytes: &[0; 8],
            scales: floats(&[1e-6]),
            zero_points: vec![],
        },
        // 896 / 448 = 2.
        Golden {
            form: CacheForm::TokenHeadScales,
            element: DType::F8E4M3,
            row: &[896.0, 2.0, -4.0, 1.0, 0.0, 3.0, -896.0, 32.0],
            bytes: &[0x7e, 0x38, 0xc0, 0x30, 0x00, 0x3c, 0xfe, 0x58],
            scales: floats(&[2.0]),
            zero_points: vec![],
        },
        Golden {
            form: CacheForm::ChannelScales,
            element: DType::I8,
            row: &[1.0, 2.5, 300.0, -1000.0, -0.25, 0.75, 127.4, -3.5],
            bytes: &[0x02, 0x02, 0x7f, 0x81, 0x00, 0x02, 0x7f, 0xfc],
            scales: floats(&[0.5, 1.0, 2.0, 4.0, 0.5, 0.5, 1.0, 1.0]),
            zero_points: vec![],
        },
        // 2 + 1, -20 + 1, 6 + 1, -2 + 1; 0 + 0.5 and 1 + 0.5 are ties; 1 - 3, 4 + 20.
        Golden {
            form: CacheForm::ChannelZeroPoints,
            element: DType::I4x2,
            row: &[1.0, -10.0, 3.0, -1.0, 0.0, 0.5, 0.5, 2.0],
            bytes: &[0x83, 0xf7, 0x20, 0x7e],
            scales: floats(&[0.5; 8]),
            zero_points: vec![1.0, 1.0, 1.0, 1.0, 0.5, 0.5, -3.0, 20.0],
        },
        // 12 / 6 = 2, which is 0x40; the elements in halves: 6, -0.5, 1, 1.5, 2, 3, 4, 0, and seven ties, and -6.
        Golden {
            form: CacheForm::Nvfp4,
            element: DType::F4E2M1x2,
            row: &[
                12.0, -1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 0.0, 0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0, -12.0,
            ],
            bytes: &[0x97, 0x32, 0x54, 0x06, 0x20, 0x42, 0x64, 0xf6],
            scales: vec![0x40],
            zero_points: vec![],
        },
    ];
    for session in sessions() {
        for golden in &goldens {
            golden.check(&*session);
        }
    }
}
