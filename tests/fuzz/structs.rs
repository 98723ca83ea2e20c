//! A C struct as bytes behind the header's layout, with the tensors that its pointers lead to. Whatever the
//! fuzzer does to a struct goes through here.

#![allow(unsafe_code)]

use super::guarded::Guarded;
use super::header::{Field, Kind, layout};
use folio::dtype::DType;
use folio::ffi::folio_tensor;

/// Extents and strides that a corrupted rank may make the library read: all that it ever reads, and one.
const ROOM: usize = 6;

/// A C struct that the fuzzer owns.
pub struct Struct {
    pub name: &'static str,
    pub fields: Vec<Field>,
    pub size: usize,
    /// As many bytes as its struct_size says, where that is not garbage.
    bytes: Vec<u8>,
    /// By field; `None` where the pointer is NULL.
    pub tensors: Vec<(usize, Box<Block>)>,
    /// The call gets NULL instead of the struct.
    pub is_null: bool,
}

/// A C tensor with its extents and strides.
pub struct Block {
    pub tensor: folio_tensor,
    pub shape: [i64; ROOM],
    pub strides: [i64; ROOM],
    /// What the valid case described.
    pub original: Described,
}

/// A tensor's elements in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Described {
    pub address: usize,
    pub dtype: DType,
    pub shape: Vec<i64>,
    pub strides: Vec<i64>,
}

impl Described {
    /// Bytes from the first element to behind the last; `None` where that is no number.
    pub fn span(&self) -> Option<usize> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let mut last = 0i64;
        for (&extent, &stride) in self.shape.iter().zip(&self.strides) {
            last = last.checked_add(extent.checked_sub(1)?.checked_mul(stride)?)?;
        }
        let bytes = last.checked_add(1)?.checked_mul(self.dtype.size() as i64)?;
        usize::try_from(bytes).ok()
    }

    /// The address of an element.
    pub fn at(&self, index: &[i64]) -> usize {
        let steps = index
            .iter()
            .zip(&self.strides)
            .map(|(i, stride)| i * stride);
        self.address + steps.sum::<i64>() as usize * self.dtype.size()
    }

    /// The bits of an element of host memory.
    pub fn bits(&self, index: &[i64]) -> u64 {
        let (address, size) = (self.at(index), self.dtype.size());
        let mut bits = [0; 8];
        // SAFETY: only called for elements that lie within a live host allocation.
        unsafe { std::ptr::copy_nonoverlapping(address as *const u8, bits.as_mut_ptr(), size) };
        u64::from_le_bytes(bits)
    }
}

impl Block {
    /// What the tensor says now; `None` where no library may accept it.
    pub fn described(&self) -> Option<Described> {
        let (tensor, rank) = (&self.tensor, usize::try_from(self.tensor.ndim).ok()?);
        if rank > 5 || tensor.shape.is_null() || !(1..=3).contains(&tensor.device_type) {
            return None;
        }
        let dtype = dtype_of(tensor)?;
        let shape = self.shape[..rank].to_vec();
        let mut described = Described {
            address: (tensor.data as usize)
                .checked_add(usize::try_from(tensor.byte_offset).ok()?)?,
            dtype,
            strides: match tensor.strides.is_null() {
                false => self.strides[..rank].to_vec(),
                true => compact(&shape)?,
            },
            shape,
        };
        let signs = described.shape.iter().chain(&described.strides);
        if signs.into_iter().any(|&n| n < 0) {
            return None;
        }
        if described.shape.contains(&0) {
            described.address = 0;
            return Some(described);
        }
        let aligned = described.address.is_multiple_of(dtype.size());
        let end = described.span()?.checked_add(described.address)?;
        (aligned && !tensor.data.is_null() && end <= i64::MAX as usize).then_some(described)
    }

    /// Whether every element lies in the allocation of the valid case's.
    pub fn is_honest(&self, memory: &Guarded) -> bool {
        match self.described() {
            None => true,
            Some(now) => self.holds(&now, memory),
        }
    }

    /// Whether elements have more bytes than those of the valid case.
    pub fn claims_wider_elements(&self) -> bool {
        let size = self.original.dtype.size();
        self.described().is_some_and(|now| now.dtype.size() > size)
    }

    /// Whether the elements that the valid case needs do, where a tensor now claims more of them.
    pub fn holds_what_is_needed(&self, memory: &Guarded) -> bool {
        self.needed().is_none_or(|now| self.holds(&now, memory))
    }

    /// What the tensor says now, with no more elements or bytes than the valid case has.
    pub fn needed(&self) -> Option<Described> {
        let mut now = self.described()?;
        if now.shape.len() == self.original.shape.len() {
            for (extent, needed) in now.shape.iter_mut().zip(&self.original.shape) {
                *extent = (*extent).min(*needed);
            }
        }
        if now.dtype.size() > self.original.dtype.size() {
            now.dtype = self.original.dtype;
        }
        Some(now)
    }

    fn holds(&self, now: &Described, memory: &Guarded) -> bool {
        let Some(span) = now.span() else {
            return false;
        };
        let Some((start, end)) = memory.range_around(self.original.address) else {
            return span == 0;
        };
        span == 0 || start <= now.address && now.address + span <= end
    }
}

fn compact(shape: &[i64]) -> Option<Vec<i64>> {
    let (mut strides, mut next) = (vec![1; shape.len()], 1i64);
    for (stride, extent) in strides.iter_mut().zip(shape).rev() {
        *stride = next;
        next = next.checked_mul((*extent).max(1))?;
    }
    Some(strides)
}

fn dtype_of(tensor: &folio_tensor) -> Option<DType> {
    let all = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::F8E4M3,
        DType::F8E5M2,
        DType::U8,
        DType::I32,
        DType::I64,
        DType::I8,
        DType::I4x2,
        DType::F4E2M1x2,
    ];
    let dtype = tensor.dtype;
    if (dtype.code, dtype.bits, dtype.lanes) == (6, 8, 1) {
        return Some(DType::U8);
    }
    let is = |known: &DType| {
        known.to_dlpack() == (dtype.code, dtype.bits) && dtype.lanes == known.lanes()
    };
    all.into_iter().find(is)
}

impl Struct {
    /// Takes over a struct of the library's own type, and the tensors that it points to.
    ///
    /// # Safety
    /// `T` is struct `name` of the header, and its tensor pointers are NULL or lead to live tensors.
    pub unsafe fn new<T: Copy>(name: &'static str, value: T) -> Struct {
        let (fields, size) = layout(name);
        assert_eq!(
            size,
            size_of::<T>(),
            "{name} in the header and in the library"
        );
        let mut bytes = vec![0; size];
        // SAFETY: as many bytes as the value has; the ABI's structs have no padding.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const value).cast(), bytes.as_mut_ptr(), size);
        }
        let mut tensors = Vec::new();
        for (at, field) in fields
            .iter()
            .enumerate()
            .filter(|f| f.1.kind == Kind::Tensor)
        {
            let pointer =
                u64::from_le_bytes(bytes[field.offset..][..8].try_into().expect("8 bytes"));
            if pointer != 0 {
                // SAFETY: the caller's promise.
                tensors.push((at, unsafe { block(pointer as *const folio_tensor) }));
            }
        }
        let mut made = Struct {
            name,
            fields,
            size,
            bytes,
            tensors,
            is_null: false,
        };
        made.connect();
        made
    }

    /// Lets the struct's pointers lead to its own tensors, and those to their extents.
    fn connect(&mut self) {
        for (at, block) in &mut self.tensors {
            block.tensor.shape = block.shape.as_mut_ptr();
            if !block.tensor.strides.is_null() {
                block.tensor.strides = block.strides.as_mut_ptr();
            }
            let pointer = (&raw mut block.tensor) as u64;
            let offset = self.fields[*at].offset;
            self.bytes[offset..offset + 8].copy_from_slice(&pointer.to_le_bytes());
        }
    }

    /// What a call gets.
    pub fn pointer<T>(&self) -> *const T {
        match self.is_null {
            true => std::ptr::null(),
            false => self.bytes.as_ptr().cast(),
        }
    }

    /// The field of this name.
    pub fn field(&self, name: &str) -> &Field {
        let found = self.fields.iter().find(|field| field.name == name);
        found.unwrap_or_else(|| panic!("{} has a field {name}", self.name))
    }

    /// The bits of a field, as many as it has.
    pub fn get(&self, name: &str) -> u64 {
        let field = self.field(name);
        let size = field_size(field.kind);
        let mut bits = [0; 8];
        bits[..size].copy_from_slice(&self.bytes[field.offset..][..size]);
        u64::from_le_bytes(bits)
    }

    /// The number in a float field.
    pub fn float(&self, name: &str) -> f32 {
        f32::from_bits(self.get(name) as u32)
    }

    /// Sets the bits of a field.
    pub fn set(&mut self, name: &str, bits: u64) {
        let field = self.field(name).clone();
        let size = field_size(field.kind);
        self.bytes[field.offset..][..size].copy_from_slice(&bits.to_le_bytes()[..size]);
    }

    /// Claims another size. Bytes beyond the struct are there, and hold `filler`.
    pub fn claim(&mut self, struct_size: u32, filler: u8) {
        self.set("struct_size", struct_size.into());
        if (struct_size as usize) <= 1 << 16 {
            self.bytes
                .resize(self.size.max(struct_size as usize), filler);
        }
    }

    /// The tensor of a field, unless the field is NULL.
    pub fn tensor(&self, name: &str) -> Option<&Block> {
        if self.get(name) == 0 {
            return None;
        }
        let at = self.fields.iter().position(|field| field.name == name)?;
        self.tensors.iter().find(|t| t.0 == at).map(|t| &*t.1)
    }
}

fn field_size(kind: Kind) -> usize {
    match kind {
        Kind::U32 | Kind::I32 | Kind::F32 | Kind::Dtype => 4,
        Kind::U64 | Kind::Tensor | Kind::Pointer => 8,
    }
}

/// # Safety
/// The pointer leads to a live tensor of a valid case.
unsafe fn block(pointer: *const folio_tensor) -> Box<Block> {
    // SAFETY: the caller's promise.
    let tensor = unsafe { *pointer };
    let rank = tensor.ndim as usize;
    // SAFETY: a valid tensor has as many extents and strides as dimensions; the test doors state both.
    let (shape, strides) = unsafe {
        (
            std::slice::from_raw_parts(tensor.shape, rank),
            std::slice::from_raw_parts(tensor.strides, rank),
        )
    };
    let (mut shapes, mut steps) = ([1; ROOM], [1; ROOM]);
    shapes[..rank].copy_from_slice(shape);
    steps[..rank].copy_from_slice(strides);
    let original = Described {
        address: tensor.data as usize + tensor.byte_offset as usize,
        dtype: dtype_of(&tensor).expect("a type of the library's"),
        shape: shape.to_vec(),
        strides: strides.to_vec(),
    };
    Box::new(Block {
        tensor,
        shape: shapes,
        strides: steps,
        original,
    })
}
