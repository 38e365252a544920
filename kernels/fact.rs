//! What is known of a tensor before it is computed, and the arithmetic of dims.

use abi::{DType, Dim, HostTensor};
use std::sync::Arc;

/// What is known of every value of a graph, by `ValueId`.
pub type Facts = Vec<Option<Arc<Fact>>>;

/// Type, shape and, for small host-computable tensors, contents.
#[derive(Debug, Clone)]
pub struct Fact {
    /// The element type.
    pub dtype: DType,
    /// The shape, if its rank is known.
    pub shape: Option<Vec<Dim>>,
    /// The contents, when they are known ahead of the kernels (constants, shape arithmetic).
    pub value: Option<HostTensor>,
    /// Whether it is a constant of the model, whose bytes [`crate::build::BuildCx`] can give even where `value` is not held.
    pub constant: bool,
}

impl Fact {
    /// A tensor of that type and shape.
    pub fn new(dtype: DType, shape: Vec<Dim>) -> Self {
        Self { dtype, shape: Some(shape), value: None, constant: false }
    }

    /// A tensor of that type whose rank is unknown.
    pub fn unranked(dtype: DType) -> Self {
        Self { dtype, shape: None, value: None, constant: false }
    }

    /// A tensor of that type and shape, where the shape may be of unknown rank.
    pub fn of(dtype: DType, shape: Option<Vec<Dim>>) -> Self {
        Self { dtype, shape, value: None, constant: false }
    }

    /// A tensor with known contents.
    pub fn with_value(value: HostTensor) -> Self {
        let shape = value.shape().iter().map(|&d| Dim::Known(d)).collect();
        Self { dtype: value.dtype(), shape: Some(shape), value: Some(value), constant: false }
    }

    /// The same shape with another type, contents unknown.
    pub fn with_dtype(&self, dtype: DType) -> Self {
        Self::of(dtype, self.shape.clone())
    }

    /// The rank, if known.
    pub fn rank(&self) -> Option<usize> {
        self.shape.as_ref().map(Vec::len)
    }

    /// Dim `axis` (negative from the end); `Unknown` when the rank is unknown or has no such axis.
    pub fn dim(&self, axis: isize) -> Dim {
        let Some(shape) = &self.shape else {
            return Dim::Unknown;
        };
        let index = if axis < 0 { axis + shape.len() as isize } else { axis };
        usize::try_from(index).ok().and_then(|i| shape.get(i).cloned()).unwrap_or(Dim::Unknown)
    }

    /// The shape when every dim is known.
    pub fn known_shape(&self) -> Option<Vec<usize>> {
        self.shape.as_ref()?.iter().map(Dim::known).collect()
    }

    /// Number of elements when every dim is known (and the product fits).
    pub fn elements(&self) -> Option<usize> {
        self.known_shape()?.iter().try_fold(1usize, |n, &d| n.checked_mul(d))
    }

    /// Contents as i64 when known and of int32 or int64 type.
    pub fn ints(&self) -> Option<Vec<i64>> {
        self.value.as_ref()?.to_i64s()
    }
}

/// `a + b`, where an unknown operand makes it unknown.
pub fn add(a: &Dim, b: &Dim) -> Dim {
    match (a, b) {
        (Dim::Known(a), Dim::Known(b)) => a.checked_add(*b).map_or(Dim::Unknown, Dim::Known),
        (Dim::Known(0), other) | (other, Dim::Known(0)) => other.clone(),
        _ => Dim::Unknown,
    }
}

/// `a * b`, where an unknown operand makes it unknown (but for 0 and 1).
pub fn mul(a: &Dim, b: &Dim) -> Dim {
    match (a, b) {
        (Dim::Known(a), Dim::Known(b)) => a.checked_mul(*b).map_or(Dim::Unknown, Dim::Known),
        (Dim::Known(1), other) | (other, Dim::Known(1)) => other.clone(),
        (Dim::Known(0), _) | (_, Dim::Known(0)) => Dim::Known(0),
        _ => Dim::Unknown,
    }
}

/// `a / n` when it is known.
pub fn div(a: &Dim, n: usize) -> Dim {
    match a {
        Dim::Known(a) if n > 0 => Dim::Known(a / n),
        other if n == 1 => other.clone(),
        _ => Dim::Unknown,
    }
}

/// Two claims about one dim: the more certain one, or `None` when they contradict each other.
pub fn unify(a: &Dim, b: &Dim) -> Option<Dim> {
    match (a, b) {
        (Dim::Known(x), Dim::Known(y)) => (x == y).then(|| a.clone()),
        (Dim::Known(_), _) => Some(a.clone()),
        (_, Dim::Known(_)) => Some(b.clone()),
        (Dim::Unknown, _) => Some(b.clone()),
        _ => Some(a.clone()),
    }
}

/// NumPy broadcasting of several shapes; `None` when they do not broadcast.
pub fn broadcast(shapes: &[&[Dim]]) -> Option<Vec<Dim>> {
    let rank = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let mut out = vec![Dim::Known(1); rank];
    for shape in shapes {
        let lead = rank - shape.len();
        for (slot, dim) in out[lead..].iter_mut().zip(*shape) {
            *slot = match (&*slot, dim) {
                (Dim::Known(1), other) => other.clone(),
                (kept, Dim::Known(1)) => kept.clone(),
                (Dim::Known(a), Dim::Known(b)) if a != b => return None,
                // One side is known and not 1: the other can only be 1 or equal.
                (kept @ Dim::Known(_), _) => kept.clone(),
                (_, other @ Dim::Known(_)) => other.clone(),
                (a, b) if a == b => a.clone(),
                _ => Dim::Unknown,
            };
        }
    }
    Some(out)
}

/// Resolves a possibly negative axis; `None` when it is out of range.
pub fn axis(axis: i64, rank: usize) -> Option<usize> {
    let rank = i64::try_from(rank).ok()?;
    let index = if axis < 0 { axis + rank } else { axis };
    (0..rank).contains(&index).then_some(index as usize)
}
