//! Output shapes, and every check that shapes alone decide.

use super::{Attrs, slot};
use crate::fact::{Fact, add, div, mul};
use crate::op::NodeCx;
use abi::{Dim, Result};

/// The sizes of one node, in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dims {
    pub batch: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub rows: usize,
    pub new_keys: usize,
    pub past: usize,
    pub head: usize,
    pub v_head: usize,
    /// Inputs are `[B, rows, heads * head]`, not `[B, heads, rows, head]`.
    pub flat: bool,
}

impl Dims {
    /// From the shapes of Q, K, V and past_key; the message names the input and what it should be.
    pub fn new(attrs: &Attrs, q: &[usize], k: &[usize], v: &[usize], past: Option<&[usize]>) -> Result<Self, Wrong> {
        let past = match past {
            None => 0,
            Some(p) => *p.get(2).ok_or(Wrong(slot::PAST_KEY, "4 dimensions".into()))?,
        };
        let dims = match (q, k, v) {
            (&[batch, q_heads, rows, head], &[_, kv_heads, new_keys, _], &[.., v_head]) if v.len() == 4 => {
                Self { batch, q_heads, kv_heads, rows, new_keys, past, head, v_head, flat: false }
            }
            (&[batch, rows, q_hidden], &[_, new_keys, k_hidden], &[_, _, v_hidden]) => {
                let (n, kv) = (attrs.q_heads, attrs.kv_heads);
                for (s, hidden, heads) in [(slot::Q, q_hidden, n), (slot::K, k_hidden, kv), (slot::V, v_hidden, kv)] {
                    if heads == 0 || hidden % heads != 0 {
                        return Err(Wrong(s, format!("a last dimension that is a multiple of {heads} heads")));
                    }
                }
                let (head, v_head) = (q_hidden / n, v_hidden / kv);
                Self { batch, q_heads: n, kv_heads: kv, rows, new_keys, past, head, v_head, flat: true }
            }
            _ => return Err(Wrong(slot::Q, "3 or 4 dimensions, the same for Q, K and V".into())),
        };
        if dims.kv_heads == 0 || !dims.q_heads.is_multiple_of(dims.kv_heads) {
            return Err(Wrong(slot::K, format!("a number of heads that divides {}, those of Q", dims.q_heads)));
        }
        dims.expect(slot::K, k, dims.new_keys, dims.head)?;
        dims.expect(slot::V, v, dims.new_keys, dims.v_head)?;
        Ok(dims)
    }

    fn expect(&self, slot: usize, got: &[usize], rows: usize, head: usize) -> Result<(), Wrong> {
        let expected = match self.flat {
            true => vec![self.batch, rows, self.kv_heads * head],
            false => vec![self.batch, self.kv_heads, rows, head],
        };
        if got == expected { Ok(()) } else { Err(Wrong(slot, text(&expected))) }
    }

    /// T.
    pub fn keys(&self) -> usize {
        self.past + self.new_keys
    }
}

/// An input slot and what its shape should have been.
#[derive(Debug)]
pub(super) struct Wrong(pub usize, pub String);

fn text(shape: &[usize]) -> String {
    shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
}

const NAMES: [&str; 7] = ["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"];

/// Facts of Y, present_key, present_value and qk_matmul_output.
pub(super) fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let attrs = Attrs::parse(cx).map_err(|d| abi::Error::Internal(d.0))?;
    check(cx, &attrs)?;
    let (q, k, v) = (cx.required(slot::Q)?, cx.required(slot::K)?, cx.required(slot::V)?);
    let dtype = q.dtype;
    let Some(rank) = q.rank() else { return Ok((0..4).map(|_| Fact::unranked(dtype)).collect()) };
    let past = cx.input(slot::PAST_KEY).map_or(Dim::Known(0), |p| p.dim(2));
    let batch = q.dim(0);
    let (heads, kv_heads, rows, new_keys, head, v_head) = if rank == 3 {
        let (n, kv) = (attrs.q_heads, attrs.kv_heads);
        let (head, v_head) = (div(&q.dim(2), n), div(&v.dim(2), kv));
        (Dim::Known(n), Dim::Known(kv), q.dim(1), k.dim(1), head, v_head)
    } else {
        (q.dim(1), k.dim(1), q.dim(2), k.dim(2), q.dim(3), v.dim(3))
    };
    let keys = add(&past, &new_keys);
    let y = if rank == 3 {
        vec![batch.clone(), rows.clone(), mul(&heads, &v_head)]
    } else {
        vec![batch.clone(), heads.clone(), rows.clone(), v_head.clone()]
    };
    Ok(vec![
        Fact::new(dtype, y),
        Fact::new(dtype, vec![batch.clone(), kv_heads.clone(), keys.clone(), head]),
        Fact::new(dtype, vec![batch.clone(), kv_heads, keys.clone(), v_head]),
        Fact::new(dtype, vec![batch, heads, rows, keys]),
    ])
}

/// Checks every shape that is known whole.
fn check(cx: &NodeCx, attrs: &Attrs) -> Result<()> {
    let shape = |s: usize| cx.input(s).and_then(Fact::known_shape);
    let wrong = |Wrong(s, expected): Wrong| {
        let got = shape(s).map_or("an unknown shape".into(), |got| format!("shape {}", text(&got)));
        cx.error(format_args!("input {s} ({})", NAMES[s]), got, expected)
    };
    let (Some(q), Some(k), Some(v)) = (shape(slot::Q), shape(slot::K), shape(slot::V)) else { return Ok(()) };
    let past = shape(slot::PAST_KEY);
    if cx.has_input(slot::PAST_KEY) && past.is_none() {
        return Ok(());
    }
    let d = Dims::new(attrs, &q, &k, &v, past.as_deref()).map_err(wrong)?;
    for (s, head) in [(slot::PAST_KEY, d.head), (slot::PAST_VALUE, d.v_head)] {
        let expected = [d.batch, d.kv_heads, d.past, head];
        if shape(s).is_some_and(|got| got != expected) {
            return Err(wrong(Wrong(s, text(&expected))));
        }
    }
    if shape(slot::LENGTHS).is_some_and(|got| got != [d.batch]) {
        return Err(wrong(Wrong(slot::LENGTHS, d.batch.to_string())));
    }
    let Some(mask) = shape(slot::MASK) else { return Ok(()) };
    let full = [d.batch, d.q_heads, d.rows, d.keys()];
    // From opset 24 on a mask may stop short of the last keys, which it then hides.
    let short = cx.node().since_version >= 24;
    let fits = mask.len() <= 4
        && mask
            .iter()
            .rev()
            .zip(full.iter().rev())
            .enumerate()
            .all(|(i, (&m, &f))| m == 1 || m == f || (i == 0 && short && m < f));
    if !fits {
        return Err(wrong(Wrong(slot::MASK, format!("a shape that broadcasts to {}", text(&full)))));
    }
    Ok(())
}
