//! Elementwise loops: blocks of a few hundred elements are brought into the type of the computation, worked on by
//! one contiguous loop an op, and rounded once.

use crate::cpu::isa::{Isa, Job, dispatch};
use crate::cpu::number::Stored;
use crate::cpu::view::View;
use crate::kernel::{Tensor, TensorMut};
use crate::par::{Par, SharedMut};
use crate::settings::Tier;
use abi::tensor::Element;
use std::ops::Range;

/// Elements in a block: small enough for the first-level cache, large enough to hide a loop's start.
pub const BLOCK: usize = 256;

/// A loop that [`vectorize`] compiles for every tier.
pub trait Task {
    /// Whether to compile it for every tier: worth it for few types, and each costs compile time.
    const SIMD: bool;
    /// Must be `#[inline(always)]`, as must be what it calls.
    fn run(self);
}

/// Runs `task` in the tier's instruction set.
#[inline]
pub fn vectorize<T: Task>(tier: Tier, task: T) {
    struct Run<T>(T);
    impl<T: Task> Job for Run<T> {
        type Out = ();
        #[inline(always)]
        fn run<I: Isa>(self) {
            self.0.run();
        }
    }
    if T::SIMD {
        dispatch(tier, Run(task));
    } else {
        task.run();
    }
}

/// A function of one number and two parameters.
pub trait Op1<C> {
    /// What it gives.
    type R;
    /// The function; `#[inline(always)]`.
    fn apply(x: C, p: [C; 2]) -> Self::R;
}

/// A function of two numbers.
pub trait Op2<C> {
    /// What it gives.
    type R;
    /// The function; `#[inline(always)]`.
    fn apply(a: C, b: C) -> Self::R;
}

/// An [`Op1`] over slices of one length.
pub type Loop1<C, R> = fn(Tier, &[C], &mut [R], [C; 2]);
/// An [`Op2`] over slices of one length.
pub type Loop2<C, R> = fn(Tier, &[C], &[C], &mut [R]);

/// The loop of `O`.
pub fn loop1<O: Op1<C>, C: Stored>(tier: Tier, xs: &[C], out: &mut [O::R], p: [C; 2]) {
    struct Map<'a, O: Op1<C>, C>(&'a [C], &'a mut [O::R], [C; 2]);
    impl<O: Op1<C>, C: Stored> Task for Map<'_, O, C> {
        const SIMD: bool = C::SIMD;
        #[inline(always)]
        fn run(self) {
            for (x, out) in self.0.iter().zip(self.1) {
                *out = O::apply(*x, self.2);
            }
        }
    }
    vectorize(tier, Map::<O, C>(xs, out, p));
}

/// The loop of `O`.
pub fn loop2<O: Op2<C>, C: Stored>(tier: Tier, a: &[C], b: &[C], out: &mut [O::R]) {
    struct Zip<'a, O: Op2<C>, C>(&'a [C], &'a [C], &'a mut [O::R]);
    impl<O: Op2<C>, C: Stored> Task for Zip<'_, O, C> {
        const SIMD: bool = C::SIMD;
        #[inline(always)]
        fn run(self) {
            for ((a, b), out) in self.0.iter().zip(self.1).zip(self.2) {
                *out = O::apply(*a, *b);
            }
        }
    }
    vectorize(tier, Zip::<O, C>(a, b, out));
}

/// Reads a strided tensor block by block in the type of the computation.
pub struct Reader<'a, T: Stored> {
    data: &'a [T],
    view: &'a View,
    raw: [T; BLOCK],
    block: [T::C; BLOCK],
    filled: bool,
}

impl<'a, T: Stored> Reader<'a, T> {
    /// Reads `data` in `view`'s order.
    pub fn new(data: &'a [T], view: &'a View) -> Self {
        Self { data, view, raw: [T::default(); BLOCK], block: [T::C::default(); BLOCK], filled: false }
    }

    /// Elements `range` of the walk, at most [`BLOCK`].
    #[inline]
    pub fn read(&mut self, range: Range<usize>) -> &[T::C] {
        let n = range.len();
        if self.view.is_scalar() {
            if !self.filled {
                self.block.fill(self.data[self.view.offset() as usize].load());
                self.filled = true;
            }
            return &self.block[..n];
        }
        let raw = match self.view.contiguous(&range) {
            Some(start) => &self.data[start..start + n],
            None => {
                self.view.gather(self.data, range, &mut self.raw[..n]);
                &self.raw[..n]
            }
        };
        match T::as_computed(raw) {
            Some(computed) => computed,
            None => {
                T::load_slice(raw, &mut self.block[..n]);
                &self.block[..n]
            }
        }
    }
}

/// Fills `out` block by block: `f` computes the elements of a range with the state that `start` made for a
/// task. `grain`: elements worth a task.
pub fn blocks<R: Stored, S>(
    par: Par<'_>,
    out: &mut [R],
    grain: usize,
    start: impl Fn() -> S + Sync,
    f: impl Fn(&mut S, Range<usize>, &mut [R::C]) + Sync,
) {
    let n = out.len();
    let shared = SharedMut::new(out);
    par.ranges(n, grain, |task| {
        // SAFETY: the ranges of one loop do not overlap.
        let out = unsafe { shared.slice(task.clone()) };
        let mut state = start();
        let mut computed = [R::C::default(); BLOCK];
        for (i, out) in out.chunks_mut(BLOCK).enumerate() {
            let first = task.start + i * BLOCK;
            let range = first..first + out.len();
            match R::as_computed_mut(out) {
                Some(out) => f(&mut state, range, out),
                None => {
                    let computed = &mut computed[..range.len()];
                    f(&mut state, range, computed);
                    R::store_slice(computed, out);
                }
            }
        }
    });
}

/// `out[i] = f(x[i])` for tensors of one shape.
pub fn map1<T: Stored, R: Stored>(
    par: Par<'_>,
    tier: Tier,
    x: &[T],
    out: &mut [R],
    f: Loop1<T::C, R::C>,
    p: [T::C; 2],
    grain: usize,
) {
    let view = View::new(0, [(x.len(), 1)]);
    let start = || Reader::new(x, &view);
    blocks(par, out, grain, start, |x, range, out| f(tier, x.read(range), out, p));
}

/// `out[i] = f(a[i], b[i])` where `a` and `b` are read through views of `out`'s shape.
pub fn map2<T: Stored, R: Stored>(
    par: Par<'_>,
    tier: Tier,
    (a, a_view): (&[T], &View),
    (b, b_view): (&[T], &View),
    out: &mut [R],
    f: Loop2<T::C, R::C>,
    grain: usize,
) {
    let start = || (Reader::new(a, a_view), Reader::new(b, b_view));
    blocks(par, out, grain, start, |(a, b), range, out| f(tier, a.read(range.clone()), b.read(range), out));
}

/// The elements of `tensor` as words of its element size, whatever its type; `W` must have that size.
pub fn words<'a, W: Element>(tensor: &Tensor<'a>) -> &'a [W] {
    let bytes = tensor.bytes();
    assert_eq!(tensor.dtype().bits(), Some(8 * size_of::<W>()), "the element size");
    if bytes.is_empty() {
        return &[];
    }
    // SAFETY: the tensor is aligned for its type, whose size (and so alignment at most) is `W`'s; `W` is plain data.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<W>()) }
}

/// As [`words`], writable.
pub fn words_mut<'a, W: Element>(tensor: &'a mut TensorMut<'_>) -> &'a mut [W] {
    assert_eq!(tensor.dtype().bits(), Some(8 * size_of::<W>()), "the element size");
    let bytes = tensor.bytes();
    if bytes.is_empty() {
        return &mut [];
    }
    // SAFETY: as in `words`; the borrow of the bytes is unique and passes on.
    unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len() / size_of::<W>()) }
}

/// Runs `$body` with `$W` naming an unsigned word of the element size of a `DType` of whole bytes: moving data does
/// not look at it.
#[macro_export]
macro_rules! with_word {
    ($dtype:expr, $W:ident => $body:expr) => {
        match $dtype.bits() {
            Some(8) => {
                type $W = u8;
                $body
            }
            Some(16) => {
                type $W = u16;
                $body
            }
            Some(32) => {
                type $W = u32;
                $body
            }
            Some(64) => {
                type $W = u64;
                $body
            }
            _ => unreachable!("the claim admits only elements of 1, 2, 4 or 8 bytes"),
        }
    };
}
