//! ai.onnx Scan: <https://onnx.ai/onnx/operators/onnx__Scan.html>, where its body is a step of the gated delta rule, as
//! exporters write it that know standard ops only. A plan runs it as LinearAttention.
//!
//! T steps, B batch, H heads, D key size, E value size. State [B, H, D, E]; in any order query and key [T, B, H, D],
//! value [T, B, H, E], decay [T, B, H, 1] or [T, B, H, D] or [T, B, H], beta [T, B, H] or [T, B, H, 1]; outputs: the
//! state, and [T, B, H, E].

mod body;
pub mod lower;

use crate::build::BuildCx;
use crate::cuda::{Device, DeviceKernel};
use crate::fact::Fact;
use crate::kernel::Kernel;
use crate::op::{Decline, NodeCx, OpDef};
use crate::shapes::ranked;
use abi::{Attr, DType, Dim, Error, Node, Result};
use body::Role;
use std::sync::Arc;

/// The definitions.
pub const OPS: &[OpDef] = &[OpDef::new("", "Scan", (9, u32::MAX), claim, infer, build).with_cuda(build_on)];

const FLOATS: &[DType] = &[DType::F32, DType::F16, DType::BF16];
/// The state, then what is scanned.
const INPUTS: usize = 6;
const STATE: usize = 0;

/// What a node scans.
struct Steps {
    /// Of the inputs behind the state.
    roles: [Role; INPUTS - 1],
    /// H.
    heads: usize,
}

impl Steps {
    /// Reads the node.
    fn of(cx: &NodeCx) -> Result<Self, Decline> {
        let Some(Attr::Graph(body)) = cx.node().attr("body") else {
            return Err(cx.decline("attribute 'body'", "nothing", "a graph"));
        };
        check_form(cx)?;
        let state = cx.required(STATE)?;
        let state_dims = ranked(cx, STATE, "state", 4)?;
        let Dim::Known(heads) = state_dims[1] else {
            return Err(cx.decline("input 0 (state), dim 1", "an unknown number", "a known number of heads"));
        };
        let mut shapes = Vec::with_capacity(INPUTS - 1);
        for slot in 1..INPUTS {
            cx.check_dtype(slot, "scanned", std::slice::from_ref(&state.dtype))?;
            let fact = cx.required(slot)?;
            let shape = fact.shape.as_deref().filter(|shape| (3..=4).contains(&shape.len()));
            let shape = shape.ok_or_else(|| {
                let got = fact.rank().map_or_else(|| "an unknown rank".into(), |rank| format!("rank {rank}"));
                cx.decline(format_args!("input {slot}"), got, "rank 3 or 4: steps, batch, heads and features")
            })?;
            shapes.push(&shape[1..]);
        }
        let roles = body::roles(body, &shapes, &state_dims[2]);
        let roles = roles.ok_or_else(|| {
            cx.decline(
                "attribute 'body'",
                "other arithmetic",
                "a step of the gated delta rule, which alone has a kernel",
            )
        })?;
        Ok(Self { roles, heads })
    }

    /// The node's input slot of a role.
    fn slot(&self, role: Role) -> usize {
        1 + self.roles.iter().position(|&r| r == role).expect("each role is there once")
    }
}

/// Declines what scans backwards, along other axes, or with values from outside.
fn check_form(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(INPUTS)?;
    if cx.inputs_len() != INPUTS || cx.node().outputs.len() > 2 {
        let got = format!("{} inputs and {} outputs", cx.inputs_len(), cx.node().outputs.len());
        return Err(cx.decline("inputs and outputs", got, "a state, five scanned inputs, and two outputs"));
    }
    cx.check_int("num_scan_inputs", 0, &[INPUTS as i64 - 1])?;
    cx.check_dtype(STATE, "state", FLOATS)?;
    for name in ["scan_input_directions", "scan_output_directions", "scan_input_axes", "scan_output_axes"] {
        if let Some(given) = cx.ints(name).filter(|given| given.iter().any(|&v| v != 0)) {
            return Err(cx.decline(format_args!("attribute '{name}'"), format_args!("{given:?}"), "zeros"));
        }
    }
    if !cx.node().implicit_inputs.is_empty() {
        return Err(cx.decline(
            "attribute 'body'",
            "values of the enclosing graph",
            "a body that reads its inputs alone",
        ));
    }
    Ok(())
}

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    Steps::of(cx).map(|_| ())
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let state = cx.required(STATE)?;
    let steps = Steps::of(cx).map_err(|decline| Error::Internal(decline.0))?;
    let mut out = ranked(cx, steps.slot(Role::Value), "value", 4)?;
    out[2] = Dim::Known(steps.heads);
    Ok(vec![Fact::of(state.dtype, state.shape.clone()), Fact::new(state.dtype, out)])
}

fn lowered<T>(cx: &BuildCx) -> Result<T> {
    Err(Error::Internal(format!("{} reached a plan", cx.label())))
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    lowered(cx)
}

fn build_on(cx: &mut BuildCx, _: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    lowered(cx)
}

/// Whether a node is one.
fn is_scan(node: &Node) -> bool {
    node.domain.is_empty() && node.op_type == "Scan"
}
