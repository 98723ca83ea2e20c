//! The operator on trees of draft tokens: the checks, and the call of the backend.

use super::Context;
use super::check::{Extent, Named, named, rising};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{Checked, TreeMaskArgs};
use crate::tensor::{Device, Tensor};

/// Bytes of a row of `tree_bits`.
const ROW_BYTES: [i64; 3] = [1, 2, 4];

/// Makes masks, positions and links of trees of draft tokens from the parents of their tokens.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn tree_mask(context: &Context, args: &TreeMaskArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let given = |name, tensor, dtypes: &[DType]| named(name, tensor).on(device)?.one_of(dtypes);
    let prefix_lens = given("prefix_lens", args.prefix_lens, &[DType::I32])?
        .shaped(&[Extent::CountFrom(0)])?
        .compact()?
        .tensor;
    let batch_size = prefix_lens.extent(0);
    let parents = given("parents", args.parents, &[DType::I32])?;
    let parents = match args.qo_indptr {
        None => parents.shaped(&[Extent::Is(batch_size), Extent::CountFrom(0)])?,
        Some(_) => parents.shaped(&[Extent::CountFrom(0)])?,
    };
    let parents = parents.compact()?.tensor;
    if i32::try_from(parents.num_elements()).is_err() {
        return refused(
            "parents",
            format!("{} tokens are", parents.num_elements()),
            format!("{} are", i32::MAX),
        );
    }
    let qo_indptr = optional(args.qo_indptr, |tensor| {
        given("qo_indptr", tensor, &[DType::I32])?
            .shaped(&[Extent::Is(batch_size + 1)])?
            .compact()
    })?;
    let shapes = Shapes {
        device,
        parents,
        is_ragged: qo_indptr.is_some(),
    };
    let checked = Checked::new(TreeMaskArgs {
        parents: shapes.by_token(parents),
        prefix_lens,
        qo_indptr,
        mask_bytes: shapes.elements("mask_bytes", args.mask_bytes)?,
        mask_bits: shapes.elements("mask_bits", args.mask_bits)?,
        tree_mask: shapes.tree_mask(args.tree_mask)?,
        tree_bits: shapes.tree_bits(args.tree_bits)?,
        positions: shapes.integers("positions", args.positions)?,
        next_token: shapes.integers("next_token", args.next_token)?,
        next_sibling: shapes.integers("next_sibling", args.next_sibling)?,
    });
    check_values(&checked)?;
    context.backend().tree_mask(&checked, stream)
}

/// What outputs are measured by.
struct Shapes {
    device: Device,
    parents: Tensor,
    is_ragged: bool,
}

impl Shapes {
    /// The extents of `parents`.
    fn per_token(&self) -> Vec<Extent> {
        let shape = self.parents.shape().iter();
        shape.map(|&extent| Extent::Is(extent)).collect()
    }

    /// `[num_tokens, …]` of a tensor whose first dimensions are those of `parents`.
    fn by_token(&self, tensor: Tensor) -> Tensor {
        match self.is_ragged {
            true => tensor,
            false => tensor.join_dims(0),
        }
    }

    fn output<'a>(
        &self,
        name: &'a str,
        tensor: Tensor,
        dtypes: &[DType],
        extents: &[Extent],
    ) -> Result<Named<'a>> {
        named(name, tensor)
            .on(self.device)?
            .one_of(dtypes)?
            .shaped(extents)?
            .compact()
    }

    /// A mask of whole requests: its length follows from values.
    fn elements(&self, name: &str, tensor: Option<Tensor>) -> Result<Option<Tensor>> {
        optional(tensor, |tensor| {
            self.output(name, tensor, &[DType::U8], &[Extent::AtLeast(0)])
        })
    }

    fn tree_mask(&self, tensor: Option<Tensor>) -> Result<Option<Tensor>> {
        if self.is_ragged {
            return self.elements("tree_mask", tensor);
        }
        let [batch_size, size] = [0, 1].map(|d| Extent::Is(self.parents.extent(d)));
        let tensor = optional(tensor, |tensor| {
            let extents = [batch_size, size, size];
            self.output("tree_mask", tensor, &[DType::U8], &extents)
        })?;
        Ok(tensor.map(|tensor| tensor.join_dims(0).join_dims(0)))
    }

    fn tree_bits(&self, tensor: Option<Tensor>) -> Result<Option<Tensor>> {
        let extents = [self.per_token(), vec![Extent::Any]].concat();
        let Some(tensor) = optional(tensor, |tensor| {
            self.output("tree_bits", tensor, &[DType::U8], &extents)
        })?
        else {
            return Ok(None);
        };
        let bytes = tensor.extent(tensor.rank() - 1);
        let tokens = match self.is_ragged {
            true => 0,
            false => self.parents.extent(1),
        };
        match ROW_BYTES.contains(&bytes) && 8 * bytes >= tokens {
            true => Ok(Some(self.by_token(tensor))),
            false => no_room_for(tokens, bytes),
        }
    }

    fn integers(&self, name: &str, tensor: Option<Tensor>) -> Result<Option<Tensor>> {
        let extents = self.per_token();
        let tensor = optional(tensor, |tensor| {
            self.output(name, tensor, &[DType::I32, DType::I64], &extents)
        })?;
        Ok(tensor.map(|tensor| self.by_token(tensor)))
    }
}

/// Numbers on the host are checked one by one; the kernel keeps to what is there.
fn check_values(args: &TreeMaskArgs) -> Result<()> {
    let (Some(parents), Some(prefix_lens)) = (args.parents.as_i32(), args.prefix_lens.as_i32())
    else {
        return Ok(());
    };
    let qo_indptr = args.qo_indptr.as_ref().and_then(Tensor::as_i32);
    if let Some(qo_indptr) = qo_indptr {
        check_offsets(qo_indptr, parents.len() as i64)?;
    }
    let size = args.tree_size();
    let mut needed = Needed::default();
    for (b, &prefix_len) in prefix_lens.iter().enumerate() {
        let (first, end) = match qo_indptr {
            None => (b as i64 * size, (b as i64 + 1) * size),
            Some(qo_indptr) => (qo_indptr[b].into(), qo_indptr[b + 1].into()),
        };
        check_tree(&parents[first as usize..end as usize], first)?;
        let tokens = end - first;
        let most = i64::from(i32::MAX) - tokens;
        if !(0..=most).contains(&prefix_len.into()) {
            return refused(
                &format!("prefix_lens[{b}]"),
                format!("{prefix_len} is"),
                format!("0 to {most} in front of {tokens} tokens is"),
            );
        }
        needed.add(tokens, i64::from(prefix_len) + tokens);
    }
    needed.check(args)
}

fn check_offsets(qo_indptr: &[i32], num_tokens: i64) -> Result<()> {
    match qo_indptr.first() {
        Some(&first) if first != 0 => refused("qo_indptr[0]", format!("{first} is"), "0 is".into()),
        _ => rising("qo_indptr", qo_indptr, num_tokens, "tokens"),
    }
}

/// A parent stands before its children, so that every walk towards a root ends.
fn check_tree(parents: &[i32], first: i64) -> Result<()> {
    let is_wrong = |(token, parent): &(i32, &i32)| !(-1..*token).contains(*parent);
    match (0..).zip(parents).find(is_wrong) {
        None => Ok(()),
        Some((token, parent)) => refused(
            &format!("parents[{}]", first + i64::from(token)),
            format!("{parent} of token {token} of its request is"),
            format!("-1, a root, to {}, the token before it, is", token - 1),
        ),
    }
}

/// Bytes that the masks of all requests have.
#[derive(Default)]
struct Needed {
    mask_bytes: i64,
    mask_bits: i64,
    tree_mask: i64,
    tokens_of_largest: i64,
}

impl Needed {
    /// One more request. Both numbers are below 2^31.
    fn add(&mut self, tokens: i64, kv_len: i64) {
        let add = |sum: &mut i64, bytes: i64| *sum = sum.saturating_add(bytes);
        add(&mut self.mask_bytes, tokens * kv_len);
        add(&mut self.mask_bits, (tokens * kv_len + 7) / 8);
        add(&mut self.tree_mask, tokens * tokens);
        self.tokens_of_largest = self.tokens_of_largest.max(tokens);
    }

    fn check(&self, args: &TreeMaskArgs) -> Result<()> {
        for (name, tensor, needed) in [
            ("mask_bytes", args.mask_bytes, self.mask_bytes),
            ("mask_bits", args.mask_bits, self.mask_bits),
            ("tree_mask", args.tree_mask, self.tree_mask),
        ] {
            if let Some(tensor) = tensor {
                named(name, tensor).shaped(&[Extent::AtLeast(needed)])?;
            }
        }
        match args.tree_bits.map(|bits| bits.extent(1)) {
            Some(bytes) if 8 * bytes < self.tokens_of_largest => {
                no_room_for(self.tokens_of_largest, bytes)
            }
            _ => Ok(()),
        }
    }
}

/// The refusal of rows of `tree_bits`.
fn no_room_for<T>(tokens: i64, bytes: i64) -> Result<T> {
    Err(Error::Shape(format!(
        "tree_bits: a last dimension of {bytes} bytes is not accepted for trees of {tokens} tokens; 1, 2 or 4 bytes with a bit for each token are"
    )))
}

/// Checks a tensor that may be left out.
fn optional<'a>(
    tensor: Option<Tensor>,
    check: impl FnOnce(Tensor) -> Result<Named<'a>>,
) -> Result<Option<Tensor>> {
    tensor
        .map(|tensor| check(tensor).map(|named| named.tensor))
        .transpose()
}

fn refused<T>(field: &str, is: String, accepted: String) -> Result<T> {
    Err(Error::InvalidArgument(format!(
        "{field}: {is} not accepted; {accepted}"
    )))
}
