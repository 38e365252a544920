//! The launch for the shapes at hand, if they are of one token a sequence and fit the kernel.

use super::trace::{Joint, Rows, Slot};
use super::{Fused, Member};
use crate::cuda::{DevPtr, Device, DeviceTensor, linear};
use crate::fact::axis;
use crate::kernel_params;
use crate::ops::linear_attention::recurrence;
use abi::cuda::{Function, LaunchShape};
use abi::{DType, NodeId};

kernel_params! {
    /// As in `mixer.cu`.
    pub struct MixerParams {
        q: DevPtr,
        k: DevPtr,
        v: DevPtr,
        conv_weight: DevPtr,
        conv_bias: DevPtr,
        pub conv_past: DevPtr,
        conv_present: DevPtr,
        decay: DevPtr,
        beta: DevPtr,
        gate_factor: DevPtr,
        gate_bias: DevPtr,
        pub past: DevPtr,
        present: DevPtr,
        gamma: DevPtr,
        z: DevPtr,
        y: DevPtr,
        q_stride: u64,
        k_stride: u64,
        v_stride: u64,
        k_heads: u32,
        v_heads: u32,
        heads: u32,
        dk: u32,
        dv: u32,
        group_bits: u32,
        part_bits: u32,
        channels: u32,
        taps: u32,
        conv_step: u32,
        conv_channel: u32,
        q_channel: u32,
        k_channel: u32,
        v_channel: u32,
        conv_silu: u32,
        beta_heads: u32,
        gate: u32,
        decay_f32: u32,
        beta_f32: u32,
        sigmoid_beta: u32,
        q_norm: u32,
        k_norm: u32,
        q_epsilon: f32,
        k_epsilon: f32,
        scale: f32,
        lower_bound: f32,
        epsilon: f32,
        activation: u32,
        columns: u32,
        stride: u32,
        /// Whether what `past` and `conv_past` point to may be read before the kernel's wait.
        pub early: u32,
        pad: u32,
    }
}

/// D from which on another kernel takes the states that are [E, D].
pub const SHORT: usize = 128;
/// As in `mixer.cu`.
const HEAD_THREADS: usize = 512;
const MOST_SIZE: usize = 256;
/// D and E of the states that `square.cu` takes.
const SQUARE: usize = 128;
/// Bytes of its sums, for each value head of a block.
const SQUARE_SUMS: u32 = 8 * 296 * 4;
/// Of `quarter.cu`: blocks of a value head, threads of a block and bytes of its shared memory.
const QUARTERS: usize = 4;
const QUARTER_THREADS: u32 = 128;
const QUARTER_SHARED: u32 = 3376;
/// GatedDeltaNet's norm adds this to the squares.
const L2_EPSILON: f32 = 1e-12;

/// B, Hk, Hv, D and E.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    k_heads: usize,
    v_heads: usize,
    dk: usize,
    dv: usize,
}

impl Sizes {
    /// Elements of a token's queries, keys and values.
    fn widths(&self) -> [usize; 3] {
        [self.k_heads * self.dk, self.k_heads * self.dk, self.v_heads * self.dv]
    }
}

/// The members by their nodes.
struct Members<'m, 'a> {
    nodes: &'m [NodeId],
    members: &'m [Member<'a>],
}

impl<'m, 'a> Members<'m, 'a> {
    fn of(&self, id: NodeId) -> Option<&'m Member<'a>> {
        self.members.get(self.nodes.iter().position(|&node| node == id)?)
    }

    fn input(&self, (id, slot): Slot) -> Option<DeviceTensor<'a>> {
        self.of(id)?.input(slot)
    }
}

/// Where a token's queries, keys or values begin, elements to the next token's, and the convolution's channel of the first.
#[derive(Clone, Copy)]
struct Part {
    ptr: DevPtr,
    stride: usize,
    channel: usize,
}

/// Whether `square.cu` takes it, and `quarter.cu`.
fn square_fits(sizes: &Sizes, params: &MixerParams) -> bool {
    let conv = !params.conv_weight.is_null() && params.taps == 4;
    // A Run's tensors and its workspace begin at multiples of 16.
    let aligned = [params.past, params.present, params.conv_weight].iter().all(|p| p.offset().is_multiple_of(16));
    sizes.dk == SQUARE && sizes.dv == SQUARE && conv && aligned && matches!(params.heads, 1 | 2)
}

/// Whether `quarter.cu`, whose blocks convolve a head's keys and queries each, takes what `square.cu` does.
fn quarter_fits(device: &Device, sizes: &Sizes) -> bool {
    let blocks = sizes.batch * sizes.v_heads * QUARTERS;
    sizes.v_heads == sizes.k_heads && blocks <= 2 * device.multiprocessors() as usize
}

fn ptr(tensor: Option<DeviceTensor<'_>>) -> DevPtr {
    tensor.map_or(DevPtr::NULL, |tensor| tensor.ptr)
}

impl Fused {
    /// The launch, or nothing where the members shall run one by one.
    pub(super) fn prepared(
        &self,
        device: &Device,
        members: &[Member<'_>],
    ) -> Option<(&Function, LaunchShape, MixerParams)> {
        let members = Members { nodes: &self.nodes, members };
        let sizes = self.sizes(members.of(self.mixer.core)?)?;
        let parts = self.parts(&members, &sizes)?;
        let mut params = self.base(&members, &sizes, &parts)?;
        self.add_conv(&members, &sizes, &mut params)?;
        self.add_gates(&members, &sizes, &mut params)?;
        self.add_norm(&members, &sizes, &mut params)?;
        let shares = if params.conv_weight.is_null() { sizes.v_heads / sizes.k_heads } else { 1 };
        params.heads = (sizes.v_heads / sizes.k_heads / shares) as u32;
        let square = self.square.as_ref().filter(|_| square_fits(&sizes, &params));
        if let (Some(_), Some(quarter), true) = (square, &self.quarter, quarter_fits(device, &sizes)) {
            let mut shape = linear(sizes.batch * sizes.v_heads * QUARTERS, QUARTER_THREADS);
            shape.shared = QUARTER_SHARED;
            return Some((quarter, shape, params));
        }
        if let Some(square) = square {
            let mut shape = linear(sizes.batch * sizes.k_heads, params.heads * HEAD_THREADS as u32);
            shape.shared = params.heads * SQUARE_SUMS;
            return Some((square, shape, params));
        }
        let (at_once, shared) = self.geometry(device, &sizes, &mut params)?;
        let mut shape = linear(sizes.batch * sizes.k_heads * shares, (at_once * HEAD_THREADS) as u32);
        shape.shared = shared;
        let long = self.long.as_ref().filter(|_| sizes.dk > SHORT);
        Some((long.unwrap_or(&self.function), shape, params))
    }

    /// The sizes, if there is one token a sequence and queries and keys have as many heads.
    fn sizes(&self, core: &Member<'_>) -> Option<Sizes> {
        let query = core.input(0)?.shape;
        let sizes = if !self.core.delta_net {
            let (key, value) = (core.input(1)?.shape, core.input(2)?.shape);
            let dk = query[2] / self.core.q_heads;
            let sizes = Sizes {
                batch: query[0],
                k_heads: self.core.q_heads,
                v_heads: self.core.v_heads,
                dk,
                dv: value[2] / self.core.v_heads,
            };
            (query[1] == 1 && key[2] == query[2]).then_some(sizes)?
        } else if self.core.packed {
            let &[batch, v_heads, dv, dk] = core.input(6)?.shape else { return None };
            let (width, lead) = query.split_last()?;
            let k_heads = (width - v_heads * dv) / (2 * dk);
            (lead.iter().product::<usize>() == batch).then_some(Sizes { batch, k_heads, v_heads, dk, dv })?
        } else {
            let value = core.input(2)?.shape;
            let batch = core.output(1).or(core.input(6)).map_or(query[0], |state| state.shape[0]);
            let ([lead @ .., k_heads, dk], [.., v_heads, dv]) = (query, value) else { return None };
            let sizes = Sizes { batch, k_heads: *k_heads, v_heads: *v_heads, dk: *dk, dv: *dv };
            (lead.iter().product::<usize>() == batch).then_some(sizes)?
        };
        let Sizes { batch, k_heads, v_heads, dk, dv } = sizes;
        let fits = batch > 0 && k_heads > 0 && v_heads.is_multiple_of(k_heads);
        let sized = |n: usize| (1..=MOST_SIZE).contains(&n);
        (fits && v_heads > 0 && sized(dk) && sized(dv) && batch * v_heads < 1 << 20).then_some(sizes)
    }

    /// Queries, keys and values.
    fn parts(&self, members: &Members<'_, '_>, sizes: &Sizes) -> Option<[Part; 3]> {
        let widths = sizes.widths();
        let Some(joint) = &self.mixer.joint else {
            let mut parts = [Part { ptr: DevPtr::NULL, stride: 0, channel: 0 }; 3];
            for ((part, rows), width) in parts.iter_mut().zip(&self.mixer.rows).zip(widths) {
                let x = self.of_type(members.input(rows.read)?)?;
                *part = (x.len() == sizes.batch * width).then_some(Part { ptr: x.ptr, stride: width, channel: 0 })?;
            }
            return Some(parts);
        };
        let channels = widths.iter().sum();
        let x = self.of_type(members.input(joint.read)?)?;
        let whole =
            x.len() == sizes.batch * channels && self.moves_nothing(members) && self.splits(members, joint, sizes);
        let bytes = self.dtype.bytes(1)?;
        let part = |i: usize| {
            let before = (0..3).filter(|&j| joint.slots[j] < joint.slots[i] || (joint.split.is_none() && j < i));
            let channel = before.map(|j| widths[j]).sum();
            Part { ptr: x.ptr.plus(channel * bytes), stride: channels, channel }
        };
        whole.then(|| [0, 1, 2].map(part))
    }

    fn of_type<'a>(&self, tensor: DeviceTensor<'a>) -> Option<DeviceTensor<'a>> {
        (tensor.dtype == self.dtype).then_some(tensor)
    }

    /// Whether the Split gives each sequence's row in three pieces.
    fn splits(&self, members: &Members<'_, '_>, joint: &Joint, sizes: &Sizes) -> bool {
        let Some(split) = joint.split.map(|id| members.of(id)) else { return true };
        let fits = |split: &Member<'_>| {
            let shape = split.input(0)?.shape;
            let at = axis(self.split_axis, shape.len())?;
            let rows = shape[..at].iter().product::<usize>() == sizes.batch && shape[at + 1..].iter().all(|&d| d == 1);
            let piece = |i: usize| Some(split.output(joint.slots[i])?.len() == sizes.batch * sizes.widths()[i]);
            Some(rows && piece(0)? && piece(1)? && piece(2)?)
        };
        split.and_then(fits) == Some(true)
    }

    /// Whether the transposes only move dims of 1.
    fn moves_nothing(&self, members: &Members<'_, '_>) -> bool {
        self.mixer.transposes.iter().zip(&self.perms).all(|(&id, perm)| {
            let Some(shape) = members.input((id, 0)).map(|x| x.shape) else { return false };
            let order: Vec<usize> = match perm {
                Some(perm) => perm.iter().map(|&d| d as usize).collect(),
                None => (0..shape.len()).rev().collect(),
            };
            let moved: Vec<_> = order.into_iter().filter(|&d| shape.get(d).is_some_and(|&n| n != 1)).collect();
            moved.is_sorted()
        })
    }

    /// Everything that is neither the convolution's nor the gates' nor the output norm's.
    fn base(&self, members: &Members<'_, '_>, sizes: &Sizes, parts: &[Part; 3]) -> Option<MixerParams> {
        let core = members.of(self.mixer.core)?;
        let [query, key, _] = &self.mixer.rows;
        let norms = [self.row_norm(members, query, sizes)?, self.row_norm(members, key, sizes)?];
        let epsilon = if self.core.l2_norm { L2_EPSILON } else { 0.0 };
        let past = core.input(if self.core.delta_net { 6 } else { 3 });
        let output = members.of(self.mixer.last())?.output(0)?;
        let [q, k, v] = *parts;
        let wanted = sizes.batch * sizes.v_heads * sizes.dv;
        (output.len() == wanted && output.dtype == self.dtype).then_some(MixerParams {
            q: q.ptr,
            k: k.ptr,
            v: v.ptr,
            conv_weight: DevPtr::NULL,
            conv_bias: DevPtr::NULL,
            conv_past: DevPtr::NULL,
            conv_present: DevPtr::NULL,
            decay: DevPtr::NULL,
            beta: DevPtr::NULL,
            gate_factor: DevPtr::NULL,
            gate_bias: DevPtr::NULL,
            past: ptr(past),
            present: ptr(core.output(1)),
            gamma: DevPtr::NULL,
            z: DevPtr::NULL,
            y: output.ptr,
            q_stride: q.stride as u64,
            k_stride: k.stride as u64,
            v_stride: v.stride as u64,
            k_heads: sizes.k_heads as u32,
            v_heads: sizes.v_heads as u32,
            heads: 1,
            dk: sizes.dk as u32,
            dv: sizes.dv as u32,
            group_bits: 0,
            part_bits: 0,
            channels: 0,
            taps: 1,
            conv_step: 0,
            conv_channel: 0,
            q_channel: q.channel as u32,
            k_channel: k.channel as u32,
            v_channel: v.channel as u32,
            conv_silu: u32::from(self.conv_silu),
            beta_heads: 1,
            gate: 0,
            decay_f32: 0,
            beta_f32: 0,
            sigmoid_beta: 0,
            q_norm: norms[0],
            k_norm: norms[1],
            q_epsilon: epsilon,
            k_epsilon: epsilon,
            scale: recurrence::scale(self.core.scale, sizes.dk) * query.scale,
            lower_bound: self.core.lower_bound,
            epsilon: self.norm.epsilon,
            activation: self.norm.activation,
            columns: 0,
            stride: 0,
            early: 0,
            pad: 0,
        })
    }

    /// Whether heads of a query or key are normalised; `None` when the norm is not one of heads.
    fn row_norm(&self, members: &Members<'_, '_>, rows: &Rows, sizes: &Sizes) -> Option<u32> {
        let Some(id) = rows.norm else { return Some(u32::from(self.core.l2_norm)) };
        (members.input((id, 0))?.shape.last() == Some(&sizes.dk)).then_some(1)
    }

    fn add_conv(&self, members: &Members<'_, '_>, sizes: &Sizes, params: &mut MixerParams) -> Option<()> {
        let Some(id) = self.mixer.conv() else { return Some(()) };
        let conv = members.of(id)?;
        let weight = self.of_type(conv.input(1)?)?;
        let &[channels, 1, taps] = weight.shape else { return None };
        if channels != sizes.widths().iter().sum::<usize>() {
            return None;
        }
        let length = taps - 1;
        (params.conv_weight, params.conv_bias) = (weight.ptr, ptr(conv.input(2)));
        // Without a state there is nothing to carry.
        let state = |tensor: Option<DeviceTensor<'_>>| ptr(tensor.filter(|_| length > 0));
        (params.conv_past, params.conv_present) = (state(conv.input(3)), state(conv.output(1)));
        (params.channels, params.taps) = (channels as u32, taps as u32);
        let steps = if self.conv_last { [channels, 1] } else { [1, length] };
        [params.conv_step, params.conv_channel] = steps.map(|n| n as u32);
        Some(())
    }

    fn add_gates(&self, members: &Members<'_, '_>, sizes: &Sizes, params: &mut MixerParams) -> Option<()> {
        let [decay, beta] = self.mixer.gates;
        let heads = sizes.batch * sizes.v_heads;
        if let Some(slot) = decay.filter(|_| self.core.rule.decay) {
            let decay = members.input(slot)?;
            params.decay = (decay.len() == heads).then_some(decay.ptr)?;
            params.decay_f32 = self.is_f32(&decay)?;
            let (kind, factor, bias) = match self.mixer.gate {
                Some(gate) => (1, members.input((gate, 2)), members.input((gate, 1))),
                None => (self.core.gate, members.input((self.mixer.core, 7)), members.input((self.mixer.core, 8))),
            };
            if kind > 0 {
                let of_heads = |t: Option<DeviceTensor<'_>>| {
                    t.filter(|t| t.dtype == DType::F32 && t.len() == sizes.v_heads).map(|t| t.ptr)
                };
                (params.gate, params.gate_factor, params.gate_bias) = (kind, of_heads(factor)?, of_heads(bias)?);
            }
        }
        if let Some(slot) = beta.filter(|_| self.core.rule.delta) {
            let beta = members.input(slot)?;
            params.beta = beta.ptr;
            params.beta_heads = if beta.len() == heads { sizes.v_heads as u32 } else { 1 };
            params.beta_f32 = self.is_f32(&beta)?;
            params.sigmoid_beta = u32::from(self.mixer.gate.is_some() || self.core.sigmoid_beta);
            (beta.len() == sizes.batch * params.beta_heads as usize).then_some(())?;
        }
        Some(())
    }

    /// Whether a gate is f32 rather than of the query's type.
    fn is_f32(&self, gate: &DeviceTensor<'_>) -> Option<u32> {
        (gate.dtype == DType::F32 || gate.dtype == self.dtype).then_some(u32::from(gate.dtype == DType::F32))
    }

    fn add_norm(&self, members: &Members<'_, '_>, sizes: &Sizes, params: &mut MixerParams) -> Option<()> {
        let Some(id) = self.mixer.norm else { return Some(()) };
        let (gamma, z) = (self.of_type(members.input((id, 1))?)?, self.of_type(members.input((id, 2))?)?);
        (params.gamma, params.z) = (gamma.ptr, z.ptr);
        (gamma.len() == sizes.dv && z.len() == sizes.batch * sizes.v_heads * sizes.dv).then_some(())
    }

    /// How threads share a head's state; heads at once and bytes of dynamic shared memory.
    fn geometry(&self, device: &Device, sizes: &Sizes, params: &mut MixerParams) -> Option<(usize, u32)> {
        if self.core.delta_net {
            return Some((1, 0));
        }
        let width = 16 / self.state_bytes;
        let groups = sizes.dv.div_ceil(width).next_power_of_two();
        params.group_bits = groups.trailing_zeros();
        let parts = (HEAD_THREADS / sizes.dv.next_power_of_two()).min(32);
        params.part_bits = parts.trailing_zeros();
        let columns = sizes.dv.next_multiple_of(width);
        // Padded, so that threads that read different slots of neighbouring columns meet in no bank.
        let stride = (2 * columns).next_multiple_of(32) + (32 / parts).max(4);
        (params.columns, params.stride) = (columns as u32, stride as u32);
        let slots = (HEAD_THREADS / groups).min(HEAD_THREADS / 32);
        let bytes = slots * stride * size_of::<f32>();
        let most = device.shared_limit() as usize / bytes;
        let at_once = if self.state_bytes == 2 { 2 } else { 1 };
        let at_once = at_once.min(params.heads as usize).min(most);
        (at_once > 0).then_some((at_once, (at_once * bytes) as u32))
    }
}
