//! What a kernel launch is, written down: function, geometry and one parameter struct with symbolic addresses.

use abi::cuda::{Function, LaunchShape};
use smallvec::SmallVec;

/// An address in device memory that is known only when a Run binds it, or an absolute one.
///
/// Two bits say what it is relative to, 14 bits which graph input or output, 48 bits hold the offset in bytes.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct DevPtr(u64);

/// What a [`DevPtr`] is relative to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Base {
    /// Nothing: the offset is the address (0: null).
    Absolute,
    /// The Run's workspace.
    Workspace,
    /// A graph input's first byte.
    Input(usize),
    /// A graph output's first byte.
    Output(usize),
}

impl DevPtr {
    /// No address: an absent tensor.
    pub const NULL: Self = Self(0);
    /// Graph inputs and outputs that can be told apart.
    pub const MAX_IO: usize = 1 << 14;
    const OFFSET: u64 = (1 << 48) - 1;

    /// `offset` bytes behind `base`. Panics when either does not fit: 2^48 bytes, [`Self::MAX_IO`] inputs and outputs
    /// (the claim bounds them).
    pub fn new(base: Base, offset: u64) -> Self {
        let (tag, index) = match base {
            Base::Absolute => (0, 0),
            Base::Workspace => (1, 0),
            Base::Input(i) => (2, i),
            Base::Output(j) => (3, j),
        };
        assert!(offset <= Self::OFFSET && index < Self::MAX_IO, "an address out of range");
        Self(tag << 62 | (index as u64) << 48 | offset)
    }

    /// An address of the device.
    pub fn absolute(address: u64) -> Self {
        Self::new(Base::Absolute, address)
    }

    /// The address `bytes` further on; null stays null.
    pub fn plus(self, bytes: usize) -> Self {
        if self.is_null() {
            return self;
        }
        Self::new(self.base(), self.offset() + bytes as u64)
    }

    /// Whether this is no address.
    pub fn is_null(self) -> bool {
        self.0 == 0
    }

    /// What it is relative to.
    pub fn base(self) -> Base {
        let index = (self.0 >> 48 & (Self::MAX_IO as u64 - 1)) as usize;
        match self.0 >> 62 {
            0 => Base::Absolute,
            1 => Base::Workspace,
            2 => Base::Input(index),
            _ => Base::Output(index),
        }
    }

    /// Bytes behind the base.
    pub fn offset(self) -> u64 {
        self.0 & Self::OFFSET
    }

    /// The address once the bases are known.
    pub fn bind(self, bases: &Bases<'_>) -> u64 {
        let base = match self.base() {
            Base::Absolute => 0,
            Base::Workspace => bases.workspace,
            Base::Input(i) => bases.inputs[i],
            Base::Output(j) => bases.outputs[j],
        };
        base + self.offset()
    }
}

/// The addresses of one Run.
#[derive(Debug, Clone, Copy)]
pub struct Bases<'a> {
    /// The workspace.
    pub workspace: u64,
    /// The graph's inputs.
    pub inputs: &'a [u64],
    /// The graph's outputs.
    pub outputs: &'a [u64],
}

/// A kernel's parameter struct: plain data without padding, whose [`DevPtr`] fields are known.
/// Implemented by [`kernel_params!`](crate::kernel_params) alone.
///
/// # Safety
/// `Self` is `repr(C)`, has no padding, and `POINTERS` are the offsets of its [`DevPtr`]s.
pub unsafe trait Params: Copy + 'static {
    /// Byte offsets of the addresses.
    const POINTERS: &'static [u16];
}

/// A type that may be a field of a parameter struct.
///
/// # Safety
/// Plain data without padding, laid out as the device's type of the same kind.
pub unsafe trait Field: Copy {
    /// Byte offsets of the addresses in it, or in each of its elements.
    const POINTERS: &'static [u16] = &[];
    /// Elements, for arrays (of arrays).
    const COUNT: usize = 1;
}

// SAFETY: a 64-bit address.
unsafe impl Field for DevPtr {
    const POINTERS: &'static [u16] = &[0];
}

macro_rules! fields {
    ($($t:ty),*) => {$(
        // SAFETY: a plain number.
        unsafe impl Field for $t {}
    )*};
}
fields!(u8, i32, u32, i64, u64, f32, f64);

// SAFETY: an array of fields has no padding of its own.
unsafe impl<F: Field, const N: usize> Field for [F; N] {
    const POINTERS: &'static [u16] = F::POINTERS;
    const COUNT: usize = N * F::COUNT;
}

/// Declares the parameter struct of a kernel, field for field as in its `.cu`:
/// `kernel_params! { /// Doc. struct P { x: DevPtr, n: u32, eps: f32 } }`. Fields are [`Field`]s; padding is an error,
/// so order them by size, largest first, and fill up with a `pad` field.
#[macro_export]
macro_rules! kernel_params {
    ($(#[$doc:meta])* $vis:vis struct $name:ident {
        $($(#[$field_doc:meta])* $field_vis:vis $field:ident : $ty:ty),+ $(,)?
    }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        $vis struct $name { $($(#[$field_doc])* $field_vis $field: $ty,)+ }

        // SAFETY: `repr(C)`; the sizes add up, so that there is no padding; the offsets are the compiler's.
        unsafe impl $crate::cuda::Params for $name {
            const POINTERS: &'static [u16] = {
                use $crate::cuda::Field;
                const COUNT: usize = 0 $(+ <$ty as Field>::POINTERS.len() * <$ty as Field>::COUNT)+;
                const OFFSETS: [u16; COUNT] = {
                    let (mut offsets, mut at) = ([0u16; COUNT], 0);
                    $(
                        let (inner, count) = (<$ty as Field>::POINTERS, <$ty as Field>::COUNT);
                        let mut i = 0;
                        while i < inner.len() * count {
                            let element = i / inner.len() * (size_of::<$ty>() / count);
                            offsets[at] = (std::mem::offset_of!($name, $field) + element) as u16 + inner[i % inner.len()];
                            at += 1;
                            i += 1;
                        }
                    )+
                    assert!(at == COUNT);
                    offsets
                };
                assert!(0 $(+ size_of::<$ty>())+ == size_of::<$name>(), "a parameter struct has padding");
                &OFFSETS
            };
        }
    };
}

/// One kernel launch.
#[derive(Clone)]
pub struct Launch {
    /// What runs.
    pub function: Function,
    /// Grid, block and dynamic shared memory.
    pub shape: LaunchShape,
    params: SmallVec<[u8; 128]>,
    pointers: &'static [u16],
}

impl Launch {
    /// Writes a launch down.
    pub fn new<P: Params>(function: &Function, shape: LaunchShape, params: &P) -> Self {
        // SAFETY: `Params` promises plain data without padding.
        let bytes = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(params).cast::<u8>(), size_of::<P>()) };
        Self { function: function.clone(), shape, params: SmallVec::from_slice(bytes), pointers: P::POINTERS }
    }

    /// The symbolic addresses.
    pub fn addresses(&self) -> impl Iterator<Item = DevPtr> + '_ {
        self.pointers.iter().map(|&at| DevPtr(self.word(at)))
    }

    /// The parameter struct with its addresses bound.
    pub fn bind(&self, bases: &Bases<'_>) -> SmallVec<[u8; 128]> {
        let mut bound = self.params.clone();
        for &at in self.pointers {
            let at = usize::from(at);
            let address = DevPtr(self.word(at as u16)).bind(bases);
            bound[at..at + 8].copy_from_slice(&address.to_ne_bytes());
        }
        bound
    }

    /// Whether both launch the same function.
    pub fn same_function(&self, other: &Self) -> bool {
        self.function.is_same(&other.function)
    }

    /// Whether geometry and symbolic parameters are the same.
    pub fn same_parameters(&self, other: &Self) -> bool {
        self.shape == other.shape && self.params == other.params
    }

    fn word(&self, at: u16) -> u64 {
        let at = usize::from(at);
        let bytes = self.params[at..at + 8].try_into().expect("the slice has eight bytes");
        u64::from_ne_bytes(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    kernel_params! {
        /// For the tests.
        struct Sample { x: DevPtr, many: [DevPtr; 3], pairs: [Pair; 2], y: DevPtr, n: u32, scale: f32 }
    }

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Pair(u64, DevPtr);

    // SAFETY: two 64-bit words.
    unsafe impl Field for Pair {
        const POINTERS: &'static [u16] = &[8];
    }

    #[test]
    fn pointers_are_found() {
        assert_eq!(Sample::POINTERS, [0, 8, 16, 24, 40, 56, 64]);
        assert_eq!(size_of::<Sample>(), 80);
    }

    proptest! {
        #[test]
        fn an_address_is_its_base_and_offset(tag in 0..4usize, index in 0..DevPtr::MAX_IO, offset in 0u64..1 << 40, more in 1usize..1 << 20) {
            let base = [Base::Absolute, Base::Workspace, Base::Input(index), Base::Output(index)][tag];
            let ptr = DevPtr::new(base, offset + 1).plus(more);
            prop_assert_eq!((ptr.base(), ptr.offset()), (base, offset + 1 + more as u64));
            let (inputs, outputs) = (vec![7 << 32; index + 1], vec![9 << 32; index + 1]);
            let bases = Bases { workspace: 5 << 32, inputs: &inputs, outputs: &outputs };
            let first = [0, 5 << 32, 7 << 32, 9 << 32][tag];
            prop_assert_eq!(ptr.bind(&bases), first + offset + 1 + more as u64);
        }
    }
}
