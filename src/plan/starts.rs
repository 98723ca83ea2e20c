//! Where the parts of each request start: its page ids, and its custom mask. Computed once for every backend.

use super::reserve::reserve;
use crate::error::Result;
use crate::problem::{HostBatch, PageIds, Pages, RequestStarts};
use crate::tensor::Tensor;

/// Fills `starts` for `batch`. Page ids that lie on the host are copied by a plan without gaps, request by
/// request; others stay where the caller has them.
pub fn request_starts(
    batch: &HostBatch<'_>,
    page_size: u32,
    starts: &mut RequestStarts,
) -> Result<()> {
    let n = batch.batch_size();
    let RequestStarts {
        page,
        mask_bytes,
        mask_bits,
    } = starts;
    page.clear();
    mask_bytes.clear();
    mask_bits.clear();
    reserve("requests", page, n)?;
    reserve("requests", mask_bytes, n + 1)?;
    reserve("requests", mask_bits, n + 1)?;
    let (mut copied, mut bytes, mut bits) = (0, 0, 0);
    for b in 0..n {
        let keys = batch.keys(b);
        page.push(match batch.pages {
            // Key `keys.start` is in the first row.
            Pages::Ragged { indptr } => i64::from(indptr[b]) - i64::from(keys.start),
            Pages::Csr { ids, indptr } if ids.is_device() => i64::from(indptr[b]),
            Pages::Table { ids, row_stride } if ids.is_device() => (b * row_stride) as i64,
            Pages::Csr { .. } | Pages::Table { .. } => copied,
        });
        copied += i64::from(keys.end.div_ceil(page_size));
        mask_bytes.push(bytes);
        mask_bits.push(bits);
        let elements = i64::from(batch.qo_len(b)) * i64::from(batch.kv_len[b]);
        // Masks of so many elements are never passed: a run without one does not read their ends.
        bytes = i64::saturating_add(bytes, elements);
        bits = i64::saturating_add(bits, (elements + 7) / 8);
    }
    mask_bytes.push(bytes);
    mask_bits.push(bits);
    Ok(())
}

/// The page ids that a plan copies: those in use that lie on the host.
pub fn num_copied_page_ids(batch: &HostBatch<'_>) -> usize {
    match batch.pages {
        Pages::Csr { ids, .. } | Pages::Table { ids, .. } if !ids.is_device() => batch.num_pages,
        _ => 0,
    }
}

/// The caller's page ids, where they are on the device.
pub fn device_page_ids(batch: &HostBatch<'_>) -> Option<Tensor> {
    match batch.pages {
        Pages::Csr { ids, .. } | Pages::Table { ids, .. } => match ids {
            PageIds::Device(ids) => Some(ids),
            PageIds::Host(_) => None,
        },
        Pages::Ragged { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::problem::{Keys, Requests};
    use crate::tensor::Device;

    #[allow(unsafe_code)]
    fn on_device() -> Tensor {
        // SAFETY: never read.
        unsafe {
            Tensor::new(
                "ids",
                4096 as *mut u8,
                Device::Cuda(0),
                DType::I32,
                &[30],
                None,
            )
        }
        .unwrap()
    }

    fn starts(pages: Pages<'_>) -> RequestStarts {
        let batch = HostBatch {
            qo_indptr: &[0, 1, 1, 4],
            kv_len: &[17, 0, 16],
            keys: Keys::All,
            window_left: None,
            pages,
            num_pages: 3,
            max_page_id: 8,
            planned: Requests::All,
        };
        let mut starts = RequestStarts::default();
        request_starts(&batch, 16, &mut starts).unwrap();
        starts
    }

    #[test]
    fn page_ids_on_the_host_are_copied_without_gaps() {
        let ids = PageIds::Host(&[7, 8, -5, -5, 3, -5, -5, -5]);
        let table = starts(Pages::Table { ids, row_stride: 2 });
        assert_eq!(table.page, [0, 2, 2]);
        assert_eq!(table.mask_bytes, [0, 17, 17, 17 + 48]);
        assert_eq!(table.mask_bits, [0, 3, 3, 3 + 6]);
    }

    #[test]
    fn page_ids_on_the_device_and_ragged_rows_stay() {
        let (device, indptr) = (PageIds::Device(on_device()), &[0, 9, 9, 30][..]);
        let csr = Pages::Csr {
            indptr,
            ids: device,
        };
        assert_eq!(starts(csr).page, [0, 9, 9]);
        let table = Pages::Table {
            ids: device,
            row_stride: 5,
        };
        assert_eq!(starts(table).page, [0, 5, 10]);
        assert_eq!(starts(Pages::Ragged { indptr }).page, [0, 9, 9]);
    }
}
