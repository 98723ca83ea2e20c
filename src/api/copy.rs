//! Copying pages of a cache: the checks, and the call of the backend.

use super::Context;
use super::append::same;
use super::check::{Extent, Named, named};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{Checked, CopyArgs, PagesToCopy};
use crate::tensor::{Device, MAX_RANK, Tensor};

/// Copies pages.
///
/// # Errors
/// What is wrong with the arguments; then nothing was copied.
pub fn copy(context: &Context, args: &CopyArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let k = pages(("k_src", "k_dst"), &args.k, device)?;
    let v = match &args.v {
        None => None,
        Some(v) => {
            let v = pages(("v_src", "v_dst"), v, device)?;
            same("v_src", "num_pages", v.src.extent(0), k.src.extent(0))?;
            same("v_dst", "num_pages", v.dst.extent(0), k.dst.extent(0))?;
            Some(v)
        }
    };
    let checked = Checked::new(CopyArgs {
        k,
        v,
        page_pairs: page_pairs(args.page_pairs, device)?,
    });
    check_pairs(&checked)?;
    context.backend().copy(&checked, stream)
}

fn pages(
    (src_name, dst_name): (&str, &str),
    stated: &PagesToCopy,
    device: Device,
) -> Result<PagesToCopy> {
    let (src, dst) = (named(src_name, stated.src), named(dst_name, stated.dst));
    let (src, dst) = (within_reach(src, device)?, within_reach(dst, device)?);
    let (src, dst) = (with_pages(src)?, with_pages(dst)?);
    check_alike(&src, &dst)?;
    let (src, dst) = (bytes(src)?, bytes(dst)?);
    Ok(PagesToCopy {
        src: src.tensor,
        dst: dst.writable()?.tensor,
    })
}

/// On the context's device, or in host memory that it can reach.
fn within_reach(pages: Named<'_>, device: Device) -> Result<Named<'_>> {
    match pages.tensor.is_page_locked() {
        true => Ok(pages),
        false if pages.tensor.device() == Device::Cpu && device != Device::Cpu => {
            Err(Error::DeviceMismatch(format!(
                "{}: the tensor is on cpu, the context on {device}; one on {device} or in page-locked memory (FOLIO_DEVICE_CUDA_HOST) is accepted",
                pages.name
            )))
        }
        false => pages.on(device),
    }
}

fn with_pages(pages: Named<'_>) -> Result<Named<'_>> {
    let mut extents = [Extent::Any; MAX_RANK];
    extents[0] = Extent::CountFrom(0);
    pages.shaped(&extents[..pages.tensor.rank().max(1)])
}

/// Pages are copied as they lie: they have one type, and dimensions of one extent that follow each other in one way.
fn check_alike(src: &Named<'_>, dst: &Named<'_>) -> Result<()> {
    let (from, to) = (&src.tensor, &dst.tensor);
    if from.dtype() != to.dtype() {
        return Err(Error::DType(format!(
            "{}: dtype {} is not accepted beside that of {}, {}; the same is",
            dst.name,
            to.dtype(),
            src.name,
            from.dtype()
        )));
    }
    if from.shape()[1..] != to.shape()[1..] {
        return Err(Error::Shape(format!(
            "{}: shape {:?} is not accepted beside that of {}, {:?}; the same but for the first extent is",
            dst.name,
            to.shape(),
            src.name,
            from.shape()
        )));
    }
    if from.is_empty() || to.is_empty() || strides(from).eq(strides(to)) {
        return Ok(());
    }
    Err(Error::Shape(format!(
        "{}: strides {:?} are not accepted beside those of {}, {:?}; the same but for the first are",
        dst.name,
        to.strides(),
        src.name,
        from.strides()
    )))
}

/// Those within a page that an index is multiplied with.
fn strides(pages: &Tensor) -> impl Iterator<Item = i64> + '_ {
    let dims = pages.shape().iter().zip(pages.strides()).skip(1);
    dims.filter(|&(&extent, _)| extent > 1)
        .map(|(_, &stride)| stride)
}

fn bytes(pages: Named<'_>) -> Result<Named<'_>> {
    let found = pages.tensor.pages_of_bytes();
    let tensor = found.ok_or_else(|| {
        Error::Shape(format!(
            "{}: strides {:?} of shape {:?} are not accepted; pages without gaps within them are",
            pages.name,
            pages.tensor.strides(),
            pages.tensor.shape()
        ))
    })?;
    Ok(Named { tensor, ..pages })
}

fn page_pairs(tensor: Tensor, device: Device) -> Result<Tensor> {
    let pairs = named("page_pairs", tensor);
    let pairs = match tensor.device() {
        Device::Cpu => pairs,
        Device::Cuda(_) => pairs.on(device)?,
    };
    let pairs = pairs.one_of(&[DType::I32, DType::I64])?;
    let pairs = pairs.shaped(&[Extent::CountFrom(0), Extent::Is(2)])?;
    Ok(pairs.compact()?.tensor)
}

/// Pairs on the host are checked one by one; on a device the kernel skips those with pages outside.
fn check_pairs(args: &CopyArgs) -> Result<()> {
    let Some(pairs) = args.pairs_on_host() else {
        return Ok(());
    };
    let [src_pages, dst_pages] = [&args.k.src, &args.k.dst].map(|pages| pages.extent(0));
    let mut written = PageSet::new(dst_pages);
    let all = || (0..pairs.len()).filter_map(|pair| Some((pair, pairs.get(pair)?)));
    for (pair, [src, dst]) in all() {
        for (column, page, pages, what) in [(0, src, src_pages, "src"), (1, dst, dst_pages, "dst")]
        {
            if page >= pages {
                return refused(format!(
                    "page_pairs[{pair}, {column}]: {page} is not accepted; below {pages}, the pages of {what}, or negative to skip the pair, is"
                ));
            }
        }
        if !written.insert(dst) {
            return refused(format!(
                "page_pairs[{pair}, 1]: {dst} is not accepted; a page that no pair before it writes is"
            ));
        }
    }
    let is_in_place = args.k.is_in_place() || args.v.is_some_and(|v| v.is_in_place());
    match all().find(|&(_, [src, dst])| is_in_place && src != dst && written.contains(src)) {
        None => Ok(()),
        Some((pair, [src, _])) => refused(format!(
            "page_pairs[{pair}, 0]: {src} is not accepted where src and dst are one tensor; a page that no other pair writes is"
        )),
    }
}

/// Pages of a tensor, a bit for each.
struct PageSet(Vec<u64>);

impl PageSet {
    fn new(pages: i64) -> PageSet {
        PageSet(vec![0; (pages as usize).div_ceil(64)])
    }

    /// Whether it was not there.
    fn insert(&mut self, page: i64) -> bool {
        let (word, bit) = (&mut self.0[page as usize / 64], 1 << (page % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    /// A page beyond the tensor is not there.
    fn contains(&self, page: i64) -> bool {
        let word = self.0.get(page as usize / 64);
        word.is_some_and(|word| word >> (page % 64) & 1 == 1)
    }
}

fn refused(what: String) -> Result<()> {
    Err(Error::InvalidArgument(what))
}
