//! Checks of what picks code and bounds memory.

use super::beside::{Side, whole_parts};
use super::{mla, new_keys};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{AttentionDesc, CacheForm, Kind, KvStorage};

/// Largest rows of K and of V: those of absorbed MLA, which is attention with one KV head whose V is a view of its K.
/// What a backend has kernels for is its own matter.
const MAX_HEAD_DIM_QK: u32 = 576;
const MAX_HEAD_DIM_VO: u32 = 512;
/// Head dimensions are multiples of this.
pub(super) const HEAD_DIM_UNIT: u32 = 8;
/// Most heads; far above any model, and keeps products of heads and dims within 32 bits.
const MAX_HEADS: u32 = 4096;
/// Lengths and offsets travel as int32.
const MAX_LENGTH: u32 = i32::MAX as u32;

/// Checks a desc and fills in derived maxima that the caller left 0.
pub(super) fn check(mut desc: AttentionDesc) -> Result<AttentionDesc> {
    match desc.kind {
        Kind::Mla => mla::desc(&desc)?,
        Kind::Decode | Kind::Prefill => {
            dtypes(&desc)?;
            heads(&desc)?;
            form(&desc)?;
        }
    }
    storage(&desc)?;
    let derives_tokens = match desc.kind {
        Kind::Decode => true,
        Kind::Mla => desc.max_num_tokens == 0,
        Kind::Prefill => false,
    };
    if derives_tokens {
        let tokens = u64::from(desc.max_batch_size) * u64::from(desc.max_qo_len);
        desc.max_num_tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
    } else if desc.kind == Kind::Prefill && desc.max_qo_len == 0 {
        desc.max_qo_len = desc.max_num_tokens;
    }
    for (name, value) in [
        ("max_batch_size", desc.max_batch_size),
        ("max_qo_len", desc.max_qo_len),
        ("max_num_tokens", desc.max_num_tokens),
        ("max_kv_len", desc.max_kv_len),
    ] {
        within(name, value, 1, MAX_LENGTH)?;
    }
    if desc.max_num_pages == 0 {
        let pages = desc.max_kv_len.div_ceil(desc.kv.page_size());
        let all = u64::from(desc.max_batch_size) * u64::from(pages);
        desc.max_num_pages = all.min(MAX_LENGTH.into());
    }
    let stated = u32::try_from(desc.max_num_pages).unwrap_or(u32::MAX);
    within("max_num_pages", stated, 1, MAX_LENGTH)?;
    new_keys::check(&desc)?;
    Ok(desc)
}

fn dtypes(desc: &AttentionDesc) -> Result<()> {
    if desc.q_dtype.is_fp8() {
        return beside_fp8_queries(desc);
    }
    if !desc.q_dtype.is_float() {
        return Err(Error::Unsupported(format!(
            "q_dtype: {} is not supported; float32, float16, bfloat16, float8_e4m3 and float8_e5m2 are",
            desc.q_dtype
        )));
    }
    let same_or_fp8 = |dtype: DType| dtype == desc.q_dtype || dtype.is_fp8();
    let (kv, o) = (desc.kv_format, desc.o_dtype);
    // Elements of other forms do not go by the type of q.
    let has_own_elements = !matches!(kv.form(), CacheForm::Plain | CacheForm::PackedKeys);
    let is_kv = has_own_elements || kv == kv.form().of(kv.element) && same_or_fp8(kv.element);
    for (name, stated, supported) in [
        ("kv_dtype", kv.to_string(), is_kv),
        ("o_dtype", o.to_string(), same_or_fp8(o) || o == DType::F32),
    ] {
        if !supported {
            return Err(Error::Unsupported(format!(
                "{name}: {stated} is not supported with q_dtype {}; the same type, float8_e4m3 and float8_e5m2 are (outputs: float32 too)",
                desc.q_dtype
            )));
        }
    }
    Ok(())
}

/// Whether the cache and the output have types that queries in fp8 may stand beside.
fn beside_fp8_queries(desc: &AttentionDesc) -> Result<()> {
    let (q, kv, o) = (desc.q_dtype, desc.kv_format, desc.o_dtype);
    if !matches!(kv.form(), CacheForm::Plain | CacheForm::PackedKeys) {
        return Err(Error::Unsupported(format!(
            "kv_format: FOLIO_KV_FORMAT_{} is not supported with q_dtype {q}; FOLIO_KV_FORMAT_PLAIN and FOLIO_KV_FORMAT_PACKED_KEYS are",
            kv.form().name()
        )));
    }
    if !kv.element.is_fp8() {
        return Err(Error::Unsupported(format!(
            "kv_dtype: {kv} is not supported with q_dtype {q}; float8_e4m3 and float8_e5m2 are"
        )));
    }
    if !(o.is_float() || o.is_fp8()) {
        return Err(Error::Unsupported(format!(
            "o_dtype: {o} is not supported with q_dtype {q}; float32, float16, bfloat16, float8_e4m3 and float8_e5m2 are"
        )));
    }
    Ok(())
}

/// Whether the form of the cache goes with its elements, its rows and where it is.
fn form(desc: &AttentionDesc) -> Result<()> {
    let format = desc.kv_format;
    let form = format.form();
    let elements = form.elements(desc.q_dtype);
    if !elements.contains(&format.element) {
        let names: Vec<&str> = elements.iter().map(|element| element.name()).collect();
        return Err(Error::Unsupported(format!(
            "kv_dtype: {} is not supported with FOLIO_KV_FORMAT_{}; {} is",
            format.element,
            form.name(),
            names.join(" or ")
        )));
    }
    if form != CacheForm::Plain && desc.kv == KvStorage::Ragged {
        return Err(Error::Unsupported(format!(
            "kv_format: FOLIO_KV_FORMAT_{} is not supported for ragged keys and values; FOLIO_KV_FORMAT_PLAIN is",
            form.name()
        )));
    }
    let (qk, vo) = (desc.head_dim_qk.into(), desc.head_dim_vo.into());
    whole_parts("head_dim_qk", Side::Key, qk, format)?;
    whole_parts("head_dim_vo", Side::Value, vo, format)
}

fn heads(desc: &AttentionDesc) -> Result<()> {
    within("num_qo_heads", desc.num_qo_heads, 1, MAX_HEADS)?;
    within("num_kv_heads", desc.num_kv_heads, 1, MAX_HEADS)?;
    if !desc.num_qo_heads.is_multiple_of(desc.num_kv_heads) {
        return Err(Error::InvalidArgument(format!(
            "num_qo_heads: {} is not accepted; a multiple of num_kv_heads ({}) is",
            desc.num_qo_heads, desc.num_kv_heads
        )));
    }
    for (name, dim, most) in [
        ("head_dim_qk", desc.head_dim_qk, MAX_HEAD_DIM_QK),
        ("head_dim_vo", desc.head_dim_vo, MAX_HEAD_DIM_VO),
    ] {
        if !(HEAD_DIM_UNIT..=most).contains(&dim) || !dim.is_multiple_of(HEAD_DIM_UNIT) {
            return Err(Error::Unsupported(format!(
                "{name}: {dim} is not supported; multiples of {HEAD_DIM_UNIT} up to {most} are"
            )));
        }
    }
    Ok(())
}

fn storage(desc: &AttentionDesc) -> Result<()> {
    match desc.kv {
        KvStorage::Paged { page_size, .. } => within("page_size", page_size, 1, MAX_LENGTH),
        KvStorage::Ragged if desc.kind == Kind::Decode => Err(Error::Unsupported(
            "kv_storage: ragged keys and values are not supported by decode; a paged cache is"
                .into(),
        )),
        KvStorage::Ragged => Ok(()),
    }
}

fn within(name: &str, value: u32, least: u32, most: u32) -> Result<()> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "{name}: {value} is not accepted; {least} to {most} is"
    )))
}
