//! GatedDeltaNet on CUDA devices: LinearAttention's kernels, which compute its gates and norms on the way.

use super::Gate;
use super::cpu::dims;
use crate::build::BuildCx;
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx};
use crate::ops::linear_attention::Rule;
use crate::ops::linear_attention::cuda::{Call, Gates, Kernels};
use crate::ops::linear_attention::recurrence;
use abi::{DType, Result};
use std::sync::Arc;

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let dtype = cx.required(0)?.dtype;
    Ok(Box::new(GatedDeltaNet {
        kernels: Kernels::new(device, dtype)?,
        rule: Rule::of(cx),
        gate: Gate::of(cx),
        lower_bound: cx.float("gate_lower_bound", -5.0),
        sigmoid_beta: cx.string("beta_activation", "none") == "sigmoid",
        l2_norm: cx.int("qk_l2_norm", 0) == 1,
        scale: cx.float("scale", 0.0),
        packed: !cx.has_input(1),
    }))
}

struct GatedDeltaNet {
    kernels: Kernels,
    rule: Rule,
    gate: Gate,
    lower_bound: f32,
    sigmoid_beta: bool,
    l2_norm: bool,
    /// 0: 1 / sqrt(D).
    scale: f32,
    /// Query holds query, key and value.
    packed: bool,
}

impl DeviceKernel for GatedDeltaNet {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let shape = |slot: usize| cx.input(slot).map_or(&[][..], |tensor| tensor.shape);
        let dims = dims(self.packed, shape(0), shape(2), shape(3), shape(6));
        let (keys, values) = (dims.q_heads * dims.dk, dims.v_heads * dims.dv);
        let query = cx.required(0);
        let [q, k, v] = if self.packed {
            let size = query.dtype.bytes(1).unwrap_or(1);
            [0, keys, 2 * keys].map(|skip| (query.ptr.plus(skip * size), 2 * keys + values))
        } else {
            [(query.ptr, keys), (cx.input_ptr(1), keys), (cx.input_ptr(2), values)]
        };
        let decay = cx.input(4).filter(|_| self.rule.decay);
        let beta = cx.input(5).filter(|_| self.rule.delta);
        let per_key = decay.is_some_and(|decay| decay.len() != dims.tokens * dims.v_heads);
        let gates = Gates {
            f32: [decay, beta].into_iter().flatten().any(|gate| gate.dtype == DType::F32),
            kind: match self.gate {
                Gate::Given => 0,
                Gate::Softplus => 1,
                Gate::Sigmoid => 2,
            },
            a_log: cx.input_ptr(7),
            dt_bias: cx.input_ptr(8),
            bias_per_key: per_key && cx.input(8).is_some_and(|bias| bias.len() != dims.v_heads),
            lower_bound: self.lower_bound,
            sigmoid_beta: self.sigmoid_beta,
            l2_norm: self.l2_norm,
        };
        let call = Call {
            q,
            k,
            v,
            decay: decay.map_or(DevPtr::NULL, |t| t.ptr),
            beta: beta.map_or(DevPtr::NULL, |t| t.ptr),
            cu_seqlens: cx.input_ptr(3),
            past: cx.input_ptr(6),
            present: cx.output_ptr(1),
            out: cx.output_ptr(0),
            tokens: dims.tokens,
            sequences: dims.batch,
            heads: [dims.q_heads, dims.q_heads, dims.v_heads],
            dk: dims.dk,
            dv: dims.dv,
            beta_heads: dims.v_heads,
            state: DType::F32,
            v_major: true,
            per_key,
            scale: recurrence::scale(self.scale, dims.dk),
            gates,
        };
        self.kernels.push(cx, &call)
    }
}
