//! The mixer's kernel: what each member does for it, and its launch.
//!
//! Dims as in `mixer.cuh`.

use super::view::View;
use crate::cpu::rotary::Pairs;
use crate::cuda::{Buffer, DevPtr, Device, DeviceTensor, LaunchCx, linear, suffix};
use crate::fuse::cluster::{Built, ClusterKernel, Member, Occurrence};
use crate::kernel_params;
use crate::ops::group_query_attention::{Attrs, Dims, slot};
use crate::ops::rotary_embedding::{self as rotary, Form, Layout};
use abi::cuda::Function;
use abi::{DType, Error, Result, ValueId};

kernel_params! {
    /// As in `mixer.cuh`.
    struct MixerParams {
        q: DevPtr, k: DevPtr, v: DevPtr, gate: DevPtr,
        past_key: DevPtr, past_value: DevPtr, keys: DevPtr, values: DevPtr, out: DevPtr,
        q_weight: DevPtr, k_weight: DevPtr,
        cos: DevPtr, sin: DevPtr, positions: DevPtr, streams: DevPtr, sink: DevPtr,
        partial: DevPtr, counters: DevPtr,
        length_data: DevPtr, total: DevPtr, lengths: [u32; 8],
        strides: [[i64; 2]; 4],
        batch: u32, heads: u32, kv_heads: u32, dim: u32,
        half: u32, interleaved: u32, rotary: u32, angles: u32, positions_row: u32, wide_angles: u32,
        has_sink: u32, splits: u32, granule: u32, group: u32, early: u32, left: i32,
        q_epsilon: f32, k_epsilon: f32, scale: f32, softcap: f32,
    }
}

/// Threads of a block.
const THREADS: u32 = 256;
const WARPS: usize = 8;
/// The most parts that a block joins (`kMostParts`).
const MOST_PARTS: usize = 128;
/// Shared memory that the kernels have besides what a launch asks for.
const STATIC_SHARED: usize = 32 << 10;

/// Positions of the angles, as in `mixer.cuh`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Positions {
    None,
    Cache,
    Each,
    First,
    Streams,
    Entry,
}

/// A kernel's bounds.
struct Variant {
    /// Whether it is one of `swift.cuh`.
    swift: bool,
    /// Head sizes from..=to.
    dims: (usize, usize),
    /// Query heads of a block.
    rows: usize,
    /// Keys that a block takes in one step.
    granule: usize,
    function: Function,
}

/// The kernels of one type, the best first.
fn variants(device: &Device, dtype: DType) -> Result<Vec<Variant>> {
    let t = suffix(dtype);
    let bounds: &[(&str, usize, usize)] = match dtype {
        DType::F32 => &[("to_128", 8, 128), ("to_256", 8, 256)],
        _ => &[("64", 64, 64), ("128", 128, 128), ("256", 256, 256), ("to_256", 8, 256), ("to_512", 8, 512)],
    };
    let (image, rows, tile) = if dtype == DType::F32 { ("floats", 4, 8) } else { ("halves", 8, 16) };
    let variant = |&(name, from, to): &(&str, usize, usize)| {
        let function = device.function(&format!("fuse_attention_mixer_{image}"), &format!("mix_{t}_{name}"))?;
        Ok(Variant { swift: from == to, dims: (from, to), rows, granule: tile * WARPS, function })
    };
    bounds.iter().map(variant).collect()
}

/// What a member does to a tensor on its way.
struct Link {
    member: usize,
    act: Act,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Act {
    /// Another shape.
    Shape,
    /// This output of a Split along an axis.
    Piece(usize, i64),
    Norm,
    Rotary,
    /// Element by element.
    Map,
}

/// The kernel of one occurrence.
struct Mixer {
    attrs: Attrs,
    dtype: DType,
    /// The way to query, key, value and gate, from the first member on.
    ways: [Vec<Link>; 4],
    gated: bool,
    /// The member that rotates the query, and its attributes.
    rotary: Option<(usize, rotary::Attrs)>,
    streams: Buffer,
    /// Of query and key: the member that normalises it, and its epsilon.
    norms: [Option<(usize, f32)>; 2],
    variants: Vec<Variant>,
}

pub(super) fn build(found: &Occurrence<'_>) -> Result<Built> {
    let attention = found.node(0);
    let attrs = Attrs::parse(&attention).map_err(|d| Error::Internal(d.0))?;
    let dtype = attention.required(slot::QUERY)?.dtype;
    if !attrs.causal || attrs.window_cache || attention.has_input(slot::BIAS) {
        return Ok(None);
    }
    let gated = found.members() > 1 && found.node(1).node().op_type == "Mul";
    let input = |slot: usize| attention.node().inputs.get(slot).copied().flatten();
    let own = attention.node().outputs.first().copied().flatten();
    let gate = gated.then(|| found.node(1).node().inputs.iter().flatten().copied().find(|&v| Some(v) != own)).flatten();
    let ways = [input(slot::QUERY), input(slot::KEY), input(slot::VALUE), gate].map(|value| way(found, value));
    let of = |way: &[Link], act: Act| way.iter().find(|link| link.act == act).map(|link| link.member);
    let epsilon = |member: usize| (member, found.node(member).float("epsilon", 1e-5));
    let norms = [0, 1].map(|i| of(&ways[i], Act::Norm).map(epsilon));
    let rotary = match of(&ways[0], Act::Rotary) {
        None => None,
        Some(member) => {
            let attrs = rotary::Attrs::parse(&found.node(member)).map_err(|d| Error::Internal(d.0))?;
            Some((member, attrs))
        }
    };
    let streams = found.device.upload(rotary.as_ref().map_or(&[], |(_, attrs)| &attrs.streams))?;
    let variants = variants(found.device, dtype)?;
    Ok(Some(Box::new(Mixer { attrs, dtype, ways, gated, rotary, streams, norms, variants })))
}

/// The members that lead to `value`.
fn way(found: &Occurrence<'_>, value: Option<ValueId>) -> Vec<Link> {
    let mut links = Vec::new();
    let Some(mut value) = value else { return links };
    let makes = |value: ValueId| {
        (0..found.members()).find_map(|m| {
            let outputs = &found.node(m).node().outputs;
            outputs.iter().position(|&v| v == Some(value)).map(|slot| (m, slot))
        })
    };
    while let Some((member, slot)) = makes(value) {
        let node = found.node(member);
        let act = match node.node().op_type.as_str() {
            "Split" => Act::Piece(slot, node.int("axis", 0)),
            "SimplifiedLayerNormalization" | "RMSNormalization" => Act::Norm,
            "RotaryEmbedding" | "MRotaryEmbedding" => Act::Rotary,
            "Cast" | "Sigmoid" => Act::Map,
            _ => Act::Shape,
        };
        links.push(Link { member, act });
        let Some(from) = node.node().inputs.first().copied().flatten() else { break };
        value = from;
    }
    links.reverse();
    links
}

/// Where the heads `[B, n, H]` of a tensor lie.
#[derive(Clone, Copy)]
struct Heads {
    ptr: DevPtr,
    strides: [i64; 2],
}

const NOWHERE: Heads = Heads { ptr: DevPtr::NULL, strides: [0; 2] };

/// Angles of the launch.
struct Angles<'a> {
    cos: DeviceTensor<'a>,
    sin: DeviceTensor<'a>,
    ids: Option<DeviceTensor<'a>>,
    positions: Positions,
    pairs: Pairs,
}

impl Mixer {
    /// Where `heads` heads of the tensor at the end of a way lie, behind the first `skipped`; `last` is the tensor
    /// there. `None` where the ways' members do something else than the kernel.
    fn heads(
        &self,
        members: &[Member<'_>],
        way: &[Link],
        last: DeviceTensor<'_>,
        d: &Dims,
        (skipped, heads, all): (usize, usize, usize),
    ) -> Option<Heads> {
        let root = way.first().map_or(Some(last), |link| members[link.member].input(0))?;
        let mut view = View::whole(root.shape);
        for link in way {
            let member = &members[link.member];
            match link.act {
                Act::Shape => view = view.reshaped(member.output(0)?.shape)?,
                Act::Piece(slot, axis) => {
                    let axis = crate::fact::axis(axis, member.input(0)?.shape.len())?;
                    let mut sizes = (0..=slot).map(|s| Some(*member.output(s)?.shape.get(axis)?));
                    let sizes = sizes.by_ref().collect::<Option<Vec<_>>>()?;
                    let start = sizes[..slot].iter().sum();
                    view = view.piece(axis, start, sizes[slot])?;
                }
                Act::Norm if member.input(0)?.shape.last() != Some(&d.head) => return None,
                Act::Norm | Act::Map => {}
                Act::Rotary => self.check_rotary(member, d, heads)?,
            }
        }
        let dims = view.strided(&[d.batch, all, d.head])?;
        let [batch, head, element] = [0, 1, 2].map(|i| dims[i].1);
        if (root.dtype, element) != (self.dtype, 1) {
            return None;
        }
        let at = view.offset + skipped * head;
        Some(Heads { ptr: root.ptr.plus(root.dtype.bytes(at)?), strides: [batch as i64, head as i64] })
    }

    /// Nothing when the member rotates just these heads.
    fn check_rotary(&self, member: &Member<'_>, d: &Dims, heads: usize) -> Option<()> {
        let attrs = &self.rotary.as_ref()?.1;
        let half = *member.input(attrs.form.cos())?.shape.last()?;
        // The key's may have another number of heads than the query's.
        let attrs = rotary::Attrs { heads: if attrs.heads == 0 { 0 } else { heads }, ..attrs.clone() };
        let l = Layout::new(&attrs, member.input(0)?.shape, half).ok()?;
        ((l.batch, l.rows, l.heads, l.head) == (d.batch, 1, heads, d.head)).then_some(())
    }

    /// Angles of queries and keys, if there are any; `None` where the kernel does not know such.
    fn angles<'a>(&self, members: &[Member<'a>]) -> Option<Option<Angles<'a>>> {
        if let Some((member, attrs)) = &self.rotary {
            let (member, form) = (&members[*member], attrs.form);
            let ids = member.input(form.positions());
            let positions = match (form, ids) {
                (_, None) => Positions::Entry,
                (Form::Contrib, Some(ids)) if ids.shape.len() == 1 => Positions::First,
                (Form::Multimodal, _) => Positions::Streams,
                _ => Positions::Each,
            };
            let [cos, sin] = [member.input(form.cos())?, member.input(form.sin())?];
            return Some(Some(Angles { cos, sin, ids, positions, pairs: attrs.pairs }));
        }
        if !self.attrs.rotary {
            return Some(None);
        }
        let attention = &members[0];
        let [cos, sin] = [attention.input(slot::COS)?, attention.input(slot::SIN)?];
        let ids = attention.input(slot::POSITIONS);
        Some(Some(Angles { cos, sin, ids, positions: Positions::Cache, pairs: self.attrs.pairs }))
    }

    /// The weights that normalise query or key; `None` where they are of another type or size.
    fn weight(&self, members: &[Member<'_>], d: &Dims, i: usize) -> Option<(DevPtr, f32)> {
        let own = members[0].input([slot::Q_NORM, slot::K_NORM][i]);
        let (weight, epsilon) = match self.norms[i] {
            Some((member, epsilon)) => (members[member].input(1)?, epsilon),
            None => match own {
                Some(weight) => (weight, [self.attrs.q_epsilon, self.attrs.k_epsilon][i]),
                None => return Some((DevPtr::NULL, 0.0)),
            },
        };
        (weight.dtype == self.dtype && weight.len() == d.head).then_some((weight.ptr, epsilon))
    }

    /// Query, key, value and gate.
    fn ways(&self, members: &[Member<'_>], d: &Dims) -> Option<[Heads; 4]> {
        let (n, k) = (self.attrs.heads, self.attrs.kv_heads);
        let input = |slot: usize| members[0].input(slot);
        let query = input(slot::QUERY)?;
        let [q, k, v] = if d.packed {
            let part = |skipped, heads| self.heads(members, &self.ways[0], query, d, (skipped, heads, n + 2 * k));
            [part(0, n)?, part(n, k)?, part(n + k, k)?]
        } else {
            let part = |i: usize, tensor, heads| self.heads(members, &self.ways[i], tensor, d, (0, heads, heads));
            [part(0, query, n)?, part(1, input(slot::KEY)?, k)?, part(2, input(slot::VALUE)?, k)?]
        };
        let gate = match self.gated {
            true => self.heads(members, &self.ways[3], query, d, (0, n, n))?,
            false => NOWHERE,
        };
        Some([q, k, v, gate])
    }

    fn lengths(members: &[Member<'_>], d: &Dims, rows: usize) -> Option<(DevPtr, DevPtr, [u32; 8])> {
        let total = members[0].input(slot::TOTAL)?;
        let first = match total.ints().as_deref() {
            Some(&[total]) => u32::from(total == 1),
            _ => 2,
        };
        let sizes = [1, 1, 1, u32::try_from(rows).ok()?, d.past as u32, 0, 0, first];
        Some((members[0].input(slot::SEQLENS)?.ptr, if first == 2 { total.ptr } else { DevPtr::NULL }, sizes))
    }

    /// The parameters but for how the keys are cut.
    fn params(&self, members: &[Member<'_>], d: &Dims) -> Option<MixerParams> {
        let (attention, a) = (&members[0], &self.attrs);
        let [q, k, v, gate] = self.ways(members, d)?;
        let [keys, values] = [attention.output(slot::PRESENT_KEY)?, attention.output(slot::PRESENT_VALUE)?];
        let out = members[usize::from(self.gated)].output(0)?;
        if out.len() != d.batch * a.heads * d.head || out.dtype != self.dtype {
            return None;
        }
        let (length_data, total, lengths) = Self::lengths(members, d, keys.shape[2])?;
        let angles = self.angles(members)?;
        let [(q_weight, q_epsilon), (k_weight, k_epsilon)] = [self.weight(members, d, 0)?, self.weight(members, d, 1)?];
        let half = angles.as_ref().and_then(|t| t.cos.shape.last().copied()).unwrap_or(0);
        if 2 * half > d.head {
            return None;
        }
        let ptr = |tensor: Option<DeviceTensor<'_>>| tensor.map_or(DevPtr::NULL, |t| t.ptr);
        let sink = attention.input(slot::SINK);
        Some(MixerParams {
            q: q.ptr,
            k: k.ptr,
            v: v.ptr,
            gate: gate.ptr,
            past_key: ptr(attention.input(slot::PAST_KEY)),
            past_value: ptr(attention.input(slot::PAST_VALUE)),
            keys: keys.ptr,
            values: values.ptr,
            out: out.ptr,
            q_weight,
            k_weight,
            cos: ptr(angles.as_ref().map(|t| t.cos)),
            sin: ptr(angles.as_ref().map(|t| t.sin)),
            positions: ptr(angles.as_ref().and_then(|t| t.ids)),
            streams: self.streams.ptr(),
            sink: ptr(sink),
            partial: DevPtr::NULL,
            counters: DevPtr::NULL,
            length_data,
            total,
            lengths,
            strides: [q.strides, k.strides, v.strides, gate.strides],
            batch: d.batch as u32,
            heads: a.heads as u32,
            kv_heads: a.kv_heads as u32,
            dim: d.head as u32,
            half: half as u32,
            interleaved: u32::from(angles.as_ref().is_some_and(|t| t.pairs == Pairs::Interleaved)),
            rotary: angles.as_ref().map_or(Positions::None, |t| t.positions) as u32,
            angles: angles.as_ref().map_or(0, |t| t.cos.len() / half.max(1)) as u32,
            positions_row: angles.as_ref().and_then(|t| t.ids?.shape.last().copied()).unwrap_or(0) as u32,
            wide_angles: u32::from(angles.as_ref().is_some_and(|t| t.cos.dtype == DType::F32)),
            has_sink: u32::from(a.smooth || sink.is_some()),
            splits: 1,
            granule: 1,
            group: (a.heads / a.kv_heads) as u32,
            early: 0,
            left: a.window.checked_sub(1).map_or(-1, |left| left.min(1 << 30) as i32),
            q_epsilon,
            k_epsilon,
            scale: if a.scale == 0.0 { 1.0 / (d.head as f32).sqrt() } else { a.scale },
            softcap: a.softcap,
        })
    }

    /// Whether rows of everything can be read 16 bytes at a time, and weights before the kernel in front has ended.
    fn fits_swift(cx: &LaunchCx<'_>, p: &MixerParams) -> bool {
        let rows = [p.q, p.k, p.v, p.gate, p.past_key, p.past_value, p.keys, p.values, p.out];
        let tables = [p.q_weight, p.k_weight, p.cos, p.sin];
        let aligned = rows.iter().chain(&tables).all(|ptr| ptr.offset().is_multiple_of(16));
        let settled = [p.q_weight, p.k_weight].iter().all(|&weight| cx.settled(weight));
        let strides = p.strides.iter().flatten().all(|stride| stride % 8 == 0);
        aligned
            && settled
            && strides
            && p.half.is_multiple_of(8)
            && p.interleaved == 0
            && p.batch.max(p.heads) < 1 << 16
    }

    /// Whether lengths, angles and the cache are complete when the kernel in front begins.
    fn is_early(cx: &LaunchCx<'_>, p: &MixerParams) -> bool {
        let read = [p.length_data, p.total, p.past_key, p.past_value, p.cos, p.sin, p.positions, p.streams];
        read.iter().all(|&ptr| cx.settled(ptr))
    }
}

impl ClusterKernel for Mixer {
    fn launch(&self, cx: &mut LaunchCx<'_>, members: &[Member<'_>]) -> Result<bool> {
        if members[0].input(slot::QUERY).is_none() {
            return Ok(false);
        }
        let a = &self.attrs;
        let d = Dims::new(a, |s| members[0].input(s).map(|t| t.shape));
        if d.batch == 0 || d.rows != 1 || d.new_rows != 1 {
            return Ok(false);
        }
        let Some(mut params) = self.params(members, &d) else { return Ok(false) };
        let swift = Self::fits_swift(cx, &params);
        let fits =
            |v: &&Variant| (v.dims.0..=v.dims.1).contains(&d.head) && d.head.is_multiple_of(8) && (swift || !v.swift);
        let Some(variant) = self.variants.iter().find(fits) else { return Ok(false) };
        let group = a.heads / a.kv_heads;
        let rows = group.min(variant.rows);
        let shared = 4 * WARPS * rows * (d.head + 4);
        let device = cx.device();
        if shared + STATIC_SHARED > device.shared_limit() as usize {
            return Ok(false);
        }
        let places = d.batch * a.kv_heads * group.div_ceil(variant.rows);
        let keys = params.lengths[3] as usize;
        let most =
            (device.multiprocessors() as usize / places).min(keys.div_ceil(variant.granule)).clamp(1, MOST_PARTS);
        let counters = cx.counters(places).filter(|_| most > 1);
        let splits = if counters.is_some() { most } else { 1 };
        if splits > 1 {
            params.partial = cx.scratch(4 * places * splits * rows * (d.head + 4));
        }
        params.counters = counters.unwrap_or(DevPtr::NULL);
        (params.splits, params.granule) = (splits as u32, variant.granule as u32);
        let mut shape = linear(places * splits, THREADS);
        shape.shared = shared as u32;
        if variant.swift {
            params.early = u32::from(Self::is_early(cx, &params));
            shape.grid = [splits as u32, (places / d.batch) as u32, d.batch as u32];
        }
        cx.push(&variant.function, shape, &params)?;
        Ok(true)
    }
}
